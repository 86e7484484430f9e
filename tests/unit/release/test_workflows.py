"""The forge's workflows do what anybody can do by hand: CI what .ci/run says, a release what `make release` does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOWS = ROOT / ".github/workflows"


def workflow(name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text())
    return found


def commands(name: str) -> list[str]:
    """Return what the only job runs."""
    (job,) = workflow(name)["jobs"].values()
    return [step["run"] for step in job["steps"] if "run" in step]


def test_ci_ends_with_the_command_of_ci() -> None:
    assert commands("ci.yml")[-1] == ".ci/run"


def test_a_tag_makes_its_release_as_a_draft() -> None:
    *_, make, create = commands("release.yml")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.fullmatch(r'make (\S+) VERSION="\$\{TAG#v\}"', make).group(1) in targets  # type: ignore[union-attr]
    assert " --draft " in create
    # YAML 1.1 reads the key `on` as true.
    assert workflow("release.yml")[True] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}


@pytest.mark.parametrize("file", sorted(WORKFLOWS.iterdir()), ids=lambda file: file.name)
def test_a_workflow_may_only_read_and_a_job_says_what_else_it_may(file: Path) -> None:
    assert workflow(file.name)["permissions"] == {"contents": "read"}
    granted = [job.get("permissions", {}) for job in workflow(file.name)["jobs"].values()]
    assert (granted == [{}]) == (file.name != "release.yml")
