"""Test that a failed download is not a failure of the callers, but fails the run in CI."""

from __future__ import annotations

import subprocess

import pytest

from tests.callers.build import NotReachable, downloading
from tests.callers.conftest import not_run, or_not_run
from tests.lab.commands import run


def test_a_download_that_fails_is_not_reachable() -> None:
    with pytest.raises(NotReachable, match=r"(?s)crates: .*no route"), downloading("crates"):
        run(["sh", "-c", "echo no route; exit 1"])


def test_a_download_that_hangs_is_not_reachable() -> None:
    with pytest.raises(NotReachable), downloading("crates"):
        raise subprocess.TimeoutExpired("cargo", 1)


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError), downloading("crates"):
        _ = 1 / 0


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_what_is_not_run_fails_in_ci_only(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="not run: crates: no route"):
        not_run("crates: no route")
    with pytest.raises(outcome, match="not run: crates: no route"), or_not_run():
        raise NotReachable("crates: no route")
