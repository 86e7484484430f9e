"""The injection into containers and its CDI specification; the shipped file is what the command prints."""

from __future__ import annotations

import errno
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fusermount3_broker.cli import main
from fusermount3_broker.injection import cdi
from fusermount3_broker.injection.container_edits import NAMES, Bind, InjectionError, injection
from fusermount3_proxy import approach, preparation
from tests.lab.broker import PROGRAM
from tests.lab.commands import run

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "packaging/cdi/fusermount3-proxy.json"
PROXY, SOCKET = Path("/opt/proxy"), Path("/srv/fuse/broker.sock")


def generate(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main.main, ["cdi", "generate", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), "no traceback"
    return result


def edits(specification: str) -> dict[str, Any]:
    (device,) = json.loads(specification)["devices"]
    found: dict[str, Any] = device["containerEdits"]
    return found


def test_the_shipped_file_is_what_the_command_prints() -> None:
    assert SHIPPED.read_text() == generate().stdout


def test_the_command_writes_a_file_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "cdi" / "fuse.json"
    for _ in range(2):
        result = generate("--output", file)
        assert (result.exit_code, result.stdout) == (0, "")
        assert file.read_text() == SHIPPED.read_text()
        assert list(file.parent.iterdir()) == [file]


def test_a_proxy_that_is_not_there_is_told_and_the_file_written(tmp_path: Path) -> None:
    proxy, file = tmp_path / "fusermount3-proxy", tmp_path / "fuse.json"
    result = generate("--proxy", proxy, "--output", file)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == (
        f"Warning: there is no {proxy} on this host, so no container can be started with the device: install the "
        "package fusermount3-proxy-static, or give the path with --proxy\n"
    )
    written = file.read_text()
    proxy.touch()
    result = generate("--proxy", proxy, "--output", file)
    assert (result.exit_code, result.output) == (0, "")
    assert file.read_text() == written


def test_a_proxy_that_this_user_may_not_look_for_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root would be allowed to look; as who is not, the kernel says so of every such path."""
    stat = Path.stat

    def refused(path: Path, **given: bool) -> os.stat_result:
        if path.name == "proxy":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **given)

    monkeypatch.setattr(Path, "stat", refused)
    result = generate("--proxy", "/root/private/proxy")
    assert (result.exit_code, "Warning" in result.output) == (0, False), "nothing is known of the file"


def test_a_link_to_a_stream_gets_it_and_stays_a_link(tmp_path: Path) -> None:
    """As /dev/stdout is one, which must not be replaced by a file of that name."""
    link = tmp_path / "stdout"
    link.symlink_to("/proc/self/fd/1")
    result = run([PROGRAM, "cdi", "generate", "--output", link])
    assert result.stdout == SHIPPED.read_text()
    assert link.is_symlink() and list(tmp_path.iterdir()) == [link]


def test_a_pipe_gets_it_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as reader:
        read = reader.submit(pipe.read_text)
        assert generate("--output", pipe).exit_code == 0
        assert read.result(timeout=60) == SHIPPED.read_text()
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """An engine that reads it at that moment reads either the old one or the new one."""
    file = tmp_path / "fuse.json"
    file.write_text("old")
    with file.open() as opened:
        assert generate("--output", file).exit_code == 0
        assert opened.read() == "old"


def test_a_file_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = generate("--output", tmp_path / "file/fuse.json")
    assert result.exit_code == 1
    assert re.fullmatch(r"Error: .*file.*\n", result.output)


def test_the_device_is_named_as_the_specification_allows() -> None:
    specification = json.loads(SHIPPED.read_text())
    vendor, _, kind = specification["kind"].partition("/")
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]", vendor)
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*[A-Za-z0-9]", kind)
    (device,) = specification["devices"]
    assert f"{vendor}/{kind}={device['name']}" == cdi.DEVICE == "fusermount3-proxy.dev/fuse=on"


def test_nothing_that_a_container_is_given_can_be_changed_by_it() -> None:
    for mount in edits(cdi.specification(injection(PROXY, SOCKET)))["mounts"]:
        assert {"bind", "ro", "nosuid"} == set(mount["options"])


def test_the_proxy_covers_every_name_of_the_helper() -> None:
    covered = {bind.target for bind in injection(PROXY, SOCKET).binds if bind.source == str(PROXY)}
    names = {name.decode() for name in preparation.NAMES}
    assert names == set(NAMES) == {"fusermount3", "fusermount", "mergerfs-fusermount"}
    assert covered == {f"{directory.decode()}/{name}" for directory in preparation.DIRECTORIES for name in names}


def test_the_proxy_finds_the_socket_by_itself() -> None:
    found = injection(PROXY, SOCKET)
    (directory,) = [Path(bind.target) for bind in found.binds if bind.source == "/srv/fuse"]
    assert str(directory / SOCKET.name).encode() == approach.DEFAULT_PATH
    assert found.environment == {}
    assert "env" not in edits(cdi.specification(found))


def test_a_socket_of_another_name_is_told_to_the_proxy() -> None:
    found = injection(PROXY, SOCKET.with_name("other.sock"))
    assert found.environment == {approach.VARIABLE.decode(): "/run/fusermount3-proxy/other.sock"}
    assert edits(cdi.specification(found))["env"] == [f"{approach.VARIABLE.decode()}=/run/fusermount3-proxy/other.sock"]


def test_a_stand_in_lies_at_dev_fuse_unless_the_device_itself_does() -> None:
    stand_in = Bind("/dev/null", "/dev/fuse")
    assert stand_in in injection(PROXY, SOCKET).binds
    assert "deviceNodes" not in edits(generate().stdout)
    assert stand_in not in injection(PROXY, SOCKET, device_node=True).binds
    assert edits(generate("--device-node").stdout)["deviceNodes"] == [{"path": "/dev/fuse", "permissions": "rw"}]


@pytest.mark.parametrize("socket", ["/broker.sock", "/run/broker.sock"])
def test_no_container_is_given_a_directory_of_everybodys(socket: str) -> None:
    with pytest.raises(InjectionError, match="containers would see all of"):
        injection(PROXY, Path(socket))


@pytest.mark.parametrize("path", ["proxy", "/opt/../etc/passwd", ""])
def test_a_path_is_absolute_and_plain(path: str) -> None:
    for proxy, socket in ((Path(path), SOCKET), (PROXY, Path(path))):
        with pytest.raises(InjectionError, match="must be an absolute path"):
            injection(proxy, socket)
    assert generate("--proxy", path).output == f"Error: {Path(path)}: must be an absolute path without ..\n"
