"""Kubelet's side of CSI's API: real gRPC calls to a plugin's socket, a new connection for each, as kubelet does."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol, TypeVar

import grpc

from fusermount3_broker.csi import csi_pb2 as csi

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from google.protobuf.message import Message

PATIENCE = 120.0
"""Seconds that kubelet gives a call (pkg/volume/csi, csiTimeout)."""

AnswerT = TypeVar("AnswerT", bound="Message")


class CsiError(AssertionError):
    """A call failed: with this code of grpc.StatusCode, and the text that ends up in an event of the pod."""

    def __init__(self, method: str, code: grpc.StatusCode, text: str) -> None:
        super().__init__(f"{method}: {code.name}: {text}")
        self.code = code
        self.text = text


class Channel(Protocol):
    """Calls a method with a request, and returns its answer."""

    def __call__(self, method: str, request: Message, answer: type[AnswerT], patience: float) -> AnswerT: ...


class Plugin:
    """A CSI driver as kubelet sees it: a socket. Each method raises CsiError."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    @contextlib.contextmanager
    def connected(self) -> Iterator[Channel]:
        """Yield a function for any number of calls over one connection."""
        with grpc.insecure_channel(f"unix:{self._socket}") as channel:

            def call(method: str, request: Message, answer: type[AnswerT], patience: float = PATIENCE) -> AnswerT:
                stub = channel.unary_unary(
                    f"/csi.v1.{method}",
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=answer.FromString,
                )
                try:
                    result: AnswerT = stub(request, timeout=patience)
                except grpc.RpcError as error:
                    raise CsiError(method, error.code(), error.details() or "") from None
                return result

            yield call

    def _call(self, method: str, request: Message, answer: type[AnswerT], patience: float = PATIENCE) -> AnswerT:
        with self.connected() as call:
            return call(method, request, answer, patience)

    def name(self) -> str:
        return self._call("Identity/GetPluginInfo", csi.GetPluginInfoRequest(), csi.GetPluginInfoResponse).name

    def is_ready(self) -> bool:
        """Return whether the plugin answers, and reports that it is ready."""
        try:
            return self._call("Identity/Probe", csi.ProbeRequest(), csi.ProbeResponse, 5).ready.value
        except CsiError:
            return False

    def capabilities(self) -> set[str]:
        """Return the names of the node service's capabilities."""
        answer = self._call(
            "Node/NodeGetCapabilities", csi.NodeGetCapabilitiesRequest(), csi.NodeGetCapabilitiesResponse
        )
        return {csi.NodeServiceCapability.RPC.Type.Name(each.rpc.type) for each in answer.capabilities}

    def node_id(self) -> str:
        return self._call("Node/NodeGetInfo", csi.NodeGetInfoRequest(), csi.NodeGetInfoResponse).node_id

    def publish(self, request: csi.NodePublishVolumeRequest, patience: float = PATIENCE) -> None:
        self._call("Node/NodePublishVolume", request, csi.NodePublishVolumeResponse, patience)

    def unpublish(self, handle: str, target: Path, patience: float = PATIENCE) -> None:
        request = csi.NodeUnpublishVolumeRequest(volume_id=handle, target_path=str(target))
        self._call("Node/NodeUnpublishVolume", request, csi.NodeUnpublishVolumeResponse, patience)

    def stats(self, handle: str, target: Path, patience: float = PATIENCE) -> csi.NodeGetVolumeStatsResponse:
        request = csi.NodeGetVolumeStatsRequest(volume_id=handle, volume_path=str(target))
        return self._call("Node/NodeGetVolumeStats", request, csi.NodeGetVolumeStatsResponse, patience)
