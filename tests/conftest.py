"""Hooks for all tests."""

from __future__ import annotations

import os

import pytest

#: Read by grpcio when it is imported. Otherwise gRPC, once used in the process of the tests, starts its threads again
#: in each process that a test forks, and a process with threads can't enter another user namespace (unshare(2)).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip end-to-end tests, with a reason, where there is no root; in CI they fail instead."""
    if os.geteuid() == 0 or os.environ.get("CI") == "true":
        return
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.skip(reason="not run: needs root"))
