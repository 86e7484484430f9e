"""Answers of the control socket: never longer than the client reads, whatever names callers gave their mounts."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from fusermount3_broker.cli import control_client
from fusermount3_broker.front import control_socket
from fusermount3_broker.front.model import Mount
from tests.unit.front.tables.test_mount_table import mount


class FakeRegistry(list[Mount]):
    def reconcile(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the survey of the mounts."""

    async def refresh(_: object) -> None:
        pass

    monkeypatch.setattr("fusermount3_broker.front.connection_survey.refresh", refresh)


def listed(mounts: list[Mount]) -> list[dict[str, Any]]:
    states = SimpleNamespace(waiting=lambda _: 0)
    front: Any = SimpleNamespace(registry=FakeRegistry(mounts), state=lambda _: "live", states=states)
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
