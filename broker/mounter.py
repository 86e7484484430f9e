"""The privileged half of the broker: it enters the caller's namespaces and mounts there.

The parent does one thing for ever: it keeps a few children ready. A child takes one start record with its descriptors
from the front, holds one conversation (`plan` has the whole list of what may be said), and ends. It joins the caller's
namespaces and takes the caller's identity from the kernel; it tells the front what it found; it does what the front
decided, or nothing. Children are forked before they are needed because a process is slow after fork(2): each page that
it touches for the first time is a fault. So they also rehearse.

Whatever could block for ever, such as a path on a hung filesystem, is bounded by an alarm whose signal kills the child.
From the moment a mount is attached until the front says `Keep`, no alarm is set but that of the rollback.

Once the child has joined a foreign mount namespace, every file of the machine is the caller's. So the modules are
imported before, nothing is imported after, and the only paths used are relative to descriptors opened before.
"""

import errno
import fcntl
import gc
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from broker import filesystem, plan, syscalls
from broker.plan import Record
from fusermount3_proxy import wire

#: Children that wait for an operation.
SPARES = 4
#: Milliseconds without a new operation after which a spare that was used is replaced, unless it was the last: a fork
#: and a rehearsal would take the processor from the operation itself.
REPLACE_AFTER = 20
#: Descriptors that come with a start record: conversation, caller's connection, caller's pidfd, pinned directory.
START_DESCRIPTORS = 4
_FUSE_DEVICE = os.makedev(10, 229)


class Descriptors:
    """What the mounter opens before it serves, for children whose root is no longer the broker's."""

    def __init__(self) -> None:
        self.proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        self.fusectl = _detached(b"fusectl")
        self.devices = _private_devices()
        #: Nothing is in this file; a byte of it is locked by who changes the mount namespace of that inode number.
        self.locks = os.memfd_create("locks")


def main(control: socket.socket) -> None:
    """Keep `SPARES` children that take start records from `control`, until the front hangs up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front decides when to end, and hangs up
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children say all in their conversation; the kernel reaps them
    _hide()
    os.setgroups([])
    opened = Descriptors()
    control.sendmsg([b"ready"], [_rights(opened.fusectl)])
    sys.path.clear()
    sys.meta_path.clear()
    gc.disable()
    gc.freeze()
    waiting = select.poll()
    waiting.register(control, 0)  # no event but that the front is gone: the records are the children's
    spares: set[int] = set()
    while True:
        ended = waiting.poll(None if len(spares) == SPARES else REPLACE_AFTER)
        for descriptor, _ in ended:
            if descriptor == control.fileno():
                return
            waiting.unregister(descriptor)
            os.close(descriptor)
            spares.remove(descriptor)
        if not ended or not spares:
            spare = _fork_spare(control, opened)
            waiting.register(spare, 0)
            spares.add(spare)


def _hide() -> None:
    """Have nobody of the same uid look into this process, neither its memory nor its descriptors (ptrace(2))."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def _fork_spare(control: socket.socket, opened: Descriptors) -> int:
    """Fork a child, and return the reading end of a pipe that hangs up when the child is no spare any more.

    The child closes the other end when it takes an operation; the kernel does, if it dies.
    """
    spare, busy = os.pipe()
    while True:
        try:
            child = os.fork()
            break
        except OSError:  # too many processes, or no memory: requests wait, and it passes
            time.sleep(0.1)
    if child == 0:
        try:
            os.close(spare)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with suppress(OSError):  # a kernel may dislike what is only a rehearsal
                _rehearse(opened)
            if started := _receive_start(control):
                os.close(busy)
                control.close()
                _operate(opened, *started)
        finally:
            os._exit(0)  # whatever happened: no exception may reach code that would print it
    os.close(busy)
    return spare


