"""The privileged half of the broker: it enters the caller's namespaces and mounts there.

The parent does three things for ever: receive a start record with its descriptors, fork a child into the caller's pid
namespace, forget it. The child holds one conversation (`plan` has the whole list of what may be said), in three acts:
it joins the caller's namespaces and takes the caller's identity from the kernel; it tells the front what it found;
it does what the front decided, or nothing.

Whatever could block for ever (a path on a hung filesystem, a front that says nothing) is bounded by an alarm whose
signal kills the child. From the moment a mount is attached until the front says `Keep`, nothing kills the child but
its own rollback.

Once the child has joined a foreign mount namespace, every file of the machine is the caller's. So the modules are
imported before, nothing is imported after, and the only paths used are relative to descriptors opened before.
"""

import errno
import gc
import os
import signal
import socket
import struct
import sys
from typing import NoReturn

from broker import plan, syscalls
from broker.plan import Record
from fusermount3_proxy import wire

#: Descriptors that come with a start record: conversation, caller's connection, caller's pidfd, pinned directory.
START_DESCRIPTORS = 4
_FUSE_DEVICE = os.makedev(10, 229)


class Descriptors:
    """What the mounter opens before it serves, for children whose root is no longer the broker's."""

    def __init__(self) -> None:
        self.proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        self.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        self.fusectl = _detached(b"fusectl")
        self.devices = _private_devices()


