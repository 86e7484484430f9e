"""The project's RPM packages, built on Debian 12: Fedora is in no registry that we reach.

There, Python's modules have Debian's directory, so that such a package can be installed on Debian, too.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.lab import checkout, debian
from tests.lab.broker import PROXY
from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import run
from tests.lab.images import DebianRecipe, image_tag
from tests.lab.podman import Container, Options, Volume

BROKER, STATIC = "fusermount3-broker", "fusermount3-proxy-static"
NAMES = (BROKER, STATIC)

LIBRARIES = ("click", "h11", "prometheus-client", "pyxattr", "rich", "seccomp", "systemd")
"""What the spec requires of Python, in Debian's packages python3-…."""
_PYTHON = tuple(f"python3-{name}" for name in LIBRARIES)
_TOOLS = ("rpm", "rpmlint", "gcc", "libc6-dev", "python3-pip", "python3-setuptools", "python3-wheel")
BUILDER = DebianRecipe("rpm-builder", ("passwd", *_TOOLS, *_PYTHON))
MACHINE = DebianRecipe("rpm-machine", (*debian.machine("bookworm").packages, "rpm", *_PYTHON))
"""A system that boots, with all that the broker's package requires."""
#: Debian's rpm knows no packages of Debian, hence no dependencies.
_OPTIONS = ("--nodeps", "--define", "python3_sitelib /usr/lib/python3/dist-packages")


def build(output: Path, release: str = "") -> None:
    """Build the packages of this checkout, as `make rpm` does, into `output`. CommandFailed if that fails.

    `release`: more at the end of the packages' Release, for newer ones.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        run([checkout.ROOT / "packaging/export", place / "sources"])
        (place / "output").mkdir()
        run(["chown", "--recursive", "--no-dereference", "1000:1000", place])
        options = Options(volumes=[Volume(place, "/build", "rw"), Volume(PROXY, "/srv/fusermount3-proxy")])
        command = ["packaging/rpm/build", "/srv/fusermount3-proxy", "/build/output", *_OPTIONS]
        with Container(image_tag(BUILDER), options=options) as container:
            env = {"DEB_PYTHON_INSTALL_LAYOUT": "deb"}
            more = ["--define", f"dist {release}"] if release else []
            container.exec([*command, *more], user="user", workdir="/build/sources", env=env, timeout=600)
        shutil.copytree(place / "output", output, dirs_exist_ok=True)


def built(release: str = "") -> Path:
    """Return the directory with the packages of this checkout, which are built once until a file changes."""
    recipe = recipe_hash(BUILDER.key(), release, PROXY.read_bytes(), *checkout.contents())
    return Cache().entry_of_checkout(f"rpm-packages{release}", recipe, lambda directory: build(directory, release))


def rpms(directory: Path) -> dict[str, Path]:
    """Return the packages in a directory by their names."""
    return {path.name.rsplit("-", 2)[0]: path for path in directory.glob("*.rpm")}
