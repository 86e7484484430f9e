"""Test that the manifests of the device plugin are valid, and that the paths shared by its containers match."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from fusermount3_broker.cli import main
from fusermount3_broker.injection import cdi, container_edits
from fusermount3_broker.service import configuration
from fusermount3_proxy import __version__
from tests.kubernetes.objects import (
    DEVICE_PLUGIN,
    DEVICE_PLUGIN_CDI,
    containers,
    name_of,
    objects,
    of_base,
    the,
    validate,
)
from tests.lab.commands import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes.objects import Object

OBJECTS = [
    each for name in ("namespace.yaml", "device-plugin.yaml") for each in objects((DEVICE_PLUGIN / name).read_text())
]
SPEC = the("DaemonSet", OBJECTS)["spec"]["template"]["spec"]
PROXY, BROKER, PLUGIN = containers({"spec": SPEC})


@pytest.fixture
def options() -> dict[str, object]:
    """The options of the plugin, parsed from its command line."""
    words: list[str] = PLUGIN["command"] + PLUGIN["args"]
    _, name, *arguments = words
    command = main.main.commands[name]
    with click.Context(command) as context:
        command.parse_args(context, arguments)
        return dict(context.params)


def on_node(container: Object, path: str, spec: Object = SPEC) -> str:
    """Return the node's path for `path` in the container of this pod, which is a volume or below one."""
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    (place,) = [place for place in mounts if f"{path}/".startswith(f"{place}/")]
    return str(volumes[mounts[place]]["hostPath"]["path"]) + path.removeprefix(place)


@pytest.mark.parametrize("each", OBJECTS, ids=name_of)
def test_an_object_is_valid(each: Object) -> None:
    validate(each)


def test_kustomize_makes_the_same_objects_with_the_packages_version(kustomize: Path) -> None:
    made = objects(run([kustomize, "build", DEVICE_PLUGIN]).stdout)
    assert {name_of(each) for each in made} == {name_of(each) for each in OBJECTS}
    daemonset = the("DaemonSet", made)
    assert daemonset["metadata"]["namespace"] == the("Namespace", made)["metadata"]["name"]
    assert {each["image"] for each in containers(daemonset["spec"]["template"])} == {
        f"fusermount3-broker:{__version__}"
    }


def test_its_namespace_allows_what_that_of_the_base_allows() -> None:
    ours, that_of_the_base = the("Namespace", OBJECTS)["metadata"], the("Namespace", of_base())["metadata"]
    assert ours["labels"] == that_of_the_base["labels"]


def test_the_broker_can_have_the_capabilities_that_it_has_in_the_base() -> None:
    of_the_base = the("DaemonSet", of_base())["spec"]["template"]["spec"]["containers"][0]
    assert BROKER["command"][:3] == of_the_base["command"][:3]
    assert BROKER["command"][2].startswith("--bounding-set=-all,")


def test_nothing_but_the_broker_is_privileged() -> None:
    for container in (PROXY, PLUGIN):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    assert not {"hostNetwork", "hostIPC", "serviceAccountName"} & SPEC.keys()


def test_the_plugin_hands_out_what_is_on_the_node(options: dict[str, object]) -> None:
    (copy,) = [word for word in PROXY["command"] if "install" in word]
    assert copy.endswith(" /proxy/")
    assert str(options["proxy"]) == on_node(PROXY, "/proxy/fusermount3-proxy")
    socket = str(options["socket"])
    assert socket == on_node(BROKER, str(configuration.Socket.path)) == on_node(PLUGIN, socket)
    container_edits.injection(options["proxy"], options["socket"])  # type: ignore[arg-type]  # click made them paths


def test_the_plugin_is_where_kubelet_looks_for_it(options: dict[str, object]) -> None:
    directory = f"{options['kubelet_dir']}/device-plugins"
    assert directory == on_node(PLUGIN, directory) == "/var/lib/kubelet/device-plugins"


@pytest.fixture
def with_cdi(kustomize: Path) -> Object:
    """The pod of the DaemonSet that uses CDI."""
    daemonset = the("DaemonSet", objects(run([kustomize, "build", DEVICE_PLUGIN_CDI]).stdout))
    validate(daemonset)
    spec: Object = daemonset["spec"]["template"]["spec"]
    return spec


def test_with_cdi_the_node_is_told_what_the_device_is(
    with_cdi: Object, options: dict[str, object], tmp_path: Path
) -> None:
    writer = with_cdi["initContainers"][1]
    (output,) = [word for word in writer["args"] if word.startswith("--output=")]
    path = output.partition("=")[2]
    assert on_node(writer, path, with_cdi) == "/etc/cdi/fusermount3-proxy.json"
    arguments = [f"--output={tmp_path / 'file'}" if word == output else word for word in writer["args"]]
    assert CliRunner().invoke(main.main, [*writer["command"][1:], *arguments]).exit_code == 0
    specification = json.loads((tmp_path / "file").read_text())
    (device,) = specification["devices"]
    assert f"{specification['kind']}={device['name']}" == cdi.DEVICE
    sources = {mount["hostPath"] for mount in device["containerEdits"]["mounts"]}
    assert sources == {str(options["proxy"]), str(options["socket"]).rpartition("/")[0], container_edits.STAND_IN}


def test_with_cdi_only_the_plugin_differs(with_cdi: Object) -> None:
    proxy, writer, broker, plugin = containers({"spec": with_cdi})
    assert plugin.pop("args") == [*PLUGIN["args"], "--cdi"]
    assert {each.pop("image") for each in (proxy, writer, broker, plugin)} == {f"fusermount3-broker:{__version__}"}
    for ours, of_the_other in ((proxy, PROXY), (broker, BROKER), (plugin, PLUGIN)):
        assert ours == {name: value for name, value in of_the_other.items() if name in ours}
    assert writer["securityContext"] == proxy["securityContext"]
