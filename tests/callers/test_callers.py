"""Test that each caller mounts, reads, writes and unmounts in each way it supports, and leaves nothing behind."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.callers import table
from tests.callers.callers import BOTH, CALLERS, PLAIN, RUST, Caller
from tests.callers.machines import DEVICE, NO_DEVICE, ROOT, STAND_IN, USER, Place, wait_until
from tests.lab.commands import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.callers.conftest import MachineFor
    from tests.callers.table import Seen

pytestmark = [pytest.mark.e2e, pytest.mark.long]

numbers = itertools.count()


def each(condition: Callable[[Caller], object] = lambda _: True) -> pytest.MarkDecorator:
    """Run a test for each caller that meets this condition."""
    callers = [caller for caller in CALLERS if condition(caller)]
    return pytest.mark.parametrize("caller", callers, ids=lambda caller: caller.name)


def place_for(
    caller: Caller,
    machine_for: MachineFor,
    user: str = USER,
    devices: tuple[str, ...] = STAND_IN,
    *,
    user_allow_other: bool = False,
) -> Place:
    """Make a place for this test only."""
    machine = machine_for(caller, devices, user_allow_other=user_allow_other)
    return Place.make(machine, caller, user, f"place-{next(numbers)}")


def with_what_it_needs(
    use: Callable[[Place, str], None],
    caller: Caller,
    machine_for: MachineFor,
    user: str = USER,
    devices: tuple[str, ...] = STAND_IN,
) -> None:
    """Test the caller with the broker's defaults, and again with `user_allow_other` if the broker refused allow_other.

    `use` gets the text that the table shows if the test succeeds.
    """
    place = place_for(caller, machine_for, user, devices)
    try:
        use(place, table.YES)
    except (AssertionError, CommandFailed):
        if not place.was_refused_allow_other:
            raise
        use(place_for(caller, machine_for, user, devices, user_allow_other=True), table.NEEDS)


def check_read(place: Place) -> None:
    text = place.read(place.caller.file)
    if place.caller.file == "whoami":
        assert text.startswith("uid={} gid={} pid=".format(*place.user.split(":")))
    else:
        assert text == "hello\n"


def check_write(place: Place) -> None:
    file, text = place.caller.written, secrets.token_hex(2000)
    assert place.shell(f"echo {text} > {{mnt}}/{file} && cat {{mnt}}/{file}").stdout == f"{text}\n"


@each()
def test_as_a_user(caller: Caller, machine_for: MachineFor, seen: Seen) -> None:
    def use(place: Place, works: str) -> None:
        with seen.cell(caller.name, table.READ, works):
            program = place.start(caller.serve)
            check_read(place)
        if caller.written:
            with seen.cell(caller.name, table.WRITTEN, works):
                check_write(place)
        with seen.cell(caller.name, table.UNMOUNT, works):
            place.unmount()
            assert program.wait(timeout=20) == 0
        seen.cells[caller.name][table.VERSION] = version_of(place)

    with_what_it_needs(use, caller, machine_for)


def version_of(place: Place) -> str:
    """Return the caller's version: upstream's, without Debian's epoch and revision."""
    if place.caller.package:
        version = place.run(f"dpkg-query --show --showformat ${{{{Version}}}} {place.caller.package}").stdout
        return version.split(":")[-1].rsplit("-", 1)[0].removesuffix("+dfsg")
    return place.run(place.caller.version).stdout.strip()


@each()
def test_as_root(caller: Caller, machine_for: MachineFor, seen: Seen) -> None:
    place = place_for(caller, machine_for, ROOT)
    with seen.cell(caller.name, table.ROOT):
        program = place.start(caller.serve)
        check_read(place)
        if caller.written:
            check_write(place)
        place.unmount()
        assert program.wait(timeout=20) == 0


@each(lambda caller: caller.stop)
def test_stopped_by_a_signal(caller: Caller, machine_for: MachineFor, seen: Seen) -> None:
    def use(place: Place, works: str) -> None:
        with seen.cell(caller.name, table.STOP, works):
            stop(place)
            wait_until(lambda: not place.is_mounted())

    with_what_it_needs(use, caller, machine_for)


@each(lambda caller: caller.stop)
def test_stopped_by_a_signal_as_root(caller: Caller, machine_for: MachineFor, seen: Seen) -> None:
    """Whether the mount is gone after the signal depends on the caller; our part is that it can be unmounted."""
    place = place_for(caller, machine_for, ROOT)
    with seen.cell(caller.name, table.ROOT_STOP):
        stop(place)
        time.sleep(0.5)
    if place.is_mounted():
        with seen.cell(caller.name, table.ROOT_STOP, "left"):
            place.unmount()


