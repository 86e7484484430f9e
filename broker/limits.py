"""How much one caller may ask for, so that it slows nobody but itself: pure bookkeeping, the clock is passed in.

Whoever pays has an *account*. A container is one account, whatever uids are used in it, because its root may take any.
What a user has started in a session of their own is theirs, containers included, because they may start any number.
Everybody else is accounted by uid, and by the service, for many a service has root's uid. Which of these a caller is
says its cgroup, cut off where the container's own part begins: what is made below, in the container, is no new account.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from errno import EAGAIN, ENOSPC
from functools import lru_cache
from itertools import islice
from typing import NewType

from broker import cgroups
from broker.config import Configuration
from broker.options import Refusal

#: What an account is called in the log and in the table of mounts: its kind, a blank, and the kernel's name for it.
AccountName = NewType("AccountName", str)

#: The account of callers that were gone before anybody could tell whose they were. Nobody waits for their answers.
GONE = AccountName("gone")
#: More accounts than this are not kept; those that were not heard of for longest are forgotten.
MOST_ACCOUNTS = 4096
#: Of the requests of an account, those of so many seconds at the pace of the long run are served at once.
AT_ONCE = 0.25


class LimitReached(Refusal):
    """The caller has come to a limit; `limit` is its key in the configuration."""

    def __init__(self, errno: int, limit: str, what: bytes, configuration: Configuration) -> None:
        super().__init__(errno, b"%b; %b=N can be set in %b" % (what, limit.encode(), configuration.source))
        self.limit = limit


@lru_cache(256)
def account_of(cgroup: bytes, uid: int) -> AccountName:
    """Return the account of a process with this /proc/PID/cgroup (cgroups(7), of version 1 and 2) and uid."""
    paths = cgroups.paths(cgroup)
    found = (_container_or_user(path, uid) or b"" for path in paths)
    payer = next(filter(None, found), None) or b"uid %d" % uid + max(map(_unit, paths), key=len, default=b"")
    return AccountName(payer.decode("utf-8", "backslashreplace"))


def account_in_network(cookie: int) -> AccountName:
    """Return the account of a process of which only its network namespace is known, by SO_NETNS_COOKIE."""
    return AccountName(f"network {cookie}")


#: `cgroups.pod_of`, for the many calls of few callers.
pod_of = lru_cache(256)(cgroups.pod_of)


def container_of(account: AccountName) -> str:
    """Return the last part of the container's cgroup, by which its engine knows it; empty if the account is of none."""
    kind, _, path = account.partition(" ")
    return path.rpartition("/")[2] if kind == "container" else ""


def _container_or_user(path: bytes, uid: int) -> bytes | None:
    """Return the outermost of what names a container or, unless it is root who calls, a user."""
    parts = path.split(b"/")
    for number, part in enumerate(parts):
        if uid and (user := cgroups.user_of(part)) and _is_of_users(parts[:number]):
            return b"user %b" % user
        is_container = cgroups.is_container(part) or cgroups.pod_named(part)
        if is_container or (number and parts[number - 1] in cgroups.OF_CONTAINERS):
            return b"container " + b"/".join(parts[: number + 1])
    return None


def _is_of_users(parts: list[bytes]) -> bool:
    """Whether that is where systemd has a slice for each user; what a service makes in its own cgroup is not there."""
    return parts[-1:] == [b"user.slice"] and set(parts[:-1]) <= {b"", b".."}


def _unit(path: bytes) -> bytes:
    """Return " in " and the path of systemd's unit; nothing if there is none."""
    parts = path.split(b"/")
    for number, part in enumerate(parts):
        if cgroups.is_unit(part):
            return b" in " + b"/".join(parts[: number + 1])
    return b""


def whose(account: AccountName) -> bytes:
    """Return the word for the holder of an account in what a user reads."""
    return b"user" if account.startswith(("user ", "uid ")) else b"container"


@dataclass(slots=True)
class Bucket:
    """A token bucket, by how much was taken out of it and is not back yet."""

    taken: float = 0.0
    at: float = 0.0

    def level(self, per_second: int, now: float) -> float:
        """Return how many tokens are missing; `now` is in seconds of a clock that never goes back."""
        self.taken = max(0.0, self.taken - (now - self.at) * per_second)
        self.at = now
        return self.taken

    def take(self, per_second: int, burst: int, now: float) -> bool:
        """Take a token out, unless `burst` are missing already; whether one was taken."""
        if self.level(per_second, now) > burst - 1:
            return False
        self.taken += 1
        return True


