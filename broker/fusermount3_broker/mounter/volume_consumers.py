"""Restore a volume in the containers of its pod: have them see the filesystem that is at its target.

A container that has the placeholder or the tombstone (`volume_targets`), with propagation, sees the new filesystem as
the target does. A container started while a filesystem was mounted there has only that filesystem, which is dead now;
one without propagation may have only the tombstone. So wherever a mount namespace of the pod still has one of these, a
copy of the new mount replaces it; where it has a part of a former filesystem, a subPath, the same part of the new one
does. Where a container of an eager volume sees the placeholder, which it should not, a later look replaces that.

Which filesystems the volume had before is known from the front. None of them is asked anything.

For the mounter's children that are in the broker's own mount namespace.
"""

import errno
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.mounter import fuse_connections, mount_tree, pods, volume_targets
from fusermount3_broker.mounter.child_processes import in_child
from fusermount3_broker.mounter.front_connection import Conversation
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_broker.mounter.mount_tree import Mount
from fusermount3_broker.mounter.volume_targets import Attached, Target, attach, private_copy, replace

#: The attributes that a mount takes over from the one that it replaces, by their names in mountinfo.
_ATTRIBUTES = {
    b"ro": syscalls.MOUNT_ATTR_RDONLY,
    b"noexec": syscalls.MOUNT_ATTR_NOEXEC,
    b"nosymfollow": syscalls.MOUNT_ATTR_NOSYMFOLLOW,
}
#: Seconds after which no further container is begun: a FUSE program may take its time for each part.
_LONGEST = 30.0
_READ = os.O_RDONLY | os.O_CLOEXEC
#: The path of a filesystem's root within the filesystem.
_WHOLE = b"/"
#: A subPath lies within the filesystem itself.
_WITHIN = (
    syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_XDEV
)


class Former(NamedTuple):
    """The filesystems whose place another one takes in containers, as device numbers with the inodes of their
    connections; and the device of the placeholder, if that is to be replaced, too. In the mount namespace with the
    inode `but`, only that of the device `tombstone` is replaced."""

    connections: dict[int, int]
    tombstone: int | None = None
    placeholder: int | None = None
    but: int = 0

    @classmethod
    def of(cls, opened: Descriptors, attached: Attached, lines: bytes) -> "Former":
        """Return what a mount that was attached so replaces; `lines` as in `mounter.StartVolumeMount`.

        Raises ValueError.
        """
        connections = {}
        for line in lines.splitlines():
            device, inode = map(int, line.split())
            connections[device] = inode
        for each in (attached.dead, attached.tombstone):
            if each is not None:
                with suppress(FileNotFoundError):  # nobody has it any more
                    connections[each] = fuse_connections.inode_of(opened.fusectl, each)
        return cls(connections, attached.tombstone)

    def has(self, mount: Mount, namespace: int) -> bool:
        """Return whether that mount may be replaced in the mount namespace with that inode."""
        if namespace == self.but:
            return mount.device == self.tombstone
        return mount.device in self.connections or self.is_placeholder(mount)

    def is_placeholder(self, mount: Mount) -> bool:
        """Return whether the mount is the placeholder. If that is gone, another tmpfs may have its number."""
        return mount.device == self.placeholder and volume_targets.is_placeholder(mount)


def restore(opened: Descriptors, target: bytes, former: Former, mount: int, seconds: int, *, served: bool) -> None:
    """Attach the filesystem of `mount` wherever a container of the pod of `target` has one of the `former` ones.

    Replaces parts only if the filesystem is `served`, because this queries its FUSE program. Leaves mounts that can't
    be replaced as they are: such a container has to be restarted. Takes no longer than `seconds` for each mount
    namespace and part, unless a filesystem in the way hangs, and begins none after `_LONGEST`.
    """
    if not (pod := pods.pod_of_target(target)) or not (former.connections or former.placeholder):
        return
    give_up = time.monotonic() + _LONGEST
    for parts in (False, True) if served else (False,):  # parts wait for the FUSE program, so they come last
        for namespace, places in _namespaces(opened, pod, former, parts):
            with ExitStack() as held, suppress(OSError):
                held.callback(os.close, namespace)
                held.callback(signal.alarm, 0)
                copies = []
                for place in places:
                    if time.monotonic() > give_up:
                        return
                    signal.alarm(seconds)
                    with suppress(OSError):
                        copies.append((place, _copy(mount, place.root)))
                        held.callback(os.close, copies[-1][1])
                signal.alarm(seconds)
                _in_namespace(opened, namespace, former, copies)


class _Place(NamedTuple):
    """A mount in a container, by what of which filesystem it has: the device, and the path of the mount's root."""

    device: int
    root: bytes


def look_again(opened: Descriptors, talk: Conversation, start: mounter.StartRestore) -> None:
    """Restore the volume whose filesystem has that device, if that is still at the target, and tell the front."""
    volume_targets.begin(opened, start.target)
    with talk.bounded("open the target"), Target(opened, start.target) as target:
        mount, tombstone, placeholder = target.served(start.device, talk.seconds)
    if fuse_connections.is_connection(opened.fusectl, start.device, start.connection):
        former = Former.of(opened, Attached(tombstone=tombstone), start.former)._replace(but=start.but)
        if start.eager:
            former = former._replace(placeholder=placeholder)
        restore(opened, start.target, former, mount, talk.seconds, served=True)
    talk.say(mounter.Restored())


def find(opened: Descriptors, talk: Conversation, start: mounter.StartFindInContainers) -> None:
    """Report whether a container of the volume's pod has a filesystem, besides that with the mount namespace `but`."""
    volume_targets.begin(opened, start.target)
    with talk.bounded("look at the containers"):
        pod = pods.pod_of_target(start.target)
        is_there = have(opened, pod, start.device, start.type, start.source, start.but)
    talk.say(mounter.Recognized(b"%d\n" % start.device if is_there else b""))


