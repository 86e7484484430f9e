"""Test the report of `make test-cluster-long`, and that nothing else runs these tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.section import Section
from tests.cluster.long import __main__ as program
from tests.cluster.long import report
from tests.cluster.long.__main__ import DIRECTORY, REPORT
from tests.cluster.long.report import Case

ROOT = Path(__file__).parents[3]
#: For pytest: what it prints is read here, whatever options the tests themselves have been given.
PLAIN = {**os.environ, "PYTEST_ADDOPTS": ""}
NODE = {
    "Kubernetes": "1.34.4",
    "containerd": "2.1",
    "runc": "1.3",
    "crun": "1.2",
    "Linux": "6.18",
    "processors": "2",
    "minutes": "50",
}
TEST = """
import pytest

def test_pods_start(record_property, record_testsuite_property):
    record_testsuite_property("Linux", "6.18")
    record_property("pods", 109)

@pytest.mark.parametrize("name", ["eager"])
def test_it_fails(name, record_property):
    record_property("failed", 3)
    assert False

def test_it_can_not_run():
    pytest.skip("not run: no | network")
"""


def test_a_row_for_each_test() -> None:
    results = [
        Case("test_pods_start", "passed", [("pods", "109"), ("seconds", "200")]),
        Case("test_a_crash[eager]", "failed"),
        Case("test_crun", "not run", reason="not run: no | network"),
    ]
    assert report.markdown(NODE, results) == (
        "Kubernetes 1.34.4, containerd 2.1, runc 1.3, crun 1.2, Linux 6.18, 2 processors; 50 minutes.\n\n"
        "| test | result | figures |\n"
        "| --- | --- | --- |\n"
        "| pods start | passed | pods: 109; seconds: 200 |\n"
        "| a crash: eager | **failed** |  |\n"
        "| crun | not run: no \\| network |  |\n"
    )


def test_it_is_what_pytest_has_written(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    file = tmp_path / "junit.xml"
    pytest_ = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", f"--junitxml={file}"]
    subprocess.run([*pytest_, tmp_path], cwd=tmp_path, capture_output=True, env=PLAIN)
    assert report.about(file) == report.about(file, file) == {"Linux": "6.18", "minutes": "0"}
    passed, failed, skipped = report.cases(file)
    assert passed == Case("test_pods_start", "passed", [("pods", "109")], module="test_it")
    assert (failed.name, failed.result, failed.figures) == ("test_it_fails[eager]", "failed", [("failed", "3")])
    assert (skipped.result, skipped.reason) == ("not run", "not run: no | network")


def test_parts_make_a_report_only_if_none_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- written by it -->\n<!-- end of what it writes -->\n")
    monkeypatch.setattr(program, "REPORT", Section(page, "it"))
    parts = []
    for path in sorted(DIRECTORY.glob("test_*.py")):
        parts.append(tmp_path / f"{path.stem}.xml")
        properties = "".join(f'<property name="{name}" value="{value}"/>' for name, value in NODE.items())
        case = f'<testcase name="test_it" classname="tests.cluster.long.{path.stem}"/>'
        suite = f'<testsuite time="60"><properties>{properties}</properties>{case}</testsuite>'
        parts[-1].write_text(f"<testsuites>{suite}</testsuites>")
    assert program.main([str(each) for each in parts[1:]]) == 1
    assert parts[0].stem in capsys.readouterr().err
    assert program.main([str(each) for each in parts]) == 0
    assert page.read_text().count("| it | passed |") == len(parts)
    assert f" {len(parts)} minutes" in page.read_text()


def test_the_page_has_a_place_for_it() -> None:
    REPORT.read()


@pytest.mark.parametrize("words", [[], ["tests/cluster"]])
def test_no_other_command_runs_these_tests(words: list[str]) -> None:
    folder = DIRECTORY.relative_to(ROOT)
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider"]
    collected = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, env=PLAIN).stdout
    assert "tests/cluster/test_examples.py::" in collected
    assert f"{folder}/" not in collected


def test_their_own_command_runs_all_of_them() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider", str(DIRECTORY)]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=PLAIN).stdout
    found = set(re.findall(r"^(tests/cluster/long/\w+\.py)::", collected, re.MULTILINE))
    assert found == {str(path.relative_to(ROOT)) for path in DIRECTORY.glob("test_*.py")}
