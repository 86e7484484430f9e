"""The command line of fusermount3, parsed as GNU getopt_long(3) does: bytes in, an `Invocation` out.

Arguments may come in any order, short options in clusters, long ones abbreviated as long as they stay unambiguous;
``--`` ends the options. An option takes effect as it is met: ``-V`` and ``-h`` win over a later mistake and lose to an
earlier one.
"""

from fusermount3_proxy.failure import Failure

# For the type checker only: `typing` is a library, and this interpreter has none.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


class Option:
    """One option: its long name, its letter if it has one, and whether it takes an argument."""

    __slots__ = ("letter", "name", "takes_argument")

    def __init__(self, name: bytes, letter: bytes = b"", takes_argument: bool = False) -> None:
        self.name = name
        self.letter = letter
        self.takes_argument = takes_argument


HELP = Option(b"help", b"h")
VERSION = Option(b"version", b"V")
MOUNT_OPTIONS = Option(b"options", b"o", takes_argument=True)
UNMOUNT = Option(b"unmount", b"u")
LAZY = Option(b"lazy", b"z")
QUIET = Option(b"quiet", b"q")
AUTO_UNMOUNT = Option(b"auto-unmount")
COMM_FD = Option(b"comm-fd", takes_argument=True)
SYNC_INIT = Option(b"sync-init")

OPTIONS = (UNMOUNT, LAZY, QUIET, HELP, VERSION, MOUNT_OPTIONS, AUTO_UNMOUNT, COMM_FD, SYNC_INIT)


class Invocation:
    """The call that the arguments request. With `help` or `version` the other fields mean nothing."""

    __slots__ = (
        "auto_unmount",
        "comm_fd",
        "help",
        "lazy",
        "mountpoint",
        "options",
        "quiet",
        "sync_init",
        "unmount",
        "version",
    )

    def __init__(self, given: dict[Option, bytes], mountpoint: bytes) -> None:
        self.help = HELP in given
        self.version = VERSION in given
        self.options = given.get(MOUNT_OPTIONS, b"")
        self.comm_fd = given.get(COMM_FD)
        self.unmount = UNMOUNT in given
        self.lazy = LAZY in given
        self.quiet = QUIET in given
        self.auto_unmount = AUTO_UNMOUNT in given
        self.sync_init = SYNC_INIT in given
        self.mountpoint = mountpoint


def parse(arguments: list[bytes]) -> Invocation:
    """Parse `arguments`, which exclude the program's name, into a call. Raises Failure."""
    given: dict[Option, bytes] = {}
    operands: list[bytes] = []
    for option, argument in _scan(arguments):
        if option is None:
            operands.append(argument)
            continue
        given[option] = argument
        if option is HELP or option is VERSION:
            return Invocation(given, b"")
    if LAZY in given and UNMOUNT not in given:
        raise Failure(b"-z can only be used with -u")
    if not operands:
        raise Failure(b"missing mountpoint argument")
    if len(operands) > 1:
        raise Failure(b"extra arguments after the mountpoint")
    return Invocation(given, operands[0])


def _scan(arguments: list[bytes]) -> "Iterator[tuple[Option | None, bytes]]":
    """Yield each option with its argument (empty if it takes none), and each operand as (None, operand)."""
    rest = iter(arguments)
    for argument in rest:
        if argument == b"--":
            for operand in rest:
                yield None, operand
        elif argument.startswith(b"--"):
            yield _scan_long(argument, rest)
        elif argument.startswith(b"-") and argument != b"-":
            yield from _scan_cluster(argument[1:], rest)
        else:
            yield None, argument


def _scan_long(argument: bytes, rest: "Iterator[bytes]") -> tuple[Option, bytes]:
    """Return the option of ``--name`` or ``--name=value``, and its argument."""
    name, equals, value = argument[2:].partition(b"=")
    option = _long_option(name, argument)
    if equals and not option.takes_argument:
        raise Failure(b"option '--%b' doesn't allow an argument" % option.name)
    if option.takes_argument and not equals:
        value = _next(rest, b"option '--%b' requires an argument" % option.name)
    return option, value


def _scan_cluster(letters: bytes, rest: "Iterator[bytes]") -> "Iterator[tuple[Option, bytes]]":
    """Yield the options of a cluster, ``uz`` of ``-uz``; the rest after an ``o`` is that option's argument."""
    for position in range(len(letters)):
        letter = letters[position : position + 1]
        option = _short_option(letter)
        if option.takes_argument:
            attached = letters[position + 1 :]
            yield option, attached or _next(rest, b"option requires an argument -- '%b'" % letter)
            return
        yield option, b""


def _short_option(letter: bytes) -> Option:
    for option in OPTIONS:
        if option.letter == letter:
            return option
    raise Failure(b"invalid option -- '%b'" % letter)


def _long_option(name: bytes, argument: bytes) -> Option:
    """Return the option that `name` spells out or abbreviates unambiguously."""
    candidates = [option for option in OPTIONS if option.name.startswith(name)]
    for option in candidates:
        if option.name == name or len(candidates) == 1:
            return option
    if candidates:
        possibilities = b"".join([b" '--%b'" % option.name for option in candidates])
        raise Failure(b"option '%b' is ambiguous; possibilities:%b" % (argument, possibilities))
    raise Failure(b"unrecognized option '%b'" % argument)


def _next(rest: "Iterator[bytes]", complaint: bytes) -> bytes:
    for argument in rest:
        return argument
    raise Failure(complaint)
