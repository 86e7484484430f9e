"""A machine on which the packages are installed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.e2e.conftest import wait_until
from tests.lab.podman import Container, Options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from subprocess import CompletedProcess

    from tests.lab.podman import Volume

HELPERS = ("/usr/bin/fusermount3", "/usr/bin/fusermount")
#: As on a kernel's command line: Debian 13's systemd takes a host with hybrid cgroups only if it is told to, and a
#: container has no modules to load.
KERNEL = (
    "systemd.unified_cgroup_hierarchy=0",
    "SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1",
    "systemd.mask=systemd-modules-load.service",
)


@contextlib.contextmanager
def booted(image: str, volumes: Sequence[Volume]) -> Iterator[Container]:
    """Boot a machine. In the end it must have no FUSE mount, and no unit that failed."""
    options = Options(privileged=True, volumes=volumes, extra=["--systemd=always"])
    with Container(image, ["/sbin/init", *KERNEL], options) as container:

        def is_running() -> bool:
            said = container.exec(["systemctl", "is-system-running"], check=False).stdout
            return said.strip() == "running"

        wait_until(is_running, 60)
        # What systemd and udev do on a machine, and leave undone in a container.
        container.exec(["mount", "--make-rshared", "/"])
        container.exec(["chmod", "0666", "/dev/fuse"])
        yield container
        assert container.fuse_mounts() == []
        assert is_running()


class Machine:
    """A container with apt's archives at /srv, and no network."""

    def __init__(self, container: Container) -> None:
        self.container = container
        # What the lab leaves out to have small images.
        self.run(
            "sh", "-c", "rm /etc/dpkg/dpkg.cfg.d/*mmdebstrap*; rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/*"
        )
        self.use("ours", "debian")

    def use(self, *archives: str) -> None:
        """Have apt install from these directories of /srv only."""
        lines = "".join(f"deb [trusted=yes] file:/srv/{name} ./\n" for name in archives)
        (self.container.root() / "etc/apt/sources.list").write_text(lines)
        self.run("apt-get", "update")

    def run(
        self, *argv: str, user: str | None = None, env: Mapping[str, str] | None = None, check: bool = True
    ) -> CompletedProcess[str]:
        return self.container.exec(argv, user=user, env=env, check=check, timeout=180)

    def apt(self, *arguments: str) -> str:
        """Run apt-get as a script would; return what it says, which has no warning of dpkg's."""
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "--yes", "--no-install-recommends", *arguments]
        result = self.container.exec(command, env=env, timeout=300)
        assert "dpkg: warning" not in result.stdout + result.stderr
        return result.stdout

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        """Return what systemctl prints."""
        return self.run("systemctl", *arguments, check=check).stdout.strip()

    def says(self, helper: str) -> str:
        """Return the version that a helper tells."""
        return self.run(helper, "-V").stdout.strip()

    def mode(self, path: str) -> str:
        """Return the mode of a file, in octal, and its owner; of what a link leads to."""
        return self.run("stat", "--dereference", "--format=%a %U", path).stdout.strip()

    def diversions(self) -> list[str]:
        """Return what is said of the proxy's diversions."""
        lines = self.run("dpkg-divert", "--list").stdout.splitlines()
        return [line for line in lines if line.endswith(" by fusermount3-proxy")]

    def files(self) -> set[str]:
        """Return the paths below /usr, /etc and /var/lib, without the accounts that apt and dpkg keep."""
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