def have(opened: Descriptors, pod: bytes | None, device: int, type: bytes, source: bytes, but: int = 0) -> bool:
    """Return whether a container of the pod, or of any pod if it is None, has a filesystem of that device number, type
    and source, in another mount namespace than that with the inode `but`.

    Some runtimes have processes of their own in a pod (conmon), which see the mounts in kubelet's directory of the pod.
    """
    seen = {os.stat("self/ns/mnt", dir_fd=opened.proc).st_ino, but}
    for pid in fuse_connections.processes(opened.proc):
        with suppress(OSError):  # it has ended
            of = pods.pod_of_process(opened.proc, pid)
            if not of or pod not in (None, of):
                continue
            namespace = os.stat(f"{pid}/ns/mnt", dir_fd=opened.proc).st_ino
            if namespace in seen:
                continue
            seen.add(namespace)
            kubelets = _directory_of(opened, of)
            if any(
                mount_tree.is_filesystem(each, device, type, source) and not each.place.startswith(kubelets)
                for each in mount_tree.table(pid)
            ):
                return True
    return False


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


def _namespaces(opened: Descriptors, pod: bytes, former: Former, parts: bool) -> Iterator[tuple[int, list[_Place]]]:
    """Yield each mount namespace that has former filesystems, whole ones or `parts`, with what its mounts have of them.

    These are the namespaces of the pod's processes, but neither the host's nor that of this process, which other pods
    use, too. For parts, also the latter, but there only what lies in kubelet's directory of the pod: kubelet makes its
    bind mounts for subPaths there.
    """
    own = os.stat("self/ns/mnt", dir_fd=opened.proc).st_ino
    seen = {own}
    with suppress(PermissionError):  # a process 1 that nobody may look at
        seen.add(os.stat("1/ns/mnt", dir_fd=opened.proc).st_ino)
    if parts:
        within = _directory_of(opened, pod)
        if places := [part for place, part in _places(os.getpid(), own, former, parts) if place.startswith(within)]:
            yield os.open("self/ns/mnt", _READ, dir_fd=opened.proc), places
    for pid in fuse_connections.processes(opened.proc):
        try:
            if not pods.is_in_pod(opened.proc, pid, pod):
                continue
            namespace = os.open(f"{pid}/ns/mnt", _READ, dir_fd=opened.proc)
        except OSError:
            continue  # it has ended
        inode = os.fstat(namespace).st_ino
        places = []
        with suppress(OSError):  # it has ended
            if inode not in seen and pods.is_in_pod(opened.proc, pid, pod):  # still the same process
                places = [part for _, part in _places(pid, inode, former, parts)]
        seen.add(inode)
        if places:
            yield namespace, places
        else:
            os.close(namespace)


def _places(pid: int, namespace: int, former: Former, parts: bool) -> list[tuple[bytes, _Place]]:
    """Return where a process, in the mount namespace with that inode, has former filesystems, and what of them.

    Raises OSError.
    """
    return [
        (each.place, _Place(each.device, each.root))
        for each in mount_tree.table(pid)
        if former.has(each, namespace) and (each.root != _WHOLE) == parts
    ]


def _directory_of(opened: Descriptors, pod: bytes) -> bytes:
    """Return the path of kubelet's directory of the pod, with a slash at the end."""
    assert opened.kubelet is not None
    return os.readlink(b"self/fd/%d" % opened.kubelet) + b"/pods/" + pod + b"/"


def _in_namespace(opened: Descriptors, namespace: int, former: Former, copies: list[tuple[_Place, int]]) -> None:
    """Replace mounts in that mount namespace with the copies of what they have. Raises OSError."""

    def restore_here() -> None:
        syscalls.setns(namespace, syscalls.CLONE_NEWNS)
        os.fchdir(opened.proc)
        syscalls.capset(syscalls.CAP_SYS_ADMIN)
        left = copies.copy()
        for mount in mount_tree.table():
            found = next((each for each in left if each[0] == _Place(mount.device, mount.root)), None)
            if found:
                with suppress(OSError), mount_tree.opened(mount.place) as entry:
                    if mount_tree.look(entry).device == mount.device and syscalls.is_mount_root(entry):
                        _replace(opened, former, mount, entry, found[1])
                        left.remove(found)

    keep = [namespace, opened.proc, opened.fusectl, *(copy for _, copy in copies)]
    in_child(restore_here, keep, [syscalls.CAP_SYS_ADMIN, syscalls.CAP_SYS_CHROOT])


def _replace(opened: Descriptors, former: Former, mount: Mount, entry: int, copy: int) -> None:
    """Replace a mount, whose root is `entry`, if it is one of the former filesystems. Raises OSError.

    While `entry` is open, the filesystem exists, and no other has its number.
    """
    connection = former.connections.get(mount.device)
    if connection is None:
        is_former = former.is_placeholder(mount)
    else:
        is_former = fuse_connections.is_connection(opened.fusectl, mount.device, connection)
    if not is_former:
        raise FileNotFoundError(errno.ENOENT, "another filesystem has that number")
    _attach(entry, copy, mount.flags.split(b","))


def _attach(entry: int, copy: int, flags: list[bytes]) -> None:
    """Replace a mount that has these flags with the copy, or cover it if it can't be replaced. Raises OSError."""
    attributes = sum(attribute for name, attribute in _ATTRIBUTES.items() if name in flags)
    syscalls.mount_setattr(copy, b"", syscalls.AT_EMPTY_PATH, attributes)
    if not replace(entry, copy):
        attach(entry, copy)
