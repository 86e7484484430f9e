"""What `make wheel` leaves in its directory from earlier runs: nothing that an upload of all of it should not have."""

from __future__ import annotations

import subprocess
from pathlib import Path

from fusermount3_proxy import __version__

ROOT = Path(__file__).parents[3]


def test_only_this_releases_wheels_for_other_architectures_stay(tmp_path: Path) -> None:
    name = f"fusermount3_proxy-{__version__}"
    other = f"{name}-py3-none-manylinux_2_17_aarch64.whl"
    files = [
        f"{name}.tar.gz",
        f"{name}-py3-none-manylinux_2_17_x86_64.whl",
        other,
        "fusermount3_proxy-0.0.1.tar.gz",
        "fusermount3_proxy-0.0.1-py3-none-manylinux_2_17_aarch64.whl",
    ]
    for file in files:
        (tmp_path / file).touch()
    for _ in range(2):
        subprocess.run(["make", "--silent", "empty-dist", f"DIST={tmp_path}", "ARCH=amd64"], cwd=ROOT, check=True)
        assert [path.name for path in tmp_path.iterdir()] == [other]
    subprocess.run(["make", "--silent", "empty-dist", f"DIST={tmp_path}/none"], cwd=ROOT, check=True)
