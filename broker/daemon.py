"""The front's process, from the moment that the supervisor starts it: its parts are put together, and serve.

It gives up all privilege before it hears from anybody. It ends when the supervisor hangs up or is gone, after what was
begun; signals are the supervisor's business.
"""

import asyncio
import os
import signal
import socket
import sqlite3
import sys
from pathlib import Path

from broker import config, control, log, orders, sandbox
from broker.config import Configuration, ConfigurationError
from broker.front import Front
from broker.operations import Mounter
from broker.orphans import expect
from broker.registry import Registry
from broker.server import Server
from broker.watch import Watch
from fusermount3_proxy import wire

#: More descriptors than an order comes with.
_MOST_DESCRIPTORS = 253


def main(supervisor: socket.socket) -> None:
    """Serve until `supervisor`, who says how, hangs up."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        front, inherited = _begin(supervisor)
    except (OSError, sqlite3.Error, ConfigurationError) as error:
        supervisor.send(orders.dump(orders.Failed(str(error).encode())))
        return
    asyncio.run(_run(front, supervisor, *inherited))


def _begin(supervisor: socket.socket) -> tuple[Front, list[socket.socket]]:
    """Return the front, and the sockets for orphans, for administrators, and for callers.

    Raises OSError, sqlite3.Error.
    """
    begin, (mounter, orphans, fusectl, proc, *listening) = _receive(supervisor)
    assert isinstance(begin, orders.Begin)
    state_directory = Path(os.fsdecode(begin.state_directory))
    configuration = _configuration(*_receive(supervisor))
    write_log = log.open_log()
    missing = sandbox.enter(state_directory, proc)
    registry = Registry(state_directory, fusectl)
    if missing:
        write_log(log.WARNING, f"the front is confined less than it could be, for want of: {missing}")
    if registry.lost:
        write_log(log.ERROR, f"the table of mounts was damaged, a new one is begun: {registry.lost}")
    front = Front(configuration, Mounter(socket.socket(fileno=mounter)), registry, write_log, proc)
    return front, [socket.socket(fileno=each) for each in (orphans, *listening)]


def _receive(supervisor: socket.socket) -> tuple[orders.Order, list[int]]:
    """Return the next order, and what came with it. Raises OSError, ProtocolError."""
    data, descriptors, flags, _ = socket.recv_fds(supervisor, wire.MAX_MESSAGE, _MOST_DESCRIPTORS)
    wire.check_whole(flags)
    return orders.load(data), descriptors


def _configuration(order: orders.Order, descriptors: list[int]) -> Configuration:
    """Return the configuration that an order brings. Raises ConfigurationError."""
    assert isinstance(order, orders.Configuration)
    if not descriptors:
        return Configuration()
    with open(descriptors[0], "rb") as file:
        return config.read(file, Path(os.fsdecode(order.path)), accounts=False)


async def _run(
    front: Front,
    supervisor: socket.socket,
    orphans: socket.socket,
    control_socket: socket.socket,
    *listening: socket.socket,
) -> None:
    stop = asyncio.Event()
    supervisor.setblocking(False)
    asyncio.get_running_loop().add_reader(supervisor, _obey, supervisor, front, stop)
    expect(front, orphans)
    async with await control.serve(control_socket, front):
        names = ", ".join(each.getsockname() for each in listening)
        front.log(log.INFO, f"serving on {names}", live_mounts=len(front.registry))
        supervisor.send(orders.dump(orders.Ready()))
        watching = asyncio.create_task(Watch(front).run())
        await Server(front).run(listening, stop)
        watching.cancel()


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
    else:
        front.configuration = _configuration(order, descriptors)
        front.log(log.INFO, "configuration loaded again", configuration=front.configuration.source)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
