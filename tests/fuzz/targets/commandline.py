"""The proxy's command line: an input is the arguments, separated by NUL bytes, as in /proc/PID/cmdline.

The C library's getopt_long(3) parses the same arguments for comparison.
"""

from __future__ import annotations

import ctypes

from fusermount3_proxy import commandline
from fusermount3_proxy.commandline import OPTIONS
from fusermount3_proxy.failure import Failure
from tests.unit.proxy.test_commandline import SHORT, TABLE, libc

WORDS = [b"\0--" + option.name for option in OPTIONS]
WORDS += [b"\0-" + option.letter for option in OPTIONS if option.letter] + [b"\0--\0", b"\0-\0"]
SEEDS: list[bytes] = []

_optind = ctypes.c_int.in_dll(libc, "optind")
_optarg = ctypes.c_char_p.in_dll(libc, "optarg")
_opterr = ctypes.c_int.in_dll(libc, "opterr")
_LETTERS = [option.letter for option in OPTIONS]


def check(data: bytes) -> None:
    """Check that the proxy refuses the arguments, or parses them as getopt_long(3) does."""
    arguments = data.split(b"\0")
    given, operands, complained = _scan_in_c(arguments)
    try:
        invocation = commandline.parse(arguments)
    except Failure as failure:
        assert failure.text
        lazy_alone = b"lazy" in given and b"unmount" not in given
        assert complained or lazy_alone or len(operands) != 1
        return
    if invocation.help or invocation.version:
        assert given.keys() & {b"help", b"version"}
        return
    assert not complained
    assert operands == [invocation.mountpoint]
    assert invocation.options == given.get(b"options", b"")
    assert invocation.comm_fd == given.get(b"comm-fd")
    for name in (b"unmount", b"lazy", b"quiet", b"auto-unmount", b"sync-init"):
        assert getattr(invocation, name.decode().replace("-", "_")) == (name in given)
    assert invocation.unmount or not invocation.lazy


def _scan_in_c(arguments: list[bytes]) -> tuple[dict[bytes, bytes], list[bytes], bool]:
    """Return the options with their arguments, the operands, and whether getopt_long(3) complained."""
    argv = (ctypes.c_char_p * (len(arguments) + 2))(b"prog", *arguments, None)
    _optind.value = 0  # restart the scan, as a GNU extension
    _opterr.value = 0  # print no errors
    given: dict[bytes, bytes] = {}
    try:
        while (code := libc.getopt_long(len(arguments) + 1, argv, SHORT, TABLE, None)) != -1:
            if code == ord("?"):
                return given, [], True
            option = OPTIONS[code - 1000 if code >= 1000 else _LETTERS.index(bytes([code]))]
            given[option.name] = (_optarg.value or b"") if option.takes_argument else b""
            if option in (commandline.HELP, commandline.VERSION):
                break
        return given, [each for each in argv[_optind.value : len(arguments) + 1] if each is not None], False
    finally:
        _opterr.value = 1
