"""The table of mounts, the filters, and what a shell completes."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import CompletionItem, ShellComplete
from rich.console import Console

from fusermount3_broker.cli import completion, main, mounts, mounts_table
from fusermount3_broker.cli.container_names import ContainerNames
from tests.unit.cli.conftest import FakeControlSocket
from tests.unit.cli.test_main import MOUNT, run

POD = "0d7e3a1c-1f2b-4c3d-9e8f-112233445566"
OF_A_POD = {"container": f"kubepods-pod{POD.replace('-', '_')}.slice"}
#: As long as the values usually are at most.
LONG = {
    "state": "dead",
    "mountpoint": "/var/lib/somebody/data/of/a/project",
    "source": "storage.example.org:/srv/exports/data",
    "type": "fuse.somethingfs",
    "uid": 4294967295,
    "program_pid": 4194303,
    "program_command": "a-command-of-15",
    "container": "x" * 100,
}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Return the root directory of a host with the cgroups in which the containers are."""
    (tmp_path / "sys/fs/cgroup/machine.slice").mkdir(parents=True)
    return tmp_path


def named(*answered: dict[str, Any], root: Path = Path("/nowhere")) -> list[dict[str, Any]]:
    each = [dict(mount) for mount in answered]
    mounts.name_containers(each, ContainerNames(root))
    return each


def drawn(width: int, *answered: dict[str, Any], most: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(mounts_table.MountsTable(named(*answered), most))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_mount_is_shown_with_its_program_its_age_and_its_container() -> None:
    headings, row = drawn(100, MOUNT | {"mounted_at": time.time() - 3900})
    assert tuple(headings.split()) == mounts_table.HEADINGS
    assert row.split() == [
        *("1a2b3c4d", "live", "1h5m", "/mnt/a", "b", "fuse.sshfs", "host:", "1000", "4711", "sshfs", "f" * 12)
    ]


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("width", [100, 120])
def test_the_table_fits_the_terminal_and_shows_ids_and_states_whole(width: int, most: int | None) -> None:
    lines = drawn(width, MOUNT, MOUNT | LONG, most=most)
    assert max(map(len, lines)) <= width
    for whole in ("1a2b3c4d dead", "4294967295 4194303 a-command-of-15", "1000       4711    sshfs"):
        assert any(whole in line for line in lines), lines


def test_no_text_is_lost_where_there_is_room_below() -> None:
    column = drawn(100, MOUNT | LONG)
    start, end = column[0].index("MOUNTPOINT"), column[0].index("TYPE")
    assert "".join(line[start:end].strip() for line in column[1:]) == LONG["mountpoint"]


@pytest.mark.parametrize("is_fitted", [False, True])
def test_each_cell_of_a_long_table_is_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch, is_fitted: bool) -> None:
    calls = 0

    def counted(text: str) -> int:
        nonlocal calls
        calls += 1
        return len(text)

    monkeypatch.setattr(mounts_table, "cell_len", counted)
    each = named(*[MOUNT] * 3000)
    if is_fitted:
        drawn(200, *each)
    else:
        assert len(mounts_table.lines(each)) == 3001
    assert calls <= 3001 * len(mounts_table.HEADINGS) * (30 if is_fitted else 3)


def test_a_very_long_cell_is_fitted_and_cut_without_going_through_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted(text: str) -> int:
        nonlocal calls
        calls += 1
        return len(text)

    monkeypatch.setattr(mounts_table, "cell_len", counted)
    compared = 0

    def counted_max(*given: Any) -> Any:
        nonlocal compared
        compared += 1
        return max(*given)

    monkeypatch.setattr(mounts_table, "max", counted_max, raising=False)
    lines = drawn(120, MOUNT | {"source": "x" * 100_000}, most=1)
    assert lines[1].count("…") == 1
    assert max(map(len, lines)) == 120
    assert calls < 1000
    assert compared < len(mounts_table.HEADINGS) * 120


def shared(*uids: str) -> dict[str, Any]:
    targets = [f"pods/{uid}/volumes/kubernetes.io~csi/data/mount" for uid in uids]
    return MOUNT | {"share": "k" * 64, "borrowers": targets}


def test_a_filesystem_that_pods_share_is_shown_with_these(tmp_path: Path) -> None:
    (tmp_path / f"var/log/pods/shop_app-1_{POD}").mkdir(parents=True)
    mount, alone = named(shared(POD, "12345678-0000"), MOUNT, root=tmp_path)
    assert mount["borrower_pods"] == ["shop/app-1", "pod 12345678"]
    headings, row, other = mounts_table.lines([mount, alone])
    assert headings.split() == [*mounts_table.HEADINGS, "PODS"]
    place = headings.index("PODS")
    assert (row[place:], other[place:]) == ("shop/app-1, pod 12345678", "")


