"""Hooks for all tests."""

from __future__ import annotations

import gc
import os
import signal

import pytest

#: Wherever a test waits for the fuzz engine, it runs beside the session; a session of several processes has one.
pytest_plugins = ["tests.fuzz.background"]

#: `make site-check` and `make journeys` run these, before each release: a browser, and whole hosts. pytest ignores no
#: directory that it is told.
collect_ignore = ["site", "journeys"]

#: Read by grpcio when it is imported. Otherwise gRPC, once used in the process of the tests, starts its threads again
#: in each process that a test forks, and a process with threads can't enter another user namespace (unshare(2)).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
#: A forked process collects only its own garbage. That of the tests has gRPC's channels, and what closes them may wait
#: for ever for a lock that another thread held when the process was forked.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_configure() -> None:
    """Have the signals that end a process end a run as Ctrl-C does: fixtures remove what they have made."""
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as in the background of a script
            signal.signal(number, _interrupt)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(_number: int, _frame: object) -> None:
    """Interrupt what runs, but only once: another signal, such as that of timeout(1), would interrupt the removal."""
    for number in _ENDING:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the programs that are executed inherit
    raise KeyboardInterrupt


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip end-to-end tests, with a reason, where there is no root; in CI they fail instead."""
    if os.geteuid() == 0 or os.environ.get("CI") == "true":
        return
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.skip(reason="not run: needs root"))
