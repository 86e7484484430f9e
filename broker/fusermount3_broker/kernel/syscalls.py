"""System calls that Python lacks, with the kernel's own names and argument order.

Each raises OSError with the errno of the call. Because the mounter imports this module, it needs little but ctypes and
os, and looks up everything at import: later the process may be in a caller's mount namespace, where it must not search
for libraries. Numbers from 424 on are the same on every architecture (include/uapi/asm-generic/unistd.h).
"""

import ctypes
import errno
import os
import struct
import sys
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
for _function in (_libc.setfsuid, _libc.setfsgid):
    _function.argtypes = [ctypes.c_uint]
    _function.restype = ctypes.c_uint

_OPEN_TREE = 428
_MOVE_MOUNT = 429
_FSOPEN = 430
_FSCONFIG = 431
_FSMOUNT = 432
_OPENAT2 = 437
_PIDFD_GETFD = 438
_FACCESSAT2 = 439
_MOUNT_SETATTR = 442
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_ADD_RULE = 445
_LANDLOCK_RESTRICT_SELF = 446
SYS_STATMOUNT = 457
SYS_LISTMOUNT = 458

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000

AT_FDCWD = -100
AT_EACCESS = 0x200
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
AT_STATX_DONT_SYNC = 0x4000
STATX_BASIC_STATS = 0x7FF
STATX_BTIME = 0x800
STATX_ATTR_MOUNT_ROOT = 0x2000
AT_HANDLE_FID = 0x200
AT_HANDLE_MNT_ID_UNIQUE = 0x001

STATMOUNT_SB_BASIC = 0x01
STATMOUNT_MNT_BASIC = 0x02
STATMOUNT_MNT_POINT = 0x10
STATMOUNT_FS_TYPE = 0x20
STATMOUNT_MNT_OPTS = 0x80

FSOPEN_CLOEXEC = 0x1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
FSCONFIG_CMD_CREATE_EXCL = 8
FSMOUNT_CLOEXEC = 0x1
MOUNT_ATTR_RDONLY = 0x01
MOUNT_ATTR_NOSUID = 0x02
MOUNT_ATTR_NODEV = 0x04
MOUNT_ATTR_NOEXEC = 0x08
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_STRICTATIME = 0x20
MOUNT_ATTR_NODIRATIME = 0x80
MOUNT_ATTR_NOSYMFOLLOW = 0x00200000
MOVE_MOUNT_F_EMPTY_PATH = 0x04
MOVE_MOUNT_T_EMPTY_PATH = 0x40
MOVE_MOUNT_BENEATH = 0x200

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_SYNCHRONOUS = 16
MS_DIRSYNC = 128
MS_NOSYMFOLLOW = 256
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_STRICTATIME = 1 << 24
MS_LAZYTIME = 1 << 25
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

SOL_SOCKET = 1
SCM_MAX_FD = 253
SO_PEERGROUPS = 59
SO_NETNS_COOKIE = 71
SO_PEERPIDFD = 77

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4


LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
LANDLOCK_ACCESS_FS_WRITE_FILE = 1 << 1
LANDLOCK_ACCESS_FS_READ_FILE = 1 << 2
LANDLOCK_ACCESS_FS_READ_DIR = 1 << 3
LANDLOCK_ACCESS_FS_REMOVE_FILE = 1 << 5
LANDLOCK_ACCESS_FS_MAKE_REG = 1 << 8
LANDLOCK_ACCESS_FS_MAKE_SOCK = 1 << 9
LANDLOCK_ACCESS_FS_TRUNCATE = 1 << 14

NS_GET_USERNS = 0xB701

CAP_CHOWN = 0
CAP_DAC_READ_SEARCH = 2
CAP_KILL = 5
CAP_SETGID = 6
CAP_SETUID = 7
CAP_SYS_CHROOT = 18
CAP_SYS_PTRACE = 19
CAP_SYS_ADMIN = 21
CAP_MKNOD = 27

#: Where SELinux keeps the label of a file (xattr(7)).
XATTR_NAME_SELINUX = b"security.selinux"

_LINUX_CAPABILITY_VERSION_3 = 0x20080522


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def setns(fd: int, nstype: int) -> None:
    """Join the namespaces of the process that a pidfd refers to, or the single namespace of a namespace fd."""
    _check(_libc.setns(fd, nstype))


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags))


def prctl(option: int, value: int, more: int = 0) -> int:
    result: int = _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(more), 0, 0)
    return _check(result)


def set_name(name: bytes) -> None:
    """Set the name of this thread: 15 bytes at most (PR_SET_NAME(2const))."""
    _check(_libc.prctl(PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0))


def setfsids(uid: int, gid: int) -> None:
    """Check file access as this user and group from now on.

    setfsuid(2) reports no error, so the value is read back. It drops no capability of a process whose uid is not that
    of root in its user namespace: `capset` does.
    """
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    if _libc.setfsgid(gid) != gid or _libc.setfsuid(uid) != uid:
        raise PermissionError(errno.EPERM, "setfsuid")


