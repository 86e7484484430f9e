"""Tasks of which each volume has one at most, by its target. For use in a running event loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from fusermount3_broker.front.context import Front
from fusermount3_broker.service import log


class VolumeTasks:
    """The tasks for one purpose."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._tasks: dict[bytes, asyncio.Task[None]] = {}

    def begin(self, target: bytes, work: Coroutine[Any, Any, None]) -> None:
        """Begin the task of the volume at that target, in place of an earlier one."""
        self.forget(target)
        task = asyncio.create_task(work)
        self._tasks[target] = task
        task.add_done_callback(lambda _: self._is_over(target, task))

    def forget(self, target: bytes) -> None:
        """Cancel the task of the volume, if there is one."""
        if task := self._tasks.pop(target, None):
            task.cancel()

    def end(self) -> None:
        """Cancel all."""
        for target in list(self._tasks):
            self.forget(target)

    def __len__(self) -> int:
        return len(self._tasks)

    def _is_over(self, target: bytes, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(target) is task:
            del self._tasks[target]
        if not task.cancelled() and (error := task.exception()):
            self._front.log(log.ERROR, f"internal error: {error!r}")
