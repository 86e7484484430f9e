"""``--wait-unused``: asks until nobody uses the volume, and says it if that takes too long."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fusermount3_proxy import cli, retirement, wire
from tests.unit.fakes import FakeBroker, FakeClock, hang_up, reply

BUSY = reply(wire.Reply(b"1a2b", errno.EBUSY, b"volumes of other pods that use the filesystem: 2"))
FREE = reply(wire.Reply(b"1a2b"))


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    environment = {b"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": bytes(tmp_path / "socket")}
    monkeypatch.setattr(retirement, "environ", environment)
    return tmp_path / "socket"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch, retirement)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(cli, "argv", ["fusermount3-proxy", "--wait-unused", *words])
    return cli.main()


def test_it_ends_when_nobody_uses_the_volume(
    address: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with FakeBroker(address, BUSY, hang_up, BUSY, FREE) as broker:
        assert run(monkeypatch) == 0
    assert [type(each) for each in broker.requests] == [wire.UnusedRequest] * 4
    assert clock.pauses == [1.0] * 3
    assert capfd.readouterr() == ("", "")


def test_it_says_that_somebody_still_does(
    address: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with FakeBroker(address, BUSY, BUSY, BUSY):
        assert run(monkeypatch, "--timeout", "2") == 1
    assert clock.pauses == [1.0, 1.0]
    assert capfd.readouterr().err == (
        "fusermount3-proxy: volumes of other pods that use the filesystem: 2, waited 2 seconds\n"
    )


def test_without_a_broker_it_waits_too(
    address: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--timeout", "1") == 1
    assert len(clock.pauses) == 1
    assert f"no broker at {address}: No such file or directory, waited 1 second" in capfd.readouterr().err


def test_a_refusal_is_told_at_once(
    address: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with FakeBroker(address, reply(wire.Reply(b"1a2b", errno.EACCES, b"no"))):
        assert run(monkeypatch) == 1
    assert clock.pauses == []
    assert capfd.readouterr().err == "fusermount3-proxy: no\nfusermount3-proxy: broker request 1a2b\n"


@pytest.mark.parametrize(
    ("words", "said"), [(["x"], "extra argument: x"), (["--timeout", "x"], "invalid number of seconds: 'x'")]
)
def test_a_mistake_is_named(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words) == 1
    assert said in capfd.readouterr().err


def test_it_says_how_it_is_called(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "-h") == 0
    assert capfd.readouterr() == (retirement.USAGE.decode(), "")
