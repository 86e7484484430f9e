"""Dead mounts are removed soon, whatever other containers do, and live mounts are never classified as dead.

The attacks run in containers of their own, so they are accounted to another account than the victim's.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.kernel import syscalls
from tests.e2e.conftest import RunBroker, containers, wait_until
from tests.e2e.hostile import fuse_mounts, in_private_namespace, mount
from tests.e2e.mounting_script import MOUNT
from tests.e2e.test_dead_mounts import ON, SOON, program_in
from tests.lab.forked import ending_afterwards
from tests.lab.images import BUSYBOX, DEBIAN, image_tag
from tests.lab.podman import Container, Options, Volume

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.broker import Broker

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SOURCES = Path(__file__).parents[2]
#: In a container with Python: what a script needs to mount, and the first messages of a FUSE program.
PRELUDE = f"""{MOUNT}
import resource, socket, struct, time

def answer_init(device):
    unique, = struct.unpack_from("=8xQ", os.read(device, 1 << 18))
    said = struct.pack("=IIII2H2I", 7, 31, 0, 0, 16, 12, 1 << 17, 1).ljust(64, b"\\0")
    os.write(device, struct.pack("=IiQ", 16 + len(said), 0, unique) + said)
"""
#: Holds 60 filesystems whose descriptors no process has: they are in a socket, and no process receives them.
IN_FLIGHT = """
ours, theirs = socket.socketpair()
for number in range(60):
    device = mount(b"%d" % number)
    if sys.argv[1] == "begun":
        answer_init(device)
    socket.send_fds(ours, [b"x"], [device])
    os.close(device)
print("ready", flush=True)
time.sleep(1000)
"""
#: Has so many descriptors that a process can't examine all of them in a second.
MANY_DESCRIPTORS = """
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
null = os.open("/dev/null", os.O_RDONLY)
for _ in range(most - null - 10):
    os.dup(null)
for _ in range(500):
    if os.fork() == 0:
        time.sleep(1000)
print("ready", flush=True)
time.sleep(1000)
"""


@contextlib.contextmanager
def attacker(broker: Broker, script: str, *arguments: str) -> Iterator[Container]:
    """Run the script in a container until it reports that it is ready."""
    library = "/usr/lib/python3/dist-packages/fusermount3_proxy"
    volumes = [*broker.volumes(), Volume(SOURCES / "fusermount3_proxy", library)]
    options = Options(volumes=volumes)
    command = ["python3", "-c", PRELUDE + script, *arguments]
    with Container(image_tag(DEBIAN), command, options) as container:
        wait_until(lambda: "ready" in container.logs(), 60)
        yield container


def check_reaped(victim: Container) -> None:
    """Kill a FUSE program in the container, and check that its mount is removed, also on a busy machine."""
    program_in(victim).kill()
    wait_until(lambda: not victim.fuse_mounts(), 3 * SOON)


@pytest.mark.parametrize("program", ["silent", "begun"])
def test_filesystems_that_never_answer_hold_up_no_other_container(run_broker: RunBroker, program: str) -> None:
    """No process has their descriptors, so the broker has to send them a request, which they do not answer."""
    broker = run_broker(ON)
    with attacker(broker, IN_FLIGHT, program) as hostile, containers(broker) as start:
        for _ in range(3):
            check_reaped(start(image_tag(BUSYBOX)))
        assert len(hostile.fuse_mounts()) == 60
        assert {each["state"] for each in broker.mounts()} <= {"live", "hung"}
    wait_until(lambda: not broker.mounts())


def test_what_somebody_else_has_open_makes_nothing_look_dead(run_broker: RunBroker) -> None:
    broker = run_broker(f"{ON}\ndeadlines.operation = 1")
    with attacker(broker, MANY_DESCRIPTORS), containers(broker) as start:
        live = start(image_tag(BUSYBOX))
        program = program_in(live)
        (known,) = broker.mounts()
        victim = start(image_tag(BUSYBOX))
        program_in(victim).kill()
        states: set[str] = set()

        def is_gone() -> bool:
            states.update(each["state"] for each in broker.mounts() if each["request_id"] == known["request_id"])
            return not victim.fuse_mounts()

        wait_until(is_gone)
        assert states == {"live"}
        program.kill()
        wait_until(lambda: not live.fuse_mounts())


def test_a_thousand_that_die_at_once_are_gone_soon(run_broker: RunBroker, tmp_path: Path) -> None:
    """benchmarks.load measures how soon; removing one after another would take several times as long as this test."""
    broker = run_broker(f"mount_max = -1\n{ON}\n[limits]\nrequests_per_second = 0")

    def body() -> None:
        reader, writer = os.pipe()
        if (program := os.fork()) == 0:
            with ending_afterwards():
                for number in range(1000):
                    place = tmp_path / f"{number}"
                    place.mkdir()
                    mount(broker, place)
                os.write(writer, b"done")
                signal.pause()
        os.close(writer)
        done = os.read(reader, 4)
        os.kill(program, signal.SIGKILL)
        os.waitpid(program, 0)
        assert done == b"done"
        wait_until(lambda: not fuse_mounts(), 3 * SOON)

    in_private_namespace(body)
    wait_until(lambda: len(broker.records("unmounted a dead mount")) == 1000)


def test_it_is_gone_soon_if_the_first_process_is_in_a_user_namespace_of_its_own(
    run_broker: RunBroker, tmp_path: Path
) -> None:
    """A process that enters by way of that user namespace may not unmount anything."""
    broker = run_broker(ON)

    def body() -> None:
        if (program := os.fork()) == 0:
            with ending_afterwards():
                mount(broker, tmp_path)
        os.waitpid(program, 0)
        assert len(fuse_mounts()) == 1
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        wait_until(lambda: not fuse_mounts())

    in_private_namespace(body)
