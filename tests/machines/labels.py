"""Containers with SELinux enforcing, and the labels that Podman gives them.

For the machine of `tests.machines` only whose policy is that of Debian.
"""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.documented import block
from tests.lab.broker import PROXY
from tests.lab.commands import run
from tests.machines.installed import CDI, MOUNTPOINT, SERVICE, Podman, mounts

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTALLED = Path("/usr/bin/fusermount3-proxy")
REFUSED = "fusermount3: broker at /run/fusermount3-proxy/broker.sock: Permission denied\n"


class Labelled(Podman):
    """A container whose label forbids it to write to a descriptor of the test."""

    def __enter__(self) -> Labelled:
        super().__enter__()
        template = "--format={{.State.Pid}}"
        self._proc = Path("/proc", run(["podman", "inspect", "--latest", template]).stdout.strip())
        return self

    def label(self) -> str:
        return (self._proc / "attr/current").read_text()

    def say(self, command: str) -> str:
        """Return what a command of the shell in the container prints, and then, after a blank, its status."""
        self.exec("sh", "-c", f'({command}) > /tmp/said 2>&1; echo " $?" >> /tmp/said')
        said = (self._proc / "root/tmp/said").read_text()
        self.exec("rm", "/tmp/said")
        return said


@pytest.fixture(scope="module", autouse=True)
def proxy() -> Iterator[None]:
    """The proxy where its package has it."""
    shutil.copy(PROXY, INSTALLED)
    run(["restorecon", INSTALLED])
    Path(CDI).parent.mkdir(exist_ok=True)
    run(["fusermount3-broker", "cdi", "generate", "--output", CDI])
    yield
    run(["systemctl", "stop", SERVICE])


def test_the_policy_is_enforced() -> None:
    assert run(["getenforce"]).stdout == "Enforcing\n"


def test_the_policy_lets_no_container_connect() -> None:
    run(["systemctl", "start", SERVICE])
    with Labelled("1000:1000") as container:
        assert container.label().startswith("system_u:system_r:container_t:")
        assert container.say(f"whoamifs {MOUNTPOINT}") == f"{REFUSED} 4\n"
        assert mounts() == []


@pytest.fixture(scope="module")
def rules() -> None:
    """The host as docs/troubleshooting.md says."""
    run(["sh", "-euc", textwrap.dedent(block("troubleshooting.md", "mkdir -p").text)], timeout=600)
    run(["systemctl", "start", SERVICE])


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("uid", ["0", "1000"])
def test_with_the_documented_rules_a_container_mounts_and_unmounts(uid: str) -> None:
    with Labelled(f"{uid}:{uid}") as container:
        assert container.label().startswith("system_u:system_r:container_t:")
        assert container.say(f"whoamifs {MOUNTPOINT}") == " 0\n"
        assert container.say(f"head -n 1 {MOUNTPOINT}/whoami").startswith(f"uid={uid} gid={uid} pid=")
        assert [each["mountpoint"] for each in mounts()] == [MOUNTPOINT]
        assert container.say(f"fusermount3 -u {MOUNTPOINT}") == " 0\n"
        wait_until(lambda: mounts() == [])


@pytest.mark.usefixtures("rules")
def test_libfuse_gives_up_where_selinux_refuses_mount_before_anything_else() -> None:
    """As docs/troubleshooting.md says."""
    with Labelled("1000:1000", seccomp=False) as container:
        assert container.say(f"whoamifs {MOUNTPOINT}") == "fuse: mount failed: Permission denied\n 4\n"
        assert container.say(f"whoamifs -o auto_unmount {MOUNTPOINT}") == " 0\n"
        assert container.say(f"fusermount3 -u {MOUNTPOINT}") == " 0\n"
        wait_until(lambda: mounts() == [])


def test_the_policy_has_nothing_against_the_broker_itself() -> None:
    denied = [line for line in run(["dmesg"]).stdout.splitlines() if "avc:  denied" in line]
    assert [line for line in denied if 'comm="python3"' in line or 'comm="fusermount3-bro"' in line] == []
