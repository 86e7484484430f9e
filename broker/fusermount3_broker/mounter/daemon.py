"""The privileged half of the broker: it enters the caller's namespaces and mounts there.

The parent does one thing for ever: it keeps a few children ready and counts them (`worker_pool`). A child receives one
start record with its descriptors from the front, holds one conversation (`messages.mounter` lists all its records), and
ends. It joins the caller's namespaces and takes the caller's identity from the kernel; it reports to the front what it
found; it does what the front decided, or nothing. Children are forked before they are needed because a process is slow
after fork(2): its first access to each page is a fault. So they also rehearse, and a child whose operation may take two
processes (`volume_helper`) forks the second in advance. Others are no forks: they execute a program that serves
plain calls (`plain_calls`).

Every step that could block for ever, such as the lookup of a path on a hung filesystem, is bounded by an alarm whose
signal kills the child. From the moment a mount is attached until the front says `Keep`, only a rollback sets an alarm.

Once a child has joined a foreign mount namespace, every file that it can look up is the caller's. So all modules are
imported before and none after, and all paths are relative to descriptors opened before.
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
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fusermount3_broker.kernel import capabilities, syscalls
from fusermount3_broker.messages import mounter, process_names
from fusermount3_broker.messages import supervisor as orders
from fusermount3_broker.messages.mounter import Record
from fusermount3_broker.mounter import (
    block_devices,
    borrowed_volumes,
    eager_volumes,
    filesystem,
    fuse_connections,
    invariants,
    kubelet_directory,
    locked_flags,
    mount_inspection,
    mount_tree,
    mounting,
    namespaces,
    plain_calls,
    tombstone,
    unmounting,
    volume_consumers,
    worker_pool,
)
from fusermount3_broker.mounter.caller_namespaces import Caller
from fusermount3_broker.mounter.front_connection import (
    BadRequest,
    Conversation,
    Dismissed,
    HungUp,
    StepError,
    receive_all,
    rights,
)
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_broker.mounter.volume_helper import Child, HelperProcess, Volume, VolumeHelper
from fusermount3_broker.mounter.worker_pool import Pool
from fusermount3_proxy import wire

#: The capabilities that the mounter needs; docs/security.md explains what for.
CAPABILITIES = (*plain_calls.CAPABILITIES, syscalls.CAP_MKNOD)
#: Children that wait for callers' operations, and for the broker's own (`maintenance`). `FEW_SPARES` forked ones, which
#: take far more memory, are enough where `SPARES` others wait for plain calls.
SPARES, FEW_SPARES, OWN_SPARES = 4, 2, 1
#: Limits for the number of children. For callers' operations: `max_requests`, plus children that close socket
#: connections (`front.context.DISMISSALS`), unmount dead mounts, or wait; with volumes, plus as many as kubelet's
#: requests and the restoring of containers may take (`front.published_volumes`, `front.restored_containers`). For the
#: broker's own operations: `front.context.RESCUES` and others.
MORE_THAN_REQUESTS, FOR_VOLUMES, MOST_OWN = 12 + 16 + 2 * SPARES, 32 + 8, 16 + 12
#: More records than the kernel queues for a socket, given their overhead. Without a front, a caller may go on sending.
MOST_QUEUED = 1024


#: The descriptor that the kernel closes last when a process ends (exit_files and exit_task_work in kernel/exit.c: those
#: with higher numbers are closed before). No Python object owns it, so it stays open until then.
_LAST = 0


def main(ends: list[socket.socket], max_requests: int, kubelet: int | None, left: Collection[int]) -> None:
    """Report to the supervisor when ready; keep children that take start records, until no process can send any.

    `ends`: the first three receive callers' operations, the broker's own, and calls that may be plain; the last is
    connected to the supervisor. `kubelet`: a descriptor of kubelet's directory, if there are volumes. `left`: pidfds of
    children of an earlier mounter.
    """
    operations, own, plain, supervisor = ends
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front decides when to end, and hangs up
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _forbid_ptrace()
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    capabilities.keep(*CAPABILITIES)
    os.setgroups([])
    for each in (operations, own, plain):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    try:
        opened = Descriptors(kubelet)
        maker = locked_flags.Maker(opened.proc)
    except OSError as error:
        supervisor.send(orders.dump(orders.Failed(_why_not(error).encode())))
        return
    os.fchdir(opened.proc)
    serves_plain = plain_calls.works(opened)
    ready = orders.MounterReady(locks_flags=not maker.forbidden, serves_plain_calls=serves_plain)
    socket.send_fds(supervisor, [orders.dump(ready)], [opened.fusectl, opened.proc])
    supervisor.close()
    sys.path.clear()
    sys.meta_path.clear()
    gc.disable()
    gc.freeze()
    has_volumes = kubelet is not None
    most = max_requests + MORE_THAN_REQUESTS + (FOR_VOLUMES if has_volumes else 0)
    pools = [Pool(operations, FEW_SPARES if serves_plain else SPARES, most), Pool(own, OWN_SPARES, MOST_OWN)]
    if serves_plain:
        pools.append(Pool(plain, SPARES, most, lambda control, line: plain_calls.start(opened, control, line)))
    else:  # for what an earlier mounter has left
        pools.append(Pool(plain, 1, most))
    pools[0].beside, pools[2].beside = pools[2], pools[0]

    def serve(pool: Pool, line: socket.socket) -> None:
        for each in maker.descriptors:
            os.close(each)
        with_child = has_volumes and pool is pools[0]
        _serve(opened, pool.control, line, with_child=with_child, rehearses=pool is not pools[1])

    @contextmanager
    def with_cell(pool: Pool) -> Iterator[None]:
        """Provide a cell for a child that is forked within the block, if its operations may be mounts."""
        if pool is pools[1]:
            yield
            return
        opened.cell = maker.cell()
        try:
            yield
        finally:
            opened.cell.close()

    worker_pool.Parent(pools, left, serve, with_cell).run()


#: Options of a container engine, whose profiles forbid mounts.
_UNCONFINED = "--security-opt=seccomp=unconfined --security-opt=apparmor=unconfined --security-opt=label=disable"


def _why_not(error: OSError) -> str:
    """Return why the mounter can't start, and what to do."""
    if error.errno == errno.ENODEV:  # of fusectl
        return "this kernel has no FUSE: modprobe fuse"
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return f"the mounter may not mount: {os.strerror(error.errno)}; a container of the broker needs {_UNCONFINED}"
    return f"the mounter can't start: {error.strerror or error}"


