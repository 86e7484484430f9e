"""The front's records of mounts and volumes. Decisions use them, and tables store them."""

import secrets
from dataclasses import dataclass, field, replace
from typing import NewType

from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.messages.volume_sockets import LONGEST_NONCE, SECOND_SOCKET

#: The device number of a FUSE superblock; it names the connection in fusectl.
Device = NewType("Device", int)
#: The inode number of a mount namespace.
MountNamespace = NewType("MountNamespace", int)


@dataclass(frozen=True, slots=True)
class Mount:
    """A filesystem mounted through the broker. Paths and names are as the caller wrote them.

    `uid` is the caller's uid in its own user namespace; `pid` is the pid of the calling process as the broker sees it,
    or 0 if the broker doesn't see it. `connection` is the inode of the FUSE connection, `mounted_at` the time of the
    request, in seconds since the epoch. `request_id` is the one in the log; `account` is the account that pays.
    `volume` is the target of the volume on which it is also mounted, or empty. `mount_id` is the unique ID of the
    mount, or 0 if unknown. `share` is the key under which that volume offers the filesystem to other pods, or empty.
    """

    device: Device
    connection: int
    namespace: MountNamespace
    uid: int
    pid: int
    command: str
    container: str
    mountpoint: bytes
    type: str
    source: bytes
    mounted_at: float
    request_id: str
    account: AccountName
    volume: bytes = b""
    mount_id: int = 0
    share: bytes = b""

    @property
    def awaits_program(self) -> bool:
        """Whether this is the filesystem of a volume that was mounted before its FUSE program existed."""
        return self.volume != b"" and self.pid == 0


def _nonce() -> bytes:
    return secrets.token_hex(LONGEST_NONCE // 2).encode()


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume of a pod. Paths are relative to kubelet's directory.

    `directory` is the directory of the pod's emptyDir that contains the socket `name`. With `old_clients`, that socket
    is for the clients of meta-fuse-csi-plugin, and ours is beside it. An `eager` volume is mounted before a client
    connects. `options` are mount options, separated by commas; `group` is the volume mount group, or
    `mounter.NO_GROUP`. An `alone` volume is published for one pod only. `nonce` (`mounter.StartPublish`) does not come
    from kubelet.

    `namespace` is the pod's in Kubernetes. A volume with a `share` is a *source*: its filesystem is offered to other
    pods under that key. `borrows` has the keys, one a line, under which this volume may get the filesystem of a source;
    it is a *borrower* if it has no `directory`. A `block` volume gets the device that a source offers. What a source
    offers as a device must have `capacity` bytes.
    """

    target: bytes
    id: bytes
    pod: str
    directory: bytes
    name: bytes
    old_clients: bool
    eager: bool
    read_only: bool
    allow_other: bool
    options: bytes
    group: int
    alone: bool = False
    nonce: bytes = field(default_factory=_nonce, compare=False)
    share: bytes = b""
    #: Tables of earlier versions lack these, and kubelet asks again for the volumes in them.
    namespace: bytes = field(default=b"", compare=False)
    borrows: bytes = field(default=b"", compare=False)
    block: bool = False
    capacity: int = 0

    @property
    def is_borrower(self) -> bool:
        return not self.directory

    @property
    def keys(self) -> frozenset[bytes]:
        """Return the keys under which the volume may get the filesystem of a source."""
        return frozenset(self.borrows.splitlines())

    def as_borrower(self) -> "Volume":
        """Return the volume as it is if the pod has no emptyDir for a socket."""
        return replace(self, directory=b"", name=b"", old_clients=False, eager=False)

    @property
    def sockets(self) -> set[tuple[bytes, bytes]]:
        """Return the locations of its sockets: directories and names."""
        if self.is_borrower:
            return set()
        names = {self.name, self.name + SECOND_SOCKET} if self.old_clients else {self.name}
        return {(self.directory, name) for name in names}
