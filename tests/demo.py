"""`make demo`: an unmodified sshfs mounts in an unprivileged container, explained step by step.

Everything is real: Podman with runc and its default capabilities, Debian's sshfs, an sshd to talk to. Ends with status
0 only if the data written through the mount arrived on the other side and nothing is left behind.
"""

from __future__ import annotations

import os
import sys
import textwrap

from rich.text import Text

from tests.e2e.conftest import wait_until
from tests.lab.broker import Broker
from tests.lab.images import SSHFS, image_tag
from tests.lab.podman import FUSE_STAND_IN, Container, Options
from tests.lab.sshd import Sshd, sshd_for

MOUNTPOINT = "/home/user/mnt"
USER = "1000:1000"
#: fusermount3-broker lays its tables out for a terminal of this width.
TERMINAL = {"TTY_COMPATIBLE": "1", "TERM": "linux", "COLUMNS": "95"}


def main() -> None:
    os.environ.update(TERMINAL)
    tell(
        "A FUSE filesystem needs open(/dev/fuse) and mount(2), and a container may do neither. So people run "
        "containers privileged. Watch one that is not."
    )
    step("Making a container image of Debian's sshfs (some seconds; kept for the next time)")
    image = image_tag(SSHFS)
    with Broker() as broker:
        step("A broker runs on the host. It is the one with privilege, and listens on a Unix socket")
        show("fusermount3-broker serve", broker.records("serving")[0]["message"])
        options = Options(user=USER, volumes=[FUSE_STAND_IN, *broker.volumes()])
        with Container(image, options=options) as container, sshd_for(container) as sshd:
            step(
                "A container runs: user 1000, default capabilities, no network, no Python. It has two things more "
                "than its image: the broker's socket, and the static proxy in the place of fusermount3"
            )
            script = "grep CapEff /proc/self/status; ls -l /usr/bin/fusermount3 /run/fusermount3-proxy"
            show("in the container", container.exec(["sh", "-c", script]).stdout)
            tell(
                "(/dev/fuse in there is /dev/null under that name: libfuse tries to open it before it asks its "
                "helper, and gives up if it can't.)"
            )
            refused(container)
            mount_and_use(container, sshd)
            step("The broker knows what it has mounted, and for whom")
            wait_until(lambda: broker.mounts()[0]["program_pid"])  # which the broker sees a second after the mount
            show("fusermount3-broker mounts", Text.from_ansi(broker.ask("mounts")).plain)
            step("sshfs is told to unmount, in its usual way")
            container.exec(["fusermount3", "-u", MOUNTPOINT])
            left = container.fuse_mounts()
        left_in_broker = broker.mounts()
    step("Container, sshd and broker are gone. Left mounted: " + ("nothing" if not left else str(left)))
    if left or left_in_broker:
        sys.exit("demo: something is still mounted")
    tell("That is all: no privileged container, no changed program. README.md says how to use it for your own.")


def refused(container: Container) -> None:
    step("The container itself may not mount; the kernel refuses")
    attempt = container.exec(["mount", "-t", "tmpfs", "none", MOUNTPOINT], check=False)
    show(f"mount -t tmpfs none {MOUNTPOINT}", attempt.stdout + attempt.stderr)
    if attempt.returncode == 0:
        sys.exit("demo: this container can mount; it shows nothing")


def mount_and_use(container: Container, sshd: Sshd) -> None:
    step("sshfs, as Debian ships it, mounts a directory of an SSH server")
    sshd.authorize(container)
    (sshd.export / "greeting").write_text("hello from the other side\n")
    container.exec(["sshfs", *sshd.sshfs_arguments(), MOUNTPOINT])
    show(f"grep fuse /proc/mounts, for {MOUNTPOINT}", container.exec(["grep", MOUNTPOINT, "/proc/mounts"]).stdout)
    step("The container reads a file through the mount, and writes one")
    read = container.exec(["cat", f"{MOUNTPOINT}/greeting"]).stdout
    show(f"cat {MOUNTPOINT}/greeting", read)
    container.exec(["sh", "-c", f"echo 'and back' > {MOUNTPOINT}/answer"])
    written = (sshd.export / "answer").read_text()
    show("on the server, cat answer", written)
    if (read, written) != ("hello from the other side\n", "and back\n"):
        sys.exit("demo: the files are not what was written")


_steps = iter(range(1, 100))


def step(text: str) -> None:
    print()
    print(textwrap.fill(f"{next(_steps)}. {text}.", 100, subsequent_indent="   "), flush=True)


def show(command: str, output: str) -> None:
    print(f"   $ {command}")
    print(textwrap.indent(output.rstrip(), "   | "), flush=True)


def tell(text: str) -> None:
    print()
    print(textwrap.fill(text, 100), flush=True)


if __name__ == "__main__":
    main()