def _rehearse(opened: Descriptors) -> None:
    """Go through the motions of an operation, as far as they change nothing."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        talk = Conversation(os.dup(ours.fileno()), 1)
        with talk.bounded("rehearse"):
            talk.say(_REHEARSED_FACTS, opened.proc)
        theirs.send(plan.dump(_REHEARSED_PLAN))
        talk.hear()
        ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        syscalls.peer_groups(ours.fileno())
    os.stat("self/ns/mnt", dir_fd=opened.proc)
    syscalls.statx_mount(opened.proc)
    syscalls.fstatfs_type(opened.proc)
    syscalls.faccessat2(opened.proc, b"", os.R_OK, syscalls.AT_EMPTY_PATH | syscalls.AT_EACCESS)
    os.close(filesystem.configure(_REHEARSED_PLAN, 0))
    os.close(os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices))


_REHEARSED_FACTS = plan.MountFacts(0, 0, 0, False, 0, 0, 0)
_REHEARSED_PLAN = plan.MountPlan(
    uid=0,
    gid=0,
    root_mode=stat.S_IFDIR,
    foreign_sticky=False,
    filesystem=0,
    access_errno=0,
    request=b"rehearsal",
    warnings=b"",
    auto_unmount=False,
    sync_init=False,
    source=b"rehearsal",
    subtype=b"rehearsal",
    allow_other=False,
    default_permissions=False,
    max_read=b"",
    block_size=b"",
    read_only=False,
    sync=False,
    dirsync=False,
    lazytime=False,
    noexec=False,
    noatime=False,
    nodiratime=False,
    strictatime=False,
    nosymfollow=False,
)


def _receive_start(control: socket.socket) -> tuple[Record, list[int]] | None:
    """Return the next start record and its descriptors; None when the front has hung up."""
    data, ancillary, flags, _ = control.recvmsg(
        wire.MAX_MESSAGE, socket.CMSG_LEN(4 * START_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
    )
    if not data:
        return None
    wire.check_whole(flags)
    return plan.load(data), wire.descriptors(ancillary)


def _operate(opened: Descriptors, start: Record, descriptors: list[int]) -> None:
    """Carry one operation out, and tell the front if that fails."""
    conversation, connection, pidfd, pinned = descriptors
    if not isinstance(start, plan.StartMount | plan.StartUnmount):
        return
    talk = Conversation(conversation, start.seconds)
    try:
        with talk.bounded("join"):
            caller = Caller(opened, connection, pidfd)
        if isinstance(start, plan.StartMount):
            _mount(talk, caller, pinned)
        else:
            _unmount(talk, caller, pinned, start)
    except StepError as error:
        talk.say(plan.Failed(error.errno, error.step.encode()))
    except HungUp:
        pass
    except Exception as error:
        talk.say(plan.Failed(errno.EIO, repr(error).encode()))


class StepError(Exception):
    """A step of the operation failed with `errno`."""

    def __init__(self, errno: int, step: str) -> None:
        super().__init__(errno, step)
        self.errno = errno
        self.step = step


class HungUp(Exception):
    """The front or the caller has gone: the operation is nobody's any more."""


