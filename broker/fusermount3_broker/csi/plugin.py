"""The plugin's process: a gRPC server for kubelet that asks the front.

    python -I -m fusermount3_broker.csi.plugin FRONT-FD ENDPOINT NODE-ID DRIVER-NAME KUBELET-DIR

It has no privilege and decides nothing: `volume_requests` checks kubelet's requests, and the front decides them. The
socket pair to the front outlives either, so a restarted front continues with the requests to the last one. The process
ends when no process holds the other end any more, and is killed when its supervisor ends.
"""

import asyncio
import itertools
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.wrappers_pb2 import BoolValue

from fusermount3_broker.csi import csi_pb2, volume_requests
from fusermount3_broker.csi.csi_pb2 import NodeServiceCapability
from fusermount3_broker.kernel import error_texts, syscalls
from fusermount3_broker.messages import csi, csi_settings
from fusermount3_broker.messages.csi import Answer, Question
from fusermount3_broker.messages.csi_settings import Settings, SettingsError
from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_broker.service import grpc_server, listening_sockets, log, sandbox
from fusermount3_broker.service.channel import Channel, HungUp
from fusermount3_broker.service.log import Log
from fusermount3_proxy import __version__, wire

#: Seconds that the front may take for one request. kubelet's own timeout is 120 (csiTimeout in pkg/volume/csi).
PATIENCE = 60
#: Seconds for the answer to Probe. The livenessprobe of the DaemonSet waits for 3.
PROBE_PATIENCE = 2
#: Seconds that kubelet may take to receive the last answers.
GRACE = 1

#: One process may number this many requests, starting at a random number: so an answer to the last plugin is not taken
#: for one to this plugin.
_NUMBERS = 2**62

_NODE_CAPABILITIES = (
    NodeServiceCapability.RPC.GET_VOLUME_STATS,
    NodeServiceCapability.RPC.VOLUME_CONDITION,
    NodeServiceCapability.RPC.GET_VOLUME_HEALTH,
    NodeServiceCapability.RPC.VOLUME_MOUNT_GROUP,
    NodeServiceCapability.RPC.SINGLE_NODE_MULTI_WRITER,
)

Context = grpc.aio.ServicerContext[Any, Any]
AnswerT = TypeVar("AnswerT", csi.Done, csi.Stated)


class NoAnswer(Exception):
    """The front has not answered in time, or can't be reached."""


class FrontRefused(volume_requests.Refusal):
    """The front has refused the request, and has logged that."""


class Front:
    """Client of the front, at the other end of `connection`."""

    def __init__(self, connection: socket.socket) -> None:
        self._channel = Channel(connection)
        self._sending = asyncio.Lock()
        self._numbers = itertools.count(1 + secrets.randbelow(_NUMBERS))
        self._unanswered: dict[int, tuple[Question, asyncio.Future[Answer]]] = {}

    async def ask(self, question: Question, patience: float = PATIENCE) -> Answer:
        """Return the front's answer. Raises NoAnswer after `patience` seconds."""
        question = question._replace(number=next(self._numbers))
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._unanswered[question.number] = question, answer
        try:
            async with asyncio.timeout(patience):
                await self.say(question)
                return await answer
        except TimeoutError:
            raise NoAnswer(f"the broker has not answered within {patience} seconds") from None
        except OSError as error:
            raise NoAnswer(f"the broker can't be asked: {error.strerror}") from None
        finally:
            del self._unanswered[question.number]

    async def say(self, record: csi.Record) -> None:
        """Send the record as soon as there is room. Raises OSError."""
        async with self._sending:
            await asyncio.get_running_loop().sock_sendall(self._channel.socket, csi.dump(record))

    async def note(self, record: csi.TurnedAway) -> None:
        """Send a record that needs no answer, unless the front is away."""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(1):
                await self.say(record)

    async def listen(self) -> None:
        """Deliver answers until no process holds the other end any more; fail the questions still open with NoAnswer
        then.
        """
        await self._listen()
        for _, answer in self._unanswered.values():
            if not answer.done():
                answer.set_exception(NoAnswer("the broker has ended"))

    async def _listen(self) -> None:
        async with asyncio.TaskGroup() as saying:
            while True:
                try:
                    record = csi.load(await self._channel.receive())
                except HungUp:
                    break
                except wire.ProtocolError:
                    continue
                if record == csi.Done(0):
                    for question, _ in self._unanswered.values():
                        saying.create_task(self._say_again(question))
                elif isinstance(record, Answer):
                    self._hand_on(record)

    async def _say_again(self, question: Question) -> None:
        with suppress(OSError):  # `listen` notices that, too
            await self.say(question)

    def _hand_on(self, record: Answer) -> None:
        _, answer = self._unanswered.get(record.number, (None, None))
        if answer and not answer.done():  # else the request was given up, or asked twice
            answer.set_result(record)


