"""Fetches the wheels of what the controller imports, for the Python that runs this.

    .venv/bin/python packaging/container/controller_wheels.py DIRECTORY

These are the requirements of the extra [controller], and of the package's own those that the controller has, too; all
in the versions of constraints.txt.
"""

import argparse
import configparser
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Of the package's own requirements: all others are the broker's.
OF_THE_PACKAGE = ("click", "prometheus-client")


def requirements() -> list[str]:
    """Return what is to be installed, as setup.cfg has it."""
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / "setup.cfg")
    own = configuration["options"]["install_requires"].split()
    extra = configuration["options.extras_require"]["controller"].split()
    return [*(each for each in own if re.split("[<>=]", each)[0] in OF_THE_PACKAGE), *extra]


def download(directory: Path) -> None:
    """Fill the directory. Raises subprocess.CalledProcessError."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(directory), "--only-binary=:all:"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *requirements()], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    download(parser.parse_args().directory)
