"""Volumes in kubelet's directory: what the mounter does there for nobody's sake but kubelet's.

A volume is published when its target has a placeholder (`targets`) and its sockets are in a pod's emptyDir. What is in
that is the pod's, which may put there whatever it likes, at any time: nothing is followed or opened, and nothing
removed but what the broker has marked, or a socket that nobody has under a name that the broker has drawn by lot. All
paths are relative to kubelet's directory, which was opened before.

For the mounter's children that stay in the broker's own namespaces.
"""

import errno
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from broker import connections, invariants, marks, mounts, namespaces, plan, presence, syscalls
from broker.children import Rescue, in_child
from broker.conversation import Conversation, HungUp, StepError
from broker.descriptors import Descriptors
from broker.invariants import SECOND_SOCKET
from broker.targets import Target, is_placeholder, open_beneath

#: Callers that wait in the socket; as in `sockets`.
_BACKLOG = 16
#: By whom a volume's socket may be connected to: who is in the pod, whatever the uid. The front asks who it is.
_UMASK = 0o111
#: Children that may be about to make a socket of a volume.
_AT_ONCE = 4
#: Seconds in which the requests that wait in a connection don't move, when its volume is gone, before it is aborted.
_UNMOVED = 1


def publish(opened: Descriptors, talk: Conversation, start: plan.StartPublish) -> None:
    """Make what a volume needs; if that fails, nothing of it that is new stays."""
    if not (
        invariants.allow_target(start.target)
        and invariants.allow_socket(start.directory, start.name, start.nonce, start.target)
    ):
        raise StepError(errno.EPERM, "check the volume")
    os.fchdir(opened.proc)
    with ExitStack() as held, ExitStack() as undone:
        with talk.bounded(f"open the emptyDir {_text(start.directory.rpartition(b'/')[2])}"):
            assert opened.kubelet is not None
            directory = open_beneath(opened.kubelet, start.directory)
            held.callback(os.close, directory)
        try:
            listeners = _sockets(talk, directory, start, undone)
            _check_wanted(talk)
        except HungUp:
            undone.pop_all()  # what is there by now may be the next front's
            raise
        with talk.bounded("make the target"), Target(opened, start.target) as target, target.alone(talk.seconds):
            target.make()
        undone.pop_all()
        talk.say(plan.Published(), *(each.fileno() for each in listeners))


def _check_wanted(talk: Conversation) -> None:
    """Raise HungUp if the front is gone: the next one may have made the volume, or have taken it away, since."""
    if talk.is_over(0):
        raise HungUp


def _sockets(talk: Conversation, directory: int, start: plan.StartPublish, undone: ExitStack) -> list[socket.socket]:
    """Return the sockets of a volume, made anew, each of which `undone` removes; none if the front has them."""
    kinds = {start.name: socket.SOCK_SEQPACKET}
    if start.old_clients:
        kinds = {start.name + SECOND_SOCKET: socket.SOCK_SEQPACKET, start.name: socket.SOCK_STREAM}
    if start.serving and all(_is_served(directory, each) for each in kinds):
        return []
    listeners = []
    for name, kind in kinds.items():
        with talk.bounded(f"make the socket {_text(name)}"):
            listeners.append(_listen(talk, directory, name, kind, start.nonce))
            undone.callback(_remove_socket, directory, name)
    return listeners


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _listen(talk: Conversation, directory: int, name: bytes, kind: socket.SocketKind, nonce: bytes) -> socket.socket:
    """Return a listening socket that is new in a directory, in place of one of the broker's. Raises OSError, HungUp.

    It is marked and listened on before it has its name, so that there never is one that isn't.
    """
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        _remove_unfinished(directory, nonce)
        with _working_in(directory):
            new = _bind(listener, nonce)
        try:
            listener.listen(_BACKLOG)
            with _looking(directory, new) as entry:
                marks.mark(entry)
            _check_wanted(talk)
            _remove_socket(directory, name)
            os.link(new, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        finally:
            os.unlink(new, dir_fd=directory)
    except OSError:
        listener.close()
        raise
    return listener


def _bind(listener: socket.socket, nonce: bytes) -> bytes:
    """Bind a socket in the working directory, and return its name, which nobody has. Raises OSError."""
    before = os.umask(_UMASK)
    try:
        for new in _unfinished(nonce):
            try:
                listener.bind(new)
                return new
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
    finally:
        os.umask(before)
    raise OSError(errno.EADDRINUSE, "other children have all of these names")


def _unfinished(nonce: bytes) -> list[bytes]:
    """Return what a socket of a volume may be called before it has its name.

    More than one: the child of an earlier front or mounter may still be about to finish its own.
    """
    return [b".fusermount3-broker.%b.%d" % (nonce, number) for number in range(_AT_ONCE)]


def _remove_unfinished(directory: int, nonce: bytes) -> None:
    """Remove what children have left that were killed before their sockets had their names. Raises OSError.

    Nobody but the broker knows the names at which that is. One that somebody has is another child's, which lives.
    """
    for name in _unfinished(nonce):
        with suppress(FileNotFoundError), _looking(directory, name) as entry:
            if stat.S_ISSOCK(os.fstat(entry).st_mode) and presence.is_left(b"self/fd/%d" % entry):
                os.unlink(name, dir_fd=directory)


@contextmanager
def _working_in(directory: int) -> Iterator[None]:
    """Have a directory for working directory: the address of a socket has 107 bytes, and no directory's descriptor."""
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.fchdir(directory)
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)


