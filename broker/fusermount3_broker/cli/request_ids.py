"""Request IDs as somebody types them: the beginning of one is enough, if it is the beginning of one only."""

import re
from collections.abc import Iterable

_SHAPE = re.compile("[0-9a-fA-F]{1,32}")
#: Fewer digits might be those of another mount, which has come since somebody looked.
SHORTEST = 4


class InvalidIds(ValueError):
    """These are no IDs of mounts; the arguments are a message for each."""


def is_id(text: str) -> bool:
    return _SHAPE.fullmatch(text) is not None


def check(typed: Iterable[str]) -> None:
    """Raise InvalidIds unless each could be the beginning of an ID."""
    for each in typed:
        if not is_id(each):
            raise InvalidIds(f"{each!r} is no request ID, and none begins so: see fusermount3-broker mounts")
        if len(each) < SHORTEST:
            raise InvalidIds(f"'{each}' is too short: type at least {SHORTEST} digits of a request ID")


def resolve(typed: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the known IDs that begin so, each once. Raises InvalidIds unless each is the beginning of one ID."""
    found: list[str] = []
    problems = []
    for beginning in typed:
        match sorted(id for id in known if id.startswith(beginning.lower())):
            case []:
                problems.append(f"no live mount has the id '{beginning.lower()}'")
            case [id]:
                found.append(id)
            case several:
                problems.append(f"'{beginning.lower()}' is ambiguous: {', '.join(several)}")
    if problems:
        raise InvalidIds(*problems)
    return list(dict.fromkeys(found))
