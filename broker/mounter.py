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
from contextlib import suppress

from broker import capabilities, connections, filesystem, invariants, mounts, namespaces, plan, syscalls
from broker.children import Rescue
from broker.plan import Record
from fusermount3_proxy import wire

#: What the mounter needs; docs/security.md says for what.
CAPABILITIES = (
    syscalls.CAP_DAC_READ_SEARCH,
    syscalls.CAP_SETGID,
    syscalls.CAP_SETUID,
    syscalls.CAP_SYS_CHROOT,
    syscalls.CAP_SYS_PTRACE,
    syscalls.CAP_SYS_ADMIN,
    syscalls.CAP_MKNOD,
)
#: Children that wait for an operation.
SPARES = 4
#: Milliseconds without a new operation after which a spare that was used is replaced, unless it was the last: a fork
#: and a rehearsal would take the processor from the operation itself.
REPLACE_AFTER = 20
#: More records than the kernel queues for a socket, with their overhead.
_MOST_QUEUED = 1024
#: As whom a user namespace shows those who have no uid in it (/proc/sys/kernel/overflowuid).
OVERFLOW_UID = 65534
_FUSE_DEVICE = os.makedev(10, 229)


class Descriptors:
    """What the mounter opens before it serves, for children whose root is no longer the broker's."""

    def __init__(self, orphans: socket.socket) -> None:
        #: Not the one that is mounted at /proc, which may hide processes.
        self.proc = _detached(b"proc")
        self.fusectl = _detached(b"fusectl")
        self.devices = _private_devices()
        #: Where to say what the next front has to know.
        self.orphans = orphans
        #: Who is never a caller, whoever says so.
        self.supervisor = os.getppid()
        #: Nothing is in this file; see `mounts.alone`.
        self.locks = os.memfd_create("locks")


def main(control: socket.socket, orphans: socket.socket, supervisor: socket.socket) -> None:
    """Tell the supervisor when this is ready; keep `SPARES` children that take start records from `control`, until that
    has no other end any more. `orphans` leads to whoever is the front then."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front decides when to end, and hangs up
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children say all in their conversation; the kernel reaps them
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _hide()
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    capabilities.keep(*CAPABILITIES)
    os.setgroups([])
    control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    opened = Descriptors(orphans)
    socket.send_fds(supervisor, [b"ready"], [opened.fusectl, opened.proc])
    supervisor.close()
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
            if not _is_awaited(control):
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


def _is_awaited(control: socket.socket) -> bool:
    """Whether an operation waits for a child already: then nothing is won by a rehearsal."""
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    return bool(waiting.poll(0))


def _rehearse(opened: Descriptors) -> None:
    """Go through the motions of an operation, as far as they change nothing."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        talk = Conversation(os.dup(ours.fileno()), 1)
        with talk.bounded("rehearse"):
            talk.say(_REHEARSED_FACTS)
        ours.sendmsg([b"rehearsal"], [_rights(opened.proc)])
        theirs.send(plan.dump(_REHEARSED_PLAN))
        talk.hear()
        ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        syscalls.peer_groups(ours.fileno())
    os.fchdir(opened.proc)
    os.stat("self/ns/mnt")
    namespaces.capabilities_of(os.getpid(), opened.proc)
    namespaces.check_owner_of_mount_namespace()
    mounts.rehearse(opened.locks)
    mounts.look(opened.proc)
    syscalls.fstatfs_type(opened.proc)
    syscalls.faccessat2(opened.proc, b"", os.R_OK, syscalls.AT_EMPTY_PATH | syscalls.AT_EACCESS)
    os.close(filesystem.configure(_REHEARSED_PLAN, 0))
    os.close(os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices))


