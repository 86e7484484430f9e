"""Builds the files of a release from a clone whose commit has the tag.

Each part is made by what makes it for users, too: `make wheel`, `dpkg-buildpackage` in clean trees as the tests have
them, `packaging/container`. What is for arm64 and can't be cross-compiled is built emulated (packaging/emulated.py).
"""

from __future__ import annotations

import configparser
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from release import oci, statements
from release.statements import Material, debian_material
from release.version import CannotRelease
from tests.lab import debian
from tests.lab.cache import sha256
from tests.lab.commands import Argument, CommandFailed
from tests.lab.foreign import can_emulate
from tests.lab.images import rootfs

#: This machine's, which the executables are linked on, and whose release the images are of.
NATIVE, RELEASE = "amd64", "bookworm"
ARCHITECTURES = (NATIVE, "arm64")
SUITES = (RELEASE, "trixie")
IMAGES = ("fusermount3-broker", "fusermount3-proxy", "fusermount3-controller")
#: What links the executables of the wheels, and is linked into them.
_COMPILERS = ("gcc-12", "binutils", "gcc-12-aarch64-linux-gnu", "binutils-aarch64-linux-gnu")
_LINKED = {
    "amd64": ("libpython3.11-dev", "libc6-dev", "libgcc-12-dev"),
    "arm64": ("libc6-dev-arm64-cross", "libgcc-12-dev-arm64-cross"),
}


def check_machine() -> None:
    """Raise CannotRelease unless this machine can build a release that others can build again."""
    found = platform.freedesktop_os_release()
    if (found.get("ID"), found.get("VERSION_CODENAME"), os.uname().machine) != ("debian", RELEASE, "x86_64"):
        name = found.get("PRETTY_NAME", "an unknown system")
        raise CannotRelease(f"a release is built on Debian 12 on x86_64, in a container for instance; this is {name}")
    if os.geteuid() != 0:
        raise CannotRelease("a release is built as root, for packages and images are installed into directories")
    if not can_emulate():
        raise CannotRelease("programs for arm64 can't be emulated here: that needs Linux 6.7 and qemu-user-static")


def build(root: Path, version: str, commit: str, output: Path) -> None:
    """Fill the directory, which is emptied first. Raises CannotRelease, CommandFailed and CalledProcessError."""
    check_machine()
    work = root / "build/release-parts"
    for directory in (output, work, root / "build/static", root / "build/dist"):
        shutil.rmtree(directory, ignore_errors=True)
    output.mkdir(parents=True)
    _python_archives(root, version, output)
    for suite in SUITES:
        for architecture in ARCHITECTURES:
            _packages(suite, architecture, version, work / suite / architecture, output)
    wheels = [*_images(root, commit, work, version, output)]
    (output / f"CHANGES-{version}.md").write_text(statements.changes((root / "CHANGELOG.md").read_text(), version))
    materials = [*_materials(root), *wheels]
    statements.write_provenance(output, version, source_url(root), commit, materials)
    statements.write_checksums(output)


def source_url(root: Path) -> str:
    """Return where the sources are, as setup.cfg has it."""
    configuration = configparser.ConfigParser()
    configuration.read(root / "setup.cfg")
    urls = dict(re.split(r"\s*=\s*", line) for line in configuration["metadata"]["project_urls"].split("\n") if line)
    return urls["Source"]


def _python_archives(root: Path, version: str, output: Path) -> None:
    """Make sdist and wheels, with a bill of each wheel, and the executables that are in these."""
    for architecture in ARCHITECTURES:
        variables = [f"ARCH={architecture}", f"VENV={sys.prefix}"]
        _say(f"sdist and wheel for {architecture}")
        _run(["make", "--directory", root, f"--old-file={sys.prefix}/installed", "wheel", *variables])
        place = root / "build/static" / (architecture if architecture != NATIVE else "")
        shutil.copy(place / "fusermount3-proxy", output / f"fusermount3-proxy-{version}-linux-{architecture}")
    for archive in sorted((root / "build/dist").iterdir()):
        shutil.copy(archive, output)
    for wheel in sorted(output.glob("*.whl")):
        architecture = "amd64" if wheel.name.endswith("x86_64.whl") else "arm64"
        _bills(root, [wheel], "--built-using", _built_using(root, architecture))


