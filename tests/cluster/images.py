"""The images of a node that reaches no registry: made here, and imported into its containerd under local names.

Broker and proxy are built from the working tree as `make images` builds them, and kept in the cache until it changes.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusermount3_proxy import __version__
from tests.cluster import binaries, configuration
from tests.e2e.documented import containerfiles
from tests.lab import debian
from tests.lab.broker import PROXY
from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import run
from tests.lab.images import BUSYBOX, NAME_LABEL, REPOSITORY, SSHFS, DebianRecipe, image_tag, prune_scratch
from tests.lab.podman import LIMITS, RUNTIME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.cluster.node import ClusterNode

SOURCES = Path(__file__).parents[2]
RELEASE = platform.freedesktop_os_release()["VERSION_CODENAME"]

BROKER = f"localhost/fusermount3-broker:{__version__}"
REGISTRAR, LIVENESSPROBE = (f"localhost/{name}:1" for name in binaries.SIDECARS)
SHELL, SSHFS_WITH_PROXY, SSH_SERVER = "localhost/busybox:1", "localhost/sshfs:1", "localhost/ssh-server:1"
"""busybox; Debian's sshfs in an image as docs/kubernetes.md has it; Debian's sshd."""

_CTR = ("ctr", "--namespace", "k8s.io", "images")

SERVER = DebianRecipe("ssh-server", ("passwd", "openssh-server"))

#: What is in the packages, as git finds it.
_PACKAGED = (
    "broker",
    "fusermount3_proxy",
    "packaging",
    ":!packaging/kubernetes",
    "debian",
    "setup.py",
    "setup.cfg",
    "pyproject.toml",
)
_ENTRY = "driver-images"
_DAYS = 3
"""How long the cache keeps the images of a working tree that has changed since."""


def driver_images() -> Path:
    """Return the directory with the archives that `make images` makes of this working tree."""
    listed = run(
        ["git", "-C", SOURCES, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_PACKAGED]
    )
    paths = sorted({SOURCES / name for name in listed.stdout.split("\0") if name})
    parts = [part for path in paths if path.is_file() for part in (str(path.relative_to(SOURCES)), path.read_bytes())]

    def build(directory: Path) -> None:
        with tempfile.TemporaryDirectory() as packages:
            debian.build(RELEASE, Path(packages))
            run([SOURCES / "packaging/container/build", packages, directory], timeout=600)

    found = Cache().entry(_ENTRY, recipe_hash(debian.builder(RELEASE).key(), *parts), build)
    for other in found.parent.glob(f"{_ENTRY}-*"):
        if other != found and time.time() - other.stat().st_mtime > _DAYS * 86400:
            shutil.rmtree(other)
    return found


@dataclass(frozen=True)
class Built:
    """An image to be built by Podman; `files` are copied into it where the lines say."""

    lines: str
    files: Mapping[str, Path]

    def tag(self) -> str:
        """Return Podman's name of the image, built now unless Podman has it already."""
        contents = [part for name, file in self.files.items() for part in (name, file.read_bytes())]
        tag = f"{REPOSITORY}/cluster:{recipe_hash(self.lines, *contents)}"
        if run(["podman", "image", "exists", tag], check=False).returncode:
            with tempfile.TemporaryDirectory() as context:
                for name, file in self.files.items():
                    shutil.copy(file, Path(context) / name)
                Path(context, "Containerfile").write_text(self.lines)
                options = ["--layers=false", "--network=none", "--pull=never", f"--label={NAME_LABEL}=scratch"]
                run(["podman", *RUNTIME, "build", *LIMITS, *options, "--tag", tag, context], timeout=300)
            prune_scratch()
        return tag


def others() -> dict[str, str]:
    """Return Podman's names of the images but the driver's own, by the node's names."""
    busybox = image_tag(BUSYBOX)
    (for_pods,) = containerfiles("kubernetes.md")
    with_proxy = for_pods[for_pods.index("COPY ") :]  # the lines before install sshfs
    sidecars = {
        f"localhost/{name}:1": Built(
            f'FROM scratch\nCOPY {name} /\nENTRYPOINT ["/{name}"]\n', {name: binaries.kubernetes() / name}
        ).tag()
        for name in binaries.SIDECARS
    }
    return sidecars | {
        configuration.PAUSE: Built(f'FROM {busybox}\nENTRYPOINT ["sleep", "infinity"]\n', {}).tag(),
        SHELL: busybox,
        SSHFS_WITH_PROXY: Built(f"FROM {image_tag(SSHFS)}\n{with_proxy}", {PROXY.name: PROXY}).tag(),
        # `podman import` records a wrong digest of a compressed layer; `podman build` calculates it anew.
        SSH_SERVER: Built(f"FROM {image_tag(SERVER)}\nUSER user\n", {}).tag(),
    }


def load(node: ClusterNode) -> None:
    """Import all images into the node's containerd."""
    for archive in sorted(driver_images().glob("*.tar")):
        _import(node, archive)
    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(temporary) / "archive"
        for name, tag in others().items():
            run(["podman", "save", "--quiet", "--format", "docker-archive", "--output", archive, tag])
            _import(node, archive)
            node.run([*_CTR, "tag", "--force", tag, name])
            archive.unlink()


def _import(node: ClusterNode, archive: Path) -> None:
    copy = node.seen("/run/archive")
    shutil.copy(archive, copy)
    node.run([*_CTR, "import", "--local", "/run/archive"])
    copy.unlink()
