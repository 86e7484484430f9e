"""The front's process: assembles the parts of the front and serves, from its start by the supervisor.

It gives up all privileges before it reads from any socket but the supervisor's. When the supervisor hangs up, it
finishes the operations under way and ends. If the supervisor is killed, it does not wait for long operations, so that
the next broker need not wait for it. The supervisor handles signals.
"""

import asyncio
import math
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import NamedTuple, NoReturn

from fusermount3_broker.front import control_socket
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.csi_requests import RequestHandler
from fusermount3_broker.front.decisions import subordinate_ids
from fusermount3_broker.front.decisions.limits import LEFT, Accounts
from fusermount3_broker.front.decisions.subordinate_ids import Subordinates
from fusermount3_broker.front.deferred_writes import DeferredWrites
from fusermount3_broker.front.health import Health
from fusermount3_broker.front.http_endpoint import Endpoint
from fusermount3_broker.front.mount_watch import Watch
from fusermount3_broker.front.mounter_client import Mounter
from fusermount3_broker.front.published_volumes import Publications
from fusermount3_broker.front.restore import recognize
from fusermount3_broker.front.server import Server
from fusermount3_broker.front.tables.database import TableUnreadable
from fusermount3_broker.front.tables.mount_table import Registry
from fusermount3_broker.front.tables.volume_table import Volumes
from fusermount3_broker.front.volume_call import OldCall, VolumeCall
from fusermount3_broker.kernel import error_texts, features, syscalls
from fusermount3_broker.messages import supervisor as orders
from fusermount3_broker.service import configuration_file, log, sandbox
from fusermount3_broker.service.channel import HungUp
from fusermount3_broker.service.configuration import Configuration, Loopback
from fusermount3_broker.service.configuration_file import ConfigurationError
from fusermount3_broker.service.state_directory import lock_beside_supervisor
from fusermount3_proxy import wire

#: Seconds for which the front outlives a killed supervisor; the next supervisor waits for longer (`state_directory`).
_LAST_SECONDS = 1.5


