"""constraints.txt pins each package that the project requires, and the tests run with these versions."""

from __future__ import annotations

import configparser
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]


def requirements() -> list[Requirement]:
    """Return the requirements in setup.cfg, for users, the controller, tests and the site."""
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / "setup.cfg")
    extras = configuration["options.extras_require"]
    lists = [configuration["options"]["install_requires"], *(extras[name] for name in ("controller", "test", "docs"))]
    return [Requirement(line) for each in lists for line in each.split("\n") if line]


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(each.name): each for each in found}


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_one_version_is_named_that_will_do_and_is_installed(requirement: Requirement) -> None:
    (specifier,) = constraints()[canonicalize_name(requirement.name)].specifier
    assert specifier.operator == "=="
    assert requirement.specifier.contains(specifier.version)
    assert version(requirement.name) == specifier.version, "`make venv` installs what constraints.txt says"
