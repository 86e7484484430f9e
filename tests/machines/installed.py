"""The packages on a machine with its own kernel: the service, and containers as Podman starts them by default.

For the machines of `tests.machines` only: the packages are installed, and nothing else uses the service.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fusermount3_broker.kernel import features
from tests.e2e.conftest import wait_until
from tests.e2e.test_kernel import numbers
from tests.lab.commands import CommandFailed, run
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.podman import mountinfo
from tests.lab.programs import whoamifs

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICE = "fusermount3-broker.service"
MOUNTPOINT = "/home/user/mnt"
CDI = "/etc/cdi/fusermount3-proxy.json"
#: Podman's own; the machine's containers.conf(5) names another one.
SECCOMP = "/usr/share/containers/seccomp.json"


def status() -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(["fusermount3-broker", "status", "--json"]).stdout)
    return answer


def mounts() -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = json.loads(run(["fusermount3-broker", "mounts", "--json"]).stdout)
    return answer


@pytest.fixture(scope="module", autouse=True)
def service() -> Iterator[None]:
    """The service, started as docs/install-systemd.md says."""
    run(["systemctl", "start", SERVICE])
    Path(CDI).parent.mkdir(exist_ok=True)
    run(
        [
            "fusermount3-broker",
            "cdi",
            "generate",
            "--output",
            CDI,
            "--proxy",
            "/srv/main/build/static/fusermount3-proxy",
        ]
    )
    yield
    run(["systemctl", "stop", SERVICE])


class Podman:
    """A container with Podman's defaults, and the proxy by CDI. It ends with the block."""

    def __init__(self, user: str, *more: str, seccomp: bool = True) -> None:
        """`seccomp`: with the seccomp profile of docs/troubleshooting.md, which hosts with AppArmor need."""
        self._user = user
        self._more = [*more, *([] if seccomp else [f"--security-opt=seccomp={SECCOMP}"])]
        self._name = f"container-{time.monotonic_ns()}"

    def __enter__(self) -> Podman:
        given = ["--device", "fusermount3-proxy.dev/fuse=on", "--volume", f"{whoamifs()}:/usr/bin/whoamifs:ro"]
        user = ["--user", self._user]
        command = ["podman", "run", "--detach", "--name", self._name, "--network=none", *given, *user, *self._more]
        run([*command, image_tag(BUSYBOX), "sleep", "100000"])
        return self

    def __exit__(self, *_: object) -> None:
        run(["podman", "rm", "--force", "--time=0", self._name])

    def exec(self, *argv: str) -> str:
        return run(["podman", "exec", self._name, *argv]).stdout

    def mount(self) -> None:
        self.exec("whoamifs", MOUNTPOINT)


def test_the_machine_is_one_that_people_run() -> None:
    assert Path("/sys/fs/cgroup/cgroup.controllers").exists(), "cgroup v2 alone"
    assert Path("/proc/1/comm").read_text() == "systemd\n"
    assert Path("/sys/module/apparmor/parameters/enabled").read_text() == "Y\n"


def test_the_service_names_what_the_kernel_lacks() -> None:
    lacks = [each["name"] for each in status()["kernel"]["lacks"]]
    release = numbers(os.uname().release)
    assert lacks == [each.name for each in features.FEATURES if numbers(each.since) > release]
    log = run(["journalctl", "--unit", SERVICE, "--output=cat"]).stdout
    assert [log.count(f" offers no {name} ") for name in lacks] == [1] * len(lacks)


@pytest.mark.parametrize("user", ["0:0", "1000:1000"])
def test_a_container_with_podmans_defaults_mounts_and_unmounts(user: str) -> None:
    with Podman(user) as container:
        container.mount()
        uid = user.partition(":")[0]
        assert container.exec("head", "-n1", f"{MOUNTPOINT}/whoami").startswith(f"uid={uid} gid={uid} pid=")
        assert [each["mountpoint"] for each in mounts()] == [MOUNTPOINT]
        container.exec("fusermount3", "-u", MOUNTPOINT)
        wait_until(lambda: mounts() == [])


def test_libfuse_gives_up_where_apparmor_refuses_mount_before_anything_else() -> None:
    """As docs/troubleshooting.md says. With auto_unmount, it calls fusermount3 without trying mount(2)."""
    with Podman("1000:1000", seccomp=False) as container:
        with pytest.raises(CommandFailed, match="fuse: mount failed: Permission denied"):
            container.mount()
        container.exec("whoamifs", "-o", "auto_unmount", MOUNTPOINT)
        assert container.exec("head", "-n1", f"{MOUNTPOINT}/whoami").startswith("uid=1000 ")
        container.exec("fusermount3", "-u", MOUNTPOINT)
        wait_until(lambda: mounts() == [])


@pytest.mark.parametrize("name", ["supervisor", "front", "mounter"])
def test_a_mount_stays_when_a_process_of_the_service_is_killed(name: str) -> None:
    with Podman("1000:1000") as container:
        container.mount()
        pid = status()[name]["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: serves_with_another(name, pid))
        assert container.exec("head", "-n1", f"{MOUNTPOINT}/whoami").startswith("uid=1000 ")
        assert [each["mountpoint"] for each in mounts()] == [MOUNTPOINT]
        container.exec("fusermount3", "-u", MOUNTPOINT)
        wait_until(lambda: mounts() == [])


def serves_with_another(name: str, pid: int) -> bool:
    answer = run(["fusermount3-broker", "status", "--json"], check=False)
    return answer.returncode == 0 and json.loads(answer.stdout)[name]["pid"] != pid


def test_a_dead_mount_is_removed() -> None:
    with Podman("1000:1000") as container:
        container.mount()
        container.exec("sh", "-c", "kill -KILL $(pidof whoamifs)")
        wait_until(lambda: mounts() == [])
        assert MOUNTPOINT not in container.exec("cat", "/proc/mounts")


def test_nothing_is_left() -> None:
    assert [mount for mount in mountinfo() if mount.is_fuse] == []
    assert run(["systemctl", "is-active", SERVICE]).stdout == "active\n"
