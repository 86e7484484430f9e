"""Test that csi.proto matches the official files: every message whole, with the same names, numbers and types.

It is compared with two versions: the last one with VolumeCondition, and the next one, which has VolumeHealth instead.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto

from tests.csi.protos import described

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ROOT = Path(__file__).parents[2]

#: Declarations that the newer version lacks.
TAKEN_AWAY = {
    "csi.v1.VolumeCondition",
    "csi.v1.VolumeCondition.abnormal",
    "csi.v1.VolumeCondition.message",
    "csi.v1.NodeGetVolumeStatsResponse.volume_condition",
    "csi.v1.NodeServiceCapability.RPC.Type.VOLUME_CONDITION",
}


@pytest.fixture(scope="module")
def ours() -> dict[str, str]:
    return declared(described(ROOT / "broker", "fusermount3_broker/csi/csi.proto"))


@pytest.fixture(scope="module")
def official(official_protos: dict[str, Path]) -> list[dict[str, str]]:
    """The declarations of the older and of the newer version."""
    older, newer = (
        declared(described(official_protos[version].parent, official_protos[version].name))
        for version in ("v1.12.0", "v1.13.0")
    )
    return [older, newer]


def test_the_official_versions_differ_only_in_what_one_of_them_has(official: list[dict[str, str]]) -> None:
    older, newer = official
    assert {name for name in older.keys() & newer.keys() if older[name] != newer[name]} == set()
    names = numbered(newer)
    assert {name for number, name in numbered(older).items() if names.get(number, name) != name} == set()


def test_every_message_is_the_official_one(ours: dict[str, str], official: list[dict[str, str]]) -> None:
    older, newer = official
    messages = {name for name, what in ours.items() if what in ("message", "enum")}
    assert {"csi.v1.NodePublishVolumeRequest", "csi.v1.VolumeCapability.AccessMode.Mode"} <= messages
    there = {**older, **newer}
    whole = {name: what for name, what in there.items() if name in messages or _parent(name) in messages}
    assert {name: what for name, what in ours.items() if not what.startswith("rpc")} == whole
    assert ours.keys() - newer.keys() == TAKEN_AWAY


def test_every_method_is_the_official_one(ours: dict[str, str], official: list[dict[str, str]]) -> None:
    _, newer = official
    methods = {name: what for name, what in ours.items() if what.startswith("rpc")}
    assert "csi.v1.Node.NodePublishVolume" in methods
    assert methods.items() <= newer.items()
    assert {name for name in newer if _parent(name) == "csi.v1.Identity"} <= methods.keys()


def numbered(declared: dict[str, str]) -> dict[tuple[str, str], str]:
    """Return the names of fields and values, keyed by the name of the parent and the number."""
    return {(_parent(name), what.split()[0]): name for name, what in declared.items() if what[0].isdigit()}


def declared(file: FileDescriptorProto) -> dict[str, str]:
    """Return all declarations by full name; a field's has its number, label and type, and the name of its oneof."""
    found: dict[str, str] = {}
    for message in file.message_type:
        _declared_in(message, file.package, found)
    for enum in file.enum_type:
        _declared_by(enum, file.package, found)
    for service in file.service:
        for method in service.method:
            what = f"rpc {method.input_type} {method.output_type} {method.client_streaming} {method.server_streaming}"
            found[f"{file.package}.{service.name}.{method.name}"] = what
    return found


def _declared_in(message: DescriptorProto, package: str, found: dict[str, str]) -> None:
    path = f"{package}.{message.name}"
    found[path] = "message"
    for field in message.field:
        choice = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
        found[f"{path}.{field.name}"] = f"{field.number} {field.label} {field.type} {field.type_name} {choice}"
    for nested in message.nested_type:
        _declared_in(nested, path, found)
    for enum in message.enum_type:
        _declared_by(enum, path, found)


def _declared_by(enum: EnumDescriptorProto, package: str, found: dict[str, str]) -> None:
    path = f"{package}.{enum.name}"
    found[path] = "enum"
    for value in enum.value:
        found[f"{path}.{value.name}"] = f"{value.number}"


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
