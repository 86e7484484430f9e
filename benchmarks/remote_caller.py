"""Processes that call a helper as a FUSE program does: on the host, or in a container, with its namespaces and rights.

Each caller consists of two processes. The caller itself has all namespaces of the container, its uid and gid, no
supplementary groups, and the capabilities of the container's bounding set; it measures, and mounts when it is told to.
It has neither the container's cgroup nor its seccomp filter. The other process, its parent, is in the container's mount
namespace with the rights of the host's root: it unmounts, which the caller may not do without a helper.

On the host a caller is such a pair of processes, too, so that the same is measured everywhere.
"""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.results import AS_ROOT, AS_USER, USER_NAMESPACE
from fusermount3_broker.kernel import capabilities, syscalls
from tests.lab.broker import Broker
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.load import Beside, Helper
from tests.lab.podman import Container, Options

#: The containers by the name of the case.
CONTAINERS = {
    AS_ROOT: Options(),
    AS_USER: Options(user="1000:1000"),
    USER_NAMESPACE: Options(user_namespace=True),
}
#: Paths in a container.
SOCKET, PROGRAM = Path("/run/fusermount3-proxy/broker.sock"), Path("/usr/bin/fusermount3")
MOUNTPOINT = Path("/home/user/mnt")


@dataclass(frozen=True)
class Mounted:
    """What one mount took: milliseconds from exec, and the use of the helper and the children that it waited for."""

    to_descriptor: float
    to_exit: float
    cpu: float
    """Milliseconds, user and system together."""
    minor_faults: int


class Membership:
    """The namespaces and rights of a container's first process. Its descriptors stay open until the process ends."""

    #: Joined by the caller, the user namespace last: before, the process has the rights to join the others.
    OF_CALLER = ("net", "ipc", "uts", "cgroup", "user")

    def __init__(self, pid: int) -> None:
        namespaces = Path(f"/proc/{pid}/ns")
        own = Path("/proc/self/ns")
        self._other = {
            name: os.open(namespaces / name, os.O_RDONLY | os.O_CLOEXEC)
            for name in ("pid", "mnt", *self.OF_CALLER)
            if (namespaces / name).readlink() != (own / name).readlink()
        }
        self._bounding = bounding_capabilities(pid)

    def join_mounts(self) -> None:
        """Join the mount namespace; processes forked from now on are in the pid namespace."""
        self._join("pid")
        self._join("mnt")

    def become_member(self, uid: int) -> None:
        """Join the other namespaces, and have no more rights than a process of the container with this uid and gid."""
        for name in self.OF_CALLER:
            self._join(name)
        capabilities.drop_bounding(*self._bounding)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)  # drops all capabilities, unless uid is 0
        capabilities.keep(*self._bounding)

    def _join(self, name: str) -> None:
        if name in self._other:  # a process can't join the user namespace that it is in
            syscalls.setns(self._other[name], 0)


def bounding_capabilities(pid: int) -> list[int]:
    """Return the capabilities in the bounding set of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    bits = int(next(line.split()[1] for line in lines if line.startswith("CapBnd:")), 16)
    return [each for each in range(bits.bit_length()) if bits >> each & 1]


class RemoteCaller:
    """A caller; it ends when the `with` block does."""

    def __init__(self, helper: Helper, mountpoint: Path, container: int | None = None, uid: int = 0) -> None:
        """Call `helper` in the container of the process `container`, or else on the host, in this mount namespace.

        The paths of helper, socket and mountpoint are those which the caller sees.
        """
        self._helper = helper
        self._mountpoint = mountpoint
        self._container = container
        self._uid = uid

    def __enter__(self) -> "RemoteCaller":
        self._pipe, self._process = forked(self._serve)
        return self

    def __exit__(self, *exception: object) -> None:
        self._pipe.close()
        with self._process:
            if exception == (None, None, None):
                self._process.result()
        self._helper.close()

    def mount(self) -> Mounted:
        """Have the caller mount, and then the mount removed. AssertionError with the helper's message if it fails."""
        self._pipe.send(None)
        answer = received(self._pipe, self._process)
        assert isinstance(answer, Mounted), answer
        return answer

    def _serve(self, pipe: Connection) -> None:
        """Pass on what the caller is told and what it answers; meanwhile, unmount."""
        membership = None if self._container is None else Membership(self._container)
        if membership:
            membership.join_mounts()
        to_caller, caller = forked(partial(self._call, membership))
        with caller:
            for _ in requests(pipe):
                to_caller.send(None)
                answer = received(to_caller, caller)
                if isinstance(answer, Mounted):
                    syscalls.umount2(bytes(self._mountpoint), syscalls.MNT_DETACH)
                pipe.send(answer)
            to_caller.close()
            caller.result()

    def _call(self, membership: Membership | None, pipe: Connection) -> None:
        """Become the caller, and mount for each request."""
        if membership:
            membership.become_member(self._uid)
        for _ in requests(pipe):
            pipe.send(self._mount())

    def _mount(self) -> Mounted | str:
        """Mount; return the helper's message if that fails."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        call = self._helper.mount(self._mountpoint)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if call.descriptor >= 0:
            os.close(call.descriptor)
        if call.status or call.descriptor < 0:
            return f"status {call.status}: {call.said}"
        return Mounted(
            to_descriptor=1000 * call.seconds,
            to_exit=1000 * call.until_exit,
            cpu=1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
            minor_faults=after.ru_minflt - before.ru_minflt,
        )


def forked(body: Callable[[Connection], None]) -> tuple[Connection, Beside[None]]:
    """Start a process that runs `body` with one end of a pipe; return the other end, and the process."""
    ours, theirs = Pipe()

    def run() -> None:
        ours.close()
        body(theirs)

    process = Beside(run)
    theirs.close()
    return ours, process


def requests(pipe: Connection) -> Iterator[None]:
    """Yield for each request, until the other end of the pipe has been closed."""
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        yield


def received(pipe: Connection, process: Beside[None]) -> object:
    """Return the answer of a process. AssertionError with its traceback if it has ended instead."""
    try:
        return pipe.recv()
    except EOFError:
        process.result()
        raise


def uid_of(options: Options) -> int:
    """Return the uid, and gid, of the programs in a container of `CONTAINERS`."""
    return int((options.user or "0").partition(":")[0])


@contextmanager
def in_containers(broker: Broker, *names: str) -> Iterator[dict[str, RemoteCaller]]:
    """Start a container for each of these cases of `CONTAINERS`, and yield a caller in each."""
    image = image_tag(BUSYBOX)
    with ExitStack() as stack:
        callers = {}
        for name in names:
            options = replace(CONTAINERS[name], volumes=broker.volumes())
            container = stack.enter_context(Container(image, options=options))
            caller = RemoteCaller(Helper(SOCKET, PROGRAM), MOUNTPOINT, container.pid, uid_of(options))
            callers[name] = stack.enter_context(caller)
        yield callers
