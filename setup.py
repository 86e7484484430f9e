"""What setup.cfg can't say of the archives for PyPI: what the wheel holds beside the modules, and the bytes of both.

The wheel holds the static fusermount3-proxy (no script of Python's: containers are given that very file), manual pages,
the shells' completion, systemd's units and the example of the configuration.

`FUSERMOUNT3PROXY_EXECUTABLE` names an executable that was linked before, as `make wheel` does. Without, one is linked
here, and where that fails, the wheel is built without it, as without an extension module that is `optional`: not every
Python comes with a static library, and the broker needs none. What the broker does need are two small programs that its
mounter executes, for which there must be a C compiler (`CC`) and a static libc. With `FUSERMOUNT3PROXY_MODULES_ONLY=1`
the wheel holds nothing but the modules and these programs, for distributions, which have their own ways for all else.

The same sources give the same bytes in any directory. All times in the archives are that of the release, from
debian/changelog.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, setup
from setuptools.command.build_py import build_py
from setuptools.command.install import install
from setuptools.command.sdist import sdist

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1, as in Debian 12
    from wheel.bdist_wheel import bdist_wheel  # type: ignore[no-redef]  # the same under its older name

PROXY = "fusermount3-proxy"
BROKER = "fusermount3-broker"
MODULES_ONLY = os.environ.get("FUSERMOUNT3PROXY_MODULES_ONLY", "") not in ("", "0")


def release_time() -> int:
    """Return when the release was made that debian/changelog begins with, in seconds since the epoch."""
    lines = Path("debian/changelog").read_text().splitlines()
    _, _, date = next(line for line in lines if line.startswith(" -- ")).partition(">  ")
    return int(parsedate_to_datetime(date).timestamp())


TIME = int(os.environ.setdefault("SOURCE_DATE_EPOCH", str(release_time())))
# The modes of files are in the archives, too.
os.umask(0o022)


class BuildModules(build_py):
    """Builds the mounter's programs beside its modules; of an editable installation, in the sources."""

    def run(self) -> None:
        super().run()
        if run("packaging/mounter_programs.py", "--output", self.programs) != 0:
            raise SystemExit("packaging/mounter_programs.py failed, see above; it needs a C compiler")

    @property
    def programs(self) -> Path:
        modules = Path("broker") if self.editable_mode else Path(self.build_lib)
        return modules / "fusermount3_broker/mounter"

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        built = (str(self.programs / name) for name in ("superblock_creator", "plain_call"))
        return [*super().get_outputs(include_bytecode), *built]


class InstallSystemFiles(Command):
    """Installs what is no module; a part of `install`, and so of a wheel, but not of an editable one."""

    description = "install the static executable, manual pages, completion, units and the example configuration"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        self.scripts: str | None = None
        self.data: str | None = None
        self.build: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("install", ("install_scripts", "scripts"), ("install_data", "data"))
        self.set_undefined_options("build", ("build_temp", "build"))

    def run(self) -> None:
        assert self.scripts is not None and self.data is not None and self.build is not None
        built = Path(self.build, "system-files")
        given = os.environ.get("FUSERMOUNT3PROXY_EXECUTABLE")
        if executable := Path(given) if given else linked_executable(built / PROXY):
            place = Path(self.scripts, PROXY)
            self.copy(executable, place)
            place.chmod(0o755)
        for directory, files in shared_files(built).items():
            for file in files:
                self.copy(file, Path(self.data, directory, file.name))

    def copy(self, source: Path, target: Path) -> None:
        self.mkpath(str(target.parent))
        self.copy_file(str(source), str(target))


def linked_executable(output: Path) -> Path | None:
    """Link the executable, and see that it starts. None, and a word to the user, if that can't be."""
    if (
        run("packaging/static/build.py", "--output", output) == 0
        and subprocess.run([output, "--version"]).returncode == 0
    ):
        return output
    print(f"{PROXY} is left out, for it could not be linked (see above); {BROKER} needs it not", file=sys.stderr)
    return None


def shared_files(built: Path) -> dict[str, list[Path]]:
    """Return which files go into which directory of sys.prefix; what is generated is generated now."""
    date = datetime.fromtimestamp(TIME, UTC).strftime("%Y-%m-%d")
    for arguments in (["packaging/man/build.py", "--date", date], ["packaging/completion/build.py"]):
        if run(*arguments, "--output", built) != 0:
            raise SystemExit(f"{arguments[0]} failed, see above")
    units = [f"{BROKER}.service", f"{BROKER}.socket", f"{BROKER}-metrics.socket", f"{BROKER}.sysusers"]
    packaging = Path("packaging")
    completion = packaging / "completion"
    return {
        f"share/{PROXY}": [packaging / f"{BROKER}.toml"],
        f"share/{PROXY}/systemd": [packaging / "systemd" / unit for unit in units],
        "share/man/man1": [built / f"{PROXY}.1"],
        "share/man/man5": [built / f"{BROKER}.toml.5"],
        "share/man/man8": [built / f"{BROKER}.8"],
        "share/bash-completion/completions": [completion / PROXY, built / BROKER],
        "share/zsh/site-functions": [completion / f"_{PROXY}", built / f"_{BROKER}"],
        "share/fish/vendor_completions.d": [completion / f"{PROXY}.fish", built / f"{BROKER}.fish"],
    }


def run(script: str, *arguments: str | Path) -> int:
    """Run a script that imports modules from the sources; return its status."""
    path = os.pathsep.join(filter(None, (str(Path.cwd()), str(Path.cwd() / "broker"), os.environ.get("PYTHONPATH"))))
    return subprocess.run([sys.executable, "-B", script, *arguments], env={**os.environ, "PYTHONPATH": path}).returncode


class Install(install):
    sub_commands: ClassVar[list[tuple[str, Callable[[Any], bool] | None]]] = [
        *install.sub_commands,
        ("install_system_files", lambda _: not MODULES_ONLY),
    ]


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of any Python 3 on this platform, unless somebody says better.

        `make wheel` does, for static executables need no particular libc.
        """
        implementation, abi, platform = super().get_tag()
        if platform == "any":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        return implementation, abi, platform


class SourceDistribution(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        # setuptools writes options of its own into it, of which there are none, and everything else anew.
        shutil.copyfile("setup.cfg", Path(base_dir, "setup.cfg"))

    def make_distribution(self) -> None:
        super().make_distribution()
        for archive in self.archive_files:
            repack(Path(archive))


def repack(archive: Path) -> None:
    """Write a .tar.gz again, with nothing in it of who made it, where and when."""
    content = archive.read_bytes()
    with (
        tarfile.open(fileobj=io.BytesIO(content)) as old,
        archive.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=TIME) as compressed,
        tarfile.open(mode="w", fileobj=compressed) as new,
    ):
        for member in sorted(old, key=lambda member: member.name):
            new.addfile(anonymous(member), old.extractfile(member) if member.isfile() else None)


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a file or directory of the same name; it is executable or not, and all may read it."""
    result = tarfile.TarInfo(member.name)
    result.type, result.size = member.type, member.size
    result.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    result.mtime = TIME
    return result


setup(
    cmdclass={
        "bdist_wheel": Wheel,
        "build_py": BuildModules,
        "install": Install,
        "install_system_files": InstallSystemFiles,
        "sdist": SourceDistribution,
    },
    # Otherwise setup.cfg says which: also those of what is linked into the executable.
    license_files=["LICENSE"] if MODULES_ONLY else None,
)
