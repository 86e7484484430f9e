"""What the executable is beside fusermount3, under the names ``fusermount3-proxy`` and ``fuse-starter``.

Under ``fusermount3-proxy`` the first argument decides. What is none of the words here is a call of fusermount3, so
that it may be installed under its own name and linked to from the others. docs/programs.md has all of it in one table.
"""

from fusermount3_proxy.execution import FAILED
from fusermount3_proxy.failure import Failure, say

# Only for the type checker.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Program = Callable[[bytes, list[bytes]], int]

USAGE = b"""
or one of these, each with a -h of its own:
 run [--] COMMAND ARGS...
 fuse-starter [-o opt[,opt...]] [--timeout S] [--] PROGRAM ARGS... {} ...
 --wait-mounted PATH [--timeout S]
"""


def choose(name: bytes, arguments: list[bytes]) -> "tuple[Program, list[bytes], int] | None":
    """Return the program, its arguments, and its exit status when it fails; None for fusermount3."""
    word = b"fuse-starter" if name == b"fuse-starter" else b"".join(arguments[:1])
    after = arguments if name == b"fuse-starter" else arguments[1:]
    if word == b"fuse-starter":
        from fusermount3_proxy import starter

        return starter.main, after, FAILED
    if word == b"run":
        from fusermount3_proxy import preparation

        return preparation.main, after, FAILED
    if word.partition(b"=")[0] in (b"--wait-mounted", b"--timeout"):
        from fusermount3_proxy import probe

        return probe.main, arguments, 1
    return None


def run(program: bytes, main: "Program", arguments: list[bytes], failed: int) -> int:
    """Run it; return the exit status, that of a `Failure` if it has one, else `failed`."""
    try:
        return main(program, arguments)
    except Failure as failure:
        say(2, b"%b: %b\n" % (program, failure.text))
        return failure.status or failed
