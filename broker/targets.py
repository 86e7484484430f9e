"""What is mounted where kubelet wants a volume to be, its *target*.

The target is a directory of the broker's. On it lies a placeholder, an empty filesystem that nobody can write to, as
long as the volume is published: nobody fills the node's disk before there is a FUSE program, and whoever has the
placeholder in another mount namespace, with propagation, receives what comes to lie on it. On the placeholder lies the
FUSE filesystem, alive or dead. A dead one stays until another takes its place, without a moment in which the
placeholder could be seen.

For the mounter's children that are in the broker's own mount namespace. Their working directory is the mounter's /proc.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from broker import connections, marks, mounts, syscalls
from broker.descriptors import Descriptors
from broker.mounts import Mount

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
#: In kubelet's directory, no name may lead elsewhere.
_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_SOURCE = b"fusermount3-broker"
_MOVE = syscalls.MOVE_MOUNT_F_EMPTY_PATH | syscalls.MOVE_MOUNT_T_EMPTY_PATH
_CLONE = syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC | syscalls.AT_EMPTY_PATH
#: Bytes of the file of locks, from here on, stand for directories by their inode; those before for mounts.
_LOCKS_OF_DIRECTORIES = 1 << 62


def open_beneath(kubelet: int, path: bytes) -> int:
    """Return a directory in kubelet's. Raises OSError: ELOOP for a symlink, ENOTDIR for anything else on the way."""
    return syscalls.openat2(kubelet, path, _DIRECTORY, 0, _BENEATH)


class Target:
    """The target of a volume, by its path in kubelet's directory. Leaving the ``with`` block closes it."""

    def __init__(self, opened: Descriptors, path: bytes) -> None:
        """Open the directory in which it is. Raises OSError, FileNotFoundError if that is not there."""
        assert opened.kubelet is not None
        parent, _, self._name = path.rpartition(b"/")
        self._opened = opened
        self.directory = open_beneath(opened.kubelet, parent or b".")

    def __enter__(self) -> "Target":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.directory)

    def alone(self, seconds: int) -> AbstractContextManager[None]:
        """Be the only one of the mounter's who changes this target. Raises OSError (ETIMEDOUT)."""
        inode = os.fstat(self.directory).st_ino
        return mounts.alone(self._opened.locks, [_LOCKS_OF_DIRECTORIES | inode % _LOCKS_OF_DIRECTORIES], seconds)

    @contextmanager
    def topmost(self) -> Iterator[int]:
        """Give a descriptor of what lies topmost, for a look at it. Raises OSError: FileExistsError if that is no
        directory, nor the broker's, therefore."""
        try:
            entry = os.open(self._name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.directory)
        except NotADirectoryError:
            raise FileExistsError(errno.EEXIST, "the target is no directory") from None
        try:
            yield entry
        finally:
            os.close(entry)

    def layers(self, entry: int) -> list[Mount]:
        """Return what is mounted at the target, from what lies topmost, which is `entry`, down to the placeholder.

        Empty if there is no placeholder: then it is not the broker's.
        """
        if not syscalls.is_mount_root(entry):
            return []
        layers: list[Mount] = []
        for mount in mounts.chain(syscalls.statx_mount(entry)[1]):
            if layers and mount.place != layers[0].place:
                return []
            layers.append(mount)
            if is_placeholder(mount):
                return layers
        return []

    def make(self) -> None:
        """Make the directory and mount the placeholder; what is there already stays. Raises OSError.

        FileExistsError: what is there is no directory, or something that is not the broker's is in it or mounted on it.
        """
        with suppress(FileExistsError):
            os.mkdir(self._name, 0o750, dir_fd=self.directory)
            with self.topmost() as entry:
                marks.mark(entry)
        with self.topmost() as entry:
            if self.layers(entry):
                return
            if syscalls.is_mount_root(entry):
                raise FileExistsError(errno.EEXIST, "something else is mounted there")
            if not marks.is_marked(entry) and os.listdir(b"self/fd/%d" % entry):
                raise FileExistsError(errno.EEXIST, "something else is there")
            try:
                _attach_placeholder(entry)
            except OSError:
                self.remove()
                raise

    def put(self, mount: int, seconds: int) -> int | None:
        """Attach the mount of a FUSE filesystem on the placeholder, or in place of one that is dead.

        Returns a copy of the mount that was dead, attached nowhere. Raises OSError: ENOENT if there is no placeholder,
        EBUSY if somebody serves what is there.
        """
        looked, is_free = self._look_for_room()
        with ExitStack() as held, self.alone(seconds):
            top = held.enter_context(self.topmost())  # closed without the lock: with it, a filesystem may end
            if mounts.look(top) != looked:
                raise OSError(errno.EBUSY, "somebody else was quicker")
            if is_free:
                attach(top, mount)
                return None
            copy = syscalls.open_tree(top, b"", _CLONE)
            self._replace(top, mount)
            return copy

    def _look_for_room(self) -> tuple[mounts.Looked, bool]:
        """Return what lies topmost, and whether that is the placeholder; otherwise it is dead. Raises OSError as `put`.

        Without the lock: a program that hangs holds up who asks it, and whoever takes the volume away must not wait.
        """
        with self.topmost() as top:
            layers = self.layers(top)
            if not layers:
                raise FileNotFoundError(errno.ENOENT, "the volume is not published")
            is_free = is_placeholder(layers[0])
            if not is_free and not self._is_dead(top, layers[0]):
                raise OSError(errno.EBUSY, "somebody serves the volume")
            return mounts.look(top), is_free

    def withdraw(self, mount: int, replaced: int | None, seconds: int) -> None:
        """Take away a mount that was put here; what it `replaced` takes its place again. Raises OSError."""
        with ExitStack() as held, self.alone(seconds):
            top = held.enter_context(self.topmost())
            if mounts.look(top) != mounts.look(mount):
                return  # somebody else has taken it away
            if replaced is None:
                _detach(top)
            else:
                self._replace(top, replaced)

    def clone(self, seconds: int) -> int:
        """Return a copy of what lies topmost, attached nowhere, with no propagation. Raises OSError."""
        with ExitStack() as held, self.alone(seconds):
            top = held.enter_context(self.topmost())
            layers = self.layers(top)
            if not layers or is_placeholder(layers[0]):
                raise FileNotFoundError(errno.ENOENT, "nothing is mounted at the volume")
            return private_copy(top)

    def detach(self) -> None:
        """Take away all that is mounted at the target, if it is the broker's. Raises OSError; may block."""
        with suppress(FileNotFoundError, FileExistsError):
            while True:
                with self.topmost() as entry:
                    if not self.layers(entry):
                        return
                    _detach(entry)

    def remove(self) -> None:
        """Remove the directory, if the broker made it and nothing is mounted there. Raises OSError."""
        try:
            with self.topmost() as entry:
                if syscalls.is_mount_root(entry) or not marks.is_marked(entry):
                    return
            os.rmdir(self._name, dir_fd=self.directory)
        except (FileNotFoundError, FileExistsError):
            return

    def _replace(self, top: int, mount: int) -> None:
        """Attach the mount in place of what lies topmost. Before Linux 6.5 there is a moment with neither."""
        if not replace(top, mount):
            _detach(top)
            with self.topmost() as below:
                attach(below, mount)

    def _is_dead(self, entry: int, mount: Mount) -> bool:
        """Whether nobody serves the FUSE filesystem that lies topmost; False, too, if it is none. Raises OSError.

        Where a request waits, somebody has the descriptor: all end with the last who has it. So it is asked only if
        none waits. If it says nothing to this user namespace, it is looked who has the descriptor, which takes longer.
        """
        fuse = mounts.fuse_if_any(mounts.look(entry).mount_id)
        if fuse is None or connections.is_waited_for(self._opened.fusectl, mount.device):
            return False
        try:
            if mounts.usage(entry, fuse) is not None:
                return False
        except OSError as error:
            return error.errno == errno.ENOTCONN
        return connections.served(self._opened.proc, mount.device) is None