class Conversation:
    """The child's end of the talk with the front. The front hangs up when it is over, or dies: no wait is for ever."""

    def __init__(self, descriptor: int, seconds: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self.seconds = seconds

    def say(self, record: Record, descriptor: int | None = None) -> None:
        attached = [] if descriptor is None else [_rights(descriptor)]
        try:
            self._socket.sendmsg([plan.dump(record)], attached, socket.MSG_NOSIGNAL)
        except OSError:
            raise HungUp from None

    def hear(self) -> Record:
        """Return what the front says. Raises HungUp."""
        try:
            data = self._socket.recv(wire.MAX_MESSAGE)
            return plan.load(data)
        except (OSError, wire.ProtocolError):
            raise HungUp from None

    def die_with_front(self) -> None:
        """Have SIGIO kill this process when the front hangs up, for a wait in which nothing else would tell it."""
        fcntl.fcntl(self._socket, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._socket, fcntl.F_SETFL, fcntl.fcntl(self._socket, fcntl.F_GETFL) | os.O_ASYNC)

    def live_on(self) -> None:
        """End what `die_with_front` began."""
        fcntl.fcntl(self._socket, fcntl.F_SETFL, fcntl.fcntl(self._socket, fcntl.F_GETFL) & ~os.O_ASYNC)

    def bounded(self, step: str) -> "_Bounded":
        """A step that may block: the process is killed when it takes too long. An OSError in it is a StepError."""
        return _Bounded(step, self.seconds)


class _Bounded:
    def __init__(self, step: str, seconds: int) -> None:
        self._step = step
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.alarm(self._seconds)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        signal.alarm(0)
        if isinstance(error, OSError):
            raise StepError(error.errno or errno.EIO, self._step) from None


class Caller:
    """The caller, whose namespaces this process has joined and whose identity it has.

    The kernel translates: uid and gid are those that the caller itself sees. `device` is /dev/fuse, opened in the
    caller's user namespace, as FUSE demands of the superblock that it will serve (fs/fuse/inode.c, fuse_fill_super).
    """

    def __init__(self, opened: Descriptors, connection: int, pidfd: int) -> None:
        try:
            syscalls.setns(pidfd, syscalls.CLONE_NEWPID)
            self.pids_visible = True
        except OSError:
            self.pids_visible = False  # not below the broker's own: the broker runs without hostPID
        try:
            syscalls.setns(pidfd, syscalls.CLONE_NEWUSER)
        except OSError as error:
            if error.errno != errno.EINVAL:  # it is our own
                raise
        self.device = os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices)
        self._connection = socket.socket(fileno=connection)
        credentials = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, self.uid, self.gid = struct.unpack("iII", credentials)
        groups = syscalls.peer_groups(connection)
        syscalls.setns(pidfd, syscalls.CLONE_NEWNS)
        os.fchdir(opened.proc)
        self.mount_namespace = os.stat("self/ns/mnt").st_ino
        self.in_pid_namespace = os.stat("self/ns/pid").st_ino == os.stat("self/ns/pid_for_children").st_ino
        self._locks = opened.locks
        self._become(groups)

    @contextmanager
    def alone(self, seconds: int) -> Iterator[None]:
        """Be the only one of the mounter's who changes this mount namespace: umount2(2) takes the topmost mount at a
        place, and that must be the one that was looked at. Raises OSError (ETIMEDOUT) after so many seconds.
        """
        give_up = time.monotonic() + seconds
        while not self._lock():
            if time.monotonic() > give_up:
                raise OSError(errno.ETIMEDOUT, "another operation in the same mount namespace hangs")
            time.sleep(0.002)
        try:
            yield
        finally:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, self.mount_namespace)

    def _lock(self) -> bool:
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.mount_namespace)
        except BlockingIOError:
            return False
        return True

    def _become(self, groups: list[int]) -> None:
        """Take on the caller's identity in full, as FUSE wants of who enters a user's filesystem; and of root's
        powers keep the one to mount.
        """
        try:
            os.setgroups(groups)
        except PermissionError:
            pass  # a user namespace that denies setgroups(2): then without groups, the stricter answer
        syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 1)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        # Root of a container may look into its users' directories, as the helper's root does.
        look = (syscalls.CAP_DAC_READ_SEARCH,) if self.uid == 0 else ()
        syscalls.capset(syscalls.CAP_SYS_ADMIN, *look)
        _hide()  # a change of ids undoes it, where fs.suid_dumpable says so

    def hand_over(self, wanted: plan.MountPlan) -> None:
        """Send the device to the caller. Raises HungUp when the caller is gone."""
        warnings = tuple(wanted.warnings.splitlines())
        reply = wire.Reply(wanted.request, warnings=warnings, auto_unmount=wanted.auto_unmount)
        try:
            self._connection.sendmsg([wire.encode_reply(reply)], [_rights(self.device)], _NOW)
        except OSError:
            raise HungUp from None