def main(supervisor: socket.socket) -> None:
    """Serve as `supervisor` orders, until it hangs up."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    parent = os.pidfd_open(os.getppid())
    try:
        front, sockets = _begin(supervisor)
    except (OSError, TableUnreadable, ConfigurationError) as error:
        supervisor.send(orders.dump(orders.Failed(error_texts.of(error).encode())))
        return
    except HungUp:  # something else can't start, or the supervisor has been killed
        return
    asyncio.run(_run(front, supervisor, parent, sockets))


class _Sockets(NamedTuple):
    """The sockets for administrators and callers, and perhaps those for metrics and for the CSI plugin."""

    control: socket.socket
    metrics: socket.socket | None
    plugin: socket.socket | None
    callers: list[socket.socket]

    def addresses(self) -> dict[str, list[str]]:
        """Return the addresses of those that have one, by who connects there."""
        metrics = [self.metrics] if self.metrics else []
        groups = {"callers": self.callers, "administrators": [self.control], "metrics": metrics}
        return {whose: list(map(_address, group)) for whose, group in groups.items() if group}


def _address(listener: socket.socket) -> str:
    """Return the path, with "@" before an abstract one, or the port of a listening socket."""
    name = listener.getsockname()
    return str(Loopback(*name[:2])) if isinstance(name, tuple) else os.fsdecode(name).replace("\0", "@")


def _begin(supervisor: socket.socket) -> tuple[Front, _Sockets]:
    """Return the front and its sockets. Raises HungUp, OSError, ProtocolError, TableUnreadable, ConfigurationError."""
    begin, (mounter, own, plain, fusectl, proc, *listening) = _receive(supervisor)
    assert isinstance(begin, orders.Begin)
    state_directory = Path(os.fsdecode(begin.state_directory))
    configuration = _configuration(*_receive(supervisor))
    owners = _subordinates(*_receive(supervisor))
    write_log = log.open_log(begin.log_format.decode())
    descriptors = _raise_descriptor_limit()
    lacking = features.lacking()
    missing = sandbox.enter(state_directory, proc)
    lock_beside_supervisor(state_directory)
    if _has_hung_up(supervisor):  # before this front had the lock, so another broker may have the directory by now
        raise HungUp
    registry = Registry(state_directory, fusectl)
    if missing:
        write_log(log.WARNING, f"the sandbox of the front is incomplete; missing: {missing}")
    for each in lacking:
        write_log(log.NOTICE, f"{features.running()} offers no {each.name} (since {each.since}): {each.otherwise}")
    # Under systemd, whose releases may not know the call either, fusectl is kept (`listening_sockets.keep_fusectl`).
    if withheld := "" if begin.keeps_fusectl else features.withheld(lacking):
        write_log(log.WARNING, withheld)
    ends = [socket.socket(fileno=each) for each in (mounter, own, plain)]
    front = Front(configuration, Mounter(*ends), registry, write_log, proc, owners, lacking, withheld=withheld)
    control, *callers = [socket.socket(fileno=each) for each in listening]
    metrics = callers.pop(0) if begin.metrics else None
    plugin = callers.pop(0) if begin.volumes else None
    if begin.volumes:
        front.volumes = Volumes(state_directory)
        front.mount_namespaces = frozenset(filter(None, begin.mount_namespaces.split(b",")))
    _limit_connections(front, descriptors)
    return front, _Sockets(control, metrics, plugin, callers)


def _has_hung_up(supervisor: socket.socket) -> bool:
    """Return whether the supervisor has hung up, even if orders that it sent before are still unread."""
    waiting = select.poll()
    waiting.register(supervisor, 0)  # a hang-up is always reported (poll(2))
    return bool(waiting.poll(0))


#: Descriptors per caller: its connection, its pidfd, the conversation with its child, and another one for its end.
_DESCRIPTORS_EACH = 4
#: Pidfds of FUSE programs, one for each program, may take one in so many of all descriptors.
_SHARE_OF_PROGRAMS = 4
#: Descriptors of the front itself, with a reserve; and those of volumes, each of which has one or two sockets.
_DESCRIPTORS_OWN = 100
_DESCRIPTORS_OF_VOLUMES = 500


def _raise_descriptor_limit() -> int:
    """Raise the limit of descriptors to the most that the kernel allows; return that number."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def _limit_connections(front: Front, descriptors: int) -> None:
    """Limit the number of callers' connections to the descriptors available."""
    own = _DESCRIPTORS_OWN + (0 if front.volumes is None else _DESCRIPTORS_OF_VOLUMES)
    front.serving.most_pidfds = descriptors // _SHARE_OF_PROGRAMS
    connections = max(1, (descriptors - own - front.serving.most_pidfds) // _DESCRIPTORS_EACH)
    wanted = front.configuration.max_connections
    if connections < wanted:
        enough = math.ceil((wanted * _DESCRIPTORS_EACH + own) / (1 - 1 / _SHARE_OF_PROGRAMS))
        front.log(
            log.WARNING,
            f"no more than {connections} connections, and not max_connections = {wanted}: there are only {descriptors} "
            f"descriptors; LimitNOFILE={enough}, or --ulimit=nofile={enough} of a container engine, is enough",
        )
        front.accounts = Accounts(connections)


def _receive(supervisor: socket.socket) -> tuple[orders.Order, list[int]]:
    """Return the next order, and the descriptors that came with it. Raises HungUp, OSError, ProtocolError."""
    data, descriptors, flags, _ = socket.recv_fds(supervisor, wire.MAX_MESSAGE, syscalls.SCM_MAX_FD)
    if not data:  # no order is empty
        raise HungUp
    wire.check_whole(flags)
    return orders.load(data), descriptors


def _configuration(order: orders.Order, descriptors: list[int]) -> Configuration:
    """Return the configuration from an order. Raises ConfigurationError."""
    assert isinstance(order, orders.Configuration)
    if not descriptors:
        return Configuration()
    with open(descriptors[0], "rb") as file:
        return configuration_file.read(file, Path(os.fsdecode(order.path)), accounts=False)


def _subordinates(order: orders.Order, descriptors: list[int]) -> Subordinates:
    """Return the owners of subordinate uids from an order. Raises OSError."""
    assert isinstance(order, orders.SubordinateIds)
    contents = []
    for each in descriptors:
        with open(each, "rb") as file:
            contents.append(file.read())
    subuid, passwd = contents
    return subordinate_ids.parse(subuid, passwd)


async def _run(front: Front, supervisor: socket.socket, parent: int, sockets: _Sockets) -> None:
    """Serve until the supervisor, whose pidfd is `parent`, hangs up."""
    stop = asyncio.Event()
    supervisor.setblocking(False)
    asyncio.get_running_loop().add_reader(supervisor, _obey, supervisor, front, stop)
    asyncio.get_running_loop().add_reader(parent, _end_soon, front, parent)
    deferred_writes = DeferredWrites(front)
    deferred_writes.look()
    await recognize(front)
    with closing(Health(front, stop)) as health:
        async with await control_socket.serve(sockets.control, front, health):
            front.sockets = sockets.addresses()
            names = ", ".join(front.sockets["callers"])
            live = len(front.registry)
            front.log(log.INFO, f"serving on {names}, with {live} live mounts", live_mounts=live)
            supervisor.send(orders.dump(orders.Ready()))
            beside = [asyncio.create_task(each.run()) for each in (Watch(front), deferred_writes)]
            server = Server(front)
            async with _watched(front, health, sockets.metrics), _published(front, health, server, sockets.plugin):
                await server.run(sockets.callers, stop)
            for task in beside:
                task.cancel()


@asynccontextmanager
async def _watched(front: Front, health: Health, listener: socket.socket | None) -> AsyncIterator[None]:
    """Serve metrics and health on `listener`, if there is one, while the block runs."""
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
    """Serve volumes and the requests of the CSI plugin, if there is one, while the block runs."""
    if plugin is None or front.volumes is None:
        yield
        return
    publications = Publications(front, front.volumes, server, VolumeCall, OldCall)
    handler = RequestHandler(front, publications, health, plugin)
    working = [asyncio.create_task(publications.restore()), asyncio.create_task(handler.run())]
    try:
        yield
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await handler.end(2 * front.configuration.deadlines.operation)
        publications.close()


def _obey(supervisor: socket.socket, front: Front, stop: asyncio.Event) -> None:
    """Carry out the supervisor's next order; set `stop` when it hangs up."""
    try:
        order, descriptors = _receive(supervisor)
    except (HungUp, OSError, wire.ProtocolError):
        asyncio.get_running_loop().remove_reader(supervisor)
        stop.set()
        return
    if isinstance(order, orders.MounterStarted):
        front.mounter.pid, front.mounter.restarts, front.mounter.serves_plain_calls = order
    elif isinstance(order, orders.PluginStarted):
        front.plugin = order
    elif isinstance(order, orders.SubordinateIds):
        front.subordinates = _subordinates(order, descriptors)
    elif isinstance(order, orders.ChildrenLeft):
        for child in descriptors:
            front.slots.take_until(LEFT, _ends(child))
    else:
        front.configuration = _configuration(order, descriptors)
        source = front.configuration.source
        front.log(log.INFO, f"configuration loaded again: {os.fsdecode(source)}", configuration=source)


async def _ends(pidfd: int) -> None:
    """Return when that process has ended, and close its pidfd."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _end_soon(front: Front, parent: int) -> None:
    """Give operations under way, which the next broker has to find in the tables, a moment to end."""
    loop = asyncio.get_running_loop()
    loop.remove_reader(parent)
    loop.call_later(_LAST_SECONDS, _end, front)


def _end(front: Front) -> NoReturn:
    """Exit as if killed: children of the mounter end their calls by themselves."""
    front.log(log.ERROR, "the supervisor has ended, and the front ends with it")
    os._exit(1)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
