"""docs/install-systemd.md, executed on its own machine: the broker from source, as a service; and the commands of the
other pages for a host where it runs.

Downloads come from the cache, because the machine has no network; compilation takes place on the machine.
"""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.documented import ROOT, block, blocks
from tests.lab import pypi
from tests.lab.broker import PROXY
from tests.lab.commands import run
from tests.lab.images import DebianRecipe, image_tag
from tests.lab.podman import Volume
from tests.lab.programs import whoamifs
from tests.packaging import machines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.lab.podman import Container

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PAGE = "install-systemd.md"
SERVICE = "fusermount3-broker.service"
SOCKET = "fusermount3-broker.socket"
METRICS = "fusermount3-broker-metrics.socket"
CONFIGURATION = "/etc/fusermount3-broker.toml"
MOUNTPOINT = "/home/user/mnt"
SOURCES, DOWNLOADS = "/srv/sources", "/srv/downloads"


def packages() -> list[str]:
    """Return the Debian packages that the page requires."""
    (install,) = block(PAGE, "apt-get install gcc").commands
    return install.split()[2:]


def recipe() -> DebianRecipe:
    """Return a bootable system with those packages, and curl to query the metrics."""
    return DebianRecipe("from-source", ("systemd", "systemd-sysv", "dbus", "curl", "procps", *packages()))


class Machine:
    """A booted machine with a clone of the sources."""

    def __init__(self, container: Container) -> None:
        self.container = container

    def run(self, *argv: str, user: str | None = None) -> str:
        """Run the command; return its output."""
        return self.container.exec(argv, user=user).stdout

    def execute(self, commands: Sequence[str]) -> str:
        """Execute the commands in the clone, as root in a shell; return their output. Raises CommandFailed."""
        script = "\n".join(["set -e", *commands])
        from_cache = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": DOWNLOADS}
        env = {"EDITOR": "true", **from_cache}
        return self.container.exec(["sh", "-c", script], workdir=SOURCES, env=env, timeout=300).stdout


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The machine, after the installation that the page describes."""
    sources = tmp_path_factory.mktemp("clone") / "sources"
    run([ROOT / "packaging/export", sources])
    (sources / "build/static").mkdir(parents=True)
    shutil.copy(PROXY, sources / "build/static")
    volumes = [
        Volume(sources, SOURCES, "rw"),
        Volume(pypi.wheelhouse(pypi.PYTHONS["bookworm"]), DOWNLOADS),
        Volume(whoamifs(), "/usr/bin/whoamifs"),
    ]
    with machines.booted(image_tag(recipe()), volumes) as container:
        machine = Machine(container)
        machine.execute(block(PAGE, "python3 -m venv").commands)
        machine.run("/opt/fusermount3-proxy/bin/fusermount3-proxy", "--version")  # linked by pip
        make, install = block(PAGE, "make static").commands
        assert make == "make static"  # done before any test
        machine.execute([install])
        machine.run("ln", "-s", "fusermount3-proxy", "/usr/bin/fusermount3")  # for the machine's own users
        yield machine
        machine.run("systemctl", "stop", SOCKET, SERVICE)


def test_it_serves(machine: Machine) -> None:
    told = machine.execute(block(PAGE, "fusermount3-broker check-config").commands)
    assert f"{CONFIGURATION}: good\nenabled\n" in told
    assert re.search(r"^mounts +0 live", told, re.MULTILINE)
    machine.run("whoamifs", MOUNTPOINT, user="user")
    assert machine.run("cat", f"{MOUNTPOINT}/whoami", user="user").startswith("uid=1000 gid=1000 pid=")
    assert f" {MOUNTPOINT} " in machine.run("fusermount3-broker", "mounts")
    machine.run("fusermount3", "-u", MOUNTPOINT, user="user")


def test_it_is_confined_and_not_root(machine: Machine) -> None:
    machine.run("systemctl", "restart", SERVICE)
    log = machine.run("journalctl", "--output=cat", f"--unit={SERVICE}")
    assert "serving on /run/fusermount3-proxy/broker.sock" in log
    assert "is incomplete; missing" not in log
    owners = machine.run("ps", "-o", "user:32=", "-C", "python3,fusermount3-bro,fusermount3-broker").split()
    assert set(owners) == {"fusermount3-broker"}


def test_a_changed_configuration_is_loaded(machine: Machine) -> None:
    machine.run("systemctl", "start", SERVICE)
    edit, *others = block(PAGE, "$EDITOR").commands
    machine.execute([f"EDITOR='sed -i s/^#mount_max.*/mount_max=0/' && {edit}", *others])
    refused = machine.container.exec(["whoamifs", MOUNTPOINT], user="user", check=False)
    assert "too many FUSE filesystems mounted; mount_max=N can be set in /etc/fusermount3-broker.toml" in refused.stderr


def test_a_mistake_fails_the_reload_and_the_service_goes_on(machine: Machine) -> None:
    machine.run("systemctl", "start", SERVICE)
    machine.run("cp", CONFIGURATION, "/tmp/configuration")
    try:
        machine.run("sh", "-c", f"sed -i 's/^.*mount_max = .*/mount_max = 1000/; $ a requests = 1' {CONFIGURATION}")
        reload = machine.container.exec(["systemctl", "reload", SERVICE], check=False)
        assert reload.returncode == 1
        assert "fusermount3-broker.toml" in machine.run("journalctl", "--output=cat", f"--unit={SERVICE}")
        assert "unknown key 'requests'" in machine.run("journalctl", "--output=cat", f"--unit={SERVICE}")
        machine.run("systemctl", "is-active", SERVICE)
    finally:
        machine.run("mv", "/tmp/configuration", CONFIGURATION)
    machine.run("systemctl", "reload", SERVICE)


def test_the_log_is_found_by_what_a_user_was_told_and_says_what_the_page_shows(machine: Machine) -> None:
    machine.run("rm", "-f", CONFIGURATION)
    machine.run("systemctl", "restart", SERVICE)
    refused = machine.container.exec(["whoamifs", "/mnt"], user="user", check=False)
    told = re.search(r"broker request ([0-9a-f]+)", refused.stderr)
    assert told, refused.stderr
    machine.run("journalctl", "--sync")
    (command,) = block("messages.md", "journalctl").commands
    command = re.sub("REQUEST_ID=[0-9a-f]+", f"REQUEST_ID={told[1]}", command)
    (shown,) = [each.text for each in blocks() if each.page == "messages.md" and "fusermount3-broker[" in each.text]
    assert without_chance(machine.execute([command])) == without_chance(shown)
    assert '"EVENT" : "mount refused"' in machine.execute([f"{command} -o json-pretty"])


def without_chance(line: str) -> str:
    """Return a line of the journal without time, host and pid, and the words for the container and the request."""
    _, _, said = line.strip().partition(": ")
    said = re.sub(r"\(request [0-9a-f]{8}\)$", "(request ID)", said)
    return re.sub(r"(?<=for uid 1000 in )[^:]+", "CONTAINER", said)


def test_metrics_are_told_after_what_the_page_says(machine: Machine) -> None:
    machine.execute(block("operations.md", "systemctl enable").commands)
    by_port, by_socket = block("operations.md", "curl").commands
    wait_until(lambda: "fusermount3_broker_build_info" in machine.execute([by_port]))
    machine.run("systemctl", "disable", "--now", METRICS)
    machine.run("sh", "-c", f"echo 'metrics = \"/run/fusermount3-broker/metrics.sock\"' > {CONFIGURATION}")
    machine.run("systemctl", "restart", SERVICE)
    assert machine.execute([by_socket]) == "ok\n"