#: A caller that has not read its socket for long counts as gone.
_NOW = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT


def _mount(talk: Conversation, caller: Caller, mountpoint: int) -> None:
    with talk.bounded("access mountpoint"):
        facts = _mount_facts(caller, mountpoint)
    wanted = talk.hear()
    if not _rests_on(wanted, facts):
        talk.say(facts)
        wanted = talk.hear()
    if not isinstance(wanted, plan.MountPlan) or not _rests_on(wanted, facts):
        raise StepError(errno.EPERM, "check the plan")
    if wanted.sync_init:
        caller.hand_over(wanted)
        talk.say(plan.HandedOver())
        proceed = talk.hear()
        if not isinstance(proceed, plan.Proceed):
            return
        talk.seconds = proceed.seconds
    with talk.bounded("mount"):
        if wanted.sync_init:
            talk.die_with_front()  # the kernel may wait for the FUSE program, which may be gone
        mount = filesystem.create(wanted, caller.device, caller.in_pid_namespace)
        talk.live_on()
        device, _ = syscalls.statx_mount(mount)
    try:
        flags = syscalls.MOVE_MOUNT_F_EMPTY_PATH | syscalls.MOVE_MOUNT_T_EMPTY_PATH
        with caller.alone(talk.seconds):
            syscalls.move_mount(mount, b"", mountpoint, b"", flags)
    except OSError as error:
        raise StepError(error.errno or errno.EIO, "mount") from None
    try:
        if not wanted.sync_init:
            caller.hand_over(wanted)
        os.close(caller.device)  # at once: whoever keeps a copy keeps a dead daemon's mount from failing
        talk.say(plan.Mounted(device, caller.mount_namespace, caller.pids_visible))
        if not isinstance(talk.hear(), plan.Keep):
            raise HungUp
        os.close(mount)  # before the front is told that this is done: the mount is busy as long as it is open
    except HungUp:
        with talk.bounded("roll back"):
            _detach(mount, caller, talk.seconds)


def _detach(mount: int, caller: Caller, seconds: int) -> None:
    """Take the mount away again, as soon as nobody's mount lies on it.

    Raises OSError (EBUSY) when that takes longer than half of `seconds`.
    """
    _, mount_id = syscalls.statx_mount(mount)
    give_up = time.monotonic() + seconds / 2
    while time.monotonic() < give_up:
        with caller.alone(seconds):
            if not any(parent == mount_id for _, parent, _ in _mountinfo()):
                syscalls.umount2(b"self/fd/%d" % mount, syscalls.MNT_DETACH)
                return
        time.sleep(0.05)
    raise OSError(errno.EBUSY, "another mount lies on it")


