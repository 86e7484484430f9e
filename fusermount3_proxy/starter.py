"""``fuse-starter``: gives a program that takes ``/dev/fd/N`` as its mountpoint the descriptor of a volume's
filesystem.

The broker mounts on the volume to which the socket belongs; the program serves the filesystem, and needs no
mountpoint, no helper and no /dev/fuse of its own. This process becomes the program, so signals, waits and limits for
this process apply to the program.

The command line of meta-fuse-csi-plugin's program of the same name is accepted, too. It names the socket by an option,
and has no placeholder: there the descriptor is always number 3.
"""

from posix import close, dup, dup2, environ, set_inheritable

from fusermount3_proxy import approach, arguments, client, execution, wire
from fusermount3_proxy.failure import Failure, say

#: The placeholder for the mountpoint in the program's arguments.
PLACEHOLDER = b"{}"
#: The descriptor's number if the arguments have no placeholder.
USUAL_NUMBER = 3

USAGE = b"""\
fuse-starter [options] [--] PROGRAM ARGS...
Execute a FUSE program with /dev/fd/N, the filesystem of a volume, for each {} in ARGS.
Options:
 -o, --options opt[,opt...]         mount options
 --timeout S                        seconds to wait for the broker (10)
 --fd-passing-socket-path PATH      the volume's socket
 -h, --help                         print help
"""

_OPTIONS = {
    b"o": b"options",
    b"options": b"options",
    b"timeout": b"timeout",
    b"fd-passing-socket-path": b"socket",
}


def main(program: bytes, words: list[bytes]) -> int:
    """Request the mount and execute the program with its descriptor. Raises Failure."""
    given, command = arguments.split(words, _OPTIONS)
    if arguments.HELP in given:
        say(1, USAGE)
        return 0
    if not command:
        raise Failure(b"missing program")
    patience = arguments.seconds(given[b"timeout"]) if b"timeout" in given else client.PATIENCE
    path = execution.find(command[0], environ)  # before the mount
    request = wire.VolumeRequest(given.get(b"options", b""))
    answer = client.ask(given.get(b"socket") or approach.socket_path(environ), request, -1, patience)
    client.print_reply(program, answer.reply)
    if answer.reply.errno:
        return execution.FAILED
    if answer.descriptor < 0:
        raise Failure(b"mount failed: the broker sent no descriptor")
    client.commit(answer)
    answer.connection.close()
    command = with_descriptor(command, answer.descriptor)
    return execution.execute(path, command, environ)


def with_descriptor(command: list[bytes], descriptor: int) -> list[bytes]:
    """Let the executed program inherit `descriptor`; return `command` with its path for each placeholder.

    The placeholder may be part of an argument, as in find(1). Without one the program knows the number.
    """
    if any(PLACEHOLDER in word for word in command[1:]):
        number = dup(descriptor)  # the lowest free number
        close(descriptor)
        set_inheritable(number, True)
        path = b"/dev/fd/%d" % number
        return [command[0], *(word.replace(PLACEHOLDER, path) for word in command[1:])]
    if descriptor == USUAL_NUMBER:
        set_inheritable(descriptor, True)
    else:
        dup2(descriptor, USUAL_NUMBER)
    return command
