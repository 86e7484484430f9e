"""A controller in front of the real node plugin, which has none: csi-sanity needs one to create volumes.

Administrators write this driver's volumes into manifests; csi-sanity wants to create them. So it gets an endpoint that
implements a controller itself, advertises it, and forwards all other calls to the node plugin, byte for byte, in both
directions. Only the paths of volumes are others, if the plugin allows no volume where csi-sanity wants one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf import descriptor_pool, message_factory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from google.protobuf.descriptor_pb2 import FileDescriptorProto


_PATHS = {
    "/csi.v1.Node/NodePublishVolume": ("NodePublishVolumeRequest", "target_path"),
    "/csi.v1.Node/NodeUnpublishVolume": ("NodeUnpublishVolumeRequest", "target_path"),
    "/csi.v1.Node/NodeGetVolumeStats": ("NodeGetVolumeStatsRequest", "volume_path"),
}
"""The methods with the path of a volume: the message and the field that has it."""


class Controller:
    """A server on the socket `path`, in front of the plugin on `plugin`; `official` describes all of CSI.

    `placed` returns the path at which the plugin is to have a volume, given the one in a request.
    """

    def __init__(
        self,
        path: Path,
        plugin: Path,
        official: list[FileDescriptorProto],
        placed: Callable[[str], str] | None = None,
    ) -> None:
        self._messages = _messages(official)
        self._placed = placed
        self._plugin = grpc.insecure_channel(f"unix://{plugin}")
        self._server = grpc.server(ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers((_Handlers(self._behaviour),))
        self._server.add_insecure_port(f"unix://{path}")

    def __enter__(self) -> Controller:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
        self._plugin.close()

    def _behaviour(self, method: str) -> Callable[[bytes, Any], bytes]:
        own: dict[str, Callable[[bytes], Any]] = {
            "/csi.v1.Identity/GetPluginCapabilities": self._plugin_capabilities,
            "/csi.v1.Controller/ControllerGetCapabilities": self._capabilities,
            "/csi.v1.Controller/CreateVolume": self._create,
            "/csi.v1.Controller/DeleteVolume": lambda _: self._messages("DeleteVolumeResponse")(),
        }
        if answer := own.get(method):
            return lambda request, _: answer(request).SerializeToString()

        def hand_on(request: bytes, context: Any) -> bytes:
            try:
                return self._ask_plugin(method, request)
            except grpc.RpcError as error:
                _abort(context, error)

        return hand_on

    def _ask_plugin(self, method: str, request: bytes) -> bytes:
        if self._placed and method in _PATHS:
            name, field = _PATHS[method]
            message = self._messages(name).FromString(request)
            setattr(message, field, self._placed(getattr(message, field)))
            request = message.SerializeToString()
        call: Any = self._plugin.unary_unary(method)
        response: bytes = call(request, timeout=60)
        return response

    def _plugin_capabilities(self, request: bytes) -> Any:
        plugins = self._ask_plugin("/csi.v1.Identity/GetPluginCapabilities", request)
        answer = self._messages("GetPluginCapabilitiesResponse").FromString(plugins)
        answer.capabilities.add().service.type = 1  # CONTROLLER_SERVICE
        return answer

    def _capabilities(self, _: bytes) -> Any:
        answer = self._messages("ControllerGetCapabilitiesResponse")()
        answer.capabilities.add().rpc.type = 1  # CREATE_DELETE_VOLUME
        return answer

    def _create(self, request: bytes) -> Any:
        asked = self._messages("CreateVolumeRequest").FromString(request)
        answer = self._messages("CreateVolumeResponse")()
        answer.volume.volume_id = asked.name
        answer.volume.volume_context.update(asked.parameters)
        return answer


class _Handlers(grpc.GenericRpcHandler):
    """A handler that serves each method with the function on bytes that `behaviour` returns for its name."""

    def __init__(self, behaviour: Callable[[str], Callable[[bytes, Any], bytes]]) -> None:
        self._behaviour = behaviour

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_unary_rpc_method_handler(self._behaviour(details.method))


def _messages(official: list[FileDescriptorProto]) -> Callable[[str], Any]:
    """Return a function from the name of a CSI message to its class."""
    pool = descriptor_pool.DescriptorPool()
    for file in official:
        pool.AddSerializedFile(file.SerializeToString())
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"csi.v1.{name}"))


def _abort(context: Any, error: Any) -> NoReturn:
    context.abort(error.code(), error.details())
    raise AssertionError("abort raises")
