"""What a configuration asks for that is no mistake in itself, but fails when the broker starts on this host.

Nothing is made or changed for that. A path is wrong if the broker could make no socket or directory there; a port, if
another program than a broker listens on it.
"""

import errno
import http.client
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
#: A metric that every broker has; seconds for its answer; and the most bytes that are looked through.
_METRIC, _PATIENCE, _MOST = b"fusermount3_broker_build_info", 2.0, 1 << 20


def mistakes(configuration: Configuration) -> Iterator[tuple[Key, str]]:
    """Yield what would fail at the broker's start: the key, and why."""
    for key, path in _sockets(configuration):
        name = ".".join(part for part in key if isinstance(part, str))
        if problem := _problem(path.parent) or _obstacle(path, stat.S_ISSOCK, "a socket"):
            yield key, f"'{name}': {problem}"
    if problem := _problem(configuration.state_directory):
        yield ("state_directory",), f"'state_directory': {problem}"
    if isinstance(configuration.metrics, Loopback) and (problem := _problem_of_port(configuration.metrics)):
        yield ("metrics",), f"'metrics': {problem}"


def notes(configuration: Configuration) -> Iterator[str]:
    """Yield what the systemd service can't do that a broker outside of it can, if the service is installed."""
    if not any((directory / _SERVICE).exists() for directory in _UNITS):
        return
    if isinstance(configuration.metrics, Loopback):
        yield (
            "'metrics': the systemd service has no network, so it can't start with a port; "
            "leave the key empty, and enable fusermount3-broker-metrics.socket"
        )
    for name, path in (
        ("control_socket", configuration.control_socket),
        ("state_directory", configuration.state_directory),
    ):
        if not any(path.is_relative_to(each) for each in _OF_THE_SERVICE):
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
        return f"'{path}': {error.strerror}"
    return "" if is_kind(mode) else f"'{path}' is not {kind}"


def _problem_of_port(address: Loopback) -> str:
    """Return why the broker can't listen there; empty if it can, or if a broker does so now."""
    try:
        with listening_sockets.listening_for_metrics(address):
            return ""
    except listening_sockets.SocketError as error:
        return "" if error.errno == errno.EADDRINUSE and _is_a_brokers(address) else str(error)


def _is_a_brokers(address: Loopback) -> bool:
    """Return whether the HTTP server there is a broker's."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=_PATIENCE)
    try:
        connection.request("GET", "/metrics")
        return _METRIC in connection.getresponse().read(_MOST)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
