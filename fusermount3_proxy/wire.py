"""The messages between proxy and broker: bytes and a count of descriptors in, a message out. The module does no I/O.

A message is one record of a SOCK_SEQPACKET socket: fields ``name=value``, each terminated by a NUL byte, as in
``/proc/PID/environ``. Descriptors are attached to the record that says what they are for. docs/protocol.md describes
it for authors of other clients; proxy and broker share this module.

The record layer, `pack` and `unpack`, knows no operations; on top of it are one class per message, and
`decode_request` and `decode_reply`. Every mistake of a peer raises `ProtocolError`.
"""

from _socket import CMSG_LEN, MSG_CTRUNC, MSG_TRUNC, SCM_RIGHTS, SOL_SOCKET
from errno import EBADMSG, EMSGSIZE, EOPNOTSUPP, EPROTONOSUPPORT
from sys import byteorder

# For the type checker only: `typing` is a library, and the proxy's interpreter has none.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

#: The oldest and the newest protocol version that this code implements.
OLDEST, NEWEST = 1, 1

#: The largest message, in bytes: several times an options string of a page, a path of PATH_MAX and the rest.
MAX_MESSAGE = 64 * 1024
#: The most descriptors received with one message. No message carries more than one; the extra room lets the receiver
#: count a surplus and refuse it by name.
MAX_DESCRIPTORS = 4
#: The buffer that recvmsg(2) needs for them; a C int has four bytes on Linux.
ANCILLARY_SPACE = CMSG_LEN(4 * MAX_DESCRIPTORS)
MAX_FIELDS = 32
MAX_NAME = 32

_NAME_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-")


class ProtocolError(Exception):
    """The peer sent a record that is not a message of this protocol.

    `errno` and `text` are those of the refusal.
    """

    def __init__(self, errno: int, text: str) -> None:
        super().__init__(text)
        self.errno = errno
        self.text = text


# The record layer ----------------------------------------------------------------------------------------------


def pack(fields: dict[str, bytes]) -> bytes:
    """Return the record that holds `fields`, in their order.

    Raises ProtocolError (EBADMSG, EMSGSIZE) for a record that every receiver would refuse, so that a mistake shows at
    its cause.
    """
    record = b"".join([b"%b=%b\0" % (name.encode(), value) for name, value in fields.items()])
    if unpack(record) != fields:
        raise ProtocolError(EBADMSG, "a value holds a NUL byte")
    return record


def unpack(record: bytes) -> dict[str, bytes]:
    """Return the fields of `record` by name. Raises ProtocolError (EBADMSG, EMSGSIZE)."""
    if len(record) > MAX_MESSAGE:
        raise ProtocolError(EMSGSIZE, f"message of more than {MAX_MESSAGE} bytes")
    if not record.endswith(b"\0"):
        raise ProtocolError(EBADMSG, "message does not end with a NUL byte")
    items = record[:-1].split(b"\0")
    if len(items) > MAX_FIELDS:
        raise ProtocolError(EBADMSG, f"message of more than {MAX_FIELDS} fields")
    fields: dict[str, bytes] = {}
    for item in items:
        name, equals, value = item.partition(b"=")
        if not equals or not name or len(name) > MAX_NAME or not _NAME_BYTES.issuperset(name):
            raise ProtocolError(EBADMSG, "message holds a malformed field")
        if name.decode() in fields:
            raise ProtocolError(EBADMSG, f"field '{name.decode()}' given twice")
        fields[name.decode()] = value
    return fields


def descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that recvmsg(2) delivered, as numbers of this process, in the order sent."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == SOL_SOCKET and kind == SCM_RIGHTS:
            found += [int.from_bytes(data[at : at + 4], byteorder) for at in range(0, len(data) - 3, 4)]
    return found


def check_whole(flags: int) -> None:
    """Refuse a message that recvmsg(2) truncated. `flags` are its msg_flags. Raises ProtocolError (EMSGSIZE)."""
    if flags & MSG_TRUNC:
        raise ProtocolError(EMSGSIZE, f"message of more than {MAX_MESSAGE} bytes")
    if flags & MSG_CTRUNC:
        raise ProtocolError(EMSGSIZE, "message with more file descriptors than there is room for")


# Requests ------------------------------------------------------------------------------------------------------


