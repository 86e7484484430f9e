"""A fake of the part of kubelet that device plugins see: its directory, its socket, and the calls it makes.

The messages and their transport are the real ones. The behaviour follows kubelet's device manager
(pkg/kubelet/cm/devicemanager): at its start it removes the contents of the directory, and it calls a plugin back at
the endpoint with which the plugin has registered. `podman_options` stands for kubelet and the container runtime, which
make a container from a plugin's answer.
"""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import grpc

from fusermount3_broker.injection import deviceplugin_pb2 as api

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE = 30


class FakeKubelet:
    """A kubelet that runs while its `with` block does; its socket stays, as that of a killed one."""

    def __init__(self, directory: Path) -> None:
        """Use `directory` as the one for device plugins."""
        self.directory = directory
        self.socket = directory / "kubelet.sock"
        self._registrations: queue.Queue[api.RegisterRequest] = queue.Queue()
        self._server = grpc.server(ThreadPoolExecutor(max_workers=4))
        self._refusal = ""

    def __enter__(self) -> Self:
        for file in self.directory.iterdir():
            file.unlink()
        register = grpc.unary_unary_rpc_method_handler(
            self._register, api.RegisterRequest.FromString, api.Empty.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler("v1beta1.Registration", {"Register": register})
        self._server.add_generic_rpc_handlers((handler,))
        assert self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.stop(PATIENCE).wait()  # calls that have begun are answered

    def refuse(self, reason: str) -> None:
        """Refuse all registrations from now on; with no reason, accept them again."""
        self._refusal = reason

    def plugin(self) -> Plugin:
        """Return the next plugin that registers. Raises queue.Empty."""
        request = self._registrations.get(timeout=PATIENCE)
        return Plugin(self.directory / request.endpoint, request)

    def _register(self, request: api.RegisterRequest, context: grpc.ServicerContext) -> api.Empty:
        if self._refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._refusal)
        self._registrations.put(request)
        return api.Empty()


class Plugin:
    """A plugin as kubelet calls it, with the request by which it has registered."""

    def __init__(self, socket: Path, request: api.RegisterRequest) -> None:
        self.request = request
        self._channel = grpc.insecure_channel(f"unix:{socket}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def options(self) -> api.DevicePluginOptions:
        call = self._channel.unary_unary(
            "/v1beta1.DevicePlugin/GetDevicePluginOptions",
            request_serializer=api.Empty.SerializeToString,
            response_deserializer=api.DevicePluginOptions.FromString,
        )
        return call(api.Empty(), timeout=PATIENCE)

    def listings(self) -> Iterator[dict[str, str]]:
        """Yield the devices and their health each time that the plugin sends them, until it ends."""
        call = self._channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch",
            request_serializer=api.Empty.SerializeToString,
            response_deserializer=api.ListAndWatchResponse.FromString,
        )
        for listing in call(api.Empty(), timeout=PATIENCE):
            yield {device.ID: device.health for device in listing.devices}

    def allocate(self, *containers: list[str]) -> list[api.ContainerAllocateResponse]:
        """Return what containers with these devices get. Raises grpc.RpcError."""
        call = self._channel.unary_unary(
            "/v1beta1.DevicePlugin/Allocate",
            request_serializer=api.AllocateRequest.SerializeToString,
            response_deserializer=api.AllocateResponse.FromString,
        )
        requests = [api.ContainerAllocateRequest(devices_ids=names) for names in containers]
        answer: Any = call(api.AllocateRequest(container_requests=requests), timeout=PATIENCE)
        return list(answer.container_responses)


def podman_options(given: api.ContainerAllocateResponse) -> list[str]:
    """Return the options of `podman run` for a container that gets this answer."""
    options = [f"--env={name}={value}" for name, value in given.envs.items()]
    for mount in given.mounts:
        options.append(f"--volume={mount.host_path}:{mount.container_path}:{'ro' if mount.read_only else 'rw'}")
    for device in given.devices:
        options.append(f"--device={device.host_path}:{device.container_path}:{device.permissions}")
    return options + [f"--device={device.name}" for device in given.cdi_devices]