@contextmanager
def _looking(directory: int, name: bytes) -> Iterator[int]:
    """Give a descriptor of an entry, for a look at it. Raises OSError."""
    entry = os.open(name, mounts.LOOK, dir_fd=directory)
    try:
        yield entry
    finally:
        os.close(entry)


def _is_own_socket(directory: int, name: bytes) -> bool:
    """Whether an entry is a socket that the broker made."""
    try:
        with _looking(directory, name) as entry:
            return stat.S_ISSOCK(os.fstat(entry).st_mode) and marks.is_marked(entry)
    except OSError:
        return False


def _is_served(directory: int, name: bytes) -> bool:
    """Whether an entry is a socket that the broker made, and that somebody has."""
    with suppress(OSError), _looking(directory, name) as entry:
        if stat.S_ISSOCK(os.fstat(entry).st_mode) and marks.is_marked(entry):
            return presence.is_had(b"self/fd/%d" % entry)
    return False


def _remove_socket(directory: int, name: bytes) -> None:
    """Remove a socket that the broker made. Raises OSError."""
    if _is_own_socket(directory, name):
        os.unlink(name, dir_fd=directory)


def unpublish(opened: Descriptors, talk: Conversation, start: plan.StartUnpublish) -> None:
    """Take a volume away, whatever is left of it."""
    if not invariants.allow_target(start.target):
        raise StepError(errno.EPERM, "check the volume")
    if start.directory and not invariants.allow_socket(start.directory, start.name, start.nonce, start.target):
        raise StepError(errno.EPERM, "check the volume")
    os.fchdir(opened.proc)
    with talk.bounded("remove the sockets"):
        _remove_sockets(opened, start)
    with ExitStack() as held:
        try:
            target = held.enter_context(Target(opened, start.target))
        except (FileNotFoundError, NotADirectoryError):
            talk.say(plan.Unpublished())
            return
        with talk.bounded("open the target"):
            held.enter_context(target.alone(talk.seconds))
            left = held.enter_context(_Left(opened, target))
        _detach(talk, target, left)
        with talk.bounded("remove the target"):
            target.remove()
        left.abort_what_hangs(talk)
    talk.say(plan.Unpublished())


def _remove_sockets(opened: Descriptors, start: plan.StartUnpublish) -> None:
    """Remove the volume's sockets. If the pod has made that impossible, they go with its emptyDir."""
    assert opened.kubelet is not None
    with suppress(OSError), ExitStack() as held:
        directory = open_beneath(opened.kubelet, start.directory)
        held.callback(os.close, directory)
        for name in (start.name, start.name + SECOND_SOCKET):
            with suppress(OSError):
                _remove_socket(directory, name)
        _remove_unfinished(directory, start.nonce)


