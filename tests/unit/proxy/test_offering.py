"""``--offer-device``: offers a device again and again, until the broker refuses it or a signal comes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fusermount3_proxy import cli, client, offering, wire
from tests.unit.fakes import FakeBroker, FakeClock, reply

DONE = reply(wire.Reply(b"1a2b"))
REFUSED = reply(wire.Reply(b"1a2b", errno.EBUSY, b"another program of the pod offers a device"))


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path at which it looks for the broker."""
    monkeypatch.setattr(offering, "environ", {b"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": bytes(tmp_path / "socket")})
    monkeypatch.setattr(offering, "signal", lambda *_: None)
    return tmp_path / "socket"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(cli, "argv", ["fusermount3-proxy", "--offer-device", *words])
    return cli.main()


def test_a_broker_that_comes_back_gets_the_device_again(
    address: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offering, "sleep", lambda _: None)
    (tmp_path / "disk").touch()
    with FakeBroker(address, DONE, DONE, REFUSED) as broker:
        assert run(monkeypatch, str(tmp_path / "disk")) == 1
    assert [type(each) for each in broker.requests] == [wire.DeviceRequest] * 3
    assert capfd.readouterr().err == (
        "fusermount3-proxy: another program of the pod offers a device\nfusermount3-proxy: broker request 1a2b\n"
    )


@pytest.mark.usefixtures("address")
def test_a_device_that_cannot_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(tmp_path / "disk")) == 1
    said = f"fusermount3-proxy: can't open {tmp_path}/disk: No such file or directory\n"
    assert capfd.readouterr().err == said


@pytest.mark.usefixtures("address")
def test_without_a_broker_it_says_what_it_could_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    FakeClock(monkeypatch, client)
    (tmp_path / "disk").touch()
    assert run(monkeypatch, str(tmp_path / "disk")) == 1
    assert "waited 600 seconds for it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "exactly one device is required"), (["a", "b"], "exactly one device"), (["--x", "a"], "option '--x'")],
)
def test_a_mistake_is_named(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words) == 1
    assert said in capfd.readouterr().err


def test_it_says_how_it_is_called(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "-h") == 0
    assert capfd.readouterr() == (offering.USAGE.decode(), "")
