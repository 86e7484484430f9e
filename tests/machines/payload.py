"""What a machine gets: the sources, the proxy, FUSE programs, the release's packages, and what to run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab import debian, programs
from tests.lab.broker import PROXY
from tests.lab.commands import run

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]

#: Executed when the machine has booted. The sources are copied, because Python keeps its bytecode beside them.
_RUN = """\
cp --archive /payload/main /srv/main
cd /srv/main
uname --kernel-release > /results/kernel
dpkg --install /payload/ours/fusermount3-broker_*.deb > /results/dpkg 2>&1 || cat /results/dpkg
export PYTHONPATH=/srv/main:/srv/main/broker
export FUSERMOUNT3PROXY_CACHE=/srv/cache FUSERMOUNT3PROXY_TEST_PROGRAMS=/payload/programs
export FUSERMOUNT3PROXY_TEST_SLOWNESS=5
cp tests/machines/lines.py /usr/lib/python3/dist-packages/recorded_lines.py
python3 -c 'from tests.machines import branches; branches.create("/run/lines")'
echo 'import recorded_lines; recorded_lines.record("/run/lines")' > /usr/lib/python3/dist-packages/recorded_lines.pth
python3 -m pytest -p no:cacheprovider --color=no --verbose --junitxml=/results/junit.xml {selection} {others}
cp --recursive /run/lines /results
journalctl --no-pager --output=short-monotonic > /results/journal
"""
#: Tests that are not for a machine: one executes a branch by pretending that the kernel lacks a feature, the other
#: needs programs of other releases.
_NOT_HERE = (
    "tests/e2e/test_volume_mounts.py::test_before_linux_6_5_the_dead_mount_is_taken_away_first",
    "tests/e2e/test_locked_flags.py::test_whatever_a_runtime_does_with_a_bind_nobody_becomes_root",
)


def make(directory: Path, suite: str, selection: Sequence[str]) -> None:
    """Fill the directory. `selection` are arguments of pytest."""
    run([ROOT / "packaging/export", directory / "main"])
    (directory / "main/build/static").mkdir(parents=True)
    run(["cp", PROXY, directory / "main/build/static"])
    (directory / "programs").mkdir()
    programs.export(directory / "programs")
    (directory / "ours").mkdir()
    debian.build(suite, directory / "ours")
    others = " ".join(f"--deselect={each}" for each in _NOT_HERE)
    (directory / "run").write_text(_RUN.format(selection=" ".join(f"'{each}'" for each in selection), others=others))