class _Left:
    """The FUSE connections of what is mounted at a target: they may be there still when it is not."""

    def __init__(self, opened: Descriptors, target: Target) -> None:
        """Open them. Raises OSError."""
        self._held = ExitStack()
        self._connections: list[connections.Connection] = []
        with suppress(FileNotFoundError, FileExistsError), target.topmost() as entry:
            for mount in target.layers(entry):
                with suppress(FileNotFoundError):
                    connection = self._held.enter_context(connections.Connection(opened.fusectl, mount.device))
                    self._connections.append(connection)

    def __enter__(self) -> "_Left":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def abort(self) -> None:
        """Abort them all."""
        for connection in self._connections:
            _abort(connection)

    def abort_what_hangs(self, talk: Conversation) -> None:
        """Abort those in which requests wait and nobody answers them."""
        for connection in self._connections:
            give_up = time.monotonic() + 2 * _UNMOVED

            def is_at_rest(
                seconds: float, connection: connections.Connection = connection, end: float = give_up
            ) -> bool:
                return not connection.waiting() or time.monotonic() > end or talk.is_over(seconds)

            with suppress(FileNotFoundError):  # it has ended
                if connections.hangs(connection, _UNMOVED, is_at_rest):
                    _abort(connection)


def _abort(connection: connections.Connection) -> None:
    """Abort it in a child, which takes the rights of its user for that."""
    with suppress(OSError):  # it has just ended
        in_child(connection.abort, [connection.fileno()], [syscalls.CAP_SETUID, syscalls.CAP_SETGID])


def _detach(talk: Conversation, target: Target, left: _Left) -> None:
    """Unmount all that the broker has mounted at the target. A program that hangs and holds that up is cut off."""
    seconds = max(1, talk.seconds // 2)
    for _ in range(2):
        with talk.bounded("unmount", seconds), suppress(TimeoutError):
            rescue = Rescue(talk.fileno(), left.abort)
            in_child(target.detach, [target.directory], [syscalls.CAP_SYS_ADMIN], rescue=rescue)
            return
    raise StepError(errno.ETIMEDOUT, "unmount")


_NOTHING = plan.Stated(
    published=False,
    served=False,
    errno=0,
    total_bytes=0,
    free_bytes=0,
    available_bytes=0,
    total_inodes=0,
    free_inodes=0,
)


def stat_volume(opened: Descriptors, talk: Conversation, start: plan.StartStat) -> None:
    """Tell how full a volume is, in time, also if its program hangs; whoever asked that then ends with the program."""
    if not invariants.allow_target(start.target):
        raise StepError(errno.EPERM, "check the volume")
    os.fchdir(opened.proc)
    with talk.bounded("ask"), ExitStack() as held:
        try:
            target = held.enter_context(Target(opened, start.target))
            entry = held.enter_context(target.topmost())
            layers = target.layers(entry)
        except (FileNotFoundError, NotADirectoryError, FileExistsError):
            layers = []
        if not layers:
            talk.say(_NOTHING)
        elif is_placeholder(layers[0]):
            talk.say(_unserved(errno.ENODATA))
        else:
            with suppress(TimeoutError):  # that has been said
                talk.say(_ask(opened, talk, entry, layers[0].device))


def _unserved(number: int) -> plan.Stated:
    return _NOTHING._replace(published=True, errno=number)


def _ask(opened: Descriptors, talk: Conversation, entry: int, device: int) -> plan.Stated:
    """Return what the FUSE filesystem at the target says. Raises TimeoutError when the front was told that it hangs."""

    def tell() -> None:
        with suppress(HungUp):
            talk.say(_unserved(errno.ETIMEDOUT))

    rescue = Rescue(talk.fileno(), tell)
    fuse = mounts.fuse_if_any(mounts.look(entry).mount_id)
    if fuse is None:
        return _unserved(errno.ENODATA)
    try:
        usage = mounts.usage(entry, fuse, rescue)
        if usage is None:  # it is another user namespace's: that of its program
            server = connections.served(opened.proc, device)
            if server is None:
                return _unserved(errno.ENOTCONN)
            namespaces.join_user_namespace(os.pidfd_open(server.pid))
            usage = mounts.usage(entry, fuse, rescue)
    except TimeoutError:
        raise
    except OSError as error:
        return _unserved(error.errno or errno.EIO)
    if usage is None:
        return _unserved(errno.EACCES)
    numbers = [usage.block_size * each for each in (usage.blocks, usage.free_blocks, usage.available_blocks)]
    return plan.Stated(True, True, 0, *(min(each, _MOST) for each in (*numbers, usage.inodes, usage.free_inodes)))


#: The largest number in a record; a FUSE program may say any.
_MOST = 2**63 - 1
