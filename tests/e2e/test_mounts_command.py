"""`mounts`, `abort` and `status` show and find what runs in real containers: program, container, age, sockets."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import termios
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.e2e.conftest import Start, wait_until
from tests.e2e.test_containers import serve
from tests.lab.broker import PROGRAM, Broker
from tests.lab.commands import run
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.pace import SLOWNESS
from tests.lab.podman import PODMAN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.podman import Container

pytestmark = pytest.mark.e2e

MOUNTPOINT = "/tmp/m"


@pytest.fixture
def container(start: Start) -> Iterator[Container]:
    """A container with a mounted filesystem, whose program the broker has seen serve."""
    container = start(image_tag(BUSYBOX), user="1000:1000")
    program = serve(container)
    yield container
    container.exec(["fusermount3", "-u", "-q", MOUNTPOINT], check=False)
    program.communicate(timeout=20)


def seen(broker: Broker) -> dict[str, Any]:
    """Return the only mount once the broker has seen its program serve."""
    wait_until(lambda: broker.mounts()[0]["program_pid"])
    (mount,) = broker.mounts()
    return mount


def listed(broker: Broker, *options: str) -> list[str]:
    """Return the lines of the table, without its headings."""
    return broker.ask("mounts", *options).splitlines()[1:]


def test_a_mount_is_shown_with_the_program_that_serves_it_and_the_containers_name(
    broker: Broker, container: Container
) -> None:
    mount = seen(broker)
    program = psutil.Process(mount["program_pid"])
    assert program.name() == mount["program_command"] == "whoamifs"
    assert program.pid in container.processes()
    assert not psutil.pid_exists(mount["pid"]), "that was fusermount3"
    assert mount["container_name"] == container.name
    assert mount["container_id"] == run([*PODMAN, "inspect", "--format", "{{.Id}}", container.name]).stdout.strip()
    (line,) = listed(broker)
    shown = rf"{mount['request_id']} live +\d+s +{MOUNTPOINT} +fuse.whoamifs +\S+ +1000 +{program.pid} +whoamifs +"
    assert re.fullmatch(shown + re.escape(container.name), line)


def test_a_container_that_was_renamed_is_shown_under_its_new_name(broker: Broker, container: Container) -> None:
    seen(broker)
    other = f"{container.name}-renamed"
    run([*PODMAN, "rename", container.name, other])
    try:
        assert broker.mounts()[0]["container_name"] == other
    finally:
        run([*PODMAN, "rename", other, container.name])


def test_filters_find_mounts_by_container_and_by_state(broker: Broker, container: Container) -> None:
    mount = seen(broker)
    assert len(listed(broker, "--container", container.name)) == 1
    assert len(listed(broker, "--container", mount["container_id"][:6])) == 1
    assert listed(broker, "--container", "no-such-container") == []
    assert listed(broker, "--dead") == listed(broker, "--hung") == []
    psutil.Process(mount["program_pid"]).kill()
    wait_until(lambda: listed(broker, "--dead"))
    (line,) = listed(broker, "--dead", "--container", container.name)
    assert re.search(r" dead .* 1000 +- +- +", line)


@pytest.mark.usefixtures("container")
def test_abort_takes_the_beginning_of_an_id_and_says_what_is_wrong(broker: Broker) -> None:
    mount = seen(broker)
    for wrong, complaint in (
        ("", "'' is no request ID, and none begins so: see fusermount3-broker mounts"),
        ("0" * 32, f"no live mount has the id '{'0' * 32}'"),
    ):
        refused = subprocess.run(
            [PROGRAM, "abort", "--config", broker.config, wrong], capture_output=True, text=True, timeout=60
        )
        assert (refused.returncode, refused.stdout, refused.stderr) == (1, "", f"Error: {complaint}\n")
    assert [each["state"] for each in broker.mounts()] == ["live"]
    told = broker.ask("abort", mount["request_id"][:4].upper())
    assert told == f"aborted {mount['request_id']}: {MOUNTPOINT}, fuse.whoamifs\n"
    wait_until(lambda: not broker.mounts() or broker.mounts()[0]["state"] == "dead")


def completed(broker: Broker, *words: str) -> list[str]:
    """Return what the program offers to bash, as the installed completion asks it."""
    line = ["fusermount3-broker", words[0], "--config", str(broker.config), *words[1:]]
    environment = {
        "_FUSERMOUNT3_BROKER_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(line),
        "COMP_CWORD": str(len(line) - 1),
    }
    offered = subprocess.run(
        [PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=True
    )
    assert offered.stderr == ""
    return [each.partition(",")[2] for each in offered.stdout.splitlines()]


def test_a_shell_completes_ids_and_containers(broker: Broker, container: Container) -> None:
    mount = seen(broker)
    assert completed(broker, "abort", mount["request_id"][:3]) == [mount["request_id"]]
    assert completed(broker, "mounts", "--container", container.name[:8]) == [container.name]


class Terminal:
    """A command of the program on a terminal of 100 columns."""

    def __init__(self, broker: Broker, *arguments: str) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        command = [str(PROGRAM), arguments[0], "--config", str(broker.config), *arguments[1:]]
        environment = {**os.environ, "TERM": "xterm"}
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def read_until(self, text: str) -> None:
        give_up = time.monotonic() + 30 * SLOWNESS
        while text not in self.text:
            assert time.monotonic() < give_up, self.text
            self.text += os.read(self._ours, 65536).decode()

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def status(self) -> int:
        """Return the exit status; what the program still writes is read."""
        try:
            while part := os.read(self._ours, 65536).decode():
                self.text += part
        except OSError:  # nobody has the other end any more
            pass
        return self._process.wait(30 * SLOWNESS)


def test_a_terminal_of_100_columns_has_room_for_a_row(broker: Broker, container: Container) -> None:
    mount = seen(broker)
    with Terminal(broker, "mounts") as terminal:
        assert terminal.status() == 0
    headings, row, *folded = re.sub("\x1b\\[[0-9;]*m", "", terminal.text).splitlines()
    assert headings.split()[:3] == ["REQUEST", "STATE", "AGE"]
    assert row.startswith(mount["request_id"])
    last = headings.index("CONTAINER")
    assert "".join(each[last:].strip() for each in (row, *folded)) == container.name
    assert max(map(len, (headings, row, *folded))) <= 100


@pytest.mark.usefixtures("container")
def test_watching_shows_the_table_again_and_again_until_q(broker: Broker) -> None:
    mount = seen(broker)
    with Terminal(broker, "mounts", "--watch") as terminal:
        terminal.read_until(mount["request_id"])
        psutil.Process(mount["program_pid"]).kill()
        terminal.read_until(" dead ")
        terminal.press("q")
        assert terminal.status() == 0


def test_status_names_the_sockets(broker: Broker) -> None:
    sockets = json.loads(broker.ask("status", "--json"))["sockets"]
    assert sockets["callers"] == [str(broker.socket)]
    assert sockets["administrators"] == [f"{broker.directory}/control/control.sock"]
    assert f"socket         {broker.socket}, for callers\n" in broker.ask("status")
