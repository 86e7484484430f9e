"""What kubelet is told of the devices: which there are, and what a container gets that asks for one. Pure.

A device is nothing but the right to what `injection` says, so all are the same, and there are as many as one likes.
"""

from dataclasses import dataclass

from broker import cdi
from broker.deviceplugin.deviceplugin_pb2 import (
    AllocateRequest,
    AllocateResponse,
    CDIDevice,
    ContainerAllocateResponse,
    Device,
    DeviceSpec,
    ListAndWatchResponse,
    Mount,
)
from broker.injection import Injection

#: The words of the API for how a device is.
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"


class UnknownDevice(ValueError):
    """kubelet asked for a device that it was never told of; the message names it."""


@dataclass(frozen=True)
class Devices:
    """`count` devices; who has one gets `injection`, or with `by_cdi` what the file in /etc/cdi says."""

    count: int
    injection: Injection
    by_cdi: bool = False

    def listing(self, healthy: bool) -> ListAndWatchResponse:
        """Return what there is. kubelet gives out none that is not healthy."""
        health = HEALTHY if healthy else UNHEALTHY
        return ListAndWatchResponse(devices=[Device(ID=name, health=health) for name in self._names()])

    def allocate(self, request: AllocateRequest) -> AllocateResponse:
        """Return what each of these containers gets. Raises UnknownDevice."""
        wanted = {name for container in request.container_requests for name in container.devices_ids}
        for name in sorted(wanted - set(self._names())):
            raise UnknownDevice(f"there is no device {name!r}")
        return AllocateResponse(container_responses=[self._given() for _ in request.container_requests])

    def _names(self) -> list[str]:
        return [f"fuse-{number}" for number in range(self.count)]

    def _given(self) -> ContainerAllocateResponse:
        if self.by_cdi:
            return ContainerAllocateResponse(cdi_devices=[CDIDevice(name=cdi.DEVICE)])
        return ContainerAllocateResponse(
            envs=self.injection.environment,
            mounts=[
                Mount(container_path=bind.target, host_path=bind.source, read_only=True)
                for bind in self.injection.binds
            ],
            devices=[
                DeviceSpec(container_path=device, host_path=device, permissions="rw")
                for device in self.injection.devices
            ],
        )