def _forbid_ptrace() -> None:
    """Deny other processes of the same uid access to this process's memory and descriptors (ptrace(2))."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)


def _serve(
    opened: Descriptors, control: socket.socket, line: socket.socket, *, with_child: bool, rehearses: bool
) -> None:
    """Run as a child: wait for an operation, report it to the parent over `line`, carry it out.

    The child may fork a child itself, in case the operation takes two processes (see `volume_helper`). It rehearses if
    its operation may be a caller's: what is rehearsed is a mount, and the broker's own operations make none.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    child = None
    if not _has_waiting_operation(control):
        if with_child:
            with suppress(OSError):  # then it is forked when an operation needs it
                child = _fork_child(opened, control.fileno(), line.fileno())
        if rehearses:
            _rehearse(opened)
    if started := _receive_start(control):
        start, descriptors, front = started
        syscalls.set_name(process_names.BUSY)
        worker_pool.tell_parent(line, descriptors[0])
        control.close()
        _operate(opened, child, start, descriptors, front)


def _has_waiting_operation(control: socket.socket) -> bool:
    """Return whether an operation already waits for a child: then a rehearsal gains nothing."""
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    return bool(waiting.poll(0))


def _rehearse(opened: Descriptors) -> None:
    """Go through the motions of an operation, as far as they change nothing."""
    with suppress(OSError):  # a kernel may refuse a call that is only a rehearsal
        _rehearse_steps(opened)


def _rehearse_steps(opened: Descriptors) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        talk = Conversation(os.dup(ours.fileno()), 1)
        with talk.bounded("rehearse"):
            talk.say(_REHEARSED_FACTS)
        ours.sendmsg([b"rehearsal"], [rights(opened.proc)])
        theirs.send(mounter.dump(_REHEARSED_PLAN))
        talk.hear()
        ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        syscalls.peer_groups(ours.fileno())
    os.fchdir(opened.proc)
    os.stat("self/ns/mnt")
    namespaces.capabilities_of(os.getpid(), opened.proc)
    namespaces.check_owner_of_mount_namespace()
    mount_tree.rehearse(opened.locks)
    mount_tree.look(opened.proc)
    syscalls.fstatfs_type(opened.proc)
    syscalls.faccessat2(opened.proc, b"", os.R_OK, syscalls.AT_EMPTY_PATH | syscalls.AT_EACCESS)
    os.close(filesystem.configure(_REHEARSED_PLAN, 0))
    os.close(os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices))


