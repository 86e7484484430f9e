"""The live mounts of the broker, kept over restarts.

A mount is identified by its FUSE connection: the device number, which names a directory of fusectl, and the inode of
that directory, because device numbers are reused. The kernel keeps both as long as fusectl is in use; for the case that
it was not, see `restore`. So the front asks the kernel whether a mount lives whenever it matters; the table in SQLite
only holds what the kernel doesn't know: the caller.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.model import Device, Mount, MountNamespace
from fusermount3_broker.front.tables import damaged_rows
from fusermount3_broker.front.tables.database import Form, Row, Table

#: These must fit into a record of `messages.mounter`.
_UNSIGNED = Annotated[int, range(2**32)]

_FIELDS = [field.name for field in fields(Mount)]
_TYPES = damaged_rows.types_of(Mount) | dict.fromkeys(("device", "namespace", "uid", "pid"), _UNSIGNED)
#: In a table, the column of the request ID is called "request": earlier versions called it that.
_COLUMNS = {"request" if name == "request_id" else name: kind for name, kind in _TYPES.items()}
#: Columns that tables of earlier versions lack, with the values for their mounts. A mount without an account counts for
#: no caller's account.
_ADDED = {"account": "''", "volume": "x''", "mount_id": "0", "share": "x''"}
#: The numbers are meaningless after a boot. And no write waits for the disk: a crash also ends the mounts.
FORM = Form("mounts", _COLUMNS, _ADDED, each_boot="DELETE FROM mounts", synchronous="OFF")


class Registry:
    """The live mounts. `fusectl` is a descriptor of the root of that filesystem."""

    def __init__(self, directory: Path, fusectl: int) -> None:
        """Open or create the table in `directory`, and drop mounts that have not survived.

        Raises OSError, TableUnreadable.
        """
        self._fusectl = fusectl
        self.table = Table(directory, FORM, self._rows)
        mounts = [Mount(*row) for row in self.table.found] if self.table.is_of_this_boot else []
        #: Mounts of an earlier registry that may still exist, although their numbers have changed: fusectl may have
        #: restarted since (see `restore`). They are not among the other mounts until this is decided.
        self.unsure = {
            mount.device: mount for mount in mounts if mount.mount_id and self._has_another_connection(mount)
        }
        self._mounts = {mount.device: mount for mount in mounts if mount.device not in self.unsure}
        #: Callbacks, called when a mount is added or dropped.
        self.added: Callable[[Mount], None] = lambda _: None
        self.dropped: Callable[[Mount], None] = lambda _: None
        #: The mounts of each namespace and of each account.
        self._groups: dict[MountNamespace | AccountName, set[Device]] = {}
        for mount in self._mounts.values():
            self._group(mount)
        self.reconcile()

    def close(self) -> None:
        self.table.write_deferred()
        self.table.close()

    def connection(self, device: Device) -> int:
        """Return the inode of the connection of `device`, or 0 if there is none."""
        try:
            return os.stat(str(device), dir_fd=self._fusectl).st_ino
        except OSError:
            return 0

    def add(self, mount: Mount) -> None:
        """Write a mount to the table and add it, unless it is gone and its number already belongs to another mount.

        Raises NotWritten, with nothing changed.
        """
        if self._is_anothers(mount):
            return
        self.table.write(_row(mount))
        self._take(mount)

    def restore(self, mount: Mount) -> None:
        """Add a mount that exists already, whether or not it can be written to the table now."""
        self._restore_later(mount)
        self.table.write_deferred()

    def _restore_later(self, mount: Mount) -> None:
        """Add a mount that exists already, and leave its row to the next write."""
        if not self._is_anothers(mount):
            self._take(mount)
            self.table.write_later(mount.device, _row(mount))

    def _is_anothers(self, mount: Mount) -> bool:
        """Whether the number belongs to another live mount."""
        known = self.find(mount.device)
        return known is not None and known.connection != mount.connection

    def _take(self, mount: Mount) -> None:
        """Add the mount in memory."""
        self._forget(mount.device)
        self._mounts[mount.device] = mount
        self._group(mount)
        self.added(mount)

    def decide(self, mounts: Iterable[Mount], there: Collection[Device]) -> None:
        """Restore those of these `unsure` mounts that are `there`, and forget the others; write the table once."""
        for mount in mounts:
            del self.unsure[mount.device]
            if mount.device in there:
                self._restore_later(replace(mount, connection=self.connection(mount.device)))
            elif mount.device not in self._mounts:
                self.table.delete_later(mount.device)
        self.table.write_deferred()

    def _has_another_connection(self, mount: Mount) -> bool:
        """Whether its number has a connection with another inode than the mount's."""
        return self.connection(mount.device) not in (0, mount.connection)

    def find(self, device: Device) -> Mount | None:
        """Return the live mount with that device number, or None."""
        self._check(device)
        return self._mounts.get(device)

    def count(self, group: MountNamespace | AccountName, limit: int) -> int:
        """Return how many mounts of a namespace or account are alive; the number is exact only if it reaches
        `limit`."""
        devices = self._groups.get(group, set())
        if 0 <= limit <= len(devices):
            for device in list(devices):
                self._check(device)
        return len(self._groups.get(group, ()))

    def mounts_of(self, volume: bytes) -> list[Mount]:
        """Return the mounts of the volume at a target, newest first; some of them may be gone."""
        return [mount for mount in reversed(self._mounts.values()) if mount.volume == volume]

    def shared(self, key: bytes) -> list[Mount]:
        """Return the mounts that volumes offer or have offered under this key, newest first; some may be gone."""
        return [mount for mount in reversed(self._mounts.values()) if mount.share == key] if key else []

    def most_in_a_namespace(self) -> int:
        """Return the number of mounts in the namespace that has the most; some of them may be gone."""
        return max((len(devices) for group, devices in self._groups.items() if isinstance(group, int)), default=0)

    def reconcile(self) -> None:
        """Drop every mount that no longer exists."""
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
        self._forget(device)
        self.table.delete_later(device)

    def _forget(self, device: Device) -> None:
        """Remove the mount with that number from memory."""
        mount = self._mounts.pop(device, None)
        if mount is None:
            return
        self.dropped(mount)
        for group in (mount.namespace, mount.account):
            self._groups[group].remove(device)
            if not self._groups[group]:
                del self._groups[group]

    def _group(self, mount: Mount) -> None:
        for group in (mount.namespace, mount.account):
            self._groups.setdefault(group, set()).add(mount.device)

    def _rows(self) -> list[Row]:
        return [_row(mount) for mount in (*self.unsure.values(), *self._mounts.values())]


def filesystem_type(subtype: bytes) -> str:
    """Return the type that mountinfo shows for a FUSE filesystem with that subtype."""
    return "fuse" + (f".{subtype.decode('utf-8', 'backslashreplace')}" if subtype else "")


def _row(mount: Mount) -> Row:
    return [getattr(mount, name) for name in _FIELDS]
