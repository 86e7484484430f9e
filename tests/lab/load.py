"""Load: calls of the real proxy as fast as a process can make them, and the resources that the broker holds meanwhile.

Used for counting and measuring: benchmarks/load.py, benchmarks/soak, tests/e2e/test_restart.py.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import psutil

from fusermount3_broker.kernel import syscalls
from tests.lab.broker import PROXY

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Call:
    """The result of a call of the proxy. `descriptor` is -1 if none came; then, or with a status, `said` says why.

    `seconds` are those to what the caller waits for, `until_exit` those from exec to exit.
    """

    seconds: float
    status: int
    said: str
    until_exit: float
    descriptor: int = -1


class Helper:
    """fusermount3 for one process that calls it again and again. The calls are not concurrent."""

    def __init__(self, socket_path: Path, program: Path = PROXY) -> None:
        self._program = program
        self._environment = {"FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": str(socket_path)}
        self._said = os.memfd_create("stderr")

    def close(self) -> None:
        os.close(self._said)

    def mount(self, mountpoint: Path, options: str = "rw,nosuid,nodev,subtype=load") -> Call:
        """Mount; the seconds are those from exec to the descriptor, which is the caller's to close."""
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        with ours:
            begun = time.perf_counter()
            pid = self._spawn(["-o", options, "--", str(mountpoint)], {"_FUSE_COMMFD": str(theirs.fileno())})
            theirs.close()
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
            took = time.perf_counter() - begun
        status = self._wait(pid)
        until_exit = time.perf_counter() - begun
        return Call(took, status, self._stderr(), until_exit, descriptors[0] if descriptors else -1)

    def unmount(self, mountpoint: Path, *options: str) -> Call:
        """Unmount; the seconds are those from exec to exit."""
        begun = time.perf_counter()
        status = self._wait(self._spawn(["-u", *options, "--", str(mountpoint)], {}))
        took = time.perf_counter() - begun
        return Call(took, status, self._stderr(), took)

    def _spawn(self, arguments: list[str], environment: dict[str, str]) -> int:
        os.ftruncate(self._said, 0)
        os.lseek(self._said, 0, os.SEEK_SET)
        to_stderr = [(os.POSIX_SPAWN_DUP2, self._said, 2)]
        argv = ["fusermount3", *arguments]
        return os.posix_spawn(self._program, argv, {**self._environment, **environment}, file_actions=to_stderr)

    def _wait(self, pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _stderr(self) -> str:
        return os.pread(self._said, 65536, 0).decode("utf-8", "replace").strip()


class Beside(Generic[ResultT]):
    """A forked process that runs `body`, while this one goes on; `result` waits for the return value."""

    def __init__(self, body: Callable[[], ResultT]) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing else would end it then
            for number in (signal.SIGINT, signal.SIGTERM):  # however this process handles them
                signal.signal(number, signal.SIG_DFL)
            os.close(reader)
            try:
                answer: object = body()
            except BaseException:
                answer = Failed(traceback.format_exc())
            try:
                with os.fdopen(writer, "wb") as pipe:
                    pickle.dump(answer, pipe)
            finally:
                os._exit(0)  # even if nobody reads the answer: this process must not go on as its parent
        os.close(writer)
        self._reader = reader
        self._has_ended = False

    def __enter__(self) -> Beside[ResultT]:
        return self

    def __exit__(self, *exception: object) -> None:
        """Kill the process, if its end has not been awaited."""
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)
            os.close(self._reader)
            self._wait()

    def _wait(self) -> None:
        os.waitpid(self.pid, 0)
        self._has_ended = True

    def result(self) -> ResultT:
        """Return what `body` returned. AssertionError if it raised, or was killed."""
        with os.fdopen(self._reader, "rb", closefd=False) as pipe:
            said = pipe.read()
        os.close(self._reader)
        self._wait()
        assert said, "the process was killed"
        answer = pickle.loads(said)
        assert not isinstance(answer, Failed), answer.text
        return answer  # type: ignore[no-any-return]  # the object that was pickled


@dataclass(frozen=True)
class Failed:
    text: str


@dataclass(frozen=True)
class Holding:
    """The resources of a broker's processes together. Memory in bytes; shared pages are shared out in `pss`."""

    processes: int
    descriptors: int
    rss: int
    pss: int


def holding(leader: int) -> Holding:
    """Return the resources of the process `leader` and all its descendants."""
    processes = [psutil.Process(leader), *psutil.Process(leader).children(recursive=True)]
    found = [each for process in processes if (each := _of(process.pid))]
    return Holding(len(found), *(sum(column) for column in zip(*found, strict=True)))


def _of(pid: int) -> tuple[int, int, int] | None:
    """Return descriptors, RSS and PSS of a process; None if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  # counted, not used
    except OSError:
        return None
    sizes = {name: 1024 * int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return descriptors, sizes["Rss"], sizes["Pss"]
