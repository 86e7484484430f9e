"""The last release as its users have it: images and manifests made from its commit, for tests of an upgrade.

The commit must be in the checkout's history: a shallow clone lacks it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tests.cluster.images import RELEASE, SOURCES, sidecars
from tests.kubernetes.objects import KUSTOMIZATION
from tests.lab import debian
from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import run

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION, COMMIT = "0.1.0", "f6b4318c649074a4c660f9e9179bf21edec88b32"


def packages(suite: str) -> Path:
    """Return the directory with the Debian packages. CommandFailed if the commit is missing, or the build fails."""

    def build(directory: Path) -> None:
        with checked_out() as checkout:
            debian.build(suite, directory, sources=checkout)

    return Cache().entry(f"released-packages-{suite}", recipe_hash(debian.builder(suite).key(), COMMIT), build)


@contextlib.contextmanager
def checked_out() -> Iterator[Path]:
    """Yield a clone of the repository with the release's commit."""
    with tempfile.TemporaryDirectory() as temporary:
        checkout = Path(temporary, "checkout")
        run(["git", "clone", "--quiet", "--no-checkout", SOURCES, checkout])
        run(["git", "-C", checkout, "checkout", "--quiet", COMMIT])
        yield checkout


def release() -> Path:
    """Return a directory with the images' archives, the proxy's executable, and the manifests of the base.

    CommandFailed if the commit is missing, or the build fails.
    """

    def build(directory: Path) -> None:
        with checked_out() as checkout, tempfile.TemporaryDirectory() as unpacked:
            run([checkout / "packaging/container/build", packages(RELEASE), directory], timeout=600)
            run(["dpkg-deb", "--extract", debian.debs(packages(RELEASE))["fusermount3-proxy"], unpacked])
            shutil.copy(Path(unpacked, "usr/bin/fusermount3-proxy"), directory)
            for manifest in (checkout / "packaging/kubernetes/base").iterdir():
                shutil.copy(manifest, directory)

    return Cache().entry("released", recipe_hash(debian.builder(RELEASE).key(), COMMIT), build)


@contextlib.contextmanager
def kustomization(manifests: Path, broker: str) -> Iterator[Path]:
    """Yield a directory with a kustomization of the release's manifests, for this broker and the node's sidecars."""
    listed = [each["name"] for each in yaml.safe_load((manifests / KUSTOMIZATION).read_text())["images"]]
    with tempfile.TemporaryDirectory() as directory:
        overlay = {
            "resources": [os.path.relpath(manifests, Path(directory).resolve())],
            "images": [
                {"name": name, "newName": image.rpartition(":")[0], "newTag": image.rpartition(":")[2]}
                for program, image in {**sidecars(), "fusermount3-broker": broker}.items()
                for name in listed
                if name.endswith(program)
            ],
        }
        Path(directory, KUSTOMIZATION).write_text(yaml.safe_dump(overlay))
        yield Path(directory)
