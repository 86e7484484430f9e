"""The sockets of gRPC servers are removed at the end, but not those of somebody else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from fusermount3_broker.service import grpc_server

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("replaced", [False, True])
def test_only_its_own_socket_is_removed(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "csi.sock"

    async def serve() -> None:
        server = grpc.aio.server()
        with grpc_server.listening(server, path):
            await server.start()
            if replaced:  # by a later broker's
                path.unlink()
                path.touch()

    asyncio.run(serve())
    assert path.exists() == replaced
