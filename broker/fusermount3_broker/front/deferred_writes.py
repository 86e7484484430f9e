"""Deferred and failed writes to the tables, retried each second.

If a table can't be written, because the disk is full, for example, the log says so once, and once more when it can be
written again.
"""

import asyncio

from fusermount3_broker.front.context import Front
from fusermount3_broker.front.tables.database import Table
from fusermount3_broker.service import log

#: Seconds between two attempts.
PAUSE = 1.0


class DeferredWrites:
    """Carries out deferred and failed writes to the tables of the front while `run` runs."""

    def __init__(self, front: Front) -> None:
        self._front = front
        #: The last state of each table in the log: its problem, and where a damaged file was put aside.
        self._told: dict[str, tuple[str, str | None]] = {table.name: ("", None) for table in front.tables}

    async def run(self) -> None:
        while True:
            try:
                self.look()
            except Exception as error:
                self._front.log(log.ERROR, f"internal error: {error!r}")
            await asyncio.sleep(PAUSE)

    def look(self) -> None:
        """Write deferred and failed rows, and log changes."""
        for table in self._front.tables:
            if self._told[table.name][0]:  # not before the problem is in the log
                table.retry()
            else:
                table.write_deferred()
            self._tell(table)

    def _tell(self, table: Table) -> None:
        problem, lost = self._told[table.name]
        self._told[table.name] = table.problem, table.lost
        if table.lost and table.lost != lost:
            text = f"the table of {table.name} was damaged; the damaged part was moved aside: {table.lost}"
            self._front.log(log.ERROR, text)
        if table.problem and not problem:
            self._front.log(log.ERROR, f"{table.problem}; until it can, requests that need it are refused")
        elif problem and not table.problem:
            self._front.log(log.NOTICE, f"the broker writes its table of {table.name} again")
