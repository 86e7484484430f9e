"""csi-sanity of kubernetes-csi/csi-test, and the official csi.proto: from the Go module proxy, in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.callers.build import compile_in, compilers, copy_out, downloading, recipe_of
from tests.lab.cache import Cache, recipe_hash
from tests.lab.programs import SOURCES

if TYPE_CHECKING:
    from pathlib import Path

SPECIFICATIONS = ("v1.12.0", "v1.13.0")
"""The versions of CSI whose csi.proto is in the tree: the last with VolumeCondition, and the one with VolumeHealth."""

_MODULE = "github.com/container-storage-interface/spec"
# Debian's compiler downloads the newer one that go.mod names, also through the module proxy.
_DOWNLOAD = f"""cd /source && export GOTOOLCHAIN=auto && go mod download &&
    for version in {" ".join(SPECIFICATIONS)}; do go mod download {_MODULE}@$version || exit; done"""
_BUILD = f"""cd /source && export GOTOOLCHAIN=auto CGO_ENABLED=0 && mkdir /out &&
    go build -trimpath -o /out/ github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity &&
    for version in {" ".join(SPECIFICATIONS)}; do
        cp "$(go env GOMODCACHE)/{_MODULE}@$version/csi.proto" /out/csi-$version.proto || exit
    done"""


def csi_sanity() -> Path:
    """Return the static executable. Raises NotReachable."""
    return _built() / "csi-sanity"


def official_proto(version: str) -> Path:
    """Return csi.proto of this version of CSI, one of SPECIFICATIONS. Raises NotReachable."""
    return _built() / f"csi-{version}.proto"


def _built() -> Path:
    source = SOURCES / "csi"

    def build(directory: Path) -> None:
        with compilers(source) as container:
            with downloading("Go modules"):
                compile_in(container, _DOWNLOAD)
            compile_in(container, _BUILD)
            copy_out(container, "/out", directory)

    return Cache().entry("csi-sanity", recipe_hash(recipe_of(source), _DOWNLOAD, _BUILD), build)
