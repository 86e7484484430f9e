"""A machine to install the packages on."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from tests.e2e.conftest import wait_until
from tests.lab.podman import Container, Options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from subprocess import CompletedProcess

    from tests.lab.podman import Volume

MOUNTPOINT = "/home/user/mnt"
HELPERS = ("/usr/bin/fusermount3", "/usr/bin/fusermount")
#: As on a kernel's command line: Debian 13's systemd accepts a host with hybrid cgroups only with these options, and a
#: container has no modules to load.
KERNEL = (
    "systemd.unified_cgroup_hierarchy=0",
    "SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1",
    "systemd.mask=systemd-modules-load.service",
)


@contextlib.contextmanager
def booted(image: str, volumes: Sequence[Volume]) -> Iterator[Container]:
    """Boot a machine. At the end it must have no FUSE mount and no failed unit."""
    options = Options(privileged=True, volumes=volumes, extra=["--systemd=always"])
    with Container(image, ["/sbin/init", *KERNEL], options) as container:

        def is_running() -> bool:
            said = container.exec(["systemctl", "is-system-running"], check=False).stdout
            return said.strip() == "running"

        wait_until(is_running, 300)
        # systemd and udev do this on a machine, but not in a container.
        container.exec(["mount", "--make-rshared", "/"])
        container.exec(["chmod", "0666", "/dev/fuse"])
        yield container
        assert container.fuse_mounts() == []
        assert is_running()


def mountpoints(container: Container) -> list[str]:
    """Return the mountpoints that the broker lists."""
    listed = json.loads(container.exec(["fusermount3-broker", "mounts", "--json"]).stdout)
    return [each["mountpoint"] for each in listed]


def check_usable(container: Container) -> None:
    """Check that the user of the machine reads what whoamifs has at `MOUNTPOINT`."""
    assert container.exec(["cat", f"{MOUNTPOINT}/whoami"], user="user").stdout.startswith("uid=1000 gid=1000 pid=")


class Machine:
    """A container with apt archives in /srv, and no network."""

    def __init__(self, container: Container) -> None:
        self.container = container
        # Undo the lab's settings for small images.
        self.run(
            "sh", "-c", "rm /etc/dpkg/dpkg.cfg.d/*mmdebstrap*; rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/*"
        )
        self.use("ours", "debian")

    def use(self, *archives: str) -> None:
        """Make apt install only from these directories of /srv."""
        lines = "".join(f"deb [trusted=yes] file:/srv/{name} ./\n" for name in archives)
        (self.container.root() / "etc/apt/sources.list").write_text(lines)
        self.run("apt-get", "update")

    def run(
        self,
        *argv: str,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 300,
    ) -> CompletedProcess[str]:
        return self.container.exec(argv, user=user, env=env, check=check, timeout=timeout)

    def apt(self, *arguments: str) -> str:
        """Run apt-get like a script, and return its output; fail if the output has a warning of dpkg's."""
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "--yes", "--no-install-recommends", *arguments]
        result = self.container.exec(command, env=env, timeout=300)
        assert "dpkg: warning" not in result.stdout + result.stderr
        return result.stdout

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        """Return the output of systemctl."""
        return self.run("systemctl", *arguments, check=check).stdout.strip()

    def says(self, helper: str) -> str:
        """Return the version that a helper prints."""
        return self.run(helper, "-V").stdout.strip()

    def mode(self, path: str) -> str:
        """Return a file's mode, in octal, and its owner; follow symbolic links."""
        return self.run("stat", "--dereference", "--format=%a %U", path).stdout.strip()

    def diversions(self) -> list[str]:
        """Return the lines of `dpkg-divert --list` on the proxy's diversions."""
        lines = self.run("dpkg-divert", "--list").stdout.splitlines()
        return [line for line in lines if line.endswith(" by fusermount3-proxy")]

    def files(self) -> set[str]:
        """Return the paths below /usr, /etc and /var/lib, without the records of apt and dpkg."""
        command = [
            "find",
            "/usr",
            "/etc",
            "/var/lib",
            "-xdev",
            "-not",
            "-path",
            "/var/lib/dpkg/*",
            "-not",
            "-path",
            "/var/lib/apt/*",
        ]
        return set(self.run(*command).stdout.splitlines())
