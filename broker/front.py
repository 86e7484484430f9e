"""What all calls share: the configuration in force, the mounter, the registry, the log, and what has been counted."""

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass, field

from broker.config import Configuration
from broker.health import Health
from broker.log import Log
from broker.operations import Mounter
from broker.registry import Registry


@dataclass
class Front:
    """The state of the front. `configuration` may be replaced at any time: a call reads it where it needs it."""

    configuration: Configuration
    mounter: Mounter
    registry: Registry
    log: Log
    #: The root of a /proc that shows all processes, whatever that of the broker's mount namespace hides.
    proc: int
    #: What the surveys say of the mounts.
    health: Health = field(default_factory=Health)
    #: Those who wait for children of the mounter that can't be killed.
    stuck: set[asyncio.Task[None]] = field(default_factory=set)
    started: float = field(default_factory=time.time)
    #: How many requests ended how, by operation and result.
    requests: Counter[str] = field(default_factory=Counter)
    #: The f_type under the last mountpoint: the best guess for the next one.
    usual_filesystem: int = 0
    #: How many calls are about to mount.
    mounting: int = 0
    #: How many of them have a FUSE program that may take minutes to get ready (``--sync-init``).
    getting_ready: int = 0
    told_foreign_pids: bool = False

    def open_proc(self, path: str, flags: int) -> int:
        """Open a file of `proc`; an opener for `open`. Raises OSError."""
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=self.proc)

    def ends_mounting(self) -> None:
        self.mounting -= 1

    def is_ready(self) -> None:
        self.getting_ready -= 1
