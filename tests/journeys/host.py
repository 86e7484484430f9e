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
#: What the nesting needs: no overlay on an overlay, and the cgroups that the machine sees. The containers reach the
#: servers of the machine.
SETTINGS = {
    "storage.conf": '[storage]\ndriver = "vfs"\nrunroot = "/run/containers/storage"\n'
    'graphroot = "/var/lib/containers/storage"\n',
    "containers.conf": '[containers]\nvolumes = ["/sys/fs/cgroup:/sys/fs/cgroup:ro"]\nnetns = "host"\n',
}


def machine() -> DebianRecipe:
    """Return the recipe of a system that boots, with Podman, and has nothing of FUSE."""
    packages = ("systemd", "systemd-sysv", "dbus", "procps", "podman", "runc", "ca-certificates")
    return DebianRecipe(f"journeys-machine-{SUITE}", ("passwd", *packages), SUITE)


class Host(Machine):
    """The machine, where the administrator types commands of the pages in a clone of the repository."""

    def __init__(self, container: Container) -> None:
        super().__init__(container)
        (container.root() / "etc/apt/apt.conf.d/yes").write_text('APT::Get::Assume-Yes "true";\n')
        self.run("sh", "-c", f"mkdir -p {CLONE}/build && ln -s /srv/ours {CLONE}/build/deb")

    def sshfs(self) -> str:
        """Return the name of an image of Debian's sshfs, which the container engine has."""
        self.run("podman", "import", "--quiet", "/srv/sshfs.tar", "sshfs")
        return "localhost/sshfs"

    def busybox(self) -> str:
        """Return the name of an image of busybox, which the container engine has."""
        self.run("podman", "load", "--quiet", "--input", "/srv/busybox.tar")
        return image_tag(BUSYBOX)

    def type(self, journey: Journey, command: str, *, check: bool = True) -> CompletedProcess[str]:
        """Execute a command of a page in the clone."""
        journey.typed()
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        return self.run("sh", "-euc", f"cd {CLONE} && {command}", env=env, check=check)
