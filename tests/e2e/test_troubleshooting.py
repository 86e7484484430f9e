"""docs/troubleshooting.md quotes terminal sessions: the commands of each box are run again, and must print the same."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.documented import PAGES
from tests.e2e.sshfs import introduce
from tests.lab.broker import PROGRAM, Broker
from tests.lab.commands import run
from tests.lab.images import DEBIAN, image_tag
from tests.lab.podman import FUSE_STAND_IN, LIMITS, RUNTIME, Container, Options, Volume
from tests.lab.sshd import sshd_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

HOME = "/home/user"
#: The page's name for the server of sshfs.
SERVER = "server"


class Box(NamedTuple):
    """The quotation below a heading: commands with their prompts, and their output."""

    heading: str
    typed: list[tuple[str, str]]
    shown: str


def boxes() -> Iterator[Box]:
    heading = ""
    for part in re.findall(r"^#+ [^\n]+$|^```console\n.*?^```$", PAGES["troubleshooting.md"].read_text(), re.M | re.S):
        if part.startswith("#"):
            heading = part.lstrip("#").strip().replace("`", "")
            continue
        lines = part.splitlines()[1:-1]
        typed = [(line[0], line[2:]) for line in lines if line.startswith(("$ ", "# "))]
        yield Box(heading, typed, "\n".join(line for line in lines if not line.startswith(("$ ", "# "))))


class Place(NamedTuple):
    """Where the commands are run. The user is `user`, unless it is root."""

    broker: Broker
    container: Container
    user: str = "user"

    def type(self, prompt: str, command: str) -> str:
        """Return the command's output, on either stream."""
        if prompt == "$":
            result = self.container.exec(["sh", "-c", f"{command} 2>&1"], user=self.user, workdir=HOME, check=False)
            return result.stdout
        program, *words = command.split()
        if program == "podman":
            at = words.index("IMAGE")
            words[at] = image_tag(DEBIAN)
            result = run(["podman", *RUNTIME, words[0], *LIMITS, *words[1:]], check=False)
        else:
            result = run([PROGRAM, words[0], "--config", self.broker.config, *words[1:]], check=False)
        return result.stdout + result.stderr

    def as_usual(self, text: str) -> str:
        """Return the text with the paths of an installed broker, and without the parts that differ each time."""
        text = text.replace(str(self.broker.config), "/etc/fusermount3-broker.toml")
        text = text.replace(str(self.broker.directory / "control"), "/run/fusermount3-broker")
        text = text.replace(self.container.name, "web")
        return without_chance(text)


def without_chance(text: str) -> str:
    """Return the text without ids, pids, times and column widths."""
    text = re.sub(r"\b[0-9a-f]{8}\b", "ID", text)
    text = re.sub(r"(?<= hung )\s*\d+s\b", "AGE", text)
    text = re.sub(r"(?<= 1000 )\s*\d+\b", "PID", text)
    return re.sub(r" +\n| {2,}", lambda found: "\n" if "\n" in found[0] else " ", text).strip()


@contextlib.contextmanager
def a_place(
    *volumes: Volume,
    configuration: str = "",
    user: str = "user",
    stand_in: bool = True,
    proxy: bool = True,
    socket: bool = True,
) -> Iterator[Place]:
    """A broker, a server, and a container that may lack something."""
    with Broker(configuration) as broker:
        directory, *helpers = broker.volumes()
        given = [*([FUSE_STAND_IN] if stand_in else []), *(helpers if proxy else []), *([directory] if socket else [])]
        options = Options(volumes=[*given, *volumes])
        with Container(image_tag(DEBIAN), options=options) as container, sshd_for(container) as sshd:
            for each in {user, "user"}:
                introduce(sshd, container, each, SERVER)
            container.exec(["mkdir", "other"], user="user", workdir=HOME)
            yield Place(broker, container, user)


@contextlib.contextmanager
def mounted(configuration: str = "", user: str = "user", at: str = "mnt") -> Iterator[Place]:
    """The same, with sshfs mounted."""
    with a_place(configuration=configuration, user=user) as place:
        place.container.exec(["sshfs", f"{SERVER}:", at], user="user", workdir=HOME)
        yield place


