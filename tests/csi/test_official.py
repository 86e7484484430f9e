"""csi.proto declares what the official one does: every message whole, by the same names, numbers and types.

The last version with VolumeCondition has all of ours; the one after it has taken that away, and reserved its numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto

from tests.csi.protos import described

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]

#: What there is no more in the newer version.
TAKEN_AWAY = {
    "csi.v1.VolumeCondition",
    "csi.v1.VolumeCondition.abnormal",
    "csi.v1.VolumeCondition.message",
    "csi.v1.NodeGetVolumeStatsResponse.volume_condition",
    "csi.v1.NodeServiceCapability.RPC.Type.VOLUME_CONDITION",
}


@pytest.fixture(scope="module")
def ours() -> dict[str, str]:
    return declared(described(ROOT, "broker/csi/csi.proto"))


@pytest.fixture(scope="module")
def official(official_protos: dict[str, Path]) -> dict[str, dict[str, str]]:
    return {version: declared(described(path.parent, path.name)) for version, path in official_protos.items()}


def test_every_message_is_the_official_one(ours: dict[str, str], official: dict[str, dict[str, str]]) -> None:
    declared_there = official["v1.12.0"]
    messages = {name for name, what in ours.items() if what in ("message", "enum")}
    assert {"csi.v1.NodePublishVolumeRequest", "csi.v1.VolumeCapability.AccessMode.Mode"} <= messages
    whole = {name: what for name, what in declared_there.items() if name in messages or _parent(name) in messages}
    assert {name: what for name, what in ours.items() if not what.startswith("rpc")} == whole


def test_every_method_is_the_official_one(ours: dict[str, str], official: dict[str, dict[str, str]]) -> None:
    methods = {name: what for name, what in ours.items() if what.startswith("rpc")}
    assert "csi.v1.Node.NodePublishVolume" in methods
    for version in official.values():
        assert methods.items() <= version.items()
    identity = {name for name in official["v1.13.0"] if _parent(name) == "csi.v1.Identity"}
    assert identity <= methods.keys()


def test_the_newer_version_uses_no_name_or_number_otherwise(
    ours: dict[str, str], official: dict[str, dict[str, str]]
) -> None:
    newer = official["v1.13.0"]
    assert {name for name, what in ours.items() if newer.get(name) != what} == TAKEN_AWAY
    assert not TAKEN_AWAY & newer.keys()
    names = numbered(newer)
    assert all(names.get(number, name) == name for number, name in numbered(ours).items())


def numbered(declared: dict[str, str]) -> dict[tuple[str, str], str]:
    """Return the names of fields and values by where they are declared, and by which number."""
    return {(_parent(name), what.split()[0]): name for name, what in declared.items() if what[0].isdigit()}


def declared(file: FileDescriptorProto) -> dict[str, str]:
    """Return what is declared by which full name: of a field its number, label, type, and of which choice it is."""
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
