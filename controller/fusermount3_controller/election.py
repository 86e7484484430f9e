"""Which replica leads, by a Lease (coordination.k8s.io/v1) as client-go writes it. Pure.

Whoever leads writes into the Lease again and again. Others measure with a clock of their own how long it stays as it
is: no two clocks are compared, so it does not matter what time of day a node believes in.
"""

import datetime
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

#: Seconds for which a Lease counts that is not renewed.
DURATION = 15.0
#: Seconds after a renewal until its holder stops, unless there is another one: earlier than others begin.
DEADLINE = 10.0
#: Seconds between looks at the Lease.
RETRY = 2.0

#: Of one that nobody holds any more, in seconds; the API server takes no 0.
_ENDED = 1


class Lease(NamedTuple):
    """What a Lease says; `holder`: empty, if nobody holds it. `renewed`: a text that differs after each renewal."""

    version: str
    holder: str = ""
    seconds: float = DURATION
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0


class Move(enum.Enum):
    """What a replica does about a Lease."""

    RENEW = enum.auto()
    TAKE = enum.auto()
    WAIT = enum.auto()


def parse(manifest: Mapping[str, Any]) -> Lease:
    metadata, spec = manifest["metadata"], manifest.get("spec") or {}
    return Lease(
        metadata["resourceVersion"],
        spec.get("holderIdentity") or "",
        float(spec.get("leaseDurationSeconds") or DURATION),
        spec.get("acquireTime") or "",
        spec.get("renewTime") or "",
        spec.get("leaseTransitions") or 0,
    )


def is_same_term(one: Lease, other: Lease) -> bool:
    """Return whether nobody has renewed or taken the Lease from one look to the other."""
    return one._replace(version="") == other._replace(version="")


def move(lease: Lease, identity: str, unchanged: float) -> Move:
    """Return what this replica does; `unchanged`: seconds for which it has seen the Lease as it is."""
    if lease.holder == identity:
        return Move.RENEW
    return Move.TAKE if not lease.holder or unchanged >= lease.seconds else Move.WAIT


def held(lease: Lease, identity: str, now: datetime.datetime) -> dict[str, Any]:
    """Return the merge patch by which this replica holds the Lease; the API server refuses it if it has changed."""
    renewed = now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    is_new = lease.holder != identity
    spec = {
        "holderIdentity": identity,
        "leaseDurationSeconds": int(DURATION),
        "acquireTime": renewed if is_new else lease.acquired or None,
        "renewTime": renewed,
        "leaseTransitions": lease.transitions + is_new,
    }
    return {"metadata": {"resourceVersion": lease.version}, "spec": spec}


def released(lease: Lease) -> dict[str, Any]:
    """Return the merge patch by which its holder gives the Lease up."""
    spec = {"holderIdentity": "", "leaseDurationSeconds": _ENDED}
    return {"metadata": {"resourceVersion": lease.version}, "spec": spec}
