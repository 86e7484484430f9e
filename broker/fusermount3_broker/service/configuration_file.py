"""The configuration file: TOML, checked completely before any of it takes effect.

All mistakes are told at once, each with its line. An unknown key is one, told with the nearest known key or with the
table to which it belongs.
"""

import dataclasses
import difflib
import errno
import grp
import io
import os
import pwd
import re
import stat
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fusermount3_broker.service import toml_lines
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


#: The most mistakes that are told at once.
MOST_MISTAKES = 20


class ConfigurationError(Exception):
    """The file cannot be used. Each argument is a mistake: file, line if it is known, key, and what is wrong."""

    def __str__(self) -> str:
        return "; ".join(self.args)


class _Mistake(Exception):
    """A value is wrong; the message says how."""


class _Mistakes(list[tuple[toml_lines.Key, str]]):
    """The mistakes in a file, each with the key where it is."""

    def add(self, key: toml_lines.Key, text: str) -> None:
        """Ignore another mistake of the same key, which only follows. Raises _Enough when enough are found."""
        if any(each == key for each, _ in self):
            return
        self.append((key, text))
        if len(self) == MOST_MISTAKES:
            raise _Enough


class _Enough(Exception):
    """So many mistakes were found that no others are looked for."""


#: Looks for more mistakes in a configuration, and yields each with its key.
Check = Callable[[Configuration], Iterable[tuple[toml_lines.Key, str]]]


def load(path: Path | None, check: Check | None = None) -> Configuration:
    """Return the configuration in the file at `path`; without one, that of the default file if it exists.

    Raises ConfigurationError with all mistakes, also those that `check` finds.
    """
    with open_file(path) as file:
        return read(file or io.BytesIO(), path or DEFAULT_PATH, check=check) if file or check else Configuration()


@contextmanager
def open_file(path: Path | None) -> Iterator[BinaryIO | None]:
    """Open the file at `path`; without one the default file, or None if there is none. Raises ConfigurationError."""
    is_default, path = path is None, path or DEFAULT_PATH
    try:
        file = os.fdopen(_open_regular_file(path), "rb")
    except OSError as error:
        if is_default and error.errno in (errno.ENOENT, errno.ENOTDIR):
            yield None
            return
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # a path with a NUL byte
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


def read(file: BinaryIO, path: Path, accounts: bool = True, check: Check | None = None) -> Configuration:
    """Return the configuration in `file`, which messages call `path`.

    Look up whether its users and groups exist only with `accounts`. Raises ConfigurationError with all mistakes, also
    those that `check` finds.
    """
    mistakes = _Mistakes()
    configuration = Configuration()
    try:
        text = _text(file)
        table = tomllib.loads(text)
        with suppress(_Enough):
            configuration = _read_table(Configuration, table, (), mistakes)
            _check_socket_paths(configuration, mistakes)
            for index, each in enumerate(configuration.socket if accounts else ()):
                _check_accounts(each, index, mistakes)
            for where, told in check(configuration) if check else ():
                mistakes.add(where, told)
        told_all = _told(path, text, mistakes)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # invalid TOML or UTF-8
        raise ConfigurationError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: lists or tables are nested too deeply") from None
    if told_all:
        raise ConfigurationError(*told_all)
    return dataclasses.replace(configuration, source=bytes(path))


def _told(path: Path, text: str, mistakes: _Mistakes) -> list[str]:
    """Return the mistakes in the order of their lines, each with file and line."""
    if not mistakes:
        return []
    lines = toml_lines.of_keys(text)
    found = sorted((lines.get(key) or lines.get(key[:1], 0), told) for key, told in mistakes)
    return [f"{path}:{line}: {told}" if line else f"{path}: {told}" for line, told in found]


def _text(file: BinaryIO) -> str:
    """Return the content of the file. Raises OSError, ValueError."""
    content = file.read(LONGEST_FILE + 1)
    if len(content) > LONGEST_FILE:
        raise ValueError(f"the file has more than {LONGEST_FILE} bytes")
    if max(map(len, content.split(b"\n"))) > LONGEST_LINE:
        raise ValueError(f"a line has more than {LONGEST_LINE} bytes")
    return content.decode()


def _read_table(kind: type[Any], table: dict[str, Any], where: toml_lines.Key, mistakes: _Mistakes) -> Any:
    """Return an instance of the dataclass `kind` made of a TOML table, which is at the key `where`.

    What is wrong goes into `mistakes`, and has its default. Raises _Enough.
    """
    types_of = typing.get_type_hints(kind)
    values = {}
    for key, value in table.items():
        at = (*where, key)
        try:
            if key not in _keys_of(kind):
                raise _Mistake(_unknown(kind, key, _name(where)))
            values[key] = _read_value(types_of[key], at, value, mistakes)
        except _Mistake as mistake:
            mistakes.add(at, str(mistake))
    return kind(**values)


def _keys_of(kind: type[Any]) -> list[str]:
    return [each.name for each in dataclasses.fields(kind) if each.name != "source"]


def _name(where: toml_lines.Key) -> str:
    """Return a key as messages name it: without the indexes of lists."""
    return ".".join(part for part in where if isinstance(part, str))


#: The tables, with the headers below which their keys are.
_TABLES: dict[str, tuple[type[Any], str]] = {
    "deadlines": (Deadlines, "[deadlines]"),
    "limits": (Limits, "[limits]"),
    "socket": (Socket, "[[socket]]"),
}


