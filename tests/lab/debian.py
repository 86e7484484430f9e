"""The project's Debian packages, built in a clean tree of a release and installed on machines of that release.

`build` is `dpkg-buildpackage` in a container with the packages that debian/control names, as an ordinary user and
without a network. `archive` fetches from the mirror the other packages that an installation needs. Both fill
directories that apt accepts as archives, so a machine without a network installs with `apt-get`.
"""

from __future__ import annotations

import shutil
import tempfile
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab import checkout
from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import Argument, CommandFailed, run
from tests.lab.foreign import run_emulating
from tests.lab.images import DebianRecipe, debian_sources, image_tag, rootfs
from tests.lab.podman import Container, Options, Volume

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCES = Path(__file__).parents[2]
TOGETHER = ("fusermount3-proxy", "fusermount3-broker", "fusermount3-proxy-doc")
"""The binary packages that can be installed together."""
STATIC = "fusermount3-proxy-static"
"""The binary package with the executable alone, which conflicts with fusermount3-proxy."""
NAMES = (*TOGETHER, STATIC)
"""All binary packages."""


def build_dependencies() -> list[str]:
    """Return the names in Build-Depends."""
    source = HeaderParser().parsestr((SOURCES / "debian/control").read_text())
    return [each.split()[0] for each in source["Build-Depends"].split(",") if each.strip()]


def builder(suite: str, architecture: str = "") -> DebianRecipe:
    """Return a system with what every build may rely on, and the packages that debian/control names.

    `architecture`: Debian's name of it, if it isn't this machine's.
    """
    name = "-".join(("debian-builder", suite, *([architecture] if architecture else [])))
    packages = ("passwd", "build-essential", *build_dependencies())
    return DebianRecipe(name, packages, suite, architecture=architecture)


def inspector(suite: str) -> DebianRecipe:
    """Return a system with the tools that inspect packages."""
    return DebianRecipe(f"debian-inspector-{suite}", ("passwd", "lintian"), suite)


def machine(suite: str) -> DebianRecipe:
    """Return a system that boots, and has nothing of FUSE."""
    return DebianRecipe(f"debian-machine-{suite}", ("passwd", "systemd", "systemd-sysv", "dbus", "procps"), suite)


def build(
    suite: str,
    output: Path,
    *,
    sources: Path = SOURCES,
    parent: str = "/build",
    umask: str = "022",
    zone: str = "UTC",
) -> None:
    """Build the packages of a checkout below `parent` in a container, into `output`. CommandFailed if that fails."""
    with tempfile.TemporaryDirectory() as temporary:
        place, name = Path(temporary), "fusermount3-proxy"
        run([sources / "packaging/export", place / name])
        run(["chown", "--recursive", "--no-dereference", "1000:1000", place])
        options = Options(volumes=[Volume(place, parent, "rw")], env={"TZ": zone})
        with Container(image_tag(builder(suite)), options=options) as container:
            script = f"umask {umask} && exec dpkg-buildpackage --no-sign"
            container.exec(["sh", "-c", script], user="user", workdir=f"{parent}/{name}", timeout=600)
        shutil.rmtree(place / name)
        shutil.copytree(place, output, dirs_exist_ok=True)
    write_index(output)


#: The arguments: the root directory, the command. Nothing but its own files and processes is there for the command.
_IN_TREE = """\
tree=$1
shift
mount --rbind /proc "$tree/proc"
exec unshare --net -- chroot --userspec=1000:1000 "$tree" env --ignore-environment --chdir=/build/fusermount3-proxy \
    HOME=/home/user PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
"""


