"""Under a container engine's seccomp profile without statmount(2), the broker says what that means."""

from __future__ import annotations

import socket
from errno import ENOSYS, EPERM
from pathlib import Path

import pytest

from fusermount3_broker.kernel import features
from fusermount3_broker.service import log
from tests.lab.broker import PROGRAM, Broker
from tests.lab.denied import LISTMOUNT, STATMOUNT, denying

pytestmark = pytest.mark.e2e

SAID = "a seccomp profile denies the broker statmount(2), which this kernel has"


@pytest.mark.skipif(not features.tells_of_one_mount(), reason="not run: this kernel has no statmount(2) to deny")
@pytest.mark.parametrize("error", [EPERM, ENOSYS])
def test_the_log_and_health_say_so(error: int) -> None:
    with Broker(command=(*denying(error, STATMOUNT, LISTMOUNT), PROGRAM)) as broker:
        (record,) = broker.records(SAID)
        assert record["priority"] == log.WARNING
        assert broker.ask("health") == f"ok, but {record['message']}\n"


def test_where_systemd_keeps_fusectl_nothing_is_lost_and_nothing_said(tmp_path: Path) -> None:
    """A filter of systemd's may deny the call, too: its releases know none that is newer."""
    notified = tmp_path / "notify.sock"
    started = ("sh", "-c", 'SYSTEMD_EXEC_PID=$$ exec "$@"', "sh", "env", f"NOTIFY_SOCKET={notified}")
    command = (*started, *denying(EPERM, STATMOUNT, LISTMOUNT), PROGRAM)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(bytes(notified))
        with Broker(command=command) as broker:
            assert broker.records(SAID) == []
            assert broker.records("Linux ")
            assert broker.ask("health") == "ok\n"


def test_where_only_an_engine_is_notified_it_is_said(tmp_path: Path) -> None:
    """Engines give a container NOTIFY_SOCKET (podman run --sdnotify=container), and keep nothing for it."""
    notified = tmp_path / "notify.sock"
    command = ("env", f"NOTIFY_SOCKET={notified}", *denying(EPERM, STATMOUNT, LISTMOUNT), PROGRAM)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as engine:
        engine.bind(bytes(notified))
        with Broker(command=command) as broker:
            assert len(broker.records(SAID)) == 1
            assert broker.ask("health").startswith(f"ok, but {SAID}")


def test_where_nothing_is_denied_nothing_is_said() -> None:
    with Broker() as broker:
        assert broker.records(SAID) == []
        assert broker.ask("health") == "ok\n"
