"""The argument of ``-o`` and the decision about it: an input is an options string, a NUL byte, and bytes that choose
the caller, the mountpoint and the broker's configuration.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, get_type_hints

from fusermount3_broker.front.decisions import policy
from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mount_options, mounter, records
from fusermount3_broker.messages.mount_options import MountOptions
from fusermount3_broker.messages.mounter import MountFacts, MountPlan
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.mounter import filesystem, mounting
from fusermount3_broker.service.configuration import FILESYSTEMS, Configuration
from fusermount3_proxy import wire
from fusermount3_proxy.wire import MountRequest, Reply

_NAMES = [*mount_options._DROPPED, *mount_options._ESCAPED, *mount_options._VALUES]
WORDS = [
    b",%b," % word
    for word in (*mount_options._FLAGS, *mount_options._IGNORED, *mount_options._UNSAFE, *mount_options._PASSED_ON)
]
WORDS += [b",%b=" % name for name in _NAMES]
WORDS += [b"large_read", b"blkdev", b"allow_root", b",x-", b"\\,", b"\\\\", b"0x", b"+", b"4294967295", b"4294967296"]

SEEDS: list[bytes] = []

#: Facts that hold for most callers, where they are not 0.
_USUAL: dict[str, Any] = {"root_mode": stat.S_IFDIR, "uid": 1000, "gid": 1000, "filesystem": FILESYSTEMS["ext"]}
_NUMBERS = [
    *(0, 1, 1000, 65534, 2**32 - 1, errno.EACCES, errno.EROFS, *FILESYSTEMS.values()),
    *(stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK, stat.S_IFSOCK, stat.S_IFCHR),
]
#: By field of the facts: the values from which a byte after the options chooses.
_CHOICES: dict[str, list[Any]] = {
    name: [False, True]
    if hint is bool
    else [_USUAL.get(name, 0), *(each for each in _NUMBERS if each in records.bounds(hint))]
    for name, hint in get_type_hints(MountFacts, include_extras=True).items()
}
_CONFIGURATIONS = [
    Configuration(source=b"/etc/broker.toml", user_allow_other=user_allow_other, mount_max=mount_max)
    for mount_max in (1000, 0, -1)
    for user_allow_other in (False, True)
]
_PARAMETERS = {b"fd", b"rootmode", b"user_id", b"group_id", b"max_read", b"blksize"}
_PLAN_TYPES = get_type_hints(MountPlan)
_ALWAYS = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
_MS_ALWAYS = syscalls.MS_NOSUID | syscalls.MS_NODEV
_MS_POSSIBLE = (
    _MS_ALWAYS
    | syscalls.MS_RDONLY
    | syscalls.MS_SYNCHRONOUS
    | syscalls.MS_DIRSYNC
    | syscalls.MS_LAZYTIME
    | syscalls.MS_NOEXEC
    | syscalls.MS_NODIRATIME
    | syscalls.MS_NOSYMFOLLOW
    | syscalls.MS_STRICTATIME
    | syscalls.MS_NOATIME
)
#: Length to which `call` cuts the text of a refusal, so that a reply has room for the rest.
_LONGEST_TEXT = 16 * 1024


def check(data: bytes) -> None:
    """Check that a caller gets a readable refusal, or a plan with what it may have and nothing else."""
    text, _, choices = data.partition(b"\0")
    chosen = iter(choices)
    facts = _facts(chosen)
    configuration = _CONFIGURATIONS[next(chosen, 0) % len(_CONFIGURATIONS)]
    request = MountRequest(b"/mnt", text, sync_init=bool(next(chosen, 0) & 1))
    try:
        wanted = policy.decide_mount(b"id", request, facts, 0, configuration)
    except Refusal as refusal:
        assert 0 < refusal.errno < 4096
        assert refusal.text
        _check_reply(Reply(b"id", refusal.errno, refusal.text[:_LONGEST_TEXT], refusal.warnings))
        return
    assert wanted.sync_init == request.sync_init
    assert wanted.request_id == b"id"
    assert not wanted.allow_other or facts.uid == 0 or configuration.user_allow_other
    assert facts.filesystem in configuration.mountpoint_filesystems
    if facts.uid != 0:
        assert not facts.access_errno
        assert not stat.S_ISDIR(facts.root_mode) or not (facts.search_errno or facts.foreign_sticky)
    _check_reply(Reply(b"id", warnings=tuple(wanted.warnings.splitlines()), auto_unmount=wanted.auto_unmount))
    _check_plan(wanted, facts)
    _check_what_the_kernel_gets(wanted)
    _check_read_again(text)


def _facts(chosen: Iterator[int]) -> MountFacts:
    return MountFacts(**{name: values[next(chosen, 0) % len(values)] for name, values in _CHOICES.items()})


def _check_reply(reply: Reply) -> None:
    read = wire.decode_reply(wire.encode_reply(reply))
    assert (read.errno, read.text, read.warnings) == (reply.errno, reply.text, reply.warnings)


def _check_plan(wanted: MountPlan, facts: MountFacts) -> None:
    """Check that the mounter accepts the plan, for that caller and that mountpoint."""
    for name, hint in _PLAN_TYPES.items():
        assert type(getattr(wanted, name)) is hint, name
    assert mounter.load(mounter.dump(wanted)) == wanted
    assert mounting.is_decided_on(wanted, facts)
    assert (wanted.uid, wanted.gid) == (facts.uid, facts.gid)


def _check_what_the_kernel_gets(wanted: MountPlan) -> None:
    """Check that the parameters, passed one by one or in a string, are ours to pass, and safe."""
    parameters = filesystem._parameters(wanted, 4)
    flags = filesystem._flags(wanted)
    assert {name for name, _ in parameters} <= _PARAMETERS
    data = b",".join([b"%b=%b" % each for each in parameters] + flags)
    assert data.split(b",") == [b"%b=%b" % each for each in parameters] + flags
    given = dict(parameters)
    assert (given[b"fd"], given[b"user_id"], given[b"group_id"]) == (b"4", b"%d" % wanted.uid, b"%d" % wanted.gid)
    assert mount_options.is_number(given.get(b"max_read", b"0"))
    assert wanted.source
    assert filesystem._attributes(wanted) & _ALWAYS == _ALWAYS
    assert filesystem._mount_flags(wanted) & _MS_ALWAYS == _MS_ALWAYS
    assert not filesystem._mount_flags(wanted) & ~_MS_POSSIBLE


def _check_read_again(text: bytes) -> None:
    """Check that the parsed options, written as libfuse writes them, are parsed to the same options again."""
    wanted = _parse(text)
    written = _written(wanted)
    if b",x-" not in written:  # split off before escapes are parsed, as in fusermount3
        assert asdict(_parse(written)) == asdict(wanted) | {"warnings": ()}


def _parse(text: bytes) -> MountOptions:
    return mount_options.parse(text, may_allow_other=True, where_allowed=b"", kernel=b"6.18")


def _written(wanted: MountOptions) -> bytes:
    words = {attribute: word for word, (attribute, wished) in mount_options._FLAGS.items() if wished}
    words |= {attribute: name for name, attribute in mount_options._VALUES.items()}
    items = []
    for attribute, value in asdict(wanted).items():
        name = words.get(attribute, attribute.encode())
        if value is True:
            items.append(name)
        elif isinstance(value, bytes):
            escaped = value.replace(b"\\", b"\\\\").replace(b",", b"\\,")
            items.append(b"%b=%b" % (name, escaped if name in mount_options._ESCAPED else value))
    return b",".join(items)
