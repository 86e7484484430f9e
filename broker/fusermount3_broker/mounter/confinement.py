"""A system call filter (seccomp(2)) for those children of the mounter that a container may take over.

The front uses libseccomp for its own, much longer list. Here a program of a few instructions is enough and needs no
import; it is computed before the mounter serves.
"""

import os
import struct
from errno import EPERM

from fusermount3_broker.kernel import syscalls

# include/uapi/linux/{bpf_common,seccomp,audit}.h
_LOAD_WORD = 0x20
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in struct seccomp_data, the low words of arguments

_FSCONFIG = 431
#: By machine: its architecture number for audit, the number of prctl(2), and the numbers of the system calls with which
#: a Python process forks a child and gets its status, manages memory, and exits: mmap munmap brk rt_sigprocmask
#: rt_sigreturn madvise clone wait4 exit exit_group futex set_robust_list rseq getpid gettid.
_MACHINES = {
    "x86_64": (0xC000003E, 157, (9, 11, 12, 14, 15, 28, 56, 61, 60, 231, 202, 273, 334, 39, 186)),
    "aarch64": (0xC00000B7, 167, (222, 215, 214, 135, 139, 233, 220, 260, 93, 94, 98, 99, 293, 172, 178)),
}


def _program(machine: str) -> bytes | None:
    """Return the filter's instructions; None for a machine whose system call numbers are unknown.

    fsconfig(2) may only create a superblock, and prctl(2) may only set PR_SET_PDEATHSIG.
    """
    if machine not in _MACHINES:
        return None
    architecture, prctl, others = _MACHINES[machine]
    code = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        _REFUSE,
        (_LOAD_WORD, 0, 0, _NUMBER),
    ]
    for number in others:
        code += [(_JUMP_IF_EQUAL, 0, 1, number), _PASS]
    code += _only(_FSCONFIG, _SECOND, syscalls.FSCONFIG_CMD_CREATE, syscalls.FSCONFIG_CMD_CREATE_EXCL)
    code += _only(prctl, _FIRST, syscalls.PR_SET_PDEATHSIG)
    return b"".join(struct.pack("=HBBI", *each) for each in [*code, _REFUSE])


_PASS = (_RETURN, 0, 0, _ALLOW)
_REFUSE = (_RETURN, 0, 0, _ERRNO | EPERM)


def _only(number: int, argument: int, *values: int) -> list[tuple[int, int, int, int]]:
    """Return instructions that allow a system call if its argument is one of `values`, and refuse it otherwise."""
    code = [(_LOAD_WORD, 0, 0, argument)]
    for value in values:
        code += [(_JUMP_IF_EQUAL, 0, 1, value), _PASS]
    code.append(_REFUSE)
    return [(_JUMP_IF_EQUAL, 0, len(code), number), *code]


_PROGRAM = _program(os.uname().machine)
#: Whether there is a filter for this machine.
POSSIBLE = _PROGRAM is not None


def confine_to_creation() -> None:
    """Confine this process, and its children from birth, to creating a configured filesystem's superblock and exiting.

    Raises OSError.
    """
    assert _PROGRAM
    syscalls.seccomp_filter(_PROGRAM)
