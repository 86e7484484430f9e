"""A FUSE filesystem created from a plan: a mount that is attached nowhere yet.

FUSE takes three things from the process that creates the superblock: the user namespace, to which uids refer; the mount
namespace, over whose owner the process must have CAP_SYS_ADMIN; and the pid namespace, whose pids it reports to the
FUSE program for the processes that use the filesystem (fs/fuse/inode.c). The process that calls `create` is in the
first two; only a descendant of it can be in the third (`superblock_creator`).
"""

import errno
import socket

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages.mounter import MountPlan
from fusermount3_broker.mounter import superblock_creator
from fusermount3_broker.mounter.child_processes import Rescue, in_child
from fusermount3_broker.mounter.namespaces import PidNamespace
from fusermount3_broker.mounter.programs import Programs

#: fsconfig(2) takes strings of 255 bytes; mount(2) takes a page.
LONGEST_STRING = 255


def create(wanted: MountPlan, device: int, pids: PidNamespace, programs: Programs, rescue: Rescue | None) -> int:
    """Return the mount of a new FUSE filesystem that `device` serves, and whose FUSE program sees `pids`.

    Where it may see none, or would need mount(2) for a string that is too long, the filesystem is created in a new,
    empty pid namespace: then it sees no pids.

    `programs` are the mounter's. `rescue` is the way out if the kernel waits for the FUSE program, or None if it does
    not. Raises OSError.
    """
    by_mount = max(map(len, (wanted.source, wanted.subtype, wanted.max_read, wanted.block_size))) > LONGEST_STRING
    if pids.hidden or (by_mount and pids.descriptor is not None):
        syscalls.unshare(syscalls.CLONE_NEWPID)
    if by_mount:
        if wanted.sync_init:
            raise OSError(errno.EINVAL, "with mount(2), nobody can be sure that the filesystem is new")
        return _create_by_mount(wanted, device, rescue)
    context = configure(wanted, device)
    commands = _commands(wanted.sync_init)
    if pids.descriptor is None and not pids.hidden and not rescue:
        _create_superblock(context, commands)
    else:
        superblock_creator.create(programs, context, device, pids.descriptor, commands, rescue)
    return syscalls.fsmount(context, syscalls.FSMOUNT_CLOEXEC, _attributes(wanted))


def restrict(mount: int, wanted: MountPlan) -> None:
    """Make the mount read-only and noexec as planned: locking its flags clears both. Raises OSError."""
    attributes = _attributes(wanted) & (syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOEXEC)
    if attributes:
        syscalls.mount_setattr(mount, b"", syscalls.AT_EMPTY_PATH, attributes)


def configure(wanted: MountPlan, device: int) -> int:
    """Return the context of a filesystem to be created (fsopen(2)). Raises OSError."""
    context = syscalls.fsopen(b"fuse", syscalls.FSOPEN_CLOEXEC)
    if wanted.subtype:
        syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, b"subtype", wanted.subtype, 0)
    syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, b"source", wanted.source, 0)
    for key, value in _parameters(wanted, device):
        syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, key, value, 0)
    for flag in _flags(wanted):
        syscalls.fsconfig(context, syscalls.FSCONFIG_SET_FLAG, flag, None, 0)
    return context


def _commands(caller_has_device: bool) -> list[int]:
    """Return the commands of fsconfig(2) that create a new filesystem: each for kernels that lack the one before.

    A caller that has the device already may have cloned an existing connection onto it (FUSE_DEV_IOC_CLONE). The device
    then stands for that connection's filesystem, with its user and options (fs/fuse/inode.c, fuse_get_tree). Before
    Linux 6.6 the kernel can't forbid this, so nothing is created for such a device.
    """
    sharing = [] if caller_has_device else [syscalls.FSCONFIG_CMD_CREATE]
    return [syscalls.FSCONFIG_CMD_CREATE_EXCL, *sharing]


def _create_superblock(context: int, commands: list[int]) -> None:
    """Do as `superblock_creator`, in this process. Raises OSError."""
    exclusive, *shared = commands
    try:
        syscalls.fsconfig(context, exclusive, None, None, 0)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP or not shared:
            raise
        syscalls.fsconfig(context, shared[0], None, None, 0)


def _parameters(wanted: MountPlan, device: int) -> list[tuple[bytes, bytes]]:
    given = [
        (b"fd", b"%d" % device),
        (b"rootmode", b"%o" % wanted.root_mode),
        (b"user_id", b"%d" % wanted.uid),
        (b"group_id", b"%d" % wanted.gid),
    ]
    optional = [(b"max_read", wanted.max_read), (b"blksize", wanted.block_size)]
    return given + [(key, value) for key, value in optional if value]


def _flags(wanted: MountPlan) -> list[bytes]:
    flags = {
        b"ro": wanted.read_only,
        b"sync": wanted.sync,
        b"dirsync": wanted.dirsync,
        b"lazytime": wanted.lazytime,
        b"allow_other": wanted.allow_other,
        b"default_permissions": wanted.default_permissions,
    }
    return [flag for flag, wished in flags.items() if wished]


def _attributes(wanted: MountPlan) -> int:
    """Return the MOUNT_ATTR_* of the mount: always nosuid and nodev, whatever the plan says."""
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


def _create_by_mount(wanted: MountPlan, device: int, rescue: Rescue | None) -> int:
    """Do as `create` with mount(2), in a child with its own mount namespace: mount(2) always attaches what it creates.

    The child sends back a copy of the mount that is attached nowhere; the original ends with the child's namespace. A
    process with such rights must not enter a pid namespace where a container may take it over.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        in_child(
            lambda: socket.send_fds(theirs, [b"m"], [_mount_privately(wanted, device)]),
            keep=[theirs.fileno(), device],
            capabilities=[syscalls.CAP_SYS_ADMIN],
            rescue=rescue,
        )
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    return descriptors[0]


def _mount_privately(wanted: MountPlan, device: int) -> int:
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount(None, b"/", None, syscalls.MS_REC | syscalls.MS_PRIVATE, None)
    filesystem = b"fuse.%b" % wanted.subtype if wanted.subtype else b"fuse"
    data = [b"%b=%b" % parameter for parameter in _parameters(wanted, device)]
    data += [flag for flag in _flags(wanted) if flag in (b"allow_other", b"default_permissions")]
    # A path that begins at the root stays below a mount on the root until it contains "..".
    syscalls.mount(wanted.source, b"/..", filesystem, _mount_flags(wanted), b",".join(data))
    return syscalls.open_tree(syscalls.AT_FDCWD, b"/..", syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC)


def _mount_flags(wanted: MountPlan) -> int:
    """Return the MS_* of the mount; as in `_attributes`, always nosuid and nodev."""
    flags = {
        syscalls.MS_RDONLY: wanted.read_only,
        syscalls.MS_SYNCHRONOUS: wanted.sync,
        syscalls.MS_DIRSYNC: wanted.dirsync,
        syscalls.MS_LAZYTIME: wanted.lazytime,
        syscalls.MS_NOEXEC: wanted.noexec,
        syscalls.MS_NODIRATIME: wanted.nodiratime,
        syscalls.MS_NOSYMFOLLOW: wanted.nosymfollow,
        syscalls.MS_STRICTATIME: wanted.strictatime,
        syscalls.MS_NOATIME: wanted.noatime and not wanted.strictatime,
    }
    always = syscalls.MS_NOSUID | syscalls.MS_NODEV
    return always | sum(flag for flag, wished in flags.items() if wished)
