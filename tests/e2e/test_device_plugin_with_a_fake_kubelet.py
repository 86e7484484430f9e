"""The device plugin as a process, with a fake kubelet, which restarts and refuses when a test wants it to. The API
between them is real, and so are the containers, which are made from the answers of the plugin.

tests/cluster/test_device_plugin_on_a_node.py has a real kubelet.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from fusermount3_broker.injection import deviceplugin_pb2 as api
from tests.callers.build import compile_in, compilers, copy_out, downloading
from tests.callers.conftest import or_not_run
from tests.csi.protos import described
from tests.e2e.conftest import wait_until
from tests.e2e.documented import known_to_engines
from tests.e2e.mergerfs import use_mergerfs
from tests.e2e.sshfs import use_sshfs
from tests.lab.broker import PROGRAM, PROXY, Broker
from tests.lab.cache import Cache, recipe_hash
from tests.lab.device_kubelet import FakeKubelet, podman_options
from tests.lab.images import MERGERFS, SSHFS, image_tag
from tests.lab.podman import Container, Options
from tests.lab.programs import SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e

OFFICIAL = "k8s.io/kubelet@v0.34.1"
# As in packaging/kubernetes/device-plugin: root without any capability.
WITHOUT_PRIVILEGE = ("setpriv", "--no-new-privs", "--bounding-set=-all")
RESOURCE = "fusermount3-proxy.dev/fuse"


class Plugin:
    """The process of the device plugin, and its log; `directory` is kubelet's directory for device plugins."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "device-plugins"
        self.socket = self.directory / "fusermount3-proxy.sock"
        self.log = root / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, broker: Path, *options: str) -> None:
        arguments: list[str | Path] = ["--kubelet-dir", self.root, "--proxy", PROXY, "--socket", broker, *options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*WITHOUT_PRIVILEGE, PROGRAM, "device-plugin", *arguments], stdout=log, stderr=log
            )

    def end(self) -> int:
        """Terminate the plugin with SIGTERM; return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def said(self) -> list[str]:
        """Return the messages in its log, which holds only records."""
        return [json.loads(line)["message"] for line in self.log.read_text().splitlines()]


@pytest.fixture
def plugin() -> Iterator[Plugin]:
    """A plugin that is not started yet. The path of its directory is short, because socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="kubelet-") as root:
        plugin = Plugin(Path(root))
        plugin.directory.mkdir()
        try:
            yield plugin
        finally:
            plugin.kill()


