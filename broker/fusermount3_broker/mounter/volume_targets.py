"""The mounts at a volume's *target*, the path at which kubelet wants the volume.

The target is a directory made by the broker. While the volume is published, a placeholder is mounted on it: an empty
filesystem, not writable by anyone. So no one can fill the node's disk before there is a FUSE program, and another mount
namespace that has the placeholder, with propagation, receives the mounts attached on it. On the placeholder lies the
FUSE filesystem, alive or dead. The first one that dies is replaced by a *tombstone* (`tombstone`), on which all later
ones are mounted: so nobody sees the placeholder again, an empty directory, until the volume is unpublished.

For the mounter's children that are in the broker's own mount namespace. Their working directory is the mounter's /proc.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import NamedTuple

from fusermount3_broker.kernel import ownership_marks, syscalls
from fusermount3_broker.mounter import fuse_connections, invariants, mount_tree, pods
from fusermount3_broker.mounter.front_connection import StepError
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_broker.mounter.mount_tree import Mount

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
#: No name in kubelet's directory may lead out of it.
_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
#: The source of the filesystems that the broker makes itself, and the subtype of a tombstone.
SOURCE, TOMBSTONE = b"fusermount3-broker", b"tombstone"
_MOVE = syscalls.MOVE_MOUNT_F_EMPTY_PATH | syscalls.MOVE_MOUNT_T_EMPTY_PATH
_CLONE = syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC | syscalls.AT_EMPTY_PATH
#: How often a look without a lock is taken at most: each time, something else was attached or detached meanwhile.
_LOOKS = 3
#: In the file of locks, bytes from this offset on stand for directories, by inode; those before it stand for mounts.
_LOCKS_OF_DIRECTORIES = 1 << 62


def begin(opened: Descriptors, *targets: bytes) -> None:
    """Check that these may be the targets of volumes, and make the mounter's /proc the working directory.

    Raises StepError with EPERM.
    """
    if not all(map(invariants.allow_target, targets)):
        raise StepError(errno.EPERM, "check the volume")
    os.fchdir(opened.proc)


def open_beneath(kubelet: int, path: bytes) -> int:
    """Open a directory below kubelet's. Raises OSError: ELOOP for a symlink, ENOTDIR for any other file on the way."""
    return syscalls.openat2(kubelet, path, _DIRECTORY, 0, _BENEATH)


class Attached(NamedTuple):
    """Where a mount was attached: what it took the place of, and what lies below it.

    `replaced` is a detached copy of the dead mount in whose place it is, if any, and `dead` the device of that.
    `tombstone` is the device of the tombstone below it, if there is one.
    """

    replaced: int | None = None
    dead: int | None = None
    tombstone: int | None = None


