"""What the broker's processes tell each other: an input is a record that one takes from another.

What a record makes its receiver do without asking anybody is done here, too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, get_type_hints

from broker import orders, plan, policy
from broker.config import Configuration
from broker.csi import requests
from broker.csi.desk import volume_of
from broker.limits import AccountName
from broker.options import Refusal
from broker.registry import Device, Mount, MountNamespace
from fusermount3_proxy.wire import MountRequest, ProtocolError, UnmountRequest

Record = plan.Record | orders.Order | requests.Record

_KINDS: tuple[type[Record], ...] = Record.__args__
_FIELDS = sorted({name for kind in _KINDS for name in kind._fields})

WORDS = [b"kind=%b" % kind.__name__.encode() for kind in _KINDS]
WORDS += [b"\0%b=" % name.replace("_", "-").encode() for name in _FIELDS] + [b"=0\0", b"=1\0"]


def _dump(record: Record) -> bytes:
    if isinstance(record, plan.Record):
        return plan.dump(record)
    return orders.dump(record) if isinstance(record, orders.Order) else requests.dump(record)


#: A record of each kind, which the engine is to change.
_VALUES: dict[type, Any] = {int: 7, bool: True, bytes: b"value"}
SEEDS = [_dump(kind(**{name: _VALUES[hint] for name, hint in get_type_hints(kind).items()})) for kind in _KINDS]

_CONFIGURATION = Configuration()
_MOUNT = Mount(
    device=Device(7),
    connection=7,
    namespace=MountNamespace(7),
    uid=7,
    pid=7,
    command="",
    container="",
    account=AccountName("uid 7"),
    mountpoint=b"/mnt",
    type="fuse",
    source=b"",
    mounted_at=0.0,
    request="request",
)


def check(data: bytes) -> None:
    """The bytes are refused, or are a record whose fields have exactly their types; and who takes it can act on it."""
    for vocabulary, kinds in ((plan, plan.Record), (orders, orders.Order), (requests, requests.Record)):
        try:
            record: Record = vocabulary.load(data)
        except ProtocolError:
            continue
        assert type(record) in kinds.__args__
        for name, hint in get_type_hints(type(record)).items():
            value = getattr(record, name)
            assert type(value) is hint
            assert not isinstance(value, bytes) or b"\0" not in value
        dumped = _dump(record)
        assert vocabulary.load(dumped) == record
        assert _dump(vocabulary.load(dumped)) == dumped
        _act_on(record)


def _act_on(record: Record) -> None:
    for name, value in record._asdict().items():
        if name == "seconds":
            assert value < 2**32  # or alarm(2) would not take it
        if name == "errno" or name.endswith("_errno"):
            os.strerror(value)
        if type(value) is int:
            assert value < 2**64
    with suppress(Refusal):
        if isinstance(record, plan.MountFacts):
            wanted = policy.decide_mount(b"id", MountRequest(b"/mnt", b""), record, 0, _CONFIGURATION)
            assert plan.load(plan.dump(wanted)) == wanted
        if isinstance(record, plan.UnmountFacts):
            for only_dead in (False, True):
                request = UnmountRequest(b"/mnt", b"mnt", only_dead=only_dead)
                policy.decide_unmount(b"id", request, record, _MOUNT if record.mounted else None)
        if isinstance(record, requests.Publish):
            wanted = policy.decide_eager_mount(b"id", volume_of(record))
            assert plan.load(plan.dump(wanted)) == wanted
            assert wanted.read_only or not record.read_only
            assert wanted.allow_other == record.allow_other
