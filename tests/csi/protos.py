"""Descriptions of .proto files, as the compiler of grpcio-tools makes them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

_WELL_KNOWN = Path(protoc.__file__).parent / "_proto"


def described(root: Path, name: str) -> FileDescriptorProto:
    """Return what the file `name`, a path below `root`, declares."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "set"
        arguments = ["protoc", f"-I{root}", f"-I{_WELL_KNOWN}", f"--descriptor_set_out={output}", name]
        assert protoc.main(arguments) == 0
        (file,) = FileDescriptorSet.FromString(output.read_bytes()).file
    return file
