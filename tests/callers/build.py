"""Building the callers: the libraries as their registries have them, our smallest filesystem on each, in the cache.

Downloading and building are two steps. What can't be downloaded is `NotReachable`, and its callers are not run; what
doesn't build is an error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.callers.images import COMPILERS
from tests.lab import images
from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import Argument, CommandFailed, run
from tests.lab.podman import Container, Options, Volume
from tests.lab.programs import SOURCES, WARNINGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SETTINGS = ("GOPROXY", "GOSUMDB", "GONOSUMDB", "GOFLAGS")
"""The host's settings for the Go module proxy; Podman hands on those for an HTTP proxy by itself."""

SITE = "site.tar"


class NotReachable(Exception):
    """A registry or an archive can't be reached."""


@contextlib.contextmanager
def downloading(what: str) -> Iterator[None]:
    """Turn the failure of a download into NotReachable."""
    try:
        yield
    except (CommandFailed, RuntimeError, subprocess.TimeoutExpired) as error:
        raise NotReachable(f"{what}: {str(error)[-2000:]}") from error


def image_tag(image: images.DebianRecipe | str) -> str:
    """Return podman's name of the image. Raises NotReachable if it can't be made."""
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
    """Return the directory with the static executables of tests/programs/rust."""
    source = SOURCES / "rust"
    # With a target named, +crt-static is for the programs only: a procedural macro has to stay a shared object.
    script = """cd /source && host=$(rustc -vV | sed -n 's/^host: //p') && mkdir /out &&
        RUSTFLAGS='-C target-feature=+crt-static' cargo build --offline --locked --target "$host" --target-dir /tmp/t &&
        for program in src/bin/*.rs; do
            strip -o "/out/$(basename "$program" .rs)" "/tmp/t/$host/debug/$(basename "$program" .rs)" || exit
        done"""

    def build(directory: Path) -> None:
        with compilers(source) as container:
            with downloading("Rust crates"):
                compile_in(container, "cd /source && cargo fetch --locked")
            compile_in(container, script)
            copy_out(container, "/out", directory)

    return Cache().entry("callers-rust", recipe_of(source), build)


def libfuse_programs(image: images.DebianRecipe, libraries: Sequence[str]) -> Path:
    """Return the directory with whoamifs and hello_ll for these libraries (fuse, fuse3) as the image's suite has them.

    They are called by what they are linked with: whoamifs-fuse3, hello_ll-fuse.
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
    """Return the shell command that compiles a C source in a container."""
    flags = " ".join([*WARNINGS, *(["-DUSE_LIBFUSE2"] if library == "fuse" else [])])
    target = f"/out/{source.stem}-{library}"
    return f"gcc {flags} /{source.name} $(pkg-config --cflags --libs {library}) -o {target}"


def python_programs(name: str) -> Path:
    """Return the directory with a tarball, SITE, of what tests/programs/python/NAME.txt names, as pip installs it."""
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


@contextlib.contextmanager
def compilers(source: Path) -> Iterator[Container]:
    """A container with the compilers, the source in /source, and the network of the host."""
    volumes = [Volume(source, "/source")]
    if CERTIFICATES.exists():
        volumes.append(Volume(CERTIFICATES, str(CERTIFICATES)))
    cargo = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo")) / "config.toml"
    if cargo.exists():
        volumes.append(Volume(cargo, "/root/.cargo/config.toml"))
    env = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    env |= {"GOTOOLCHAIN": "local", "HOME": "/root"}
    with Container(image_tag(COMPILERS), options=Options(network="host", volumes=volumes, env=env)) as container:
        yield container


def compile_in(container: Container, script: str) -> None:
    container.exec(["sh", "-c", script], timeout=900)


def copy_out(container: Container, source: str, directory: Path) -> None:
    """Copy the files of a directory of the container into one of the host."""
    for file in (container.root() / source.lstrip("/")).iterdir():
        shutil.copy(file, directory / file.name)
        (directory / file.name).chmod(0o755)


def recipe_of(source: Path) -> str:
    """Return the hash of all files below a directory, and of what compiles them."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    return recipe_hash(COMPILERS.key(), *(part for file in files for part in (file.name, file.read_bytes())))
