"""A process that creates a superblock among foreign processes can do that, and nothing else."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from errno import EBADF, EPERM
from pathlib import Path

import pytest

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import confinement
from tests.e2e.hostile import in_process


def confined(body: Callable[[], object]) -> None:
    """Run `body` in a confined process."""

    def enter() -> None:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        confinement.confine_to_creation()
        body()

    in_process(enter)


def error_of(attempt: Callable[[], object]) -> int:
    try:
        attempt()
    except OSError as error:
        return error.errno or 0
    return 0


ATTEMPTS: dict[str, Callable[[], object]] = {
    "open": lambda: os.open("/", os.O_RDONLY),
    "open a path": lambda: os.open("/", os.O_PATH),
    "read": lambda: os.read(0, 1),
    "mount": lambda: syscalls.mount(b"tmpfs", b"/", b"tmpfs", 0, None),
    "unmount": lambda: syscalls.umount2(b"/", syscalls.MNT_DETACH),
    "open a filesystem": lambda: syscalls.fsopen(b"tmpfs", 0),
    "make a mount": lambda: syscalls.fsmount(0, 0, 0),
    "move a mount": lambda: syscalls.move_mount(0, b"", 0, b"", 0),
    "copy a mount": lambda: syscalls.open_tree(syscalls.AT_FDCWD, b"/", syscalls.OPEN_TREE_CLONE),
    "join namespaces": lambda: syscalls.setns(0, syscalls.CLONE_NEWNS),
    "make namespaces": lambda: syscalls.unshare(syscalls.CLONE_NEWNS),
    "execute": lambda: os.execv("/bin/true", ["true"]),
    "send a signal": lambda: os.kill(os.getpid(), 0),
    "make a socket": lambda: socket.socket(socket.AF_UNIX),
    "become somebody": lambda: os.setuid(0),
    "be dumpable": lambda: syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1),
    "configure a filesystem": lambda: syscalls.fsconfig(0, syscalls.FSCONFIG_SET_FLAG, b"allow_other", None, 0),
}


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_it_cannot(attempt: Callable[[], object]) -> None:
    def body() -> None:
        assert error_of(attempt) == EPERM

    confined(body)


def test_it_can_have_a_child_and_memory_and_create_a_filesystem() -> None:
    def body() -> None:
        if (child := syscalls.fork()) == 0:
            created = error_of(lambda: syscalls.fsconfig(1_000_000, syscalls.FSCONFIG_CMD_CREATE, None, None, 0))
            os._exit(created == EBADF and len(bytearray(1 << 24)) >> 24)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1

    confined(body)


def test_what_passes_is_said_for_the_machine_that_this_is() -> None:
    assert confinement.POSSIBLE
    assert confinement._program("a machine of next year") is None


@pytest.mark.parametrize("machine", confinement._MACHINES)
def test_every_jump_stays_in_the_program(machine: str) -> None:
    """The kernel would refuse a program with any other jump, but only on the machine that the program is for."""
    program = confinement._program(machine)
    assert program
    code = [program[at : at + 8] for at in range(0, len(program), 8)]
    for number, instruction in enumerate(code):
        if instruction[0] == confinement._JUMP_IF_EQUAL:
            assert number + 1 + max(instruction[2], instruction[3]) < len(code)
    assert int.from_bytes(code[-1][:2], "little") == confinement._RETURN


def test_the_tests_would_see_a_process_that_is_not_confined() -> None:
    def body() -> None:
        assert Path("/").is_dir()
        assert error_of(ATTEMPTS["open"]) == 0

    in_process(body)
