"""A tombstone: the FUSE filesystem at a volume's target that takes the place of one whose FUSE program is gone.

Container runtimes and kubelet call stat(2) on a volume before they start a container on it. On a dead filesystem that
fails, so a FUSE program whose own container has the volume could never be started again. And an empty directory in its
place would deceive whoever reads it: a backup of nothing is a backup, too. A tombstone can be looked at and
bind-mounted like any directory, and for everything else it is as dead as what it replaces: ENOTCONN.

It is made by serving it for a moment. The kernel keeps the attributes of a root directory for as long as the answer to
FUSE_GETATTR says, and stat(2) asks the FUSE program again only then (fs/fuse/dir.c, fuse_update_get_attr). The end of
the connection does not change that: it fails only what is a request (fs/fuse/dev.c, fuse_abort_conn, fuse_get_req). So
this answers FUSE_INIT and one FUSE_GETATTR, whose attributes hold for ever, and closes /dev/fuse. Nobody has another
descriptor of it, so no process can ever serve the filesystem, and no access to it waits for anybody.

With FUSE_ALLOW_IDMAP, which Linux 6.12 has, a container with a user namespace of its own can start on it, too. The
kernel then checks permissions itself (fs/fuse/inode.c, process_init_reply), from the same attributes; so a process may
also have it as its working directory.

For the mounter's children that are in the broker's own mount namespace.
"""

import errno
import os
import struct
from contextlib import suppress

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.mounter import child_processes, volume_targets
from fusermount3_broker.mounter.front_connection import Conversation
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_broker.mounter.volume_targets import SOURCE, TOMBSTONE, Target

# include/uapi/linux/fuse.h
_GETATTR, _INIT = 3, 26
_IN_HEADER, _OUT_HEADER = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")
#: The beginning of struct fuse_init_in: major, minor, max_readahead, flags, flags2.
_INIT_IN = struct.Struct("=IIIII")
#: struct fuse_init_out: as above up to flags; max_background, congestion_threshold; max_write, time_gran; max_pages,
#: map_alignment; flags2; the rest.
_INIT_OUT = struct.Struct("=IIIIHHIIHHI28x")
#: struct fuse_attr_out: for how long the attributes hold, in seconds; nanoseconds. Then the attributes: inode, size,
#: blocks, three times; nanoseconds of these; mode, number of links, uid, gid, device, block size, flags.
_ATTR_OUT = struct.Struct("=QIIQQQQQQIIIIIIIIII")
_INIT_EXT, _ALLOW_IDMAP_2 = 1 << 30, 1 << 40 - 32
_ROOT_INODE = 1
_MODE = 0o40555
#: More seconds than the kernel counts: for ever.
_FOR_EVER = 2**62
_BLOCK_SIZE = 4096


def put(opened: Descriptors, talk: Conversation, start: mounter.StartTombstone) -> None:
    """Have a tombstone where the filesystem of a device is topmost at a target, if that is dead, and tell the front."""
    volume_targets.begin(opened, start.target)
    replaced = False
    with (
        talk.bounded("mount on the volume"),
        suppress(FileNotFoundError, NotADirectoryError, FileExistsError),  # the volume is gone
        Target(opened, start.target) as target,
    ):
        replaced = target.put_tombstone(start.device, lambda: create(opened), talk.seconds)
    talk.say(mounter.TombstonePut(replaced))


def create(opened: Descriptors) -> int:
    """Return the mount of a new tombstone, attached nowhere. Raises OSError.

    It is not noexec: whatever replaces it in a container takes that over (`volume_consumers`).
    """
    try:
        opened_device = os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices)
    except FileNotFoundError:  # which for a volume means that it is gone
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), "/dev/fuse") from None
    with open(opened_device, "r+b", buffering=0) as device:
        mount = _mount(device.fileno())
        try:
            asking = child_processes.begin(lambda: syscalls.statx_all(mount), [mount], [])
            _serve_until_asked(device.fileno())
            child_processes.wait(asking, None)
        except OSError:
            os.close(mount)
            raise
    return mount


def _mount(device: int) -> int:
    context = syscalls.fsopen(b"fuse", syscalls.FSOPEN_CLOEXEC)
    try:
        names = [(b"source", SOURCE), (b"subtype", TOMBSTONE)]
        owner = [(b"rootmode", b"%o" % _MODE), (b"user_id", b"0"), (b"group_id", b"0")]
        for key, value in (*names, *owner, (b"fd", b"%d" % device)):
            syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, key, value, 0)
        for flag in (b"allow_other", b"default_permissions"):
            syscalls.fsconfig(context, syscalls.FSCONFIG_SET_FLAG, flag, None, 0)
        syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
        attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
        return syscalls.fsmount(context, syscalls.FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(context)


def _serve_until_asked(device: int) -> None:
    """Answer requests until the kernel has the attributes of the root directory. Raises OSError.

    A kernel since Linux 6.6 first tries FUSE_STATX, for the time of birth. It tries only once whether that exists; from
    then on, the time of birth is no reason to ask.
    """
    operation = 0
    while operation != _GETATTR:
        request = os.read(device, 1 << 16)
        _, operation, unique, *_ = _IN_HEADER.unpack_from(request)
        answer, error = b"", 0
        if operation == _INIT:
            answer = _initialization(request)
        elif operation == _GETATTR:
            answer = _attributes()
        else:
            error = -errno.ENOSYS
        os.write(device, _OUT_HEADER.pack(_OUT_HEADER.size + len(answer), error, unique) + answer)


def _initialization(request: bytes) -> bytes:
    """Return the answer to FUSE_INIT: the kernel's version, and of its features FUSE_ALLOW_IDMAP, if it has that."""
    major, minor, _, flags, flags2 = _INIT_IN.unpack_from(request.ljust(_SIZE_OF_INIT, b"\0"), _IN_HEADER.size)
    if flags & _INIT_EXT and flags2 & _ALLOW_IDMAP_2:
        flags, flags2 = _INIT_EXT, _ALLOW_IDMAP_2
    else:
        flags, flags2 = 0, 0
    return _INIT_OUT.pack(major, minor, 0, flags, 0, 0, _BLOCK_SIZE, 1, 0, 0, flags2)


_SIZE_OF_INIT = _IN_HEADER.size + _INIT_IN.size


def _attributes() -> bytes:
    return _ATTR_OUT.pack(*(_FOR_EVER, 0, 0), *(_ROOT_INODE, 0, 0, 0, 0, 0), 0, 0, 0, _MODE, 2, 0, 0, 0, _BLOCK_SIZE, 0)
