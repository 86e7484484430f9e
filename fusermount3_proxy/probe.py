"""``--wait-mounted``, for probes and scripts: waits until a FUSE filesystem is mounted at a path and is served.

A process that queries a filesystem blocks for as long as its server likes, and can't even be killed meanwhile. So a
child queries, and this process waits for the child's answer within bounds. Only one child at a time queries the same
mount: a probe that runs every ten seconds does not fill the container with hung processes.

A probe is killed with its container when the FUSE program there ends, and can't say then what it was waiting for. So
one that has to wait says it before.
"""

from _signal import SIGKILL
from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_DGRAM, SOCK_SEQPACKET, socket, socketpair
from errno import EADDRINUSE, ENOSYS, ENOTCONN
from posix import (
    O_CLOEXEC,
    O_PATH,
    O_RDONLY,
    WNOHANG,
    _exit,
    close,
    closerange,
    fork,
    fstat,
    fstatvfs,
    getuid,
    kill,
    open,
    read,
    readlink,
    waitpid,
)
from time import monotonic, sleep

from fusermount3_proxy import arguments
from fusermount3_proxy.failure import Failure, in_seconds, reason, say

# For the type checker only.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

USAGE = b"""\
--wait-mounted PATH [--timeout S]
Exit with 0 as soon as a FUSE filesystem is mounted at PATH and served, with 1 if it is not after S seconds (0).
"""

#: Minimum seconds that a filesystem has to answer. A probe has one second unless its pod sets another timeout.
ANSWER = 0.7
#: Seconds of waiting after which the problem is told, once.
LATE = 0.3
#: Seconds after which a new query is made: another filesystem may have replaced one that hangs.
LONGEST_LOOK = 5.0
#: Seconds between two queries.
PAUSE = 0.1

_SERVED = b"served"
#: Sent by the child before it asks the filesystem.
_ASKING = b"asking"
_SILENT = b"the filesystem does not answer"
_LARGEST_DESCRIPTOR = 2**31 - 1
_OPTIONS = {b"wait-mounted": b"path", b"timeout": b"timeout"}


def main(program: bytes, words: list[bytes]) -> int:
    """Return 0 once the filesystem is there. Raises Failure if it is not there in time."""
    given, rest = arguments.split(words, _OPTIONS)
    if arguments.HELP in given:
        say(1, USAGE)
        return 0
    if rest or not given.get(b"path"):
        raise Failure(b"extra argument: %b" % rest[0] if rest else b"--wait-mounted: missing path")
    told: list[bytes] = []

    def tell(text: bytes) -> None:
        if not told:
            say(2, b"%b: %b\n" % (program, text))
            told.append(text)

    try:
        wait(given[b"path"], arguments.seconds(given.get(b"timeout", b"0")), tell)
    except Failure as failure:
        if failure.text in told:
            return 1
        raise
    return 0


def wait(path: bytes, timeout: float, tell: "Callable[[bytes], None]") -> None:
    """Wait until a served FUSE filesystem is mounted at `path`; query at least once. Raises Failure.

    If that takes longer than `LATE` seconds, `tell` gets the problem meanwhile, perhaps repeatedly.
    """
    late = monotonic() + LATE
    give_up = monotonic() + timeout
    while problem := _look(path, min(max(give_up - monotonic(), ANSWER), LONGEST_LOOK), tell):
        if monotonic() + PAUSE > give_up:
            waited = b", waited %b" % in_seconds(timeout) if timeout else b""
            raise Failure(b"%b: %b%b" % (path, problem, waited))
        if monotonic() >= late:
            tell(b"%b: %b" % (path, problem))
        sleep(PAUSE)