def is_placeholder(mount: Mount) -> bool:
    return (mount.type, mount.source) == (b"tmpfs", _SOURCE)


def private_copy(entry: int) -> int:
    """Return a copy of a mount, attached nowhere, that gets and sends nothing of what happens to the other. Raises
    OSError."""
    copy = syscalls.open_tree(entry, b"", _CLONE)
    try:
        syscalls.mount_setattr(copy, b"", syscalls.AT_EMPTY_PATH, 0, syscalls.MS_PRIVATE)
    except OSError:
        os.close(copy)
        raise
    return copy


def attach(place: int, mount: int) -> None:
    """Attach a mount on top of what a descriptor stands for. Raises OSError."""
    syscalls.move_mount(mount, b"", place, b"", _MOVE)


def replace(top: int, mount: int) -> bool:
    """Attach a mount in place of another, of which `top` is the root; at any moment one of them is there.

    False if the kernel can't, or not there: before Linux 6.5, or where the other is locked (mount_namespaces(7)).
    Raises OSError.
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
    """Mount a new filesystem that is empty and stays so, on a directory that has none. Raises OSError.

    The child of an earlier mounter knows nothing of a later one's lock, and may be late: then it takes its own away.
    """
    context = syscalls.fsopen(b"tmpfs", syscalls.FSOPEN_CLOEXEC)
    try:
        for key, value in ((b"source", _SOURCE), (b"mode", b"555"), (b"size", b"4k"), (b"nr_inodes", b"1")):
            syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, key, value, 0)
        syscalls.fsconfig(context, syscalls.FSCONFIG_SET_FLAG, b"ro", None, 0)
        syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
        attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOEXEC
        mount = syscalls.fsmount(context, syscalls.FSMOUNT_CLOEXEC, attributes | syscalls.MOUNT_ATTR_RDONLY)
    finally:
        os.close(context)
    try:
        attach(entry, mount)
        if _lies_on_another(mount):
            _detach(mount)
    finally:
        os.close(mount)


def _lies_on_another(mount: int) -> bool:
    """Whether there is another mount at the place where this one has just been attached."""
    chain = mounts.chain(syscalls.statx_mount(mount)[1])
    this, below = next(chain), next(chain, None)
    return below is not None and this.place == below.place
