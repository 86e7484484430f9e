"""What the running kernel lacks of what the broker uses, by name and consequence.

Distributions add features of newer kernels to older ones, so each feature is tested for; a version number proves
nothing. The code asks for a feature where it needs it, and has another way where the kernel may lack it. This module
only says what that means for administrators and users.
"""

import errno
import os
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import NamedTuple

from fusermount3_broker.kernel import syscalls

#: The beginning of the line with the connection in the fdinfo of a /dev/fuse descriptor (fs/fuse/dev.c,
#: fuse_dev_show_fdinfo).
CONNECTION = b"fuse_connection:\t"


#: The name of the feature without which mounts may not be recognized.
STATMOUNT = "statmount(2)"


class Feature(NamedTuple):
    """A feature of the kernel. `since` is the first Linux release that has it; `otherwise` is what a kernel without it
    means, as a clause."""

    name: str
    since: str
    otherwise: str
    exists: Callable[[], bool]


def running() -> str:
    """Return the kernel as people call it: "Linux 6.1"."""
    system, release = os.uname().sysname, os.uname().release
    return f"{system} {'.'.join(release.split('-')[0].split('.')[:2])}"


def lacking() -> list[Feature]:
    """Return the features that the running kernel lacks.

    Needs CAP_SYS_ADMIN, as a process of the broker has it at its start; otherwise some seem to exist.
    """
    return [feature for feature in FEATURES if not feature.exists()]


def withheld(lacking: Iterable[Feature]) -> str:
    """Return what it means that a seccomp profile denies the broker statmount(2), which this kernel has; else "".

    Container engines do so. Here the version of the kernel counts: from its release on, none is without.
    """
    (statmount,) = (each for each in FEATURES if each.name == STATMOUNT)
    if statmount not in lacking or _release() < _numbers(statmount.since):
        return ""
    return (
        f"a seccomp profile denies the broker {STATMOUNT}, which this kernel has: when the broker is started again, it "
        "may not recognize its mounts; start its container with --security-opt=seccomp=unconfined"
    )


def _release() -> tuple[int, ...]:
    return _numbers(running().rpartition(" ")[2])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in version.split("."))


def too_old() -> str:
    """Return why the broker can't run on this kernel at all, or ""."""
    if _has_option(syscalls.SO_NETNS_COOKIE, 8):
        return ""
    return f"{running()} is too old: it lacks SO_NETNS_COOKIE; the broker needs Linux 5.14 or newer"


def tells_of_one_mount() -> bool:
    """Return whether statmount(2), listmount(2) and mount IDs that the kernel never reuses exist, and this process may
    use them."""
    try:
        root = os.open("/", os.O_PATH | os.O_CLOEXEC)
        try:
            mount_id = syscalls.unique_mount_id(root)
        finally:
            os.close(root)
        syscalls.statmount(mount_id, syscalls.STATMOUNT_MNT_BASIC)
        syscalls.listmount(mount_id)
    except OSError:
        return False
    return syscalls.is_unique_mount_id(mount_id)


def _has_option(option: int, size: int) -> bool:
    """Return whether sockets have this option of the level SOL_SOCKET (unix(7))."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            value = ours.getsockopt(socket.SOL_SOCKET, option, size)
        except OSError as error:
            return error.errno != errno.ENOPROTOOPT
    if option == syscalls.SO_PEERPIDFD:  # the value is a new descriptor
        os.close(int.from_bytes(value, sys.byteorder))
    return True


def _creates_exclusively() -> bool:
    """fsconfig(2) looks at the command before it looks at the descriptor, which is no filesystem's here."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = ours.fileno(), syscalls.FSCONFIG_CMD_CREATE_EXCL, None, None, 0
        return _errno_of(lambda: syscalls.fsconfig(*command)) != errno.EOPNOTSUPP


def _mounts_beneath() -> bool:
    """move_mount(2) looks at the flags before it looks at the descriptors, which are none here."""
    flags = syscalls.MOVE_MOUNT_F_EMPTY_PATH | syscalls.MOVE_MOUNT_T_EMPTY_PATH | syscalls.MOVE_MOUNT_BENEATH
    return _errno_of(lambda: syscalls.move_mount(-1, b"", -1, b"", flags)) != errno.EINVAL


def _shows_connections() -> bool:
    """Return whether the fdinfo of a /dev/fuse descriptor shows the connection that it serves; True if that can't be
    tested here. This makes a filesystem that is attached nowhere and ends at once."""
    with ExitStack() as held:
        try:
            device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
            held.callback(os.close, device)
            context = syscalls.fsopen(b"fuse", syscalls.FSOPEN_CLOEXEC)
            held.callback(os.close, context)
            for key, value in (
                (b"fd", b"%d" % device),
                (b"rootmode", b"40000"),
                (b"user_id", b"0"),
                (b"group_id", b"0"),
            ):
                syscalls.fsconfig(context, syscalls.FSCONFIG_SET_STRING, key, value, 0)
            syscalls.fsconfig(context, syscalls.FSCONFIG_CMD_CREATE, None, None, 0)
            with open(f"/proc/self/fdinfo/{device}", "rb") as file:
                return CONNECTION in file.read()
        except OSError:
            return True


def _errno_of(call: Callable[[], None]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


#: In the order of the releases that brought them.
FEATURES = (
    Feature(
        "SO_PEERPIDFD",
        "6.5",
        "callers are identified by their pid, and only while their connection lives; callers whose pid the broker "
        "can't see are refused",
        lambda: _has_option(syscalls.SO_PEERPIDFD, 4),
    ),
    Feature(
        "MOVE_MOUNT_BENEATH",
        "6.5",
        "when a FUSE program replaces one that has ended, its volume is empty for a moment, and other containers keep "
        "the ended filesystem below the new one",
        _mounts_beneath,
    ),
    Feature("FSCONFIG_CMD_CREATE_EXCL", "6.6", "--sync-init is refused", _creates_exclusively),
    Feature(
        STATMOUNT,
        "6.12",
        "each operation reads the table of all mounts of its namespace, and if fusectl is mounted anew, a new broker "
        "does not recognize the mounts of an earlier one",
        tells_of_one_mount,
    ),
    Feature(
        "Landlock's scopes",
        "6.12",
        "seccomp alone keeps the front from signalling processes outside",
        lambda: syscalls.landlock_abi() >= 6,
    ),
    Feature(
        "fuse_connection in fdinfo",
        "6.16",
        "the broker asks filesystems whether they are dead, as it can't see who serves them; and the volume of a pod "
        "with a user namespace is not taken for dead while the pod has /dev/fuse open",
        _shows_connections,
    ),
)
