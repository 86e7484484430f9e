"""Volumes in kubelet's directory: how the mounter publishes, removes and measures them, for kubelet only.

A volume is published when its target has a placeholder (`volume_targets`) and its sockets are in a pod's emptyDir. The
emptyDir belongs to the pod, which may put anything there at any time. So nothing in it is followed or opened, and only
two kinds of entries are removed: those that the broker has marked, and stale sockets under random names that the broker
has chosen. All paths are relative to kubelet's directory, which was opened before.

For the mounter's children that stay in the broker's own namespaces.
"""

import errno
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from fusermount3_broker.kernel import ownership_marks, socket_probe, syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.messages.volume_sockets import SECOND_SOCKET
from fusermount3_broker.mounter import (
    block_devices,
    fuse_connections,
    invariants,
    mount_tree,
    namespaces,
    pods,
    volume_consumers,
    volume_targets,
)
from fusermount3_broker.mounter.child_processes import Rescue, in_child
from fusermount3_broker.mounter.front_connection import Conversation, HungUp, StepError
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_broker.mounter.volume_targets import Target, is_placeholder, open_beneath

#: Callers that may wait to be accepted; as in `listening_sockets`.
_BACKLOG = 16
#: Any uid in the pod may connect to a volume's socket; the front checks who the caller is.
_UMASK = 0o111
#: Children that may be creating a socket of one volume at the same time.
_AT_ONCE = 4
#: Seconds without a change of the waiting requests after which the FUSE connection of a removed volume is aborted.
_UNMOVED = 1


def publish(opened: Descriptors, talk: Conversation, start: mounter.StartPublish) -> None:
    """Create the sockets and the target of a volume; if that fails, remove again what is new."""
    if not (
        invariants.allow_target(start.target)
        and invariants.allow_socket(start.directory, start.name, start.nonce, start.target)
    ):
        raise StepError(errno.EPERM, "check the volume")
    opened.cell.check()
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
            undone.pop_all()  # what exists by now may belong to the next front
            raise
        with talk.bounded("make the target"), Target(opened, start.target) as target, target.alone(talk.seconds):
            target.make(shared=start.shared)
        undone.pop_all()
        talk.say(mounter.Published(), *(each.fileno() for each in listeners))


def _check_wanted(talk: Conversation) -> None:
    """Raise HungUp if the front is gone: the next front may have published or removed the volume since."""
    if talk.is_over(0):
        raise HungUp


def _sockets(talk: Conversation, directory: int, start: mounter.StartPublish, undone: ExitStack) -> list[socket.socket]:
    """Return new sockets for a volume, each of which `undone` removes; none if the front has them already."""
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
    """Return a new listening socket in a directory, in place of an old one of the broker's. Raises OSError, HungUp.

    It is marked and listens before it gets its name, so a socket of that name always is marked and listens.
    """
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        _remove_unfinished(directory, nonce)
        with _working_in(directory):
            new = _bind(listener, nonce)
        try:
            listener.listen(_BACKLOG)
            with _looking(directory, new) as entry:
                ownership_marks.mark(entry)
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
    """Bind a socket in the working directory under a name that is free, and return the name. Raises OSError."""
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
    """Return the temporary names that a volume's socket may have before it gets its own name.

    There are several because a child of an earlier front or mounter may still be creating its own socket.
    """
    return [b".fusermount3-broker.%b.%d" % (nonce, number) for number in range(_AT_ONCE)]


def _remove_unfinished(directory: int, nonce: bytes) -> None:
    """Remove the sockets of children that were killed before those had their own names. Raises OSError.

    Only the broker knows the temporary names. A socket that is not stale belongs to another child, which is alive.
    """
    for name in _unfinished(nonce):
        with suppress(FileNotFoundError), _looking(directory, name) as entry:
            if stat.S_ISSOCK(os.fstat(entry).st_mode) and socket_probe.is_stale(b"self/fd/%d" % entry):
                os.unlink(name, dir_fd=directory)


@contextmanager
def _working_in(directory: int) -> Iterator[None]:
    """Make a directory the working directory: a socket's address has 107 bytes, and no place for a descriptor."""
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.fchdir(directory)
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)


@contextmanager
def _looking(directory: int, name: bytes) -> Iterator[int]:
    """Yield a descriptor of an entry that serves only to inspect it. Raises OSError."""
    entry = os.open(name, mount_tree.LOOK, dir_fd=directory)
    try:
        yield entry
    finally:
        os.close(entry)


