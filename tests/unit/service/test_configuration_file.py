"""The configuration: its defaults, and each kind of mistake, reported with the file and the key."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from fusermount3_broker.service import configuration_file
from fusermount3_broker.service.configuration import FILESYSTEMS, Configuration, Deadlines, Limits, Loopback, Socket
from fusermount3_broker.service.configuration_file import MOST_MISTAKES, ConfigurationError


def load(directory: Path, text: str | bytes) -> Configuration:
    file = directory / "broker.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return configuration_file.load(file)


def mistake(directory: Path, text: str | bytes) -> str:
    """Return the only error that a file with `text` causes, without the file's name and the line."""
    (told,) = mistakes(directory, text)
    return told.partition(": ")[2]


def mistakes(directory: Path, text: str | bytes) -> tuple[str, ...]:
    """Return the errors that a file with `text` causes, each with the line if it is known."""
    with pytest.raises(ConfigurationError) as caught:
        load(directory, text)
    told: tuple[str, ...] = caught.value.args
    assert "; ".join(told) == str(caught.value)
    for each in told:
        file, colon, rest = each.partition(": ")
        assert re.fullmatch(re.escape(str(directory / "broker.toml")) + "(:[1-9][0-9]*)?", file)
        assert colon
        assert "\n" not in rest
    return tuple(each.removeprefix(str(directory)) for each in told)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    read = load(tmp_path, "")
    assert read == Configuration(source=bytes(tmp_path / "broker.toml"))
    assert (read.user_allow_other, read.mount_max) == (False, 1000)
    assert read.mountpoint_filesystems == tuple(FILESYSTEMS.values())
    assert read.socket == (Socket(Path("/run/fusermount3-proxy/broker.sock"), 0o666, "root", "root"),)
    assert read.deadlines == Deadlines(request=5, operation=5, commit=10)
    assert read.limits == Limits(mounts=2000, requests_per_second=100, burst=1000, concurrent=256)


def test_without_a_default_file_the_defaults_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration_file, "DEFAULT_PATH", tmp_path / "none.toml")
    assert configuration_file.load(None) == Configuration()


def test_the_default_file_counts_where_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration_file, "DEFAULT_PATH", tmp_path / "broker.toml")
    (tmp_path / "broker.toml").write_text("mount_max = 5")
    assert configuration_file.load(None).mount_max == 5