_REHEARSED_FACTS = mounter.MountFacts(0, 0, 0, False, 0, 0, 0, 0)
_REHEARSED_PLAN = mounter.MountPlan(
    uid=0,
    gid=0,
    root_mode=stat.S_IFDIR,
    foreign_sticky=False,
    filesystem=0,
    search_errno=0,
    access_errno=0,
    request_id=b"rehearsal",
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

    The pid comes from the kernel: a process without capabilities can't send another's (unix(7), SO_PASSCRED).
    """
    data, ancillary = receive_all(control)
    if not data:
        return None
    (front,) = (
        struct.unpack("iII", said)[0]
        for level, kind, said in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
    )
    return mounter.load(data), wire.descriptors(ancillary), front


def _operate(opened: Descriptors, child: Child | None, start: Record, descriptors: list[int], front: int) -> None:
    """Carry out one operation for the process `front`. `child` was forked in case it is a mount on a volume."""
    if not isinstance(start, mounter.Start):
        return
    if child and not isinstance(start, mounter.StartVolumeMount):
        child.end.close()  # so that the child ends meanwhile
    with _conversation(start, descriptors) as talk:
        if isinstance(start, _AnyMount | _AnyUnmount):
            _serve_caller(opened, talk, start, front, *descriptors[1:])
        elif isinstance(start, mounter.StartReap):
            mount_inspection.reap(opened, talk, start)
        elif isinstance(start, mounter.StartSurvey):
            mount_inspection.survey(opened, talk, start)
        elif isinstance(start, mounter.StartSearch):
            mount_inspection.search(opened, talk, start)
        elif isinstance(start, mounter.StartAbort):
            _abort(opened, talk, start)
        elif isinstance(start, mounter.StartRecognize):
            mount_inspection.recognize(opened, talk, start)
        elif isinstance(start, mounter.StartCheck):
            _check(opened, talk)
        elif opened.kubelet is None:
            raise StepError(errno.EOPNOTSUPP, "serve volumes")
        elif isinstance(start, mounter.StartVolumeMount):
            _attend_child(opened, talk, child, start, descriptors, front)
        elif isinstance(start, mounter.StartOffer):
            block_devices.offer(opened, talk, start, *descriptors[1:])
        elif isinstance(start, mounter.StartLend):
            block_devices.lend(opened, talk, start, *descriptors[1:])
        else:
            _ON_VOLUMES[type(start)](opened, talk, start)
    if child:
        child.dismiss()


#: Operations on volumes that come with no descriptor but the conversation.
_ON_VOLUMES: dict[type[mounter.Start], Callable[[Descriptors, Conversation, Any], None]] = {
    mounter.StartEager: eager_volumes.mount,
    mounter.StartPublish: kubelet_directory.publish,
    mounter.StartBorrow: borrowed_volumes.borrow,
    mounter.StartUnpublish: kubelet_directory.unpublish,
    mounter.StartStat: kubelet_directory.stat_volume,
    mounter.StartRecognizeVolume: kubelet_directory.recognize,
    mounter.StartFindInContainers: volume_consumers.find,
    mounter.StartTombstone: tombstone.put,
    mounter.StartRestore: volume_consumers.look_again,
}


@contextmanager
def _conversation(start: mounter.Start, descriptors: list[int]) -> Iterator[Conversation]:
    """Yield the conversation of an operation; report a failure to the front, and wait until the front hangs up.

    The conversation outlives the operation: for the front, it ends when this process has ended.
    """
    os.dup2(descriptors[0], _LAST)
    talk = Conversation(descriptors[0], start.seconds)
    try:
        yield talk
    except StepError as error:
        talk.say(mounter.Failed(error.errno, error.step.encode()))
    except BadRequest as bad:
        talk.say(mounter.BadDescriptors(bad.count))
    except Dismissed:
        talk.say(mounter.HasLetGo())
    except HungUp:
        pass
    except Exception as error:
        talk.say(mounter.Failed(errno.EIO, repr(error).encode()))
    talk.wait_for_end()
    with talk.bounded("let go"):
        for connection in _connections(start, descriptors[1:]):
            _drain(connection)


_AnyMount = mounter.StartMount | mounter.StartPlainMount
_AnyUnmount = mounter.StartUnmount | mounter.StartPlainUnmount
#: Operations for a caller, whose connection comes with the start record.
_CALLERS = _AnyMount | _AnyUnmount | mounter.StartVolumeMount | mounter.StartOffer


def _connections(start: Record, descriptors: list[int]) -> list[socket.socket]:
    """Return the callers' socket connections among the descriptors that came with a start record."""
    if isinstance(start, _CALLERS):
        descriptors = descriptors[:1]
    elif not isinstance(start, mounter.StartDismissal):
        descriptors = []
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


def _drain(connection: socket.socket) -> None:
    """Discard the records of a caller that were not read, now that the caller can send no more.

    If a socket connection is closed with records unread, the caller gets an error for that before it can read the
    answer. The buffer has no room for descriptors: a descriptor that never was in this process's table is not flushed
    when it is closed (fs/open.c, filp_flush), and a FUSE program could take for ever to answer a flush.

    An empty record differs from the end only by its sender's credentials (net/unix/af_unix.c, unix_dgram_recvmsg).
    """
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for _ in range(MOST_QUEUED):
            data, _, cut, _ = connection.recvmsg(1, 0, socket.MSG_DONTWAIT)
            if not data and not cut & socket.MSG_CTRUNC:
                return


def _serve_caller(
    opened: Descriptors,
    talk: Conversation,
    start: _AnyMount | _AnyUnmount,
    front: int,
    connection: int,
    pidfd: int,
) -> None:
    with talk.bounded("join"):
        caller = Caller(opened, connection)
        caller.locks_flags = isinstance(start, _AnyMount)
        _join(opened, caller, front, connection, pidfd)
        caller.check_request(talk)
    with _releasing(talk, caller):
        if isinstance(start, _AnyMount):
            mounting.mount(talk, caller, start)
        else:
            unmounting.unmount(talk, caller, start)


def _attend_child(
    opened: Descriptors,
    talk: Conversation,
    child: Child | None,
    start: mounter.StartVolumeMount,
    descriptors: list[int],
    front: int,
) -> None:
    """Have the child serve the caller; this process is the child's helper, and ends after it."""
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
        HelperProcess(opened, start).attend(child.end)
        os.waitpid(child.pid, 0)
    finally:
        os._exit(0)


def _fork_child(opened: Descriptors, *others: int, rehearses: bool = True) -> Child:
    """Fork the process that serves the caller of a volume, and close the descriptors `others` in it."""

    def serve(helper: socket.socket) -> None:
        for descriptor in others:
            os.close(descriptor)
        opened.cell.close()
        if rehearses:
            _rehearse(opened)
        if volume := Volume.receive(helper):
            _serve_caller_of_volume(opened, helper, volume)

    return Child.fork(serve)


def _serve_caller_of_volume(opened: Descriptors, end: socket.socket, volume: Volume) -> None:
    """Serve the caller with the helper, which is connected to `end`."""
    start, descriptors, front = volume
    _, connection, pidfd, *held = descriptors
    with _conversation(start, descriptors) as talk:
        os.fchdir(opened.proc)
        helper = VolumeHelper(end, start.seconds, os.stat("self/ns/mnt").st_ino)
        with talk.bounded("join"):
            caller = Caller(opened, connection, int(start.pinned))
            _join(opened, caller, front, connection, pidfd)
            caller.check_request(talk)
            if held:
                caller.take_device(held[0])
        with _releasing(talk, caller):
            mounting.mount_volume(talk, caller, start, helper)


def _join(opened: Descriptors, caller: Caller, front: int, connection: int, pidfd: int) -> None:
    """Enter the caller's namespaces, without relying on the front for who the caller is. Raises OSError."""
    if caller.pid in (front, opened.supervisor):
        raise PermissionError(errno.EPERM, "the front is no caller")
    caller.join(opened, namespaces.pidfd_of_peer(connection, pidfd, opened.proc))


@contextmanager
def _releasing(talk: Conversation, caller: Caller) -> Iterator[None]:
    """Close, after the block, what this process has open of the caller's."""
    try:
        yield
    finally:
        with talk.bounded("let go"):
            caller.let_go()


def _abort(opened: Descriptors, talk: Conversation, start: mounter.StartAbort) -> None:
    """Abort a FUSE connection, with `start.unmoved` only once it hangs; only the front bounds the wait for that."""
    try:
        with fuse_connections.Connection(opened.fusectl, start.device, start.connection) as connection:
            if start.unmoved and not fuse_connections.hangs(connection, start.unmoved, talk.is_over):
                raise HungUp
            with talk.bounded("abort"):
                connection.abort()
    except OSError as error:
        raise StepError(error.errno or errno.EIO, "abort") from None
    talk.say(mounter.Aborted())


def _check(opened: Descriptors, talk: Conversation) -> None:
    """Report to the front that there is a child for an operation, and a device for its mount."""
    with talk.bounded("open /dev/fuse"):
        os.close(os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices))
    talk.say(mounter.Checked())


if __name__ == "__main__":
    _most, _volumes, *_given = map(int, sys.argv[-2:] + sys.argv[1:-2])
    _ends = [socket.socket(fileno=each) for each in _given[:4]]
    main(_ends, _most, _given[4] if _volumes else None, _given[5:] if _volumes else _given[4:])
