"""Answers of the control socket: never longer than the client reads, whatever names callers gave their mounts."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusermount3_broker.cli import control_client
from fusermount3_broker.front import control_socket, daemon
from fusermount3_broker.front.model import Mount
from tests.unit.front.tables.test_mount_table import mount

#: The device of the mount that the tests' own process serves.
SERVED = 51


class FakeRegistry(list[Mount]):
    def reconcile(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the survey of the mounts."""

    async def refresh(_: object) -> None:
        pass

    monkeypatch.setattr("fusermount3_broker.front.connection_survey.refresh", refresh)


def open_proc(path: str, flags: int) -> int:
    return os.open(f"/proc/{path}", flags)


def listed(mounts: list[Mount]) -> list[dict[str, Any]]:
    states = SimpleNamespace(waiting=lambda _: 0)
    serving = SimpleNamespace(of=lambda mount: (os.getpid() if mount.device == SERVED else 0, 7))
    front: Any = SimpleNamespace(
        registry=FakeRegistry(mounts),
        state=lambda _: "live",
        states=states,
        serving=serving,
        open_proc=open_proc,
        borrowed={b"one": 1, b"other": 2},
    )
    answer: list[dict[str, Any]] = asyncio.run(control_socket._answer(front, SimpleNamespace(), "mounts"))  # type: ignore[arg-type]
    return answer


@pytest.mark.parametrize("byte", [b"\x01", b"\xff", b"x"])
def test_many_mounts_with_long_names_fit_into_an_answer(byte: bytes) -> None:
    long = {"mountpoint": byte * 4096, "source": byte * 4095, "type": byte.decode("latin-1") * 4095}
    answer = listed([mount(number, number, **long) for number in range(1000)])
    assert len(json.dumps(answer)) <= control_client.LONGEST_ANSWER
    assert all(each["mountpoint"] and each["request_id"] == f"r{number}" for number, each in enumerate(answer))


def test_a_mount_is_told_whole_where_there_is_room() -> None:
    (told,) = listed([mount(1, 1, mountpoint=b"/" + b"\x01" * 4095)])
    assert told["mountpoint"] == "/" + "\x01" * 4095


def test_a_mount_is_told_with_the_program_that_serves_it() -> None:
    served, unserved = listed([mount(SERVED, 1, pid=77, command="fusermount3"), mount(52, 2)])
    own = Path("/proc/self/comm").read_text().strip()
    assert (served["program_pid"], served["program_command"]) == (os.getpid(), own)
    assert (served["pid"], served["command"]) == (77, "fusermount3")
    assert (unserved["program_pid"], unserved["program_command"]) == (0, "")


def test_a_mount_is_told_with_the_volumes_that_have_it() -> None:
    told, unused = listed([mount(1, 1, share=b"k"), mount(3, 3)])
    assert (told["share"], told["borrowers"]) == ("k", ["one"])
    assert (unused["share"], unused["borrowers"]) == ("", [])


@pytest.mark.parametrize("question", ["abort", "abort ", "abort 1 2"])
def test_an_abort_of_anything_but_one_id_is_refused_with_a_reason(question: str) -> None:
    answer = asyncio.run(control_socket._answer(SimpleNamespace(), SimpleNamespace(), question))  # type: ignore[arg-type]
    assert answer == {"error": "abort takes the request ID of one mount"}


@pytest.mark.parametrize("wanted", ["1a2b", "1a2b3c4", "1a2b3c4d5", "1A2B3C4D"])
def test_a_beginning_of_an_id_is_not_enough_to_abort_a_mount(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    """The command line has resolved it, among the mounts that its user has seen."""

    class Registry(list[Any]):
        def reconcile(self) -> None:
            pass

    async def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("fusermount3_broker.front.hung_connections.abort", never)
    monkeypatch.setattr(control_socket, "_described", lambda *_: {})
    front: Any = SimpleNamespace(registry=Registry([SimpleNamespace(request_id="1a2b3c4d")]))
    answer = asyncio.run(control_socket._answer(front, SimpleNamespace(), f"abort {wanted}"))  # type: ignore[arg-type]
    assert answer == {"error": f"no live mount has the id '{wanted}'"}


def test_a_listening_socket_is_told_by_its_path_or_its_port(tmp_path: Path) -> None:
    for family, address, told in (
        (socket.AF_UNIX, str(tmp_path / "s"), str(tmp_path / "s")),
        (socket.AF_UNIX, f"\0{tmp_path}/s", f"@{tmp_path}/s"),
        (socket.AF_INET, ("127.0.0.1", 0), r"127.0.0.1:PORT"),
        (socket.AF_INET6, ("::1", 0), r"[::1]:PORT"),
    ):
        with socket.socket(family) as listener:
            listener.bind(address)
            port = "" if family == socket.AF_UNIX else str(listener.getsockname()[1])
            assert daemon._address(listener) == told.replace("PORT", port)
