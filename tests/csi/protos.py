"""Descriptors of .proto files, from the compiler of grpcio-tools."""

from __future__ import annotations

import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

_WELL_KNOWN = Path(protoc.__file__).parent / "_proto"


def described(root: Path, name: str) -> FileDescriptorProto:
    """Return the descriptor of the file `name`, a path below `root`."""
    return described_with_imports(root, name)[-1]


def described_with_imports(root: Path, name: str) -> list[FileDescriptorProto]:
    """Return the descriptor of this file, preceded by those of all its imports."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "set"
        arguments = [f"-I{root}", f"-I{_WELL_KNOWN}", "--include_imports", f"--descriptor_set_out={output}", name]
        assert protoc.main(["protoc", *arguments]) == 0
        return list(FileDescriptorSet.FromString(output.read_bytes()).file)
