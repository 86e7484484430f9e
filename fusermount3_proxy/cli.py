"""One call of ``fusermount3`` from the top: mount or unmount through the broker, and report the result.

The rules are those of fusermount3(1): silence on success, the original ``argv[0]`` in front of every message, exit
status 0 if and only if the descriptor was delivered or the filesystem unmounted, else 1. The executable is also other
programs, under their names: `programs`.
"""

from errno import ENAMETOOLONG
from posix import close, environ, getuid, strerror
from sys import argv

from fusermount3_proxy import FUSERMOUNT_VERSION, __version__, approach, comm, commandline, mountpoint
from fusermount3_proxy.commandline import Invocation
from fusermount3_proxy.failure import Failure, reason, say

# For the type checker only.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket as socket_type

    from fusermount3_proxy.client import Answer

#: The names under which the executable is more than fusermount3.
PROXY_NAME, STARTER_NAME = b"fusermount3-proxy", b"fuse-starter"

USAGE = b"""\
%b: [options] mountpoint
Options:
 -h\t\t    print help
 -V\t\t    print version
 -o opt[,opt...]    mount options
 -u\t\t    unmount
 -q\t\t    quiet
 -z\t\t    lazy unmount
"""


def main() -> int:
    """Carry out the call in `sys.argv`; return the exit status."""
    program, *arguments = [argument.encode("utf-8", "surrogateescape") for argument in argv] or [b"fusermount"]
    name = program.rpartition(b"/")[2]
    if name in (PROXY_NAME, STARTER_NAME):
        from fusermount3_proxy import programs  # not earlier: fusermount3 is the one that has to be fast

        if chosen := programs.choose(name, arguments):
            return programs.run(program, *chosen)
    try:
        return _run(program, commandline.parse(arguments))
    except Failure as failure:
        text = failure.text
    except (MemoryError, OSError) as error:  # a limit of the caller: no process, no memory
        text = reason(error)
    say(2, b"%b: %b\n" % (program, text))
    return 1


def _run(program: bytes, call: Invocation) -> int:
    is_proxy = program.rpartition(b"/")[2] == PROXY_NAME
    if call.version:
        own = b"fusermount3-proxy version: %b\n" % __version__.encode() if is_proxy else b""
        say(1, own + b"fusermount3 version: %b\n" % FUSERMOUNT_VERSION.encode())
        return 0
    if call.help:
        say(1, USAGE % program)
        if is_proxy:
            from fusermount3_proxy import programs

            say(1, programs.USAGE)
        return 1
    if call.auto_unmount:
        return _watch(program, call)
    if call.unmount:
        return _unmount(program, call)
    return _mount(program, call)


def _mount(program: bytes, call: Invocation) -> int:
    place = mountpoint.locate(call.mountpoint)
    socket = comm.find(call.comm_fd, environ)
    pinned = mountpoint.pin(place)
    path = approach.socket_path(environ)
    asked = approach.asked()
    connection = asked or approach.connect(path)

    from fusermount3_proxy import client, wire  # not earlier: the broker is identifying the caller

    request = wire.MountRequest(place.path, call.options, call.sync_init)
    answer = client.ask(path, request, pinned, connection=connection, is_sent=asked is not None)
    client.print_reply(program, answer.reply)
    if answer.reply.errno:
        return 1
    if answer.descriptor < 0:
        raise Failure(b"mount failed: the broker sent no descriptor")
    try:
        comm.send(socket, answer.descriptor)
    except Failure:
        close(answer.descriptor)
        client.withdraw(answer.connection)
        raise
    if call.sync_init and not _finish_sync_init(program, socket, answer):
        return 1
    client.commit(answer)
    if answer.reply.auto_unmount:
        from fusermount3_proxy import watch  # not earlier: most calls need no signals

        return watch.become_watcher(program, socket, place.path, answer.reply.id)
    return 0


def _finish_sync_init(program: bytes, socket: "socket_type", answer: "Answer") -> bool:
    """Mount once the FUSE program is ready to serve, and send it the result; return whether the mount succeeded."""
    from fusermount3_proxy import client

    close(answer.descriptor)  # a copy would keep the mount alive after the program ends
    comm.wait_until_ready(socket)
    reply = client.proceed(answer, lambda: comm.is_open(socket))
    client.print_reply(program, reply)
    comm.send_status(socket, reply.errno)
    return not reply.errno


def _watch(program: bytes, call: Invocation) -> int:
    """``--auto-unmount``: watch a mount that the FUSE program made by itself, or continue watching."""
    from fusermount3_proxy import watch

    if watch.has_waited():
        return watch.unmount_dead(call.mountpoint, environ.get(watch.MOUNT_VARIABLE, b""))
    path = mountpoint.locate(call.mountpoint).path
    return watch.become_watcher(program, comm.find(call.comm_fd, environ), path, mount=b"")


def _unmount(program: bytes, call: Invocation) -> int:
    place = mountpoint.locate(call.mountpoint)
    if place.problem or place.path == b"/" or len(place.name) > mountpoint.NAME_MAX:
        return _find_no_mount(call, place)
    path = approach.socket_path(environ)
    asked = approach.asked()
    connection = asked or approach.connect(path)

    from fusermount3_proxy import client, wire  # not earlier, as for a mount

    request = wire.UnmountRequest(place.path, place.name, call.lazy)
    answer = client.ask(path, request, place.directory, connection=connection, is_sent=asked is not None)
    if not call.quiet:
        client.print_reply(program, answer.reply)
    return 1 if answer.reply.errno else 0


def _find_no_mount(call: Invocation, place: mountpoint.Place) -> int:
    """Print fusermount3's message for a path where it can't have mounted anything. Raises Failure."""
    if getuid() == 0 and place.problem:
        raise Failure(b"failed to chdir to %b: %b" % (place.path.rpartition(b"/")[0], reason(place.problem)))
    if getuid() == 0 and place.path == b"/":
        raise Failure(b"internal error: invalid abs path: </>")
    if call.quiet:
        return 1
    if getuid() == 0:
        raise Failure(b"failed to unmount %b: %b" % (place.path, strerror(ENAMETOOLONG).encode()))
    raise Failure(b"entry for %b not found in /etc/mtab" % place.path)
