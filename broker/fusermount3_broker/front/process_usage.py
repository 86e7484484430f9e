"""Memory and processor time of the broker's processes, of which the exported `process_` metrics describe one only."""

import os
from collections.abc import Iterator
from typing import NamedTuple

from fusermount3_broker.front.context import Front

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """`resident`: bytes. `seconds`: processor time; that of the mounter has that of its children that have ended."""

    process: str
    resident: int
    seconds: float


def of_processes(front: Front) -> Iterator[Usage]:
    """Yield what each process of the broker uses; nothing of one that is being restarted."""
    pids = {"supervisor": os.getppid(), "front": os.getpid(), "mounter": front.mounter.pid}
    if front.plugin:
        pids["plugin"] = front.plugin.pid
    for name, pid in pids.items():
        try:
            with open(f"{pid}/stat", "rb", opener=front.open_proc) as file:
                # The name is in parentheses, and may itself contain parentheses (proc_pid_stat(5)).
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        # The supervisor's children are the other processes: it would get all of their time when it restarts one.
        ticks = sum(map(int, fields[11 : 15 if name == "mounter" else 13]))
        yield Usage(name, int(fields[21]) * _PAGE, ticks / _TICKS)
