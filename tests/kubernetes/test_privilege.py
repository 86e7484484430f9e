"""Test that the broker works with the capabilities left by the DaemonSet, and that no process can get others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.mounter import daemon
from tests.e2e.conftest import containers, nothing_left, settle
from tests.e2e.test_sandbox import bits, status_of
from tests.lab.broker import PROGRAM, Broker
from tests.lab.cluster import confinement
from tests.lab.images import BUSYBOX, image_tag

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e

#: The numbers of CAP_CHOWN, CAP_KILL and CAP_SETPCAP (linux/capability.h).
OF_THE_SUPERVISOR = (0, 5, 8)


@pytest.fixture
def broker() -> Iterator[Broker]:
    """A broker started with the words that precede its name in the DaemonSet's command."""
    with Broker(command=(*confinement(), PROGRAM)) as broker:
        settle(broker)
        with nothing_left(broker):
            yield broker


def may_have(pid: int) -> int:
    return int(status_of(pid)["CapBnd"], 16)


def test_no_process_can_have_more(broker: Broker) -> None:
    assert may_have(broker.process.pid) == bits(*daemon.CAPABILITIES, *OF_THE_SUPERVISOR)
    assert may_have(broker.mounter.pid) == bits(*daemon.CAPABILITIES)
    assert may_have(broker.front.pid) == 0


def test_a_filesystem_is_mounted_and_unmounted(broker: Broker) -> None:
    with containers(broker) as start:
        container = start(image_tag(BUSYBOX), user="1000:1000")
        assert container.exec(["whoamifs", "--probe", "/home/user/mnt"]).stdout.endswith("ok=yes\n")
