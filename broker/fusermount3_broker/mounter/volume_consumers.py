"""Restore a volume in the other containers of its pod when a new FUSE program replaces one that has ended.

A container that has the placeholder (`volume_targets`), with propagation, sees the new filesystem as the target does.
A container started while a filesystem was mounted on the placeholder has only that filesystem, which is dead now. So
wherever a mount namespace of the pod still has the dead filesystem, a copy of the new mount replaces it; where it has a
part of the dead one, a subPath, the same part of the new one does.

For the mounter's children that are in the broker's own mount namespace.
"""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import fuse_connections, mount_tree, pods
from fusermount3_broker.mounter.child_processes import in_child
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_broker.mounter.volume_targets import attach, private_copy, replace

#: The attributes that a mount takes over from the one that it replaces, by their names in mountinfo.
_ATTRIBUTES = {
    b"ro": syscalls.MOUNT_ATTR_RDONLY,
    b"noexec": syscalls.MOUNT_ATTR_NOEXEC,
    b"nosymfollow": syscalls.MOUNT_ATTR_NOSYMFOLLOW,
}
#: The path of a filesystem's root within the filesystem.
_WHOLE = b"/"
#: A subPath lies within the filesystem itself.
_WITHIN = (
    syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_XDEV
)


def restore(opened: Descriptors, target: bytes, dead: int, mount: int, but: int, seconds: int, *, served: bool) -> None:
    """Attach the filesystem of `mount` wherever a container of the pod of `target` has the `dead` device.

    Skips the mount namespace with the inode `but`. Replaces parts only if the filesystem is `served`, because this
    queries its FUSE program. Leaves mounts that can't be replaced as they are: such a container has to be restarted.
    Takes no longer than `seconds` for each, unless a filesystem in the way hangs.
    """
    if not (pod := pods.pod_of_target(target)):
        return
    for parts in (False, True) if served else (False,):  # parts wait for the FUSE program, so they come last
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
    """Return a detached copy of the mount: all of it, or the subtree at that path of its filesystem.

    A subtree needs the FUSE program, which may never answer: so a forked child looks it up, without following links.
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


def _namespaces(proc: int, pod: bytes, dead: int, parts: bool) -> Iterator[tuple[int, list[bytes]]]:
    """Yield each mount namespace of the pod's processes that has the dead device, whole or in parts, with the path in
    its filesystem for each of these mounts."""
    seen = set()
    for pid in fuse_connections.processes(proc):
        try:
            is_own = parts and pid == os.getpid()  # kubelet makes its bind mounts for subPaths there
            if not (is_own or pods.is_in_pod(proc, pid, pod)):
                continue
            namespace = os.open(f"{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
            inode = os.fstat(namespace).st_ino
            table = [] if inode in seen else mount_tree.table(pid)
        except OSError:
            continue  # it has ended
        seen.add(inode)
        if roots := [each.root for each in table if each.device == dead and (each.root != _WHOLE) == parts]:
            yield namespace, roots
        else:
            os.close(namespace)


def _in_namespace(opened: Descriptors, namespace: int, dead: int, copies: list[tuple[bytes, int]]) -> None:
    """Replace the dead mounts in that mount namespace with the copies of the same part. Raises OSError."""

    def restore_here() -> None:
        syscalls.setns(namespace, syscalls.CLONE_NEWNS)
        os.fchdir(opened.proc)
        syscalls.capset(syscalls.CAP_SYS_ADMIN)
        left = copies.copy()
        for mount in mount_tree.table():
            found = next((each for each in left if (dead, each[0]) == (mount.device, mount.root)), None)
            if found:
                with mount_tree.opened(mount.place) as entry:
                    if mount_tree.look(entry).device == dead and syscalls.is_mount_root(entry):
                        left.remove(found)
                        _attach(entry, found[1], mount.flags.split(b","))

    keep = [namespace, opened.proc, *(copy for _, copy in copies)]
    in_child(restore_here, keep, [syscalls.CAP_SYS_ADMIN, syscalls.CAP_SYS_CHROOT])


def _attach(entry: int, copy: int, flags: list[bytes]) -> None:
    """Replace a dead mount that has these flags with the copy, or cover it if it can't be replaced. Raises OSError."""
    attributes = sum(attribute for name, attribute in _ATTRIBUTES.items() if name in flags)
    syscalls.mount_setattr(copy, b"", syscalls.AT_EMPTY_PATH, attributes)
    if not replace(entry, copy):
        attach(entry, copy)
