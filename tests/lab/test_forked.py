"""A process that a test forks has what the test gives it, and nothing that a library adds."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from tests.lab.forked import ending_afterwards


def test_a_forked_process_has_one_thread_though_grpc_was_used(tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    server.start()
    try:
        forked = [fork() for _ in range(20)]
    finally:
        server.stop(None).wait()
    assert [os.waitpid(pid, 0)[1] for pid in forked] == [0] * len(forked)


def fork() -> int:
    """Fork a process that fails if it has other threads; return its PID."""
    if pid := os.fork():
        return pid
    with ending_afterwards():
        assert len(list(Path("/proc/self/task").iterdir())) == 1
    raise AssertionError("unreachable")