def test_of_many_pods_a_few_are_shown_and_of_none_that_there_is_none() -> None:
    mount, unused = named(shared(*"abcde"), shared())
    assert mounts_table.pods(mount) == "pod a, pod b, pod c, 2 more"
    assert mounts_table.pods(unused) == "-"
    assert len(mount["borrower_pods"]) == 5


@pytest.mark.parametrize("most", [None, 2])
def test_a_table_with_shared_filesystems_fits_the_terminal(most: int | None) -> None:
    lines = drawn(120, shared(*(f"{number:08}" for number in range(3))), MOUNT | LONG, most=most)
    assert max(map(len, lines)) <= 120


def test_a_mount_without_a_known_program_shows_none() -> None:
    _, row = drawn(200, MOUNT | {"program_pid": 0, "program_command": ""})
    assert row.split()[-3:-1] == ["-", "-"]


def test_the_answer_of_an_older_broker_is_shown() -> None:
    """After an upgrade, the running broker may not have been restarted yet."""
    _, row = drawn(200, {name: value for name, value in MOUNT.items() if not name.startswith("program_")})
    assert row.split()[-3:-1] == ["-", "-"]


@pytest.mark.parametrize(
    ("container", "shown"),
    [
        (MOUNT["container"], "f" * 12),
        (OF_A_POD["container"], "pod 0d7e3a1c"),
        ("machine-my\\x2dweb.scope", "my-web"),
        ("session-2.scope", "session-2.scope"),
        ("", "-"),
    ],
)
def test_a_container_without_a_name_is_shown_by_what_its_cgroup_tells(container: str, shown: str) -> None:
    (mount,) = named(MOUNT | {"container": container})
    assert mounts_table.cells(mount, time.time())[-1] == shown


def test_a_name_takes_the_place_of_an_id(host: Path) -> None:
    (host / f"var/log/pods/default_web_{POD}").mkdir(parents=True)
    (mount,) = named(MOUNT | OF_A_POD, root=host)
    assert mounts_table.cells(mount, time.time())[-1] == "default/web"
    assert (mount["container_id"], mount["container_name"]) == ("", "default/web")


