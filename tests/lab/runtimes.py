"""OCI runtimes of several releases of Debian, without being installed: each runs in its release's own root filesystem.

It sees this machine's processes, devices and cgroups, and one directory of the test, which contains the bundle.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.lab.commands import Argument, run
from tests.lab.images import DebianRecipe, rootfs

if TYPE_CHECKING:
    from collections.abc import Sequence

SUITES = ("bookworm", "trixie", "sid")
NAMES = ("runc", "crun")
PATIENCE = 60


def recipe(suite: str) -> DebianRecipe:
    return DebianRecipe(f"runtimes-{suite}", ("passwd", *NAMES), suite)


class Ran(NamedTuple):
    """The result of a container: the runtime's or the program's exit status, and the output."""

    status: int
    output: str
    error: str


class Runtime:
    """One of the `NAMES` from a release; unpacked in `root`, in a mount namespace of the test's own."""

    def __init__(self, name: str, suite: str, root: Path) -> None:
        self._name = name
        self._root = root
        root.mkdir()
        run(["tar", "--zstd", "--extract", "--directory", root, "--file", rootfs(recipe(suite))], timeout=120)
        run(["mount", "--bind", root, root])  # pivot_root(2) wants a mountpoint
        for path in ("proc", "sys", "dev"):
            run(["mount", "--rbind", f"/{path}", root / path])
        if name == "crun":  # it refuses hosts with both versions of cgroups
            run(["mount", "-t", "cgroup2", "cgroup2", root / "sys/fs/cgroup"])

    def version(self) -> str:
        """Return the runtime's name and version."""
        return run(["chroot", self._root, self._name, "--version"]).stdout.splitlines()[0]

    def run(self, directory: Path, source: Path, options: Sequence[str], script: str) -> Ran:
        """Run a shell script as uid 1000 in a container that has `source` at /data, bound with these options.

        `source` is in `directory`, to which the runtime may write, too.
        """
        view = self._root / directory.relative_to("/")
        view.mkdir(parents=True, exist_ok=True)
        run(["mount", "--rbind", directory, view])
        run(["mount", "--make-rslave", view])  # unmounts here don't propagate there
        bundle = directory / f"bundle-{uuid.uuid4()}"
        try:
            _write_bundle(bundle, source, options, script)
            flags = ["--cgroup-manager=disabled"] if self._name == "crun" else []
            runtime: list[Argument] = ["chroot", self._root, self._name, *flags]
            argv = [*runtime, "run", "--bundle", bundle, bundle.name]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
            return Ran(done.returncode, done.stdout, done.stderr)
        finally:
            run(["umount", "--lazy", view])
            shutil.rmtree(bundle)


def _write_bundle(bundle: Path, source: Path, options: Sequence[str], script: str) -> None:
    container = bundle / "rootfs"
    for name in ("bin", "proc", "data", "dev"):
        (container / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", container / "bin/busybox")
    none: dict[str, list[str]] = {name: [] for name in ("bounding", "effective", "permitted", "inheritable", "ambient")}
    namespaces = [{"type": name} for name in ("pid", "mount", "ipc", "uts")]
    configuration = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 1000, "gid": 1000},
            "args": ["/bin/busybox", "sh", "-c", script],
            "env": ["PATH=/bin"],
            "cwd": "/",
            "capabilities": none,
            "noNewPrivileges": False,
        },
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/data", "type": "bind", "source": str(source), "options": list(options)},
        ],
        "linux": {"namespaces": namespaces},
    }
    (bundle / "config.json").write_text(json.dumps(configuration))
