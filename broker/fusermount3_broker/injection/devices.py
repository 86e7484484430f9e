"""The answers to kubelet: the list of devices, and what a container gets with one. Pure.

A device is only a right to the edits of `container_edits`, so all devices are the same, and their number is arbitrary.
"""

from dataclasses import dataclass

from fusermount3_broker.injection import cdi
from fusermount3_broker.injection.container_edits import Injection
from fusermount3_broker.injection.deviceplugin_pb2 import (
    AllocateRequest,
    AllocateResponse,
    CDIDevice,
    ContainerAllocateResponse,
    Device,
    DeviceSpec,
    ListAndWatchResponse,
    Mount,
)

#: The API's words for the health of a device.
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"


class UnknownDevice(ValueError):
    """kubelet asked for a device that was never listed; the message names it."""


@dataclass(frozen=True)
class Devices:
    """`count` devices; a container with one gets `injection`, or with `by_cdi` the edits in the file in /etc/cdi."""

    count: int
    injection: Injection
    by_cdi: bool = False

    def listing(self, healthy: bool) -> ListAndWatchResponse:
        """Return the list of devices. kubelet allocates only healthy ones."""
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
