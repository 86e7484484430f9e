"""Docker and rootless Podman as Debian configures them, on a machine with its own kernel: containers as
docs/containers.md says, with volumes only.

For the machines of `tests.machines` only.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.documented import block
from tests.lab.broker import PROXY
from tests.lab.commands import CommandFailed, run
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.podman import mountinfo
from tests.lab.programs import whoamifs
from tests.machines.installed import MOUNTPOINT, SERVICE, mounts, serves_with_another, status

if TYPE_CHECKING:
    from collections.abc import Iterator

UID = 1000
SOCKETS = "/run/fusermount3-proxy"
#: AppArmor's profile of the genuine helper.
APPARMOR = Path("/etc/apparmor.d/fusermount3")


class Engine:
    """A container engine that has the image."""

    def __init__(self, command: tuple[str, ...], archive: Path) -> None:
        self._command = command
        self.run("load", "--input", str(archive))

    def run(self, *arguments: str) -> str:
        return run([*self._command, *arguments]).stdout

    def container(self, user: str, helper: str = "/usr/bin/fusermount3") -> Container:
        return Container(self, user, helper)


class Container:
    """A container with the engine's defaults, which ends with the block. The proxy is at the path `helper`."""

    def __init__(self, engine: Engine, user: str, helper: str) -> None:
        self._engine = engine
        self._user = user
        self._helper = helper
        self._name = f"container-{time.monotonic_ns()}"

    def __enter__(self) -> Container:
        given = {
            SOCKETS: SOCKETS,
            str(PROXY): self._helper,
            "/dev/null": "/dev/fuse",
            str(whoamifs()): "/usr/bin/whoamifs",
        }
        volumes = [f"--volume={source}:{target}:ro" for source, target in given.items()]
        options = ["--detach", "--name", self._name, "--network=none", "--user", self._user, *volumes]
        self._engine.run("run", *options, image_tag(BUSYBOX), "sleep", "100000")
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.run("rm", "--force", self._name)

    def exec(self, *argv: str) -> str:
        return self._engine.run("exec", self._name, *argv)


@pytest.fixture(scope="module")
def archive() -> Path:
    """The image, where every user may read it."""
    archive = Path("/srv/image.tar")
    run(["podman", "save", "--format=docker-archive", "--output", archive, image_tag(BUSYBOX)])
    archive.chmod(0o644)
    return archive


@pytest.fixture(scope="module")
def docker(archive: Path) -> Engine:
    run(["systemctl", "start", "docker.service"])
    return Engine(("docker",), archive)


@pytest.fixture(scope="module")
def confined_podman(archive: Path) -> Engine:
    """Rootless Podman, where AppArmor confines what is executed as /usr/bin/fusermount3 if it has a profile for it."""
    run(["usermod", "--add-subuids", "100000-165535", "--add-subgids", "100000-165535", "user"])
    run(["loginctl", "enable-linger", "user"])
    runtime = f"/run/user/{UID}"
    wait_until(lambda: Path(runtime, "bus").exists(), 60)
    environment = (
        "env",
        "--chdir=/",
        f"XDG_RUNTIME_DIR={runtime}",
        f"DBUS_SESSION_BUS_ADDRESS=unix:path={runtime}/bus",
    )
    return Engine(("runuser", "--user", "user", "--", *environment, "podman"), archive)


@pytest.fixture(scope="module")
def rootless_podman(confined_podman: Engine) -> Engine:
    """Rootless Podman on a host as docs/troubleshooting.md says."""
    if APPARMOR.exists():
        for command in block("troubleshooting.md", "ln -s").commands:
            run(["sh", "-c", command])
    return confined_podman


def test_apparmors_profile_of_the_genuine_helper_does_not_apply_to_a_symbolic_link(confined_podman: Engine) -> None:
    if not APPARMOR.exists():
        pytest.skip("this release has no such profile")
    run(["systemctl", "start", SERVICE])
    with confined_podman.container("0:0") as container, pytest.raises(CommandFailed, match="Permission denied"):
        container.exec("whoamifs", MOUNTPOINT)
    with confined_podman.container("0:0", "/usr/bin/fusermount3-proxy") as container:
        container.exec("ln", "-s", "fusermount3-proxy", "/usr/bin/fusermount3")
        container.exec("whoamifs", MOUNTPOINT)
        assert [each["mountpoint"] for each in mounts()] == [MOUNTPOINT]
    wait_until(lambda: mounts() == [])


@pytest.fixture(params=["docker", "rootless_podman"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    run(["systemctl", "start", SERVICE])
    yield request.getfixturevalue(request.param)
    assert [mount for mount in mountinfo() if mount.is_fuse] == []


@pytest.mark.parametrize("user", ["0:0", "1000:1000"])
def test_a_container_with_the_engines_defaults_mounts_and_unmounts(engine: Engine, user: str) -> None:
    with engine.container(user) as container:
        container.exec("whoamifs", MOUNTPOINT)
        uid = user.partition(":")[0]
        assert container.exec("head", "-n1", f"{MOUNTPOINT}/whoami").startswith(f"uid={uid} gid={uid} pid=")
        assert [each["mountpoint"] for each in mounts()] == [MOUNTPOINT]
        container.exec("fusermount3", "-u", MOUNTPOINT)
        wait_until(lambda: mounts() == [])


def test_a_mount_stays_when_the_front_is_killed_and_goes_when_its_program_dies(engine: Engine) -> None:
    with engine.container("1000:1000") as container:
        container.exec("whoamifs", MOUNTPOINT)
        pid = status()["front"]["pid"]
        os.kill(pid, 9)
        wait_until(lambda: serves_with_another("front", pid))
        assert container.exec("head", "-n1", f"{MOUNTPOINT}/whoami").startswith("uid=1000 ")
        container.exec("sh", "-c", "kill -KILL $(pidof whoamifs)")
        wait_until(lambda: mounts() == [])
        assert MOUNTPOINT not in container.exec("cat", "/proc/mounts")


def test_a_container_that_ends_takes_its_mount_with_it(engine: Engine) -> None:
    with engine.container("1000:1000") as container:
        container.exec("whoamifs", MOUNTPOINT)
        assert len(mounts()) == 1
    wait_until(lambda: mounts() == [])
