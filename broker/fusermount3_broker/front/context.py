"""The state that all calls share: the current configuration, the mounter, the registry, the log, and counters."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import Histogram

from fusermount3_broker.front.connection_closing import ConnectionCloser
from fusermount3_broker.front.decisions.limits import Account, Accounts, Refusals
from fusermount3_broker.front.decisions.subordinate_ids import Subordinates
from fusermount3_broker.front.model import Mount, MountNamespace
from fusermount3_broker.front.mount_states import States
from fusermount3_broker.front.mounter_client import Mounter
from fusermount3_broker.front.serving_processes import Serving
from fusermount3_broker.front.slots import Slots
from fusermount3_broker.front.tables.database import Table
from fusermount3_broker.front.tables.mount_table import Registry
from fusermount3_broker.front.tables.volume_table import Volumes
from fusermount3_broker.kernel.features import Feature
from fusermount3_broker.messages import log_sentences, mounter
from fusermount3_broker.messages.supervisor import PluginStarted
from fusermount3_broker.service import log
from fusermount3_broker.service.configuration import Configuration
from fusermount3_broker.service.log import Log

#: Upper bounds in seconds. Most mounts take a few milliseconds; the last bounds are for the deadlines.
LATENCY_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 300.0),
)
#: The most concurrent children, of all accounts, that check whether FUSE connections hang, and that close ended socket
#: connections. The mounter has room for them and for the administrator's operations (`mounter.daemon`).
RESCUES, DISMISSALS = 16, 12


def _latency() -> Histogram:
    name, meaning = (
        "fusermount3_broker_request_duration_seconds",
        "From a caller's connection to the end of its request.",
    )
    return Histogram(name, meaning, ["operation"], buckets=LATENCY_BUCKETS, registry=None)


#: Why FUSE programs see no pids.
_HIDDEN_PIDS = {
    mounter.PIDS_FOREIGN: "this broker can't join the pid namespaces of its callers. Run it with hostPID, or "
    "--pid=host, if they need pids.",
    mounter.PIDS_TRACED: "the container may trace processes (CAP_SYS_PTRACE), and could take over the process of the "
    "broker that enters its pid namespace. Take this capability from it if they need pids.",
}


@dataclass
class Front:
    """The state of the front. `configuration` may be replaced at any time: calls read it each time they need it."""

    configuration: Configuration
    mounter: Mounter
    registry: Registry
    log: Log
    #: Descriptor of a /proc that shows all processes, even those that /proc in the broker's mount namespace hides.
    proc: int
    #: The owners of subordinate uids.
    subordinates: Subordinates = field(default_factory=Subordinates)
    #: What this kernel lacks.
    lacking: Sequence[Feature] = ()
    #: The addresses of the listening sockets, by who connects there.
    sockets: dict[str, list[str]] = field(default_factory=dict)
    #: What it means that the broker may not use a feature that the kernel has (`features.withheld`); usually "".
    withheld: str = ""
    #: Tasks that wait for children of the mounter that can't be killed.
    stuck: set[asyncio.Task[None]] = field(default_factory=set)
    started: float = field(default_factory=time.monotonic)
    #: Number of requests by operation and result ("mount refused"). Both words are the broker's, never a caller's.
    requests: Counter[str] = field(default_factory=Counter)
    #: Duration of requests, by operation.
    latency: Histogram = field(default_factory=_latency)
    #: Number of refusals by each limit, under the limit's key in the configuration.
    limits_hit: Counter[str] = field(default_factory=Counter)
    #: Results of the surveys of FUSE connections.
    states: States = field(default_factory=States)
    #: The f_type of the filesystem under the last mountpoint: the best guess for the next one.
    usual_filesystem: int = 0
    #: Number of calls that are about to mount.
    mounting: int = 0
    #: Number of these that mount on a guess, in a namespace not known yet; number of the others in each namespace.
    guessing: int = 0
    mounting_in: Counter[MountNamespace] = field(default_factory=Counter)
    #: Number of callers that were gone before they were admitted and are not in the log yet.
    gone: int = 0
    #: The reasons in the log for which FUSE programs see no pids.
    told_pids: set[int] = field(default_factory=set)
    #: The volumes published for kubelet, and the CSI plugin's process; only with ``csi``.
    volumes: Volumes | None = None
    plugin: PluginStarted | None = None
    #: The namespaces of Kubernetes whose pods may offer their filesystems to all pods.
    mount_namespaces: frozenset[bytes] = frozenset()
    #: For each borrower, by its target: the connection of the filesystem that it has.
    borrowed: dict[bytes, int] = field(default_factory=dict)
    #: Called with the key under which a filesystem was offered that is dead now.
    shared_died: Callable[[bytes], None] = lambda _: None

    def __post_init__(self) -> None:
        #: The mount namespace of the whole broker, which contains the targets of volumes.
        self.mount_namespace = MountNamespace(os.stat("/proc/self/ns/mnt").st_ino)
        most = self.configuration.max_requests
        #: For the mounter's operations.
        self.slots = Slots(most, max(1, most // 4))
        #: For calls whose FUSE program may take minutes to get ready (``--sync-init``).
        self.long_slots = Slots(max(1, most // 2), max(1, most // 8))
        #: For checks whether a FUSE connection hangs; these are the broker's own operations (`mounter_client`).
        self.rescue_slots = Slots(RESCUES, RESCUES)
        self.accounts = Accounts(self.configuration.max_connections)
        self.refusals = Refusals()
        self.serving = Serving(self.open_proc)
        #: Separate from the slots of operations: socket connections must be closed even while operations hang.
        self.dismissal_slots = Slots(DISMISSALS, 1)
        self.closer = ConnectionCloser(self.mounter, self.dismissal_slots, self.log)

    @property
    def tables(self) -> list[Table]:
        """The tables that survive restarts."""
        return [self.registry.table, *([self.volumes.table] if self.volumes is not None else [])]

    def state(self, mount: Mount) -> str:
        """Return the one of `MOUNT_STATES` that the mount is in.

        A mount that awaits its FUSE program is live, even if other processes wait with it.
        """
        if mount.awaits_program:
            return "live"
        return self.states.of(mount.connection, self.configuration.hung_seconds, time.monotonic())

    def is_live(self, mount: Mount) -> bool:
        """Return whether the mount's filesystem still exists, and is not known to be dead."""
        known = self.registry.find(mount.device)
        is_same = known is not None and known.connection == mount.connection
        return is_same and not self.states.is_dead(mount.connection)

    def mount_states(self) -> Counter[str]:
        """Return the number of mounts in each state."""
        return Counter(self.state(mount) for mount in self.registry)

    def children(self) -> dict[str, int]:
        """Return how many children of the mounter carry out operations, and how many hang after their end."""
        slots = self.slots, self.dismissal_slots
        stuck = sum(each.stuck(self.configuration.deadlines.operation + 1) for each in slots)
        return {"working": sum(each.in_use for each in slots) - stuck, "stuck": stuck}

    def open_proc(self, path: str, flags: int) -> int:
        """Open a file of `proc`; an opener for `open`. Raises OSError."""
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=self.proc)

    def tell_hidden_pids(self, pids: int, container: str) -> None:
        """Log, once for each reason (`mounter.PIDS`), that a FUSE program does not see the pids of the processes that
        use its filesystem. `container` is the first one that is concerned."""
        if pids in _HIDDEN_PIDS and pids not in self.told_pids:
            self.told_pids.add(pids)
            first = log_sentences.in_words(container) if container else "one that this broker can't see"
            told = f"FUSE programs see pid 0 in requests, first one in {first}: {_HIDDEN_PIDS[pids]}"
            self.log(log.WARNING, told, container=container)

    def ends_guessing(self) -> None:
        self.guessing -= 1

    def ends_mounting_in(self, namespace: MountNamespace) -> None:
        self.mounting_in[namespace] -= 1
        if not self.mounting_in[namespace]:
            del self.mounting_in[namespace]

    def ends_mounting(self, account: Account) -> None:
        self.mounting -= 1
        account.mounting -= 1
