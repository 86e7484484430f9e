"""Execute a command to which the kernel denies system calls, as container engines do: ``python denied.py``.

The first argument lists the calls, as NUMBER=ERRNO with commas between them; the others are the command. The numbers
are those of system calls that all architectures count alike, which this machine's libseccomp may be too old to name.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from fusermount3_broker.service import sandbox

if TYPE_CHECKING:
    from pathlib import Path

FSOPEN, STATMOUNT, LISTMOUNT = 430, 457, 458


def denying(error: int, *calls: int) -> tuple[str | Path, ...]:
    """Return the beginning of a command that runs the rest of it with these calls failing with `error`."""
    return (sys.executable, __file__, ",".join(f"{call}={error}" for call in calls))


def main(calls: str, *command: str) -> None:
    seccomp = vars(sandbox)["seccomp"]  # of either package
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    for call, _, error in (each.partition("=") for each in calls.split(",")):
        rules.add_rule(seccomp.ERRNO(int(error)), int(call))
    rules.load()
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