class Identity:
    """The CSI service Identity: name, version and health of the plugin. Asks `front` for the broker's health."""

    def __init__(self, settings: Settings, front: Front) -> None:
        self._settings = settings
        self._front = front

    def handler(self) -> grpc.GenericRpcHandler:
        return _handler(
            "Identity",
            {
                "GetPluginInfo": self._info,
                "GetPluginCapabilities": self._capabilities,
                "Probe": self._probe,
            },
        )

    async def _info(self, _: csi_pb2.GetPluginInfoRequest, __: Context) -> csi_pb2.GetPluginInfoResponse:
        return csi_pb2.GetPluginInfoResponse(name=self._settings.driver_name, vendor_version=__version__)

    async def _capabilities(
        self, _: csi_pb2.GetPluginCapabilitiesRequest, __: Context
    ) -> csi_pb2.GetPluginCapabilitiesResponse:
        return csi_pb2.GetPluginCapabilitiesResponse()

    async def _probe(self, _: csi_pb2.ProbeRequest, context: Context) -> csi_pb2.ProbeResponse:
        """Report the same health as /healthz of the metrics (`health`). CSI has FAILED_PRECONDITION for an unhealthy
        plugin.
        """
        try:
            answer = await self._front.ask(csi.Probe(0), PROBE_PATIENCE)
        except NoAnswer as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        if isinstance(answer, csi.Refused):
            await context.abort(_STATUS[answer.code], answer.text.decode("utf-8", "replace"))
        return csi_pb2.ProbeResponse(ready=BoolValue(value=True))


