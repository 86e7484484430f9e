"""The supervisor: starts the mounter, the front and the CSI plugin, and restarts each when it ends.

It keeps all the rights with which the service was started. It reads the configuration, /etc/subuid and /etc/passwd,
nothing from callers or kubelet, and from the other processes only whether they have started. It holds the descriptors
that must outlive them: listening sockets, the sockets between the processes, kubelet's directory; and the lock of the
state directory, by which there is one broker for it.

Read `daemon` first, then `processes` (the three processes, and the descriptors and arguments of each), `restarts`
(pauses between starts, failed starts), `orphans` (children that a killed mounter leaves behind) and `privilege`
(what to tell who starts the broker without its rights).
"""
