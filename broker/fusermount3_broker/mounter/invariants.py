"""Checks that the mounter makes itself, whatever the front asks: pure functions, like the front's own decisions.

The front decides by the configuration, which the mounter does not know, and a former caller may have taken over the
front. So the mounter also checks each plan for what no configuration allows.
"""

import stat

from fusermount3_broker.messages.mounter import MountPlan
from fusermount3_broker.messages.volume_sockets import LONGEST_NONCE, LONGEST_SOCKET

#: The filesystems that are interfaces to the kernel, by their type in mountinfo, with the f_type of statfs(2)
#: (include/uapi/linux/magic.h). A program that trusts what it reads there must not read a caller's files instead.
KERNEL_FILESYSTEMS = {
    b"bpf": 0xCAFE4A11,
    b"binder": 0x6C6F6F70,
    b"binfmt_misc": 0x42494E4D,
    b"cgroup": 0x0027E0EB,
    b"cgroup2": 0x63677270,
    b"configfs": 0x62656570,
    b"debugfs": 0x64626720,
    b"devpts": 0x1CD1,
    b"efivarfs": 0xDE5E81E4,
    b"fusectl": 0x65735543,
    b"hugetlbfs": 0x958458F6,
    b"mqueue": 0x19800202,
    b"nsfs": 0x6E736673,
    b"proc": 0x9FA0,
    b"pstore": 0x6165676C,
    b"resctrl": 0x7655821,
    b"securityfs": 0x73636673,
    b"selinuxfs": 0xF97CFF8C,
    b"smackfs": 0x43415D53,
    b"sysfs": 0x62656572,
    b"tracefs": 0x74726163,
}
#: include/uapi/linux/limits.h
_PATH_MAX = 4096
_NEVER_MOUNTED_OVER = frozenset(KERNEL_FILESYSTEMS.values())


def allow_mount(wanted: MountPlan) -> bool:
    """Return whether any front may have made this plan, which rests on facts that the mounter itself found."""
    if not (stat.S_ISDIR(wanted.root_mode) or stat.S_ISREG(wanted.root_mode)):
        return False
    if wanted.filesystem in _NEVER_MOUNTED_OVER:
        return False
    if wanted.uid != 0 and (wanted.access_errno or wanted.search_errno):
        return False
    if wanted.uid != 0 and wanted.foreign_sticky and stat.S_ISDIR(wanted.root_mode):
        return False
    # mount(2) takes all options as one string, so a value could smuggle in another option.
    return b"," not in wanted.max_read + wanted.block_size


def allow_eager_mount(wanted: MountPlan) -> bool:
    """Return whether a plan suits a volume that no FUSE program serves yet.

    The mount must be root's, on a directory, and without `sync_init`: there is no FUSE program to ask before the mount.
    """
    is_roots = (wanted.uid, wanted.root_mode, wanted.sync_init) == (0, stat.S_IFDIR, False)
    return is_roots and b"," not in wanted.max_read + wanted.block_size


def is_name(name: bytes) -> bool:
    """Return whether `name` is a single path component that names an entry of its own directory."""
    return name not in (b"", b".", b"..") and b"/" not in name and len(name) <= 255


_VOLUMES = b"volumes"
_CSI = b"kubernetes.io~csi"
_EMPTY_DIR = b"kubernetes.io~empty-dir"


def allow_target(path: bytes) -> bool:
    """Return whether a volume may be at `path` in kubelet's directory: below `pods`, only where CSI volumes are."""
    parts = path.split(b"/")
    if len(path) >= _PATH_MAX or not all(map(is_name, parts)):
        return False
    if parts[0] != b"pods":
        return True
    return len(parts) == 6 and (*parts[2:4], parts[5]) == (_VOLUMES, _CSI, b"mount")


_DEVICES = (b"plugins", b"kubernetes.io", b"csi", b"volumeDevices", b"publish")


def allow_device_target(path: bytes) -> bool:
    """Return whether a block volume may be at `path` in kubelet's directory: only where those of CSI drivers are."""
    parts = path.split(b"/")
    is_there = len(parts) == 7 and tuple(parts[:5]) == _DEVICES
    return is_there and len(path) < _PATH_MAX and all(map(is_name, parts[5:]))


def allow_socket(directory: bytes, name: bytes, nonce: bytes, target: bytes) -> bool:
    """Return whether a volume's socket may be there in kubelet's directory: only in an emptyDir of the target's pod.

    Also check that `nonce` is a nonce, so that a name made with it can only be one of the broker's.
    """
    parts = directory.split(b"/")
    if len(parts) != 5 or not all(map(is_name, parts)) or (parts[0], *parts[2:4]) != (b"pods", _VOLUMES, _EMPTY_DIR):
        return False
    if target.startswith(b"pods/") and not target.startswith(b"pods/%b/" % parts[1]):
        return False
    if len(nonce) > LONGEST_NONCE or nonce.translate(None, b"0123456789abcdef"):
        return False
    return is_name(name) and len(name) <= LONGEST_SOCKET


def allow_unmount(caller: int, owner: int | None) -> bool:
    """Return whether uid `caller` may unmount a FUSE filesystem of uid `owner`; None: the filesystem is not FUSE."""
    return owner is not None and caller in (0, owner)
