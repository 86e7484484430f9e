"""The programs beside fusermount3: the name and word that select each, and how each fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusermount3_proxy import __version__, arguments, cli, preparation, probe, programs, starter
from fusermount3_proxy.failure import Failure


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(cli, "argv", list(words))
    return cli.main()


@pytest.mark.parametrize("name", ["fusermount3-proxy", "/opt/fusermount3-proxy", "fuse-starter", "/a/b/fuse-starter"])
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_each_name_tells_how_it_is_called(
    name: str, word: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    status = run(monkeypatch, name, word)
    told = capfd.readouterr()
    assert told.err == ""
    if name.endswith("fuse-starter"):
        assert status == 0
        assert told.out.startswith("fuse-starter [options] [--] PROGRAM ARGS...\n")
    else:
        assert status == 1  # as with fusermount3
        assert told.out.startswith(f"{name}: [options] mountpoint\n")
        assert all(
            word in told.out for word in ("\n run ", "\n fuse-starter ", "\n --wait-mounted ", "\n --wait-unused ")
        )


@pytest.mark.parametrize("name", ["fusermount3", "fusermount", "/usr/bin/fusermount3", "fuse-starter2", "run", ""])
def test_under_any_other_name_the_help_is_that_of_fusermount3(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, name, "-h") == 1
    assert capfd.readouterr() == ((cli.USAGE % name.encode()).decode(), "")


@pytest.mark.parametrize("option", ["-V", "--version", "-zV"])
@pytest.mark.parametrize("name", ["fusermount3-proxy", "/opt/fusermount3-proxy"])
def test_under_its_own_name_the_proxy_prints_its_own_version_first(
    name: str, option: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, name, option) == 0
    assert capfd.readouterr() == (f"fusermount3-proxy version: {__version__}\nfusermount3 version: 3.18.2\n", "")


@pytest.mark.parametrize("option", ["-V", "--version"])
@pytest.mark.parametrize("name", ["fusermount3", "/bin/fusermount", "mergerfs-fusermount", "/fusermount3-proxy/helper"])
def test_under_any_other_name_it_prints_only_the_version_that_callers_parse(
    name: str, option: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, name, option) == 0
    assert capfd.readouterr() == ("fusermount3 version: 3.18.2\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fusermount3", "run", "true"], "extra arguments after the mountpoint"),
        (["fusermount3", "fuse-starter", "true"], "extra arguments after the mountpoint"),
        (["fusermount3", "--wait-mounted", "/"], "unrecognized option '--wait-mounted'"),
        (["fusermount3-proxy", "--", "run", "true"], "extra arguments after the mountpoint"),
        (["fusermount3-proxy", "-u", "run", "true"], "extra arguments after the mountpoint"),
        (["fusermount3-proxy", "/"], "old style mounting not supported"),
        (["fusermount3-proxy"], "missing mountpoint argument"),
    ],
)
def test_what_is_none_of_the_words_is_a_call_of_fusermount3(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words) == 1
    assert capfd.readouterr() == ("", f"{words[0]}: {message}\n")


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        (b"fuse-starter", [b"sshfs", b"{}"], (starter.main, [b"sshfs", b"{}"], 125)),
        (b"fuse-starter", [], (starter.main, [], 125)),
        (b"fuse-starter", [b"run"], (starter.main, [b"run"], 125)),
        (b"fusermount3-proxy", [b"fuse-starter", b"--", b"x"], (starter.main, [b"--", b"x"], 125)),
        (b"fusermount3-proxy", [b"run", b"sshfs"], (preparation.main, [b"sshfs"], 125)),
        (b"fusermount3-proxy", [b"--wait-mounted=/a"], (probe.main, [b"--wait-mounted=/a"], 1)),
        (b"fusermount3-proxy", [b"--timeout", b"1"], (probe.main, [b"--timeout", b"1"], 1)),
        (b"fusermount3-proxy", [b"--auto-unmount", b"/m"], None),
        (b"fusermount3-proxy", [], None),
    ],
)
def test_the_name_and_the_first_word_choose(name: bytes, words: list[bytes], expected: object) -> None:
    assert programs.choose(name, words) == expected


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["fuse-starter"], 125, "missing program"),
        (["fuse-starter", "--"], 125, "missing program"),
        (["fuse-starter", "--frobnicate", "x"], 125, "unrecognized option '--frobnicate'"),
        (["fuse-starter", "--timeout"], 125, "option '--timeout' requires an argument"),
        (["fuse-starter", "--timeout", "long", "x"], 125, "invalid number of seconds: 'long'"),
        (["fuse-starter", "no-such-program"], 127, "failed to execute no-such-program: No such file or directory"),
        (["fuse-starter", "--", "/etc/passwd"], 126, "failed to execute /etc/passwd: Permission denied"),
        (["fusermount3-proxy", "run"], 125, "run: missing command"),
        (["fusermount3-proxy", "run", "-x", "true"], 125, "unrecognized option '-x'"),
        (["fusermount3-proxy", "run", "true"], 125, "run: only the static executable can stand in for fusermount3"),
        (["fusermount3-proxy", "--wait-mounted"], 1, "option '--wait-mounted' requires an argument"),
        (["fusermount3-proxy", "--wait-mounted", ""], 1, "--wait-mounted: missing path"),
        (["fusermount3-proxy", "--timeout", "1"], 1, "--wait-mounted: missing path"),
        (["fusermount3-proxy", "--wait-mounted", "/", "/mnt"], 1, "extra argument: /mnt"),
        (["fusermount3-proxy", "--wait-mounted", "/", "--timeout", "-1"], 1, "invalid number of seconds: '-1'"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(
    words: list[str], status: int, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The program then requests, mounts and prepares nothing: no broker runs here."""
    assert run(monkeypatch, *words) == status
    assert capfd.readouterr() == ("", f"{words[0]}: {message}\n")


