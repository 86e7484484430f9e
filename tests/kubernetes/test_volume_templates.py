"""Test the resource VolumeTemplate, which says the same as the controller, and the templates that are ready to use."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from fusermount3_controller import (
    label_selectors,
    offline,
    pod_rules,
    provisioning_fields,
    template_parameters,
    volume_templates,
)
from fusermount3_controller.provisioning_fields import AccessMode, Mode, VolumeMode
from fusermount3_controller.template_expressions import Stage
from tests.kubernetes.objects import (
    CONTROLLER,
    EXAMPLES,
    KUSTOMIZATION,
    TEMPLATES,
    Object,
    containers,
    definition,
    is_pulled_once,
    objects,
    of_files,
    validate,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OBJECTS = of_files([path for path in sorted(CONTROLLER.glob("*.yaml")) if path.name != KUSTOMIZATION])
DEFINITION = definition(volume_templates.KIND, OBJECTS)
(VERSION,) = DEFINITION["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


OTHER = definition("MountPodAttachment", OBJECTS)
(OTHER_VERSION,) = OTHER["spec"]["versions"]


def schemas(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """Yield each schema within `schema`, after its path."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from schemas(below, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from schemas(schema[name], f"{path}[]")


ALL = dict(schemas(SCHEMA))
OF_OTHER = dict(schemas(OTHER_VERSION["schema"]["openAPIV3Schema"]))


def test_it_is_valid_and_listed() -> None:
    validate(DEFINITION)
    (kustomization,) = objects((CONTROLLER / KUSTOMIZATION).read_text())
    files = [path.name for path in CONTROLLER.glob("*.yaml") if path.name != KUSTOMIZATION]
    assert sorted(kustomization["resources"]) == sorted(files)


@pytest.mark.parametrize(
    ("path", "schema"), [pytest.param(*each, id=each[0]) for each in (*ALL.items(), *OF_OTHER.items())]
)
def test_each_schema_is_structural(path: str, schema: Object) -> None:
    """docs.kubernetes.io, "Specifying a structural schema": the API server prunes and defaults by these."""
    assert schema["type"] in ("array", "boolean", "integer", "object", "string")
    assert not {"$ref", "allOf", "anyOf", "oneOf", "not", "nullable"} & schema.keys()
    assert ("items" in schema) == (schema["type"] == "array")
    assert not ("properties" in schema and "additionalProperties" in schema)
    assert schema["type"] != "object" or path == ".metadata" or len(schema.keys() - {"type", "description"}) > 0
    for rule in schema.get("x-kubernetes-validations", []):
        assert rule.keys() == {"rule", "message"}


def test_what_is_kept_unseen_is_that_of_a_pod_only() -> None:
    unseen = [
        path.rpartition(".")[2] for path, schema in ALL.items() if "x-kubernetes-preserve-unknown-fields" in schema
    ]
    assert unseen == ["spec", "containers[]"] * len(Stage)


def test_the_controller_looks_for_this_resource() -> None:
    spec = DEFINITION["spec"]
    assert f"{spec['group']}/{VERSION['name']}" == volume_templates.API_VERSION
    assert spec["names"]["kind"] == volume_templates.KIND
    assert DEFINITION["metadata"]["name"] == f"{spec['names']['plural']}.{spec['group']}"
    assert spec["scope"] == "Cluster"