def test_every_key_is_read(tmp_path: Path) -> None:
    read = load(
        tmp_path,
        """
        user_allow_other = true
        mount_max = -1
        mountpoint_filesystems = ["ext", "tmpfs", 0x9fa0]
        max_requests = 3
        hung_seconds = 7
        control_socket = "/c"
        state_directory = "/s"
        metrics = "[::1]:9000"
        log_format = "text"
        [deadlines]
        request = 1
        operation = 2
        unmount = 4
        commit = 3
        [[socket]]
        path = "/a"
        mode = "0660"
        [[socket]]
        path = "/b"
        owner = "root"
        group = "daemon"
        mode = "600"
        """,
    )
    assert read == Configuration(
        user_allow_other=True,
        mount_max=-1,
        mountpoint_filesystems=(0xEF53, 0x01021994, 0x9FA0),
        max_requests=3,
        hung_seconds=7,
        control_socket=Path("/c"),
        state_directory=Path("/s"),
        metrics=Loopback("::1", 9000),
        log_format="text",
        deadlines=Deadlines(request=1, operation=2, unmount=4, commit=3),
        socket=(Socket(Path("/a"), 0o660), Socket(Path("/b"), 0o600, "root", "daemon")),
        source=bytes(tmp_path / "broker.toml"),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mount_maxx = 1", "unknown key 'mount_maxx', did you mean 'mount_max'?"),
        ("allow_other = true", "unknown key 'allow_other', did you mean 'user_allow_other'?"),
        ("source = 'x'", "unknown key 'source', did you mean 'socket'?"),
        ("deadlines.comit = 1", "unknown key 'deadlines.comit', did you mean 'deadlines.commit'?"),
        ("[[socket]]\nmod = '0600'", "unknown key 'socket.mod', did you mean 'socket.mode'?"),
        ('"" = 1', "unknown key '', did you mean "),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_known(tmp_path: Path, text: str, expected: str) -> None:
    assert mistake(tmp_path, text).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("user_allow_other = 1", "'user_allow_other' must be true or false, not 1"),
        ("user_allow_other = 'yes'", "'user_allow_other' must be true or false, not 'yes'"),
        ("mount_max = true", "'mount_max' must be a whole number, not True"),
        ("mount_max = 1.5", "'mount_max' must be a whole number, not 1.5"),
        ("mount_max = '5'", "'mount_max' must be a whole number, not '5'"),
        ("deadlines.commit = '5'", "'deadlines.commit' must be a whole number, not '5'"),
        ("deadlines = 5", "'deadlines' must be a table, not 5"),
        ("control_socket = 5", "'control_socket' must be a path, not 5"),
        ("state_directory = ['/x']", "'state_directory' must be a path, not ['/x']"),
        ("mountpoint_filesystems = 'ext'", "'mountpoint_filesystems' must be a list, not 'ext'"),
        ("mountpoint_filesystems = [1.5]", "'mountpoint_filesystems' must be a list of names or numbers, not 1.5"),
        ("mountpoint_filesystems = [true]", "'mountpoint_filesystems' must be a list of names or numbers, not True"),
        ("socket = '/x'", "'socket' must be a list of tables, not '/x'"),
        ("socket = ['/x']", "'socket' must be a table, not '/x'"),
        ("[socket]\npath = '/x'", "'socket' must be a list of tables, not {'path': '/x'}"),
        ("[[socket]]\nowner = 0", "'socket.owner' must be a string, not 0"),
        ("metrics = 9000", "'metrics' must be a string, not 9000"),
        ("log_format = 1", "'log_format' must be a string, not 1"),
        ("log_format = 'yaml'", '\'log_format\' must be "auto", "text" or "json", not \'yaml\''),
        ("metrics = false", "'metrics' must be a string, not False"),
        ("[[socket]]\nmode = 0o600", "'socket.mode' must be octal digits in quotes, like \"0666\", not 384"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_with_its_key(tmp_path: Path, text: str, expected: str) -> None:
    assert mistake(tmp_path, text) == expected


@pytest.mark.parametrize("mode", ["rw", "", "66", "0888", "4777", "00666", "0o666", "0666\\n", "-666", "६६६"])
def test_a_mode_is_three_octal_digits(tmp_path: Path, mode: str) -> None:
    assert mistake(tmp_path, f'[[socket]]\nmode = "{mode}"').startswith("'socket.mode' must be octal digits")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[limits]\nmount = 1", "unknown key 'limits.mount', did you mean 'limits.mounts'?"),
        ("limits = 1", "'limits' must be a table, not 1"),
        ("limits.mounts = -1", "'limits.mounts' must be between 0 and 1000000, not -1"),
        ("limits.burst = 0", "'limits.burst' must be between 1 and 1000000, not 0"),
        ("mount_max = -2", "'mount_max' must be between -1 and 1000000, not -2"),
        ("mount_max = 1000001", "'mount_max' must be between -1 and 1000000, not 1000001"),
        ("max_requests = 0", "'max_requests' must be between 1 and 1000000, not 0"),
        ("deadlines.operation = 0", "'deadlines.operation' must be between 1 and 1000000, not 0"),
        ("deadlines.request = -1", "'deadlines.request' must be between 1 and 1000000, not -1"),
    ],
)
def test_a_number_out_of_range_is_told_with_the_range(tmp_path: Path, text: str, expected: str) -> None:
    assert mistake(tmp_path, text) == expected


@pytest.mark.parametrize(("key", "kind"), [("owner", "user"), ("group", "group")])
def test_an_unknown_account_is_told(tmp_path: Path, key: str, kind: str) -> None:
    told = mistake(tmp_path, f"[[socket]]\n{key} = 'no-such-account'")
    assert told == f"'socket.{key}': there is no {kind} 'no-such-account'"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("control_socket = 'run/x'", "control_socket"),
        ("state_directory = ''", "state_directory"),
        ("[[socket]]\npath = './x'", "socket.path"),
    ],
)
def test_a_path_is_absolute(tmp_path: Path, text: str, key: str) -> None:
    assert mistake(tmp_path, text).startswith(f"'{key}' must be an absolute path, not ")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('control_socket = "/a\\u0000b"', "control_socket"),
        ('[[socket]]\npath = "/a\\u0000b"', "socket.path"),
    ],
)
def test_a_path_that_no_file_can_have_is_told(tmp_path: Path, text: str, key: str) -> None:
    assert f"'{key}'" in mistake(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("/run/x/metrics.sock", Path("/run/x/metrics.sock")),
        ("127.0.0.1:9000", Loopback("127.0.0.1", 9000)),
        ("[::1]:65535", Loopback("::1", 65535)),
    ],
)
def test_metrics_are_told_nowhere_at_a_path_or_on_loopback(tmp_path: Path, text: str, expected: object) -> None:
    assert load(tmp_path, f"metrics = '{text}'").metrics == expected
    assert expected is None or str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "0.0.0.0:9000",
            "10.0.0.1:9000",
            "[::]:9000",
            "[fe80::1]:9000",
            ":9000",
            "9000",
            "*:9000",
            "example.org:9000",
        ),
        *("localhost:9000", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:9000/metrics", "::1:9000"),
        *("x127.0.0.1:9000", "127.0.0.1:-1", "127.0.0.1:٣", "run/x", "./x"),
    ],
)
def test_metrics_for_others_than_this_machine_are_a_mistake_that_says_why(tmp_path: Path, text: str) -> None:
    told = mistake(tmp_path, f"metrics = '{text}'")
    assert told.startswith("""'metrics' must be an absolute path, "127.0.0.1:PORT" or "[::1]:PORT", not """)
    assert told.endswith("the endpoint asks for no password, so it must stay on this machine")


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_a_port_that_there_is_not_is_told(tmp_path: Path, port: int) -> None:
    told = mistake(tmp_path, f"metrics = '127.0.0.1:{port}'")
    assert told == f"'metrics': a port is between 1 and 65535, not {port}"


