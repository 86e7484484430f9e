"""Plugin of pytest, with `tests`: an interrupted run tears all of its tests down.

pytest-xdist kills its processes ten seconds after it has told them to end; execnet, which runs them, interrupts each
after five, be it in the middle of a teardown, and ends it after another ten. What their fixtures have started would
stay. Here each process is interrupted once, soon, and has all the time that it needs then.
"""

from __future__ import annotations

import os
import signal

from execnet.gateway_base import WorkerGateway
from xdist.workermanage import NodeManager  # type: ignore[import-untyped]  # it has no types

#: Seconds that a process has to end: to tear down what the fixtures of one test file have made.
PATIENCE = 300
#: Seconds after which a process that has not ended is interrupted: longer than one needs that has run its last test.
_SOON = 1
_METHOD = "_terminate_execution"


def pytest_configure() -> None:
    NodeManager.EXIT_TIMEOUT = PATIENCE + 2 * _SOON
    assert hasattr(WorkerGateway, _METHOD), "another release of execnet"
    setattr(WorkerGateway, _METHOD, _terminate_execution)


def _terminate_execution(gateway: WorkerGateway) -> None:
    """In a process of pytest-xdist: have the tests end, and wait for that."""
    gateway._execpool.trigger_shutdown()
    if gateway._execpool.waitall(_SOON):
        return
    os.kill(os.getpid(), signal.SIGINT)
    if not gateway._execpool.waitall(PATIENCE):
        os._exit(1)
