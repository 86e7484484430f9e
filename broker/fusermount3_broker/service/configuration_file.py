"""The configuration file: TOML, checked completely before any of it takes effect.

An unknown key is an error, which names it and the nearest known one.
"""

import dataclasses
import difflib
import errno
import grp
import os
import pwd
import re
import stat
import tomllib
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fusermount3_broker.service.configuration import (
    FILESYSTEMS,
    LOG_FORMATS,
    Configuration,
    Deadlines,
    Limits,
    Loopback,
    Socket,
)

DEFAULT_PATH = Path("/etc/fusermount3-broker.toml")

#: The most bytes of a configuration file, and of a line in it: the memory and time for a key of N parts grow as N
#: squared.
LONGEST_FILE, LONGEST_LINE = 65536, 4096
#: The most bytes in the path of a Unix socket (unix(7), sun_path), without the trailing NUL.
LONGEST_SOCKET_PATH = 107


class ConfigurationError(Exception):
    """The file cannot be used. The message names the file and the key."""


def load(path: Path | None) -> Configuration:
    """Return the configuration in the file at `path`; without one, that of the default file if it exists.

    Raises ConfigurationError.
    """
    with open_file(path) as file:
        return read(file, path or DEFAULT_PATH) if file else Configuration()


@contextmanager
def open_file(path: Path | None) -> Iterator[BinaryIO | None]:
    """Open the file at `path`; without one the default file, or None if there is none. Raises ConfigurationError."""
    if path is None and not DEFAULT_PATH.exists():
        yield None
        return
    path = path or DEFAULT_PATH
    try:
        file = os.fdopen(_open_regular_file(path), "rb")
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL byte
        raise ConfigurationError(f"{path}: {error}") from None
    with file:
        yield file


def _open_regular_file(path: Path) -> int:
    """Open the file. Raises OSError, and ValueError if the path is a FIFO or a device: opening or reading one may block
    for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise ValueError("not a regular file")


def read(file: BinaryIO, path: Path, accounts: bool = True) -> Configuration:
    """Return the configuration in `file`, which messages call `path`.

    Look up whether its users and groups exist only with `accounts`. Raises ConfigurationError.
    """
    try:
        table = tomllib.loads(_text(file))
        read: Configuration = _read_table(Configuration, table, "")
        _check_socket_paths(read)
        for each in read.socket if accounts else ():
            _check_accounts(each)
    except (OSError, ValueError, ConfigurationError) as error:  # ValueError: invalid TOML or UTF-8
        raise ConfigurationError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: lists or tables are nested too deeply") from None
    return dataclasses.replace(read, source=bytes(path))


def _text(file: BinaryIO) -> str:
    """Return the content of the file. Raises OSError, ValueError."""
    content = file.read(LONGEST_FILE + 1)
    if len(content) > LONGEST_FILE:
        raise ValueError(f"the file has more than {LONGEST_FILE} bytes")
    if max(map(len, content.split(b"\n"))) > LONGEST_LINE:
        raise ValueError(f"a line has more than {LONGEST_LINE} bytes")
    return content.decode()


def _read_table(kind: type[Any], table: dict[str, Any], prefix: str) -> Any:
    """Return an instance of the dataclass `kind` made of a TOML table; `prefix` precedes its keys in messages."""
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
    if key == "log_format":
        return _log_format(name, value)
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
    return _string(name, value)


def _string(name: str, value: Any) -> str:
    text: str = _typed(str, "a string", name, value)
    if "\0" in text:
        raise ConfigurationError(f"'{name}' must be a string without NUL bytes")
    return text


def _typed(kind: type, description: str, name: str, value: Any) -> Any:
    if type(value) is not kind:
        raise ConfigurationError(f"'{name}' must be {description}, not {value!r}")
    return value


#: The minimum, where it is not 1; -1 of mount_max is "no limit", as in fuse.conf(5).
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
    """Return the f_type for a name of `FILESYSTEMS`, or a number as it is."""
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
    """Return an absolute path, a port on loopback, or None."""
    text: str = _typed(str, "a string", name, value)
    if not text:
        return None
    if text.startswith("/"):
        return _absolute_path(name, text)
    address = re.fullmatch(r"(127\.0\.0\.1|\[::1\]):([0-9]{1,5})", text)
    if not address:
        raise ConfigurationError(
            f'\'{name}\' must be an absolute path, "127.0.0.1:PORT" or "[::1]:PORT", not {text!r}: '
            "the endpoint asks for no password, so it must stay on this machine"
        )
    port = int(address[2])
    if not 1 <= port <= 65535:
        raise ConfigurationError(f"'{name}': a port is between 1 and 65535, not {port}")
    return Loopback(address[1].strip("[]"), port)


def _log_format(name: str, value: Any) -> str:
    text: str = _typed(str, "a string", name, value)
    if text not in LOG_FORMATS:
        raise ConfigurationError(f'\'{name}\' must be "auto", "text" or "json", not {text!r}')
    return text


def _check_socket_paths(configuration: Configuration) -> None:
    """Raise ConfigurationError unless each socket has a distinct path, short enough for a socket."""
    paths = [("socket.path", each.path) for each in configuration.socket]
    paths.append(("control_socket", configuration.control_socket))
    if isinstance(configuration.metrics, Path):
        paths.append(("metrics", configuration.metrics))
    seen: dict[str, str] = {}
    for name, path in paths:
        if (length := len(os.fsencode(path))) > LONGEST_SOCKET_PATH:
            raise ConfigurationError(
                f"'{name}': a socket's path has at most {LONGEST_SOCKET_PATH} bytes, not {length}: '{path}'"
            )
        normal = os.path.normpath(path)
        if normal in seen:
            raise ConfigurationError(f"'{name}' is the path of another socket, too, '{seen[normal]}': '{path}'")
        seen[normal] = name


def _check_accounts(socket: Socket) -> None:
    for key, kind, look_up in (("owner", "user", pwd.getpwnam), ("group", "group", grp.getgrnam)):
        name = getattr(socket, key)
        try:
            look_up(name)
        except KeyError:
            raise ConfigurationError(f"'socket.{key}': there is no {kind} '{name}'") from None
