"""A process that a test forks has what the test gives it, and nothing that a library adds."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.lab.forked import ending_afterwards
from tests.lab.load import Beside


def test_a_forked_process_has_one_thread_though_grpc_was_used(tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    server.start()
    try:
        forked = [fork() for _ in range(20)]
    finally:
        server.stop(None).wait()
    assert [os.waitpid(pid, 0)[1] for pid in forked] == [0] * len(forked)


class Guarded:
    """Garbage that only the collector can find. What removes it counts: it might have to wait for a thread."""

    removed = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Guarded.removed += 1


def test_a_forked_process_does_not_collect_the_garbage_of_the_tests() -> None:
    gc.collect()
    gc.disable()
    try:
        Guarded()
        if (child := os.fork()) == 0:
            with ending_afterwards():
                gc.collect()
                assert Guarded.removed == 0
                Guarded()
                gc.collect()
                assert Guarded.removed == 1, "its own it collects"
        assert os.waitpid(child, 0)[1] == 0
    finally:
        gc.enable()


def test_a_process_beside_that_can_not_answer_ends_and_does_not_go_on_as_the_test(tmp_path: Path) -> None:
    test = os.getpid()
    try:
        beside = Beside(lambda: lambda: None)  # can't be pickled
    finally:
        if os.getpid() != test:
            (tmp_path / "went on").touch()
            os._exit(1)
    with pytest.raises(AssertionError, match="the process was killed"):
        beside.result()
    assert not (tmp_path / "went on").exists()


def fork() -> int:
    """Fork a process that fails if it has other threads; return its PID."""
    if pid := os.fork():
        return pid
    with ending_afterwards():
        assert len(list(Path("/proc/self/task").iterdir())) == 1
    raise AssertionError("unreachable")