def _mountinfo() -> list[tuple[int, int, bytes]]:
    """Return mount id, parent's mount id and the fields from the filesystem type on (proc_pid_mountinfo(5))."""
    descriptor = os.open("self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        lines = file.readall().splitlines()
    mounts = []
    for line in lines:
        mount, _, superblock = line.partition(b" - ")
        mount_id, parent, _ = mount.split(b" ", 2)
        mounts.append((int(mount_id), int(parent), superblock))
    return mounts


def _rests_on(wanted: Record, facts: plan.MountFacts) -> bool:
    """Whether the plan was decided on these facts."""
    return isinstance(wanted, plan.MountPlan) and all(
        getattr(wanted, name) == value for name, value in facts._asdict().items() if name != "mount_namespace"
    )


def _mount_facts(caller: Caller, mountpoint: int) -> plan.MountFacts:
    status = os.fstat(mountpoint)
    access_errno = 0
    try:
        syscalls.faccessat2(mountpoint, b"", os.W_OK, syscalls.AT_EMPTY_PATH | syscalls.AT_EACCESS)
    except OSError as error:
        access_errno = error.errno or 0
    return plan.MountFacts(
        uid=caller.uid,
        gid=caller.gid,
        root_mode=stat.S_IFMT(status.st_mode),
        foreign_sticky=bool(status.st_mode & stat.S_ISVTX) and status.st_uid != caller.uid,
        filesystem=syscalls.fstatfs_type(mountpoint),
        access_errno=access_errno,
        mount_namespace=caller.mount_namespace,
    )


def _unmount(talk: Conversation, caller: Caller, directory: int, start: plan.StartUnmount) -> None:
    with talk.bounded("access mountpoint"):
        facts, looked = _unmount_facts(caller, directory, start)
    talk.say(facts)
    wanted = talk.hear()
    if not isinstance(wanted, plan.UnmountPlan):
        return
    with talk.bounded("unmount"), caller.alone(talk.seconds):
        if _look(directory, start.name) != looked:
            raise OSError(errno.EBUSY, "another mount has come")
        os.fchdir(directory)
        syscalls.umount2(start.name, syscalls.UMOUNT_NOFOLLOW | (syscalls.MNT_DETACH if wanted.lazy else 0))
    talk.say(plan.Unmounted())


def _look(directory: int, name: bytes) -> tuple[int, int]:
    """Return device number and mount id of an entry, found with the caller's rights. Raises OSError."""
    entry = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        return syscalls.statx_mount(entry)
    finally:
        os.close(entry)


def _unmount_facts(
    caller: Caller, directory: int, start: plan.StartUnmount
) -> tuple[plan.UnmountFacts, tuple[int, int]]:
    """Return what is on the entry, and the result of looking at it."""
    try:
        device, mount_id = _look(directory, start.name)
    except OSError as error:
        facts = plan.UnmountFacts(caller.uid, caller.mount_namespace, error.errno or errno.EIO, False, 0, False)
        return facts, (0, 0)
    facts = plan.UnmountFacts(
        uid=caller.uid,
        mount_namespace=caller.mount_namespace,
        access_errno=0,
        mounted=mount_id != syscalls.statx_mount(directory)[1],
        device=device,
        dead=start.only_dead and _is_own_fuse(mount_id, caller.uid) and _is_dead(directory, start.name),
    )
    return facts, (device, mount_id)


def _is_dead(directory: int, name: bytes) -> bool:
    """Whether nobody serves the FUSE filesystem any more. Asks it, so this may block."""
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory))
        return False
    except OSError as error:
        return error.errno == errno.ENOTCONN


def _is_own_fuse(mount_id: int, uid: int) -> bool:
    """Whether mountinfo calls the mount a FUSE filesystem of that user (proc_pid_mountinfo(5))."""
    for found, _, superblock in _mountinfo():
        if found == mount_id:
            filesystem, _, options = superblock.split(b" ", 2)
            return filesystem.partition(b".")[0] == b"fuse" and b"user_id=%d" % uid in options.split(b",")
    return False


def _rights(descriptor: int) -> tuple[int, int, bytes]:
    return (socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))


def _detached(filesystem: bytes) -> int:
    """Return a new mount of `filesystem` that is attached nowhere."""
    context = syscalls.fsopen(filesystem, syscalls.FSOPEN_CLOEXEC)
    try:
        syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
        return syscalls.fsmount(context, syscalls.FSMOUNT_CLOEXEC, syscalls.MOUNT_ATTR_NOSUID)
    finally:
        os.close(context)


def _private_devices() -> int:
    """Return a directory that holds ``dev/fuse``, a node that root of any user namespace may open.

    /dev/fuse itself may be 0600; and its name matters, because callers look at /proc/self/fd. Where mknod(2) is
    refused (a broker that is itself in a container), the host's own node has to do.
    """
    directory = _detached(b"tmpfs")
    try:
        os.mkdir("dev", 0o755, dir_fd=directory)
        os.mknod("dev/fuse", 0o020666, _FUSE_DEVICE, dir_fd=directory)
        os.chmod("dev/fuse", 0o666, dir_fd=directory)
    except PermissionError:
        os.close(directory)
        return os.open("/", os.O_PATH | os.O_DIRECTORY)
    return directory


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
