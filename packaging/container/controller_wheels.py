"""Fetches the wheels of what the controller imports, for the Python that runs this.

    .venv/bin/python packaging/container/controller_wheels.py [--architecture ARCHITECTURE] DIRECTORY

ARCHITECTURE is Debian's name of one, and this machine's if none is given. What is fetched are the requirements of the
extra [controller], and of the package's own those that the controller has, too; all in the versions of constraints.txt.
"""

import argparse
import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Of the package's own requirements: all others are the broker's.
OF_THE_PACKAGE = ("click", "prometheus-client")

#: The kernel's names of architectures by Debian's.
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
#: The minor versions of glibc that a wheel may need at least: up to that of Debian 12.
GLIBC = range(17, 37)


def options(architecture: str | None) -> list[str]:
    """Return what tells pip to take wheels for this architecture alone."""
    machine = MACHINES[architecture] if architecture else os.uname().machine
    platforms = [f"manylinux2014_{machine}", *(f"manylinux_2_{minor}_{machine}" for minor in GLIBC)]
    return ["--only-binary=:all:", *(f"--platform={platform}" for platform in platforms)]


def pinned(directory: Path) -> list[str]:
    """Return what has pip install all wheels in the directory. Of one that is named by its path it records the path."""
    parts = (wheel.name.split("-") for wheel in sorted(directory.glob("*.whl")))
    return [f"{name}=={version}" for name, version, *_ in parts]


def requirements() -> list[str]:
    """Return what is to be installed, as setup.cfg has it."""
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / "setup.cfg")
    own = configuration["options"]["install_requires"].split()
    extra = configuration["options.extras_require"]["controller"].split()
    return [*(each for each in own if re.split("[<>=]", each)[0] in OF_THE_PACKAGE), *extra]


def download(directory: Path, architecture: str | None) -> None:
    """Fill the directory. Raises subprocess.CalledProcessError."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(directory), *options(architecture)]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *requirements()], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--architecture", choices=MACHINES)
    parser.add_argument("--print-arguments", action="store_true", help="only print how pip installs what is there")
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if arguments.print_arguments:
        print(*options(arguments.architecture), *pinned(arguments.directory), sep="\n")
    else:
        download(arguments.directory, arguments.architecture)
