"""A node of a cluster, on this machine: a mount namespace of its own, in which kubelet's directory is shared.

Broker, kubelet and containers of the node live in it, and see each other's mounts as they do on a machine of their
own. The rest of this machine sees nothing of them but the cgroups of the node's pods, and when the node ends, nothing
is left.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.cgroups import CgroupRoot
from tests.lab.commands import Argument, run
from tests.lab.podman import Mount, mountinfo

if TYPE_CHECKING:
    from collections.abc import Sequence

# Like /var/lib/kubelet where systemd has made all mounts of the machine shared.
BEGIN = 'mount --bind "$1" "$1" && mount --make-shared "$1" && echo begun && exec sleep infinity'


class Node:
    """Lives while its `with` block runs. `kubelet` is kubelet's directory; its pods' cgroups are below `cgroups`."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fusermount3-proxy-lab-node-"))
        self.kubelet = self.directory / "kubelet"
        self.cgroups = CgroupRoot()
        self._holder: subprocess.Popen[str] | None = None

    def __enter__(self) -> Node:
        self.directory.chmod(0o755)
        self.kubelet.mkdir(mode=0o750)
        shell: list[Argument] = ["sh", "-c", BEGIN, "sh", self.kubelet]
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation=private", *shell], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "begun\n"
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._holder is not None
        self._holder.kill()
        self._holder.communicate()
        shutil.rmtree(self.directory)
        self.cgroups.remove()

    @property
    def pid(self) -> int:
        """Return the pid of a process that only lives in the node."""
        assert self._holder is not None, "the node has not been started"
        return self._holder.pid

    def command(self, *argv: Argument) -> tuple[Argument, ...]:
        """Return the command that starts `argv` in the node, in the same process."""
        return ("nsenter", f"--mount=/proc/{self.pid}/ns/mnt", "--", *argv)

    def run(self, argv: Sequence[Argument], *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the node; see commands.run."""
        return run(self.command(*argv), check=check)

    def seen(self, path: Path) -> Path:
        """Return a path at which this process, too, sees the node's `path`."""
        return Path(f"/proc/{self.pid}/root{path}")

    def mounts(self, beneath: Path | None = None) -> list[Mount]:
        """Return the mounts at this path of the node and beneath it; those of kubelet's directory, if none is given."""
        top = str(beneath or self.kubelet)
        found = [
            each for each in mountinfo(self.pid) if each.mountpoint == top or each.mountpoint.startswith(f"{top}/")
        ]
        return [each for each in found if each.mountpoint != str(self.kubelet)]

    def unmount(self, path: Path) -> None:
        """Unmount the filesystem at a path, if there is one."""
        with contextlib.suppress(IndexError):
            while self.mounts(path)[-1].mountpoint == str(path):
                self.run(["umount", "--lazy", "--no-mtab", path])
