"""The configuration: one TOML file, checked whole before any of it counts.

Every key is a field of a frozen dataclass here, with its default; packaging/fusermount3-broker.toml documents each.
A key that is not known is an error, which names it and the nearest one that is.
"""

import dataclasses
import difflib
import grp
import pwd
import re
import tomllib
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

DEFAULT_PATH = Path("/etc/fusermount3-broker.toml")
#: What stands for the file's path in messages when there is no file.
_NO_FILE = b"the broker's configuration"

#: Filesystems that may be mounted over, as fusermount3 3.18 has them: by name, the f_type of statfs(2).
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


class ConfigurationError(Exception):
    """The file cannot be used. The message names the file and the key."""


@dataclass(frozen=True)
class Socket:
    """Where callers connect. The defaults let every user connect who can see the socket."""

    path: Path = Path("/run/fusermount3-proxy/broker.sock")
    mode: int = 0o666
    owner: str = "root"
    group: str = "root"
    #: What SELinux is told, so that confined containers may connect; empty: what the policy gives by default.
    selinux_label: str = ""


@dataclass(frozen=True)
class Deadlines:
    """Whole seconds. `request`: for a caller to say what it wants; `operation`: for each step of the mounter;
    `unmount`: for the number of waiting requests to move in a filesystem whose unmount blocks; `commit`: for a caller
    to confirm that it has the descriptor; `sync_init`: for a FUSE program that wants to be ready before it is mounted
    (``--sync-init``) to become so, and then for the kernel to hear from it."""

    request: int = 5
    operation: int = 5
    unmount: int = 1
    commit: int = 10
    sync_init: int = 300