class Target:
    """The target of a volume, by its path in kubelet's directory. Leaving the ``with`` block closes it."""

    def __init__(self, opened: Descriptors, path: bytes) -> None:
        """Open the target's parent directory. Raises OSError, FileNotFoundError if that doesn't exist."""
        assert opened.kubelet is not None
        parent, _, self.name = path.rpartition(b"/")
        self._opened = opened
        self._pod = pods.pod_of_target(path)
        self.directory = open_beneath(opened.kubelet, parent or b".")

    def __enter__(self) -> "Target":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.directory)

    def alone(self, seconds: int) -> AbstractContextManager[None]:
        """Exclude the mounter's other children from changing this target. Raises OSError (ETIMEDOUT)."""
        inode = os.fstat(self.directory).st_ino
        return mount_tree.alone(self._opened.locks, [_LOCKS_OF_DIRECTORIES | inode % _LOCKS_OF_DIRECTORIES], seconds)

    @contextmanager
    def topmost(self) -> Iterator[int]:
        """Provide an O_PATH descriptor of the topmost mount at the target, or of the bare target.

        Raises OSError: FileExistsError if it is not a directory, and thus not the broker's.
        """
        try:
            entry = os.open(self.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.directory)
        except NotADirectoryError:
            raise FileExistsError(errno.EEXIST, "the target is no directory") from None
        try:
            yield entry
        finally:
            os.close(entry)

    def layers(self, entry: int) -> list[Mount]:
        """Return the mounts at the target, from the topmost, which is `entry`, down to the placeholder.

        Empty if there is no placeholder: then the mount is not the broker's.
        """
        if not syscalls.is_mount_root(entry):
            return []
        layers: list[Mount] = []
        for mount in mount_tree.chain(syscalls.statx_mount(entry)[1]):
            if layers and mount.place != layers[0].place:
                return []
            layers.append(mount)
            if is_placeholder(mount):
                return layers
        return []

    @contextmanager
    def seen(self) -> Iterator[tuple[int, list[Mount]]]:
        """Provide `topmost` and its `layers`, without a lock. Raises OSError.

        If another mount takes the place of the topmost one meanwhile, that is no layer, and this looks again.
        """
        for again in reversed(range(_LOOKS)):
            with self.topmost() as top:
                layers = self.layers(top)
                if layers or not again or self._is_topmost(top):
                    yield top, layers
                    return

    def _is_topmost(self, entry: int) -> bool:
        with self.topmost() as top:
            return mount_tree.look(top) == mount_tree.look(entry)

    def check_shared(self) -> None:
        """Raise PermissionError unless the volume was published to be shared: the front may say something else now."""
        if not ownership_marks.is_marked(self.directory, ownership_marks.SHARED):
            raise PermissionError(errno.EPERM, "the volume is not shared")

    def make(self, *, shared: bool = False) -> None:
        """Make the directory and mount the placeholder, unless they already exist. Raises OSError.

        Note whether a new volume is `shared`; of one that exists, this was noted before, and doesn't change.

        FileExistsError: the target is not a directory, or something that is not the broker's is in it or mounted on it.
        """
        with suppress(FileExistsError):
            os.mkdir(self.name, 0o750, dir_fd=self.directory)
            with self.topmost() as entry:
                ownership_marks.mark(entry)
        with self.topmost() as entry:
            if self.layers(entry):
                return
            if syscalls.is_mount_root(entry):
                raise FileExistsError(errno.EEXIST, "something else is mounted there")
            if not ownership_marks.is_marked(entry) and os.listdir(b"self/fd/%d" % entry):
                raise FileExistsError(errno.EEXIST, "something else is there")
            if shared:
                ownership_marks.mark(self.directory, ownership_marks.SHARED)
            else:
                ownership_marks.unmark(self.directory, ownership_marks.SHARED)
            try:
                _attach_placeholder(entry)
            except OSError:
                self.remove()
                raise

    def attach(self, mount: int, seconds: int) -> Attached:
        """Attach the mount of a FUSE filesystem on the placeholder or the tombstone, or in place of a dead one.

        Raises OSError: ENOENT if there is no placeholder, EBUSY if a FUSE program serves the filesystem there.
        """
        for _ in range(_LOOKS):
            looked, layers, refusal = self._look_for_room()
            with ExitStack() as held, self.alone(seconds):
                top = held.enter_context(self.topmost())  # closed after the lock is released: it may end a filesystem
                if mount_tree.look(top) != looked:
                    continue  # perhaps a tombstone came meanwhile, and what was seen of the dead mount is not so
                if refusal:
                    raise refusal
                tombstone = tombstone_of(layers)
                below = tombstone.device if tombstone else None
                if is_placeholder(layers[0]) or layers[0] is tombstone:
                    attach(top, mount)
                    return Attached(tombstone=below)
                copy = syscalls.open_tree(top, b"", _CLONE)
                self._replace(top, mount)
                return Attached(copy, layers[0].device, below)
        raise OSError(errno.EBUSY, "another mount was attached first")

    def put_tombstone(self, device: int, make: Callable[[], int], seconds: int) -> bool:
        """Have a tombstone where the topmost mount is, if that is of `device`, and dead.

        It is already below if it was needed before; else `make` returns it. Before Linux 6.5 the dead mount stays below
        it: there must be no moment without either. Return False, and change nothing, if the topmost mount is another
        one, or not dead. Raises OSError.
        """
        with self.topmost() as top:
            layers = self.layers(top)
            if not layers or layers[0].device != device or not self._is_dead(top, layers):
                return False
            looked, there = mount_tree.look(top), tombstone_of(layers)
        if there is layers[0]:
            return False
        with ExitStack() as held:
            tombstone = None
            if there is not layers[1]:
                tombstone = make()
                held.callback(os.close, tombstone)
            with self.alone(seconds):
                top = held.enter_context(self.topmost())
                if mount_tree.look(top) != looked:
                    return False
                if tombstone is None:
                    _detach(top)
                elif not replace(top, tombstone):
                    attach(top, tombstone)
        return True

    def _look_for_room(self) -> tuple[mount_tree.Looked, list[Mount], OSError | None]:
        """Return the topmost mount, all layers, and why nothing may be attached; None if the topmost mount is the
        placeholder, the tombstone, or a dead one. Raises OSError.

        Holds no lock: a FUSE program that hangs delays this process, but must not delay one that unpublishes the
        volume. So a mount that is detached meanwhile seems not to be one of the volume's, or not one of FUSE.
        """
        with self.topmost() as top:
            looked, layers = mount_tree.look(top), self.layers(top)
            refusal: OSError | None = None
            if not layers:
                refusal = FileNotFoundError(errno.ENOENT, "the volume is not published")
            elif not is_placeholder(layers[0]) and not self._is_dead(top, layers):
                refusal = OSError(errno.EBUSY, "a FUSE program serves the volume")
            return looked, layers, refusal

    def withdraw(self, mount: int, replaced: int | None, seconds: int) -> None:
        """Detach a mount that was attached here; the mount that it `replaced` takes its place again. Raises OSError."""
        with ExitStack() as held, self.alone(seconds):
            top = held.enter_context(self.topmost())
            if mount_tree.look(top) != mount_tree.look(mount):
                return  # it has already been detached
            if replaced is None:
                _detach(top)
            else:
                self._replace(top, replaced)

    def clone(self, seconds: int, device: int | None = None) -> int:
        """Return a detached copy of the FUSE filesystem, without propagation.

        Raises OSError: FileNotFoundError if there is only the placeholder, or a tombstone, or not that `device`.
        """
        with ExitStack() as held, self.alone(seconds):
            top = held.enter_context(self.topmost())
            layers = self.layers(top)
            if not layers or is_placeholder(layers[0]) or layers[0] is tombstone_of(layers):
                raise FileNotFoundError(errno.ENOENT, "nothing is mounted at the volume")
            if device not in (None, layers[0].device):
                raise FileNotFoundError(errno.ENOENT, "another filesystem is mounted at the volume")
            return private_copy(top)

    def served(self, device: int, seconds: int) -> tuple[int, int | None, int]:
        """Return a descriptor of the topmost mount, if it is of that device; the device of the tombstone below it, if
        there is one; and that of the placeholder. Raises OSError; FileNotFoundError if it is not of that device.

        It is no detached copy, because before Linux 6.15 nobody could copy that.
        """
        with ExitStack() as held, self.alone(seconds):
            top = held.enter_context(self.topmost())
            layers = self.layers(top)
            if not layers or layers[0].device != device:
                raise FileNotFoundError(errno.ENOENT, "another filesystem is mounted at the volume")
            tombstone = tombstone_of(layers)
            return os.dup(top), tombstone.device if tombstone else None, layers[-1].device

    def detach(self) -> None:
        """Detach all mounts at the target, if they are the broker's. Raises OSError; may block."""
        with suppress(FileNotFoundError, FileExistsError):
            while True:
                with self.topmost() as entry:
                    if not self.layers(entry):
                        return
                    _detach(entry)

    def remove(self) -> None:
        """Remove the directory if the broker made it and nothing is mounted on it. Raises OSError."""
        try:
            with self.topmost() as entry:
                if syscalls.is_mount_root(entry) or not ownership_marks.is_marked(entry):
                    return
            os.rmdir(self.name, dir_fd=self.directory)
        except (FileNotFoundError, FileExistsError):
            return

    def _replace(self, top: int, mount: int) -> None:
        """Attach the mount in place of the topmost one. Before Linux 6.5 there is a moment with neither."""
        if not replace(top, mount):
            _detach(top)
            with self.topmost() as below:
                attach(below, mount)

    def _is_dead(self, entry: int, layers: list[Mount]) -> bool:
        """Return whether no FUSE program serves the topmost filesystem; False also if that is not FUSE. Raises OSError.

        The filesystem is asked only if it is not known to be alive: its program may be one that never answers. A
        tombstone answers at once, however many processes try to read it; and that takes less time. If the filesystem
        reports nothing to this user namespace, the search for a process of its pod that holds the descriptor decides,
        which takes longer.
        """
        mount = layers[0]
        fuse = mount_tree.fuse_if_any(mount_tree.look(entry).mount_id)
        if fuse is None:
            return False
        if mount is not tombstone_of(layers) and fuse_connections.alive(self._opened.fusectl, [mount.device]):
            return False
        try:
            if mount_tree.usage(entry, fuse) is not None:
                return False
        except OSError as error:
            return error.errno == errno.ENOTCONN
        proc = self._opened.proc
        pids = pods.processes_of(proc, self._pod)
        server = fuse_connections.may_serve(
            proc, mount.device, pids, lambda each: fuse_connections.is_connected(proc, each, mount.device)
        )
        return server is None


