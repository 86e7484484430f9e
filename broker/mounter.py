"""The privileged half of the broker: it enters the caller's namespaces and mounts there.

The parent does one thing for ever: it keeps a few children ready. A child takes one start record with its descriptors
from the front, holds one conversation (`plan` has the whole list of what may be said), and ends. It joins the caller's
namespaces and takes the caller's identity from the kernel; it tells the front what it found; it does what the front
decided, or nothing. Children are forked before they are needed because a process is slow after fork(2): each page that
it touches for the first time is a fault. So they also rehearse; and what takes two (`twins`) forks its own child ahead.

Whatever could block for ever, such as a path on a hung filesystem, is bounded by an alarm whose signal kills the child.
From the moment a mount is attached until the front says `Keep`, no alarm is set but that of the rollback.

Once the child has joined a foreign mount namespace, every file of the machine is the caller's. So the modules are
imported before, nothing is imported after, and the only paths used are relative to descriptors opened before.
"""

import errno
import gc
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from broker import (
    capabilities,
    connections,
    eager,
    filesystem,
    invariants,
    kubelet,
    mounting,
    mounts,
    namespaces,
    plan,
    syscalls,
    unmounting,
)
from broker.caller import Caller
from broker.conversation import (
    BadRequest,
    Conversation,
    Dismissed,
    HungUp,
    StepError,
    receive_all,
    rights,
)
from broker.descriptors import Descriptors
from broker.plan import Record
from broker.twins import Attendant, Child, Twin, Volume
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
#: More records than the kernel queues for a socket, with their overhead. Without a front, a caller may go on talking.
_MOST_QUEUED = 1024


def main(
    control: socket.socket, orphans: socket.socket, supervisor: socket.socket, kubelet_directory: int | None = None
) -> None:
    """Tell the supervisor when this is ready; keep `SPARES` children that take start records from `control`, until that
    has no other end any more. `orphans` leads to whoever is the front then. `kubelet_directory` is a descriptor, if
    there are volumes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front decides when to end, and hangs up
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children say all in their conversation; the kernel reaps them
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _hide()
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    capabilities.keep(*CAPABILITIES)
    os.setgroups([])
    control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    opened = Descriptors(orphans, kubelet_directory)
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
            spare = _fork_spare(control, opened, spares, with_child=bool(spares) and opened.kubelet is not None)
            waiting.register(spare, 0)
            spares.add(spare)


def _hide() -> None:
    """Have nobody of the same uid look into this process, neither its memory nor its descriptors (ptrace(2))."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def _fork_spare(control: socket.socket, opened: Descriptors, others: Collection[int], *, with_child: bool) -> int:
    """Fork a child, and return the reading end of a pipe that hangs up when the child is no spare any more. `others`
    are those of the other spares.

    The child closes the other end when it takes an operation; the kernel does, if it dies. It may fork a child itself,
    in case the operation takes two (see `twins`).
    """
    spare, busy = os.pipe()
    while True:
        try:
            pid = os.fork()
            break
        except OSError:  # too many processes, or no memory: requests wait, and it passes
            time.sleep(0.1)
    if pid == 0:
        try:
            for each in (spare, *others):
                os.close(each)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            child = None
            if not _is_awaited(control):
                if with_child:
                    with suppress(OSError):  # then it is forked when there is something to do
                        child = _fork_child(opened, control.fileno(), busy)
                _rehearse(opened)
            if started := _receive_start(control):
                os.close(busy)
                control.close()
                _operate(opened, child, *started)
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
    with suppress(OSError):  # a kernel may dislike what is only a rehearsal
        _go_through_the_motions(opened)


def _go_through_the_motions(opened: Descriptors) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        talk = Conversation(os.dup(ours.fileno()), 1)
        with talk.bounded("rehearse"):
            talk.say(_REHEARSED_FACTS)
        ours.sendmsg([b"rehearsal"], [rights(opened.proc)])
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
    data, ancillary = receive_all(control)
    if not data:
        return None
    (front,) = (
        struct.unpack("iII", said)[0]
        for level, kind, said in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
    )
    return plan.load(data), wire.descriptors(ancillary), front


