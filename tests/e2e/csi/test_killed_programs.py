"""FUSE programs that are killed while they have readers: a read waits or fails with ENOTCONN, and later succeeds again.

A reader never sees anything else: neither the empty directory on which the filesystem is mounted, nor the content of
another filesystem.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import wait_until
from tests.e2e.csi.pods import DATA, consumer, kill, pod, read, serve, starter, wait_for_volume

if TYPE_CHECKING:
    from tests.lab.kubelet import Kubelet, Pod

pytestmark = [pytest.mark.e2e, pytest.mark.long]

KILLS = 20
READ = f'while :; do read -r line < {DATA}/hello && echo "$line"; sleep 0.01; done > /tmp/seen 2>&1'
#: How a read may end. A request that is under way when its FUSE connection ends fails with ECONNABORTED (fs/fuse/dev.c,
#: fuse_abort_conn), which libc words as "Software caused connection abort", or with EIO if the program was reading it.
CONTENT = "hello"
MAY_BE_SAID = re.compile(
    rf"sh: (can't open {DATA}/hello|read error): ?.*(not connected|connection abort|Input/output error)"
)


def reads(path: Path, content: str) -> bool:
    """Return whether the file has this content; a filesystem in which it fails has not been replaced yet."""
    with contextlib.suppress(OSError):
        return path.read_text() == content
    return False


class Reader:
    """A loop in a container that reads the volume for as long as it runs."""

    def __init__(self, running: Pod, container: str) -> None:
        self.container = container
        self._running = running[container]
        self._running.start(["sh", "-c", READ])

    def result(self) -> Counter[str]:
        """Return how often each result was read so far."""
        return Counter(self._running.exec(["cat", "/tmp/seen"]).stdout.splitlines())


def check(seen: Counter[str]) -> None:
    """Check that a reader has seen the content again and again, and nothing that is not allowed."""
    assert seen[CONTENT] > KILLS
    assert [said for said in seen if said != CONTENT and not MAY_BE_SAID.fullmatch(said)] == []


def kill_again_and_again(running: Pod, readers: list[Reader]) -> None:
    """Kill the program, and wait until it serves each reader again; do so KILLS times."""
    for restarts in range(1, KILLS + 1):
        kill(running)
        running.wait_until_restarted("starter", restarts)
        for reader in readers:
            wait_until(lambda reader=reader: serves(running, reader.container), 30)  # type: ignore[misc]


def serves(running: Pod, container: str) -> bool:
    running.check_loop()
    return running[container].exec(["cat", f"{DATA}/hello"], check=False).stdout == "hello\n"


def test_consumers_with_propagation(kubelet: Kubelet) -> None:
    """One was there before the first mount, the other started after it; both see each new mount."""
    early, late = consumer("early"), consumer("late")
    spec = pod([late], init=[{**early, "restartPolicy": "Always"}, starter(serve(), sidecar=True)])
    with kubelet.pod(spec) as running:
        readers = [Reader(running, name) for name in ("early", "late")]
        kill_again_and_again(running, readers)
        for reader in readers:
            check(reader.result())
        assert running.republish_errors() == []


def test_eager_consumers_without_propagation(kubelet: Kubelet) -> None:
    spec = pod([starter(serve()), consumer(propagation="None")], attributes={"mountTiming": "eager"})
    with kubelet.pod(spec) as running:
        reader = Reader(running, "consumer")
        kill_again_and_again(running, [reader])
        check(reader.result())


def test_consumers_of_a_part_of_the_volume(kubelet: Kubelet) -> None:
    """For a subPath, kubelet made a bind when it started the container: it is of the filesystem that was there then."""
    part = consumer("part", propagation="None", mount={"subPath": "files"})
    with kubelet.pod(pod([consumer(), part], init=[starter(serve("whoamifs"), sidecar=True)])) as running:
        started = running["part"].pid
        for restarts in (1, 2):
            kill(running)
            running.wait_until_restarted("starter", restarts)
            write = ["sh", "-c", f"echo {restarts} > {DATA}/new"]
            wait_until(lambda: running["part"].exec(write, check=False).returncode == 0, 30)  # noqa: B023
            assert read(running, "consumer", "files/new") == f"{restarts}\n"
            (bind,) = kubelet.node.seen(running.directory / "volume-subpaths").glob("*/part/*")
            assert len(running["part"].fuse_mounts(DATA)) == 1
            # Some kubelets look at it when they start a container.
            wait_until(partial(reads, bind / "new", f"{restarts}\n"))
        assert running["part"].pid == started


def test_a_program_that_takes_a_descriptor(kubelet: Kubelet) -> None:
    with kubelet.pod(pod([consumer(), starter("exec fuse-starter -- hello_ll -f {}")])) as running:
        wait_for_volume(running)
        assert read(running) == "hello\n"
        reader = Reader(running, "consumer")
        kill_again_and_again(running, [reader])
        check(reader.result())
