"""The configuration file: an input is its content."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

from fusermount3_broker.service import configuration_file
from fusermount3_broker.service.configuration import Loopback
from fusermount3_broker.service.configuration_file import ConfigurationError

_EXAMPLE = (Path(__file__).parents[3] / "packaging/fusermount3-broker.toml").read_bytes()

WORDS = [
    *(b"\n[[socket]]\n", b"\n[deadlines]\n", b"\n[limits]\n", b"path = ", b"mode = '0666'", b"selinux_label = ''"),
    *(b"control_socket = '/c'", b"metrics = '[::1]:1'", b"mount_max = -1", b"0xffffffffffffffff", b"1e999", b"nan"),
    *(b"[[[[", b"{a=", b"a.a.a.a", b"'''", b'"\\u0000"', b"1979-05-27T07:32:00Z", b"mountpoint_filesystems = ['ext']"),
]
#: An empty file (in the example all keys are commented out), the example with every key set, and a short file.
SEEDS = [
    b"",
    b"\n".join(line.removeprefix(b"#") if line[1:2] not in (b" ", b"") else b"" for line in _EXAMPLE.split(b"\n")),
    b"control_socket = '/c'\nstate_directory = '/s'\nmetrics = '127.0.0.1:9'\n[[socket]]\npath = '/a'\nmode = '0600'",
]
_LONGEST_SOCKET_PATH = 107


def check(data: bytes) -> None:
    """Check that the file is refused with a message, or is a configuration whose values are all usable."""
    try:
        read = configuration_file.read(io.BytesIO(data), Path("/broker.toml"), accounts=False)
    except ConfigurationError as error:
        assert all(re.match("/broker.toml:([1-9][0-9]*:)? ", each) for each in error.args)
        return
    paths = [each.path for each in read.socket] + [read.control_socket]
    if read.metrics and not isinstance(read.metrics, Loopback):
        paths.append(read.metrics)
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert path.is_absolute()
        assert len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH
    for text in (*map(os.fspath, paths), *(each.selinux_label for each in read.socket)):
        assert "\0" not in text
