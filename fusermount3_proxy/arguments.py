"""Command-line parsing for the programs other than fusermount3: options first, then operands."""

from fusermount3_proxy.failure import Failure

#: The option that requests help, among those that `split` returns.
HELP = b"help"
_HELP = (b"-h", b"--h", b"-help", b"--help")


def split(arguments: list[bytes], names: dict[bytes, bytes]) -> tuple[dict[bytes, bytes], list[bytes]]:
    """Return the options with their values, and the arguments from the first non-option on, or after ``--``.

    `names` maps each spelling, without dashes, to the name under which the option is returned; one dash is equivalent
    to two, as in programs written in Go. All options take a value except ``-h`` and ``--help``, which count also where
    a value is expected. Raises Failure.
    """
    given: dict[bytes, bytes] = {}
    rest = list(arguments)
    while rest and rest[0].startswith(b"-") and rest[0] != b"-":
        word = rest.pop(0)
        if word == b"--":
            break
        spelling, equals, value = word.removeprefix(b"-").removeprefix(b"-").partition(b"=")
        if word in _HELP:
            return {HELP: b""}, []
        if spelling not in names:
            raise Failure(b"unrecognized option '%b'" % word)
        if not equals and not rest:
            raise Failure(b"option '%b' requires an argument" % word)
        if not equals and rest[0] in _HELP:  # no value that anybody means
            return {HELP: b""}, []
        given[names[spelling]] = value if equals else rest.pop(0)
    return given, rest


def seconds(text: bytes) -> float:
    """Parse `text` as a time in seconds, with or without a decimal point. Raises Failure."""
    if not text.replace(b".", b"", 1).isdigit() or len(text) > 9:
        raise Failure(b"invalid number of seconds: '%b'" % text)
    return float(text)
