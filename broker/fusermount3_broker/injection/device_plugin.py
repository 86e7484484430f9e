"""``fusermount3-broker device-plugin``: the process that offers the devices to kubelet and allocates them.

It listens in kubelet's directory for device plugins, registers at kubelet's socket there, and answers kubelet from then
on. A kubelet that starts removes all sockets of plugins and makes its own anew, so the plugin checks both each second.
The devices are healthy as long as the broker's socket is open. The process needs no privilege except to write in that
directory.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from fusermount3_broker.injection import deviceplugin_pb2 as api
from fusermount3_broker.injection.container_edits import InjectionError, injection
from fusermount3_broker.injection.devices import Devices, UnknownDevice
from fusermount3_broker.kernel import socket_probe
from fusermount3_broker.service import grpc_server, listening_sockets, log
from fusermount3_broker.service.grpc_server import Identity, identity
from fusermount3_broker.service.log import Log

VERSION = "v1beta1"
#: The plugin's socket, beside kubelet's.
ENDPOINT = "fusermount3-proxy.sock"
KUBELET = "kubelet.sock"
#: Seconds between two checks of kubelet's socket, our own and the broker's.
PAUSE = 1
#: Seconds that kubelet may take to register the plugin.
PATIENCE = 10
#: Seconds for open requests to finish when the plugin ends.
GRACE = 1

Context = grpc.aio.ServicerContext[Any, Any]


class PluginError(Exception):
    """The plugin can't serve; the message says why."""


@dataclass(frozen=True)
class Settings:
    """`directory` is kubelet's for device plugins, `resource` the name that pods request, `broker` the path of its
    socket.
    """

    directory: Path
    resource: str
    devices: Devices
    broker: Path


def settings(
    directory: Path, resource: str, count: int, proxy: Path, broker: Path, *, device_node: bool, by_cdi: bool
) -> Settings:
    """Return the settings for `count` devices, for a host with the static executable and the broker's socket at these
    paths. Raises PluginError.
    """
    try:
        devices = Devices(count, injection(proxy, broker, device_node=device_node), by_cdi)
    except InjectionError as error:
        raise PluginError(str(error)) from None
    return Settings(directory, resource, devices, broker)


def serve(settings: Settings, log_format: str) -> None:
    """Serve until SIGTERM or SIGINT; `log_format` is one of `configuration.LOG_FORMATS`. Raises PluginError."""
    try:
        asyncio.run(_serve(settings, log.open_log(log_format)))
    except OSError as error:
        raise PluginError(f"{settings.directory}: {error.strerror or error}") from None


async def _serve(settings: Settings, write_log: Log) -> None:
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    plugin = Plugin(settings, end, write_log)
    while not end.is_set():
        await plugin.serve_kubelet()


class Plugin:
    """The device plugin; `end` is set when it must end."""

    def __init__(self, settings: Settings, end: asyncio.Event, write_log: Log) -> None:
        self._settings = settings
        self._end = end
        self._log = write_log
        self._own = settings.directory / ENDPOINT
        self._kubelet = settings.directory / KUBELET
        self._healthy = socket_probe.has_listener(bytes(settings.broker))
        self._changed = asyncio.Event()
        self._kubelets = 0
        self._complaint = ""

    async def serve_kubelet(self) -> None:
        """Serve this kubelet until its socket or our own is replaced. Without kubelet, return soon. Raises OSError."""
        if (kubelet := identity(self._kubelet)) is None:
            self._complain(f"no kubelet at {self._kubelet}")
            await self._pause()
            return
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self._handler(),))
        try:
            listening_sockets.remove_stale(self._own, socket.SOCK_STREAM)
            with grpc_server.listening(server, self._own):
                await server.start()
                served = kubelet, identity(self._own)
                registered = await self._register()
                await self._pause()
                while registered and not self._end.is_set() and self._sockets() == served:
                    await self._pause()
        finally:
            self._kubelets += 1
            self._wake_listings()
            await server.stop(GRACE)

    def _sockets(self) -> tuple[Identity | None, Identity | None]:
        return identity(self._kubelet), identity(self._own)

    async def _register(self) -> bool:
        """Register the plugin's socket and resource with kubelet; return whether kubelet accepted."""
        request = api.RegisterRequest(
            version=VERSION,
            endpoint=ENDPOINT,
            resource_name=self._settings.resource,
            options=api.DevicePluginOptions(),
        )
        async with grpc.aio.insecure_channel(f"unix:{self._kubelet}") as channel:
            register = channel.unary_unary(
                f"/{VERSION}.Registration/Register",
                request_serializer=api.RegisterRequest.SerializeToString,
                response_deserializer=api.Empty.FromString,
            )
            try:
                await register(request, timeout=PATIENCE)
            except grpc.aio.AioRpcError as error:
                self._complain(f"kubelet does not register the plugin: {error.code().name}: {error.details()}")
                return False
        self._complaint = ""
        self._log(
            log.INFO, f"registered with kubelet as {self._settings.resource}", devices=self._settings.devices.count
        )
        return True

    def _complain(self, complaint: str) -> None:
        """Log the complaint, unless it repeats the last one."""
        if complaint != self._complaint:
            self._log(log.WARNING, complaint)
        self._complaint = complaint

    async def _pause(self) -> None:
        """Pause, at most until the plugin must end; then check the broker's socket, and report a change to kubelet."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE):
                await self._end.wait()
        if (healthy := socket_probe.has_listener(bytes(self._settings.broker))) != self._healthy:
            self._log(log.NOTICE, f"the broker's socket is {'open' if healthy else 'closed'}")
            self._healthy = healthy
            self._wake_listings()

    def _wake_listings(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # What kubelet asks -------------------------------------------------------------------------------------------

    def _handler(self) -> grpc.GenericRpcHandler:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        empty = api.Empty.FromString
        return grpc.method_handlers_generic_handler(
            f"{VERSION}.DevicePlugin",
            {
                "GetDevicePluginOptions": unary(self._options, empty, api.DevicePluginOptions.SerializeToString),
                "ListAndWatch": stream(self._list_and_watch, empty, api.ListAndWatchResponse.SerializeToString),
                "Allocate": unary(
                    self._allocate, api.AllocateRequest.FromString, api.AllocateResponse.SerializeToString
                ),
            },
        )

    async def _options(self, _: api.Empty, __: Context) -> api.DevicePluginOptions:
        return api.DevicePluginOptions()

    async def _list_and_watch(self, _: api.Empty, __: Context) -> AsyncIterator[api.ListAndWatchResponse]:
        number = self._kubelets
        while number == self._kubelets:  # else another kubelet is served now
            changed = self._changed
            yield self._settings.devices.listing(self._healthy)
            await changed.wait()

    async def _allocate(self, request: api.AllocateRequest, context: Context) -> api.AllocateResponse:
        try:
            return self._settings.devices.allocate(request)
        except UnknownDevice as error:
            self._log(log.WARNING, f"not allocated: {error}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