class MountRequest:
    """Mount a FUSE filesystem; `DESCRIPTORS` is the mountpoint, opened O_PATH by the caller.

    `mountpoint` is the caller's path of it, for messages and logs only. `options` is the argument of ``-o``. With
    `sync_init` the first reply brings the descriptor; a second reply follows `ProceedRequest` and says whether the
    filesystem is mounted.
    """

    OPERATION = "mount"
    DESCRIPTORS = 1
    __slots__ = ("mountpoint", "options", "sync_init")

    def __init__(self, mountpoint: bytes, options: bytes, sync_init: bool = False) -> None:
        self.mountpoint = mountpoint
        self.options = options
        self.sync_init = sync_init

    def fields(self) -> dict[str, bytes]:
        fields = {"mountpoint": self.mountpoint, "options": self.options}
        if self.sync_init:
            fields["sync-init"] = _BOOL[True]
        return fields

    @classmethod
    def from_fields(cls, fields: dict[str, bytes]) -> "MountRequest":
        return cls(_required(fields, "mountpoint"), fields.get("options", b""), _boolean(fields, "sync-init"))


class VolumeRequest:
    """Mount a FUSE filesystem on the volume to which this socket belongs: no descriptor, no mountpoint.

    `options` is the argument of ``-o``, and may be missing. The rest is as with `MountRequest`: the reply brings the
    descriptor, and `CommitRequest` keeps the mount.
    """

    OPERATION = "volume"
    DESCRIPTORS = 0
    __slots__ = ("options",)
    #: As in a `MountRequest`.
    mountpoint = b""
    sync_init = False

    def __init__(self, options: bytes = b"") -> None:
        self.options = options

    def fields(self) -> dict[str, bytes]:
        return {"options": self.options}

    @classmethod
    def from_fields(cls, fields: dict[str, bytes]) -> "VolumeRequest":
        return cls(fields.get("options", b""))


class UnmountRequest:
    """Unmount the filesystem on `name` in a directory; `DESCRIPTORS` is that directory, opened O_PATH.

    `name` is one path component; `lazy` requests MNT_DETACH; `mountpoint` is the path for messages and logs. With
    `only_dead` the filesystem is unmounted, lazily, only if no process serves it any more, and, where `mount` (the id
    in the reply to a mount) is given, only if it is that mount.
    """

    OPERATION = "unmount"
    DESCRIPTORS = 1
    __slots__ = ("lazy", "mount", "mountpoint", "name", "only_dead")

    def __init__(
        self, mountpoint: bytes, name: bytes, lazy: bool = False, only_dead: bool = False, mount: bytes = b""
    ) -> None:
        self.mountpoint = mountpoint
        self.name = name
        self.lazy = lazy
        self.only_dead = only_dead
        self.mount = mount

    def fields(self) -> dict[str, bytes]:
        fields = {"mountpoint": self.mountpoint, "name": self.name, "lazy": _BOOL[self.lazy]}
        if self.only_dead:
            fields["only-dead"] = _BOOL[True]
        if self.mount:
            fields["mount"] = self.mount
        return fields

    @classmethod
    def from_fields(cls, fields: dict[str, bytes]) -> "UnmountRequest":
        name = _required(fields, "name")
        if name in (b"", b".", b"..") or b"/" in name or len(name) > 255:
            raise ProtocolError(EBADMSG, "field 'name' is not one path component")
        return cls(
            _required(fields, "mountpoint"),
            name,
            _boolean(fields, "lazy"),
            _boolean(fields, "only-dead"),
            fields.get("mount", b""),
        )


class _WordRequest:
    """A request without fields other than its operation."""

    OPERATION = ""
    DESCRIPTORS = 0
    __slots__ = ()

    def fields(self) -> dict[str, bytes]:
        return {}

    @classmethod
    def from_fields(cls, _fields: dict[str, bytes]) -> "Self":
        return cls()


class ProceedRequest(_WordRequest):
    """The FUSE program is ready to serve: mount. The second message of a mount with `sync_init`."""

    OPERATION = "proceed"
    __slots__ = ()


class CommitRequest(_WordRequest):
    """The descriptor of a mount has reached the FUSE program: keep the mount.

    The last message of a socket connection, after the reply to a mount. If the connection ends without it, the mount
    is rolled back.
    """

    OPERATION = "commit"
    __slots__ = ()


class UnusedRequest(_WordRequest):
    """Report whether other pods use the filesystem of the volume to which this socket belongs: the reply has EBUSY if
    some do. It changes nothing.
    """

    OPERATION = "unused"
    __slots__ = ()
    #: As in a `MountRequest`.
    mountpoint = b""


class DeviceRequest(_WordRequest):
    """Offer a block device to volumes of other pods for as long as the connection lives: only on the socket of a volume
    that is shared.

    `DESCRIPTORS` is the device, opened by the caller for reading and, unless it is for readers only, for writing.
    """

    OPERATION = "device"
    DESCRIPTORS = 1
    __slots__ = ()
    #: As in a `MountRequest`.
    mountpoint = b""


