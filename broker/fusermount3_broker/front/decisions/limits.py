"""Limits for each account, so that a caller slows down only itself: pure bookkeeping; the clock is passed in.

Each caller is charged to an *account*. A container is one account, whatever uids are used in it, because its root may
take any. Processes that a user has started in their own session belong to that user's account, containers included,
because the user may start any number of them. All other callers are accounted by uid and by service, because many
services run as root; a subordinate uid belongs to its user's account. The caller's cgroup determines which of these
applies. It is cut off where the container's own part begins: cgroups that are made below it, in the container, are not
new accounts.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from errno import EAGAIN, ENOSPC
from functools import lru_cache
from itertools import islice
from typing import NewType

from fusermount3_broker.front.decisions.subordinate_ids import Subordinates
from fusermount3_broker.kernel import cgroups
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service.configuration import Configuration

#: The name of an account in the log and in the table of mounts: its kind, a space, and the kernel's name for it.
AccountName = NewType("AccountName", str)

#: The account of callers that were gone before their account could be determined. No caller waits for these answers.
GONE = AccountName("gone")
#: The account of operations of an earlier front that have not ended: their accounts are unknown.
LEFT = AccountName("left")
#: The most accounts to keep; beyond this, the ones that were inactive longest are forgotten.
MOST_ACCOUNTS = 4096
#: Requests of an account worth this many seconds at the long-run rate are served at once.
AT_ONCE = 0.25


class LimitReached(Refusal):
    """The caller has reached a limit; `limit` is its key in the configuration."""

    def __init__(self, errno: int, limit: str, what: bytes, configuration: Configuration) -> None:
        super().__init__(errno, b"%b; %b=N can be set in %b" % (what, limit.encode(), configuration.source))
        self.limit = limit


#: For machines without subordinate uids.
NONE_SUBORDINATE = Subordinates()


@lru_cache(256)
def account_of(cgroup: bytes, uid: int, subordinates: Subordinates = NONE_SUBORDINATE) -> AccountName:
    """Return the account of a process with this /proc/PID/cgroup (cgroups(7), versions 1 and 2) and uid."""
    paths = cgroups.paths(cgroup)
    found = (_container_or_user(path, uid) or b"" for path in paths)
    payer = next(filter(None, found), None)
    if payer is None:
        payer = (subordinates.owner(uid) or b"uid %d" % uid) + max(map(_unit, paths), key=len, default=b"")
    return AccountName(payer.decode("utf-8", "backslashreplace"))


def account_in_network(cookie: int) -> AccountName:
    """Return the account of a process of which only the network namespace is known, by SO_NETNS_COOKIE."""
    return AccountName(f"network {cookie}")


#: `cgroups.pod_of`, cached: a few callers make many calls.
pod_of = lru_cache(256)(cgroups.pod_of)


def container_of(account: AccountName) -> str:
    """Return the last part of the container's cgroup, by which its engine knows it; empty if the account is not a
    container's."""
    kind, _, path = account.partition(" ")
    return path.rpartition("/")[2] if kind == "container" else ""


def _container_or_user(path: bytes, uid: int) -> bytes | None:
    """Return the outermost part that names a container or, unless the caller is root, a user."""
    parts = path.split(b"/")
    for number, part in enumerate(parts):
        if uid and (user := cgroups.user_of(part)) and _has_user_slices(parts[:number]):
            return b"user %b" % user
        is_container = cgroups.is_container(part) or cgroups.pod_named(part)
        if is_container or (number and parts[number - 1] in cgroups.OF_CONTAINERS):
            return b"container " + b"/".join(parts[: number + 1])
    return None


def _has_user_slices(parts: list[bytes]) -> bool:
    """Whether systemd keeps the users' slices at this path; cgroups that a service makes in its own cgroup don't
    count."""
    return parts[-1:] == [b"user.slice"] and set(parts[:-1]) <= {b"", b".."}


def _unit(path: bytes) -> bytes:
    """Return " in " and the path of the systemd unit, or nothing if there is none."""
    parts = path.split(b"/")
    for number, part in enumerate(parts):
        if cgroups.is_unit(part):
            return b" in " + b"/".join(parts[: number + 1])
    return b""


