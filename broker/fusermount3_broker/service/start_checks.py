"""What a configuration asks for that is no mistake in itself, but fails when the broker starts on this host.

Nothing is made or changed for that. A path is wrong if the broker could make no socket or directory there; a port, if
the broker could not listen on it. What only root may know is not known to others, and no mistake.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from fusermount3_broker.service import listening_sockets
from fusermount3_broker.service.configuration import Configuration, Loopback
from fusermount3_broker.service.toml_lines import Key

#: Where systemd looks for units (systemd.unit(5)).
_UNITS = tuple(
    map(Path, ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"))
)
_SERVICE = "fusermount3-broker.service"
#: Where that service may write.
_OF_THE_SERVICE = (Path("/run/fusermount3-broker"), Path("/var/lib/fusermount3-broker"))


def mistakes(configuration: Configuration) -> Iterator[tuple[Key, str]]:
    """Yield what would fail at the broker's start: the key, and why."""
    names: dict[str, str] = {}
    for key, path in _sockets(configuration):
        name = ".".join(part for part in key if isinstance(part, str))
        place = os.path.realpath(path)  # by a link, the same path has another spelling
        if place in names:
            yield key, f"'{name}' is the path of another socket, too, '{names[place]}': '{path}'"
        names[place] = name
        if problem := _problem(path.parent) or _obstacle(path, stat.S_ISSOCK, "a socket"):
            yield key, f"'{name}': {problem}"
    if problem := _problem(configuration.state_directory):
        yield ("state_directory",), f"'state_directory': {problem}"
    if isinstance(configuration.metrics, Loopback) and (problem := _problem_of_port(configuration.metrics)):
        yield ("metrics",), f"'metrics': {problem}"


def notes(configuration: Configuration) -> Iterator[str]:
    """Yield that a port is in use; and, if the systemd service is installed, what it can't do but others can, and which
    keys it doesn't use.
    """
    if isinstance(configuration.metrics, Loopback) and _errno_of_port(configuration.metrics)[0] == errno.EADDRINUSE:
        yield f"'metrics': port {configuration.metrics.port} is in use already; fine if it is this broker's"
    if not any(os.path.exists(directory / _SERVICE) for directory in _UNITS):
        return
    if isinstance(configuration.metrics, Loopback):
        yield (
            "'metrics': the systemd service has no network, so it can't start with a port; "
            "leave the key empty, and enable fusermount3-broker-metrics.socket"
        )
    if configuration.socket != Configuration().socket:
        yield (
            "'socket': callers of the systemd service connect where fusermount3-broker.socket listens, not where this "
            "file says; use systemctl edit fusermount3-broker.socket"
        )
    paths = [("control_socket", configuration.control_socket), ("state_directory", configuration.state_directory)]
    if isinstance(configuration.metrics, Path):
        paths.append(("metrics", configuration.metrics))
    writable = [each.resolve() for each in _OF_THE_SERVICE]
    for name, path in paths:
        if not any(Path(os.path.realpath(path)).is_relative_to(each) for each in writable):
            yield f"'{name}': the systemd service can write to '{path}' only if it is in its ReadWritePaths="


def _sockets(configuration: Configuration) -> Iterator[tuple[Key, Path]]:
    for index, each in enumerate(configuration.socket):
        yield ("socket", index, "path"), each.path
    yield ("control_socket",), configuration.control_socket
    if isinstance(configuration.metrics, Path):
        yield ("metrics",), configuration.metrics


def _problem(directory: Path) -> str:
    """Return why the broker can't make files in `directory`, nor make that; empty if it can."""
    nearest = next(each for each in (directory, *directory.parents) if os.path.lexists(each))
    if problem := _obstacle(nearest, stat.S_ISDIR, "a directory"):
        return problem
    # Of who is not root, nothing is known about root's rights.
    if os.geteuid() == 0 and not os.access(nearest, os.W_OK | os.X_OK):
        return f"the broker can't write to '{nearest}'"
    return ""


def _obstacle(path: Path, is_kind: Callable[[int], bool], kind: str) -> str:
    """Return why what is at `path` is in the way, if it is not of that kind; empty if nothing is there."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return f"'{path}' is a broken link" if path.is_symlink() else ""
    except OSError as error:
        return "" if _is_unknown(error.errno) else f"'{path}': {error.strerror}"
    return "" if is_kind(mode) else f"'{path}' is not {kind}"


def _problem_of_port(address: Loopback) -> str:
    """Return why the broker can't listen there; empty if it can, or if that is not known.

    A port in use may be that of the running broker. Who listens there is not asked: that could start a service.
    """
    number, text = _errno_of_port(address)
    return "" if number == errno.EADDRINUSE or _is_unknown(number) else text


def _errno_of_port(address: Loopback) -> tuple[int, str]:
    """Return the number and the text of the error with which this process can't listen there; 0 and "" if it can."""
    try:
        with listening_sockets.listening_for_metrics(address):
            return 0, ""
    except listening_sockets.SocketError as error:
        return error.errno, str(error)


def _is_unknown(number: int | None) -> bool:
    """Return whether an error is one of who is not root, and tells nothing of what root can do."""
    return number == errno.EACCES and os.geteuid() != 0
