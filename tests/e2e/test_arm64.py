"""The proxy for arm64: it is built on this machine and mounts under emulation; everything else is native."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import has_ended_all, nothing_left, wait_until
from tests.lab.broker import PROXY
from tests.lab.cache import Cache
from tests.lab.checkout import make_static
from tests.lab.commands import run
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.podman import FUSE_STAND_IN, Container, Options, Volume
from tests.lab.programs import whoamifs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.broker import Broker

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
QEMU = Path("/usr/bin/qemu-aarch64-static")
MOUNTPOINT = "/home/user/mnt"

# Start the emulator directly: this needs no binfmt_misc entry for arm64, which is a setting of the whole machine.
EMULATED = '#!/bin/sh\nexec /opt/qemu -0 "$0" /opt/proxy "$@"\n'


@pytest.fixture(scope="module")
def arm64() -> Path:
    """The executable that `make static ARCH=arm64` builds from the same sources as the native one."""
    run(["make", "--directory", ROOT, "static"], timeout=600)
    return make_static("arm64")


@pytest.fixture
def container(arm64: Path, broker: Broker, tmp_path: Path) -> Iterator[Container]:
    """A container of this machine's architecture, in which fusermount3 is the emulated proxy."""
    helper = tmp_path / "fusermount3"
    helper.write_text(EMULATED)
    helper.chmod(0o755)
    emulated = [Volume(QEMU, "/opt/qemu"), Volume(arm64, "/opt/proxy")]
    volumes = [*broker.volumes(helper), *emulated, FUSE_STAND_IN, Volume(whoamifs(), "/usr/bin/whoamifs")]
    options = Options(user="1000:1000", volumes=volumes)
    with nothing_left(broker), Container(image_tag(BUSYBOX), options=options) as container:
        yield container


def test_it_is_a_static_executable_for_arm64(arm64: Path) -> None:
    header = run(["readelf", "--file-header", "--program-headers", arm64]).stdout
    assert "AArch64" in header
    assert "INTERP" not in header
    assert "DYNAMIC" not in header


def test_what_is_frozen_is_the_same_for_both(arm64: Path) -> None:
    assert arm64.with_name("frozen.c").read_bytes() == PROXY.with_name("frozen.c").read_bytes()


def test_it_is_the_same_when_it_is_built_again(arm64: Path, tmp_path: Path) -> None:
    again = tmp_path / "fusermount3-proxy"
    libpython = arm64.with_name("libpython")
    build: list[str | Path] = ["/usr/bin/python3", ROOT / "packaging/static/build.py", "--arch", "arm64"]
    run([*build, "--output", again, "--root", libpython], timeout=300)
    assert again.read_bytes() == arm64.read_bytes()


def test_a_filesystem_is_mounted_and_unmounted(container: Container) -> None:
    program = container.start(["whoamifs", "-f", MOUNTPOINT])
    wait_until(lambda: container.fuse_mounts(MOUNTPOINT) or program.poll() is not None)
    assert program.poll() is None, program.communicate()
    container.exec(["sh", "-c", f"cat > {MOUNTPOINT}/files/file"], input="written\n")
    assert container.exec(["cat", f"{MOUNTPOINT}/files/file"]).stdout == "written\n"
    result = container.exec(["fusermount3", "-u", MOUNTPOINT])
    assert (result.stdout, result.stderr) == ("", "")
    assert program.wait(timeout=60) == 0
    assert container.fuse_mounts() == []
    wait_until(lambda: has_ended_all(container))


def test_a_program_sees_who_asks(container: Container) -> None:
    result = container.exec(["whoamifs", "--probe", MOUNTPOINT], check=False)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "ok=yes"), result.stdout + result.stderr


def test_what_a_killed_program_leaves_is_unmounted(container: Container) -> None:
    program = container.start(["whoamifs", "-f", "-o", "auto_unmount", MOUNTPOINT])
    wait_until(lambda: container.fuse_mounts(MOUNTPOINT) or program.poll() is not None)
    container.exec(["sh", "-c", "kill -KILL $(pidof whoamifs)"])
    wait_until(lambda: container.fuse_mounts() == [] and has_ended_all(container))


def test_a_refusal_is_told_as_on_any_machine(container: Container) -> None:
    result = container.exec(["fusermount3", "-u", "/tmp"], check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert "/tmp not found in /etc/mtab" in result.stderr.splitlines()[0]


@pytest.fixture
def cache(arm64: Path, tmp_path: Path) -> Path:
    """This test's own copy of the cache from which the executable was linked."""
    assert arm64.exists()
    return Path(shutil.copytree(Cache().root / "apt-arm64", tmp_path / "apt-arm64"))


def unpack(cache: Path, env: dict[str, str] | None = None) -> Path:
    """Unpack libpython again; return the package in the cache."""
    script: list[str | Path] = [ROOT / "packaging/static/foreign-libpython", "arm64", cache.parent / "libpython"]
    subprocess.run(script, env={**os.environ, "FUSERMOUNT3PROXY_CACHE": str(cache.parent), **(env or {})}, check=True)
    assert list((cache.parent / "libpython").glob("usr/lib/python3.*/config-*-aarch64-linux-gnu/libpython3.*.a"))
    (package,) = cache.glob("*.deb")
    return package


def test_without_a_network_what_is_in_the_cache_will_do(cache: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    unpack(cache, {"http_proxy": nowhere, "https_proxy": nowhere})


def test_a_damaged_package_is_downloaded_again(cache: Path) -> None:
    (package,) = cache.glob("*.deb")
    content = package.read_bytes()
    package.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert unpack(cache).read_bytes() == content