@pytest.mark.parametrize("name", ["\x1b[2Jweb", "web\nlive", "\x9b2J", "\u202ebew"])
def test_a_name_cannot_move_the_terminals_cursor(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Engines allow none of this in a name; their files may come from somebody else."""
    monkeypatch.setattr(ContainerNames, "name", lambda *_: name)
    monkeypatch.setattr(ContainerNames, "may_name", lambda *_: True)
    (mount,) = named(MOUNT | {"account": "container /machine.slice/a"})
    assert mount["container_name"] == name
    for lines in (mounts_table.lines([mount]), drawn(200, MOUNT | {"account": "container /machine.slice/a"})):
        assert len(lines) == 2
        assert "".join(lines).isprintable()


def test_a_cgroup_that_a_user_has_made_gets_no_name_of_a_container(host: Path) -> None:
    """It may have the ID of anybody's container."""
    file = host / "var/lib/containers/storage/overlay-containers/containers.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps([{"id": "f" * 64, "names": ["web"]}]))
    file.chmod(0o600)
    theirs, the_users = named(MOUNT, MOUNT | {"account": "user 1000"}, root=host)
    assert (theirs["container_name"], the_users["container_name"]) == ("web", "")
    assert mounts.container_of(the_users) == "f" * 12


@pytest.mark.parametrize("hierarchy", ["", "pids/"])
def test_nor_does_one_in_a_service_that_its_user_manages(
    host: Path, monkeypatch: pytest.MonkeyPatch, hierarchy: str
) -> None:
    """Nor one whose parent can't be looked at."""
    (host / f"var/log/pods/default_web_{POD}").mkdir(parents=True)
    service = host / f"sys/fs/cgroup/{hierarchy}system.slice/ci.service"
    service.mkdir(parents=True)
    mount = MOUNT | OF_A_POD | {"account": f"container /system.slice/ci.service/{OF_A_POD['container']}"}
    assert [each["container_name"] for each in named(mount, root=host)] == ["default/web"]
    stat = Path.stat

    def of_user(path: Path, **options: bool) -> os.stat_result:
        status = stat(path, **options)
        return os.stat_result([*status[:4], 1000, *status[5:10]]) if path == service else status

    monkeypatch.setattr(Path, "stat", of_user)
    assert [each["container_name"] for each in named(mount, root=host)] == [""]
    gone = mount | {"account": "container /system.slice/gone.service/x"}
    assert [each["container_name"] for each in named(gone, root=host)] == [""]


# Filters


def test_only_mounts_in_these_states_are_listed() -> None:
    each = named(*(MOUNT | {"state": state, "uid": n} for n, state in enumerate(("live", "dead", "hung", "dead"))))
    assert [mount["uid"] for mount in mounts.wanted(each, {"dead"}, "")] == [1, 3]
    assert [mount["uid"] for mount in mounts.wanted(each, {"dead", "hung"}, "")] == [1, 2, 3]
    assert mounts.wanted(each, (), "") == each


@pytest.mark.parametrize(
    ("container", "found"),
    [
        *(("ffff", ["podman"]), ("FFFFFFFFFFFF", ["podman"]), (MOUNT["container"], ["podman"]), ("fffg", [])),
        *(("0d7e3a1c", ["pod"]), (POD, ["pod"]), ("default/web", ["pod"]), ("web", ["pod"]), ("default", [])),
        *(("session-2.scope", ["host"]), ("session", []), ("/", [])),
    ],
)
def test_a_container_is_found_by_name_or_the_beginning_of_its_id(host: Path, container: str, found: list[str]) -> None:
    (host / f"var/log/pods/default_web_{POD}").mkdir(parents=True)
    each = named(
        MOUNT | {"source": "podman"},
        MOUNT | OF_A_POD | {"source": "pod"},
        MOUNT | {"container": "session-2.scope", "source": "host"},
        MOUNT | {"container": "", "source": "nobody"},
        root=host,
    )
    assert [mount["source"] for mount in mounts.wanted(each, (), container)] == found


def test_the_command_filters_its_table_and_its_json(fake_control: FakeControlSocket) -> None:
    fake_control.answer([MOUNT, MOUNT | {"state": "dead", "request_id": "5e6f"}])
    output = run("mounts", "--config", fake_control.config, "--dead", "--json").output
    assert [mount["request_id"] for mount in json.loads(output)] == ["5e6f"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--watch"], "--watch needs a terminal"),
        (["--watch", "--json"], "--watch shows a table; it can't be combined with --json"),
    ],
)
def test_watching_without_a_terminal_or_in_json_is_refused(
    fake_control: FakeControlSocket, options: list[str], complaint: str
) -> None:
    result = run("mounts", "--config", fake_control.config, *options)
    assert result.exit_code == 2
    assert result.output.endswith(f"Error: {complaint}\n")


# Completion


def completed(config: Path, *line: str, typed: str) -> list[CompletionItem]:
    """Return what click offers after that line."""
    complete = ShellComplete(main.main, {}, "fusermount3-broker", "_X")
    return complete.get_completions([*line[:1], "--config", str(config), *line[1:]], typed)


def test_ids_are_completed_with_their_mountpoints(fake_control: FakeControlSocket) -> None:
    fake_control.answer(
        [MOUNT, MOUNT | {"request_id": "1aff0000", "mountpoint": "/b\n"}, MOUNT | {"request_id": "22222222"}]
    )
    offered = completed(fake_control.config, "abort", typed="1A")
    assert [(each.value, each.help) for each in offered] == [("1a2b3c4d", "/mnt/a b"), ("1aff0000", "/b\\n")]


def test_an_id_that_is_on_the_line_is_not_offered_again(fake_control: FakeControlSocket) -> None:
    fake_control.answer([MOUNT, MOUNT | {"request_id": "22222222"}])
    assert [each.value for each in completed(fake_control.config, "abort", "22222222", typed="")] == ["1a2b3c4d"]


def test_containers_are_completed(fake_control: FakeControlSocket) -> None:
    fake_control.answer([MOUNT, MOUNT, MOUNT | {"container": "session-2.scope"}])
    offered = completed(fake_control.config, "mounts", "--container", typed="ff")
    assert [each.value for each in offered] == ["f" * 64]


HOSTILE = ["$(reboot)", "a;b", "a b", "`a`", "-h", "a\nb", "a\\b", "\x1b[2J", "é"]


def test_nothing_is_offered_that_a_shell_takes_for_more_than_a_word(fake_control: FakeControlSocket) -> None:
    wrong = [*HOSTILE, "1a2b3c4", "1a2b3c4d5", "1A2B3C4D", "1a2b3c4d\n"]
    fake_control.answer([MOUNT, *(MOUNT | {"request_id": each} for each in wrong)])
    assert [each.value for each in completed(fake_control.config, "abort", typed="")] == ["1a2b3c4d"]