@dataclass(slots=True)
class Account:
    """What one payer uses. `served` are its connections, `mounting` those of them that are about to mount."""

    name: AccountName
    served: int = 0
    mounting: int = 0
    bucket: Bucket = field(default_factory=Bucket)

    def pause(self, configuration: Configuration, now: float) -> float:
        """Return for how many seconds the request that has just come waits before it is served.

        Not at all, unless those of the last moments were more than `AT_ONCE` seconds' worth. Then it has its turn when
        it would have come at the pace of the long run.
        """
        rate = configuration.limits.requests_per_second
        return max(0.0, self.bucket.level(rate, now) / rate - AT_ONCE) if rate else 0.0


class Accounts:
    """The accounts that are in use, or have been a moment ago."""

    def __init__(self, most_served: int) -> None:
        """`most_served` is how many connections there may be of all accounts together."""
        self._most_served = most_served
        self._served = 0
        self._accounts: OrderedDict[AccountName, Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    def enter(self, name: AccountName, configuration: Configuration, now: float) -> Account:
        """Count one more connection of this account, until `leave`. Raises LimitReached."""
        account = self._account(name, configuration, now)
        limits = configuration.limits
        who = whose(name)
        if 0 < limits.concurrent <= account.served:
            what = b"too many requests at once from this %b" % who
            raise LimitReached(EAGAIN, "limits.concurrent", what, configuration)
        # Whoever takes all that can be had, leaves as much to others.
        if account.served >= self._most_served - self._served:
            raise LimitReached(EAGAIN, "max_connections", b"too many requests at once", configuration)
        rate = limits.requests_per_second
        if rate and not account.bucket.take(rate, limits.burst, now):
            what = b"too many requests per second from this %b" % who
            raise LimitReached(EAGAIN, "limits.requests_per_second", what, configuration)
        account.served += 1
        self._served += 1
        return account

    def leave(self, account: Account) -> None:
        account.served -= 1
        self._served -= 1

    def _account(self, name: AccountName, configuration: Configuration, now: float) -> Account:
        if name not in self._accounts:
            self._forget(configuration, now)
            self._accounts[name] = Account(name)
        self._accounts.move_to_end(name)
        return self._accounts[name]

    def _forget(self, configuration: Configuration, now: float) -> None:
        """Drop accounts of which nothing is to be remembered; if there are too many, also others that are not served.

        Only the two that were not heard of for longest are looked at, so no more accounts stay than come.
        """
        rate = configuration.limits.requests_per_second
        for account in list(islice(self._accounts.values(), 2)):
            if account.served or (rate and account.bucket.level(rate, now)):
                self._accounts.move_to_end(account.name)
            else:
                del self._accounts[account.name]
        if len(self._accounts) >= MOST_ACCOUNTS:
            unserved = (account.name for account in self._accounts.values() if not account.served)
            self._accounts.pop(next(unserved, GONE), None)


def check_mounts(account: Account, live: int, configuration: Configuration) -> None:
    """Raise LimitReached unless the account may have a mount more than its `live` ones.

    The errno is that of mount(2) when a mount namespace is full (fs/namespace.c, count_mounts).
    """
    if 0 < configuration.limits.mounts <= live:
        what = b"too many FUSE filesystems mounted by this %b" % whose(account.name)
        raise LimitReached(ENOSPC, "limits.mounts", what, configuration)


def too_many_operations(account: AccountName, configuration: Configuration) -> LimitReached:
    """Return the refusal of who has waited in vain for a place."""
    what = b"too many operations of this %b under way" % whose(account)
    return LimitReached(EAGAIN, "max_requests", what, configuration)


@dataclass(slots=True)
class Refused:
    """Requests of one account that were refused for the same reason; `id` is what each of their users has read."""

    account: AccountName
    reason: LimitReached
    id: str
    requests: int = 0


class Refusals:
    """Refusals that are not in the log yet: who is refused all the time must not fill it."""

    def __init__(self) -> None:
        self._refused: dict[tuple[AccountName, str], Refused] = {}

    def add(self, account: AccountName, reason: LimitReached, id: str) -> str:
        """Count a refusal, and return the id under which it will be found in the log: `id`, if it is the first."""
        refused = self._refused.setdefault((account, reason.limit), Refused(account, reason, id))
        refused.requests += 1
        return refused.id

    def take(self) -> list[Refused]:
        """Return those that have been counted since the last time."""
        taken, self._refused = list(self._refused.values()), {}
        return taken