def test_an_empty_list_of_sockets_is_told(tmp_path: Path) -> None:
    assert mistake(tmp_path, "socket = []") == "'socket' is empty: nobody could connect"


def test_an_unknown_filesystem_is_told_with_the_nearest_known(tmp_path: Path) -> None:
    told = mistake(tmp_path, "mountpoint_filesystems = ['ext', 'btrf']")
    assert told == "'mountpoint_filesystems': unknown filesystem 'btrf', did you mean 'btrfs'?"


@pytest.mark.parametrize("number", [0, -1])
def test_a_filesystem_that_is_no_number_of_one_is_told(tmp_path: Path, number: int) -> None:
    assert "'mountpoint_filesystems'" in mistake(tmp_path, f"mountpoint_filesystems = [{number}]")


@pytest.mark.parametrize("text", ["mount_max =", "mount_max = 1\nmount_max = 2", "[deadlines", "x"])
def test_broken_toml_is_told_with_the_line(tmp_path: Path, text: str) -> None:
    assert "line" in mistake(tmp_path, text) or "end of document" in mistake(tmp_path, text)


def test_a_file_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    mistake(tmp_path, b"# caf\xe9\nmount_max = 1\n")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.toml: .*No such file or directory"):
        configuration_file.load(tmp_path / "none.toml")


def test_a_directory_in_place_of_the_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Is a directory"):
        configuration_file.load(tmp_path)


def test_an_unreadable_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, _: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("fusermount3_broker.service.configuration_file.os.open", refuse)  # root may read every file
    with pytest.raises(ConfigurationError, match=r"broker\.toml: .*Permission denied"):
        configuration_file.load(tmp_path / "broker.toml")


def test_a_fifo_in_place_of_the_file_is_told_at_once(tmp_path: Path) -> None:
    """open(2) of a FIFO without a writer blocks forever."""
    os.mkfifo(tmp_path / "broker.toml")
    with pytest.raises(ConfigurationError, match=r"broker\.toml: not a regular file"):
        configuration_file.load(tmp_path / "broker.toml")


def test_a_path_that_no_file_can_have_in_place_of_the_file_is_told() -> None:
    with pytest.raises(ConfigurationError, match="null byte"):
        configuration_file.load(Path("/etc/a\0b"))


DEEP = [
    "mount_max = " + "[" * 3000 + "]" * 3000,
    "mount_max = " + "{a = " * 700 + "1" + "}" * 700,
    "[" + "a." * 1500 + "b]",
    "mount_max" + ".a" * 1500 + " = 1",
]


@pytest.mark.parametrize("text", DEEP, ids=range(len(DEEP)))
def test_a_file_that_nests_deeply_is_told(tmp_path: Path, text: str) -> None:
    assert mistake(tmp_path, text)


