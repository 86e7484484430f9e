"""The fields of templates by which volumes are created and deleted: what is accepted, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from fusermount3_controller.faults import Invalid
from fusermount3_controller.provisioning_fields import AccessMode, Mode, Provisioning, VolumeMode
from fusermount3_controller.template_expressions import Stage
from fusermount3_controller.volume_templates import parse
from tests.unit.controller.samples import Manifest, shared, template


def run(*args: str, **container: Any) -> Manifest:
    """Return the pod template of a stage."""
    tool = {"name": "tool", "image": "example/tool:1.0", "args": list(args), **container}
    return {"podTemplate": {"spec": {"containers": [tool]}}}


def dynamic(**spec: Any) -> Manifest:
    given = {"provisioningModes": ["Dynamic"], "volumeCreation": run(), "volumeDeletion": run()}
    return shared(**(given | spec))


def faults_of(manifest: Manifest) -> dict[str, str]:
    with pytest.raises(Invalid) as caught:
        parse(manifest)
    return {fault.field: fault.text for fault in caught.value.faults}


def test_they_are_parsed() -> None:
    validation = {
        "volumeModes": ["Block"],
        "accessModes": ["ReadWriteOnce"],
        "minCapacity": "1Gi",
        "maxCapacity": "2Gi",
    }
    creation = {"handle": "b-{{ defaultHandle }}", "capacity": "1Ei", **run("mb", "{{ defaultHandle }}")}
    parsed = parse(
        dynamic(
            provisioningModes=["Static", "Dynamic"],
            volumeValidation=validation,
            volumeCreation=creation,
            volumeExpansion=run("resize", "{{ requestedMinCapacity }}"),
            volumeUnstaging=run("sync", "{{ node.metadata.name }}"),
            volumeDeletion=run("rb", "{{ handle }}"),
        )
    ).provisioning
    assert parsed._replace(pods={}) == Provisioning(
        modes=(Mode.STATIC, Mode.DYNAMIC),
        volume_modes=(VolumeMode.BLOCK,),
        access_modes=(AccessMode.READ_WRITE_ONCE,),
        min_capacity=2**30,
        max_capacity=2**31,
        handle="b-{{ defaultHandle }}",
        capacity=str(2**60),
    )
    assert parsed.pods.keys() == set(Stage) - {Stage.VALIDATION, Stage.STAGING}


def test_a_template_says_nothing_of_them() -> None:
    assert parse(shared()).provisioning == Provisioning()


@pytest.mark.parametrize("field", ["provisioningModes", "volumeCreation", "volumeDeletion", "volumeUnstaging"])
def test_a_sidecars_volume_is_not_provisioned(field: str) -> None:
    manifest = template()
    manifest["spec"][field] = None
    assert "has no effect with placement Sidecar" in faults_of(manifest)[f"spec.{field}"]


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        ({"provisioningModes": []}, "provisioningModes", "must be a list of Dynamic, Static, not '[]'"),
        ({"provisioningModes": ["dynamic"]}, "provisioningModes", "must be a list of Dynamic, Static"),
        ({"provisioningModes": ["Static"]}, "volumeCreation", "unless provisioningModes has Dynamic"),
        (
            {"provisioningModes": ["Static"], "volumeUnstaging": run()},
            "volumeUnstaging",
            "unless provisioningModes has Dynamic",
        ),
        ({"volumeDeletion": {}}, "volumeDeletion.podTemplate", "what is created has to be deleted"),
        ({"volumeDeletion": "x"}, "volumeDeletion", "must be an object, not 'x'"),
        ({"volumeCreation": {"handel": "x", **run()}}, "volumeCreation", "did you mean 'handle'?"),
        ({"volumeCreation": {"handle": 1, **run()}}, "volumeCreation.handle", "must be a string, not '1'"),
        ({"volumeCreation": {"handle": "{{ handle }}", **run()}}, "volumeCreation.handle", "there is no 'handle'"),
        ({"volumeCreation": {"handle": "{{ pvc.metadata.name }}", **run()}}, "volumeCreation.handle", "of a claim"),
        (
            {"volumeCreation": {"handle": "{{ pvc.metadata.namespace }}", **run()}},
            "volumeCreation.handle",
            "must have {{",
        ),
        ({"volumeCreation": {"capacity": "much", **run()}}, "volumeCreation.capacity", "must be a quantity"),
        ({"volumeCreation": {"capacity": "0", **run()}}, "volumeCreation.capacity", "must be more than nothing"),
        ({"volumeValidation": {"volumeModes": ["Disk"]}}, "volumeValidation.volumeModes", "of Filesystem, Block"),
        ({"volumeValidation": {"accessModes": "x"}}, "volumeValidation.accessModes", "a list of ReadWriteOnce"),
        ({"volumeValidation": {"minCapacity": True}}, "volumeValidation.minCapacity", "a quantity such as 1Gi"),
        (
            {"volumeValidation": {"minCapacity": "2", "maxCapacity": "1"}},
            "volumeValidation.minCapacity",
            "is more than maxCapacity",
        ),
    ],
)
def test_a_fault_names_its_field(spec: Manifest, field: str, says: str) -> None:
    assert says in faults_of(dynamic(**spec))[f"spec.{field}"]


POD = "spec.volumeCreation.podTemplate.spec"


@pytest.mark.parametrize(
    ("container", "field", "says"),
    [
        ({"name": "Tool"}, ".name", "must be of at most 63 lower-case letters"),
        ({"args": ["{{ handle }}"]}, ".args[0]", "there is no 'handle'"),
        ({"args": ["{{ mountpoint }}"]}, ".args[0]", "there is no 'mountpoint'"),
        ({"command": ["sh", "-c", "mb {{ pvc.metadata.name }}"]}, ".command[2]", "must end with `| tobash`"),
        ({"args": ["{{ pvc.metadata.annotations.x }}"]}, ".args[0]", "so it could be an option"),
        ({"image": "{{ pvc.metadata.annotations.x }}"}, ".image", "can only be in command, args"),
        ({"env": [{"name": "{{ pvc.metadata.name }}", "value": "x"}]}, ".env[0].name", "can only be in command, args"),
        ({"securityContext": {"privileged": True}}, ".securityContext.privileged", "must be false"),
    ],
)
def test_its_container_is_checked(container: Manifest, field: str, says: str) -> None:
    found = faults_of(dynamic(volumeCreation=run(**container)))
    assert says in found[f"{POD}.containers[0]{field}"]


def test_what_a_claim_says_can_become_words() -> None:
    words = ["sh", "-c", 'mb "$0" {{ pvc.metadata.annotations["a/b"] | tobash }}', "--name={{ pvc.metadata.name }}"]
    env = [{"name": "NAME", "value": "{{ pvc.metadata.name }}"}]
    creation = run("{{ pvc.metadata.uid }}", command=words, env=env)
    secret = {"secretName": "{{ pvc.metadata.namespace }}"}
    creation["podTemplate"]["spec"]["volumes"] = [{"name": "key", "secret": secret}]
    parse(dynamic(volumeCreation=creation))


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        ({"restartPolicy": "Always"}, ".restartPolicy", "must be Never"),
        ({"nodeName": "n1"}, ".nodeName", "a template can't decide this"),
        ({"containers": []}, ".containers", "must be one container"),
    ],
)
def test_its_pod_is_checked(spec: Manifest, field: str, says: str) -> None:
    creation = run()
    creation["podTemplate"]["spec"] |= spec
    assert faults_of(dynamic(volumeCreation=creation))[POD + field].startswith(says)


def test_a_pod_that_ends_mounts_wherever_it_likes() -> None:
    creation = run(volumeMounts=[{"name": "mountpoint", "mountPath": "/mnt"}])
    creation["podTemplate"]["spec"] |= {"volumes": [{"name": "mountpoint", "emptyDir": {}}], "restartPolicy": "Never"}
    parse(dynamic(volumeCreation=creation))
