"""Who starts the broker or the demo without the rights for it reads in a sentence what is missing and what to type."""

from __future__ import annotations

import os
import shlex
import subprocess
from errno import ENOSYS, EPERM
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.documented import block
from tests.lab.broker import PROGRAM
from tests.lab.denied import FSOPEN, denying

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
#: Without what a make that runs these tests says to another one.
AS_USER = (
    *("env", "--unset=MAKELEVEL", "--unset=MAKEFLAGS", "--unset=MFLAGS", "HOME=/nonexistent"),
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"),
)
#: What an engine gives root of a container that was started without options.
CAPABILITIES_OF_PODMAN = (
    "chown,dac_override,fowner,fsetid,kill,net_bind_service,setfcap,setgid,setpcap,setuid,sys_chroot"
)
AS_ROOT_OF_A_CONTAINER = (
    "setpriv",
    "--inh-caps=-all",
    "--bounding-set=-all," + ",".join(f"+{name}" for name in CAPABILITIES_OF_PODMAN.split(",")),
)
IN_A_USER_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def said(command: Sequence[str | Path], status: int = 1) -> str:
    result = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (status, "")
    return result.stderr


@pytest.mark.parametrize("subcommand", [["serve"], ["csi", "--endpoint=unix:///tmp/none/csi.sock", "--node-id=node"]])
def test_a_user_is_told_to_type_sudo(subcommand: list[str]) -> None:
    assert said([*AS_USER, PROGRAM, *subcommand]) == (
        "Error: only root can run the broker: type sudo before the command, or start the systemd service\n"
    )


def test_the_root_of_a_container_without_options_is_told_which_the_page_has() -> None:
    (error,) = said([*AS_ROOT_OF_A_CONTAINER, PROGRAM, "serve"]).splitlines()
    lacking, _, options = error.removeprefix("Error: the broker lacks ").partition("; ")
    assert lacking == "CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE, CAP_SYS_ADMIN"
    given = set(shlex.split(options.removeprefix("a container of the broker is started with ")))
    (run,) = [
        each
        for each in block("containers.md", "podman load --input build/images/fusermount3-broker.tar").commands
        if "podman run" in each
    ]
    documented = set(shlex.split(run))
    assert given <= documented
    needed = {each for each in documented if each.startswith(("--cap-add", "--security", "--pid", "--device"))}
    assert needed - {"--security-opt=no-new-privileges"} <= given


@pytest.mark.parametrize("error", [EPERM, ENOSYS])
def test_where_a_profile_of_an_engine_forbids_mounts_the_options_are_told(error: int) -> None:
    assert said([*denying(error, FSOPEN), PROGRAM, "serve"]) == (
        f"Error: the mounter may not mount: {os.strerror(error)}; a container of the broker needs"
        " --security-opt=seccomp=unconfined --security-opt=apparmor=unconfined --security-opt=label=disable\n"
    )


def test_the_root_of_a_user_namespace_is_told_to_be_root_of_the_host() -> None:
    assert said([*IN_A_USER_NAMESPACE, PROGRAM, "serve"]) == (
        "Error: root of a user namespace, such as a rootless container's, can't run the broker: start it, or its"
        " container, as root of the host, with sudo\n"
    )


@pytest.mark.parametrize("target", ["demo", "cluster", "bench", "soak", "test-cluster", "test-kernels"])
def test_make_tells_a_user_to_type_sudo_before_it_builds_anything(target: str) -> None:
    first, *others = said([*AS_USER, "make", target], status=2).splitlines()
    assert first == f"make {target}: needs root, as it runs a broker on this host: sudo make {target}"
    assert [each for each in others if "Error 1" not in each] == []
