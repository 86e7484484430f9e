"""Test the resource VolumeTemplate: its definition is valid, and says the same as the controller."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from fusermount3_controller import pod_rules, volume_templates
from tests.kubernetes.objects import CONTROLLER, KUSTOMIZATION, Object, objects, of_files, the, validate

if TYPE_CHECKING:
    from collections.abc import Iterator

OBJECTS = of_files([path for path in sorted(CONTROLLER.glob("*.yaml")) if path.name != KUSTOMIZATION])
DEFINITION = the("CustomResourceDefinition", OBJECTS)
(VERSION,) = DEFINITION["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def schemas(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    """Yield each schema within `schema`, after its path."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from schemas(below, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from schemas(schema[name], f"{path}[]")


ALL = dict(schemas(SCHEMA))


def test_it_is_valid_and_listed() -> None:
    validate(DEFINITION)
    (kustomization,) = objects((CONTROLLER / KUSTOMIZATION).read_text())
    assert kustomization["resources"] == [path.name for path in CONTROLLER.glob("*.yaml") if path.name != KUSTOMIZATION]


@pytest.mark.parametrize("path", ALL)
def test_each_schema_is_structural(path: str) -> None:
    """docs.kubernetes.io, "Specifying a structural schema": the API server prunes and defaults by these."""
    schema = ALL[path]
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
    assert unseen == ["spec", "containers[]"]


def test_the_controller_looks_for_this_resource() -> None:
    spec = DEFINITION["spec"]
    assert f"{spec['group']}/{VERSION['name']}" == volume_templates.API_VERSION
    assert spec["names"]["kind"] == volume_templates.KIND
    assert DEFINITION["metadata"]["name"] == f"{spec['names']['plural']}.{spec['group']}"
    assert spec["scope"] == "Cluster"


def test_both_know_the_same_values_and_names() -> None:
    assert ALL[".spec.placement"]["enum"] == list(volume_templates.Placement)
    assert ALL[".spec.volumeStaging.podTemplate.spec.containers[].name"]["enum"] == [pod_rules.CONTAINER]
    assert set(ALL[".spec.parameters[]"]["properties"]) == {*volume_templates.Parameter._fields, "description"}
    (rule,) = [each["rule"] for each in ALL[".spec.parameters"]["x-kubernetes-validations"] if "exists" in each["rule"]]
    names = {*volume_templates.DRIVER_ATTRIBUTES, volume_templates.TEMPLATE_ATTRIBUTE}
    assert set(re.findall("'(.*?)'", rule)) == names


def test_columns_show_fields_that_exist() -> None:
    for column in VERSION["additionalPrinterColumns"]:
        path = column["jsonPath"].replace("[0]", "[]")
        assert path in ALL or path == ".metadata.creationTimestamp"
