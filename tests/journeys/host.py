"""A host of containers: Debian with systemd and Podman, in a container, without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.lab.images import BUSYBOX, DebianRecipe, image_tag
from tests.packaging.machines import Machine

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from tests.journeys.journey import Journey
    from tests.lab.podman import Container

SUITE = "bookworm"
CLONE = "/root/clone"
PYTHON = DebianRecipe("journeys-python", ("passwd", "python3"))
#: What the nesting needs: no overlay on an overlay, and the cgroups that the machine sees. The containers reach the
#: servers of the machine.
SETTINGS = {
    "/etc/containers/storage.conf": '[storage]\ndriver = "vfs"\nrunroot = "/run/containers/storage"\n'
    'graphroot = "/var/lib/containers/storage"\n',
    "/etc/containers/containers.conf": '[containers]\nvolumes = ["/sys/fs/cgroup:/sys/fs/cgroup:ro"]\nnetns = "host"\n',
}

#: A system that boots, with Docker and Compose.
DOCKER = DebianRecipe(
    "journeys-machine-docker",
    (
        "passwd",
        "systemd",
        "systemd-sysv",
        "dbus",
        "procps",
        "docker.io",
        "docker-cli",
        "docker-compose",
        "iptables",
        "ca-certificates",
    ),
    "trixie",
)
#: What the nesting needs of Docker: no overlay on an overlay, and no rules for a network of its own.
DOCKER_DAEMON = {"storage-driver": "vfs", "iptables": False, "ip6tables": False, "bridge": "none"}


def machine() -> DebianRecipe:
    """Return the recipe of a system that boots, with Podman, and has nothing of FUSE."""
    packages = ("systemd", "systemd-sysv", "dbus", "procps", "podman", "runc", "ca-certificates")
    return DebianRecipe(f"journeys-machine-{SUITE}", ("passwd", *packages), SUITE)


class Host(Machine):
    """The machine, where the administrator types commands of the pages in a clone of the repository."""

    def __init__(self, container: Container) -> None:
        super().__init__(container)
        (container.root() / "etc/apt/apt.conf.d/yes").write_text('APT::Get::Assume-Yes "true";\n')
        self.run("mkdir", "--parents", f"{CLONE}/build")

    def has_built(self, packages: str) -> None:
        """Let `make deb` have made the packages in this directory of /srv."""
        self.run("ln", "--symbolic", f"/srv/{packages}", f"{CLONE}/build/deb")

    def install_the_released(self) -> None:
        """Install the last release's broker, and its executable, which its page builds and copies."""
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        self.run("sh", "-c", "apt-get install /srv/released/fusermount3-broker_*.deb", env=env)
        self.run("sh", "-euc", "dpkg-deb --extract /srv/released/fusermount3-proxy_*.deb /srv/unpacked")
        self.run("install", "/srv/unpacked/usr/bin/fusermount3-proxy", "/usr/bin/")

    def sshfs(self) -> str:
        """Return the name of an image of Debian's sshfs, which the container engine has."""
        return self._import("sshfs")

    def python(self) -> str:
        """Return the name of an image of Debian's Python, which the container engine has."""
        return self._import("python")

    def _import(self, name: str) -> str:
        self.run("podman", "import", "--quiet", f"/srv/{name}.tar", name)
        return f"localhost/{name}"

    def busybox(self) -> str:
        """Return the name of an image of busybox, which the container engine has."""
        self.run("podman", "load", "--quiet", "--input", "/srv/busybox.tar")
        return image_tag(BUSYBOX)

    def type(self, journey: Journey, command: str, *, check: bool = True) -> CompletedProcess[str]:
        """Execute a command of a page in the clone."""
        journey.typed()
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        return self.run("sh", "-euc", f"cd {CLONE} && {command}", env=env, check=check)
