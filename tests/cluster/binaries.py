"""The programs of a real Kubernetes node, in the cache: those of Kubernetes and those of Debian.

Kubernetes is built from the Go modules in tests/programs/kubernetes, in the container of the compilers; all commands in
one build, for they share most packages. That takes 10 to 15 minutes of a processor. etcd, containerd, runc and crun are
those of Debian's newest release, in the root filesystem of the node.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.callers.build import GO_BUILD, compile_in, compilers, copy_out, downloading, recipe_of
from tests.callers.images import COMPILERS
from tests.lab.cache import Cache, recipe_hash
from tests.lab.images import DebianRecipe
from tests.lab.programs import SOURCES

COMMANDS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet")

SIDECARS = ("node-driver-registrar", "livenessprobe")
"""Ours, in the place of the Kubernetes project's sidecars of a CSI driver, which Go's module proxy refuses."""

ROOT = DebianRecipe(
    "kubernetes-node",
    (
        *("passwd", "mount", "util-linux", "iproute2"),
        "catatonit",  # process 1 of the node
        *("etcd-server", "containerd", "containernetworking-plugins", "runc", "crun"),
    ),
    "sid",
)
"""The root filesystem of a node."""

TIMEOUT = 5400
"""Seconds that the build may take: beside the tests, at the lowest priority, it has little of two processors."""


@dataclass(frozen=True)
class Release:
    """A release of Kubernetes: the directory with its Go modules, and what compiles them."""

    source: Path
    compilers: DebianRecipe = COMPILERS

    @property
    def version(self) -> str:
        """Return the version, such as 1.34.4."""
        found = re.search(r"k8s\.io/kubernetes v(\S+)", (self.source / "go.mod").read_text())
        assert found, f"{self.source}/go.mod requires no k8s.io/kubernetes"
        return found[1]


KUBERNETES = Release(SOURCES / "kubernetes/cluster")
"""The release of the tests; its modules have those of `SIDECARS`, too."""
_NEWEST_COMPILERS = DebianRecipe("newest-compilers", ("passwd", "golang-go", "ca-certificates"), suite="sid")
"""For what requires a newer Go than trixie's."""
NEWEST = Release(SOURCES / "kubernetes/newest", _NEWEST_COMPILERS)
"""What `make test-cluster-long` upgrades to; the tests of each change use it only with KUBERNETES=newest."""
USUAL = "usual"
STORAGE_SUITES = SOURCES / "kubernetes/storage-suites"
"""The Kubernetes project's tests of storage, of the release of the tests."""
RELEASES = {USUAL: KUBERNETES, "newest": NEWEST}
"""By the names that $FUSERMOUNT3PROXY_TEST_KUBERNETES has for them."""


def kubernetes(release: Release = KUBERNETES) -> Path:
    """Return the directory with the static executables `COMMANDS`, and `SIDECARS`. Raises build.NotReachable."""
    # What the commands say of themselves; the API server derives from it which features there are.
    major, minor, _ = release.version.split(".")
    stamps = {"gitVersion": f"v{release.version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    flags = ["-s", "-w", *(f"-X k8s.io/component-base/version.{name}={value}" for name, value in stamps.items())]
    sidecars = SIDECARS if release == KUBERNETES else ()
    packages = [*(f"k8s.io/kubernetes/cmd/{name}" for name in COMMANDS), *(f"./{name}" for name in sidecars)]
    build = f"{GO_BUILD} -ldflags='{' '.join(flags)}' -o /out/ {' '.join(packages)}"

    def make(directory: Path) -> None:
        with compilers(release.source, release.compilers) as container:
            with downloading("Go modules of Kubernetes"):
                compile_in(container, "cd /source && go mod download")
            container.exec(["sh", "-c", f"cd /source && mkdir /out && {build}"], timeout=TIMEOUT)
            copy_out(container, "/out", directory)

    return Cache().entry("kubernetes", recipe_hash(recipe_of(release.source, release.compilers), build), make)


def storage_suites() -> Path:
    """Return the directory with the static executables `suites`, a test binary of Go, and `agnhost`, for its pods.

    Raises build.NotReachable.
    """
    build = (
        "cd /source && mkdir /out && "
        "CGO_ENABLED=0 go test -p 2 -trimpath -gcflags='all=-dwarf=false -l' -ldflags='-s -w'"
        f" -c -o /out/suites . && {GO_BUILD} -ldflags='-s -w' -o /out/agnhost ./agnhost"
    )

    def make(directory: Path) -> None:
        with compilers(STORAGE_SUITES) as container:
            with downloading("Go modules of Kubernetes"):
                compile_in(container, "cd /source && go mod download")
            container.exec(["sh", "-c", build], timeout=TIMEOUT)
            copy_out(container, "/out", directory)

    return Cache().entry("storage-suites", recipe_hash(recipe_of(STORAGE_SUITES), build), make)