def test_both_know_the_same_values_and_names() -> None:
    assert ALL[".spec.placement"]["enum"] == list(volume_templates.Placement)
    assert ALL[".spec.identity"]["enum"] == list(volume_templates.Identity)
    assert ALL[".spec.upgrade"]["enum"] == list(volume_templates.Upgrade)
    operators = ALL[".spec.allowedNamespaces.matchExpressions[].operator"]["enum"]
    assert operators == list(label_selectors.OPERATORS)
    assert ALL[".spec.idleSeconds"]["maximum"] == volume_templates.LONGEST_IDLE
    for rule, fields in zip(
        ALL[".spec"]["x-kubernetes-validations"],
        (volume_templates.SHARING_FIELDS, provisioning_fields.FIELDS),
        strict=True,
    ):
        assert set(re.findall(r"has\(self\.(\w+)\)", rule["rule"])) == set(fields)
    assert ALL[".spec.provisioningModes[]"]["enum"] == list(Mode)
    assert ALL[".spec.volumeValidation.volumeModes[]"]["enum"] == list(VolumeMode)
    assert ALL[".spec.volumeValidation.accessModes[]"]["enum"] == list(AccessMode)
    for stage, own in provisioning_fields.RUNS.items():
        assert set(ALL[f".spec.{stage}"]["properties"]) == {*own, "podTemplate"}
    assert ALL[".spec.volumeStaging.podTemplate.spec.containers[].name"]["enum"] == [pod_rules.CONTAINER]
    assert set(ALL[".spec.parameters[]"]["properties"]) == {*template_parameters.Parameter._fields, "description"}
    (rule,) = [each["rule"] for each in ALL[".spec.parameters"]["x-kubernetes-validations"] if "exists" in each["rule"]]
    names = {*template_parameters.DRIVER_ATTRIBUTES, template_parameters.TEMPLATE_ATTRIBUTE}
    assert set(re.findall("'(.*?)'", rule)) == names


@pytest.mark.parametrize(("version", "known"), [(VERSION, ALL), (OTHER_VERSION, OF_OTHER)])
def test_columns_show_fields_that_exist(version: Object, known: dict[str, Object]) -> None:
    for column in version["additionalPrinterColumns"]:
        path = column["jsonPath"].replace("[0]", "[]")
        assert path in known or path == ".metadata.creationTimestamp"


def test_attachments_have_columns_for_all_that_makes_one() -> None:
    """As those of Mountpoint's MountpointS3PodAttachment, after which they are called."""
    names = [column["name"].upper() for column in OTHER_VERSION["additionalPrinterColumns"]]
    assert names == ["NODE", "VOLUME", "TEMPLATE", "FSGROUP", "POD", "PHASE", "WORKLOADS", "AGE"]
    assert (OTHER["spec"]["scope"], OTHER["spec"]["names"]["shortNames"]) == ("Cluster", ["mpa"])
    assert OTHER["metadata"]["name"] == f"{OTHER['spec']['names']['plural']}.{OTHER['spec']['group']}"
    assert OTHER["spec"]["group"] == DEFINITION["spec"]["group"]
    validate(OTHER)


# Templates ready to use


@pytest.fixture(params=TEMPLATES, ids=lambda path: path.stem)
def file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def manifest(file: Path) -> Object:
    (found,) = objects(file.read_text())
    return found


def rendered(manifest: Object, **attributes: str) -> list[Object]:
    """Return the pods that come out, with a value for each parameter that needs one."""
    parameters = manifest["spec"]["parameters"].items()
    needed = {name: "bucket" for name, parameter in parameters if parameter.get("required")}
    result, faults = offline.rendered([("template.yaml", manifest)], needed | attributes)
    assert faults == []
    return result


def program_of(manifest: Object, **attributes: str) -> Object:
    """Return the container that a pod gets."""
    (pod,) = rendered(manifest, **attributes)
    (container,) = pod["spec"]["initContainers"]
    assert isinstance(container, dict)
    return container


def test_a_template_is_called_as_its_file_and_listed(file: Path, manifest: Object) -> None:
    assert manifest["metadata"]["name"] == file.stem
    (kustomization,) = objects((TEMPLATES[0].parent / KUSTOMIZATION).read_text())
    assert kustomization["resources"] == [path.name for path in TEMPLATES]


def test_all_fields_of_a_template_are_in_the_schema(manifest: Object) -> None:
    known = {path for path in ALL if not path.startswith(".metadata")}
    for path in paths(manifest):
        if path.startswith((".apiVersion", ".kind", ".metadata", ".spec.volumeStaging.podTemplate.spec.")):
            continue
        assert re.sub(r"^(\.spec\.parameters)\.\w+", r"\1[]", path) in known


