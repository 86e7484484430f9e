"""The front's process, from the moment that the supervisor starts it: its parts are put together, and serve.

It gives up all privilege before it hears from anybody. It ends when the supervisor hangs up, after what was begun; if
the supervisor is killed, without what takes long: the next broker is not to wait for it. Signals are the supervisor's
business.
"""

import asyncio
import os
import resource
import signal
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import NamedTuple, NoReturn

from broker import config, control, log, orders, sandbox, syscalls
from broker.config import Configuration, ConfigurationError
from broker.csi.desk import Desk
from broker.endpoint import Endpoint
from broker.front import Front
from broker.health import Health
from broker.limits import Accounts
from broker.log import Log
from broker.operations import Mounter
from broker.orphans import expect
from broker.publications import Publications
from broker.recognition import recognize
from broker.registry import Registry
from broker.server import Server
from broker.volume_call import OldCall, VolumeCall
from broker.volumes import Volumes
from broker.watch import Watch
from fusermount3_proxy import wire

#: Seconds for which the front outlives a supervisor that was killed; the next one waits for longer (`sockets`).
_LAST_SECONDS = 1.5


def main(supervisor: socket.socket) -> None:
    """Serve until `supervisor`, who says how, hangs up."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    parent = os.pidfd_open(os.getppid())
    try:
        front, sockets = _begin(supervisor)
    except (OSError, sqlite3.Error, ConfigurationError) as error:
        supervisor.send(orders.dump(orders.Failed(str(error).encode())))
        return
    asyncio.run(_run(front, supervisor, parent, sockets))


class _Sockets(NamedTuple):
    """The sockets on which others come: administrators, perhaps who wants metrics and kubelet, and callers."""

    control: socket.socket
    metrics: socket.socket | None
    plugin: socket.socket | None
    callers: list[socket.socket]


def _begin(supervisor: socket.socket) -> tuple[Front, _Sockets]:
    """Return the front and its sockets. Raises OSError, sqlite3.Error."""
    begin, (mounter, orphans, fusectl, proc, *listening) = _receive(supervisor)
    assert isinstance(begin, orders.Begin)
    state_directory = Path(os.fsdecode(begin.state_directory))
    configuration = _configuration(*_receive(supervisor))
    write_log = log.open_log()
    descriptors = _raise_descriptor_limit()
    missing = sandbox.enter(state_directory, proc)
    registry = Registry(state_directory, fusectl)
    if missing:
        write_log(log.WARNING, f"the front is confined less than it could be, for want of: {missing}")
    if registry.lost:
        write_log(log.ERROR, f"the table of mounts was damaged, a new one is begun: {registry.lost}")
    ends = [socket.socket(fileno=each) for each in (mounter, orphans)]
    front = Front(configuration, Mounter(*ends), registry, write_log, proc)
    control_socket, *callers = [socket.socket(fileno=each) for each in listening]
    metrics = callers.pop(0) if begin.metrics else None
    plugin = callers.pop(0) if begin.volumes else None
    if begin.volumes:
        front.volumes = _open_volumes(state_directory, write_log)
    _limit_connections(front, descriptors)
    return front, _Sockets(control_socket, metrics, plugin, callers)


def _open_volumes(state_directory: Path, write_log: Log) -> Volumes:
    """Raises OSError, sqlite3.Error."""
    volumes = Volumes(state_directory)
    if volumes.lost:
        write_log(log.ERROR, f"the table of volumes was damaged, a new one is begun: {volumes.lost}")
    return volumes


#: What a connection takes: itself, who it is, what its child says, and as much again for its end.
_DESCRIPTORS_EACH = 4
#: What the front itself takes, with room; and where there are volumes, each of which has a socket or two.
_DESCRIPTORS_OWN = 100
_DESCRIPTORS_OF_VOLUMES = 500


def _raise_descriptor_limit() -> int:
    """Have as many descriptors as the kernel allows; return how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def _limit_connections(front: Front, descriptors: int) -> None:
    """Have no more connections than there are descriptors for."""
    own = _DESCRIPTORS_OWN + (0 if front.volumes is None else _DESCRIPTORS_OF_VOLUMES)
    connections = max(1, (descriptors - own) // _DESCRIPTORS_EACH)
    if connections < front.configuration.max_connections:
        front.log(log.WARNING, f"no more than {connections} connections: there are only {descriptors} descriptors")
        front.accounts = Accounts(connections)


def _receive(supervisor: socket.socket) -> tuple[orders.Order, list[int]]:
    """Return the next order, and what came with it. Raises OSError, ProtocolError."""
    data, descriptors, flags, _ = socket.recv_fds(supervisor, wire.MAX_MESSAGE, syscalls.SCM_MAX_FD)
    wire.check_whole(flags)
    return orders.load(data), descriptors


def _configuration(order: orders.Order, descriptors: list[int]) -> Configuration:
    """Return the configuration that an order brings. Raises ConfigurationError."""
    assert isinstance(order, orders.Configuration)
    if not descriptors:
        return Configuration()
    with open(descriptors[0], "rb") as file:
        return config.read(file, Path(os.fsdecode(order.path)), accounts=False)


async def _run(front: Front, supervisor: socket.socket, parent: int, sockets: _Sockets) -> None:
    """Serve until the supervisor hangs up, whose pidfd is `parent`."""
    stop = asyncio.Event()
    supervisor.setblocking(False)
    asyncio.get_running_loop().add_reader(supervisor, _obey, supervisor, front, stop)
    asyncio.get_running_loop().add_reader(parent, _end_soon, front, parent)
    await recognize(front)
    expect(front)
    with closing(Health(front.mounter, stop)) as health:
        async with await control.serve(sockets.control, front, health):
            names = ", ".join(each.getsockname() for each in sockets.callers)
            front.log(log.INFO, f"serving on {names}", live_mounts=len(front.registry))
            supervisor.send(orders.dump(orders.Ready()))
            watching = asyncio.create_task(Watch(front).run())
            server = Server(front)
            async with _watched(front, health, sockets.metrics), _published(front, health, server, sockets.plugin):
                await server.run(sockets.callers, stop)
            watching.cancel()


@asynccontextmanager
async def _watched(front: Front, health: Health, listener: socket.socket | None) -> AsyncIterator[None]:
    """Tell metrics and health on `listener`, if there is one, for as long as the block runs."""
    if listener is None:
        yield
        return
    serving = asyncio.create_task(Endpoint(front, health).serve(listener))
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.wait([serving])


@asynccontextmanager
async def _published(front: Front, health: Health, server: Server, plugin: socket.socket | None) -> AsyncIterator[None]:
    """Serve volumes, and the plugin that asks for them, if there is one, for as long as the block runs."""
    if plugin is None or front.volumes is None:
        yield
        return
    publications = Publications(front, front.volumes, server, VolumeCall, OldCall)
    desk = Desk(front, publications, health, plugin)
    working = [asyncio.create_task(publications.restore()), asyncio.create_task(desk.run())]
    try:
        yield
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await desk.end(2 * front.configuration.deadlines.operation)
        publications.close()


def _obey(supervisor: socket.socket, front: Front, stop: asyncio.Event) -> None:
    """Do what the supervisor says; stop when it hangs up."""
    try:
        order, descriptors = _receive(supervisor)
    except (OSError, wire.ProtocolError):  # the end is an empty record, which is no order
        asyncio.get_running_loop().remove_reader(supervisor)
        stop.set()
        return
    if isinstance(order, orders.MounterStarted):
        front.mounter.pid, front.mounter.restarts = order
    elif isinstance(order, orders.PluginStarted):
        front.plugin = order
    else:
        front.configuration = _configuration(order, descriptors)
        front.log(log.INFO, "configuration loaded again", configuration=front.configuration.source)


def _end_soon(front: Front, parent: int) -> None:
    """Give what was begun, which the next broker has to find in the tables, a moment to end."""
    loop = asyncio.get_running_loop()
    loop.remove_reader(parent)
    loop.call_later(_LAST_SECONDS, _end, front)


def _end(front: Front) -> NoReturn:
    """Do as if this had been killed: children of the mounter end their calls by themselves (`orphans`)."""
    front.log(log.ERROR, "the supervisor has ended, and the front ends with it")
    os._exit(1)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