def _operate(opened: Descriptors, child: Child | None, start: Record, descriptors: list[int], front: int) -> None:
    """Carry one operation out for the process `front`. `child` has been forked in case it is a volume's."""
    if not isinstance(start, plan.Start):
        return
    if child and not isinstance(start, plan.StartVolumeMount):
        child.end.close()  # so that it ends meanwhile
    with _conversation(start, descriptors) as talk:
        if isinstance(start, plan.StartMount | plan.StartUnmount):
            _serve_caller(opened, talk, start, front, *descriptors[1:])
        elif isinstance(start, plan.StartReap):
            _reap(opened, talk, start)
        elif isinstance(start, plan.StartSurvey):
            _survey(opened, talk, start)
        elif isinstance(start, plan.StartAbort):
            _abort(opened, talk, start)
        elif isinstance(start, plan.StartRecognize):
            _recognize(opened, talk, start)
        elif isinstance(start, plan.StartCheck):
            _check(opened, talk)
        elif opened.kubelet is None:
            raise StepError(errno.EOPNOTSUPP, "serve volumes")
        elif isinstance(start, plan.StartVolumeMount):
            _attend_child(opened, talk, child, start, descriptors, front)
        elif isinstance(start, plan.StartEager):
            eager.mount(opened, talk, start)
        elif isinstance(start, plan.StartPublish):
            kubelet.publish(opened, talk, start)
        elif isinstance(start, plan.StartUnpublish):
            kubelet.unpublish(opened, talk, start)
        elif isinstance(start, plan.StartStat):
            kubelet.stat_volume(opened, talk, start)
    if child:
        child.dismiss()


@contextmanager
def _conversation(start: plan.Start, descriptors: list[int]) -> Iterator[Conversation]:
    """Give the conversation of an operation; tell the front if that fails, and wait until it hangs up."""
    talk = Conversation(descriptors[0], start.seconds)
    try:
        yield talk
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
    if isinstance(start, plan.StartMount | plan.StartVolumeMount | plan.StartUnmount):
        descriptors = descriptors[:1]
    elif not isinstance(start, plan.StartDismissal):
        descriptors = []
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