def is_placeholder(mount: Mount) -> bool:
    return (mount.type, mount.source) == (b"tmpfs", SOURCE)


def tombstone_of(layers: list[Mount]) -> Mount | None:
    """Return the tombstone among the mounts at a target, if there is one: the lowest that looks like it.

    A FUSE program may give its filesystem the same names. Then its volume has no other tombstone, and one layer more.
    """
    named = [each for each in layers if (each.type, each.source) == (b"fuse." + TOMBSTONE, SOURCE)]
    return named[-1] if named else None


def private_copy(entry: int) -> int:
    """Return a detached copy of a mount, without propagation to or from the original. Raises OSError."""
    copy = syscalls.open_tree(entry, b"", _CLONE)
    try:
        syscalls.mount_setattr(copy, b"", syscalls.AT_EMPTY_PATH, 0, syscalls.MS_PRIVATE)
    except OSError:
        os.close(copy)
        raise
    return copy


def attach(place: int, mount: int) -> None:
    """Attach a mount on top of the file that a descriptor refers to. Raises OSError."""
    syscalls.move_mount(mount, b"", place, b"", _MOVE)


def replace(top: int, mount: int) -> bool:
    """Attach a mount in place of another, whose root is `top`; at any moment one of them is attached.

    Return False if the kernel can't do this at all (before Linux 6.5), or not at this place, because the other mount is
    locked (mount_namespaces(7)). Raises OSError.
    """
    try:
        syscalls.move_mount(mount, b"", top, b"", _MOVE | syscalls.MOVE_MOUNT_BENEATH)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    _detach(top)
    return True


