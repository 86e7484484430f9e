"""The volumes that kubelet has had published, kept over restarts of the broker and of the machine.

What has been made for a volume has to be taken away some day, so it is written down before it is made. A volume is
known by its target, where kubelet wants it: the same one may be published to several pods, at a target each.
"""

import secrets
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from broker.database import listed, make_table, once_a_boot, open_or_begin
from broker.invariants import LONGEST_NONCE, SECOND_SOCKET


def _nonce() -> bytes:
    return secrets.token_hex(LONGEST_NONCE // 2).encode()


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume of a pod. Paths are relative to kubelet's directory.

    `directory` is that of the pod's emptyDir in which the socket `name` is. With `old_clients` that is one for the
    clients of meta-fuse-csi-plugin, with ours beside it. An `eager` one is mounted before anybody connects. `options`
    are mount options, separated by commas; `group` is the volume mount group, or `plan.NO_GROUP`. One that is to be
    `alone` is published for one pod only. `nonce` (`plan.StartPublish`) is none of what kubelet says of it.
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

    @property
    def sockets(self) -> set[tuple[bytes, bytes]]:
        """Where its sockets are: directories and names."""
        names = {self.name, self.name + SECOND_SOCKET} if self.old_clients else {self.name}
        return {(self.directory, name) for name in names}


_COLUMNS = [each.name for each in fields(Volume)]
_BOOLEANS = {each.name for each in fields(Volume) if each.type is bool}
#: Whether the descriptor of an eager volume has been handed to a FUSE program, since the machine was booted.
_TAKEN = "taken"


class Volumes:
    """The table of volumes."""

    def __init__(self, directory: Path) -> None:
        """Open the table in `directory`, or begin one. Raises OSError, sqlite3.Error."""
        (self._database, self.lost), (volumes, self._taken) = open_or_begin(directory / "volumes.sqlite", _read)
        self._volumes = {volume.target: volume for volume in volumes}

    def close(self) -> None:
        self._database.close()

    def add(self, volume: Volume) -> None:
        """Add a volume, in place of what was at its target."""
        marks = ", ".join("?" * len(_COLUMNS))
        values = [getattr(volume, name) for name in _COLUMNS]
        self._database.execute(
            f"INSERT OR REPLACE INTO volumes ({listed([*_COLUMNS, _TAKEN])}) VALUES ({marks}, 0)", values
        )
        self._volumes[volume.target] = volume
        self._taken.discard(volume.target)

    def remove(self, target: bytes) -> None:
        """Forget the volume, if there is one."""
        self._database.execute("DELETE FROM volumes WHERE target = ?", [target])
        self._volumes.pop(target, None)
        self._taken.discard(target)

    def find(self, target: bytes) -> Volume | None:
        return self._volumes.get(target)

    def rival_of(self, volume: Volume) -> Volume | None:
        """Return another volume that has a socket where `volume` wants one."""
        others = (each for each in self._volumes.values() if each.target != volume.target)
        return next((each for each in others if each.sockets & volume.sockets), None)

    def twin_of(self, volume: Volume) -> Volume | None:
        """Return the same volume at another target, if one of the two is to be alone."""
        others = (each for each in self._volumes.values() if each.target != volume.target and each.id == volume.id)
        return next((each for each in others if each.alone or volume.alone), None)

    def note_taken(self, target: bytes) -> None:
        """Write down that a FUSE program has the descriptor of the filesystem that was made when this was published."""
        self._database.execute(f"UPDATE volumes SET {_TAKEN} = 1 WHERE target = ?", [target])
        if target in self._volumes:
            self._taken.add(target)

    def is_taken(self, target: bytes) -> bool:
        return target in self._taken

    def __len__(self) -> int:
        return len(self._volumes)

    def __iter__(self) -> Iterator[Volume]:
        return iter(list(self._volumes.values()))


def _read(database: sqlite3.Connection) -> tuple[list[Volume], set[bytes]]:
    """Make the table ready; return the volumes, and the targets of those that are taken."""
    database.execute("PRAGMA synchronous = NORMAL")  # whole after a crash of the machine, if not up to the last word
    make_table(database, "volumes", [*_COLUMNS, _TAKEN], {"nonce": "x''"})
    once_a_boot(database, f"UPDATE volumes SET {_TAKEN} = 0")
    volumes: list[Volume] = []
    taken: set[bytes] = set()
    for *values, is_taken in database.execute(f"SELECT {listed([*_COLUMNS, _TAKEN])} FROM volumes"):
        row: dict[str, Any] = dict(zip(_COLUMNS, values, strict=True))
        volumes.append(Volume(**{**row, **{name: bool(row[name]) for name in _BOOLEANS}}))
        if is_taken:
            taken.add(volumes[-1].target)
    return volumes, taken