def build_foreign(suite: str, architecture: str, output: Path) -> None:
    """Build the packages for another architecture than this machine's, emulated; without those for all of them.

    Takes minutes. CommandFailed if it fails.
    """
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "tree"
        (tree / "build").mkdir(parents=True)
        tarball = rootfs(builder(suite, architecture))
        run(["tar", "--extract", "--numeric-owner", "--file", tarball, "--directory", tree])
        run([SOURCES / "packaging/export", tree / "build/fusermount3-proxy"])
        run(["chown", "--recursive", "--no-dereference", "1000:1000", tree / "build"])
        command = ["dpkg-buildpackage", "--no-sign", "--build=any"]
        argv = ["sh", "-euc", _IN_TREE, "sh", str(tree), *command]
        result = run_emulating(argv)
        if result.returncode != 0:
            raise CommandFailed(command, result)
        for deb in (tree / "build").glob("*.deb"):
            shutil.copy(deb, output)
    write_index(output)


def built(suite: str) -> Path:
    """Return the directory with the packages of this checkout, which are built once until a file changes."""
    recipe = recipe_hash(builder(suite).key(), *checkout.contents())
    return Cache().entry_of_checkout(f"debian-packages-{suite}", recipe, lambda directory: build(suite, directory))


def newer(suite: str) -> Path:
    """Return a directory with the same binary packages in a newer version."""
    packages = built(suite)

    def pack(directory: Path) -> None:
        for name, deb in debs(packages).items():
            tree = directory / name
            run(["dpkg-deb", "--raw-extract", deb, tree])
            control = tree / "DEBIAN/control"
            version = run(["dpkg-deb", "--field", deb, "Version"]).stdout.strip()
            control.write_text(control.read_text().replace(f"Version: {version}\n", f"Version: {version}+newer\n"))
            run(["dpkg-deb", "--root-owner-group", "--build", tree, directory])
            shutil.rmtree(tree)
        write_index(directory)

    return Cache().entry_of_checkout(f"debian-newer-{suite}", packages.name.rpartition("-")[2], pack)


def archive(suite: str, packages: Path, *others: Sequence[str], cache: Cache | None = None) -> Path:
    """Return a directory with what `machine` lacks to install the packages in `packages`, and each set of others."""
    ours = [deb for name, deb in debs(packages).items() if name != STATIC]  # which depends on nothing
    depends = [run(["dpkg-deb", "--field", deb, "Depends"]).stdout for deb in ours]
    recipe = recipe_hash(machine(suite).key(), *depends, *map(" ".join, others))
    entry = f"debian-archive-{suite}"
    return (cache or Cache()).entry(entry, recipe, lambda directory: download(suite, [ours, *others], directory))


def download(suite: str, wanted: Sequence[Sequence[Argument]], directory: Path) -> None:
    """Fill the directory with the .deb files that apt would fetch to install each of these sets on a `machine`."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for name in ("state/lists/partial", "cache/archives/partial"):
            (root / name).mkdir(parents=True)
        status = run(
            ["tar", "--zstd", "--extract", "--to-stdout", "--file", rootfs(machine(suite)), "./var/lib/dpkg/status"]
        )
        (root / "status").write_text(status.stdout)
        (root / "sources.list").write_text("".join(f"{line}\n" for line in debian_sources(suite)))
        settings = {
            "Dir::State": root / "state",
            "Dir::State::status": root / "status",
            "Dir::Cache": root / "cache",
            "Dir::Etc::SourceList": root / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "APT::Sandbox::User": "root",
            "Acquire::Check-Valid-Until": "false",
        }
        apt = [
            "apt-get",
            "--yes",
            *(word for name, value in settings.items() for word in ("--option", f"{name}={value}")),
        ]
        run([*apt, "update"], timeout=300)
        for packages in wanted:
            run([*apt, "install", "--download-only", "--no-install-recommends", *packages], timeout=600)
        for deb in (root / "cache/archives").glob("*.deb"):
            shutil.copy(deb, directory)
    write_index(directory)


def write_index(directory: Path) -> None:
    """Make the directory an archive of apt's."""
    index = run(["env", "--chdir", directory, "dpkg-scanpackages", "--multiversion", "."])
    (directory / "Packages").write_text(index.stdout)


def debs(directory: Path) -> dict[str, Path]:
    """Return the binary packages in a directory by their names."""
    return {path.name.partition("_")[0]: path for path in sorted(directory.glob("*.deb"))}
