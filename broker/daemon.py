"""``fusermount3-broker serve``: the life of the daemon, from its parts put together to their end.

The mounter is started before the event loop, the sockets come last, so that whoever can connect is served. SIGHUP
loads the configuration again; SIGTERM and SIGINT end the daemon when what was begun is finished. Mounts outlive it.
"""

import asyncio
import signal
import socket
import sqlite3
from pathlib import Path

from systemd import daemon

from broker import control, log, sockets
from broker.config import ConfigurationError, Socket, load
from broker.front import Front
from broker.operations import Mounter, MounterFailed
from broker.registry import Registry
from broker.server import Server
from broker.watch import Watch


class StartError(Exception):
    """The daemon can't start; the message says why."""


def serve(path: Path | None, socket_paths: tuple[Path, ...]) -> None:
    """Serve until a signal ends it. `path` is the configuration file, `socket_paths` replace the sockets in it.

    Raises StartError, ConfigurationError.
    """
    configuration = load(path)
    write_log = log.open_log()
    mounter = None
    listeners = None
    try:
        mounter = Mounter()
        registry = Registry(configuration.state_directory, mounter.fusectl)
        if registry.lost:
            write_log(log.ERROR, f"the table of mounts was damaged, a new one is begun: {registry.lost}")
        front = Front(configuration, mounter, registry, write_log)
        listening = sockets.inherited()
        if not listening:
            wanted = tuple(Socket(path=each) for each in socket_paths) or configuration.socket
            listeners = sockets.Listeners(wanted)
            listening = listeners.sockets
        asyncio.run(_run(front, path, listening))
    except (MounterFailed, sockets.SocketError, sqlite3.Error, OSError) as error:
        raise StartError(str(error)) from None
    finally:
        if listeners:
            listeners.close()
        if mounter:
            mounter.close()


async def _run(front: Front, path: Path | None, listening: list[socket.socket]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload, front, path)
    at = front.configuration.control_socket
    made = sockets.make_directory(at.parent)
    sockets.remove_stale(at, socket.SOCK_STREAM)
    try:
        async with await control.serve(at, front):
            names = ", ".join(each.getsockname() for each in listening)
            front.log(log.INFO, f"serving on {names}", live_mounts=len(front.registry))
            daemon.notify("READY=1")
            watching = asyncio.create_task(Watch(front).run())
            await Server(front).run(listening, stop)
            watching.cancel()
            daemon.notify("STOPPING=1")
    finally:
        at.unlink(missing_ok=True)
        for directory in reversed(made):
            sockets.remove_directory(directory)


def reload(front: Front, path: Path | None) -> None:
    """Put the configuration in the file into force; a file with a mistake leaves the old one.

    Sockets, `max_requests` and the state directory stay as they were when the daemon started.
    """
    daemon.notify("RELOADING=1")
    try:
        front.configuration = load(path)
        front.log(log.INFO, "configuration loaded again", configuration=front.configuration.source)
    except ConfigurationError as error:
        front.log(log.ERROR, f"configuration not loaded, the old one stays in force: {error}")
    daemon.notify("READY=1")