def main(control: socket.socket) -> None:
    """Serve start records on `control` until the front hangs up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front decides when to end, and hangs up
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children say all in their conversation; the kernel reaps them
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # in a container's pid namespace nobody may look into a child
    os.setgroups([])
    opened = Descriptors()
    control.sendmsg([b"ready"], [_rights(opened.fusectl)])
    sys.path.clear()
    sys.meta_path.clear()
    gc.disable()
    gc.freeze()
    while started := _receive_start(control):
        _fork(control, opened, *started)


def _receive_start(control: socket.socket) -> tuple[Record, list[int]] | None:
    """Return the next start record and its descriptors; None when the front has hung up."""
    data, ancillary, flags, _ = control.recvmsg(
        wire.MAX_MESSAGE, socket.CMSG_LEN(4 * START_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
    )
    if not data:
        return None
    wire.check_whole(flags)
    record, descriptors = plan.load(data), wire.descriptors(ancillary)
    if not isinstance(record, plan.StartMount | plan.StartUnmount) or len(descriptors) != START_DESCRIPTORS:
        raise wire.ProtocolError(errno.EBADMSG, "the front starts no operation")
    return record, descriptors


def _fork(control: socket.socket, opened: Descriptors, start: Record, descriptors: list[int]) -> None:
    """Fork the child for one operation, in the caller's pid namespace where that is below the broker's.

    Only children of setns(2) are in the namespace, and a FUSE filesystem reports pids as the namespace of the process
    that created its superblock sees them.
    """
    conversation, connection, pidfd, pinned = descriptors
    try:
        syscalls.setns(pidfd, syscalls.CLONE_NEWPID)
        same_pid_namespace = True
    except OSError:
        same_pid_namespace = False
    try:
        if os.fork() == 0:
            control.close()
            _run_child(opened, start, conversation, connection, pidfd, pinned, same_pid_namespace)
    except OSError:
        pass  # the front sees the conversation end without a word
    finally:
        if same_pid_namespace:
            syscalls.setns(opened.own_pid_namespace, syscalls.CLONE_NEWPID)
        for descriptor in descriptors:
            os.close(descriptor)


def _run_child(
    opened: Descriptors,
    start: Record,
    conversation: int,
    connection: int,
    pidfd: int,
    pinned: int,
    same_pid_namespace: bool,
) -> NoReturn:
    """Run the operation and end the process, whatever happens: no exception may reach code that would print it."""
    talk: Conversation | None = None
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert isinstance(start, plan.StartMount | plan.StartUnmount)
        talk = Conversation(conversation, start.seconds)
        with talk.bounded("join"):
            caller = Caller(opened, connection, pidfd, same_pid_namespace)
        if isinstance(start, plan.StartMount):
            _mount(talk, caller, pinned)
        else:
            _unmount(talk, caller, pinned, start.name)
    except StepError as error:
        if talk:
            talk.say(plan.Failed(error.errno, error.step.encode()))
    except Exception as error:
        if talk and not isinstance(error, HungUp):
            talk.say(plan.Failed(errno.EIO, repr(error).encode()))
    finally:
        os._exit(0)


class StepError(Exception):
    """A step of the operation failed with `errno`."""

    def __init__(self, errno: int, step: str) -> None:
        super().__init__(errno, step)
        self.errno = errno
        self.step = step


class HungUp(Exception):
    """The front has gone, or gave no answer in time: it will not hear of this operation again."""


class Conversation:
    """The child's end of the talk with the front."""

    def __init__(self, descriptor: int, seconds: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
        self._seconds = seconds

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

    def bounded(self, step: str) -> "_Bounded":
        """A step that may block: the process is killed when it takes too long. An OSError in it is a StepError."""
        return _Bounded(step, self._seconds)


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
    """

    def __init__(self, opened: Descriptors, connection: int, pidfd: int, same_pid_namespace: bool) -> None:
        self.same_pid_namespace = same_pid_namespace
        try:
            syscalls.setns(pidfd, syscalls.CLONE_NEWUSER)
        except OSError as error:
            if error.errno != errno.EINVAL:  # it is our own
                raise
        self.device = os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices)
        peer = socket.socket(fileno=connection)
        _, self.uid, self.gid = struct.unpack("iII", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        groups = syscalls.peer_groups(connection)
        syscalls.setns(pidfd, syscalls.CLONE_NEWNS)
        os.fchdir(opened.proc)
        self.mount_namespace = os.stat("self/ns/mnt").st_ino
        try:
            os.setgroups(groups)
        except PermissionError:
            pass  # a user namespace that denies setgroups(2): then without groups, the stricter answer
        syscalls.setfsids(self.uid, self.gid)
        # Root of a container may look into its users' directories, as the helper's root does.
        look = (syscalls.CAP_DAC_READ_SEARCH,) if self.uid == 0 else ()
        syscalls.capset(syscalls.CAP_SYS_ADMIN, *look)


def _mount(talk: Conversation, caller: Caller, mountpoint: int) -> None:
    with talk.bounded("access mountpoint"):
        facts = _mount_facts(caller, mountpoint)
    talk.say(facts)
    wanted = talk.hear()
    if not isinstance(wanted, plan.MountPlan):
        return
    if (wanted.uid, wanted.gid) != (caller.uid, caller.gid) or wanted.root_mode != facts.mode & 0o170000:
        raise StepError(errno.EPERM, "check the plan")
    with talk.bounded("mount"):
        mount = _create(wanted, caller.device)
        device, mount_id = syscalls.statx_mount(mount)
    try:
        flags = syscalls.MOVE_MOUNT_F_EMPTY_PATH | syscalls.MOVE_MOUNT_T_EMPTY_PATH
        syscalls.move_mount(mount, b"", mountpoint, b"", flags)
    except OSError as error:
        raise StepError(error.errno or errno.EIO, "mount") from None
    try:
        talk.say(plan.Mounted(device, mount_id), caller.device)
        os.close(caller.device)
        if not isinstance(talk.hear(), plan.Keep):
            raise HungUp
    except HungUp:
        with talk.bounded("roll back"):
            syscalls.umount2(b"self/fd/%d" % mount, syscalls.MNT_DETACH)


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
        mount_namespace=caller.mount_namespace,
        mode=status.st_mode,
        owner=status.st_uid,
        filesystem=syscalls.fstatfs_type(mountpoint),
        access_errno=access_errno,
        same_pid_namespace=caller.same_pid_namespace,
    )


def _create(wanted: plan.MountPlan, device: int) -> int:
    """Return a new, detached FUSE mount that `device` serves. Raises OSError."""
    context = syscalls.fsopen(b"fuse", syscalls.FSOPEN_CLOEXEC)
    for key, value in _parameters(wanted, device):
        syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, key, value, 0)
    for flag in _flags(wanted):
        syscalls.fsconfig(context, syscalls.FSCONFIG_SET_FLAG, flag, None, 0)
    syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
    return syscalls.fsmount(context, syscalls.FSMOUNT_CLOEXEC, _attributes(wanted))


def _parameters(wanted: plan.MountPlan, device: int) -> list[tuple[bytes, bytes]]:
    given = [
        (b"source", wanted.source),
        (b"fd", b"%d" % device),
        (b"rootmode", b"%o" % wanted.root_mode),
        (b"user_id", b"%d" % wanted.uid),
        (b"group_id", b"%d" % wanted.gid),
    ]
    optional = [
        (b"subtype", wanted.subtype),
        (b"max_read", wanted.max_read),
        (b"blksize", wanted.block_size),
    ]
    return given + [(key, value) for key, value in optional if value]


def _flags(wanted: plan.MountPlan) -> list[bytes]:
    flags = {
        b"ro": wanted.read_only,
        b"sync": wanted.sync,
        b"dirsync": wanted.dirsync,
        b"lazytime": wanted.lazytime,
        b"allow_other": wanted.allow_other,
        b"default_permissions": wanted.default_permissions,
    }
    return [flag for flag, wished in flags.items() if wished]


def _attributes(wanted: plan.MountPlan) -> int:
    """Return the MOUNT_ATTR_* of the mount. Without setuid and devices, whatever the plan says."""
    attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
    if wanted.read_only:
        attributes |= syscalls.MOUNT_ATTR_RDONLY
    if wanted.noexec:
        attributes |= syscalls.MOUNT_ATTR_NOEXEC
    if wanted.nodiratime:
        attributes |= syscalls.MOUNT_ATTR_NODIRATIME
    if wanted.nosymfollow:
        attributes |= syscalls.MOUNT_ATTR_NOSYMFOLLOW
    if wanted.strictatime:
        attributes |= syscalls.MOUNT_ATTR_STRICTATIME
    elif wanted.noatime:
        attributes |= syscalls.MOUNT_ATTR_NOATIME
    return attributes


def _unmount(talk: Conversation, caller: Caller, directory: int, name: bytes) -> None:
    with talk.bounded("access mountpoint"):
        facts = _unmount_facts(caller, directory, name)
    talk.say(facts)
    wanted = talk.hear()
    if not isinstance(wanted, plan.UnmountPlan):
        return
    with talk.bounded("unmount"):
        os.fchdir(directory)
        flags = syscalls.UMOUNT_NOFOLLOW | (syscalls.MNT_DETACH if wanted.lazy else 0)
        syscalls.umount2(name, flags)
    talk.say(plan.Unmounted())


def _unmount_facts(caller: Caller, directory: int, name: bytes) -> plan.UnmountFacts:
    """Look the entry up with the caller's rights. The descriptor of it is closed again, or it would be busy."""
    device = mount_id = access_errno = 0
    try:
        entry = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        access_errno = error.errno or 0
    else:
        device, mount_id = syscalls.statx_mount(entry)
        os.close(entry)
    mounted = not access_errno and mount_id != syscalls.statx_mount(directory)[1]
    return plan.UnmountFacts(caller.uid, caller.mount_namespace, access_errno, mounted, device)


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
