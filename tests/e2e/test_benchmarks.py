"""Short runs of all parts of the benchmarks: the results must be complete; the times are not checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import latency, metafuse, page, results
from benchmarks.__main__ import PAGE, STORED, in_private_namespace
from benchmarks.latency import META_FUSE
from benchmarks.results import GENUINE, PROXY
from tests.e2e.conftest import fuse_mounts_of_host
from tests.lab.programs import oldclient

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SOURCES = Path(__file__).parents[2]


def test_a_quick_run_measures_all_parts_and_leaves_nothing(tmp_path: Path) -> None:
    mounts, documents = fuse_mounts_of_host(), (PAGE.file.read_bytes(), STORED.read_bytes())
    stored = tmp_path / "results.json"
    command: list[str | Path] = [sys.executable, "-m", "benchmarks", "--quick", "--json", stored]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, timeout=600)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    measured = results.load(stored)
    assert measured.quick
    assert page.rendered(measured).count("### ") == 5
    assert measured.latency
    assert {GENUINE, PROXY} <= set(measured.latency.exec_to_descriptor)
    assert META_FUSE in {**measured.latency.exec_to_descriptor, **measured.latency.not_measured}
    assert measured.callers
    assert [each.failed() for each in measured.callers] == [0, 0, 0]
    for title in ("The n-th mount", "8 callers at once", "Another caller, while a container", "A hundred at once"):
        assert f"\n{title}" in done.stdout, "a part did not run"
    assert fuse_mounts_of_host() == mounts
    assert (PAGE.file.read_bytes(), STORED.read_bytes()) == documents, "it wrote without --write"


def test_where_the_proxy_of_meta_fuse_csi_plugin_can_be_had_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that speaks its protocol replaces it: its module is not available everywhere."""
    stand_in = oldclient()
    monkeypatch.setattr(metafuse, "install", lambda _: stand_in)
    measured = in_private_namespace(lambda: latency.measure(3))
    assert list(measured.exec_to_descriptor) == [GENUINE, PROXY, META_FUSE]
    assert measured.exec_to_descriptor[META_FUSE].calls == 3
    assert measured.not_measured == {}