def _look(path: bytes, seconds: float, tell: "Callable[[bytes], None]") -> bytes:
    """Return the problem with `path`; empty if there is none. Tells that there is no answer while it waits for one."""
    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC)
    child = fork()
    if child == 0:
        try:
            _answer(path, theirs)
        finally:
            _exit(0)
    theirs.close()
    try:
        give_up = monotonic() + seconds
        answer = _receive(ours, seconds)
        if answer == _ASKING:
            answer = _receive(ours, min(LATE, give_up - monotonic()))
            if answer is None:
                tell(b"%b: %b" % (path, _SILENT))
                answer = _receive(ours, give_up - monotonic())
        if answer is None:
            kill(child, SIGKILL)
            waitpid(child, WNOHANG)  # the child may be waiting for the filesystem even now
            return _SILENT
    finally:
        ours.close()
    waitpid(child, 0)
    return b"" if answer == _SERVED else answer or b"the check could not run"


def _receive(end: socket, seconds: float) -> bytes | None:
    """Return a message, empty if the other end is closed, None if there is none in time."""
    end.settimeout(max(seconds, 0.001))
    try:
        return end.recv(256)
    except TimeoutError:
        return None


def _answer(path: bytes, asker: socket) -> None:
    """Query the filesystem and send the answer; runs in the child."""
    number = asker.fileno()
    # The reader of the probe's output waits until every process has closed the other end.
    closerange(0, number)
    closerange(number + 1, _LARGEST_DESCRIPTOR)
    try:
        asker.send(_state(path, asker))
    except OSError as error:
        asker.send(b"its FUSE program is gone" if error.errno == ENOTCONN else reason(error))


def _state(path: bytes, asker: socket) -> bytes:
    """Return `_SERVED`, or what there is instead. Raises OSError; may block."""
    place = open(path, O_PATH | O_CLOEXEC)  # on a mountpoint, this sends no request to the mounted filesystem
    mount = _mount_at(place)
    if not mount:
        return b"not a mountpoint of a FUSE filesystem"
    asker.send(_ASKING)
    _take_turn(mount, asker)
    fstat(place)  # without allow_other, EACCES for all but its user
    try:
        fstatvfs(place)  # which the kernel never answers by itself
    except OSError as error:
        if error.errno != ENOSYS:  # ENOSYS is an answer, of a server without this operation
            raise
    return _SERVED


def _take_turn(mount: bytes, asker: socket) -> None:
    """Wait until no other process queries this mount: each binds the same abstract name, until it ends."""
    name = b"\0fusermount3-proxy/wait-mounted/%d/%b" % (getuid(), mount)
    turn = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC)
    asker.settimeout(PAUSE / 10)
    while True:
        try:
            turn.bind(name)
            turn.detach()  # the socket stays open
            return
        except OSError as error:
            if error.errno != EADDRINUSE:
                return
        try:
            asker.recv(1)  # the parent sends nothing; this returns when it hangs up
            _exit(0)  # nor does it read any more
        except TimeoutError:
            pass


def _mount_at(place: int) -> bytes:
    """Return the id of the FUSE mount whose root is `place`, empty if it is none: see proc_pid_mountinfo(5)."""
    path = readlink(b"/proc/self/fd/%d" % place)
    for special in (b"\\", b" ", b"\t", b"\n"):
        path = path.replace(special, b"\\%03o" % ord(special))
    (mount,) = (line.split()[1] for line in _lines(b"/proc/self/fdinfo/%d" % place) if line.startswith(b"mnt_id:"))
    for line in _lines(b"/proc/self/mountinfo"):
        fields, _, filesystem = line.partition(b" - ")
        if fields.startswith(mount + b" "):
            type = filesystem.partition(b" ")[0].partition(b".")[0]
            return mount if type in (b"fuse", b"fuseblk") and fields.split(b" ")[4] == path else b""
    return b""


def _lines(path: bytes) -> list[bytes]:
    file = open(path, O_RDONLY | O_CLOEXEC)
    parts = []
    while part := read(file, 65536):
        parts.append(part)
    close(file)
    return b"".join(parts).split(b"\n")
