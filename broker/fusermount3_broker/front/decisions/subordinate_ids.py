"""The owners of subordinate uids: /etc/subuid assigns users ranges of uids for use in their user namespaces.

A process can also have such a uid outside of these namespaces, through a setuid file that was made inside. So the owner
of the process follows from its uid, not from its namespace; and no other file, nor the kernel, gives the owner of a uid
(subuid(5)).

Pure functions: the supervisor passes on the contents of the files, and the front parses them.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

#: The most ranges that are read.
MOST_RANGES = 65536
#: The most digits of a uid, or of a count of uids.
_DIGITS = 10


class _Range(NamedTuple):
    """The uids from `first` to `last`, and their owner."""

    first: int
    last: int
    owner: bytes


@dataclass(frozen=True, eq=False)
class Subordinates:
    """The ranges of all users, without overlaps, sorted by first uid. Instances never compare equal, for caches."""

    ranges: tuple[_Range, ...] = ()
    _firsts: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_firsts", tuple(each.first for each in self.ranges))

    def owner(self, uid: int) -> bytes:
        """Return the account, in the form of `limits`, of the user to whom this uid is assigned, or an empty string."""
        at = bisect_right(self._firsts, uid) - 1
        return self.ranges[at].owner if at >= 0 and uid <= self.ranges[at].last else b""


def parse(subuid: bytes, passwd: bytes) -> Subordinates:
    """Return the ranges of an /etc/subuid. A user whose uid is not in this /etc/passwd is identified by name.

    Invalid lines are skipped, as by the tools of login.defs(5). Where ranges overlap, the one with the lower first uid
    takes precedence, or the earlier one in the file.
    """
    uids = _uids(passwd)
    found: list[_Range] = []
    for line in subuid.split(b"\n")[: MOST_RANGES + 1]:
        name, *numbers = line.split(b":")
        if not name or len(numbers) != 2 or not all(map(_is_number, numbers)):
            continue
        first, count = map(int, numbers)
        if count:
            found.append(_Range(first, first + count - 1, _owner(name, uids)))
    return Subordinates(_apart(found))


def _owner(name: bytes, uids: dict[bytes, bytes]) -> bytes:
    """Return the account of the user with that name, or number. Ranges assigned to root don't belong to root's account:
    a container that is not recognized as one may use them."""
    uid = name if _is_number(name) else uids.get(name, b"")
    return b"uid %d" % int(uid) if uid and int(uid) else b"subuid %b" % name


def _uids(passwd: bytes) -> dict[bytes, bytes]:
    """Return the uids in an /etc/passwd by name."""
    entries = (line.split(b":") for line in passwd.split(b"\n"))
    return {entry[0]: entry[2] for entry in entries if len(entry) > 2 and _is_number(entry[2])}


def _apart(ranges: list[_Range]) -> tuple[_Range, ...]:
    """Return the ranges sorted by first uid, each without the uids of another range."""
    found: list[_Range] = []
    for each in sorted(ranges, key=lambda each: each.first):
        first = max(each.first, found[-1].last + 1) if found else each.first
        if first <= each.last:
            found.append(each._replace(first=first))
    return tuple(found)


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) <= _DIGITS