class Node:
    """The CSI service Node: the volumes of this node. Asks `front`."""

    def __init__(self, settings: Settings, front: Front, write_log: Log) -> None:
        self._settings = settings
        self._front = front
        self._log = write_log

    def handler(self) -> grpc.GenericRpcHandler:
        return _handler(
            "Node",
            {
                "NodePublishVolume": self._publish,
                "NodeUnpublishVolume": self._unpublish,
                "NodeGetVolumeStats": self._stats,
                "NodeGetVolumeHealth": self._health,
                "NodeGetCapabilities": self._capabilities,
                "NodeGetInfo": self._info,
            },
        )

    async def _publish(
        self, request: csi_pb2.NodePublishVolumeRequest, context: Context
    ) -> csi_pb2.NodePublishVolumeResponse:
        async with self._told("publish", request.volume_id, request.target_path, context):
            await self._ask(volume_requests.publish(request, self._settings), csi.Done)
        return csi_pb2.NodePublishVolumeResponse()

    async def _unpublish(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: Context
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        async with self._told("unpublish", request.volume_id, request.target_path, context):
            await self._ask(volume_requests.unpublish(request, self._settings), csi.Done)
        return csi_pb2.NodeUnpublishVolumeResponse()

    async def _stats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, context: Context
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        async with self._told("stat", request.volume_id, request.volume_path, context):
            stated = await self._ask(volume_requests.stat(request, self._settings), csi.Stated)
        return volume_requests.stats(stated)

    async def _health(
        self, request: csi_pb2.NodeGetVolumeHealthRequest, context: Context
    ) -> csi_pb2.NodeGetVolumeHealthResponse:
        async with self._told("stat", request.volume_id, request.volume_publish_path, context):
            stated = await self._ask(volume_requests.health(request, self._settings), csi.Stated)
        return volume_requests.health_of(request.volume_id, stated)

    async def _capabilities(
        self, _: csi_pb2.NodeGetCapabilitiesRequest, __: Context
    ) -> csi_pb2.NodeGetCapabilitiesResponse:
        rpc = NodeServiceCapability.RPC
        capabilities = [NodeServiceCapability(rpc=rpc(type=each)) for each in _NODE_CAPABILITIES]
        return csi_pb2.NodeGetCapabilitiesResponse(capabilities=capabilities)

    async def _info(self, _: csi_pb2.NodeGetInfoRequest, __: Context) -> csi_pb2.NodeGetInfoResponse:
        return csi_pb2.NodeGetInfoResponse(node_id=self._settings.node_id)

    async def _ask(self, question: Question, wanted: type[AnswerT]) -> AnswerT:
        """Return the front's answer, of type `wanted`. Raises volume_requests.Refusal, a FrontRefused if the front
        refuses.
        """
        try:
            answer = await self._front.ask(question)
        except NoAnswer as error:
            raise volume_requests.Refusal(csi.UNAVAILABLE, str(error)) from None
        if isinstance(answer, csi.Refused):
            raise FrontRefused(answer.code, answer.text.decode("utf-8", "replace"))
        if not isinstance(answer, wanted):
            raise volume_requests.Refusal(csi.INTERNAL, "the broker has answered something else")
        return answer

    @asynccontextmanager
    async def _told(self, operation: str, volume_id: str, target: str, context: Context) -> AsyncIterator[None]:
        """Report a refusal in the block to kubelet, and log it unless the front has: the front logs requests that reach
        it.
        """
        write = partial(self._log, log.WARNING, volume=volume_id, target=target)
        try:
            yield
        except volume_requests.Refusal as refusal:
            code = _STATUS[refusal.code]
            if not isinstance(refusal, FrontRefused):
                write(f"{operation} refused", code=code.name, text=refusal.text)
                await self._front.note(csi.TurnedAway(operation.encode()))
            named = f" (volume {visible(volume_id)})" if volume_id else ""
            await context.abort(code, refusal.text + named)
        except asyncio.CancelledError:
            write(f"{operation} given up by kubelet")
            raise


#: Status codes of gRPC by number.
_STATUS = {code.value[0]: code for code in grpc.StatusCode}


def _handler(service: str, methods: dict[str, Callable[[Any, Context], Awaitable[Any]]]) -> grpc.GenericRpcHandler:
    """Return a handler that serves these `methods` of a service in csi.proto."""
    described = csi_pb2.DESCRIPTOR.services_by_name[service]
    return grpc.method_handlers_generic_handler(
        described.full_name,
        {
            name: grpc.unary_unary_rpc_method_handler(
                behaviour,
                getattr(csi_pb2, described.methods_by_name[name].input_type.name).FromString,
                getattr(csi_pb2, described.methods_by_name[name].output_type.name).SerializeToString,
            )
            for name, behaviour in methods.items()
        },
    )


# The process -------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Serve until the front's end of the connection is closed.

    The first argument is the descriptor number of our end, the second one of `configuration.LOG_FORMATS`. Return the
    exit status of the process.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor handles them
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    descriptor, log_format, *options = arguments
    connection = socket.socket(fileno=int(descriptor))
    write_log = log.open_log(log_format)
    try:
        checked = csi_settings.check(*options)
        listening_sockets.remove_stale(checked.socket, socket.SOCK_STREAM)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if missing := sandbox.enter_as_plugin(checked.socket.parent):
            write_log(log.WARNING, f"the sandbox of the CSI plugin is incomplete; missing: {missing}")
        asyncio.run(_serve(connection, checked, write_log))
    except (SettingsError, OSError) as error:
        write_log(log.ERROR, f"the CSI plugin can't serve: {error_texts.of(error)}")
        return 1
    return 0


async def _serve(connection: socket.socket, settings: Settings, write_log: Log) -> None:
    front = Front(connection)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Identity(settings, front).handler(), Node(settings, front, write_log).handler()))
    with grpc_server.listening(server, settings.socket):
        await server.start()
        await front.say(csi.Done(0))
        name = settings.driver_name
        write_log(log.INFO, f"the CSI plugin serves on {settings.socket} as {name}", driver=name)
        await front.listen()
        await server.stop(GRACE)


if __name__ == "__main__":
    grpc_server.run(partial(main, sys.argv[1:]))
