"""Hooks for all tests."""

from __future__ import annotations

import gc
import os

import pytest

#: Read by grpcio when it is imported. Otherwise gRPC, once used in the process of the tests, starts its threads again
#: in each process that a test forks, and a process with threads can't enter another user namespace (unshare(2)).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
#: A forked process collects only its own garbage. That of the tests has gRPC's channels, and what closes them may wait
#: for ever for a lock that another thread held when the process was forked.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip end-to-end tests, with a reason, where there is no root; in CI they fail instead."""
    if os.geteuid() == 0 or os.environ.get("CI") == "true":
        return
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.skip(reason="not run: needs root"))