# Command lines


NAMES = {b"o": b"options", b"options": b"options", b"timeout": b"timeout"}


@pytest.mark.parametrize(
    ("words", "given", "rest"),
    [
        (b"", {}, b""),
        (b"prog -o x --timeout 1", {}, b"prog -o x --timeout 1"),
        (b"-o a,b prog", {b"options": b"a,b"}, b"prog"),
        (b"--options=a=b -timeout=5 -- -o", {b"options": b"a=b", b"timeout": b"5"}, b"-o"),
        (b"-timeout 5 --timeout 6", {b"timeout": b"6"}, b""),
        (b"-o -- prog", {b"options": b"--"}, b"prog"),
        (b"- --", {}, b"- --"),
        (b"-- -- x", {}, b"-- x"),
        (b"--timeout 1 -h prog", {b"help": b""}, b""),
        (b"--timeout= x", {b"timeout": b""}, b"x"),
    ],
)
def test_options_come_first(words: bytes, given: dict[bytes, bytes], rest: bytes) -> None:
    assert arguments.split(words.split(), NAMES) == (given, rest.split())


@pytest.mark.parametrize("word", [b"-x", b"---timeout", b"-oa", b"--help=x"])
def test_what_is_no_option_is_refused(word: bytes) -> None:
    with pytest.raises(Failure, match="unrecognized option"):
        arguments.split([word, b"x"], NAMES)


@pytest.mark.parametrize(("text", "expected"), [(b"0", 0), (b"30", 30), (b"0.25", 0.25), (b"1.", 1), (b".5", 0.5)])
def test_a_time_is_in_seconds(text: bytes, expected: float) -> None:
    assert arguments.seconds(text) == expected


@pytest.mark.parametrize("text", [b"", b".", b"-1", b"1s", b"1e3", b"nan", b"inf", b"1.2.3", b"1" * 10, b" 1"])
def test_any_other_time_is_refused(text: bytes) -> None:
    with pytest.raises(Failure, match="invalid number of seconds"):
        arguments.seconds(text)


def test_the_words_are_in_the_document() -> None:
    document = (Path(__file__).parents[3] / "docs/programs.md").read_text()
    for word in (
        "fuse-starter",
        "--wait-mounted",
        "run",
        *(f"--{name.decode()}" for name in starter._OPTIONS if name[1:]),
    ):
        assert word in document