def _unknown(kind: type[Any], key: str, table: str) -> str:
    """Return what is wrong with a key that is not one of `table`: it belongs elsewhere, or is mistyped."""
    name = f"{table}.{key}" if table else key
    if table and key in _keys_of(Configuration):
        return f"unknown key '{name}': '{key}' belongs above the first line in brackets, such as {_TABLES[table][1]}"
    for other, header in _TABLES.values():
        if key in _keys_of(other):
            return f"unknown key '{name}': '{key}' belongs below a line {header}"
    near = difflib.get_close_matches(key, _keys_of(kind), 1, cutoff=0.0)[0]
    return f"unknown key '{name}', did you mean '{f'{table}.{near}' if table else near}'?"


def _read_value(kind: Any, where: toml_lines.Key, value: Any, mistakes: _Mistakes) -> Any:
    """Return the value of the key at `where`. Raises _Mistake, _Enough."""
    name, key = _name(where), where[-1]
    if key == "mode":
        return _mode(name, value)
    if key == "metrics":
        return _metrics(name, value)
    if key == "log_format":
        return _log_format(name, value)
    if key == "mountpoint_filesystems":
        return tuple(_filesystem(name, each) for each in _typed(list, "a list", name, value))
    if key == "socket":
        return _sockets(where, _typed(list, "a list of tables", name, value), mistakes)
    if kind in (Deadlines, Limits):
        return _read_table(kind, _typed(dict, "a table", name, value), where, mistakes)
    if kind is Path:
        return _absolute_path(name, value)
    if kind is bool:
        return _typed(bool, "true or false", name, value)
    if kind is int:
        return _number(str(key), name, value)
    return _string(name, value)


def _sockets(where: toml_lines.Key, tables: list[Any], mistakes: _Mistakes) -> tuple[Socket, ...]:
    if not tables:
        raise _Mistake(f"'{_name(where)}' is empty: nobody could connect")
    return tuple(
        _read_table(Socket, _typed(dict, "a table", _name(where), table), (*where, index), mistakes)
        for index, table in enumerate(tables)
    )


def _string(name: str, value: Any) -> str:
    text: str = _typed(str, "a string", name, value)
    if "\0" in text:
        raise _Mistake(f"'{name}' must be a string without NUL bytes")
    return text


def _typed(kind: type, description: str, name: str, value: Any) -> Any:
    if type(value) is not kind:
        raise _Mistake(f"'{name}' must be {description}, not {value!r}")
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
        raise _Mistake(f"'{name}' must be between {least} and 1000000, not {number}")
    return number


def _mode(name: str, value: Any) -> int:
    text: str = _typed(str, 'octal digits in quotes, like "0666"', name, value)
    if not re.fullmatch("0?[0-7]{3}", text):
        raise _Mistake(f"""'{name}' must be octal digits like "0666", not {text!r}""")
    return int(text, 8)


def _filesystem(name: str, value: Any) -> int:
    """Return the f_type for a name of `FILESYSTEMS`, or a number as it is."""
    if type(value) is int and value > 0:
        return value
    text: str = _typed(str, "a list of names or numbers", name, value)
    if text not in FILESYSTEMS:
        near = difflib.get_close_matches(text, FILESYSTEMS, 1, cutoff=0.0)[0]
        raise _Mistake(f"'{name}': unknown filesystem '{text}', did you mean '{near}'?")
    return FILESYSTEMS[text]


def _absolute_path(name: str, value: Any) -> Path:
    path = Path(_typed(str, "a path", name, value))
    if "\0" in str(path):
        raise _Mistake(f"'{name}' must be a path, which has no NUL byte")
    if not path.is_absolute():
        raise _Mistake(f"'{name}' must be an absolute path, not '{path}'")
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
        raise _Mistake(
            f'\'{name}\' must be an absolute path, "127.0.0.1:PORT" or "[::1]:PORT", not {text!r}: '
            "the endpoint asks for no password, so it must stay on this machine"
        )
    port = int(address[2])
    if not 1 <= port <= 65535:
        raise _Mistake(f"'{name}': a port is between 1 and 65535, not {port}")
    return Loopback(address[1].strip("[]"), port)


def _log_format(name: str, value: Any) -> str:
    text: str = _typed(str, "a string", name, value)
    if text not in LOG_FORMATS:
        raise _Mistake(f'\'{name}\' must be "auto", "text" or "json", not {text!r}')
    return text


def _check_socket_paths(configuration: Configuration, mistakes: _Mistakes) -> None:
    """Check that each socket has a distinct path, short enough for a socket. Raises _Enough."""
    paths: list[tuple[toml_lines.Key, Path]] = [
        (("socket", index, "path"), each.path) for index, each in enumerate(configuration.socket)
    ]
    paths.append((("control_socket",), configuration.control_socket))
    if isinstance(configuration.metrics, Path):
        paths.append((("metrics",), configuration.metrics))
    seen: dict[str, str] = {}
    for where, path in paths:
        name = _name(where)
        if (length := len(os.fsencode(path))) > LONGEST_SOCKET_PATH:
            most = f"a socket's path has at most {LONGEST_SOCKET_PATH} bytes"
            mistakes.add(where, f"'{name}': {most}, not {length}: '{path}'")
        normal = os.path.normpath(path).replace("//", "/")  # POSIX lets "//" at the beginning mean something else
        if normal in seen:
            mistakes.add(where, f"'{name}' is the path of another socket, too, '{seen[normal]}': '{path}'")
        seen[normal] = name


def _check_accounts(socket: Socket, index: int, mistakes: _Mistakes) -> None:
    """Check that the owner and the group of the socket exist. Raises _Enough."""
    for key, kind, look_up in (("owner", "user", pwd.getpwnam), ("group", "group", grp.getgrnam)):
        name = getattr(socket, key)
        try:
            look_up(name)
        except KeyError:
            mistakes.add(("socket", index, key), f"'socket.{key}': there is no {kind} '{name}'")
