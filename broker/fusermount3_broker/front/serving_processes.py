"""The processes that serve mounts, and the mounts whose serving process is still to be found.

When a mount is made, the front assumes that the parent of the fusermount3 process serves it: that is usually the FUSE
program. A pidfd reports the end of that process, so no looks are needed while it lives; `dead_mounts` then finds which
of its children serves the mount from then on, if any. Until that is known, a mount is *suspect*, which does not mean
that it is dead.

A pidfd gives its holder only the notice that the process has ended: the front can open one for any process, and may
send no signal (`sandbox`).
"""

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field

from fusermount3_broker.front.model import Device, Mount, MountNamespace
from fusermount3_broker.front.peer import OpenProc, parent_of

#: Seconds for which a mount must have been without a process before it counts as abandoned: libfuse closes its
#: descriptor first and then requests the unmount, and that request must not find the mount gone.
MOMENT = 1.0
#: The descriptor of a process that is only assumed to serve a mount.
NOT_SEEN = -1


@dataclass(slots=True)
class Suspect:
    """A mount whose serving process is unknown. Times are monotonic seconds.

    It is looked at when it is `due`. It has been without a process since `since`, if that is known. `candidates` are
    processes that may serve it. `namespace` is where the filesystem is asked next. `tries` counts how often it was
    found neither served nor dead. `was_served`: the process that served it, or was assumed to, does so no more.
    `needs_tombstone`: it is a volume's, and may be dead at the target.
    """

    mount: Mount
    due: float
    since: float | None
    namespace: MountNamespace
    candidates: tuple[int, ...] = ()
    tries: int = 0
    was_served: bool = False
    needs_tombstone: bool = False


@dataclass(slots=True, eq=False)
class _Server:
    """A process that serves mounts. `pidfd` is -1 if no more pidfds may be opened. The process is `doubted` from when
    it has stopped serving one of its mounts until it has been looked at again."""

    pid: int
    pidfd: int
    doubted: bool = False
    devices: set[Device] = field(default_factory=set)


@dataclass(slots=True)
class _Service:
    """The process that serves a mount, and its descriptor."""

    mount: Mount
    server: _Server
    descriptor: int


