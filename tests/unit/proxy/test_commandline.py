"""The command line: parsed as by the C library's getopt_long(3), which parses the same arguments here."""

from __future__ import annotations

import ctypes
import os
import tempfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusermount3_proxy import commandline
from fusermount3_proxy.commandline import OPTIONS, Invocation
from fusermount3_proxy.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

Scanned = tuple[list[tuple[str, bytes]], list[bytes], bytes]

libc = ctypes.CDLL(None)


class LongOption(ctypes.Structure):
    """`struct option` of getopt.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("has_arg", ctypes.c_int),
        ("flag", ctypes.POINTER(ctypes.c_int)),
        ("val", ctypes.c_int),
    )


# Every option has its own value: options that share a value are never ambiguous.
TABLE = (LongOption * (len(OPTIONS) + 1))(
    *[LongOption(each.name, int(each.takes_argument), None, 1000 + at) for at, each in enumerate(OPTIONS)]
)
SHORT = b"".join(each.letter + b":" * each.takes_argument for each in OPTIONS if each.letter)


def scan_in_c(arguments: list[bytes]) -> Scanned:
    """Return getopt_long(3)'s options, operands, and the complaint that ended the scan."""
    argv = (ctypes.c_char_p * (len(arguments) + 2))(b"prog", *arguments, None)
    ctypes.c_int.in_dll(libc, "optind").value = 0  # restart the scan, as a GNU extension
    options = []
    complaint = b""
    with tempfile.TemporaryFile() as stderr:
        before = os.dup(2)
        os.dup2(stderr.fileno(), 2)
        try:
            while (code := libc.getopt_long(len(arguments) + 1, argv, SHORT, TABLE, None)) != -1:
                if code == ord("?"):
                    break
                index = code - 1000 if code >= 1000 else [each.letter for each in OPTIONS].index(bytes([code]))
                argument = ctypes.c_char_p.in_dll(libc, "optarg").value if OPTIONS[index].takes_argument else b""
                options.append((OPTIONS[index].name.decode(), argument or b""))
        finally:
            os.dup2(before, 2)
            os.close(before)
        stderr.seek(0)
        complaint = stderr.read().removeprefix(b"prog: ").removesuffix(b"\n")
    if complaint:
        return options, [], complaint
    first = ctypes.c_int.in_dll(libc, "optind").value
    return options, [each for each in argv[first : len(arguments) + 1] if each is not None], b""


def scan_here(arguments: list[bytes]) -> Scanned:
    options: list[tuple[str, bytes]] = []
    operands: list[bytes] = []
    try:
        for option, argument in commandline._scan(arguments):
            if option is None:
                operands.append(argument)
            else:
                options.append((option.name.decode(), argument))
    except Failure as failure:
        return options, [], failure.text
    return options, operands, b""


