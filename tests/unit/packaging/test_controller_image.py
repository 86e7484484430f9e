"""What is in the controller's image: all that the controller imports."""

from __future__ import annotations

import os
import re
import runpy
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.unit.test_imports import OF_CONTROLLER, ROOT, imports, in_broker, libraries, reach, source_of

SCRIPT = (ROOT / "packaging/container/build-controller").read_text()
WHEELS = runpy.run_path(str(ROOT / "packaging/container/controller_wheels.py"))


def test_its_libraries_are_those_that_are_imported() -> None:
    imported = set().union(*(libraries(imports(file)) for file in OF_CONTROLLER)) - set(sys.stdlib_module_names)
    required = {re.split("[<>=]", each)[0].lower() for each in WHEELS["requirements"]()}
    # lightkube brings httpx2, whose exceptions it raises.
    found = [set(map(_normalized, packages_distributions()[name])) for name in imported - {"httpx2"}]
    assert all(each & required for each in found)
    assert required <= set().union(*found)


def _normalized(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def test_its_modules_are_those_that_are_imported() -> None:
    modules = set().union(*(reach(f"fusermount3_controller.{file.stem}") for file in OF_CONTROLLER))
    files = {source.relative_to(ROOT) for name in modules if (source := source_of(name)) is not None}
    copied = [Path(each) for each in re.findall(r'^ +cp (?:-r )?"\$top/(\S+)"', SCRIPT, re.MULTILINE)]
    assert [each for each in files if not any(each.is_relative_to(whole) for whole in copied)] == []
    assert {name for name in modules if in_broker(name)} >= {"fusermount3_broker.messages.untrusted_text"}


def test_wheels_are_those_of_the_architecture_that_is_asked_for() -> None:
    only, *platforms = WHEELS["options"]("arm64")
    assert only == "--only-binary=:all:"
    assert {"--platform=manylinux2014_aarch64", "--platform=manylinux_2_28_aarch64"} <= set(platforms)
    assert all(each.endswith("_aarch64") for each in platforms)
    assert WHEELS["options"](None)[1].endswith(f"_{os.uname().machine}")


def test_pip_is_told_no_path_of_the_machine_which_it_would_record(tmp_path: Path) -> None:
    for name in ("google_re2-1.1.20251105-1-cp311-cp311-manylinux_2_26_x86_64.whl", "jinja2-3.1.6-py3-none-any.whl"):
        (tmp_path / name).touch()
    assert WHEELS["pinned"](tmp_path) == ["google_re2==1.1.20251105", "jinja2==3.1.6"]
    (install,) = re.findall(r'"\$PIP" install (.*)', SCRIPT)
    assert ".whl" not in install
