"""helm and kustomize, built from their Go modules into the cache, and promtool of Debian.

Each of the first two has its own module below tests/programs/kubernetes, whose go.sum fixes the downloads. They are
built in the same container as the callers, so on a fresh machine they need only Podman.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.callers.build import GO_BUILD, compile_in, compilers, copy_out, downloading, recipe_of
from tests.lab import debian
from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import run
from tests.lab.programs import SOURCES

PACKAGES = {"helm": "helm.sh/helm/v3/cmd/helm", "kustomize": "sigs.k8s.io/kustomize/kustomize/v5"}

TIMEOUT = 1800
"""Seconds that a build may take: minutes on two processors that have nothing else to do."""


def program(name: str) -> Path:
    """Return the static executable `name`, "helm" or "kustomize". Raises build.NotReachable."""
    source = SOURCES / "kubernetes" / name

    def build(directory: Path) -> None:
        with compilers(source) as container:
            with downloading(f"Go modules of {name}"):
                compile_in(container, "cd /source && go mod download")
            script = f"cd /source && mkdir /out && {GO_BUILD} -ldflags='-s -w' -o /out/ {PACKAGES[name]}"
            container.exec(["sh", "-c", script], timeout=TIMEOUT)
            copy_out(container, "/out", directory)

    return Cache().entry(name, recipe_of(source), build) / name


def promtool() -> Path:
    """Return promtool, taken out of its package: installed, that would run a Prometheus. Raises build.NotReachable."""
    suite, package, member = "bookworm", "prometheus", "usr/bin/promtool"

    def build(directory: Path) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            with downloading("promtool of Debian"):
                debian.download(suite, [[package]], place)
            run(["dpkg-deb", "--extract", debian.debs(place)[package], place / "root"])
            shutil.copy(place / "root" / member, directory)

    return Cache().entry("promtool", recipe_hash(debian.machine(suite).key(), package, member), build) / "promtool"