@pytest.fixture(autouse=True, scope="module")
def without_posixly_correct() -> Iterator[None]:
    """Unset POSIXLY_CORRECT, with which getopt_long(3) stops at the first operand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("POSIXLY_CORRECT", raising=False)
        yield


long_names = st.sampled_from([each.name for each in OPTIONS]).flatmap(
    lambda name: st.integers(0, len(name)).map(lambda length: name[:length])
)
text = st.binary(max_size=4).map(lambda value: value.replace(b"\0", b""))
words = (
    st.sampled_from(
        [b"", b"-", b"--", b"---", b"mnt", b"-o", b"-u", b"--options", b"--comm-fd", b"-:", b"-;", b"-W", b"-?"]
    )
    | long_names.map(lambda name: b"--" + name)
    | st.builds(lambda name, value: b"--" + name + b"=" + value, long_names, text)
    | st.text("hVouzqxW:;-= ", max_size=6).map(lambda letters: b"-" + letters.encode())
    | text
)


@settings(max_examples=1500)
@given(st.lists(words, max_size=6))
def test_arguments_are_read_as_the_c_library_reads_them(arguments: list[bytes]) -> None:
    assert scan_here(arguments) == scan_in_c(arguments)


def parse(*arguments: bytes) -> Invocation:
    return commandline.parse(list(arguments))


def complaint(*arguments: bytes) -> str:
    with pytest.raises(Failure) as caught:
        parse(*arguments)
    return caught.value.text.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        (b"-o", b"ro,fsname=x", b"--", b"/mnt"),
        (b"/mnt", b"-o", b"ro,fsname=x"),  # go-fuse
        (b"-oro,fsname=x", b"/mnt"),
        (b"--options", b"ro,fsname=x", b"/mnt"),
        (b"--options=ro,fsname=x", b"/mnt"),
        (b"--opt=ro,fsname=x", b"/mnt"),
        (b"-o", b"suid", b"-o", b"ro,fsname=x", b"/mnt"),  # the last -o wins
    ],
)
def test_mount_options_are_found_wherever_they_stand(arguments: tuple[bytes, ...]) -> None:
    call = parse(*arguments)
    assert (call.mountpoint, call.options, call.unmount) == (b"/mnt", b"ro,fsname=x", False)


@pytest.mark.parametrize(
    "arguments",
    [
        (b"-u", b"-q", b"-z", b"--", b"/mnt"),
        (b"-uqz", b"/mnt"),
        (b"/mnt", b"-zuq"),
        (b"--unmount", b"--quiet", b"--lazy", b"--", b"/mnt"),
        (b"--unm", b"--q", b"--l", b"/mnt"),
    ],
)
def test_unmount_lazy_and_quiet_may_be_written_in_every_way(arguments: tuple[bytes, ...]) -> None:
    call = parse(*arguments)
    assert (call.mountpoint, call.unmount, call.lazy, call.quiet) == (b"/mnt", True, True, True)


def test_what_follows_two_dashes_is_the_mountpoint() -> None:
    assert parse(b"-u", b"--", b"-z").mountpoint == b"-z"


def test_a_lone_dash_is_a_mountpoint() -> None:
    assert parse(b"-").mountpoint == b"-"


def test_the_options_of_newer_helpers_are_known() -> None:
    call = parse(b"--auto-unmount", b"--sync-init", b"--comm-fd", b"7", b"/mnt")
    assert (call.auto_unmount, call.sync_init, call.comm_fd) == (True, True, b"7")
    plain = parse(b"/mnt")
    assert (plain.auto_unmount, plain.sync_init, plain.comm_fd) == (False, False, None)


@pytest.mark.parametrize("option", [b"-h", b"--help", b"-qh", b"--he"])
def test_help_wins_over_a_mistake_that_comes_later(option: bytes) -> None:
    assert parse(option, b"--nonsense", b"a", b"b").help


@pytest.mark.parametrize("option", [b"-V", b"--version", b"-zV"])
def test_version_wins_over_a_mistake_that_comes_later(option: bytes) -> None:
    assert parse(option, b"--nonsense").version


def test_a_mistake_wins_over_version_and_help_that_come_later() -> None:
    assert complaint(b"-x", b"-V") == "invalid option -- 'x'"
    assert complaint(b"--foo", b"-h") == "unrecognized option '--foo'"


def test_of_version_and_help_the_first_wins() -> None:
    call = parse(b"-V", b"-h")
    assert (call.version, call.help) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "missing mountpoint argument"),
        ((b"-u",), "missing mountpoint argument"),
        ((b"-o", b"ro"), "missing mountpoint argument"),
        ((b"a", b"b"), "extra arguments after the mountpoint"),
        ((b"-z", b"/mnt"), "-z can only be used with -u"),
        ((b"-z",), "-z can only be used with -u"),
        ((b"-o",), "option requires an argument -- 'o'"),
        ((b"--options",), "option '--options' requires an argument"),
        ((b"--comm-f",), "option '--comm-fd' requires an argument"),
        ((b"--unmount=yes", b"/mnt"), "option '--unmount' doesn't allow an argument"),
        ((b"--foo=bar",), "unrecognized option '--foo=bar'"),
        ((b"-ux", b"/mnt"), "invalid option -- 'x'"),
    ],
)
def test_a_mistake_is_told_in_the_words_of_the_original(arguments: tuple[bytes, ...], text: str) -> None:
    assert complaint(*arguments) == text


@given(st.lists(words, max_size=6))
def test_any_arguments_are_a_call_or_a_failure(arguments: list[bytes]) -> None:
    try:
        call = commandline.parse(arguments)
    except Failure as failure:
        assert failure.text
    else:
        assert call.help or call.version or call.mountpoint in arguments
