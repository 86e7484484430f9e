"""The executable's other programs, under the names ``fusermount3-proxy`` and ``fuse-starter``.

Under ``fusermount3-proxy`` the first argument selects the program. A word that is not listed here makes it a call of
fusermount3, so that the executable may be installed under its own name and linked to from the others. docs/programs.md
has all of it in one table.
"""

from fusermount3_proxy.execution import FAILED
from fusermount3_proxy.failure import Failure, reason, say

# For the type checker only.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Program = Callable[[bytes, list[bytes]], int]

USAGE = b"""
or one of these, each with a -h of its own:
 run [--] COMMAND ARGS...
 fuse-starter [-o opt[,opt...]] [--timeout S] [--] PROGRAM ARGS... {} ...
 --wait-mounted PATH [--timeout S]
 --wait-unused [--timeout S]
 --offer-device PATH [--read-only]
"""


def choose(name: bytes, arguments: list[bytes]) -> "tuple[Program, list[bytes], int] | None":
    """Return the program, its arguments, and the exit status for its failure; None for fusermount3."""
    word = b"fuse-starter" if name == b"fuse-starter" else b"".join(arguments[:1])
    after = arguments if name == b"fuse-starter" else arguments[1:]
    if word == b"fuse-starter":
        from fusermount3_proxy import starter

        return starter.main, after, FAILED
    if word == b"run":
        from fusermount3_proxy import preparation

        return preparation.main, after, FAILED
    if word == b"--wait-unused":
        from fusermount3_proxy import retirement

        return retirement.main, after, 1
    if word == b"--offer-device":
        from fusermount3_proxy import offering

        return offering.main, after, 1
    if word.partition(b"=")[0] in (b"--wait-mounted", b"--timeout"):
        from fusermount3_proxy import probe

        return probe.main, arguments, 1
    return None


def run(program: bytes, main: "Program", arguments: list[bytes], failed: int) -> int:
    """Run the program; return the exit status: on a `Failure` its own if it has one, else `failed`."""
    try:
        return main(program, arguments)
    except Failure as failure:
        say(2, b"%b: %b\n" % (program, failure.text))
        return failure.status or failed
    except (MemoryError, OSError) as error:  # as in `cli`
        say(2, b"%b: %b\n" % (program, reason(error)))
        return failed