def _is_own_socket(directory: int, name: bytes) -> bool:
    """Return whether an entry is a socket that the broker made."""
    try:
        with _looking(directory, name) as entry:
            return stat.S_ISSOCK(os.fstat(entry).st_mode) and ownership_marks.is_marked(entry)
    except OSError:
        return False


def _is_served(directory: int, name: bytes) -> bool:
    """Return whether an entry is a socket that the broker made and that has a listener."""
    with suppress(OSError), _looking(directory, name) as entry:
        if stat.S_ISSOCK(os.fstat(entry).st_mode) and ownership_marks.is_marked(entry):
            return socket_probe.has_listener(b"self/fd/%d" % entry)
    return False


def _remove_socket(directory: int, name: bytes) -> None:
    """Remove a socket that the broker made. Raises OSError."""
    if _is_own_socket(directory, name):
        os.unlink(name, dir_fd=directory)


def recognize(opened: Descriptors, talk: Conversation, start: mounter.StartRecognizeVolume) -> None:
    """Report whether the filesystem of a device is still mounted at a target, or in containers that have the volume."""
    volume_targets.begin(opened, start.target)
    is_there = False
    with (
        talk.bounded("look at the volume"),
        suppress(FileNotFoundError, NotADirectoryError, FileExistsError),  # the volume is gone
        Target(opened, start.target) as target,
        target.seen() as (_, layers),
    ):
        is_there = any(each.device == start.device for each in layers)
    if not is_there:
        pod = None if start.shared else pods.pod_of_target(start.target)
        with talk.bounded("look at the containers"):
            is_there = volume_consumers.have(opened, pod, start.device, start.type, start.source)
    talk.say(mounter.Recognized(b"%d\n" % start.device if is_there else b""))


def unpublish(opened: Descriptors, talk: Conversation, start: mounter.StartUnpublish) -> None:
    """Remove a volume, even if only parts of it are left."""
    volume_targets.begin(opened, start.target)
    if start.directory and not invariants.allow_socket(start.directory, start.name, start.nonce, start.target):
        raise StepError(errno.EPERM, "check the volume")
    with talk.bounded("remove the sockets"):
        _remove_sockets(opened, start)
    if block_devices.is_at(opened, start.target):
        block_devices.remove(opened, talk, start.target)
        talk.say(mounter.Unpublished())
        return
    with ExitStack() as held:
        try:
            target = held.enter_context(Target(opened, start.target))
        except (FileNotFoundError, NotADirectoryError):
            talk.say(mounter.Unpublished())
            return
        with talk.bounded("open the target"):
            held.enter_context(target.alone(talk.seconds))
            left = held.enter_context(_Connections(opened, target))
            if start.borrowed:
                _keep(target)
        _detach(talk, target, left if not start.borrowed else None)
        with talk.bounded("remove the target"):
            target.remove()
        if not start.borrowed:
            left.abort_what_hangs(talk)
    talk.say(mounter.Unpublished())


def _keep(target: Target) -> None:
    """Keep the topmost filesystem until this process ends, and not even wait for its end when it is detached."""
    with suppress(FileNotFoundError, FileExistsError), target.topmost() as top:
        os.dup(top)


def _remove_sockets(opened: Descriptors, start: mounter.StartUnpublish) -> None:
    """Remove the volume's sockets. If the pod has made that impossible, they disappear with its emptyDir."""
    assert opened.kubelet is not None
    with suppress(OSError), ExitStack() as held:
        directory = open_beneath(opened.kubelet, start.directory)
        held.callback(os.close, directory)
        for name in (start.name, start.name + SECOND_SOCKET):
            with suppress(OSError):
                _remove_socket(directory, name)
        _remove_unfinished(directory, start.nonce)


