"""The broker: the daemon on the host that mounts FUSE filesystems for callers that lack the privilege to mount.

Each folder holds the code of one process, or code that processes share. Start with the process that interests you:

- `cli`: the commands that an administrator types. `serve` and `csi` become the supervisor.
- `supervisor`: starts the other processes and restarts them. It keeps its privilege and reads nothing that a caller
  sends.
- `front`: parses requests, decides them, and keeps the tables. It has no privilege.
- `mounter`: joins namespaces, mounts and unmounts. It has CAP_SYS_ADMIN, and trusts no statement of the front that it
  can check itself.
- `csi`: the CSI node plugin, which answers kubelet. It has no privilege.
- `injection`: what a container needs to reach the broker, given to it by CDI or the device plugin.

All processes share `messages` (the typed records between them), `kernel` (what Linux offers) and `service` (what any
daemon needs). A folder never imports another process's folder; tests/unit/test_imports.py asserts that.
docs/architecture.md has the whole map.
"""
