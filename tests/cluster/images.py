"""The images of a node that reaches no registry: made here, and imported into its containerd under local names.

Broker and proxy are built from the working tree as `make images` builds them, and kept in the cache until it changes.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from fusermount3_proxy import __version__
from tests.cluster import binaries, configuration
from tests.e2e.documented import containerfiles
from tests.kubernetes.objects import BASE, KUSTOMIZATION
from tests.lab import checkout, debian
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
SHELL, SSHFS_WITH_PROXY = "docker.io/library/busybox:1.37", "docker.io/example/sshfs:1.0"
"""busybox, and Debian's sshfs in an image as docs/kubernetes.md has it; with the names in the manifests."""
DEBIANS_SSHFS, SSH_SERVER = "localhost/sshfs:1", "localhost/ssh-server:1"
"""Debian's sshfs, without the proxy; Debian's sshd."""
#: More names of images, for the manifests that name them so.
_ALSO = {
    BROKER: f"docker.io/library/fusermount3-broker:{__version__}",
    SSHFS_WITH_PROXY: "docker.io/example/app:1.0",
}

_CTR = ("ctr", "--namespace", "k8s.io", "images")

SERVER = DebianRecipe("ssh-server", ("passwd", "openssh-server"))

#: What is in the packages, as git finds it.
_PACKAGED = (
    "broker",
    "controller",
    "fusermount3_proxy",
    "packaging",
    ":!packaging/kubernetes",
    "debian",
    "setup.py",
    "setup.cfg",
    "pyproject.toml",
)


def driver_images() -> Path:
    """Return the directory with the archives that `make images` makes of this working tree."""
    recipe = recipe_hash(debian.builder(RELEASE).key(), *checkout.contents(*_PACKAGED))

    def build(directory: Path) -> None:
        run([SOURCES / "packaging/container/build", debian.built(RELEASE), directory], timeout=600)

    return Cache().entry_of_checkout("driver-images", recipe, build)


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


def with_proxy(image: str, programs: Mapping[str, Path], proxy: Path = PROXY) -> str:
    """Return Podman's name of the image with a proxy, as docs/kubernetes.md installs it, and with these programs."""
    (for_pods,) = containerfiles("kubernetes.md")
    lines = [f"FROM {image}", *(f"COPY {name} /usr/bin/" for name in programs)]
    lines.append(for_pods[for_pods.index("COPY ") :])  # the lines before install sshfs
    return Built("\n".join(lines), {PROXY.name: proxy, **programs}).tag()


def others() -> dict[str, str]:
    """Return Podman's names of the images but the driver's own, by the node's names."""
    busybox = image_tag(BUSYBOX)
    ours = {
        name: Built(
            f'FROM scratch\nCOPY {program} /\nENTRYPOINT ["/{program}"]\n', {program: binaries.kubernetes() / program}
        ).tag()
        for program, name in sidecars().items()
    }
    return ours | {
        configuration.PAUSE: Built(f'FROM {busybox}\nENTRYPOINT ["sleep", "infinity"]\n', {}).tag(),
        SHELL: busybox,
        SSHFS_WITH_PROXY: with_proxy(image_tag(SSHFS), {}),
        # `podman import` records a wrong digest of a compressed layer; `podman build` calculates it anew.
        DEBIANS_SSHFS: Built(f"FROM {image_tag(SSHFS)}\nUSER user\n", {}).tag(),
        SSH_SERVER: Built(f"FROM {image_tag(SERVER)}\nUSER user\n", {}).tag(),
    }


def sidecars() -> dict[str, str]:
    """Return the names, with tags, of `binaries.SIDECARS` in the base, whose images they replace."""
    listed = yaml.safe_load((BASE / KUSTOMIZATION).read_text())["images"]
    names = {each["name"]: f"{each['name']}:{each['newTag']}" for each in listed}
    return {program: name for program in binaries.SIDECARS for plain, name in names.items() if plain.endswith(program)}


def load(node: ClusterNode) -> None:
    """Import all images into the node's containerd."""
    for archive in sorted(driver_images().glob("*.tar")):
        load_archive(node, archive)
    for name, tag in others().items():
        load_one(node, name, tag)
    for name, other in _ALSO.items():
        name_also(node, name, other)


def name_also(node: ClusterNode, name: str, other: str) -> None:
    """Give an image of the node another name."""
    node.run([*_CTR, "tag", "--force", name, other])


def load_one(node: ClusterNode, name: str, tag: str) -> None:
    """Import Podman's image `tag` under the node's `name`."""
    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(temporary) / "archive"
        run(["podman", "save", "--quiet", "--format", "docker-archive", "--output", archive, tag])
        load_archive(node, archive)
    name_also(node, tag, name)


def remove(node: ClusterNode, *names: str) -> None:
    """Remove images from the node's containerd."""
    node.run([*_CTR, "remove", *names])


def load_archive(node: ClusterNode, archive: Path) -> None:
    """Import the images of an archive under the names that it has for them."""
    copy = node.seen("/run/archive")
    shutil.copy(archive, copy)
    node.run([*_CTR, "import", "--local", "/run/archive"])
    copy.unlink()
