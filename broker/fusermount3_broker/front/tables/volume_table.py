"""The published volumes, kept over restarts of the broker and of the machine.

What the broker makes for a volume must be removed some day, so the volume is recorded before that is made. A volume is
identified by its target, the path that kubelet chose: the same volume may be published to several pods, at a target
each.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fusermount3_broker.front.model import Volume
from fusermount3_broker.front.tables import damaged_rows
from fusermount3_broker.front.tables.database import Form, Row, Table
from fusermount3_broker.messages import mounter

_COLUMNS = [each.name for each in fields(Volume)]
_TYPES = damaged_rows.types_of(Volume) | {"group": mounter.GroupId}
_BOOLEANS = {each.name for each in fields(Volume) if each.type is bool}
#: Whether, since the machine booted, a FUSE program has received the descriptor of an eager volume, or a borrower has
#: had a filesystem.
_TAKEN = "taken"
#: After a crash of the machine the table is intact, but may lack the last writes.
FORM = Form(
    "volumes",
    _TYPES | {_TAKEN: bool},
    {"nonce": "x''", "share": "x''", "namespace": "x''", "borrows": "x''", "block": "0", "capacity": "0"},
    each_boot=f"UPDATE volumes SET {_TAKEN} = 0",
    synchronous="NORMAL",
)


class Volumes:
    """The table of volumes."""

    def __init__(self, directory: Path) -> None:
        """Open or create the table in `directory`. Raises OSError, TableUnreadable."""
        self.table = Table(directory, FORM, self._rows)
        self._volumes: dict[bytes, Volume] = {}
        self._taken: set[bytes] = set()
        for *values, is_taken in self.table.found:
            volume = _volume(values)
            self._volumes[volume.target] = volume
            if is_taken and self.table.is_of_this_boot:
                self._taken.add(volume.target)

    def close(self) -> None:
        self.table.close()

    def add(self, volume: Volume) -> None:
        """Write a volume to the table and add it; it replaces the volume at its target. Raises NotWritten."""
        self.table.write(_row(volume, is_taken=False))
        self._volumes[volume.target] = volume
        self._taken.discard(volume.target)

    def remove(self, target: bytes) -> None:
        """Forget the volume, if there is one."""
        self._volumes.pop(target, None)
        self._taken.discard(target)
        self.table.write_or_defer(target, None)

    def find(self, target: bytes) -> Volume | None:
        return self._volumes.get(target)

    def with_same_socket(self, volume: Volume) -> Volume | None:
        """Return another volume that has a socket where `volume` is to have one."""
        others = (each for each in self._volumes.values() if each.target != volume.target)
        return next((each for each in others if each.sockets & volume.sockets), None)

    def at_other_target(self, volume: Volume) -> Volume | None:
        """Return the same volume at another target, if either of the two is `alone`."""
        others = (each for each in self._volumes.values() if each.target != volume.target and each.id == volume.id)
        return next((each for each in others if each.alone or volume.alone), None)

    def sources(self, keys: Collection[bytes]) -> list[Volume]:
        """Return the volumes that offer a filesystem under one of these keys, the last published first."""
        return [volume for volume in reversed(self._volumes.values()) if volume.share in keys and volume.share]

    def borrowers(self, key: bytes) -> list[Volume]:
        """Return the volumes that may get a filesystem that is offered under this key."""
        return [volume for volume in self._volumes.values() if volume.is_borrower and key in volume.keys]

    def note_taken(self, target: bytes) -> None:
        """Record that a FUSE program has the descriptor of the filesystem that was made when this volume was
        published; of a borrower, that it has a filesystem."""
        if volume := self._volumes.get(target):
            self._taken.add(target)
            self.table.write_or_defer(target, _row(volume, is_taken=True))

    def is_taken(self, target: bytes) -> bool:
        return target in self._taken

    def __len__(self) -> int:
        return len(self._volumes)

    def __iter__(self) -> Iterator[Volume]:
        return iter(list(self._volumes.values()))

    def _rows(self) -> list[Row]:
        return [_row(volume, is_taken=target in self._taken) for target, volume in self._volumes.items()]


def _volume(values: Sequence[Any]) -> Volume:
    """Return the volume of a row."""
    row: dict[str, Any] = dict(zip(_COLUMNS, values, strict=True))
    return Volume(**{**row, **{name: bool(row[name]) for name in _BOOLEANS}})


def _row(volume: Volume, *, is_taken: bool) -> Row:
    return [*(getattr(volume, name) for name in _COLUMNS), int(is_taken)]
