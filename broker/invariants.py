"""What the mounter does for nobody, whatever the front has decided: pure functions, like the front's own decisions.

The front decides by the configuration, which the mounter does not know, and may be in the hands of somebody who was
its caller. So the mounter looks at each plan, too, for what no configuration allows.
"""

import stat

from broker.plan import MountPlan

#: The filesystems through which the kernel is told and asked, by their type in mountinfo, with the f_type of statfs(2)
#: (include/uapi/linux/magic.h). A program that trusts what it reads there must not read what a caller has put there.
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
    """Whether a plan, which rests on facts of the mounter's own, is one that any front may have made."""
    if not (stat.S_ISDIR(wanted.root_mode) or stat.S_ISREG(wanted.root_mode)):
        return False
    if wanted.filesystem in _NEVER_MOUNTED_OVER:
        return False
    if wanted.uid != 0 and (wanted.access_errno or wanted.search_errno):
        return False
    if wanted.uid != 0 and wanted.foreign_sticky and stat.S_ISDIR(wanted.root_mode):
        return False
    # What mount(2) takes is one string; another option could be in it.
    return b"," not in wanted.max_read + wanted.block_size


def allow_eager_mount(wanted: MountPlan) -> bool:
    """Whether a plan is one for a volume that nobody serves yet: root's, and nobody is there to be asked before."""
    is_roots = (wanted.uid, wanted.root_mode, wanted.sync_init) == (0, stat.S_IFDIR, False)
    return is_roots and b"," not in wanted.max_read + wanted.block_size


def is_name(name: bytes) -> bool:
    """Whether it is one component of a path, which leads nowhere else than its directory says."""
    return name not in (b"", b".", b"..") and b"/" not in name and len(name) <= 255


#: Bytes of a socket's name in a pod's directory, so that with `SECOND_SOCKET` it is an address (unix(7)).
LONGEST_SOCKET = 97
#: What is appended to the name of the socket for old clients: the one for all others.
SECOND_SOCKET = b".seqpacket"
#: Digits in the name that a socket has before that one.
LONGEST_NONCE = 16
_VOLUMES = b"volumes"
_CSI = b"kubernetes.io~csi"
_EMPTY_DIR = b"kubernetes.io~empty-dir"


def allow_target(path: bytes) -> bool:
    """Whether a volume may be there, in kubelet's directory: among its pods, only where it has the volumes of CSI."""
    parts = path.split(b"/")
    if len(path) >= _PATH_MAX or not all(map(is_name, parts)):
        return False
    if parts[0] != b"pods":
        return True
    return len(parts) == 6 and (*parts[2:4], parts[5]) == (_VOLUMES, _CSI, b"mount")


def allow_socket(directory: bytes, name: bytes, nonce: bytes, target: bytes) -> bool:
    """Whether the socket of a volume may be there, in kubelet's directory: only in an emptyDir, and of the same pod.

    And whether that is a nonce, which makes no name but one of the broker's.
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
    """Whether that uid may have a filesystem unmounted that is a FUSE filesystem of uid `owner`; None if it is none."""
    return owner is not None and caller in (0, owner)
