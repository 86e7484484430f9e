"""What all calls share: the configuration in force, the mounter, the registry, the log, and what has been counted."""

import asyncio
import os
import time
from collections import Counter
from dataclasses import dataclass, field

from prometheus_client import Histogram

from broker.config import Configuration
from broker.dismissals import Dismissals
from broker.limits import Account, Accounts, Refusals
from broker.log import Log
from broker.operations import Mounter
from broker.orders import PluginStarted
from broker.places import Places
from broker.registry import Mount, MountNamespace, Registry
from broker.states import States
from broker.volumes import Volumes

#: Upper bounds in seconds. Most mounts take a few milliseconds; the last bounds are those of the deadlines.
LATENCY_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 300.0),
)


def _latency() -> Histogram:
    name, meaning = (
        "fusermount3_broker_request_duration_seconds",
        "From a caller's connection to the end of its request.",
    )
    return Histogram(name, meaning, ["operation"], buckets=LATENCY_BUCKETS, registry=None)


@dataclass
class Front:
    """The state of the front. `configuration` may be replaced at any time: a call reads it where it needs it."""

    configuration: Configuration
    mounter: Mounter
    registry: Registry
    log: Log
    #: The root of a /proc that shows all processes, whatever that of the broker's mount namespace hides.
    proc: int
    #: Those who wait for children of the mounter that can't be killed.
    stuck: set[asyncio.Task[None]] = field(default_factory=set)
    started: float = field(default_factory=time.time)
    #: How many requests ended how, by operation and result: "mount refused". Both are words of ours, never a caller's.
    requests: Counter[str] = field(default_factory=Counter)
    #: How long they took, by operation.
    latency: Histogram = field(default_factory=_latency)
    #: How often a limit has refused something, by the limit's key in the configuration.
    limits_hit: Counter[str] = field(default_factory=Counter)
    #: What the surveys say of the mounts.
    states: States = field(default_factory=States)
    #: The f_type under the last mountpoint: the best guess for the next one.
    usual_filesystem: int = 0
    #: How many calls are about to mount.
    mounting: int = 0
    #: How many of them on a guess, in a namespace that is not known yet; of the others, how many in which namespace.
    guessing: int = 0
    mounting_in: Counter[MountNamespace] = field(default_factory=Counter)
    #: How many callers were gone when they were let in, and are not in the log yet.
    gone: int = 0
    told_foreign_pids: bool = False
    #: The volumes that kubelet has had published, and the process by which it asks; only with ``csi``.
    volumes: Volumes | None = None
    plugin: PluginStarted | None = None

    def __post_init__(self) -> None:
        #: That of the whole broker, where the targets of volumes are.
        self.mount_namespace = MountNamespace(os.stat("/proc/self/ns/mnt").st_ino)
        most = self.configuration.max_requests
        #: For what the mounter does.
        self.places = Places(most, max(1, most // 4))
        #: For those whose FUSE program may take minutes to get ready (``--sync-init``).
        self.long_places = Places(max(1, most // 4), most)
        self.accounts = Accounts(self.configuration.max_connections)
        self.refusals = Refusals()
        self.dismissals = Dismissals(self.mounter, self.log)

    def state(self, mount: Mount) -> str:
        """Return which of `MOUNT_STATES` the mount is in. What waits for its program lives, whoever waits with it."""
        if mount.awaits_program:
            return "live"
        return self.states.of(mount.connection, self.configuration.hung_seconds, time.monotonic())

    def mount_states(self) -> Counter[str]:
        """Return how many mounts there are in each state."""
        return Counter(self.state(mount) for mount in self.registry)

    def open_proc(self, path: str, flags: int) -> int:
        """Open a file of `proc`; an opener for `open`. Raises OSError."""
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=self.proc)

    def ends_guessing(self) -> None:
        self.guessing -= 1

    def ends_mounting_in(self, namespace: MountNamespace) -> None:
        self.mounting_in[namespace] -= 1
        if not self.mounting_in[namespace]:
            del self.mounting_in[namespace]

    def ends_mounting(self, account: Account) -> None:
        self.mounting -= 1
        account.mounting -= 1