def stop(place: Place) -> None:
    """Start the caller, and end it with a signal."""
    assert place.caller.stop is not None
    place.start(place.caller.serve)
    check_read(place)
    place.send(place.caller.stop)
    wait_until(lambda: not place.machine.processes())


@each(lambda caller: caller.background)
def test_in_the_background(caller: Caller, machine_for: MachineFor, seen: Seen) -> None:
    def use(place: Place, works: str) -> None:
        with seen.cell(caller.name, table.BACKGROUND, works):
            place.run(caller.background)
            check_read(place)
            place.unmount()
            wait_until(lambda: not place.machine.processes())

    with_what_it_needs(use, caller, machine_for)


@each(lambda caller: caller.auto_unmount)
def test_auto_unmount(caller: Caller, machine_for: MachineFor, seen: Seen) -> None:
    def use(place: Place, works: str) -> None:
        with seen.cell(caller.name, table.AUTO_UNMOUNT, works):
            for stopped_by in (signal.SIGTERM, signal.SIGKILL):
                place.start(f"{caller.serve} {caller.auto_unmount}")
                check_read(place)
                assert len(place.machine.helpers()) == 1
                place.send(stopped_by)
                wait_until(lambda: not place.is_mounted())
                wait_until(lambda: not place.machine.processes())

    with_what_it_needs(use, caller, machine_for)


@each()
def test_without_dev_fuse(caller: Caller, machine_for: MachineFor, seen: Seen) -> None:
    serve = {PLAIN: caller.serve, BOTH: f"{caller.serve} {caller.auto_unmount}"}

    def use(place: Place, _works: str) -> None:
        if not caller.gives_up:
            with seen.cell(caller.name, table.DEVICE, "not needed"):
                mount_and_unmount(place, caller.serve)
            return
        with seen.cell(
            caller.name, table.DEVICE, "needed" if caller.needs_device == BOTH else "needed without auto_unmount"
        ):
            check_gives_up(place, caller.serve)
            if caller.auto_unmount and caller.needs_device == BOTH:
                check_gives_up(place, serve[BOTH])
            elif caller.auto_unmount:
                mount_and_unmount(place, serve[BOTH])

    with_what_it_needs(use, caller, machine_for, devices=NO_DEVICE)


def mount_and_unmount(place: Place, command: str) -> None:
    program = place.start(command)
    check_read(place)
    place.unmount()
    assert program.wait(timeout=20) == 0


def check_gives_up(place: Place, command: str) -> None:
    result = place.run(command, check=False)
    assert result.returncode != 0
    assert place.caller.gives_up in result.stdout + result.stderr
    assert not place.is_mounted()


@each(lambda caller: caller.clone_fd)
@pytest.mark.parametrize("devices", [STAND_IN, DEVICE], ids=["stand-in", "device"])
def test_clone_fd(caller: Caller, devices: tuple[str, ...], machine_for: MachineFor) -> None:
    place = place_for(caller, machine_for, ROOT, devices)
    program = place.start(f"{caller.serve} {caller.clone_fd}")
    check_read(place)
    check_write(place)
    place.unmount()
    assert program.wait(timeout=20) == 0
    assert program.stderr is not None
    assert ("trying to continue without -o clone_fd" in program.stderr.read()) == (devices == STAND_IN)


@each(lambda caller: caller.name.startswith("libfuse") or caller.kit is RUST)
def test_several_mounts_at_once(caller: Caller, machine_for: MachineFor) -> None:
    places = [place_for(caller, machine_for) for _ in range(3)]
    programs = [place.start(caller.serve) for place in places]
    for place in places:
        check_read(place)
        check_write(place)
    for place, program in zip(places, programs, strict=True):
        place.unmount()
        assert program.wait(timeout=20) == 0


def test_the_table_is_what_was_seen(seen: Seen) -> None:
    """Runs last in this module, because it compares the results of all other tests."""
    if os.environ.get(table.WRITE):
        assert seen.is_whole(), "the file is written only when all callers were run"
        table.write(seen.cells)
    written = table.written_rows()
    if seen.is_whole():
        assert list(written) == [caller.name for caller in CALLERS]
    for name, cells in seen.cells.items():
        without_version = {column: text for column, text in cells.items() if column != table.VERSION}
        assert without_version == {column: written[name][column] for column in without_version}, name
