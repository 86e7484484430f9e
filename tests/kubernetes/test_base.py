"""Test that the base is valid, and grants the broker what it needs and no more."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import kubernetes_validate
import pytest

from fusermount3_broker.cli import main
from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import daemon
from fusermount3_broker.service import configuration_file
from tests.kubernetes.objects import name_of, of_base, the, validate

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes.objects import Object

OBJECTS = of_base()
DAEMONSET = the("DaemonSet", OBJECTS)
BROKER, *SIDECARS = DAEMONSET["spec"]["template"]["spec"]["containers"]
CAPABILITIES = {getattr(syscalls, name): name for name in dir(syscalls) if name.startswith("CAP_")}
OF_THE_SUPERVISOR = {"CAP_CHOWN", "CAP_KILL", "CAP_SETPCAP"}


@pytest.mark.parametrize("each", OBJECTS, ids=name_of)
def test_an_object_is_valid(each: Object) -> None:
    validate(each)


def test_the_schemas_know_their_fields() -> None:
    driver = copy.deepcopy(the("CSIDriver", OBJECTS))
    driver["spec"]["attachmentRequired"] = False
    with pytest.raises(kubernetes_validate.ValidationError, match="attachmentRequired"):
        validate(driver)
    driver = copy.deepcopy(the("CSIDriver", OBJECTS))
    driver["spec"]["podInfoOnMount"] = "true"
    with pytest.raises(kubernetes_validate.ValidationError, match="boolean"):
        validate(driver)


def test_the_broker_can_have_the_capabilities_that_it_needs_and_no_others() -> None:
    (option,) = [word for word in BROKER["command"] if word.startswith("--bounding-set=")]
    none, *added = option.partition("=")[2].split(",")
    assert none == "-all" and all(each.startswith("+") for each in added)
    of_the_mounter = {CAPABILITIES[each] for each in daemon.CAPABILITIES}
    assert {f"CAP_{each[1:].upper()}" for each in added} == of_the_mounter | OF_THE_SUPERVISOR


def test_the_broker_is_started_with_options_that_it_has() -> None:
    name = BROKER["command"][-1]
    command = main.main.commands[name]
    options = {word for each in command.params for word in each.opts}
    given = [word.partition("=")[0] for word in BROKER["args"]]
    assert set(given) <= options
    assert {each.opts[0] for each in command.params if each.required} <= set(given)


def test_nothing_but_the_broker_is_privileged() -> None:
    for container in SIDECARS:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    spec = DAEMONSET["spec"]["template"]["spec"]
    assert not {"hostNetwork", "hostIPC", "serviceAccountName"} & spec.keys()
    assert spec["automountServiceAccountToken"] is False


def test_only_the_directories_of_volumes_are_shared_with_the_node() -> None:
    shared = [mount for mount in BROKER["volumeMounts"] if "mountPropagation" in mount]
    devices = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices"
    assert [mount["mountPath"] for mount in shared] == ["/var/lib/kubelet/pods", devices]


def test_all_name_the_same_driver() -> None:
    name = the("CSIDriver", OBJECTS)["metadata"]["name"]
    assert f"--driver-name={name}" in BROKER["args"]
    (registrar, _) = SIDECARS
    assert f"--kubelet-registration-path=/var/lib/kubelet/plugins/{name}/csi.sock" in registrar["args"]
    paths = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in DAEMONSET["spec"]["template"]["spec"]["volumes"]
        if "hostPath" in volume
    }
    assert paths["plugin"] == f"/var/lib/kubelet/plugins/{name}"
    assert paths["state"].endswith(f"/{name}")


def test_probes_ask_where_the_sidecars_answer() -> None:
    (registrar, livenessprobe) = SIDECARS
    (port,) = [word.partition("=")[2] for word in livenessprobe["args"] if word.startswith("--health-port=")]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert BROKER[probe]["httpGet"] == {"path": "/healthz", "port": int(port)}
    (own,) = [word.partition("=:")[2] for word in registrar["args"] if word.startswith("--http-endpoint=")]
    assert registrar["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": int(own)}
    assert own != port


def test_the_configuration_is_one(tmp_path: Path) -> None:
    ((name, content),) = the("ConfigMap", OBJECTS)["data"].items()
    (option,) = [word for word in BROKER["args"] if word.startswith("--config=")]
    assert option.endswith(f"/{name}")
    (tmp_path / name).write_text(content)
    configuration_file.load(tmp_path / name)
