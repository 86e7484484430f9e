"""fuse-starter in a pod: a program that takes a descriptor serves the volume, or the attempt leaves nothing behind."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.csi.pods import DATA, SOCKET, consumer, pod, read, starter, wait_for_mount, wait_for_volume

if TYPE_CHECKING:
    from tests.lab.kubelet import Kubelet, Pod

pytestmark = pytest.mark.e2e

COMMANDS = {
    "a placeholder": "fuse-starter -- hello_ll -f {}",
    "meta-fuse-csi-plugin's": f"fuse-starter --fd-passing-socket-path /sockets/{SOCKET} -- hello_ll -f /dev/fd/3",
}


def said(running: Pod, text: str) -> None:
    """Wait until the starter has logged this text, in any run of its container."""
    give_up = time.monotonic() + 30
    while text not in (logs := running["starter"].logs()):
        assert time.monotonic() < give_up, logs
        time.sleep(0.1)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_the_program_serves_and_has_no_mount_of_its_own(kubelet: Kubelet, command: str) -> None:
    with kubelet.pod(pod([consumer(), starter(f"exec {command}")])) as running:
        wait_for_volume(running)
        assert read(running) == "hello\n"
        assert running["starter"].fuse_mounts() == []
        ready = ["fusermount3-proxy", "--wait-mounted", DATA]
        assert running["starter"].exec(ready, check=False).returncode == 1  # it has no volume, only the socket


def test_mount_options_are_those_of_the_filesystem(kubelet: Kubelet) -> None:
    with kubelet.pod(pod([consumer(), starter("exec fuse-starter -o ro,fsname=of:us -- hello_ll -f {}")])) as running:
        wait_for_volume(running)
        (mount,) = running["consumer"].fuse_mounts(DATA)
        assert mount.source == "of:us"
        written = running["consumer"].exec(["sh", "-c", f"echo > {DATA}/hello"], check=False)
        assert "Read-only file system" in written.stderr


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("fuse-starter -- no-such-program {}", 127, "failed to execute no-such-program: No such file or directory"),
        ("fuse-starter -- /etc/passwd {}", 126, "failed to execute /etc/passwd: Permission denied"),
        ("fuse-starter -o frobnicate -- hello_ll -f {}", 125, "fuse-starter: unknown option 'frobnicate'"),
    ],
    ids=["no such program", "no program", "an unknown option"],
)
def test_what_fails_leaves_the_volume_as_it_was(kubelet: Kubelet, command: str, status: int, text: str) -> None:
    with kubelet.pod(pod([consumer(), starter(f"{command}; echo status $?; sleep 600")])) as running:
        said(running, f"status {status}")
        said(running, text)
        assert running["consumer"].fuse_mounts(DATA) == []
        assert running["consumer"].exec(["ls", DATA]).stdout == ""


def test_a_program_that_the_kernel_refuses_is_followed_by_one_that_serves(kubelet: Kubelet) -> None:
    """The error comes too late: the volume has a dead filesystem until the next program comes."""
    broken = "printf '#!/no/such/interpreter\\n' > /tmp/broken; chmod +x /tmp/broken; fuse-starter /tmp/broken {}"
    command = f"{broken}; echo status $?; until test -e /tmp/go; do sleep 0.1; done; exec fuse-starter hello_ll -f {{}}"
    with kubelet.pod(pod([consumer(), starter(command)])) as running:
        said(running, "status 127")
        wait_for_mount(running)
        failed = running["consumer"].exec(["ls", DATA], check=False)
        assert "Transport endpoint is not connected" in failed.stderr
        running["starter"].exec(["touch", "/tmp/go"])
        wait_until(lambda: "hello" in running["consumer"].exec(["ls", DATA], check=False).stdout)
        assert read(running) == "hello\n"
