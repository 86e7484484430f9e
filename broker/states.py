"""How a mount is: live, dead, or hung. Concluded from what the surveys of `watch` find; nobody is asked here.

It is hung when requests wait for its FUSE program and their number is the same at each look, for long enough. That
can't tell a program that hangs from one that is slow and takes on as many requests as it answers.
"""

from dataclasses import dataclass

#: Somebody serves the mount; nobody does; somebody does, but its requests don't move.
MOUNT_STATES = ("live", "dead", "hung")


@dataclass
class _Seen:
    """What was seen of a mount: `waiting` requests, that many since `since`; whether a process serves it."""

    waiting: int
    since: float
    served: bool


class States:
    """What is known of mounts, by the inodes of their connections. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._aborted: set[int] = set()

    def note(self, connection: int, waiting: int, served: bool, now: float) -> None:
        """Take down what a survey found."""
        before = self._seen.get(connection)
        since = before.since if before and before.waiting == waiting else now
        self._seen[connection] = _Seen(waiting, since, served)

    def note_aborted(self, connection: int) -> None:
        """Take down that nobody is served by it any more, whoever still has its descriptor."""
        self._aborted.add(connection)

    def forget_all_but(self, connections: set[int]) -> None:
        self._seen = {each: seen for each, seen in self._seen.items() if each in connections}
        self._aborted &= connections

    def is_aborted(self, connection: int) -> bool:
        return connection in self._aborted

    def is_served(self, connection: int) -> bool:
        """Whether a process serves it, for all that is known."""
        return not self.is_aborted(connection) and (connection not in self._seen or self._seen[connection].served)

    def waiting(self, connection: int) -> int:
        """Return how many requests waited when somebody looked last."""
        return self._seen[connection].waiting if connection in self._seen else 0

    def of(self, connection: int, hung_seconds: int, now: float) -> str:
        """Return which of `MOUNT_STATES` it is in; it is hung after `hung_seconds` without movement, 0: never."""
        if not self.is_served(connection):
            return "dead"
        seen = self._seen.get(connection)
        if seen and seen.waiting and 0 < hung_seconds <= now - seen.since:
            return "hung"
        return "live"