def test_a_file_that_is_longer_than_any_configuration_is_told(tmp_path: Path) -> None:
    assert load(tmp_path, ("#" * 1023 + "\n") * 64).mount_max == 1000
    assert mistake(tmp_path, ("#" * 1023 + "\n") * 64 + "#") == "the file has more than 65536 bytes"
    assert mistake(tmp_path, "#" * 4097) == "a line has more than 4096 bytes"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("control_socket = '{path}'", "'control_socket': a socket's path has at most 107 bytes, not 108: '{path}'"),
        ("metrics = '{path}'", "'metrics': a socket's path has at most 107 bytes, not 108: '{path}'"),
        ("[[socket]]\npath = '{path}'", "'socket.path': a socket's path has at most 107 bytes, not 108: '{path}'"),
    ],
)
def test_a_path_that_no_socket_can_have_is_told(tmp_path: Path, text: str, expected: str) -> None:
    """sun_path has 108 bytes, with the NUL."""
    longest = "/" + "é" * 53
    assert load(tmp_path, text.replace("{path}", longest)).source
    assert mistake(tmp_path, text.replace("{path}", longest + "x")) == expected.replace("{path}", longest + "x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[[socket]]\npath = '/run/a'\n[[socket]]\npath = '/run/a'",
            "'socket.path' is the path of another socket, too, 'socket.path': '/run/a'",
        ),
        (
            "[[socket]]\npath = '/run/a'\n[[socket]]\npath = '/run//b/./../a'",
            "'socket.path' is the path of another socket, too, 'socket.path': '/run/b/../a'",
        ),
        (
            "control_socket = '/run/a'\nmetrics = '//run/a'",
            "'metrics' is the path of another socket, too, 'control_socket': '//run/a'",
        ),
        (
            "control_socket = '/run/a'\n[[socket]]\npath = '/run/a'",
            "'control_socket' is the path of another socket, too, 'socket.path': '/run/a'",
        ),
        (
            "control_socket = '/run/a'\nmetrics = '/run/a'",
            "'metrics' is the path of another socket, too, 'control_socket': '/run/a'",
        ),
        (
            "control_socket = '/run/fusermount3-proxy/broker.sock'",
            "'control_socket' is the path of another socket, too, 'socket.path': '/run/fusermount3-proxy/broker.sock'",
        ),
    ],
)
def test_two_sockets_with_one_path_are_told(tmp_path: Path, text: str, expected: str) -> None:
    assert mistake(tmp_path, text) == expected


@pytest.mark.parametrize("key", ["selinux_label", "owner", "group"])
def test_a_string_with_a_nul_byte_is_told(tmp_path: Path, key: str) -> None:
    told = mistake(tmp_path, f'[[socket]]\n{key} = "a\\u0000b"')
    assert told == f"'socket.{key}' must be a string without NUL bytes"


ALL_AT_ONCE = """# A comment
mount_max = 2000000
mountpoint_filesystems = [  # over
  "ext",
  "btrf",
]
metrics = "0.0.0.0:9467"
deadlines.unmount = 0

[limits]
mounts = "many"
mount_max = 5

[[socket]]
path = "/run/a"
[[socket]]
path = "/run/a"
owner = "no-such-account"
"""


def test_all_mistakes_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    told = [each.partition(" not ")[0] for each in mistakes(tmp_path, ALL_AT_ONCE)]
    assert told == [
        "/broker.toml:2: 'mount_max' must be between -1 and 1000000,",
        "/broker.toml:3: 'mountpoint_filesystems': unknown filesystem 'btrf', did you mean 'btrfs'?",
        """/broker.toml:7: 'metrics' must be an absolute path, "127.0.0.1:PORT" or "[::1]:PORT",""",
        "/broker.toml:8: 'deadlines.unmount' must be between 1 and 1000000,",
        "/broker.toml:11: 'limits.mounts' must be a whole number,",
        "/broker.toml:12: unknown key 'limits.mount_max': 'mount_max' belongs above the first line in brackets,"
        " such as [limits]",
        "/broker.toml:17: 'socket.path' is the path of another socket, too, 'socket.path': '/run/a'",
        "/broker.toml:18: 'socket.owner': there is no user 'no-such-account'",
    ]


def test_of_very_many_mistakes_the_first_are_told(tmp_path: Path) -> None:
    told = mistakes(tmp_path, "".join(f"x{number} = 1\n" for number in range(1000)))
    assert [each.split(":")[1] for each in told] == [str(line) for line in range(1, MOST_MISTAKES + 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("request = 1", "unknown key 'request': 'request' belongs below a line [deadlines]"),
        ("mounts = 1", "unknown key 'mounts': 'mounts' belongs below a line [limits]"),
        ("[limits]\nmode = '0600'", "unknown key 'limits.mode': 'mode' belongs below a line [[socket]]"),
        (
            "[[socket]]\nmount_max = 5",
            "unknown key 'socket.mount_max': 'mount_max' belongs above the first line in brackets, such as [[socket]]",
        ),
    ],
)
def test_a_key_of_another_table_is_told_with_where_it_belongs(tmp_path: Path, text: str, expected: str) -> None:
    assert mistake(tmp_path, text) == expected


def test_no_mistake_is_told_that_only_follows_from_another(tmp_path: Path) -> None:
    told = mistakes(tmp_path, "[[socket]]\npath = 1\n[[socket]]\npath = 2")
    assert told == (
        "/broker.toml:2: 'socket.path' must be a path, not 1",
        "/broker.toml:4: 'socket.path' must be a path, not 2",
    )