class _Connections:
    """The FUSE connections of the mounts at a target, which may outlive the mounts."""

    def __init__(self, opened: Descriptors, target: Target) -> None:
        """Open them. Raises OSError."""
        self._held = ExitStack()
        self._connections: list[fuse_connections.Connection] = []
        with suppress(FileNotFoundError, FileExistsError), target.seen() as (_, layers):
            for mount in layers:
                with suppress(FileNotFoundError):
                    connection = self._held.enter_context(fuse_connections.Connection(opened.fusectl, mount.device))
                    self._connections.append(connection)

    def __enter__(self) -> "_Connections":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def abort(self) -> None:
        """Abort all of them."""
        for connection in self._connections:
            _abort(connection)

    def abort_what_hangs(self, talk: Conversation) -> None:
        """Abort those in which requests wait and the FUSE program answers none."""
        for connection in self._connections:
            give_up = time.monotonic() + 2 * _UNMOVED

            def is_at_rest(
                seconds: float, connection: fuse_connections.Connection = connection, end: float = give_up
            ) -> bool:
                return not connection.waiting() or time.monotonic() > end or talk.is_over(seconds)

            with suppress(FileNotFoundError):  # the connection has ended
                if fuse_connections.hangs(connection, _UNMOVED, is_at_rest):
                    _abort(connection)


def _abort(connection: fuse_connections.Connection) -> None:
    """Abort a connection in a child, which takes the rights of the mount's user for that."""
    with suppress(OSError):  # the connection has just ended
        in_child(connection.abort, [connection.fileno()], [syscalls.CAP_SETUID, syscalls.CAP_SETGID])


def _detach(talk: Conversation, target: Target, left: _Connections | None) -> None:
    """Unmount all that the broker has mounted at the target. Abort the connections `left` if a hung FUSE program blocks
    it."""
    seconds = max(1, talk.seconds // 2)
    for _ in range(2):
        with talk.bounded("unmount", seconds), suppress(TimeoutError):
            rescue = Rescue(talk.fileno(), left.abort) if left else None
            in_child(target.detach, [target.directory], [syscalls.CAP_SYS_ADMIN], rescue=rescue)
            return
    raise StepError(errno.ETIMEDOUT, "unmount")


_NOTHING = mounter.Stated(
    published=False,
    served=False,
    errno=0,
    total_bytes=0,
    free_bytes=0,
    available_bytes=0,
    total_inodes=0,
    free_inodes=0,
)


def stat_volume(opened: Descriptors, talk: Conversation, start: mounter.StartStat) -> None:
    """Report how full a volume is, in time even if its FUSE program hangs.

    In that case, the process that asked the FUSE program ends with the program.
    """
    volume_targets.begin(opened, start.target)
    with talk.bounded("ask"), ExitStack() as held:
        if block_devices.is_at(opened, start.target):
            talk.say(block_devices.state(opened, start.target))
            return
        try:
            target = held.enter_context(Target(opened, start.target))
            entry, layers = held.enter_context(target.seen())
        except (FileNotFoundError, NotADirectoryError, FileExistsError):
            layers = []
        if not layers:
            talk.say(_NOTHING)
        elif is_placeholder(layers[0]):
            talk.say(_unserved(errno.ENODATA))
        else:
            with suppress(TimeoutError):  # the front has its answer already
                talk.say(_ask(opened, talk, entry, layers[0].device, pods.pod_of_target(start.target)))


def _unserved(number: int) -> mounter.Stated:
    return _NOTHING._replace(published=True, errno=number)


def _ask(opened: Descriptors, talk: Conversation, entry: int, device: int, pod: bytes) -> mounter.Stated:
    """Return what the FUSE filesystem at the target reports.

    Raises TimeoutError if that hangs, after reporting it to the front.
    """

    def tell() -> None:
        with suppress(HungUp):
            talk.say(_unserved(errno.ETIMEDOUT))

    rescue = Rescue(talk.fileno(), tell)
    fuse = mount_tree.fuse_if_any(mount_tree.look(entry).mount_id)
    if fuse is None:
        return _unserved(errno.ENODATA)
    try:
        usage = mount_tree.usage(entry, fuse, rescue)
        if usage is None:  # the filesystem belongs to another user namespace: that of its FUSE program
            server = fuse_connections.may_serve(opened.proc, device, pods.processes_of(opened.proc, pod))
            if server is None:
                return _unserved(errno.ENOTCONN)
            namespaces.join_user_namespace(os.pidfd_open(server.pid))
            usage = mount_tree.usage(entry, fuse, rescue)
    except TimeoutError:
        raise
    except OSError as error:
        return _unserved(error.errno or errno.EIO)
    if usage is None:
        return _unserved(errno.EACCES)
    numbers = [usage.block_size * each for each in (usage.blocks, usage.free_blocks, usage.available_blocks)]
    return mounter.Stated(True, True, 0, *(min(each, _MOST) for each in (*numbers, usage.inodes, usage.free_inodes)))


#: The largest number in a record; a FUSE program may report any number.
_MOST = 2**63 - 1