def _built_using(root: Path, architecture: str) -> str:
    """Return what is linked into the executable of a wheel, by sources of Debian's with their versions."""
    template = "${source:Package} (= ${source:Version})\n"
    found = _output(["dpkg-query", "--show", f"--showformat={template}", *_LINKED[architecture]])
    if architecture != NATIVE:
        found += (root / "build/static" / architecture / "libpython/built-using").read_text()
    return ", ".join(sorted(found.splitlines()))


def _packages(suite: str, architecture: str, version: str, place: Path, output: Path) -> None:
    """Build the Debian packages; in the release's directory their names say for which release of Debian they are."""
    _say(f"packages for {suite}, {architecture}")
    place.mkdir(parents=True)
    if architecture == NATIVE:
        debian.build(suite, place)
    else:
        debian.build_foreign(suite, architecture, place)
    for deb in place.glob("*.deb"):
        name, _, rest = deb.name.partition(f"_{version}_")
        if rest:
            shutil.copy(deb, output / f"{name}_{version}_{suite}_{rest}")


def _images(root: Path, commit: str, work: Path, version: str, output: Path) -> list[Material]:
    """Build the images of both architectures, with bills, into an archive each. Return the wheels in them."""
    scripts = root / "packaging/container"
    materials = []
    for architecture in ARCHITECTURES:
        _say(f"images for {architecture}")
        images, wheels = work / "images" / architecture, work / "wheels" / architecture
        variables = ["env", f"ARCH={architecture}", f"REVISION={commit}", f"PIP={sys.prefix}/bin/pip"]
        _run([*variables, scripts / "build", work / RELEASE / architecture, images])
        _run([sys.executable, scripts / "controller_wheels.py", "--architecture", architecture, wheels])
        _run([*variables, scripts / "build-controller", wheels, images])
        materials += [_wheel_material(wheel) for wheel in sorted(wheels.iterdir())]
        _bills(root, sorted(images.glob("*.tar")))
        for name in IMAGES:
            bill = output / f"{name}-{version}-image-linux-{architecture}.cdx.json"
            shutil.copy(images / f"{name}.cdx.json", bill)
    for name in IMAGES:
        saved = {architecture: work / "images" / architecture / f"{name}.tar" for architecture in ARCHITECTURES}
        oci.write(saved, f"localhost/{name}:{version}", output / f"{name}-{version}.oci.tar")
    return materials


def _wheel_material(wheel: Path) -> Material:
    name, version, *_ = wheel.name.split("-")
    return Material(
        f"pkg:pypi/{name.lower().replace('_', '-')}@{version}?file_name={wheel.name}", "sha256", sha256(wheel)
    )


def _materials(root: Path) -> list[Material]:
    """Return the packages of Debian's that were built with, on this machine and in the trees."""
    template = "${Package} ${Version} ${Architecture}\n"
    linked = [name for names in _LINKED.values() for name in names]
    installed = _output(["dpkg-query", "--show", f"--showformat={template}", *_COMPILERS, *linked])
    packages = (line.split() for line in installed.splitlines())
    found = [debian_material(name, version, architecture, RELEASE) for name, version, architecture in packages]
    source, version = (root / "build/static/arm64/libpython/built-using").read_text().removesuffix(")\n").split(" (= ")
    found.append(debian_material(source, version, "source", RELEASE))
    for suite in SUITES:
        for architecture in ARCHITECTURES:
            recipe = debian.builder(suite, "" if architecture == NATIVE else architecture)
            status = _output(["tar", "--extract", "--to-stdout", "--file", rootfs(recipe), "./var/lib/dpkg/status"])
            found += [debian_material(*package, suite) for package in installed_packages(status)]
    return found


def installed_packages(status: str) -> list[tuple[str, str, str]]:
    """Return name, version and architecture of each package in dpkg's table."""
    records = [dict(re.findall(r"^(\S+): (.*)$", record, re.MULTILINE)) for record in status.split("\n\n")]
    return [(each["Package"], each["Version"], each["Architecture"]) for each in records if each]


def _bills(root: Path, archives: list[Path], *options: str) -> None:
    _run([sys.executable, root / "packaging/container/sbom.py", *options, *archives])


def _run(argv: list[Argument]) -> None:
    """Run a command, whose output is the user's. Raises subprocess.CalledProcessError."""
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


def _output(argv: list[Argument]) -> str:
    result = subprocess.run(argv, text=True, capture_output=True)
    if result.returncode != 0:
        raise CommandFailed(argv, result)
    return result.stdout


def _say(part: str) -> None:
    print(f"release: {part}", flush=True)