@dataclass(frozen=True)
class Loopback:
    """A TCP port that only this machine can reach."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Limits:
    """What one container, or one user, may have; 0: any number. `mounts`: live ones; `requests_per_second`, after a
    `burst` that may come at once; `concurrent`: requests being served. A message has at most 64 KiB in any case."""

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
    #: Where metrics and health are told: a Unix socket, a port, or nowhere.
    metrics: Path | Loopback | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    limits: Limits = field(default_factory=Limits)
    #: The file this was read from, for messages; no key of it.
    source: bytes = _NO_FILE


def load(path: Path | None) -> Configuration:
    """Return the configuration in the file at `path`; without one, that of the default file if there is one.

    Raises ConfigurationError.
    """
    with open_file(path) as file:
        return read(file, path or DEFAULT_PATH) if file else Configuration()


@contextmanager
def open_file(path: Path | None) -> Iterator[BinaryIO | None]:
    """Open the file at `path`; without one the default file, None if there is none. Raises ConfigurationError."""
    if path is None and not DEFAULT_PATH.exists():
        yield None
        return
    try:
        file = (path or DEFAULT_PATH).open("rb")
    except OSError as error:
        raise ConfigurationError(f"{path or DEFAULT_PATH}: {error}") from None
    with file:
        yield file


def read(file: BinaryIO, path: Path, accounts: bool = True) -> Configuration:
    """Return the configuration in `file`, which is called `path` in messages.

    Whether the users and groups that it names exist is only looked up with `accounts`. Raises ConfigurationError.
    """
    try:
        table = tomllib.load(file)
        read: Configuration = _read_table(Configuration, table, "")
        for each in read.socket if accounts else ():
            _check_accounts(each)
    except (OSError, ValueError, ConfigurationError) as error:  # ValueError: no TOML, or not even UTF-8
        raise ConfigurationError(f"{path}: {error}") from None
    return dataclasses.replace(read, source=bytes(path))


def _read_table(kind: type[Any], table: dict[str, Any], prefix: str) -> Any:
    """Return an instance of the dataclass `kind` made of a TOML table; `prefix` is what stands before its keys."""
    types_of = typing.get_type_hints(kind)
    known = [each.name for each in dataclasses.fields(kind) if each.name != "source"]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, cutoff=0.0)
            raise ConfigurationError(f"unknown key '{prefix}{key}', did you mean '{prefix}{near[0]}'?")
    return kind(**{key: _read_value(types_of[key], key, value, prefix) for key, value in table.items()})


def _read_value(kind: Any, key: str, value: Any, prefix: str) -> Any:
    name = prefix + key
    if key == "mode":
        return _mode(name, value)
    if key == "metrics":
        return _metrics(name, value)
    if key == "mountpoint_filesystems":
        return tuple(_filesystem(name, each) for each in _typed(list, "a list", name, value))
    if key == "socket":
        tables = [_typed(dict, "a table", name, each) for each in _typed(list, "a list of tables", name, value)]
        if not tables:
            raise ConfigurationError(f"'{name}' is empty: nobody could connect")
        return tuple(_read_table(Socket, each, f"{name}.") for each in tables)
    if kind in (Deadlines, Limits):
        return _read_table(kind, _typed(dict, "a table", name, value), f"{name}.")
    if kind is Path:
        return _absolute_path(name, value)
    if kind is bool:
        return _typed(bool, "true or false", name, value)
    if kind is int:
        return _number(key, name, value)
    return _typed(str, "a string", name, value)


def _typed(kind: type, description: str, name: str, value: Any) -> Any:
    if type(value) is not kind:
        raise ConfigurationError(f"'{name}' must be {description}, not {value!r}")
    return value


#: The least value, where it is not 1; -1 of mount_max is "no limit", as in fuse.conf(5).
_LEAST = {
    "mount_max": -1,
    "dead_mounts_seconds": 0,
    "hung_seconds": 0,
    "mounts": 0,
    "requests_per_second": 0,
    "concurrent": 0,
}


def _number(key: str, name: str, value: Any) -> int:
    number: int = _typed(int, "a whole number", name, value)
    least = _LEAST.get(key, 1)
    if not least <= number <= 1_000_000:
        raise ConfigurationError(f"'{name}' must be between {least} and 1000000, not {number}")
    return number


def _mode(name: str, value: Any) -> int:
    text: str = _typed(str, 'octal digits in quotes, like "0666"', name, value)
    if not re.fullmatch("0?[0-7]{3}", text):
        raise ConfigurationError(f"""'{name}' must be octal digits like "0666", not {text!r}""")
    return int(text, 8)


def _filesystem(name: str, value: Any) -> int:
    """A name of `FILESYSTEMS`, or the f_type as a number."""
    if type(value) is int and value > 0:
        return value
    text: str = _typed(str, "a list of names or numbers", name, value)
    if text not in FILESYSTEMS:
        near = difflib.get_close_matches(text, FILESYSTEMS, 1, cutoff=0.0)[0]
        raise ConfigurationError(f"'{name}': unknown filesystem '{text}', did you mean '{near}'?")
    return FILESYSTEMS[text]


def _absolute_path(name: str, value: Any) -> Path:
    path = Path(_typed(str, "a path", name, value))
    if "\0" in str(path):
        raise ConfigurationError(f"'{name}' must be a path, which has no NUL byte")
    if not path.is_absolute():
        raise ConfigurationError(f"'{name}' must be an absolute path, not '{path}'")
    return path


def _metrics(name: str, value: Any) -> Path | Loopback | None:
    """An absolute path, a port on loopback, or nothing."""
    text: str = _typed(str, "a string", name, value)
    if not text:
        return None
    if text.startswith("/"):
        return _absolute_path(name, text)
    address = re.fullmatch(r"(127\.0\.0\.1|\[::1\]):([0-9]{1,5})", text)
    if not address:
        raise ConfigurationError(
            f'\'{name}\' must be an absolute path, "127.0.0.1:PORT" or "[::1]:PORT", not {text!r}: '
            "there is no password, so nobody but this machine may reach it"
        )
    port = int(address[2])
    if not 1 <= port <= 65535:
        raise ConfigurationError(f"'{name}': a port is between 1 and 65535, not {port}")
    return Loopback(address[1].strip("[]"), port)


def _check_accounts(socket: Socket) -> None:
    for key, kind, look_up in (("owner", "user", pwd.getpwnam), ("group", "group", grp.getgrnam)):
        name = getattr(socket, key)
        try:
            look_up(name)
        except KeyError:
            raise ConfigurationError(f"'socket.{key}': there is no {kind} '{name}'") from None