_REHEARSED_FACTS = plan.MountFacts(0, 0, 0, False, 0, 0, 0, 0)
_REHEARSED_PLAN = plan.MountPlan(
    uid=0,
    gid=0,
    root_mode=stat.S_IFDIR,
    foreign_sticky=False,
    filesystem=0,
    search_errno=0,
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


def _receive_start(control: socket.socket) -> tuple[Record, list[int], int] | None:
    """Return the next start record, its descriptors and the front's pid; None when the front has hung up.

    The pid is the kernel's word: a process without capabilities can't give another's (unix(7), SO_PASSCRED).
    """
    data, ancillary = _receive_all(control)
    if not data:
        return None
    (front,) = (
        struct.unpack("iII", said)[0]
        for level, kind, said in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
    )
    return plan.load(data), wire.descriptors(ancillary), front


def _receive(connection: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return the next record, and all descriptors that came with it. Raises OSError, ProtocolError."""
    data, ancillary = _receive_all(connection, flags)
    return data, wire.descriptors(ancillary)


def _receive_all(connection: socket.socket, flags: int = 0) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    space = socket.CMSG_SPACE(4 * syscalls.SCM_MAX_FD) + socket.CMSG_SPACE(_SIZE_OF_CREDENTIALS)
    data, ancillary, cut, _ = connection.recvmsg(wire.MAX_MESSAGE, space, socket.MSG_CMSG_CLOEXEC | flags)
    wire.check_whole(cut)
    return data, ancillary


_SIZE_OF_CREDENTIALS = struct.calcsize("iII")


def _operate(opened: Descriptors, start: Record, descriptors: list[int], front: int) -> None:
    """Carry one operation out for the process `front`, and tell it if that fails."""
    if not isinstance(start, plan.Start):
        return
    talk = Conversation(descriptors[0], start.seconds)
    try:
        if isinstance(start, plan.StartMount | plan.StartUnmount):
            _serve_caller(opened, talk, start, front, *descriptors[1:])
        elif isinstance(start, plan.StartReap):
            _reap(opened, talk, start)
        elif isinstance(start, plan.StartSurvey):
            _survey(opened, talk, start)
        elif isinstance(start, plan.StartAbort):
            _abort(opened, talk, start)
        elif isinstance(start, plan.StartCheck):
            _check(opened, talk)
    except StepError as error:
        talk.say(plan.Failed(error.errno, error.step.encode()))
    except BadRequest as bad:
        talk.say(plan.BadDescriptors(bad.count))
    except Dismissed:
        talk.say(plan.HasLetGo())
    except HungUp:
        pass
    except Exception as error:
        talk.say(plan.Failed(errno.EIO, repr(error).encode()))
    talk.wait_for_end()
    with talk.bounded("let go"):
        for connection in _connections(start, descriptors[1:]):
            _drain(connection)


def _connections(start: Record, descriptors: list[int]) -> list[socket.socket]:
    """Return the callers' connections among the descriptors that came with a start record."""
    if isinstance(start, plan.StartMount | plan.StartUnmount):
        descriptors = descriptors[:1]
    elif not isinstance(start, plan.StartDismissal):
        descriptors = []
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


def _drain(connection: socket.socket) -> None:
    """Take what a caller has said that nobody wanted, now that it can say no more.

    If a connection ends with something unread, its other end is told of that before it can read the answer.
    """
    with suppress(OSError, wire.ProtocolError):
        for _ in range(_MOST_QUEUED):  # an empty record looks like the end
            _receive(connection, socket.MSG_DONTWAIT)


def _serve_caller(
    opened: Descriptors,
    talk: "Conversation",
    start: plan.StartMount | plan.StartUnmount,
    front: int,
    connection: int,
    pidfd: int,
) -> None:
    with talk.bounded("join"):
        caller = Caller(opened, connection)
        if caller.pid in (front, opened.supervisor):
            raise PermissionError(errno.EPERM, "the front is no caller")
        caller.join(opened, namespaces.pidfd_of_peer(connection, pidfd, opened.proc))
    try:
        if isinstance(start, plan.StartMount):
            _mount(talk, caller, start.commit_seconds, opened.orphans)
        else:
            _unmount(talk, caller, start)
    finally:
        with talk.bounded("let go"):
            caller.let_go()


class BadRequest(Exception):
    """The caller did not send one descriptor opened with O_PATH, but `count` of them, or one that is not so."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class StepError(Exception):
    """A step of the operation failed with `errno`."""

    def __init__(self, errno: int, step: str) -> None:
        super().__init__(errno, step)
        self.errno = errno
        self.step = step


class HungUp(Exception):
    """The front or the caller has gone: the operation is nobody's any more."""


class Dismissed(Exception):
    """The front has refused the request."""


class Conversation:
    """The child's end of the talk with the front. The front hangs up when it is over, or dies: no wait is for ever."""

    def __init__(self, descriptor: int, seconds: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self.seconds = seconds

    def say(self, record: Record) -> None:
        """Raises HungUp."""
        try:
            self._socket.send(plan.dump(record), socket.MSG_NOSIGNAL)
        except OSError:
            raise HungUp from None

    def hear(self) -> Record:
        """Return what the front says. Raises HungUp, and Dismissed when there is nothing more to do."""
        try:
            record = plan.load(self._socket.recv(wire.MAX_MESSAGE))
        except (OSError, wire.ProtocolError):
            raise HungUp from None
        if isinstance(record, plan.LetGo):
            raise Dismissed
        return record

    def is_over(self, seconds: float) -> bool:
        """Wait for so many seconds; whether the front has hung up, or said what it has no reason to say."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(1000 * seconds))

    def wait_for_end(self) -> None:
        """Return when the front has hung up."""
        with suppress(OSError):
            while self._socket.recv(wire.MAX_MESSAGE):
                pass

    def fileno(self) -> int:
        """Return the descriptor; it hangs up when the front does."""
        return self._socket.fileno()

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
    """The caller, whose namespaces this process has joined and with whose rights it looks at files.

    The kernel translates: uid and gid are those that the caller itself sees. `device` is /dev/fuse, opened in the
    caller's user namespace, as FUSE demands of the superblock that it will serve (fs/fuse/inode.c, fuse_fill_super).
    Real and saved uid stay the mounter's own: they are what decides who may send signals to a process.
    """

    def __init__(self, opened: Descriptors, connection: int) -> None:
        """Take the request, and the descriptor that it pins. Raises BadRequest, OSError."""
        # A copy: the descriptor itself stays open until this process ends, after the front has closed its own.
        self._connection = socket.socket(fileno=os.dup(connection))
        self._opened = opened
        self.pid = self._credentials()[0]
        self.locks = opened.locks
        descriptors = self.take()
        if len(descriptors) != 1 or not fcntl.fcntl(descriptors[0], fcntl.F_GETFL) & os.O_PATH:
            raise BadRequest(len(descriptors))
        self.pinned = descriptors[0]

    def take(self) -> list[int]:
        """Take what the caller has said, which the front has read; return what came with it. Raises OSError."""
        try:
            return _receive(self._connection, socket.MSG_DONTWAIT)[1]
        except wire.ProtocolError as error:
            raise OSError(error.errno, error.text) from None

    def let_go(self) -> None:
        """Close what is pinned, before the last word: it is busy as long as it is open."""
        if self.pinned >= 0:
            os.close(self.pinned)
            self.pinned = -1

    def join(self, opened: Descriptors, pidfd: int) -> None:
        """Enter the caller's namespaces. Raises OSError."""
        bounding, effective = namespaces.capabilities_of(self.pid, opened.proc)
        self.may_mount = bool(effective >> syscalls.CAP_SYS_ADMIN & 1)
        self.in_user_namespace = namespaces.join_user_namespace(pidfd)
        traced = bool(bounding >> syscalls.CAP_SYS_PTRACE & 1)
        self.pids = namespaces.pid_namespace(pidfd, opened.proc, self.in_user_namespace, traced)
        self.device = os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices)
        _, self.uid, self.gid = self._credentials()
        groups = syscalls.peer_groups(self._connection.fileno())
        self.mount_namespace = namespaces.join_mount_namespace(pidfd, opened.proc)
        try:
            os.setgroups(groups)
        except PermissionError:
            pass  # a user namespace that denies setgroups(2): then without groups, the stricter answer
        syscalls.setfsids(self.uid, self.gid)
        # Root of a container may look into its users' directories, as the helper's root does.
        look = (syscalls.CAP_DAC_READ_SEARCH,) if self.uid == 0 else ()
        syscalls.capset(syscalls.CAP_SYS_ADMIN, syscalls.CAP_SETUID, syscalls.CAP_SETGID, *look)

    def _credentials(self) -> tuple[int, int, int]:
        """Return pid, uid and gid of the caller, as this process sees them at the moment."""
        pid, uid, gid = struct.unpack("iII", self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, uid, gid

    def entering(self, device: int) -> plan.Entering | None:
        """Return what is to be said before the filesystem of `device` is asked; None if that is not FUSE."""
        if not connections.exists(self._opened.fusectl, device):
            return None
        return plan.Entering(device, self.uid, self.mount_namespace)

    def rescue(self, talk: Conversation) -> Rescue:
        """Return the way out of a mount that waits for the FUSE program: that is given up."""

        def unblock() -> None:
            with suppress(OSError):  # it has just ended
                connections.abort_own(self._opened.fusectl, self._opened.proc, self.device)

        return Rescue(talk.fileno(), unblock)

    def hand_over(self, wanted: plan.MountPlan) -> None:
        """Send the device to the caller. Raises HungUp when the caller is gone."""
        warnings = tuple(wanted.warnings.splitlines())
        reply = wire.Reply(wanted.request, warnings=warnings, auto_unmount=wanted.auto_unmount)
        self._send(reply, [_rights(self.device)])

    def tell(self, request: bytes) -> None:
        """Tell the caller, who waits for it, that its request has been carried out. Raises HungUp."""
        self._send(wire.Reply(request), [])

    def _send(self, reply: wire.Reply, rights: list[tuple[int, int, bytes]]) -> None:
        try:
            self._connection.sendmsg([wire.encode_reply(reply)], rights, _NOW)
        except OSError:
            raise HungUp from None

    def commits(self, seconds: int) -> bool:
        """Whether the caller says, in time, that it has taken the mount."""
        waiting = select.poll()
        waiting.register(self._connection, select.POLLIN)
        if not waiting.poll(1000 * seconds):
            return False
        try:
            said, _, cut, _ = self._connection.recvmsg(wire.MAX_MESSAGE, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return not cut and isinstance(wire.decode_request(said), wire.CommitRequest)
        except (OSError, wire.ProtocolError):
            return False


#: A caller that has not read its socket for long counts as gone.
_NOW = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT


def _mount(talk: Conversation, caller: Caller, commit_seconds: int, orphans: socket.socket) -> None:
    mountpoint = caller.pinned
    with talk.bounded("access mountpoint"):
        facts = _mount_facts(talk, caller, mountpoint)
    wanted = talk.hear()
    if not _rests_on(wanted, facts):
        talk.say(facts)
        wanted = talk.hear()
    if not isinstance(wanted, plan.MountPlan) or not _rests_on(wanted, facts) or not invariants.allow_mount(wanted):
        raise StepError(errno.EPERM, "check the plan")
    with talk.bounded("mount"):
        if not invariants.KERNEL_FILESYSTEMS.keys().isdisjoint(mounts.hidden_by(mountpoint)):
            # An engine that starts a program in the container looks for /proc and /dev/pts there.
            raise OSError(errno.EPERM, "it would hide a filesystem of the kernel")
    if wanted.sync_init:
        caller.hand_over(wanted)
        talk.say(plan.HandedOver())
        proceed = talk.hear()
        if not isinstance(proceed, plan.Proceed):
            return
        talk.seconds = proceed.seconds
        with talk.bounded("mount"):
            caller.take()
    with talk.bounded("mount"):
        rescue = caller.rescue(talk) if wanted.sync_init else None
        mount = filesystem.create(wanted, caller.device, caller.pids, rescue)
        device = mounts.look(mount).device
    try:
        mounts.attach(mount, mountpoint, caller.locks, talk.seconds)
    except OSError as error:
        raise StepError(error.errno or errno.EIO, "mount") from None
    if caller.pids.descriptor is not None and not _is_as_planned(mount, wanted):
        with talk.bounded("roll back"):
            mounts.detach(mount, mountpoint, caller.locks, talk.seconds)
        raise StepError(errno.EPERM, "check the plan")
    mounted = plan.Mounted(device, caller.mount_namespace, caller.pids.visible)
    try:
        if not wanted.sync_init:
            caller.hand_over(wanted)
        os.close(caller.device)  # at once: whoever keeps a copy keeps a dead daemon's mount from failing
        with suppress(HungUp):  # the front has died; that is seen below
            talk.say(mounted)
        if not _is_wanted(talk, caller, wanted, mounted, commit_seconds, orphans):
            raise HungUp
        with talk.bounded("let go"):
            os.close(mount)
            caller.let_go()
            caller.take()
        talk.say(plan.Kept())
    except HungUp:
        with talk.bounded("roll back"):
            mounts.detach(mount, mountpoint, caller.locks, talk.seconds)
            os.close(mount)
            caller.let_go()
        talk.say(plan.RolledBack())


def _is_wanted(
    talk: Conversation,
    caller: Caller,
    wanted: plan.MountPlan,
    mounted: plan.Mounted,
    commit_seconds: int,
    orphans: socket.socket,
) -> bool:
    """Whether the mount is to stay: that is for the front to say, and for the caller if there is none any more."""
    try:
        return isinstance(talk.hear(), plan.Keep)
    except HungUp:
        if wanted.sync_init:
            caller.tell(wanted.request)
        if not caller.commits(commit_seconds):
            return False
    orphan = plan.Orphaned(
        device=mounted.device,
        mount_namespace=mounted.mount_namespace,
        uid=caller.uid,
        pid=caller.pid,
        request=wanted.request,
        source=wanted.source,
        subtype=wanted.subtype,
        target=b"",
    )
    with suppress(OSError):  # the broker is gone, altogether
        orphans.send(plan.dump(orphan), _NOW)
    return True


def _is_as_planned(mount: int, wanted: plan.MountPlan) -> bool:
    """Whether the filesystem is the caller's, and others may enter it only if they should.

    In its container somebody may have got hold of who created it, and of what it was created from.
    """
    fuse = mounts.fuse_if_any(mounts.look(mount).mount_id)
    return fuse == mounts.Fuse(wanted.uid, wanted.gid, wanted.allow_other)


def _rests_on(wanted: Record, facts: plan.MountFacts) -> bool:
    """Whether the plan was decided on these facts."""
    return isinstance(wanted, plan.MountPlan) and all(
        getattr(wanted, name) == value for name, value in facts._asdict().items() if name != "mount_namespace"
    )


def _mount_facts(talk: Conversation, caller: Caller, mountpoint: int) -> plan.MountFacts:
    looked = mounts.look(mountpoint)
    try:
        fuse = mounts.fuse_of(looked.mount_id)
    except LookupError:
        raise StepError(errno.EINVAL, "mount") from None
    if fuse and fuse.uid != caller.uid and not fuse.allow_other:
        # FUSE would refuse it to the caller, but not to this process, whose real uid is its own.
        raise OSError(errno.EACCES, "another user's FUSE filesystem")
    _announce(talk, caller, looked)
    status = os.fstat(mountpoint)
    return plan.MountFacts(
        uid=caller.uid,
        gid=caller.gid,
        root_mode=stat.S_IFMT(status.st_mode),
        foreign_sticky=bool(status.st_mode & stat.S_ISVTX) and not _owns(caller, status.st_uid),
        filesystem=syscalls.fstatfs_type(mountpoint),
        search_errno=_access(mountpoint, os.X_OK) if stat.S_ISDIR(status.st_mode) else 0,
        access_errno=_access(mountpoint, os.W_OK),
        mount_namespace=caller.mount_namespace,
    )


def _announce(talk: Conversation, caller: Caller, looked: mounts.Looked) -> None:
    """Tell the front, if what is looked at next is on a FUSE filesystem."""
    if entering := caller.entering(looked.device):
        talk.say(entering)


def _access(mountpoint: int, mode: int) -> int:
    """Return 0 if the caller may do that there, else the errno that says why not."""
    try:
        syscalls.faccessat2(mountpoint, b"", mode, syscalls.AT_EMPTY_PATH | syscalls.AT_EACCESS)
        return 0
    except OSError as error:
        return error.errno or errno.EIO


def _owns(caller: Caller, owner: int) -> bool:
    """Whether `owner` is the caller. In a user namespace, everybody who is not mapped looks like the overflow uid."""
    return owner == caller.uid and not (caller.in_user_namespace and owner == OVERFLOW_UID)


def _unmount(talk: Conversation, caller: Caller, start: plan.StartUnmount) -> None:
    directory = caller.pinned
    if not invariants.is_name(start.name):
        raise StepError(errno.EINVAL, "access mountpoint")
    with talk.bounded("access mountpoint"):
        facts, looked = _unmount_facts(talk, caller, directory, start)
    talk.say(facts)
    wanted = talk.hear()
    if not isinstance(wanted, plan.UnmountPlan):
        return
    if not invariants.allow_unmount(caller.uid, _owner_of(looked)):
        raise StepError(errno.EPERM, "check the plan")
    with talk.bounded("unmount"):
        mounts.unmount(directory, start.name, looked, wanted.lazy, caller.locks, talk.seconds)
        caller.let_go()
    try:
        talk.say(plan.Unmounted())
        talk.hear()
    except HungUp:  # and nobody has told the caller
        caller.tell(wanted.request)


def _owner_of(looked: mounts.Looked) -> int | None:
    """Return whose FUSE filesystem was looked at; None if it is none, or is gone."""
    fuse = mounts.fuse_if_any(looked.mount_id)
    return fuse.uid if fuse else None


def _unmount_facts(
    talk: Conversation, caller: Caller, directory: int, start: plan.StartUnmount
) -> tuple[plan.UnmountFacts, mounts.Looked]:
    """Return what is on the entry, and the result of looking at it."""
    facts = plan.UnmountFacts(
        uid=caller.uid,
        mount_namespace=caller.mount_namespace,
        access_errno=0,
        mounted=False,
        device=0,
        dead=False,
        may_mount=caller.may_mount,
    )
    below = mounts.look(directory)
    _announce(talk, caller, below)
    try:
        looked = mounts.look_up(directory, start.name)
    except OSError as error:
        return facts._replace(access_errno=error.errno or errno.EIO), mounts.Looked(0, 0)
    if looked.mount_id == below.mount_id:
        return facts, looked
    if start.only_dead:
        _announce(talk, caller, looked)
    dead = start.only_dead and _is_dead(caller, directory, start.name, looked)
    return facts._replace(mounted=True, device=looked.device, dead=dead), looked


def _is_dead(caller: Caller, directory: int, name: bytes, looked: mounts.Looked) -> bool:
    """Whether a FUSE filesystem of the caller's is on the entry that nobody serves."""
    fuse = mounts.fuse_if_any(looked.mount_id)
    if fuse is None or fuse.uid != caller.uid:
        return False
    entry = os.open(name, mounts.LOOK, dir_fd=directory)
    try:
        return mounts.is_dead(entry, fuse)
    finally:
        os.close(entry)


def _reap(opened: Descriptors, talk: Conversation, start: plan.StartReap) -> None:
    """Unmount what is dead of a filesystem, in the mount namespace where it is; nobody asked for that."""
    with talk.bounded("join"):
        pidfd = connections.process_in(opened.proc, start.mount_namespace)
        namespaces.join_user_namespace(pidfd)
        if namespaces.join_mount_namespace(pidfd, opened.proc) != start.mount_namespace:
            raise ProcessLookupError(errno.ESRCH, "the process has gone to another mount namespace")
        syscalls.capset(syscalls.CAP_SYS_ADMIN, syscalls.CAP_SETUID, syscalls.CAP_SETGID, syscalls.CAP_DAC_READ_SEARCH)
    with talk.bounded("unmount"):
        reaped = mounts.unmount_dead(start.device, opened.locks, talk.seconds)
    talk.say(plan.Reaped(reaped))


def _survey(opened: Descriptors, talk: Conversation, start: plan.StartSurvey) -> None:
    """Tell how connections are."""
    with talk.bounded("survey"):
        surveyed = connections.survey(opened.fusectl, opened.proc, start.connections, start.search)
    talk.say(plan.Surveyed(surveyed))


def _abort(opened: Descriptors, talk: Conversation, start: plan.StartAbort) -> None:
    """Abort a connection, if need be once it hangs, and until then wait, which nothing bounds but the front."""
    try:
        with connections.Connection(opened.fusectl, start.device, start.connection) as connection:
            if start.unmoved and not connections.hangs(connection, start.unmoved, talk.is_over):
                raise HungUp
            with talk.bounded("abort"):
                connection.abort()
    except OSError as error:
        raise StepError(error.errno or errno.EIO, "abort") from None
    talk.say(plan.Aborted())


def _check(opened: Descriptors, talk: Conversation) -> None:
    """Say that there is a child for an operation, and a device for its mount."""
    with talk.bounded("open /dev/fuse"):
        os.close(os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices))
    talk.say(plan.Checked())


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
    refused (a broker that is itself in a container), the host's own node has to do. It is read-only, which forbids
    nobody to use the device: but a container's root who has a descriptor of it could change its mode for all others.
    """
    directory = _detached(b"tmpfs")
    try:
        os.mkdir("dev", 0o755, dir_fd=directory)
        os.mknod("dev/fuse", 0o020666, _FUSE_DEVICE, dir_fd=directory)
        os.chmod("dev/fuse", 0o666, dir_fd=directory)
    except PermissionError:
        os.close(directory)
        flags = syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC | syscalls.AT_RECURSIVE
        directory = syscalls.open_tree(syscalls.AT_FDCWD, b"/", flags)
        syscalls.mount_setattr(directory, b"", _ALL_OF_IT, syscalls.MOUNT_ATTR_RDONLY)
        return directory
    syscalls.mount_setattr(directory, b"", syscalls.AT_EMPTY_PATH, syscalls.MOUNT_ATTR_RDONLY)
    return directory


_ALL_OF_IT = syscalls.AT_EMPTY_PATH | syscalls.AT_RECURSIVE


if __name__ == "__main__":
    main(*(socket.socket(fileno=int(each)) for each in sys.argv[1:]))