@contextlib.contextmanager
def left() -> Iterator[Place]:
    """sshfs was killed, and the broker has not checked since."""
    with mounted() as place:
        place.container.exec(["pkill", "--signal", "KILL", "sshfs"])
        wait_until(lambda: "not connected" in place.type("$", "stat mnt"))
        yield place


@contextlib.contextmanager
def hanging() -> Iterator[Place]:
    """sshfs was stopped, and a process waits for it."""
    with mounted("hung_seconds = 1") as place:
        place.container.exec(["pkill", "--signal", "STOP", "sshfs"])
        place.container.start(["ls", f"{HOME}/mnt"], user="user")
        wait_until(lambda: [each["state"] for each in place.broker.mounts()] == ["hung"])
        try:
            yield place
        finally:
            place.container.exec(["pkill", "--signal", "CONT", "sshfs"], check=False)


@contextlib.contextmanager
def closed_device(directory: Path) -> Iterator[Place]:
    """A /dev/fuse that only root may open, like that of a host without udev."""
    device = directory / "fuse"
    device.touch(0o600)
    with a_place(Volume(device, "/dev/fuse"), stand_in=False) as place:
        yield place


#: By heading, the conditions under which the commands of the box below it are run.
SCENES: dict[str, Callable[[], contextlib.AbstractContextManager[Place]]] = {
    "Troubleshooting": a_place,
    "fuse: device not found, try 'modprobe fuse' first": lambda: a_place(stand_in=False),
    "mount failed: Operation not permitted": lambda: a_place(proxy=False),
    "no broker at …": lambda: a_place(socket=False),
    "user has no write access to mountpoint …": a_place,
    "option allow_other only allowed if 'user_allow_other' is set in …": a_place,
    "mounting over filesystem type 0x… is forbidden": lambda: a_place(user="root"),
    "too many …": lambda: mounted("[limits]\nmounts = 1", at="other"),
    "fusermount3: …: Permission denied": a_place,
    "unresolvable CDI devices": a_place,
    "Transport endpoint is not connected": left,
    "Everything that touches it hangs": hanging,
    "Permission denied, also for root": lambda: mounted(user="root"),
    "Device or resource busy": mounted,
    "entry for … not found in /etc/mtab": a_place,
    "refused to unmount … in the broker's log, and nothing is wrong": mounted,
    "no broker answers at …": a_place,
}


@pytest.fixture
def place(box: Box, tmp_path: Path) -> Iterator[Place]:
    scene = SCENES.get(box.heading, lambda: closed_device(tmp_path))
    with scene() as place:
        if box.heading.startswith("no broker answers"):
            place.broker.stop()
        yield place
        if box.heading.startswith("no broker answers"):
            place.broker.start()


@pytest.mark.parametrize("box", list(boxes()), ids=lambda box: box.heading)
def test_a_box_shows_what_is_seen(box: Box, place: Place) -> None:
    seen = ""
    for prompt, command in box.typed:
        command = re.sub(r"(?<=abort )\S+", lambda _: place.broker.mounts()[0]["request_id"], command)
        seen += place.type(prompt, command)
    assert place.as_usual(seen) == without_chance(box.shown)


@pytest.mark.parametrize(
    ("user", "text"),
    [
        ("user", f"entry for {HOME}/mnt not found in /etc/mtab"),
        ("root", f"failed to unmount {HOME}/mnt: Invalid argument"),
    ],
)
def test_a_second_unmount_is_refused_and_logged_and_changes_nothing(user: str, text: str) -> None:
    with mounted() as place:
        for again in (False, True):
            result = place.container.exec(["fusermount3", "-u", "-q", "mnt"], user=user, workdir=HOME, check=False)
            assert (result.returncode, result.stdout, result.stderr) == (int(again), "", "")
            assert [record["text"] for record in place.broker.records("unmount refused")] == [text] * again
        assert place.broker.mounts() == []
        place.container.exec(["sshfs", f"{SERVER}:", "mnt"], user="user", workdir=HOME)
        place.container.exec(["fusermount3", "-u", "mnt"], user="user", workdir=HOME)


def test_each_scene_is_of_a_box() -> None:
    assert SCENES.keys() <= {box.heading for box in boxes()}
