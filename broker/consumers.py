"""Who looks into a volume whose FUSE program has ended, and has another now: the other containers of its pod.

A container that has the placeholder (`targets`), with propagation, sees the new filesystem as the target does. One that
was started when a filesystem lay on it has that filesystem alone, which is dead now. So wherever a mount namespace of
the pod still sees the dead one, a copy of the new mount takes its place.

For the mounter's children that are in the broker's own mount namespace.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from broker import cgroups, connections, mounts, syscalls
from broker.children import in_child
from broker.descriptors import Descriptors
from broker.mounts import Mount
from broker.targets import attach, private_copy, replace

#: What a mount keeps of the one whose place it takes, by what mountinfo calls it.
_ATTRIBUTES = {
    b"ro": syscalls.MOUNT_ATTR_RDONLY,
    b"noexec": syscalls.MOUNT_ATTR_NOEXEC,
    b"nosymfollow": syscalls.MOUNT_ATTR_NOSYMFOLLOW,
}


def restore(opened: Descriptors, target: bytes, dead: int, mount: int, but: int, seconds: int) -> None:
    """Show the filesystem of `mount` wherever a container of the pod of `target` has the `dead` device.

    Not in the mount namespace with the inode `but`. What can't be done is left as it is: such a container has to be
    started again. Takes no longer than so many seconds for each, unless something that hangs is in the way.
    """
    if not (pod := _pod_of(target)):
        return
    for namespace, number in _namespaces(opened.proc, pod, dead):
        with ExitStack() as held, suppress(OSError):
            held.callback(os.close, namespace)
            if os.fstat(namespace).st_ino == but:
                continue
            copies = []
            for _ in range(number):
                copies.append(private_copy(mount))
                held.callback(os.close, copies[-1])
            signal.alarm(seconds)
            held.callback(signal.alarm, 0)
            _in_namespace(opened, namespace, dead, copies)


def _pod_of(target: bytes) -> bytes:
    """Return the UID of the pod, by the path that kubelet gives its volumes; empty for any other path."""
    parts = target.split(b"/")
    return parts[1] if parts[0] == b"pods" and len(parts) > 1 else b""


def _namespaces(proc: int, pod: bytes, dead: int) -> Iterator[tuple[int, int]]:
    """Yield each mount namespace of the pod's processes in which the dead device is, and how many times that is."""
    seen = set()
    for pid in connections.processes(proc):
        try:
            if not is_in_pod(proc, pid, pod):
                continue
            namespace = os.open(f"{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
            inode = os.fstat(namespace).st_ino
            number = 0 if inode in seen else sum(_is_dead_root(each, dead) for each in mounts.table(pid))
        except OSError:
            continue  # it has ended
        seen.add(inode)
        if number:
            yield namespace, number
        else:
            os.close(namespace)


def is_in_pod(proc: int, pid: int, pod: bytes) -> bool:
    """Whether a process is in the cgroup of the pod. Raises OSError."""
    descriptor = os.open(f"{pid}/cgroup", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    with open(descriptor, "rb", buffering=0) as file:
        return cgroups.pod_of(file.readall()).encode() == pod


def _is_dead_root(mount: Mount, dead: int) -> bool:
    """Whether a mount has the whole dead filesystem: what is below the root of the new one, nobody can tell yet."""
    return (mount.device, mount.root) == (dead, b"/")


def _in_namespace(opened: Descriptors, namespace: int, dead: int, copies: list[int]) -> None:
    """Put the copies in place of the dead mounts in that mount namespace. Raises OSError."""

    def restore_here() -> None:
        syscalls.setns(namespace, syscalls.CLONE_NEWNS)
        os.fchdir(opened.proc)
        syscalls.capset(syscalls.CAP_SYS_ADMIN)
        left = copies.copy()
        for mount in mounts.table():
            if left and _is_dead_root(mount, dead):
                with mounts.opened(mount.place) as entry:
                    if mounts.look(entry).device == dead and syscalls.is_mount_root(entry):
                        _put(entry, left.pop(), mount.flags.split(b","))

    keep = [namespace, opened.proc, *copies]
    in_child(restore_here, keep, [syscalls.CAP_SYS_ADMIN, syscalls.CAP_SYS_CHROOT])


def _put(entry: int, copy: int, flags: list[bytes]) -> None:
    """Put the copy in place of a dead mount with these flags, or on it, if that must stay. Raises OSError."""
    attributes = sum(attribute for name, attribute in _ATTRIBUTES.items() if name in flags)
    syscalls.mount_setattr(copy, b"", syscalls.AT_EMPTY_PATH, attributes)
    if not replace(entry, copy):
        attach(entry, copy)