Request = MountRequest | VolumeRequest | UnmountRequest | ProceedRequest | CommitRequest | UnusedRequest | DeviceRequest
_REQUESTS: "dict[bytes, type[Request]]" = {
    kind.OPERATION.encode(): kind
    for kind in (
        *(MountRequest, VolumeRequest, UnmountRequest, ProceedRequest, CommitRequest),
        *(UnusedRequest, DeviceRequest),
    )
}


def encode_request(request: Request) -> bytes:
    """Return the record of `request`. Raises ProtocolError (EBADMSG, EMSGSIZE)."""
    return pack(
        {
            "protocol": f"{OLDEST}-{NEWEST}".encode(),
            "operation": request.OPERATION.encode(),
            **request.fields(),
        }
    )


def decode_request(record: bytes) -> Request:
    """Return the request in `record`. The receiver of the descriptors checks whether they are the right ones.

    Raises ProtocolError: EPROTONOSUPPORT if no version in the range is supported here, EOPNOTSUPP for an unknown
    operation, EMSGSIZE and EBADMSG for the rest.
    """
    fields = unpack(record)
    _check_versions(_required(fields, "protocol"))
    operation = _required(fields, "operation")
    kind = _REQUESTS.get(operation)
    if kind is None:
        raise ProtocolError(EOPNOTSUPP, f"unknown operation '{operation[:64].decode('ascii', 'replace')}'")
    return kind.from_fields(fields)


# Replies -------------------------------------------------------------------------------------------------------


class Reply:
    """The broker's answer.

    `warnings` are lines for the user, one each; `id` is the request ID, which identifies the request in the broker's
    log. `errno` is 0 for a request that was carried out. Otherwise nothing was changed, and `text` is the message that
    the user reads after the name of the program. The reply to a successful mount brings the /dev/fuse descriptor; with
    `auto_unmount` the options asked for a watcher.
    """

    __slots__ = ("auto_unmount", "errno", "id", "text", "warnings")

    def __init__(
        self,
        id: bytes,
        errno: int = 0,
        text: bytes = b"",
        warnings: tuple[bytes, ...] = (),
        auto_unmount: bool = False,
    ) -> None:
        self.id = id
        self.errno = errno
        self.text = text
        self.warnings = warnings
        self.auto_unmount = auto_unmount


def encode_reply(reply: Reply) -> bytes:
    """Return the record of `reply`. Raises ProtocolError (EBADMSG, EMSGSIZE)."""
    fields = {"protocol": b"%d" % NEWEST, "id": reply.id, "errno": b"%d" % reply.errno}
    if reply.text:
        fields["text"] = reply.text
    if reply.warnings:
        fields["warnings"] = b"\n".join(reply.warnings)
    if reply.auto_unmount:
        fields["auto-unmount"] = _BOOL[True]
    return pack(fields)


def decode_reply(record: bytes) -> Reply:
    """Return the reply in `record`. Raises ProtocolError (EBADMSG, EMSGSIZE, EPROTONOSUPPORT)."""
    fields = unpack(record)
    _check_versions(_required(fields, "protocol"))
    warnings = fields.get("warnings", b"")
    return Reply(
        _required(fields, "id"),
        _number(_required(fields, "errno")),
        fields.get("text", b""),
        tuple(warnings.split(b"\n")) if warnings else (),
        _boolean(fields, "auto-unmount"),
    )


# Fields --------------------------------------------------------------------------------------------------------

_BOOL = (b"0", b"1")


def _required(fields: dict[str, bytes], name: str) -> bytes:
    if name not in fields:
        raise ProtocolError(EBADMSG, f"field '{name}' is missing")
    return fields[name]


def _boolean(fields: dict[str, bytes], name: str) -> bool:
    value = fields.get(name, b"0")
    if value not in _BOOL:
        raise ProtocolError(EBADMSG, f"field '{name}' is neither 0 nor 1")
    return value == b"1"


def _number(text: bytes) -> int:
    """Parse `text`, at most nine decimal digits."""
    if not text.isdigit() or len(text) > 9:
        raise ProtocolError(EBADMSG, "a number is malformed")
    return int(text)


def _check_versions(text: bytes) -> None:
    """Check that a supported version is in `text`, which is ``N`` or ``OLDEST-NEWEST``."""
    oldest, dash, newest = text.partition(b"-")
    if _number(newest if dash else oldest) < OLDEST or _number(oldest) > NEWEST:
        raise ProtocolError(
            EPROTONOSUPPORT,
            f"protocol versions {OLDEST} to {NEWEST} are supported, "
            f"the peer speaks {text[:19].decode('ascii', 'replace')}",
        )
