"""csi_pb2.py and csi_pb2.pyi match csi.proto; `make csi` regenerates them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from fusermount3_broker.csi import csi_pb2
from tests.csi.protos import described

BROKER = Path(__file__).parents[3] / "broker"


@pytest.fixture(scope="module")
def declared() -> FileDescriptorProto:
    """The descriptor that this machine's compiler generates from csi.proto."""
    return described(BROKER, "fusermount3_broker/csi/csi.proto")


def test_the_messages_are_those_of_the_source(declared: FileDescriptorProto) -> None:
    generated = FileDescriptorProto()
    csi_pb2.DESCRIPTOR.CopyToProto(generated)
    for field in (field for message in messages(declared) for field in message.field):
        field.ClearField("json_name")  # compilers differ in whether they write the default name
    for field in (field for message in messages(generated) for field in message.field):
        field.ClearField("json_name")
    assert generated == declared


def test_the_types_are_those_of_the_source(declared: FileDescriptorProto) -> None:
    tree = ast.parse((BROKER / "fusermount3_broker/csi/csi_pb2.pyi").read_text())
    typed = {
        f"{path}.{name.target.id}"
        for path, node in classes(tree, "")
        for name in node.body
        if isinstance(name, ast.AnnAssign) and isinstance(name.target, ast.Name) and name.target.id.islower()
    }
    assert typed == {f"{path}.{field.name}" for path, message in paths(declared) for field in message.field}


def test_the_generated_code_asks_for_no_new_protobuf() -> None:
    """Code of newer compilers requires an equally new protobuf; distributions have 3.21."""
    assert "runtime_version" not in (BROKER / "fusermount3_broker/csi/csi_pb2.py").read_text()


def messages(file: FileDescriptorProto) -> list[DescriptorProto]:
    return [message for _, message in paths(file)]


def paths(file: FileDescriptorProto) -> list[tuple[str, DescriptorProto]]:
    """Return all messages with their names, for example ``VolumeCapability.MountVolume``."""
    found = [(message.name, message) for message in file.message_type]
    for path, message in found:  # the list grows during the loop
        found += [(f"{path}.{nested.name}", nested) for nested in message.nested_type]
    return found


def classes(node: ast.Module | ast.ClassDef, path: str) -> list[tuple[str, ast.ClassDef]]:
    """Return all classes with their names."""
    found = [(f"{path}{child.name}", child) for child in node.body if isinstance(child, ast.ClassDef)]
    return found + [below for name, child in found for below in classes(child, f"{name}.")]
