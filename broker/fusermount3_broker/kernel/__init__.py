"""Interfaces to the Linux kernel, for all processes. These modules query the kernel and decide nothing.

`syscalls` has the system calls that Python lacks, by the kernel's names. `features` tests for what older kernels lack.
`capabilities` drops capabilities. `cgroups` finds the container or pod in a cgroup's name. `socket_probe` tests whether
a Unix socket has a listener. `error_texts` has the errors of system calls as people read them. `ownership_marks` marks
the files that the broker makes in directories of others.
"""
