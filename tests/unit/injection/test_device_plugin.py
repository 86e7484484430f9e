"""The device plugin's answers to kubelet; the generated module matches the .proto file beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from grpc_tools import protoc

from fusermount3_broker.cli import main
from fusermount3_broker.injection import deviceplugin_pb2 as api
from fusermount3_broker.injection.container_edits import injection
from fusermount3_broker.injection.devices import Devices, UnknownDevice

BROKER = Path(__file__).parents[3] / "broker"
INJECTION = injection(Path("/opt/proxy"), Path("/srv/fuse/other.sock"))


def allocate(devices: Devices, *containers: list[str]) -> list[api.ContainerAllocateResponse]:
    requests = [api.ContainerAllocateRequest(devices_ids=names) for names in containers]
    return list(devices.allocate(api.AllocateRequest(container_requests=requests)).container_responses)


@pytest.mark.parametrize(("healthy", "health"), [(True, "Healthy"), (False, "Unhealthy")])
def test_all_devices_are_as_healthy_as_the_broker(healthy: bool, health: str) -> None:
    listing = Devices(3, INJECTION).listing(healthy)
    assert [(device.ID, device.health) for device in listing.devices] == [(f"fuse-{n}", health) for n in range(3)]


def test_each_container_gets_what_the_injection_says() -> None:
    first, second = allocate(Devices(3, INJECTION), ["fuse-0"], ["fuse-1", "fuse-2"])
    assert first == second
    binds = {(bind.source, bind.target, True) for bind in INJECTION.binds}
    assert {(mount.host_path, mount.container_path, mount.read_only) for mount in first.mounts} == binds
    assert dict(first.envs) == INJECTION.environment != {}
    assert not first.devices
    assert not first.cdi_devices


def test_the_real_device_is_given_as_a_device() -> None:
    with_node = injection(Path("/opt/proxy"), Path("/srv/fuse/broker.sock"), device_node=True)
    (given,) = allocate(Devices(1, with_node), ["fuse-0"])
    (device,) = given.devices
    assert (device.host_path, device.container_path, device.permissions) == ("/dev/fuse", "/dev/fuse", "rw")
    assert "/dev/fuse" not in {mount.container_path for mount in given.mounts}


def test_with_cdi_only_the_name_is_told() -> None:
    (given,) = allocate(Devices(1, INJECTION, by_cdi=True), ["fuse-0"])
    names = [api.CDIDevice(name="fusermount3-proxy.dev/fuse=on")]
    assert given == api.ContainerAllocateResponse(cdi_devices=names)


@pytest.mark.parametrize("name", ["fuse-3", "fuse--1", "gpu", ""])
def test_a_device_that_there_is_not_is_not_given(name: str) -> None:
    with pytest.raises(UnknownDevice, match=f"no device '{name}'"):
        allocate(Devices(3, INJECTION), ["fuse-0"], [name])


def test_a_socket_in_a_directory_of_everybodys_is_refused_in_one_line() -> None:
    result = CliRunner().invoke(main.main, ["device-plugin", "--socket", "/run/broker.sock"])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert result.output.startswith("Error: /run/broker.sock: containers would see all of /run")


def test_the_generated_module_is_made_of_the_proto(tmp_path: Path) -> None:
    """Other versions of the compiler generate other code, but the same description of the messages."""
    proto = "fusermount3_broker/injection/deviceplugin.proto"
    assert protoc.main(["protoc", f"-I{BROKER}", f"--python_out={tmp_path}", proto]) == 0

    def description(directory: Path) -> str:
        module = directory / "fusermount3_broker/injection/deviceplugin_pb2.py"
        (line,) = [line for line in module.read_text().splitlines() if line.startswith("DESCRIPTOR = ")]
        return line

    assert description(BROKER) == description(tmp_path)