def _detach(entry: int) -> None:
    syscalls.umount2(b"self/fd/%d" % entry, syscalls.MNT_DETACH)


def _attach_placeholder(entry: int) -> None:
    """Mount a new filesystem that is empty and read-only, on a directory that has no mount. Raises OSError.

    The mount itself has no flags: in another user namespace, nobody could clear them (mount_namespaces(7)), and runc
    fails there if it is to bind the volume writable, as for most containers. Nothing can be in the filesystem anyway.

    A child of an earlier mounter doesn't see the locks of a later one, and may attach a second placeholder; then it
    detaches its own.
    """
    context = syscalls.fsopen(b"tmpfs", syscalls.FSOPEN_CLOEXEC)
    try:
        for key, value in ((b"source", SOURCE), (b"mode", b"555"), (b"size", b"4k"), (b"nr_inodes", b"1")):
            syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, key, value, 0)
        syscalls.fsconfig(context, syscalls.FSCONFIG_SET_FLAG, b"ro", None, 0)
        syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
        mount = syscalls.fsmount(context, syscalls.FSMOUNT_CLOEXEC, 0)
    finally:
        os.close(context)
    try:
        attach(entry, mount)
        if _lies_on_another(mount):
            _detach(mount)
    finally:
        os.close(mount)


def _lies_on_another(mount: int) -> bool:
    """Return whether this mount, just attached, covers another mount at the same place."""
    chain = mount_tree.chain(syscalls.statx_mount(mount)[1])
    this, below = next(chain), next(chain, None)
    return below is not None and this.place == below.place
