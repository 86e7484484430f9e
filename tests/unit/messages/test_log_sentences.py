"""The sentences of the log: each event says who, where and why, and callers' words can't break a line."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fusermount3_broker.front.metrics import REQUESTS
from fusermount3_broker.messages import log_sentences
from fusermount3_broker.messages.log_sentences import LONGEST, Value, sentence

BROKER = Path(__file__).parents[3] / "broker/fusermount3_broker"
ID = "9ea7f6a7f41c" + "0" * 52
POD = "0d7e3a1c-1f2b-4c3d-9e8f-112233445566"
CALLER: dict[str, Value] = {"caller_uid": 1000, "caller_container": f"libpod-{ID}.scope", "request_id": "3f6c0e52"}
VOLUME: dict[str, Value] = {"target": b"pods/x/mount", "volume": b"csi-1", "pod": POD}
#: Reasons for which a mount was not kept.
NOT_TAKEN, COVERED = "the caller did not take the mount", "it is covered, or its guardian was killed"

SAID: list[tuple[str, dict[str, Value], str]] = [
    (
        "mount refused",
        {**CALLER, "mountpoint": b"/proc/tty", "errno": 1, "text": b"mounting over it is forbidden"},
        "refused to mount on /proc/tty for uid 1000 in container 9ea7f6a7f41c: mounting over it is forbidden"
        " (request 3f6c0e52)",
    ),
    (
        "mount mounted",
        {**CALLER, "mountpoint": b"/mnt", "type": "fuse.sshfs", "source": b"server:", "device": 45},
        "mounted fuse.sshfs on /mnt for uid 1000 in container 9ea7f6a7f41c (request 3f6c0e52)",
    ),
    (
        "volume mounted",
        {
            **CALLER,
            **VOLUME,
            "mountpoint": b"/mnt",
            "type": "fuse.sshfs",
            "caller_container": f"kubepods-pod{POD}.slice",
        },
        f"mounted fuse.sshfs on /mnt and on volume csi-1 of pod {POD} for uid 1000 in pod {POD} (request 3f6c0e52)",
    ),
    (
        "volume refused",
        {**CALLER, **VOLUME, "mountpoint": b"", "text": b"no"},
        f"refused to mount on volume csi-1 of pod {POD} for uid 1000 in container 9ea7f6a7f41c: no (request 3f6c0e52)",
    ),
    (
        "device offered",
        {**CALLER, **VOLUME, "device": "7:0", "size": 4096},
        f"uid 1000 in container 9ea7f6a7f41c offers the device 7:0 for volume csi-1 of pod {POD} (request 3f6c0e52)",
    ),
    (
        "device refused",
        {**CALLER, **VOLUME, "text": b"too small"},
        f"refused the device that uid 1000 in container 9ea7f6a7f41c offers for volume csi-1 of pod {POD}: too small"
        " (request 3f6c0e52)",
    ),
    (
        "device caller went away",
        {**CALLER, **VOLUME},
        f"took no device for volume csi-1 of pod {POD}: uid 1000 in container 9ea7f6a7f41c went away"
        " (request 3f6c0e52)",
    ),
    (
        "device ended: the broker stops",
        {**CALLER, **VOLUME},
        f"took no device for volume csi-1 of pod {POD} from uid 1000 in container 9ea7f6a7f41c: the broker stops"
        " (request 3f6c0e52)",
    ),
    (
        f"mount rolled back: {NOT_TAKEN}",
        {**CALLER, "mountpoint": b"/mnt"},
        f"undid the mount on /mnt for uid 1000 in container 9ea7f6a7f41c: {NOT_TAKEN} (request 3f6c0e52)",
    ),
    (
        f"mount not rolled back: {COVERED}",
        {**CALLER, "mountpoint": b"/mnt", "device": 45},
        f"could not undo the mount on /mnt for uid 1000 in container 9ea7f6a7f41c: {COVERED} (request 3f6c0e52)",
    ),
    (
        "mount caller went away",
        {**CALLER, "mountpoint": b"/mnt"},
        "did not mount on /mnt: uid 1000 in container 9ea7f6a7f41c went away (request 3f6c0e52)",
    ),
    (
        "unmount unmounted",
        {"caller_uid": 0, "caller_container": "session-2.scope", "mountpoint": b"/mnt", "request_id": "3f6c0e52"},
        "unmounted /mnt for uid 0 in session-2.scope (request 3f6c0e52)",
    ),
    (
        "unmount unmounted: it was dead, and is gone already",
        {"caller_uid": 0, "caller_container": "", "mountpoint": b"/mnt"},
        "unmounted /mnt for uid 0: it was dead, and is gone already",
    ),
    (
        "unmount ended: the broker stops",
        {**CALLER, "mountpoint": b"/mnt"},
        "did not unmount /mnt for uid 1000 in container 9ea7f6a7f41c: the broker stops (request 3f6c0e52)",
    ),
    (
        "request refused",
        {"request_id": "3f6c0e52", "text": b"the broker can't identify its caller", "errno": 24},
        "refused a request of an unknown caller: the broker can't identify its caller (request 3f6c0e52)",
    ),
    (
        "request caller went away",
        {"caller_uid": 7, "caller_container": "a for uid 0: all is well.scope"},
        "uid 7 in 'a for uid 0: all is well.scope' went away before it said what it wanted",
    ),
    ("request ended: the broker stops", {"caller_uid": 7}, "did not hear out uid 7: the broker stops"),
    (
        "requests refused",
        {"requests": 160, "account": f"container /machine.slice/libpod-{ID}.scope", "text": b"too many", "limit": "x"},
        "refused 160 requests of container 9ea7f6a7f41c: too many",
    ),
    (
        "requests refused",
        {"requests": 2, "account": "uid 0 in /system.slice/a.service", "text": b"too many"},
        "refused 2 requests of uid 0 in /system.slice/a.service: too many",
    ),
    (
        "callers went away before they were admitted",
        {"requests": 3},
        "3 callers went away before they were admitted",
    ),
    (
        "unmounted a dead mount: its program is gone",
        {"request_id": "3f6c0e52", "mountpoint": b"/mnt", "caller_container": f"docker-{ID}.scope", "device": 45},
        "unmounted the dead mount on /mnt in container 9ea7f6a7f41c: its program is gone (request 3f6c0e52)",
    ),
    (
        "a volume has the filesystem of its mount pod again",
        VOLUME,
        f"volume csi-1 of pod {POD} has the filesystem of its mount pod again",
    ),
    (
        "can't give a volume the filesystem of its mount pod",
        {**VOLUME, "text": b"no"},
        f"can't give volume csi-1 of pod {POD} the filesystem of its mount pod: no",
    ),
    (
        "put a tombstone in the place of a dead mount: its program is gone",
        {
            "request_id": "3f6c0e52",
            "mountpoint": b"",
            "target": b"pods/1/mount",
            "caller_container": f"docker-{ID}.scope",
        },
        "put a tombstone in the place of the dead mount of the volume at pods/1/mount in container 9ea7f6a7f41c: its "
        "program is gone (request 3f6c0e52)",
    ),
    (
        "aborted a FUSE connection: an administrator asked for it",
        {"request_id": "3f6c0e52", "mountpoint": b"/mnt", "caller_container": "", "device": 45},
        "aborted the FUSE connection of the mount on /mnt: an administrator asked for it (request 3f6c0e52)",
    ),
    ("publish published", VOLUME, f"published volume csi-1 of pod {POD}"),
    ("publish refused", {**VOLUME, "text": b"no"}, f"refused to publish volume csi-1 of pod {POD}: no"),
    ("unpublish nothing there", {"target": b"pods/x/mount"}, "found nothing to unpublish at pods/x/mount"),
    (
        "stat given up by kubelet",
        {"volume": "csi-1", "target": "pods/x/mount"},
        "kubelet no longer waits for the broker to stat volume csi-1",
    ),
    (
        "can't remove an incomplete volume",
        {**VOLUME, "text": b"remove the target: Device or resource busy"},
        f"can't remove what was made of volume csi-1 of pod {POD}: remove the target: Device or resource busy",
    ),
]


@pytest.mark.parametrize(("event", "fields", "said"), SAID, ids=[event for event, *_ in SAID])
def test_an_event_is_understood_without_its_fields(event: str, fields: dict[str, Value], said: str) -> None:
    assert sentence(event, fields) == said


def test_every_result_that_is_counted_and_logged_has_a_sentence() -> None:
    of_mounts = {"reap unmounted", "reap replaced", "abort aborted"}  # their events have other names
    results = {f"{operation} {result}" for operation, each in REQUESTS for result in each} - of_mounts
    assert {each for each in results if sentence(each, {}) is None} == {"publish unchanged"}, "which is not logged"


def test_every_event_with_fields_has_a_sentence() -> None:
    """A message without one is a sentence already, so it is not one fixed text with fields beside it."""
    found = []
    for module in BROKER.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="log" | "_log") | ast.Name(id="write_log"),
                    args=[_, ast.Constant(value=str() as event)],
                    keywords=[_, *_],
                ):
                    found.append(event)
    assert len(found) >= 3
    assert [event for event in found if sentence(event, {}) is None] == []


def test_a_message_that_is_a_sentence_stays_what_it_is() -> None:
    assert sentence("the mounter has ended with status -9, another is started", {}) is None


HOSTILE = ["\n", "\r\n2026-11-23 18:27:13 info    all is well", "\x1b[2J", "\0", "\x85", "\u2028", "\u202e", "\udcff"]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
@pytest.mark.parametrize("event", [*log_sentences._SENTENCES, "mount rolled back: why"])
def test_a_sentence_is_one_line_of_printable_text(event: str, text: str) -> None:
    names = ("mountpoint", "text", "type", "caller_container", "target", "volume", "pod", "account", "requests")
    said = sentence(event, dict.fromkeys((*names, "request_id"), f"a{text}b"))
    assert said
    assert said.isprintable()


@pytest.mark.parametrize("value", ["x", "\0", "\N{GRINNING FACE}", "'", "\\"], ids=ascii)
@pytest.mark.parametrize("event", log_sentences._SENTENCES)
def test_a_sentence_is_of_bounded_length_and_keeps_its_parts(event: str, value: str) -> None:
    names = ("mountpoint", "text", "type", "caller_container", "target", "volume", "pod", "account")
    long = dict.fromkeys(names, value * 65536)
    said = sentence(event, {**long, "caller_uid": 1000, "request_id": "3f6c0e52"})
    assert said
    assert len(said) <= LONGEST
    assert said.endswith(" (request 3f6c0e52)"), "no value takes the space of the others"


@pytest.mark.parametrize(
    ("mountpoint", "quoted"),
    [
        (b"/mnt for uid 0: all is well", "'/mnt for uid 0: all is well'"),
        (b"/it's", r"'/it\'s'"),
        (b"/a\nb", r"'/a\nb'"),
        (b"/a\\nb", r"'/a\\nb'"),
        (rb"/\' for uid 0: \'", r"'/\\\' for uid 0: \\\''"),
        (b"/(mnt)", "'/(mnt)'"),
        ("/\u2019".encode(), "'/\u2019'"),
        (b"/a@%+=:,./_-1", "/a@%+=:,./_-1"),
        (b"/\xff", r"'/\\xff'"),
        (b"", "''"),
        ("/m\u00a0nt".encode(), r"'/m\xa0nt'"),
        ("/mü".encode(), "'/mü'"),
    ],
)
def test_a_mountpoint_is_told_from_the_words_around_it(mountpoint: bytes, quoted: str) -> None:
    assert sentence("mount refused", {"mountpoint": mountpoint, "text": b"no", "caller_uid": 0}) == (
        f"refused to mount on {quoted} for uid 0: no"
    )
