"""FUSE programs of the project's own, compiled from tests/programs into the cache.

The sources are whoamifs.c, hello_ll.c, and stopfs.c for hung filesystems; oldclient.c and flushattack.c are clients
only. There is a variant for each libfuse and way of linking. Compiler, flags and libraries are part of a variant's
recipe: after an upgrade of libfuse it is compiled anew. A machine without a compiler finds the static ones in the
directory that $FUSERMOUNT3PROXY_TEST_PROGRAMS names, where `export` has put them.
"""

from __future__ import annotations

import enum
import os
import shutil
from pathlib import Path

from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import run

SOURCES = Path(__file__).parent.parent / "programs"

WARNINGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")


class Variant(enum.Enum):
    """pkg-config's name of the libfuse, and whether the program is static (it then runs in any image)."""

    FUSE3_STATIC = ("fuse3", True)
    FUSE3 = ("fuse3", False)
    FUSE2_STATIC = ("fuse", True)
    FUSE2 = ("fuse", False)

    @property
    def library(self) -> str:
        return self.value[0]

    @property
    def static(self) -> bool:
        return self.value[1]


def whoamifs(variant: Variant = Variant.FUSE3_STATIC, cache: Cache | None = None) -> Path:
    """Return the executable of this variant; see tests/programs/whoamifs.c for what it does."""
    return _executable("whoamifs", variant, cache)


def hello_ll(cache: Cache | None = None) -> Path:
    """Return a static executable with one file, hello; see tests/programs/hello_ll.c."""
    return _executable("hello_ll", Variant.FUSE3_STATIC, cache)


def stopfs(cache: Cache | None = None) -> Path:
    """Return a static executable that stops answering; see tests/programs/stopfs.c."""
    return _executable("stopfs", Variant.FUSE3_STATIC, cache)


def oldclient(cache: Cache | None = None) -> Path:
    """Return a static executable that stands in for meta-fuse-csi-plugin's clients; see tests/programs/oldclient.c."""
    return _without_library("oldclient", cache)


def flushattack(cache: Cache | None = None) -> Path:
    """Return a static executable that sends descriptors which hang on close; see tests/programs/flushattack.c."""
    return _without_library("flushattack", cache)


def export(directory: Path) -> None:
    """Put the static programs into the directory, for another machine."""
    for program in (whoamifs(), whoamifs(Variant.FUSE2_STATIC), hello_ll(), stopfs(), oldclient(), flushattack()):
        shutil.copy(program, directory / program.parent.name.rpartition("-")[0])


def _exported(name: str) -> Path | None:
    """Return the program of this name where another machine has compiled it for this one."""
    directory = os.environ.get("FUSERMOUNT3PROXY_TEST_PROGRAMS")
    return Path(directory, name) if directory else None


def _without_library(program: str, cache: Cache | None) -> Path:
    if exported := _exported(program):
        return exported
    source = SOURCES / f"{program}.c"
    argv = ["gcc", *WARNINGS, "-static", str(source)]

    def build(directory: Path) -> None:
        run([*argv, "-o", directory / program])

    recipe = recipe_hash(source.read_bytes(), *argv, run(["gcc", "-dumpfullversion"]).stdout)
    return (cache or Cache()).entry(program, recipe, build) / program


def _executable(program: str, variant: Variant, cache: Cache | None) -> Path:
    name = f"{program}-{variant.name.lower().replace('_', '-')}"
    if exported := _exported(name):
        return exported
    source = SOURCES / f"{program}.c"
    argv = [*compiler(variant), str(source), *libraries(variant)]
    recipe = recipe_hash(source.read_bytes(), *argv, versions(variant))

    def build(directory: Path) -> None:
        run([*argv, "-o", directory / program])

    return (cache or Cache()).entry(name, recipe, build) / program


def compiler(variant: Variant) -> list[str]:
    """Return the compiler with its flags, before the source."""
    return [
        "gcc",
        *WARNINGS,
        *(["-static"] if variant.static else []),
        *(["-DUSE_LIBFUSE2"] if variant.library == "fuse" else []),
    ]


def libraries(variant: Variant) -> list[str]:
    """Return the flags for libfuse, after the source."""
    return run(
        ["pkg-config", "--cflags", "--libs", *(["--static"] if variant.static else []), variant.library]
    ).stdout.split()


def versions(variant: Variant) -> str:
    """Return the versions of compiler and library, as they print them."""
    return run(["gcc", "-dumpfullversion"]).stdout + run(["pkg-config", "--modversion", variant.library]).stdout
