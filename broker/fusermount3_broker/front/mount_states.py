"""The state of a mount: live, dead, or hung, from the findings of `mount_watch` and `dead_mounts`. This module asks no
other process.

A mount is dead if its connection has ended: the filesystem has said so, or the broker has aborted it. Without such
evidence it is not dead: a mount whose serving process can't be determined is live.

A mount is hung when requests wait for its FUSE program and their number is the same at each look, for long enough. This
can't distinguish a program that hangs from a slow one that accepts as many requests as it answers.
"""

from collections import OrderedDict
from dataclasses import dataclass

from fusermount3_broker.front.model import Mount, MountNamespace

#: In this order: nothing else is known; the connection has ended; it has not, but its requests don't move.
MOUNT_STATES = ("live", "dead", "hung")
#: Seconds for which the owner's own unmount of a mount that the broker has unmounted as dead still succeeds.
LATE = 60.0
#: The most such mounts that are remembered.
MOST_LATE = 4096


@dataclass(slots=True)
class _Seen:
    """The last look at a mount: `waiting` requests, the same number since `since`."""

    waiting: int
    since: float


class States:
    """The states of mounts, by the inodes of their connections. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._dead: set[int] = set()
        #: When the broker unmounted dead mounts: by mount namespace, owner and mountpoint, the oldest first.
        self._unmounted: OrderedDict[tuple[MountNamespace, int, bytes], float] = OrderedDict()

    def note(self, connection: int, waiting: int, now: float) -> None:
        """Record how many requests waited at a look."""
        before = self._seen.get(connection)
        since = before.since if before and before.waiting == waiting else now
        self._seen[connection] = _Seen(waiting, since)

    def note_dead(self, connection: int) -> None:
        """Record that the connection has ended: it serves no requests any more, whichever process still has its
        descriptor."""
        self._dead.add(connection)

    def note_unmounting(self, mount: Mount, now: float) -> None:
        """Record that the broker unmounts this mount, if it is dead, where its owner has mounted it."""
        self._unmounted[_place(mount)] = now
        self._unmounted.move_to_end(_place(mount))
        if len(self._unmounted) > MOST_LATE:
            self._unmounted.popitem(last=False)

    def note_not_unmounted(self, mount: Mount) -> None:
        """Record that it was not dead, or could not be unmounted."""
        self._unmounted.pop(_place(mount), None)

    def was_unmounted(self, namespace: MountNamespace, uid: int, mountpoint: bytes, now: float) -> bool:
        """Return whether the broker has unmounted a dead mount of this owner there, not longer than `LATE` ago; once.

        A FUSE program (libfuse) first closes its descriptor, and then unmounts. If something delays that second step,
        the mount is dead for long enough to be unmounted before.
        """
        unmounted = self._unmounted.pop((namespace, uid, mountpoint), None)
        return unmounted is not None and now <= unmounted + LATE

    def forget_all_but(self, connections: set[int]) -> None:
        self._seen = {each: seen for each, seen in self._seen.items() if each in connections}
        self._dead &= connections

    def is_dead(self, connection: int) -> bool:
        return connection in self._dead

    def knows(self, connection: int) -> bool:
        """Whether its waiting requests have been counted."""
        return connection in self._seen

    def waiting(self, connection: int) -> int:
        """Return how many requests waited at the last look."""
        return self._seen[connection].waiting if connection in self._seen else 0

    def of(self, connection: int, hung_seconds: int, now: float) -> str:
        """Return one of `MOUNT_STATES`: hung after `hung_seconds` without movement (0: never)."""
        if self.is_dead(connection):
            return "dead"
        seen = self._seen.get(connection)
        if seen and seen.waiting and 0 < hung_seconds <= now - seen.since:
            return "hung"
        return "live"


def _place(mount: Mount) -> tuple[MountNamespace, int, bytes]:
    return mount.namespace, mount.uid, mount.mountpoint
