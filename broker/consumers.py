"""Who looks into a volume whose FUSE program has ended, and has another now: the other containers of its pod.

A container that has the placeholder (`targets`), with propagation, sees the new filesystem as the target does. One that
was started when a filesystem lay on it has that filesystem alone, which is dead now. So wherever a mount namespace of
the pod still sees the dead one, a copy of the new mount takes its place; where it sees a part of the dead one, a
subPath, the same part of the new one does.

For the mounter's children that are in the broker's own mount namespace.
"""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from broker import cgroups, connections, mounts, syscalls
from broker.children import in_child
from broker.descriptors import Descriptors
from broker.targets import attach, private_copy, replace

#: What a mount keeps of the one whose place it takes, by what mountinfo calls it.
_ATTRIBUTES = {
    b"ro": syscalls.MOUNT_ATTR_RDONLY,
    b"noexec": syscalls.MOUNT_ATTR_NOEXEC,
    b"nosymfollow": syscalls.MOUNT_ATTR_NOSYMFOLLOW,
}
#: The path of a filesystem's root in it.
_WHOLE = b"/"
#: What is mounted of a filesystem is in that itself.
_WITHIN = (
    syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_XDEV
)


def restore(opened: Descriptors, target: bytes, dead: int, mount: int, but: int, seconds: int, *, served: bool) -> None:
    """Show the filesystem of `mount` wherever a container of the pod of `target` has the `dead` device.

    Not in the mount namespace with the inode `but`. Parts only if the filesystem is `served`, for its program is asked
    for them. What can't be done is left as it is: such a container has to be started again. Takes no longer than so
    many seconds for each, unless something that hangs is in the way.
    """
    if not (pod := _pod_of(target)):
        return
    for parts in (False, True) if served else (False,):  # those that wait for the program come last
        for namespace, roots in _namespaces(opened.proc, pod, dead, parts):
            with ExitStack() as held, suppress(OSError):
                held.callback(os.close, namespace)
                if os.fstat(namespace).st_ino == but:
                    continue
                held.callback(signal.alarm, 0)
                copies = []
                for root in roots:
                    signal.alarm(seconds)
                    with suppress(OSError):
                        copies.append((root, _copy(mount, root)))
                        held.callback(os.close, copies[-1][1])
                signal.alarm(seconds)
                _in_namespace(opened, namespace, dead, copies)


def _copy(mount: int, root: bytes) -> int:
    """Return a copy of the mount, attached nowhere: all of it, or what is at that path of its filesystem, and below.

    The program is asked for that, which may never answer: it is a child that asks, without following any link.
    Raises OSError.
    """
    if root == _WHOLE:
        return private_copy(mount)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def look() -> None:
        entry = syscalls.openat2(mount, root.lstrip(b"/"), os.O_PATH | os.O_CLOEXEC, 0, _WITHIN)
        socket.send_fds(theirs, [b"copy"], [private_copy(entry)])

    with ours, theirs:
        in_child(look, [mount, theirs.fileno()], [syscalls.CAP_SYS_ADMIN, syscalls.CAP_DAC_READ_SEARCH])
        _, (copy,), _, _ = socket.recv_fds(ours, 16, 1)
    return copy


def _pod_of(target: bytes) -> bytes:
    """Return the UID of the pod, by the path that kubelet gives its volumes; empty for any other path."""
    parts = target.split(b"/")
    return parts[1] if parts[0] == b"pods" and len(parts) > 1 else b""


def _namespaces(proc: int, pod: bytes, dead: int, parts: bool) -> Iterator[tuple[int, list[bytes]]]:
    """Yield each mount namespace of the pod's processes in which the dead device is, whole or parts of it; with a path
    in its filesystem for each of these mounts."""
    seen = set()
    for pid in connections.processes(proc):
        try:
            is_own = parts and pid == os.getpid()  # kubelet has made its binds for subPaths there
            if not (is_own or is_in_pod(proc, pid, pod)):
                continue
            namespace = os.open(f"{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
            inode = os.fstat(namespace).st_ino
            table = [] if inode in seen else mounts.table(pid)
        except OSError:
            continue  # it has ended
        seen.add(inode)
        if roots := [each.root for each in table if each.device == dead and (each.root != _WHOLE) == parts]:
            yield namespace, roots
        else:
            os.close(namespace)


def is_in_pod(proc: int, pid: int, pod: bytes) -> bool:
    """Whether a process is in the cgroup of the pod. Raises OSError."""
    descriptor = os.open(f"{pid}/cgroup", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    with open(descriptor, "rb", buffering=0) as file:
        return cgroups.pod_of(file.readall()).encode() == pod


def _in_namespace(opened: Descriptors, namespace: int, dead: int, copies: list[tuple[bytes, int]]) -> None:
    """Put the copies in place of the dead mounts of the same part in that mount namespace. Raises OSError."""

    def restore_here() -> None:
        syscalls.setns(namespace, syscalls.CLONE_NEWNS)
        os.fchdir(opened.proc)
        syscalls.capset(syscalls.CAP_SYS_ADMIN)
        left = copies.copy()
        for mount in mounts.table():
            found = next((each for each in left if (dead, each[0]) == (mount.device, mount.root)), None)
            if found:
                with mounts.opened(mount.place) as entry:
                    if mounts.look(entry).device == dead and syscalls.is_mount_root(entry):
                        left.remove(found)
                        _put(entry, found[1], mount.flags.split(b","))

    keep = [namespace, opened.proc, *(copy for _, copy in copies)]
    in_child(restore_here, keep, [syscalls.CAP_SYS_ADMIN, syscalls.CAP_SYS_CHROOT])


def _put(entry: int, copy: int, flags: list[bytes]) -> None:
    """Put the copy in place of a dead mount with these flags, or on it, if that must stay. Raises OSError."""
    attributes = sum(attribute for name, attribute in _ATTRIBUTES.items() if name in flags)
    syscalls.mount_setattr(copy, b"", syscalls.AT_EMPTY_PATH, attributes)
    if not replace(entry, copy):
        attach(entry, copy)
