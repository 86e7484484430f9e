"""Recognizing mounts of an earlier broker that fusectl does not show, with a fake mounter and a fake fusectl."""

from __future__ import annotations

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from fusermount3_broker.front.model import Device
from fusermount3_broker.front.mounter_client import MounterFailed, Operation
from fusermount3_broker.front.restore import recognize
from fusermount3_broker.front.tables.mount_table import Registry
from fusermount3_broker.messages import mounter as messages
from fusermount3_broker.service.configuration import Configuration
from tests.unit.fakes import FakeFusectl
from tests.unit.front.tables.test_mount_table import mount

if TYPE_CHECKING:
    from pathlib import Path


class FakeMounter:
    """Answers each operation with the same record, or those about a volume with another; if that is None, the child
    ends without an answer."""

    def __init__(
        self, answer: messages.Record | MounterFailed | None, at_volume: messages.Record | None = None
    ) -> None:
        self.answer = answer
        self.at_volume = at_volume
        self.asked: list[messages.Start] = []

    async def begin(self, start: messages.Start, _descriptors: list[int]) -> Operation:
        self.asked.append(start)
        answer = self.at_volume if isinstance(start, messages.StartRecognizeVolume) else self.answer
        if isinstance(answer, MounterFailed):
            raise answer
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if answer is not None:
                theirs.send(messages.dump(answer))
        return Operation(ours, start.seconds)


@pytest.mark.parametrize(
    ("answer", "live", "undecided"),
    [
        (messages.Recognized(b"1\n"), [1], []),
        (messages.Recognized(b""), [], []),
        (messages.NobodyThere(), [], []),
        (messages.Failed(3, b"join"), [], [1, 2]),
        (messages.Failed(1, b"join"), [], [1, 2]),
        (None, [], [1, 2]),
        (MounterFailed("busy"), [], [1, 2]),
    ],
    ids=["one is there", "none is there", "nobody is there", "somebody has ended", "not let in", "ended", "no mounter"],
)
def test_only_who_has_an_answer_of_the_fake_mounter_forgets_a_mount(
    answer: messages.Record | MounterFailed | None, live: list[int], undecided: list[int], tmp_path: Path
) -> None:
    fusectl = FakeFusectl(tmp_path / "fusectl")
    registry = Registry(tmp_path / "state", fusectl.descriptor)
    for device in (1, 2):
        registry.add(mount(device, fusectl.connect(device), mount_id=1000 + device))
        fusectl.reconnect(device)
    registry.close()
    registry = Registry(tmp_path / "state", fusectl.descriptor)
    mounter = FakeMounter(answer)
    said: list[dict[str, Any]] = []
    front: Any = SimpleNamespace(
        registry=registry,
        mounter=mounter,
        configuration=Configuration(),
        log=lambda *_, **fields: said.append(fields),
    )
    asyncio.run(recognize(front))
    assert mounter.asked == [messages.StartRecognize(Configuration().deadlines.operation, 7, b"1 1001\n2 1002\n")]
    assert [each.device for each in registry] == live
    counts = {"recognized": len(live), "gone": 2 - len(live) - len(undecided), "undecided": len(undecided)}
    assert said == ([counts] if live or undecided else []), "their numbers are others' now, that is all"
    registry.close()
    registry = Registry(tmp_path / "state", fusectl.descriptor)
    assert ([each.device for each in registry], sorted(registry.unsure)) == (live, [Device(each) for each in undecided])
    registry.close()
    os.close(fusectl.descriptor)


@pytest.mark.parametrize(
    ("at_volume", "live", "undecided"),
    [
        (messages.Recognized(b"1\n"), [1], []),
        (messages.Recognized(b""), [], []),
        (messages.Failed(5, b"look"), [], [1]),
        (None, [], [1]),
    ],
    ids=["there", "not there", "failed", "ended"],
)
def test_the_filesystem_of_a_volume_may_be_left_at_the_target_only(
    at_volume: messages.Record | None, live: list[int], undecided: list[int], tmp_path: Path
) -> None:
    """With a fake mounter. Nobody is left in the mount namespace where it was mounted."""
    fusectl = FakeFusectl(tmp_path / "fusectl")
    registry = Registry(tmp_path / "state", fusectl.descriptor)
    registry.add(mount(1, fusectl.connect(1), mount_id=1001, mountpoint=b"", volume=b"pods/p/v"))
    fusectl.reconnect(1)
    registry.close()
    registry = Registry(tmp_path / "state", fusectl.descriptor)
    mounter = FakeMounter(messages.NobodyThere(), at_volume)
    front: Any = SimpleNamespace(
        registry=registry, mounter=mounter, configuration=Configuration(), log=lambda *_, **__: None
    )
    asyncio.run(recognize(front))
    seconds = Configuration().deadlines.operation
    in_namespace = [] if live or undecided else [messages.StartRecognize(seconds, 7, b"1 1001\n")]
    assert mounter.asked == [
        messages.StartRecognizeVolume(seconds, b"pods/p/v", 1, b"fuse.sshfs", b"host:\xff", False),
        *in_namespace,
    ]
    assert [each.device for each in registry] == live
    assert list(registry.unsure) == undecided
    registry.close()
    os.close(fusectl.descriptor)
