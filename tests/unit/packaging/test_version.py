"""The version is defined in fusermount3_proxy/__init__.py; all files that repeat it have the same."""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from fusermount3_proxy import __version__

ROOT = Path(__file__).parents[3]
NUMBER = r"(\d+\.\d+\.\d+)"
#: By file: the text around the version, and its number of occurrences. A new version changes these files.
STATED = {
    "debian/changelog": (rf"\Afusermount3-proxy \({NUMBER}\) ", 1),
    "packaging/kubernetes/chart/Chart.yaml": (rf"^(?:version|appVersion): {NUMBER}$", 2),
    "packaging/kubernetes/base/kustomization.yaml": (rf"- name: fusermount3-broker\n +newTag: {NUMBER}$", 1),
    "packaging/kubernetes/device-plugin/kustomization.yaml": (rf"- name: fusermount3-broker\n +newTag: {NUMBER}$", 1),
    "packaging/kubernetes/device-plugin-cdi/kustomization.yaml": (
        rf"- name: fusermount3-broker\n +newTag: {NUMBER}$",
        1,
    ),
    "packaging/kubernetes/metrics/kustomization.yaml": (rf"- name: fusermount3-broker\n +newTag: {NUMBER}$", 1),
    "docs/containers.md": (rf"localhost/fusermount3-(?:proxy|broker):{NUMBER}\b", 3),
    "docs/kubernetes.md": (rf"localhost/fusermount3-broker:{NUMBER}\b", 1),
    "docs/troubleshooting.md": (rf"^fusermount3-proxy version: {NUMBER}$", 1),
}


@pytest.mark.parametrize(("file", "pattern", "times"), [(file, *stated) for file, stated in STATED.items()])
def test_the_same_version_is_in(file: str, pattern: str, times: int) -> None:
    assert re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE) == [__version__] * times


def test_the_latest_release_in_the_change_log_is_debians() -> None:
    released = re.findall(rf"^## \[{NUMBER}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    date = re.findall(r"^ -- .*>  (.*)$", (ROOT / "debian/changelog").read_text(), re.MULTILINE)[0]
    assert released[0] == (__version__, parsedate_to_datetime(date).date().isoformat())
