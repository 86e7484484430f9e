"""Loading the configuration again: a good one counts from then on, a mistake leaves the old one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from broker import daemon, log
from broker.config import Configuration
from broker.front import Front
from broker.operations import Mounter
from broker.registry import Registry


class Reloading:
    """A front of which nothing but configuration and log is used, what it logged, and what systemd was told."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = file
        self.logged: list[tuple[int, str]] = []
        self.notified: list[str] = []
        monkeypatch.setattr("broker.daemon.daemon.notify", self.notified.append)
        configuration = Configuration(mount_max=7, source=bytes(file))
        self.front = Front(configuration, cast(Mounter, None), cast(Registry, None), self._log)

    def _log(self, priority: int, message: str, **_: Any) -> None:
        self.logged.append((priority, message))

    def __call__(self, text: str | bytes | None) -> Configuration:
        """Reload with that text in the file; return what is in force then."""
        if text is not None:
            self.file.write_bytes(text.encode() if isinstance(text, str) else text)
        daemon.reload(self.front, self.file)
        return self.front.configuration


@pytest.fixture
def reloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reloading:
    return Reloading(tmp_path / "broker.toml", monkeypatch)


def test_a_good_file_comes_into_force(reloading: Reloading) -> None:
    assert reloading("mount_max = 9\nuser_allow_other = true").mount_max == 9
    assert reloading.front.configuration.user_allow_other
    assert reloading.logged == [(log.INFO, "configuration loaded again")]


@pytest.mark.parametrize("text", ["mount_maxx = 9", "mount_max = 'x'", "mount_max =", b"# \xff", None])
def test_a_mistake_leaves_the_old_one_in_force_and_is_logged(reloading: Reloading, text: str | bytes | None) -> None:
    old = reloading.front.configuration
    assert reloading(text) is old
    ((priority, message),) = reloading.logged
    assert priority == log.ERROR
    assert message.startswith(f"configuration not loaded, the old one stays in force: {reloading.file}: ")


@pytest.mark.parametrize("text", ["mount_max = 9", "nonsense"])
def test_systemd_is_told_when_reloading_begins_and_ends(reloading: Reloading, text: str) -> None:
    reloading(text)
    assert [each.partition("\n")[0] for each in reloading.notified] == ["RELOADING=1", "READY=1"]


def test_a_mistake_that_was_corrected_is_forgotten(reloading: Reloading) -> None:
    reloading("nonsense")
    assert reloading("mount_max = 11").mount_max == 11
