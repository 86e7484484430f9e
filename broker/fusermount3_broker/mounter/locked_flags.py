"""Lock `nosuid` and `nodev` on a mount, so that not even the host's root can clear them.

A container runtime that binds a mount may remount the bind without these flags, and a set-user-ID program on a FUSE
filesystem would then make its user root. Only the kernel can enforce them: when it copies a mount into a mount
namespace owned by another user namespace, it locks the flags of the copy, and of every copy of that, for ever
(mount_namespaces(7)).

The *maker* is a process in a user namespace of its own. It makes mount namespaces, *cells*, which contain nothing but
an empty directory and an empty file to mount on. Each child of the mounter is forked with one cell. The child joins the
cell without joining its user namespace, attaches the mount there, and copies the whole cell with unshare(2): the copy
is owned by another user namespace than the cell, so its flags are locked (fs/namespace.c, copy_mnt_ns). From then on,
the child uses a clone of the mount in the copy. Cell and copy end when their descriptors are closed.

The kernel locks the flags that are set at that moment, and the access times in any case. `ro` and `noexec` must not be
locked, or a runtime that wants `rw` could not start the container; a caller of this module sets them afterwards.

No process has to trust the maker, which sees no mounts of others: the child tests whether the flags are locked.
"""

import errno
import os
import select
import signal
import socket
from contextlib import suppress

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import mount_tree
from fusermount3_broker.mounter.child_processes import close_all_but
from fusermount3_broker.mounter.front_connection import StepError

#: The step that fails when the flags can't be locked, and the one that fails when the host denies the broker a user
#: namespace.
STEP = "lock nosuid and nodev"
FORBIDDEN = "lock nosuid and nodev, because the host allows no user namespaces"
NOT_LOCKED = syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOEXEC
DIRECTORY, FILE = b"directory", b"file"
#: Milliseconds in which the maker must answer.
_PATIENCE = 5000