def test_no_name_of_a_container_is_offered_that_a_shell_takes_for_more(
    monkeypatch: pytest.MonkeyPatch, fake_control: FakeControlSocket
) -> None:
    answered = [{"container_name": each, "container_id": ""} for each in [*HOSTILE, "default/web-1_2.a:b"]]
    monkeypatch.setattr(mounts, "ask", lambda _: answered)
    offered = completed(fake_control.config, "mounts", "--container", typed="")
    assert [each.value for each in offered] == ["default/web-1_2.a:b"]


@pytest.mark.parametrize("answer", [b"", b"5", b"[5]", b"null", b'[{"request_id": 7}]', b'{"error": "x"}'])
def test_where_no_broker_answers_in_form_nothing_is_offered(
    fake_control: FakeControlSocket, answer: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_control.answer(answer)
    assert completed(fake_control.config, "abort", typed="") == []
    assert capfd.readouterr() == ("", "")


def test_where_no_broker_runs_nothing_is_offered(fake_control: FakeControlSocket, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("x = 1")
    assert completed(fake_control.config, "abort", typed="") == []
    assert completed(bad, "abort", typed="") == []
    context = click.Context(main.main, resilient_parsing=True)
    context.params["config_path"] = tmp_path / os.fsdecode(b"\xff")
    assert completion.request_ids(context, click.Argument(["ids"]), "") == []


# abort


@pytest.mark.parametrize("typed", ["", "g", "3f6c0e52 3f6c0e53", "3f6c\n", "../x", "-", "\u0663", "0" * 33])
def test_what_is_no_id_is_refused_with_a_reason_before_anything_is_aborted(
    fake_control: FakeControlSocket, typed: str
) -> None:
    result = run("abort", "--config", fake_control.config, "1a2b", "--", typed)
    assert result.exit_code == 1
    assert result.output.startswith("Error: '")
    assert "is no request ID, and none begins so: see fusermount3-broker mounts" in result.output
    assert result.output.count("\n") == 1


def test_abort_without_an_id_is_a_wrong_command_line(fake_control: FakeControlSocket) -> None:
    result = run("abort", "--config", fake_control.config)
    assert result.exit_code == 2
    assert "Missing argument 'ID...'" in result.output


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The questions to a broker with several mounts, of which 2b2b0000 can't be aborted."""
    questions: list[str] = []
    (tmp_path / "broker.toml").touch()

    def ask(_: Path, command: str) -> Any:
        questions.append(command)
        if command == "mounts":
            return [MOUNT | {"request_id": each} for each in ("1a2b3c4d", "2b2b0000", "3c3c3c3c", "3c3cffff", "\n" * 8)]
        return {"error": "it is gone"} if command == "abort 2b2b0000" else MOUNT | {"request_id": command[6:]}

    monkeypatch.setattr("fusermount3_broker.cli.control_client.ask", ask)
    return questions


def test_what_fails_does_not_keep_the_others_from_being_aborted(asked: list[str], tmp_path: Path) -> None:
    result = run("abort", "--config", tmp_path / "broker.toml", "1A2B", "2b2b", "3c3c3")
    aborted = [f"aborted {each}: /mnt/a b, fuse.sshfs" for each in ("1a2b3c4d", "3c3c3c3c")]
    assert sorted(result.output.splitlines()) == ["Error: it is gone", *aborted]
    assert result.exit_code == 1
    assert asked == ["mounts", "abort 1a2b3c4d", "abort 2b2b0000", "abort 3c3c3c3c"], "by the whole IDs"


def test_an_id_that_is_given_twice_is_aborted_once(asked: list[str], tmp_path: Path) -> None:
    assert run("abort", "--config", tmp_path / "broker.toml", "1a2b", "1a2b3c4d", "1A2B").exit_code == 0
    assert asked == ["mounts", "abort 1a2b3c4d"]


def test_nothing_is_aborted_if_an_id_is_unknown_or_ambiguous(asked: list[str], tmp_path: Path) -> None:
    result = run("abort", "--config", tmp_path / "broker.toml", "1a2b", "3C3C", "ffff")
    assert result.output.splitlines() == [
        "Error: '3c3c' is ambiguous: 3c3c3c3c, 3c3cffff",
        "no live mount has the id 'ffff'",
    ]
    assert (result.exit_code, asked) == (1, ["mounts"])


def test_a_few_digits_stand_for_no_mount(asked: list[str], tmp_path: Path) -> None:
    result = run("abort", "--config", tmp_path / "broker.toml", "1a2b", "1a2")
    assert result.output == "Error: '1a2' is too short: type at least 4 digits of a request ID\n"
    assert (result.exit_code, asked) == (1, [])
