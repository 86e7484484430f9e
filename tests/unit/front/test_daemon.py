"""The front's start: how many connections the descriptors allow, and what the log says if these are too few."""

from __future__ import annotations

import re
from pathlib import Path

from fusermount3_broker.front import daemon
from fusermount3_broker.service import log
from tests.unit.fronts import FrontWithoutMounter


def told(directory: Path, descriptors: int) -> list[str]:
    directory.mkdir()
    scene = FrontWithoutMounter(directory)
    daemon._limit_connections(scene.front, descriptors)
    return scene.logged


def test_too_few_descriptors_are_told_with_a_number_that_is_enough(tmp_path: Path) -> None:
    (message,) = told(tmp_path / "few", 1024)
    assert message.startswith(
        f"{log.WARNING} no more than 167 connections, and not max_connections = 2048: there are only 1024 descriptors; "
    )
    (first, second) = map(int, re.findall("(?:LimitNOFILE|--ulimit=nofile)=([0-9]+)", message))
    assert first == second
    assert told(tmp_path / "enough", first) == []
    assert len(told(tmp_path / "too few", first - 2)) == 1
