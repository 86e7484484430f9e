"""The messages between the broker's processes: an input is a record that one process receives from another.

The check also does what a receiver does on a record without asking another process.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, get_type_hints

from fusermount3_broker.front.csi_requests import volume_of
from fusermount3_broker.front.decisions import policy
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.model import Device, Mount, MountNamespace
from fusermount3_broker.messages import csi, mounter
from fusermount3_broker.messages import supervisor as orders
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service.configuration import Configuration
from fusermount3_proxy.wire import MountRequest, ProtocolError, UnmountRequest

Record = mounter.Record | orders.Order | csi.Record

_KINDS: tuple[type[Record], ...] = Record.__args__
_FIELDS = sorted({name for kind in _KINDS for name in kind._fields})

WORDS = [b"kind=%b" % kind.__name__.encode() for kind in _KINDS]
WORDS += [b"\0%b=" % name.replace("_", "-").encode() for name in _FIELDS] + [b"=0\0", b"=1\0"]


def _dump(record: Record) -> bytes:
    if isinstance(record, mounter.Record):
        return mounter.dump(record)
    return orders.dump(record) if isinstance(record, orders.Order) else csi.dump(record)


#: A record of each kind, for the engine to mutate.
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
    request_id="request",
)


def check(data: bytes) -> None:
    """Check that the bytes are refused, or are a record of exactly typed fields that its receiver can act on."""
    for vocabulary, kinds in ((mounter, mounter.Record), (orders, orders.Order), (csi, csi.Record)):
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
            assert value < 2**32  # alarm(2) accepts no more
        if name == "errno" or name.endswith("_errno"):
            os.strerror(value)
        if type(value) is int:
            assert value < 2**64
    with suppress(Refusal):
        if isinstance(record, mounter.MountFacts):
            wanted = policy.decide_mount(b"id", MountRequest(b"/mnt", b""), record, 0, _CONFIGURATION)
            assert mounter.load(mounter.dump(wanted)) == wanted
        if isinstance(record, mounter.UnmountFacts):
            for only_dead in (False, True):
                request = UnmountRequest(b"/mnt", b"mnt", only_dead=only_dead)
                policy.decide_unmount(b"id", request, record, _MOUNT if record.mounted else None)
        if isinstance(record, csi.Publish):
            wanted = policy.decide_eager_mount(b"id", volume_of(record))
            assert mounter.load(mounter.dump(wanted)) == wanted
            assert wanted.read_only or not record.read_only
            assert wanted.allow_other == (record.allow_other or record.share != b"")
