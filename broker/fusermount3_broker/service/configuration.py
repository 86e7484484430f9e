"""The configuration: its keys and their defaults.

Every key is a field of a frozen dataclass here; packaging/fusermount3-broker.toml documents each. `configuration_file`
reads them from a file.
"""

from dataclasses import dataclass, field
from pathlib import Path

#: Replaces the file's path in messages when there is no file.
_NO_FILE = b"the broker's configuration"

#: Filesystems that may be mounted over, as in fusermount3 3.18: names, with the f_type of statfs(2).
FILESYSTEMS = {
    "aufs": 0x61756673,
    "autofs": 0x187,
    "bcachefs": 0xCA451A4E,
    "btrfs": 0x9123683E,
    "ceph": 0x00C36400,
    "cifs": 0xFF534D42,
    "ecryptfs": 0xF15F,
    "exfat": 0x2011BAB0,
    "ext": 0xEF53,
    "f2fs": 0xF2F52010,
    "fuse": 0x65735546,
    "gfs2": 0x01161970,
    "gpfs": 0x47504653,
    "hfsplus": 0x482B,
    "jffs2": 0x72B6,
    "jfs": 0x3153464A,
    "lustre": 0x0BD00BD0,
    "msdos": 0x4D44,
    "ncp": 0x564C,
    "nfs": 0x6969,
    "nilfs": 0x3434,
    "ntfs": 0x5346544E,
    "ntfs3": 0x7366746E,
    "openafs": 0x5346414F,
    "overlay": 0x794C7630,
    "panfs": 0xAAD7AAEA,
    "ramfs": 0x858458F6,
    "reiserfs": 0x52654973,
    "smb2": 0xFE534D42,
    "squashfs": 0x73717368,
    "tmpfs": 0x01021994,
    "ubifs": 0x24051905,
    "ufsd": 0x736675005346544E,
    "wekafs": 0x18031977,
    "xfs": 0x58465342,
    "zfs": 0x2FC12FC1,
}


#: Forms of the log: by what stderr is connected to, lines for people, or lines of JSON.
LOG_FORMATS = ("auto", "text", "json")


@dataclass(frozen=True)
class Socket:
    """A socket for callers. The defaults let every user connect that can see the socket."""

    path: Path = Path("/run/fusermount3-proxy/broker.sock")
    mode: int = 0o666
    owner: str = "root"
    group: str = "root"
    #: The SELinux label, so that confined containers may connect; empty: the policy's default.
    selinux_label: str = ""


@dataclass(frozen=True)
class Deadlines:
    """Whole seconds. `request`: for a caller to send its request; `operation`: for each step of the mounter; `unmount`:
    for the number of waiting requests to change in a filesystem whose unmount blocks; `commit`: for a caller to confirm
    that it has the descriptor; `sync_init`: for a FUSE program that wants to be ready before it is mounted
    (``--sync-init``) to become so, and then for the kernel to hear from it.
    """

    request: int = 5
    operation: int = 5
    unmount: int = 1
    commit: int = 10
    sync_init: int = 300


@dataclass(frozen=True)
class Loopback:
    """A TCP port on loopback, which only this machine can reach."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Limits:
    """Limits for one container, or one user; 0: no limit. `mounts`: live ones; `requests_per_second`, after a `burst`
    that may come at once; `concurrent`: requests in progress. A message has at most 64 KiB in any case.
    """

    mounts: int = 2000
    requests_per_second: int = 100
    burst: int = 1000
    concurrent: int = 256


@dataclass(frozen=True)
class Configuration:
    user_allow_other: bool = False
    mount_max: int = 1000
    mountpoint_filesystems: tuple[int, ...] = tuple(FILESYSTEMS.values())
    max_requests: int = 64
    max_connections: int = 2048
    dead_mounts_seconds: int = 2
    hung_seconds: int = 10
    socket: tuple[Socket, ...] = (Socket(),)
    control_socket: Path = Path("/run/fusermount3-broker/control.sock")
    state_directory: Path = Path("/var/lib/fusermount3-broker")
    #: Where metrics and health are served: a Unix socket, a port, or nowhere.
    metrics: Path | Loopback | None = None
    #: One of `LOG_FORMATS`.
    log_format: str = "auto"
    deadlines: Deadlines = field(default_factory=Deadlines)
    limits: Limits = field(default_factory=Limits)
    #: The file that holds this configuration, for messages; not a key.
    source: bytes = _NO_FILE
