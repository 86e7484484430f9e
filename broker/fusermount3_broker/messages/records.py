"""Typed records on a socket: how the processes of the broker communicate.

No process trusts another, nor its own parser: it loads a record only if it has exactly the fields of its class, each of
the right type and within bounds. Records are encoded as in the wire protocol.
"""

from collections.abc import Iterable
from errno import EBADMSG
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

from fusermount3_proxy.wire import ProtocolError, pack, unpack

#: The numbers that any system call and SQLite take.
_NUMBERS = range(2**63)

RecordT = TypeVar("RecordT", bound=NamedTuple)


class Vocabulary(Generic[RecordT]):
    """The records of one kind of conversation: named tuples whose fields are int, bool or bytes."""

    def __init__(self, kinds: Iterable[type[RecordT]]) -> None:
        self._kinds = {kind.__name__.encode(): kind for kind in kinds}
        self._types = {kind: get_type_hints(kind, include_extras=True) for kind in self._kinds.values()}

    def dump(self, record: RecordT) -> bytes:
        """Return `record` encoded. Raises ProtocolError for a value out of bounds."""
        fields = {"kind": type(record).__name__.encode()}
        for name, value in record._asdict().items():
            fields[name.replace("_", "-")] = value if isinstance(value, bytes) else b"%d" % value
        return pack(fields)

    def load(self, data: bytes) -> RecordT:
        """Return the record in `data`. Raises ProtocolError unless it has exactly the fields of its kind."""
        fields = {name.replace("-", "_"): value for name, value in unpack(data).items()}
        kind: Any = self._kinds.get(fields.pop("kind", b""))
        if kind is None or fields.keys() != self._types[kind].keys():
            raise ProtocolError(EBADMSG, "malformed record")
        types = self._types[kind]
        record: RecordT = kind(**{name: _value(types[name], text) for name, text in fields.items()})
        return record


def _value(kind: Any, text: bytes) -> int | bytes | bool:
    if kind is bytes:
        return text
    if kind is bool and text in (b"0", b"1"):
        return text == b"1"
    if kind is not bool and text.isdigit() and len(text) <= 20:
        number = int(text)
        if number in bounds(kind):
            return number
    raise ProtocolError(EBADMSG, "malformed value")


def bounds(kind: Any) -> range:
    """Return the range of a number of this type: ``int``, or one that is annotated with a range."""
    (numbers,) = getattr(kind, "__metadata__", (_NUMBERS,))
    assert isinstance(numbers, range)
    return numbers