@contextlib.contextmanager
def open_socket(path: Path) -> Iterator[None]:
    """Listen on the socket in place of the broker."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(bytes(path))
        listener.listen()
        yield
    path.unlink()


def test_it_registers_lists_its_devices_and_ends_without_a_trace(plugin: Plugin) -> None:
    broker = plugin.root / "broker.sock"
    with open_socket(broker), FakeKubelet(plugin.directory) as kubelet:
        plugin.start(broker, "--count", "5")
        expected = api.RegisterRequest(
            version="v1beta1",
            endpoint="fusermount3-proxy.sock",
            resource_name=RESOURCE,
            options=api.DevicePluginOptions(),
        )
        with kubelet.plugin() as called:
            assert called.request == expected
            assert called.options() == api.DevicePluginOptions()
            listings = called.listings()
            assert next(listings) == {f"fuse-{number}": "Healthy" for number in range(5)}
            assert plugin.socket.stat().st_mode & 0o077 == 0
            assert plugin.end() == 0
            assert list(listings) == []
        assert [file.name for file in plugin.directory.iterdir()] == ["kubelet.sock"]
    assert plugin.said() == [f"registered with kubelet as {RESOURCE}"]


def test_the_devices_are_healthy_while_the_socket_of_the_broker_is_open(plugin: Plugin) -> None:
    broker = plugin.root / "broker.sock"
    with FakeKubelet(plugin.directory) as kubelet:
        plugin.start(broker, "--count", "1")
        with kubelet.plugin() as called:
            listings = called.listings()
            assert next(listings) == {"fuse-0": "Unhealthy"}
            for _ in range(2):
                with open_socket(broker):
                    assert next(listings) == {"fuse-0": "Healthy"}
                assert next(listings) == {"fuse-0": "Unhealthy"}
        assert plugin.end() == 0


def test_it_registers_again_with_a_kubelet_that_is_started_again(plugin: Plugin) -> None:
    broker = plugin.root / "broker.sock"
    with open_socket(broker):
        plugin.start(broker, "--count", "1", "--resource", "example.org/fuse")
        wait_until(lambda: plugin.said() == [f"no kubelet at {plugin.directory}/kubelet.sock"])
        for _ in range(3):
            # Kubelet removes the sockets that it finds: its own old one and the plugin's.
            with FakeKubelet(plugin.directory) as kubelet, kubelet.plugin() as called:
                assert called.request.resource_name == "example.org/fuse"
                assert next(called.listings()) == {"fuse-0": "Healthy"}
        assert plugin.end() == 0
    assert plugin.said().count("registered with kubelet as example.org/fuse") == 3


def test_a_kubelet_that_refuses_is_asked_until_it_does_not(plugin: Plugin) -> None:
    with FakeKubelet(plugin.directory) as kubelet:
        kubelet.refuse("not today")
        plugin.start(plugin.root / "broker.sock")
        complaint = "kubelet does not register the plugin: FAILED_PRECONDITION: not today"
        wait_until(lambda: plugin.said() == [complaint])
        kubelet.refuse("")
        kubelet.plugin().close()
        assert plugin.end() == 0
    assert plugin.said() == [complaint, f"registered with kubelet as {RESOURCE}"]


def test_one_that_was_killed_is_replaced_and_one_that_lives_is_not(plugin: Plugin) -> None:
    with FakeKubelet(plugin.directory) as kubelet:
        plugin.start(plugin.root / "broker.sock")
        kubelet.plugin().close()
        arguments: list[str | Path] = ["--kubelet-dir", plugin.root]
        second = subprocess.run([PROGRAM, "device-plugin", *arguments], capture_output=True, text=True, timeout=30)
        assert second.returncode == 1
        assert "another broker listens there" in second.stderr
        plugin.kill()
        assert plugin.socket.is_socket()
        plugin.start(plugin.root / "broker.sock")
        kubelet.plugin().close()
        assert plugin.end() == 0


def test_one_that_has_no_place_for_its_socket_says_so_and_ends(plugin: Plugin) -> None:
    with FakeKubelet(plugin.directory):
        plugin.socket.mkdir()
        plugin.start(plugin.root / "broker.sock")
        assert plugin.process is not None
        assert plugin.process.wait(timeout=30) == 1
    why, said = plugin.log.read_text().splitlines()
    assert "Address already in use" in why, "it is gRPC that knows, and tells nobody but its log"
    assert said == f"Error: {plugin.directory}: no socket can be made at {plugin.socket}"
    assert plugin.socket.is_dir()


# On a host without udev, /dev/fuse belongs to root.
@pytest.mark.parametrize(
    ("user", "mountpoint", "device_node"),
    [("0:0", "/mnt", False), ("1000:1000", "/home/user/mnt", False), ("0:0", "/mnt", True)],
    ids=["root", "a user", "root, with the device"],
)
def test_sshfs_mounts_in_a_container_that_podman_makes_of_what_allocate_answers(
    user: str, mountpoint: str, device_node: bool, plugin: Plugin, broker: Broker
) -> None:
    with FakeKubelet(plugin.directory) as kubelet:
        plugin.start(broker.socket, *(["--device-node"] if device_node else []))
        with kubelet.plugin() as called:
            listing = next(called.listings())
            assert (len(listing), set(listing.values())) == (1000, {"Healthy"})
            (given,) = called.allocate([next(iter(listing))])
            with pytest.raises(grpc.RpcError, match="there is no device 'fuse-1000'"):
                called.allocate(["fuse-1000"])
        assert plugin.end() == 0
    for image, use in ((SSHFS, use_sshfs), (MERGERFS, use_mergerfs)):
        with Container(image_tag(image), options=Options(user=user, extra=podman_options(given))) as container:
            use(container, mountpoint)


def test_sshfs_mounts_in_a_container_that_gets_the_cdi_device_that_allocate_names(
    plugin: Plugin, broker: Broker
) -> None:
    with FakeKubelet(plugin.directory) as kubelet:
        plugin.start(broker.socket, "--cdi")
        with kubelet.plugin() as called:
            (given,) = called.allocate(["fuse-0"])
        assert plugin.end() == 0
    with (
        known_to_engines(broker),
        Container(image_tag(SSHFS), options=Options(extra=podman_options(given))) as container,
    ):
        use_sshfs(container, "/mnt")


# The protocol -------------------------------------------------------------------------------------------------------


def official_proto() -> Path:
    """Return the directory with api.proto from kubelet's Go module. Raises NotReachable."""

    def build(directory: Path) -> None:
        with compilers(SOURCES / "go") as container:
            with downloading("Go modules"):
                compile_in(container, f"cd /tmp && go mod download {OFFICIAL}")
            module = f"/root/go/pkg/mod/{OFFICIAL}/pkg/apis/deviceplugin/v1beta1"
            compile_in(container, f"mkdir /out && cp {module}/api.proto /out")
            copy_out(container, "/out", directory)

    return Cache().entry("kubelet-api", recipe_hash(OFFICIAL), build)


def test_names_and_numbers_are_those_of_the_official_api() -> None:
    with or_not_run():
        directory = official_proto()
    official = described(directory, "api.proto")
    ours = FileDescriptorProto.FromString(api.DESCRIPTOR.serialized_pb)

    assert ours.package == official.package
    theirs = {message.name: message for message in official.message_type}
    for message in ours.message_type:
        assert fields(message) == fields(theirs[message.name]), message.name
    methods = {(service.name, each.name): each for service in official.service for each in service.method}
    for service in ours.service:
        for each in service.method:
            other = methods[service.name, each.name]
            other.ClearField("options")  # the field is present although there are no options
            assert each == other


def fields(message: DescriptorProto) -> set[tuple[object, ...]]:
    """Return name, number, label and type of each field, including those of the nested messages of maps."""
    own = {(each.name, each.number, each.label, each.type, each.type_name) for each in message.field}
    return own | {(nested.name, frozenset(fields(nested))) for nested in message.nested_type}