def capset(*capabilities: int) -> None:
    """Keep these capabilities, permitted and effective, and drop all others for good (struct of linux/capability.h)."""
    capset_bits(sum(1 << capability for capability in capabilities))


def capset_bits(bits: int, inheritable: int = 0) -> None:
    """Do as `capset` with sets of bits; keep `inheritable` for programs that this process executes, too.

    A capability that is not inheritable is not ambient either (capabilities(7)).
    """
    words = [each >> shift & 0xFFFFFFFF for shift in (0, 32) for each in (bits, bits, inheritable)]
    _check(_libc.capset(struct.pack("Ii", _LINUX_CAPABILITY_VERSION_3, 0), struct.pack("6I", *words)))


def capget() -> int:
    """Return the permitted capabilities of this process, as bits."""
    header = struct.pack("Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, data))
    words: tuple[int, ...] = struct.unpack("6I", data.raw)
    return words[1] | words[4] << 32


def mount(source: bytes | None, target: bytes, filesystemtype: bytes | None, flags: int, data: bytes | None) -> None:
    _check(_libc.mount(source, target, filesystemtype, ctypes.c_ulong(flags), data))


def umount2(target: bytes, flags: int) -> None:
    _check(_libc.umount2(target, flags))


def fsopen(fsname: bytes, flags: int) -> int:
    return _check(_syscall(_FSOPEN, fsname, flags))


def fsconfig(fd: int, cmd: int, key: bytes | None, value: bytes | None, aux: int) -> None:
    _check(_syscall(_FSCONFIG, fd, cmd, key, value, aux))


def fsmount(fsfd: int, flags: int, attr_flags: int) -> int:
    return _check(_syscall(_FSMOUNT, fsfd, flags, attr_flags))


def open_tree(dirfd: int, pathname: bytes, flags: int) -> int:
    return _check(_syscall(_OPEN_TREE, dirfd, pathname, flags))


def move_mount(from_dirfd: int, from_path: bytes, to_dirfd: int, to_path: bytes, flags: int) -> None:
    _check(_syscall(_MOVE_MOUNT, from_dirfd, from_path, to_dirfd, to_path, flags))


def openat2(dirfd: int, pathname: bytes, flags: int, mode: int, resolve: int) -> int:
    how = struct.pack("=QQQ", flags, mode, resolve)
    return _check(_syscall(_OPENAT2, dirfd, pathname, how, ctypes.c_size_t(len(how))))


def faccessat2(dirfd: int, pathname: bytes, mode: int, flags: int) -> None:
    _check(_syscall(_FACCESSAT2, dirfd, pathname, mode, flags))


def peer_groups(fd: int) -> list[int]:
    """Return the supplementary groups of the process that connected, as the current user namespace sees them."""
    size = ctypes.c_uint(64 * 4)
    while True:
        buffer = (ctypes.c_uint * (size.value // 4))()
        try:
            _check(_libc.getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, buffer, ctypes.byref(size)))
            return buffer[: size.value // 4]
        except OSError as error:
            if error.errno != errno.ERANGE:  # on ERANGE, the kernel has set the required size
                raise


#: include/uapi/linux/magic.h
TMPFS_MAGIC = 0x01021994


def fstatfs_type(fd: int) -> int:
    """Return f_type of fstatfs(2): the magic number of the filesystem, the first word of struct statfs."""
    buffer = ctypes.create_string_buffer(256)
    _check(_libc.fstatfs(fd, buffer))
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)


def statx_mount(fd: int) -> tuple[int, int]:
    """Return (device number, mount ID) of the mount that `fd` is on, asking nothing of the filesystem.

    With an empty mask and AT_STATX_DONT_SYNC the kernel answers from its cache, also for a FUSE filesystem that this
    process may not access (fs/fuse/dir.c, fuse_getattr). The device number is the kernel's own, major << 20 | minor;
    the major of a filesystem without a block device is 0. Offsets are those of struct statx.
    """
    buffer = ctypes.create_string_buffer(256)
    _check(_libc.statx(fd, b"", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, buffer))
    major, minor, mount_id = struct.unpack_from("=IIQ", buffer, 0x88)
    return _device_number(major, minor), mount_id


def _device_number(major: int, minor: int) -> int:
    return major << 20 | minor


def statx_all(fd: int) -> None:
    """Ask the filesystem for everything about the file that `fd` refers to: all that statx(2) has for any filesystem,
    the time of birth included. The kernel answers from its cache what it may."""
    buffer = ctypes.create_string_buffer(256)
    _check(_libc.statx(fd, b"", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_BTIME, buffer))


def is_mount_root(fd: int) -> bool:
    """Return whether `fd` is the root of its mount, asking nothing of the filesystem, as `statx_mount`."""
    buffer = ctypes.create_string_buffer(256)
    _check(_libc.statx(fd, b"", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, buffer))
    (attributes,) = struct.unpack_from("=Q", buffer, 0x08)
    return bool(attributes & STATX_ATTR_MOUNT_ROOT)


def unique_mount_id(fd: int) -> int:
    """Return the unique ID of the mount that `fd` is on, asking nothing of the filesystem (Linux 6.12).

    name_to_handle_at(2) returns it even when it fails for lack of room for the handle, which is not needed here.
    statx(2) has it, too, but not for a FUSE filesystem that this process may not access.
    """
    no_room = ctypes.create_string_buffer(8)  # struct file_handle: 0 bytes of room
    mount_id = ctypes.c_uint64()
    flags = AT_EMPTY_PATH | AT_HANDLE_FID | AT_HANDLE_MNT_ID_UNIQUE
    try:
        _check(_libc.name_to_handle_at(fd, b"", no_room, ctypes.byref(mount_id), flags))
    except OSError as error:
        if error.errno != errno.EOVERFLOW:
            raise
    return mount_id.value


def is_unique_mount_id(mount_id: int) -> bool:
    """Return whether the kernel never reuses this mount ID, and statmount(2) accepts it.

    The other IDs, those in mountinfo, are small numbers and reused (fs/namespace.c, MNT_UNIQUE_ID_OFFSET).
    """
    return mount_id >= 1 << 31


def mount_setattr(dirfd: int, pathname: bytes, flags: int, attr_set: int, propagation: int = 0, clear: int = 0) -> None:
    """Set and clear attributes of a mount, as MOUNT_ATTR_*. `propagation`: MS_PRIVATE, or 0 to leave it unchanged."""
    attributes = struct.pack("=QQQQ", attr_set, clear, propagation, 0)
    _check(_syscall(_MOUNT_SETATTR, dirfd, pathname, flags, attributes, len(attributes)))


#: Size of the structure, in bytes; the strings follow it.
SIZE_OF_STATMOUNT = 512


class MountStatus(NamedTuple):
    """Result of `statmount`; fields that were not requested, or that the mount lacks, are empty."""

    device: int
    parent_id: int
    type: bytes
    options: bytes
    point: bytes


def statmount(mount_id: int, mask: int) -> MountStatus:
    """Return the kernel's description of a mount in this process's mount namespace, by its unique ID (Linux 6.8).

    The options are those of the filesystem (Linux 6.11). Offsets are those of struct statmount, which refers to a
    string by its offset in the buffer behind the structure.
    """
    request = struct.pack("=IIQQ", 24, 0, mount_id, mask)
    size = 4096
    while True:
        buffer = ctypes.create_string_buffer(size)
        try:
            _check(_syscall(SYS_STATMOUNT, request, buffer, ctypes.c_size_t(size), 0))
            break
        except OSError as error:
            if error.errno != errno.EOVERFLOW:
                raise
            size *= 4
    answered, major, minor = struct.unpack_from("=QII", buffer, 8)
    (parent,) = struct.unpack_from("=Q", buffer, 48)

    def string(wanted: int, offset: int) -> bytes:
        if not answered & wanted:
            return b""
        begin = SIZE_OF_STATMOUNT + int(struct.unpack_from("=I", buffer, offset)[0])
        return buffer.raw[begin : buffer.raw.index(b"\0", begin)]

    return MountStatus(
        _device_number(major, minor),
        parent,
        type=string(STATMOUNT_FS_TYPE, 36),
        options=string(STATMOUNT_MNT_OPTS, 4),
        point=string(STATMOUNT_MNT_POINT, 108),
    )


def listmount(mount_id: int, after: int = 0) -> list[int]:
    """Return the unique IDs of mounts on and below a mount, at most 512 of them, beginning after the ID `after`."""
    request = struct.pack("=IIQQ", 24, 0, mount_id, after)
    ids = (ctypes.c_uint64 * 512)()
    return ids[: _check(_syscall(SYS_LISTMOUNT, request, ids, ctypes.c_size_t(len(ids)), 0))]


def pidfd_getfd(pidfd: int, targetfd: int) -> int:
    """Return a copy of another process's descriptor, which is closed on exec."""
    return _check(_syscall(_PIDFD_GETFD, pidfd, targetfd, 0))


def fork() -> int:
    """Fork and do nothing else: from Python 3.12 on, `os.fork` reads /proc/self/stat first, perhaps a caller's."""
    return _check(ctypes.pythonapi.fork())


def landlock_abi() -> int:
    """Return the Landlock ABI version of the kernel; 0 if Landlock is missing or disabled."""
    version: int = _syscall(_LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    return max(0, version)


def landlock_create_ruleset(handled_access_fs: int, handled_access_net: int, scoped: int) -> int:
    attributes = struct.pack("=QQQ", handled_access_fs, handled_access_net, scoped)
    return _check(_syscall(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0))


def landlock_add_rule(ruleset: int, allowed_access: int, parent: int) -> None:
    """Allow `allowed_access` beneath the directory `parent`."""
    attributes = struct.pack("=Qi", allowed_access, parent)
    _check(_syscall(_LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, attributes, 0))


def landlock_restrict_self(ruleset: int) -> None:
    _check(_syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0))