class Serving:
    """The known processes that serve the mounts. For use in a running event loop."""

    def __init__(self, open_proc: OpenProc) -> None:
        self._open_proc = open_proc
        #: The most pidfds. A process without one is only looked at from time to time.
        self.most_pidfds = 1 << 20
        #: How many processes have none.
        self.without_pidfd = 0
        self.suspects: dict[Device, Suspect] = {}
        #: Set when there are new suspects.
        self.news = asyncio.Event()
        #: Mounts that were found to be served before the front had a pidfd of the process: the pid may have been
        #: another process's.
        self.unconfirmed: dict[Device, None] = {}
        self._servers: dict[int, _Server] = {}
        self._services: dict[Device, _Service] = {}

    def close(self) -> None:
        """Forget everything."""
        for server in list(self._servers.values()):
            self._close(server)
        for table in (self._services, self.suspects, self.unconfirmed):
            table.clear()

    def added(self, mount: Mount) -> None:
        """Add a mount."""
        self.forget(mount.device)
        if mount.pid:
            self.suspect(mount, time.monotonic() + MOMENT)

    def find_candidates(self, mount: Mount) -> None:
        """Look which processes may serve a mount that has just been added.

        Its caller, if the broker sees it, is waiting for the result at this moment.
        """
        suspect = self.suspects.get(mount.device)
        if suspect is None or suspect.mount is not mount:  # it is gone, or the broker does not see the caller
            return
        parent = parent_of(mount.pid, self._open_proc)
        suspect.candidates = tuple(each for each in (parent, mount.pid) if each > 1)
        for pid in suspect.candidates[:1]:  # until the mount is looked at, this process's end is the event to wait for
            with suppress(OSError):
                self._connect(mount, pid, NOT_SEEN)

    def dropped(self, mount: Mount) -> None:
        """Forget a mount that is gone."""
        self.forget(mount.device)

    def suspect(self, mount: Mount, due: float, since: float | None = None, candidates: tuple[int, ...] = ()) -> None:
        """Mark the mount as suspect: request a search for the process that serves it."""
        known = self.suspects.get(mount.device)
        if known and known.mount.connection == mount.connection:
            known.due = min(known.due, due)
            known.was_served = known.was_served or since is not None
            known.since = since if known.since is None else known.since
            known.candidates = known.candidates or candidates
        else:
            was_served = since is not None
            self.suspects[mount.device] = Suspect(mount, due, since, mount.namespace, candidates, was_served=was_served)
        self.news.set()

    def found(self, mount: Mount, pid: int, descriptor: int) -> None:
        """Record that the process serves the mount with that descriptor."""
        was_known = pid in self._servers
        try:
            self._connect(mount, pid, descriptor)
        except OSError:  # it has ended meanwhile
            self.lost(mount)
            return
        self._servers[pid].doubted = False
        self.suspects.pop(mount.device, None)
        if not was_known:
            self.unconfirmed[mount.device] = None

    def lost(self, mount: Mount) -> None:
        """Record that the process has stopped serving the mount. The process's other mounts become suspect, too."""
        now = time.monotonic()
        service = self._services.get(mount.device)
        if service and not service.server.doubted:
            service.server.doubted = True
            for device in service.server.devices:
                self.suspect(self._services[device].mount, now, candidates=(service.server.pid,))
        self._disconnect(mount.device)
        self.suspect(mount, now + MOMENT, since=now)

    def forget(self, device: Device) -> None:
        self.suspects.pop(device, None)
        self._disconnect(device)

    def of(self, mount: Mount) -> tuple[int, int]:
        """Return the process that serves the mount, and its descriptor, if a child has seen that; else 0, 0."""
        service = self._services.get(mount.device)
        if service is None or service.descriptor == NOT_SEEN or service.mount.connection != mount.connection:
            return 0, 0
        return service.server.pid, service.descriptor

    def devices(self) -> set[Device]:
        """Return the mounts with any entry here."""
        return self._services.keys() | self.suspects.keys()

    def _connect(self, mount: Mount, pid: int, descriptor: int) -> None:
        """Raises OSError if there is no such process."""
        server = self._servers.get(pid) or self._open(pid)
        before = self._services.get(mount.device)
        self._services[mount.device] = _Service(mount, server, descriptor)
        server.devices.add(mount.device)
        if before and before.server is not server:
            self._leave(before.server, mount.device)

    def _disconnect(self, device: Device) -> None:
        self.unconfirmed.pop(device, None)
        if service := self._services.pop(device, None):
            self._leave(service.server, device)

    def _leave(self, server: _Server, device: Device) -> None:
        server.devices.discard(device)
        if not server.devices:
            self._close(server)

    def _open(self, pid: int) -> _Server:
        """Raises OSError."""
        server = _Server(pid, os.pidfd_open(pid) if len(self._servers) < self.most_pidfds else -1)
        if server.pidfd >= 0:
            asyncio.get_running_loop().add_reader(server.pidfd, self._ended, server)
        else:
            self.without_pidfd += 1
        self._servers[pid] = server
        return server

    def _close(self, server: _Server) -> None:
        if self._servers.get(server.pid) is server:
            del self._servers[server.pid]
            if server.pidfd >= 0:
                asyncio.get_running_loop().remove_reader(server.pidfd)
                os.close(server.pidfd)
            else:
                self.without_pidfd -= 1

    def _ended(self, server: _Server) -> None:
        """Make the mounts of a process that has ended suspect: they are another process's, or dead."""
        self._close(server)
        now = time.monotonic()
        for device in list(server.devices):
            mount = self._services[device].mount
            self._disconnect(device)
            self.suspect(mount, now + MOMENT, since=now)
