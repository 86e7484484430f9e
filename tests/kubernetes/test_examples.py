"""Test that each example is valid, uses attributes that the driver knows, needs no privilege, and ends on request."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pytest
import yaml

from fusermount3_broker.csi import volume_requests
from tests.e2e.conftest import wait_until
from tests.kubernetes.objects import (
    EXAMPLES,
    KUSTOMIZATION,
    PACKAGING,
    containers,
    is_pulled_once,
    name_of,
    objects,
    of_base,
    the,
    validate,
)
from tests.lab.broker import PROXY
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.podman import Container, Options, Volume

if TYPE_CHECKING:
    from tests.kubernetes.objects import Object

DOCUMENT = (Path(__file__).parents[2] / "docs/kubernetes.md").read_text()
DRIVER = the("CSIDriver", of_base())["metadata"]["name"]
#: The attributes in the first column of the table of volumeAttributes.
ATTRIBUTES = set(re.findall(r"^\| `(\w+)` \|", DOCUMENT, re.MULTILINE))
DEFAULTS = {"fdPassingEmptyDirName": "fuse-fd-passing", "fdPassingSocketName": "fuse-csi-ephemeral.sock"}
#: The volume types that the Pod Security Standard "restricted" allows.
RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"}
RESTRICTED_VOLUMES |= {"secret"}


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def of_example(example: Path) -> list[Object]:
    return objects(example.read_text())


@pytest.fixture
def pod(of_example: list[Object]) -> Object:
    return the("Pod", of_example)


@pytest.fixture
def attributes(of_example: list[Object]) -> dict[str, str]:
    """The volume's attributes: those of the inline volume, or those of the PersistentVolume."""
    given = volume_of(of_example).get("volumeAttributes", {})
    assert isinstance(given, dict)
    return given


def volume_of(of_example: list[Object]) -> Object:
    """Return the description of the only volume of this driver."""
    inline = [each["csi"] for each in the("Pod", of_example)["spec"]["volumes"] if "csi" in each]
    persistent = [each["spec"]["csi"] for each in of_example if each["kind"] == "PersistentVolume"]
    (volume,) = inline + persistent
    assert isinstance(volume, dict)
    return volume


def mounts_of(container: Object, name: str) -> list[Object]:
    return [mount for mount in container["volumeMounts"] if mount["name"] == name]


def test_it_is_valid(of_example: list[Object]) -> None:
    for each in of_example:
        validate(each)


def test_its_pod_is_called_as_the_file(example: Path, pod: Object) -> None:
    assert name_of(pod) == f"Pod {example.stem}"


def test_it_is_in_the_list_and_in_the_document(example: Path) -> None:
    assert example.name in yaml.safe_load((PACKAGING / "examples" / KUSTOMIZATION).read_text())["resources"]
    assert f"../packaging/kubernetes/examples/{example.name})" in DOCUMENT


def test_the_document_has_all_attributes_with_their_defaults() -> None:
    assert set(volume_requests.ATTRIBUTES) == ATTRIBUTES
    assert volume_requests.Attributes().empty_dir == DEFAULTS["fdPassingEmptyDirName"]
    assert volume_requests.Attributes().socket == DEFAULTS["fdPassingSocketName"]
    for name, value in DEFAULTS.items():
        assert f"| `{name}` | `{value}` |" in DOCUMENT


def test_its_volume_is_the_drivers_and_its_attributes_are_known(
    of_example: list[Object], attributes: dict[str, str]
) -> None:
    assert volume_of(of_example)["driver"] == DRIVER
    assert attributes.keys() <= ATTRIBUTES
    assert all(isinstance(value, str) for value in attributes.values())


def test_the_fuse_program_finds_the_socket_where_the_driver_makes_it(pod: Object, attributes: dict[str, str]) -> None:
    expected = DEFAULTS | attributes
    directory = expected["fdPassingEmptyDirName"]
    assert {"name": directory, "emptyDir": {}} in pod["spec"]["volumes"]
    (program,) = [container for container in containers(pod) if mounts_of(container, directory)]
    (path,) = [each["value"] for each in program["env"] if each["name"] == "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH"]
    (mount,) = mounts_of(program, directory)
    assert PurePosixPath(path) == PurePosixPath(mount["mountPath"]) / expected["fdPassingSocketName"]


def test_who_uses_the_volume_sees_what_is_mounted_later(pod: Object, attributes: dict[str, str]) -> None:
    eager = attributes.get("mountTiming") == "eager"
    users = [mount for container in containers(pod) for mount in mounts_of(container, "data")]
    assert users
    for mount in users:
        assert mount.get("mountPropagation") == (None if eager else "HostToContainer")


def test_a_program_whose_filesystem_can_be_seen_is_waited_for(pod: Object) -> None:
    """Checks that the probe names a path on or below which its container has something mounted."""
    probes = [each["startupProbe"]["exec"]["command"] for each in containers(pod) if "startupProbe" in each]
    lines = [line for container in containers(pod) for word in container["command"] for line in word.splitlines()]
    commands = [*probes, *(line.split(" && ")[0].split() for line in lines if " --wait-mounted " in line)]
    for command in commands:
        assert command[:2] == ["fusermount3-proxy", "--wait-mounted"]
        path = PurePosixPath(command[2])
        mounts = [mount for each in containers(pod) for mount in each["volumeMounts"]]
        assert any(path.is_relative_to(mount["mountPath"]) for mount in mounts)
    assert commands or name_of(pod) == "Pod eager"


def test_an_image_that_the_node_has_is_not_pulled_again(pod: Object) -> None:
    for container in containers(pod):
        assert is_pulled_once(container["image"]), container["image"]


def app_of(path: Path) -> Object:
    """Return the container that uses the filesystem of this example."""
    (app,) = [each for each in containers(the("Pod", objects(path.read_text()))) if each["name"] == "app"]
    return app


@pytest.mark.e2e
@pytest.mark.parametrize("command", sorted({tuple(app_of(path)["command"]) for path in EXAMPLES}))
def test_its_app_ends_when_kubelet_asks_it_to(command: tuple[str, ...]) -> None:
    """A process with pid 1 in its namespace gets no SIGTERM that it does not handle: pid_namespaces(7)."""
    proxy = Volume(PROXY, "/usr/bin/fusermount3-proxy")
    with Container(image_tag(BUSYBOX), command, Options(volumes=[proxy])) as container:
        wait_until(lambda: len(container.processes()) > 1)
        assert container.stop(20) == 0


def test_it_keeps_the_pod_security_standard_restricted(pod: Object) -> None:
    spec = pod["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in spec["volumes"]:
        assert each.keys() - {"name"} <= RESTRICTED_VOLUMES
    for container in containers(pod):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not context.get("privileged") and context.get("runAsUser") != 0