def _drain(connection: socket.socket) -> None:
    """Take what a caller has said that nobody wanted, now that it can say no more.

    If a connection ends with something unread, its other end is told of that before it can read the answer.

    An empty record looks like the end, but for its sender's credentials (net/unix/af_unix.c, unix_dgram_recvmsg).
    """
    with suppress(OSError, wire.ProtocolError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for _ in range(_MOST_QUEUED):
            if not any(receive_all(connection, socket.MSG_DONTWAIT)):
                return


def _serve_caller(
    opened: Descriptors,
    talk: Conversation,
    start: plan.StartMount | plan.StartUnmount,
    front: int,
    connection: int,
    pidfd: int,
) -> None:
    with talk.bounded("join"):
        caller = Caller(opened, connection)
        _join(opened, caller, front, connection, pidfd)
    with _letting_go(talk, caller):
        if isinstance(start, plan.StartMount):
            mounting.mount(talk, caller, start, opened.orphans)
        else:
            unmounting.unmount(talk, caller, start)


def _attend_child(
    opened: Descriptors,
    talk: Conversation,
    child: Child | None,
    start: plan.StartVolumeMount,
    descriptors: list[int],
    front: int,
) -> None:
    """Have the child serve the caller; this process is its twin, and ends after it."""
    _, connection, pidfd, *held = descriptors
    if not invariants.allow_target(start.target) or len(held) != start.held:
        raise StepError(errno.EPERM, "check the volume")
    if child is None or child.has_ended():
        with talk.bounded("fork"):
            child = _fork_child(opened, *descriptors, rehearses=False)
    try:
        child.hand_over(Volume(start, descriptors, front))
        for descriptor in (connection, pidfd, *held):
            os.close(descriptor)
        os.fchdir(opened.proc)
        Attendant(opened, start.target, start.read_only, start.seconds).attend(child.end)
        os.waitpid(child.pid, 0)
    finally:
        os._exit(0)


def _fork_child(opened: Descriptors, *others: int, rehearses: bool = True) -> Child:
    """Fork the process that serves the caller of a volume; what is open as `others` is none of its business."""

    def serve(twin: socket.socket) -> None:
        for descriptor in others:
            os.close(descriptor)
        if rehearses:
            _rehearse(opened)
        if volume := Volume.receive(twin):
            _serve_caller_of_volume(opened, twin, volume)

    return Child.fork(serve)


def _serve_caller_of_volume(opened: Descriptors, end: socket.socket, volume: Volume) -> None:
    """Serve the caller, with the help of the twin at the other `end`."""
    start, descriptors, front = volume
    _, connection, pidfd, *held = descriptors
    with _conversation(start, descriptors) as talk:
        os.fchdir(opened.proc)
        twin = Twin(end, start.seconds, os.stat("self/ns/mnt").st_ino)
        with talk.bounded("join"):
            caller = Caller(opened, connection, int(start.pinned))
            _join(opened, caller, front, connection, pidfd)
            if held:
                caller.take_device(held[0])
        with _letting_go(talk, caller):
            mounting.mount_volume(talk, caller, start, opened.orphans, twin)


def _join(opened: Descriptors, caller: Caller, front: int, connection: int, pidfd: int) -> None:
    """Enter the namespaces of the caller, whoever the front says that it is. Raises OSError."""
    if caller.pid in (front, opened.supervisor):
        raise PermissionError(errno.EPERM, "the front is no caller")
    caller.join(opened, namespaces.pidfd_of_peer(connection, pidfd, opened.proc))


@contextmanager
def _letting_go(talk: Conversation, caller: Caller) -> Iterator[None]:
    """Have nothing open of the caller's after the block."""
    try:
        yield
    finally:
        with talk.bounded("let go"):
            caller.let_go()


def _reap(opened: Descriptors, talk: Conversation, start: plan.StartReap) -> None:
    """Unmount what is dead of a filesystem, in the mount namespace where it is; nobody asked for that."""
    _join_namespace(opened, talk, start.mount_namespace)
    with talk.bounded("unmount"):
        reaped = mounts.unmount_dead(start.device, opened.locks, talk.seconds)
    talk.say(plan.Reaped(reaped))


def _recognize(opened: Descriptors, talk: Conversation, start: plan.StartRecognize) -> None:
    """Tell which mounts of a namespace there still are."""
    _join_namespace(opened, talk, start.mount_namespace)
    with talk.bounded("look"):
        devices = mounts.still_there(start.mounts)
    talk.say(plan.Recognized(devices))


def _join_namespace(opened: Descriptors, talk: Conversation, mount_namespace: int) -> None:
    """Join a mount namespace, by one of the processes that are in it, and keep what is needed to unmount there."""
    with talk.bounded("join"):
        pidfd = connections.process_in(opened.proc, mount_namespace)
        namespaces.join_user_namespace(pidfd)
        if namespaces.join_mount_namespace(pidfd, opened.proc) != mount_namespace:
            raise ProcessLookupError(errno.ESRCH, "the process has gone to another mount namespace")
        syscalls.capset(syscalls.CAP_SYS_ADMIN, syscalls.CAP_SETUID, syscalls.CAP_SETGID, syscalls.CAP_DAC_READ_SEARCH)


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


if __name__ == "__main__":
    _control, _orphans, _supervisor = (socket.socket(fileno=int(each)) for each in sys.argv[1:4])
    main(_control, _orphans, _supervisor, *map(int, sys.argv[4:]))
