"""The filesystems that the broker has mounted and that are still alive, kept over restarts.

A mount is known by its FUSE connection: the device number, which names a directory of fusectl, and the inode of that
directory, because device numbers are used again. Both are the kernel's for as long as somebody has fusectl; for when
nobody had, see `recognition`. So whether a mount lives is asked of the kernel, whenever it matters; the table in SQLite
only says what the kernel doesn't know: who asked for it.
"""

import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NewType

from broker.database import make_table, once_a_boot, open_or_begin
from broker.limits import AccountName

#: The kernel's number of a FUSE superblock's device, the name of its connection in fusectl.
Device = NewType("Device", int)
#: The inode number of a mount namespace.
MountNamespace = NewType("MountNamespace", int)


@dataclass(frozen=True, slots=True)
class Mount:
    """A filesystem mounted through the broker. Paths and names are as the caller wrote them.

    `uid` is the caller's in their own user namespace, `pid` that of the process that asked, as the broker sees it (0
    if it doesn't). `connection` is the inode of the FUSE connection, `mounted_at` the time of the request, in seconds
    since the epoch. `request` is the id in the log, `account` who pays. `volume` is the target of the volume on which
    it is mounted, too; empty if it is on none. `mount_id` is the unique id of the mount, 0 if it is not known.
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
    request: str
    account: AccountName
    volume: bytes = b""
    mount_id: int = 0

    @property
    def awaits_program(self) -> bool:
        """Whether this is the filesystem of a volume that was mounted before there was a program to serve it."""
        return self.volume != b"" and self.pid == 0


_COLUMNS = [field.name for field in fields(Mount)]
#: Columns that tables of earlier versions lack, with what their mounts get for it. A mount without an account is
#: counted for nobody.
_ADDED = {"account": "''", "volume": "x''", "mount_id": "0"}


class Registry:
    """The live mounts. `fusectl` is a descriptor of the root of that filesystem."""

    def __init__(self, directory: Path, fusectl: int) -> None:
        """Open the table in `directory`, or begin one, and drop what has not survived.

        Raises OSError, sqlite3.Error.
        """
        self._fusectl = fusectl
        (self._database, self.lost), mounts = open_or_begin(directory / "mounts.sqlite", _read)
        #: Mounts of an earlier registry that may be there, although their numbers say something else: fusectl may have
        #: begun anew since (see `recognition`). They are not among the others until it is decided.
        self.unsure = {
            mount.device: mount for mount in mounts if mount.mount_id and self._has_another_connection(mount)
        }
        self._mounts = {mount.device: mount for mount in mounts if mount.device not in self.unsure}
        #: The mounts of each namespace and of each account.
        self._groups: dict[MountNamespace | AccountName, set[Device]] = {}
        for mount in self._mounts.values():
            self._group(mount)
        self.reconcile()

    def close(self) -> None:
        self._database.close()

    def connection(self, device: Device) -> int:
        """Return the inode of the connection of `device`; 0 if there is none."""
        try:
            return os.stat(str(device), dir_fd=self._fusectl).st_ino
        except OSError:
            return 0

    def add(self, mount: Mount) -> None:
        """Add a mount, unless it is gone, and its number another's already."""
        if known := self.find(mount.device):
            if known.connection != mount.connection:
                return
            self._drop(mount.device)
        columns, marks = ", ".join(_COLUMNS), ", ".join("?" * len(_COLUMNS))
        values = [getattr(mount, name) for name in _COLUMNS]
        self._database.execute(f"INSERT OR REPLACE INTO mounts ({columns}) VALUES ({marks})", values)
        self._mounts[mount.device] = mount
        self._group(mount)

    def decide(self, mount: Mount, there: bool) -> None:
        """Take a mount that was `unsure` up again if it is there, else forget it."""
        del self.unsure[mount.device]
        if there:
            self.add(replace(mount, connection=self.connection(mount.device)))
        elif mount.device not in self._mounts:
            self._database.execute("DELETE FROM mounts WHERE device = ?", [mount.device])

    def _has_another_connection(self, mount: Mount) -> bool:
        """Whether there is a connection of its number, and it is not that of the mount, as far as its inode tells."""
        return self.connection(mount.device) not in (0, mount.connection)

    def find(self, device: Device) -> Mount | None:
        """Return the live mount of that number."""
        self._check(device)
        return self._mounts.get(device)

    def count(self, group: MountNamespace | AccountName, limit: int) -> int:
        """Return how many mounts of a namespace or account are alive; counted exactly only when it reaches `limit`."""
        devices = self._groups.get(group, set())
        if 0 <= limit <= len(devices):
            for device in list(devices):
                self._check(device)
        return len(self._groups.get(group, ()))

    def most_in_a_namespace(self) -> int:
        """Return how many mounts the namespace has that has the most, some of which may be gone."""
        return max((len(devices) for group, devices in self._groups.items() if isinstance(group, int)), default=0)

    def reconcile(self) -> None:
        """Drop every mount that is no more."""
        for device in list(self._mounts):
            self._check(device)

    def __len__(self) -> int:
        return len(self._mounts)

    def __iter__(self) -> Iterator[Mount]:
        """Yield the mounts, oldest first."""
        return iter(sorted(self._mounts.values(), key=lambda mount: mount.mounted_at))

    def _check(self, device: Device) -> None:
        mount = self._mounts.get(device)
        if mount is not None and (not mount.connection or mount.connection != self.connection(device)):
            self._drop(device)

    def _drop(self, device: Device) -> None:
        mount = self._mounts.pop(device)
        for group in (mount.namespace, mount.account):
            self._groups[group].remove(device)
            if not self._groups[group]:
                del self._groups[group]
        self._database.execute("DELETE FROM mounts WHERE device = ?", [device])

    def _group(self, mount: Mount) -> None:
        for group in (mount.namespace, mount.account):
            self._groups.setdefault(group, set()).add(mount.device)


def _read(database: sqlite3.Connection) -> list[Mount]:
    """Make the table ready and read it. Nothing waits for the disk: a crash of the machine ends the mounts too."""
    database.execute("PRAGMA synchronous = OFF")
    make_table(database, "mounts", _COLUMNS, _ADDED)
    once_a_boot(database, "DELETE FROM mounts")  # the numbers say nothing any more
    return [Mount(*row) for row in database.execute(f"SELECT {', '.join(_COLUMNS)} FROM mounts")]
