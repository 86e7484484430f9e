"""What a machine gets: the sources, the proxy, FUSE programs, the release's packages, and what to run."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.documented import block
from tests.lab import debian, programs
from tests.lab.broker import PROXY
from tests.lab.commands import run
from tests.lab.machine import PODMAN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.machine import Machine

ROOT = Path(__file__).parents[2]
_MOUNTERS = [Path("broker/fusermount3_broker/mounter", each) for each in ("superblock_creator", "plain_call")]

#: Executed when the machine has booted. The sources are copied, because Python keeps its bytecode beside them.
_RUN = """\
cp --archive /payload/main /srv/main
cd /srv/main
uname --kernel-release > /results/kernel
dpkg --install /payload/ours/fusermount3-broker_*.deb > /results/dpkg 2>&1 || cat /results/dpkg
export PYTHONPATH=/srv/main:/srv/main/broker
export FUSERMOUNT3PROXY_CACHE=/srv/cache FUSERMOUNT3PROXY_TEST_SLOWNESS=5
{programs}
{lines}
{podman}
python3 -m pytest -p no:cacheprovider -p tests.machines.at_once --color=no --verbose \
    --junitxml=/results/junit.xml {selection} {others}
[ ! -d /run/lines ] || cp --recursive /run/lines /results
journalctl --no-pager --output=short-monotonic > /results/journal
"""
#: Where the programs are that another machine has compiled.
_PROGRAMS = "export FUSERMOUNT3PROXY_TEST_PROGRAMS=/payload/programs"
#: The same with SELinux: files in containers need a label.
_LABELLED = """\
cp --recursive /payload/programs /srv/programs
chcon --recursive --type container_ro_file_t /srv/programs
export FUSERMOUNT3PROXY_TEST_PROGRAMS=/srv/programs
"""
#: Records which sides of branches are executed. Each call of a function in Python takes a multiple of its time then.
_LINES = """\
cp tests/machines/lines.py /usr/lib/python3/dist-packages/recorded_lines.py
python3 -c 'from tests.machines import branches; branches.create("/run/lines")'
echo 'import recorded_lines; recorded_lines.record("/run/lines")' > /usr/lib/python3/dist-packages/recorded_lines.pth
"""
#: Podman's containers have the seccomp profile that docs/troubleshooting.md recommends where AppArmor confines them.
_PODMAN = """\
{command}
cat > /etc/containers/containers.conf <<'EOF'
[containers]
seccomp_profile = "/etc/containers/fuse-seccomp.json"
EOF
"""
#: Tests that are not for a machine: two execute a branch by pretending that the kernel lacks a feature, the other needs
#: programs of other releases.
_NOT_HERE = (
    "tests/e2e/test_volume_mounts.py::test_before_linux_6_5_the_dead_mount_is_taken_away_first",
    "tests/e2e/test_tombstones.py::test_before_linux_6_5_the_dead_mount_stays_below",
    "tests/e2e/test_locked_flags.py::test_whatever_a_runtime_does_with_a_bind_nobody_becomes_root",
)


def make(directory: Path, machine: Machine, selection: Sequence[str], *, lines: bool) -> None:
    """Fill the directory for this machine. `selection` are arguments of pytest; with `lines`, it records branches.

    A machine with another architecture than this one compiles the programs itself.
    """
    run([ROOT / "packaging/export", directory / "main"])
    (directory / "main/build/static").mkdir(parents=True)
    run(["cp", proxy(machine), directory / "main/build/static"])
    if not machine.is_foreign:
        (directory / "programs").mkdir()
        programs.export(directory / "programs")
    (command,) = block("troubleshooting.md", "jq ").commands
    shutil.copytree(debian.built(machine.suite), directory / "ours")
    _build_programs(machine, directory / "main")
    if machine.is_foreign:
        _exchange_programs(directory / "ours", directory / "main", machine.architecture)
    fields = {
        "podman": _PODMAN.format(command=command) if set(PODMAN) <= set(machine.packages) else "",
        "programs": "" if machine.is_foreign else _LABELLED if machine.has_selinux else _PROGRAMS,
        "lines": _LINES if lines else "",
        "selection": " ".join(f"'{each}'" for each in selection),
        "others": " ".join(f"--deselect={each}" for each in _NOT_HERE),
    }
    (directory / "run").write_text(_RUN.format(**fields))


def _build_programs(machine: Machine, sources: Path) -> None:
    """Build the mounter's programs for the sources, for the machine's architecture."""
    gnu_type = run(["dpkg-architecture", "-a", machine.architecture, "-q", "DEB_HOST_GNU_TYPE"]).stdout.strip()
    environment = [f"CC={gnu_type}-gcc", f"PYTHONPATH={ROOT}:{ROOT / 'broker'}"]
    output = sources / _MOUNTERS[0].parent
    run(["env", *environment, sys.executable, ROOT / "packaging/mounter_programs.py", "--output", output])


def _exchange_programs(packages: Path, sources: Path, architecture: str) -> None:
    """Turn the broker's package, built here, into that of another architecture: all else in it is the same there."""
    deb = debian.debs(packages)["fusermount3-broker"]
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary, "tree")
        run(["dpkg-deb", "--raw-extract", deb, tree])
        for program in _MOUNTERS:
            run(["cp", sources / program, tree / "usr/lib/python3/dist-packages" / program.relative_to("broker")])
        run(["sed", "-i", f"s/^Architecture: .*/Architecture: {architecture}/", tree / "DEBIAN/control"])
        deb.unlink()
        run(["dpkg-deb", "--root-owner-group", "--build", tree, packages])


def proxy(machine: Machine) -> Path:
    """Return the executable for the machine; for another architecture, it is built now if that was not done."""
    if not machine.is_foreign:
        return PROXY
    run(["make", "--directory", ROOT, "static", f"ARCH={machine.architecture}"], timeout=600)
    return PROXY.parent / machine.architecture / PROXY.name