class Cell:
    """A mount namespace in which the flags of one mount can be locked."""

    def __init__(self, proc: int, namespace: int, problem: int = 0, *, forbidden: bool = False) -> None:
        """`proc` is the mounter's /proc. `namespace` is -1 if the cell could not be made; `problem` is the errno."""
        #: Whether the host allows no cells.
        self.forbidden = forbidden
        self._proc = proc
        self._problem = problem
        self._open = [namespace] if namespace >= 0 else []

    @property
    def namespace(self) -> int | None:
        """Its descriptor; None if there is none."""
        return self._open[0] if self._open else None

    def check(self) -> None:
        """Raise StepError if the host allows no cells."""
        if self.forbidden:
            raise StepError(errno.EPERM, FORBIDDEN)

    def lock(self, mount: int, *, directory: bool) -> int:
        """Return a clone of the mount whose nosuid, nodev and access times are locked, as are those of its clones.

        The mount must be detached, and is closed; the clone is detached, too, and neither read-only nor noexec.
        `directory` says whether the root of the mount is a directory. Needs CAP_SYS_ADMIN and CAP_SYS_CHROOT; changes
        the working directory to the mounter's /proc. Raises OSError.
        """
        try:
            if not self._open:
                raise OSError(self._problem or errno.EINVAL, "there is no cell, or it has been used")
            syscalls.mount_setattr(mount, b"", syscalls.AT_EMPTY_PATH, 0, clear=NOT_LOCKED)
            clone = self._clone_from_a_copy(mount, DIRECTORY if directory else FILE)
        finally:
            os.close(mount)
        try:
            check_locked(clone)
        except OSError:
            os.close(clone)
            raise
        return clone

    def _clone_from_a_copy(self, mount: int, name: bytes) -> int:
        here = os.open("self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        syscalls.setns(self._open[0], syscalls.CLONE_NEWNS)
        try:
            syscalls.move_mount(mount, b"", syscalls.AT_FDCWD, name, syscalls.MOVE_MOUNT_F_EMPTY_PATH)
            syscalls.unshare(syscalls.CLONE_NEWNS)
            # Keep it open: destroying a mount namespace takes longer than everything else here.
            self._open.append(os.open("self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc))
            return syscalls.open_tree(syscalls.AT_FDCWD, name, syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC)
        finally:
            syscalls.setns(here, syscalls.CLONE_NEWNS)
            os.fchdir(self._proc)
            os.close(here)

    def close(self) -> None:
        """Close cell and copy, which both hold the filesystem. May block while the filesystem ends."""
        while self._open:
            os.close(self._open.pop())


def check_locked(mount: int) -> None:
    """Raise PermissionError unless nosuid and nodev are locked on a detached mount."""
    for attribute in (syscalls.MOUNT_ATTR_NOSUID, syscalls.MOUNT_ATTR_NODEV):
        syscalls.mount_setattr(mount, b"", syscalls.AT_EMPTY_PATH, attribute)
        try:
            syscalls.mount_setattr(mount, b"", syscalls.AT_EMPTY_PATH, 0, clear=attribute)
        except PermissionError:
            continue
        raise PermissionError(errno.EPERM, "the kernel has not locked it")


class Maker:
    """The mounter's handle on the maker. It restarts a maker that has ended, unless the host forbids cells."""

    def __init__(self, proc: int) -> None:
        self._proc = proc
        self._pid = 0
        #: Earlier makers that had not ended yet when the next one was started.
        self._ending: set[int] = set()
        self._end: socket.socket | None = None
        self._problem = 0
        #: The next cell, which the maker may not have left yet, or -1.
        self._next = -1
        #: Whether the host allows no cells; tested once, at the start.
        self.forbidden = False
        self._start()
        self.forbidden = self._problem < 0

    def cell(self) -> Cell:
        """Return a new cell; if none can be made, return one whose `lock` fails."""
        for _ in range(2):  # the maker may have been killed
            if self._end is None and not self.forbidden:
                self._start()
            if self._end is None:
                break
            try:
                return Cell(self._proc, self._take(self._end))
            except OSError as error:
                self._problem = error.errno or errno.EIO
                self._stop()
        return Cell(self._proc, -1, abs(self._problem), forbidden=self.forbidden)

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors that a child of the mounter has to close."""
        return [] if self._end is None else [self._end.fileno(), self._next]

    def _take(self, end: socket.socket) -> int:
        """Return the next cell when the maker has left it. Raises OSError.

        While the maker is in a cell, each cell that it makes would copy the mounts attached there.
        """
        self._problem = _answer(end)
        if self._problem:
            raise OSError(abs(self._problem), "the maker failed")
        cell = self._next
        try:
            self._go_on(end)
        except OSError:
            os.close(cell)
            raise
        return cell

    def _go_on(self, end: socket.socket) -> None:
        """Keep the maker's current mount namespace as the next cell, and tell the maker to make another.

        Raises OSError.
        """
        self._next = -1
        self._next = os.open(f"{self._pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        end.send(b"next", socket.MSG_NOSIGNAL)

    def _start(self) -> None:
        """Start the maker and wait until it has made its first cell."""
        if self._pid:
            self._ending.add(self._pid)
        self._ending = {each for each in self._ending if not _is_reaped(each)}
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._pid = os.fork()
            except OSError as error:
                self._problem = error.errno or errno.EAGAIN
                self._stop()
                return
            if self._pid == 0:
                try:
                    close_all_but([self._proc, theirs.fileno()])
                    _make_cells(self._proc, theirs)
                finally:
                    os._exit(0)
        try:
            self._problem = _answer(self._end)
            if not self._problem:
                self._go_on(self._end)
        except OSError as error:
            self._problem = error.errno or errno.EIO
        if self._problem:
            self._stop()

    def _stop(self) -> None:
        """Close the socket to the maker, upon which it exits by itself."""
        if self._end is not None:
            self._end.close()
        self._end = None
        if self._next >= 0:
            os.close(self._next)
        self._next = -1


def _is_reaped(pid: int) -> bool:
    """Reap the child if it has ended; return whether that is done."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _answer(end: socket.socket) -> int:
    """Return the maker's answer: 0 when it has made a new cell, or an errno, negative if it was denied a user
    namespace. Raises OSError."""
    waiting = select.poll()
    waiting.register(end, select.POLLIN)
    if not waiting.poll(_PATIENCE):
        raise TimeoutError(errno.ETIMEDOUT, "the maker hangs")
    if not (said := end.recv(16)):
        raise OSError(errno.EPIPE, "the maker has ended")
    return int(said)


def _make_cells(proc: int, end: socket.socket) -> None:
    """Make a cell, stay in it and report it; make the next one on each request."""
    sign = 1
    try:
        _enter_emptiness(proc)
        sign = -1
        syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
        sign = 1
        syscalls.capset(syscalls.CAP_SYS_ADMIN)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        end.send(b"0", socket.MSG_NOSIGNAL)
        while end.recv(16):
            syscalls.unshare(syscalls.CLONE_NEWNS)
            end.send(b"0", socket.MSG_NOSIGNAL)
    except OSError as error:
        with suppress(OSError):
            end.send(b"%d" % (sign * (error.errno or errno.EIO)), socket.MSG_NOSIGNAL)


def _unmount_all() -> None:
    """Unmount all but the root of this mount namespace: each cell would hold the remaining filesystems, which could
    then not end elsewhere.

    Mounts locked by the namespace stay: the broker's own mount namespace holds them, too. Raises OSError.
    """
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    lowest = syscalls.statx_mount(root)[1]
    os.close(root)
    left: list[mount_tree.Mount] = []
    while (found := [each for each in mount_tree.table() if each.parent_id == lowest != each.mount_id]) != left:
        left = found
        for mount in reversed(found):  # later mounts may cover earlier ones
            with suppress(OSError):
                syscalls.umount2(mount.place, syscalls.MNT_DETACH)


def _enter_emptiness(proc: int) -> None:
    """Enter a new mount namespace in which only an empty directory and an empty file are visible.

    This avoids pivot_root(2) and chroot(2), so that the broker's system call filter need not allow them. Raises
    OSError.
    """
    os.fchdir(proc)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, b"/", None, syscalls.MS_REC | syscalls.MS_PRIVATE, None)
    os.fchdir(proc)
    _unmount_all()
    context = syscalls.fsopen(b"tmpfs", syscalls.FSOPEN_CLOEXEC)
    syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, b"mode", b"755", 0)
    syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
    attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOEXEC
    empty = syscalls.fsmount(context, syscalls.FSMOUNT_CLOEXEC, attributes)
    os.close(context)
    os.mkdir(DIRECTORY, 0o755, dir_fd=empty)
    os.close(os.open(FILE, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644, dir_fd=empty))
    syscalls.mount_setattr(empty, b"", syscalls.AT_EMPTY_PATH, syscalls.MOUNT_ATTR_RDONLY)
    syscalls.move_mount(empty, b"", syscalls.AT_FDCWD, b"/", syscalls.MOVE_MOUNT_F_EMPTY_PATH)
    os.close(empty)
    this = os.open("self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    syscalls.setns(this, syscalls.CLONE_NEWNS)  # sets the root to the topmost mount
    os.close(this)
