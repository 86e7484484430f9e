"""Find the processes of a Kubernetes pod. For the mounter's children."""

import os
from collections.abc import Iterator

from fusermount3_broker.kernel import cgroups
from fusermount3_broker.mounter import fuse_connections


def pod_of_target(target: bytes) -> bytes:
    """Return the UID of the pod from the path that kubelet gives one of its volumes; empty for any other path."""
    parts = target.split(b"/")
    return parts[1] if parts[0] == b"pods" and len(parts) > 1 else b""


def processes_of(proc: int, pod: bytes) -> Iterator[int]:
    """Yield the pids of the processes in the pod; none for an empty `pod`."""
    for pid in fuse_connections.processes(proc) if pod else ():
        try:
            found = is_in_pod(proc, pid, pod)
        except OSError:
            continue  # it has ended
        if found:
            yield pid


def is_in_pod(proc: int, pid: int, pod: bytes) -> bool:
    """Whether a process is in the cgroup of the pod. Raises OSError."""
    return pod_of_process(proc, pid) == pod


def pod_of_process(proc: int, pid: int) -> bytes:
    """Return the UID of the pod of a process, by its cgroup; empty if it is in none. Raises OSError."""
    descriptor = os.open(f"{pid}/cgroup", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    with open(descriptor, "rb", buffering=0) as file:
        return cgroups.pod_of(file.readall()).encode()