def paths(value: object, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, below in value.items():
            yield f"{path}.{name}"
            yield from paths(below, f"{path}.{name}")


@pytest.mark.parametrize("placement", list(volume_templates.Placement))
def test_the_pods_of_a_template_are_valid_and_restricted(manifest: Object, placement: str) -> None:
    manifest["spec"]["placement"] = placement
    pods = rendered(manifest)
    assert len(pods) == (1 if placement == "Sidecar" else 2)
    for pod in pods:
        if placement == "Shared" and pod is pods[0]:
            assert "initContainers" not in pod["spec"]
            pod["spec"]["volumes"] = [{"name": "data", "emptyDir": {}}]
        validate(pod)
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in pod["spec"]["volumes"]:
            assert volume.keys() - {"name"} <= {"csi", "emptyDir", "secret"}
        for container in containers(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context.get("runAsUser") != 0 and not context.get("privileged")
            assert is_pulled_once(container["image"])


def test_each_parameter_of_a_template_changes_something(manifest: Object) -> None:
    used = set(re.findall(r"params\.(\w+)", json.dumps(manifest["spec"]["volumeStaging"])))
    assert used == set(manifest["spec"]["parameters"])
    assert all(each["description"].endswith(".") for each in manifest["spec"]["parameters"].values())


@pytest.mark.parametrize("value", ["a,b", "a b", "$(META_URL)", "a\nb", "../x;y", "x'y"])
def test_no_parameter_of_a_template_becomes_another_option(manifest: Object, value: str) -> None:
    """Mount options are separated by commas, and kubelet replaces $(VARIABLE) in a container's arguments."""
    for name in manifest["spec"]["parameters"]:
        _, faults = offline.rendered([("template.yaml", manifest)], {"bucket": "bucket", name: value})
        assert any(name in fault for fault in faults)


def test_no_word_of_a_template_begins_with_what_a_user_says(manifest: Object) -> None:
    for name in manifest["spec"]["parameters"]:
        result, faults = offline.rendered([("template.yaml", manifest)], {"bucket": "bucket", name: "-OPTION"})
        words = [word for pod in result for word in pod["spec"]["initContainers"][0]["command"]]
        assert faults or not any(word.startswith("-OPTION") for word in words)


@pytest.mark.parametrize("name", ["gcsfuse", "goofys", "mountpoint-s3", "rclone", "s3fs", "sshfs"])
def test_a_template_runs_its_program_as_the_example_does(name: str) -> None:
    """The examples are executed on a node: tests/cluster/test_examples.py."""
    (manifest,) = objects((TEMPLATES[0].parent / f"{name}.yaml").read_text())
    (example,) = objects((EXAMPLES[0].parent / f"{name}.yaml").read_text())
    attributes = {"endpoint": "http://s3.example:9000"} if "endpoint" in manifest["spec"]["parameters"] else {}
    ours, (theirs, _) = program_of(manifest, **attributes), containers(example)

    def words(container: Object) -> set[str]:
        # What is elsewhere in a template: rclone's cache and gcsfuse's buffer.
        return {re.sub("^(--cache-dir|--temp-dir)=.*", r"\1", word) for word in container["command"]}

    assert words(theirs) <= words(ours)
    assert words(ours) - words(theirs) <= {"--vfs-cache-max-size=1024Mi"}
    for field in ("terminationMessagePath", "envFrom", "image"):
        assert ours.get(field) == theirs.get(field)


def test_what_a_user_leaves_out_is_left_out() -> None:
    (manifest,) = objects((TEMPLATES[0].parent / "mountpoint-s3.yaml").read_text())
    assert program_of(manifest)["command"] == [
        *("sh", "-c", 'mkdir -p "$2" && exec "$0" "$@"', "mount-s3", "bucket", "/mnt/bucket"),
        *("--foreground", "--allow-other", "--region=us-east-1"),
    ]
    assert "--prefix=photos/" in program_of(manifest, prefix="photos/")["command"]