def kind_of_holder(account: AccountName) -> bytes:
    """Return the noun for the holder of an account, for messages to users."""
    return b"user" if account.startswith(("user ", "uid ", "subuid ")) else b"container"


@dataclass(slots=True)
class Bucket:
    """A token bucket, stored as the number of tokens taken out and not yet replaced."""

    taken: float = 0.0
    at: float = 0.0

    def level(self, per_second: int, now: float) -> float:
        """Return how many tokens are missing; `now` is in seconds of a monotonic clock."""
        self.taken = max(0.0, self.taken - (now - self.at) * per_second)
        self.at = now
        return self.taken

    def take(self, per_second: int, burst: int, now: float) -> bool:
        """Take a token out, unless `burst` are missing already; return whether one was taken."""
        if self.level(per_second, now) > burst - 1:
            return False
        self.taken += 1
        return True


@dataclass(slots=True)
class Account:
    """The usage of one account. `served` counts its connections, `mounting` those of them that are about to mount."""

    name: AccountName
    served: int = 0
    mounting: int = 0
    bucket: Bucket = field(default_factory=Bucket)

    def pause(self, configuration: Configuration, now: float) -> float:
        """Return how many seconds the request that has just come must wait before it is served.

        It doesn't wait unless the requests of the last moments were more than `AT_ONCE` seconds' worth. Then it waits
        until it would have come at the long-run rate.
        """
        rate = configuration.limits.requests_per_second
        return max(0.0, self.bucket.level(rate, now) / rate - AT_ONCE) if rate else 0.0


class Accounts:
    """The accounts that are in use, or were a moment ago."""

    def __init__(self, most_served: int) -> None:
        """`most_served` is the limit on connections of all accounts together."""
        self._most_served = most_served
        self._served = 0
        self._accounts: OrderedDict[AccountName, Account] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    def enter(self, name: AccountName, configuration: Configuration, now: float) -> Account:
        """Count one more connection of this account, until `leave`. Raises LimitReached."""
        account = self._account(name, configuration, now)
        limits = configuration.limits
        who = kind_of_holder(name)
        if 0 < limits.concurrent <= account.served:
            what = b"too many requests at once from this %b" % who
            raise LimitReached(EAGAIN, "limits.concurrent", what, configuration)
        # An account that takes all it can get leaves as much to others.
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
        """Drop accounts without state worth keeping; if there are too many, also others that are not served.

        Only the two accounts that were inactive longest are examined, more than the one account that is added each
        time.
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
    """Raise LimitReached unless the account may have one more mount than its `live` ones.

    The errno is the one of mount(2) when a mount namespace is full (fs/namespace.c, count_mounts).
    """
    if 0 < configuration.limits.mounts <= live:
        what = b"too many FUSE filesystems mounted by this %b" % kind_of_holder(account.name)
        raise LimitReached(ENOSPC, "limits.mounts", what, configuration)


def too_many_operations(account: AccountName, configuration: Configuration) -> LimitReached:
    """Return the refusal for a caller that has waited in vain for a slot."""
    what = b"too many operations of this %b under way" % kind_of_holder(account)
    return LimitReached(EAGAIN, "max_requests", what, configuration)


@dataclass(slots=True)
class Refused:
    """Requests of one account that were refused for the same reason; `id` is the request ID that each of their users
    has read."""

    account: AccountName
    reason: LimitReached
    id: str
    requests: int = 0


class Refusals:
    """Refusals that are not in the log yet: a caller that is refused all the time must not fill it."""

    def __init__(self) -> None:
        self._refused: dict[tuple[AccountName, str], Refused] = {}

    def add(self, account: AccountName, reason: LimitReached, id: str) -> str:
        """Count a refusal, and return its request ID in the log: `id`, if it is the first."""
        refused = self._refused.setdefault((account, reason.limit), Refused(account, reason, id))
        refused.requests += 1
        return refused.id

    def take(self) -> list[Refused]:
        """Return the refusals counted since the last call."""
        taken, self._refused = list(self._refused.values()), {}
        return taken
