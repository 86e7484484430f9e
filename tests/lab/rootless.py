"""Podman of a user who has no right but subordinate uids and gids.

The user, the storage and all processes exist for one container, and are gone when it has ended. The ids belong to the
process of the tests, and nobody else has them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.commands import run
from tests.lab.podman import LIMITS, RUNTIME, all_pids

if TYPE_CHECKING:
    from collections.abc import Sequence
    from subprocess import CompletedProcess

    from tests.lab.podman import Volume

FIRST_SUBORDINATE = (1 + os.getpid() % 4000) << 18
UID = FIRST_SUBORDINATE + (1 << 17)
_FILES = {
    # What Podman starts when a container ends finds its home here, and not in the environment.
    "passwd": f"root:x:0:0::/root:/bin/sh\nlab:x:{UID}:{UID}::HOME:/bin/sh\n",
    "group": f"root:x:0:\nlab:x:{UID}:\n",
    "subuid": f"lab:{FIRST_SUBORDINATE}:65536\n",
    "subgid": f"lab:{FIRST_SUBORDINATE}:65536\n",
}
#: The arguments: a directory with these files and `volumes`, whose lines are a path and one that the user reaches,
#: and the user's script.
_SCRIPT = f"""\
cd "$1"
for name in {" ".join(_FILES)}; do mount --bind "$name" "/etc/$name"; done
while read -r source place; do mount --bind "$source" "$place"; done < volumes
exec setpriv --reuid={UID} --regid={UID} --clear-groups --inh-caps=-all -- \\
    env --ignore-environment HOME="$1/home" XDG_RUNTIME_DIR="$1/runtime" PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
    sh -euc "$2"
"""
_PODMAN = ("podman", *RUNTIME, "--cgroup-manager=cgroupfs")


def run_rootless(image: str, volumes: Sequence[Volume], options: Sequence[str], *command: str) -> CompletedProcess[str]:
    """Run a command in a container of an image that root's Podman has, with podman's options, and without a network.

    Return what `podman run` says, and its status.
    """
    # A short name: if a path of a socket of Podman's is too long (unix(7)), it waits 20 s for the end of a container.
    with tempfile.TemporaryDirectory(prefix="lab-", dir="/tmp") as temporary:
        place = Path(temporary)
        place.chmod(0o755)
        for name, text in _FILES.items():
            (place / name).write_text(text.replace("HOME", f"{place}/home"))
        for name in ("home", "runtime"):
            (place / name).mkdir(0o700)
        run(["chown", f"{UID}:{UID}", place / "home", place / "runtime"])
        run(["podman", "save", "--quiet", "--format=docker-archive", "--output", place / "image", image])
        (place / "image").chmod(0o644)
        given = []
        lines = []
        for number, volume in enumerate(volumes):
            reached = place / f"volume-{number}"
            reached.mkdir() if volume.source.is_dir() else reached.touch()
            lines.append(f"{volume.source.absolute()} {reached}\n")
            given += ["--volume", f"{reached}:{volume.target}:{volume.options}"]
        (place / "volumes").write_text("".join(lines))
        load = [*_PODMAN, "load", "--quiet", "--input", str(place / "image")]
        start = [*_PODMAN, "run", "--rm", "--network=none", *LIMITS, *given, *options, image, *command]
        script = f"{shlex.join(load)} >&2\nexec {shlex.join(start)}"
        namespace = ["unshare", "--mount", "--propagation=private"]
        try:
            return run([*namespace, "sh", "-euc", _SCRIPT, "sh", temporary, script], check=False)
        finally:
            _end_processes()


def _end_processes() -> None:
    """Kill what runs with these ids: Podman leaves a process that keeps the user's namespace."""
    for pid in all_pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if FIRST_SUBORDINATE <= Path(f"/proc/{pid}").stat().st_uid <= UID:
                os.kill(pid, signal.SIGKILL)
