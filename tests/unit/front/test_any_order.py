"""The front, whatever callers and children do, in any order, also at the same time.

The front's own code serves real sockets. Hypothesis plays all other parties: callers, the mounter's children, the
kernel's table of connections, the operator, and the clock, which advances only when Hypothesis says so.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import selectors
import socket
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusermount3_broker.front.context import Front
from fusermount3_broker.front.model import Device
from fusermount3_broker.front.mounter_client import Mounter, MounterFailed, Operation
from fusermount3_broker.front.server import Server
from fusermount3_broker.front.tables.mount_table import Registry
from fusermount3_broker.messages import mounter
from fusermount3_broker.messages.mounter import MountFacts, MountPlan, Record, UnmountFacts
from fusermount3_broker.mounter.mounting import is_decided_on
from fusermount3_broker.service.configuration import FILESYSTEMS, Configuration, Deadlines, Limits
from fusermount3_proxy import wire
from fusermount3_proxy.wire import CommitRequest, MountRequest, ProceedRequest, ProtocolError, UnmountRequest
from tests.unit.fakes import FakeFusectl, all_descriptors

T = TypeVar("T")

NAMESPACE = 7
NO_DEVICE = 99
MOST_CALLS = 6
#: One account gets a quarter of them, and all callers here are one account; so some have to wait.
MOST_REQUESTS = 4 * (MOST_CALLS - 2)
#: No limit here depends on the clock: requests are counted by the machine's clock.
NO_LIMITS = Limits(mounts=0, requests_per_second=0, concurrent=0)
DEADLINES = (
    Deadlines(request=5, operation=5, unmount=1, commit=10, sync_init=20),
    Deadlines(request=1, operation=1, unmount=1, commit=1, sync_init=1),
)
#: Seconds after which every call is over, whatever the other parties do or omit: the sum of all its waits.
LONGEST_CALL = 5 + 2 * (2 * 5) + 2 * (5 + 1) + 20 + (20 + 1) + 10 + 2 * (5 + 1) + 5
#: Seconds after which the broker has ended once it was told to stop: two steps of the mounter and a commit.
LONGEST_STOP = 2 * 5 + 10

#: Every log message that records a call begins with one of these, and no other message does.
CALLS = ("request ", "mount ", "unmount ")

FACTS = MountFacts(
    uid=1000,
    gid=1000,
    root_mode=stat.S_IFDIR,
    foreign_sticky=False,
    filesystem=FILESYSTEMS["ext"],
    search_errno=0,
    access_errno=0,
    mount_namespace=NAMESPACE,
)
facts = st.sampled_from(
    [FACTS, FACTS, FACTS._replace(uid=0), FACTS._replace(filesystem=1), FACTS._replace(access_errno=errno.EACCES)]
)


def a_record_of(kind: type[Record]) -> Record:
    values: dict[type, Any] = {int: 7, bool: True, bytes: b"x"}
    return kind(**{name: values[hint] for name, hint in get_type_hints(kind).items()})


#: Records that a child may send at the wrong time, and data that it must never send.
CHILDS_WORDS = {
    **{kind.__name__: mounter.dump(a_record_of(kind)) for kind in Record.__args__},
    "garbage": b"garbage",
    "nothing": b"",
    "too much": b"x" * 70_000,
}
CALLERS_WORDS = {
    "commit": wire.encode_request(CommitRequest()),
    "proceed": wire.encode_request(ProceedRequest()),
    "garbage": b"garbage",
    "nothing": b"",
    "too much": b"x" * 70_000,
}
configurations = st.builds(
    Configuration,
    mount_max=st.sampled_from([1000, 1000, 1, -1]),
    max_requests=st.just(MOST_REQUESTS),
    deadlines=st.sampled_from(DEADLINES),
    limits=st.sampled_from([NO_LIMITS, NO_LIMITS, replace(NO_LIMITS, mounts=1), replace(NO_LIMITS, concurrent=2)]),
)


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time advances only in `pass_time`; it runs until no task can do more at that time."""

    def __init__(self) -> None:
        super().__init__(_Selector(self.stop))
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        self.run_forever()

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.settle()


class _Selector(selectors.DefaultSelector):
    def __init__(self, when_idle: Callable[[], None]) -> None:
        super().__init__()
        self._when_idle = when_idle

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout != 0:
            self._when_idle()
        return events


class Caller:
    """A caller with its own connection; its `number` is also the name of its mountpoint."""

    def __init__(self, path: Path, number: int, now: float) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(bytes(path))
        self.socket.setblocking(False)
        self.number = number
        self.connected_at = now
        self.proceeded = self.committed = self.hung_up = self.ended = False
        self.spoken = False
        self.replies = 0

    def say(self, record: bytes, descriptors: int = 0) -> None:
        self.spoken = True
        self.committed |= record == CALLERS_WORDS["commit"]
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.socket, [record], [0] * descriptors)

    def ask(self, request: MountRequest | UnmountRequest, descriptors: int = 1) -> None:
        self.say(wire.encode_request(request), descriptors)

    def proceed(self) -> None:
        self.proceeded = True
        self.say(CALLERS_WORDS["proceed"])

    def commit(self) -> None:
        self.say(CALLERS_WORDS["commit"])

    def hang_up(self) -> None:
        self.hung_up = True
        self.socket.close()

    def read(self) -> None:
        """Read all that has arrived; each record must be a reply, with at most one descriptor."""
        while not self.ended and not self.hung_up:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, wire.MAX_MESSAGE, 8)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue
            for each in descriptors:
                os.close(each)
            assert len(descriptors) <= 1
            if data:
                wire.decode_reply(data)
                self.replies += 1
            self.ended = not data


class FakeChild:
    """Takes the steps of a child of the mounter, as far as other processes see them, or omits them if the test says so.

    `honest`: all its records so far were true. `device` is the mount that it has made, and may have to unmount.
    """

    def __init__(self, start: Record, conversation: socket.socket, connections: list[int], kernel: Kernel) -> None:
        self.start = start
        self.socket = conversation
        self.socket.setblocking(False)
        self.connections = [socket.socket(fileno=os.dup(each)) for each in connections]
        self.kernel = kernel
        self.request = self.take() if isinstance(start, mounter.StartMount | mounter.StartUnmount) else None
        self.is_plain = isinstance(start, mounter.StartPlainMount | mounter.StartPlainUnmount)
        self.is_unmount = isinstance(start, mounter.StartUnmount | mounter.StartPlainUnmount)
        if self.is_plain:
            self.request = self.take(socket.MSG_PEEK)
        self.plan: MountPlan | None = None
        self.device: int | None = None
        self.unmounts: int | None = None
        self.honest = True
        self.finished = self.hung_up_on = self.dead = False
        self.heard: list[Record] = []

    def take(self, how: int = 0) -> wire.Request | None:
        """Take a record of the caller, and close the descriptors that came with it; return the request that it is."""
        how |= socket.MSG_DONTWAIT
        try:
            data, descriptors, _, _ = socket.recv_fds(self.connections[0], wire.MAX_MESSAGE, 253, how)
        except OSError:
            return None
        for each in descriptors:
            os.close(each)
        try:
            return wire.decode_request(data)
        except ProtocolError:
            return None

    @property
    def number(self) -> int | None:
        """The number of the caller that it works for; None if it only takes records that are discarded."""
        request = self.request
        return int(request.mountpoint) if isinstance(request, MountRequest | UnmountRequest) else None

    def listen(self) -> None:
        """Read all records from the front, and note whether the front has hung up."""
        while not self.hung_up_on and not self.dead:
            try:
                data = self.socket.recv(wire.MAX_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue
            if data:
                self.heard.append(mounter.load(data))
            self.hung_up_on = not data

    def say(self, record: Record | bytes, descriptors: int = 0) -> bool:
        """Send a record; return whether the front still listens."""
        data = record if isinstance(record, bytes) else mounter.dump(record)
        try:
            socket.send_fds(self.socket, [data], [0] * descriptors)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def say_last(self, record: Record) -> None:
        self.finished = True
        self.say(record)

    def act(self, facts: MountFacts) -> None:
        """Take the next step. `facts` are what the child finds."""
        self.listen()
        if not self.finished and self.heard:
            self._answer(self.heard.pop(0), facts)
        elif self.is_unmount and self.unmounts is None and not self.finished and not self.hung_up_on:
            if self.is_plain and facts.access_errno:
                self.say_last(mounter.NotPlain())
            else:
                self._tell_what_is_mounted(facts)
        elif self.hung_up_on:
            if self.device is not None and not isinstance(self.take(), CommitRequest):
                self._roll_back()  # otherwise it has taken the front's place
            self.end()

    def _answer(self, said: Record, facts: MountFacts) -> None:
        match said:
            case mounter.LetGo():
                if self.device is not None:
                    self.kernel.unmount(self.device)
                self.say_last(mounter.HasLetGo())
            case mounter.Ask() | MountPlan() if self.is_plain and facts.access_errno:
                self.say_last(mounter.NotPlain())
            case mounter.Ask():
                self.say(facts)
            case MountPlan() if not is_decided_on(said, facts):
                self.say(facts)
            case MountPlan():
                self.plan = said
                if self.is_plain:
                    self.take()
                if said.sync_init:
                    self._hand_over()
                    self.say(mounter.HandedOver())
                else:
                    self._make()
            case mounter.Proceed():
                self.take()
                self._make()
            case mounter.Attach():
                self._mount()
            case mounter.Undo():
                self._roll_back()
            case mounter.Keep():
                self.take()
                self.device = None
                self.say_last(mounter.Kept())
            case mounter.UnmountPlan():
                if self.is_plain:
                    self.take()
                self.kernel.unmount(self.unmounts or NO_DEVICE)
                self.say_last(mounter.Unmounted())
            case _:
                raise AssertionError(f"{said} is not for a child to hear")

    def _tell_what_is_mounted(self, facts: MountFacts) -> None:
        self.unmounts = self.kernel.oldest()
        self.say(
            UnmountFacts(
                uid=facts.uid,
                mount_namespace=NAMESPACE,
                access_errno=facts.access_errno,
                mounted=True,
                device=self.unmounts,
                dead=False,
                may_mount=False,
            )
        )

    def _make(self) -> None:
        self.device = self.kernel.mount(self)
        self.say(mounter.Made(self.device, NAMESPACE, pids=mounter.PIDS_SEEN))

    def _mount(self) -> None:
        assert self.plan
        handed_over = self.plan.sync_init or self._hand_over()
        if not handed_over or not self.say(mounter.Mounted()):
            self._roll_back()

    def _hand_over(self) -> bool:
        """Send a descriptor to the caller; return whether the caller is still there."""
        assert self.plan
        reply = wire.encode_reply(wire.Reply(self.plan.request_id))
        try:
            socket.send_fds(self.connections[0], [reply], [0], socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def _roll_back(self) -> None:
        if self.device is not None:
            self.kernel.unmount(self.device)
            self.device = None
            self.say_last(mounter.RolledBack())

    def end(self) -> None:
        """End, in order or not; a mount stays."""
        self.dead = True
        self.socket.close()
        for each in self.connections:
            each.close()


class Kernel(FakeFusectl):
    """The mounts, and the child that made each of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.mounted: dict[int, FakeChild] = {}
        self._gone = itertools.count()

    def mount(self, child: FakeChild) -> int:
        """Mount; return the device number, the lowest free one."""
        device = next(number for number in range(100, 200) if number not in self.mounted)
        self.connect(device)
        self.mounted[device] = child
        return device

    def unmount(self, device: int) -> None:
        """Unmount the device, unless it is already unmounted."""
        if self.mounted.pop(device, None):
            (self.path / str(device)).rename(self.path / f"gone-{next(self._gone)}")  # its inode is not reused

    def oldest(self) -> int:
        """Return the number of the oldest mount; without mounts, a number that no mount ever has."""
        return next(iter(self.mounted), NO_DEVICE)


class FakeMounter:
    """Begins operations with children that the test plays; begins none while it is `down`."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.children: list[FakeChild] = []
        self.down = False
        self.serves_plain_calls = True

    async def begin(self, start: Any, descriptors: list[int]) -> Operation:
        if self.down:
            raise MounterFailed("it is down")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connections = descriptors if isinstance(start, mounter.StartDismissal) else descriptors[:1]
        child = FakeChild(start, theirs, connections, self.kernel)
        if isinstance(start, mounter.StartAbort):  # as if every filesystem hung: one may be slow without bound
            child.say_last(mounter.Aborted())
        self.children.append(child)
        return Operation(ours, start.seconds)

    async def dismiss(self, connections: list[socket.socket], seconds: int) -> Operation:
        return await self.begin(mounter.StartDismissal(seconds), [each.fileno() for each in connections])


class FrontUnderStress(RuleBasedStateMachine):
    """After each rule, the front has done all that it can do at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptors_before = all_descriptors()
        self.directory = tempfile.TemporaryDirectory()
        directory = Path(self.directory.name)
        self.kernel = Kernel(directory / "fusectl")
        self.registry = Registry(directory / "state", self.kernel.descriptor)
        self.mounter = FakeMounter(self.kernel)
        self.records: list[dict[str, Any]] = []
        self.callers: list[Caller] = []
        self.clock = Clock()
        self.proc = os.open("/proc", os.O_PATH)
        self.turned_away = 0
        configuration = Configuration(max_requests=MOST_REQUESTS, deadlines=DEADLINES[0], limits=NO_LIMITS)
        self.front = Front(configuration, cast(Mounter, self.mounter), self.registry, self._log, self.proc)
        self.path = directory / "broker.sock"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(bytes(self.path))
        self.listener.listen()
        self.server = Server(self.front)
        self.stop = asyncio.Event()
        self.stopped_at: float | None = None
        self.serving = self.clock.create_task(self.server.run([self.listener], self.stop))
        self.clock.settle()

    def _log(self, priority: int, message: str, **fields: Any) -> None:
        assert priority and not message.startswith("internal error"), message
        if message == "requests refused":
            self.turned_away += fields["requests"]
        elif message.startswith(CALLS):
            self.records.append({"message": message} | fields)

    # Actions of the other parties

    def _idle_callers(self) -> list[Caller]:
        return [each for each in self.callers if not each.hung_up and not each.spoken]

    def _callers(self) -> list[Caller]:
        return [each for each in self.callers if not each.hung_up]

    def _children(self) -> list[FakeChild]:
        return [each for each in self.mounter.children if not each.dead]

    def _draw(self, data: st.DataObject, things: Sequence[T]) -> T:
        return things[data.draw(st.integers(0, len(things) - 1))]

    def _has_room(self) -> bool:
        return len(self.server._tasks) < MOST_CALLS and self.stopped_at is None

    @precondition(lambda self: self._has_room())
    @rule()
    def a_caller_connects(self) -> None:
        self.callers.append(Caller(self.path, len(self.callers), self.clock.now))
        self.clock.settle()

    @precondition(lambda self: self._idle_callers())
    @rule(data=st.data(), options=st.sampled_from([b"", b"bogus", b"suid,ro"]), sync_init=st.booleans())
    def a_caller_asks_for_a_mount(self, data: st.DataObject, options: bytes, sync_init: bool) -> None:
        caller = self._draw(data, self._idle_callers())
        caller.ask(MountRequest(b"%d" % caller.number, options, sync_init))
        self.clock.settle()

    @precondition(lambda self: self._idle_callers())
    @rule(data=st.data(), lazy=st.booleans(), only_dead=st.booleans())
    def a_caller_asks_for_an_unmount(self, data: st.DataObject, lazy: bool, only_dead: bool) -> None:
        caller = self._draw(data, self._idle_callers())
        caller.ask(UnmountRequest(b"%d" % caller.number, b"mnt", lazy, only_dead))
        self.clock.settle()

    @precondition(lambda self: self._callers())
    @rule(data=st.data(), words=st.sampled_from(sorted(CALLERS_WORDS)), descriptors=st.sampled_from([0, 0, 1, 3]))
    def a_caller_says_something(self, data: st.DataObject, words: str, descriptors: int) -> None:
        self._draw(data, self._callers()).say(CALLERS_WORDS[words], descriptors)
        self.clock.settle()

    @precondition(lambda self: self._callers())
    @rule(data=st.data())
    def a_caller_hangs_up(self, data: st.DataObject) -> None:
        self._draw(data, self._callers()).hang_up()
        self.clock.settle()

    @precondition(lambda self: self._callers())
    @rule(data=st.data())
    def a_caller_reads(self, data: st.DataObject) -> None:
        self._draw(data, self._callers()).read()
        self.clock.settle()

    @precondition(lambda self: self._children())
    @rule(data=st.data(), facts=facts)
    def a_child_acts(self, data: st.DataObject, facts: MountFacts) -> None:
        self._draw(data, self._children()).act(facts)
        self.clock.settle()

    @precondition(lambda self: self._children())
    @rule(data=st.data(), record=st.sampled_from([mounter.Failed(errno.EIO, b"join"), mounter.BadDescriptors(3)]))
    def a_child_fails(self, data: st.DataObject, record: Record) -> None:
        """A child that has mounted doesn't fail before it has unmounted."""
        child = self._draw(data, self._children())
        if child.device is None and not child.finished:
            child.say_last(record)
        self.clock.settle()

    @precondition(lambda self: self._children())
    @rule(data=st.data())
    def a_child_dies(self, data: st.DataObject) -> None:
        self._draw(data, self._children()).end()
        self.clock.settle()

    @precondition(lambda self: self._children())
    @rule(data=st.data(), words=st.sampled_from(sorted(CHILDS_WORDS)), descriptors=st.sampled_from([0, 0, 1, 3]))
    def a_child_lies(self, data: st.DataObject, words: str, descriptors: int) -> None:
        child = self._draw(data, self._children())
        child.honest = False
        child.say(CHILDS_WORDS[words], descriptors)
        self.clock.settle()

    @precondition(lambda self: self._has_room())
    @rule(steps=st.integers(1, 9), sync_init=st.booleans())
    def a_caller_mounts(self, steps: int, sync_init: bool) -> None:
        """All goes well, to the end of the call or only for some of its steps."""
        self.a_caller_connects()
        caller = self.callers[-1]
        caller.ask(MountRequest(b"%d" % caller.number, b"", sync_init))
        self._all_goes_well(caller, steps)

    @precondition(lambda self: self._has_room() and self.kernel.mounted)
    @rule(steps=st.integers(0, 3))
    def a_caller_unmounts(self, steps: int) -> None:
        """Like `a_caller_mounts`."""
        self.a_caller_connects()
        caller = self.callers[-1]
        caller.ask(UnmountRequest(b"%d" % caller.number, b"mnt"))
        self._all_goes_well(caller, steps)

    @precondition(lambda self: self._callers())
    @rule(data=st.data(), steps=st.integers(1, 6))
    def all_goes_well_for_a_while(self, data: st.DataObject, steps: int) -> None:
        """A caller and its child take their next steps."""
        self._all_goes_well(self._draw(data, self._callers()), steps)

    def _all_goes_well(self, caller: Caller, steps: int) -> None:
        for _ in range(steps):
            self.clock.settle()
            self._go_on(caller)
        self.clock.settle()

    def _go_on(self, caller: Caller) -> None:
        children = [each for each in self._children() if each.number == caller.number]
        for child in children:
            child.listen()
            if child.heard or child.hung_up_on or (child.is_unmount and not child.unmounts):
                child.act(FACTS)
            elif child.device is not None and not caller.committed:
                caller.commit()
            elif child.plan and child.plan.sync_init and not caller.proceeded:
                caller.proceed()

    def _mounts(self) -> list[int]:
        """Return the numbers of the mounts, except those that a child's descriptor keeps alive."""
        return [device for device, child in self.kernel.mounted.items() if child.dead or child.device is None]

    @precondition(lambda self: self._mounts())
    @rule(data=st.data())
    def somebody_else_unmounts(self, data: st.DataObject) -> None:
        self.kernel.unmount(self._draw(data, self._mounts()))

    @rule(configuration=configurations)
    def the_configuration_is_reloaded(self, configuration: Configuration) -> None:
        self.front.configuration = configuration

    @rule(down=st.sampled_from([False, False, True]))
    def the_mounter_goes_down_or_comes_back(self, down: bool) -> None:
        self.mounter.down = down

    @rule(seconds=st.sampled_from([1, 1, 1, 3, 20]))
    def time_passes(self, seconds: int) -> None:
        self.clock.pass_time(seconds)

    @precondition(lambda self: self.stopped_at is None and len(self.callers) >= MOST_CALLS)
    @rule()
    def the_broker_is_told_to_stop(self) -> None:
        self.stopped_at = self.clock.now
        self.stop.set()
        self.clock.settle()

    # Invariants

    @property
    def _results(self) -> dict[int, str]:
        """The results of the calls that are over, by the number of the caller, as far as it is known."""
        known = [record for record in self.records if "mountpoint" in record]
        return {int(record["mountpoint"]): record["message"] for record in known}

    @invariant()
    def all_is_well(self) -> None:
        self._check_records()
        self._check_callers()
        self._check_children()
        self._check_mounts()
        assert 0 <= self.front.mounting <= len(self.server._tasks)
        if self.stopped_at is not None and self.clock.now - self.stopped_at > LONGEST_STOP:
            assert self.serving.done()

    def _check_records(self) -> None:
        """Each call that is over has one record, except that callers that were turned away share records."""
        turned_away = self.turned_away + sum(each.requests for each in self.front.refusals._refused.values())
        assert len({record["request_id"] for record in self.records}) == len(self.records)
        assert len(self.records) + turned_away + len(self.server._tasks) == len(self.callers)
        counted = sum(number for ended, number in self.front.requests.items() if ended.startswith(CALLS))
        assert len(self.records) + turned_away == counted

    def _check_callers(self) -> None:
        """A caller learns that its call is over, and why, no later than the sum of all deadlines."""
        results = self._results
        for caller in self._callers():
            if caller.number in results or self.clock.now - caller.connected_at > LONGEST_CALL:
                caller.read()
                assert caller.ended
                assert caller.replies or not results.get(caller.number, "").endswith(" refused")

    def _check_children(self) -> None:
        """The front hangs up on a child when the call is over."""
        results = self._results
        for child in self._children():
            child.listen()
            assert child.hung_up_on or child.number not in results

    def _check_mounts(self) -> None:
        """The registry has every mount that was made for good, and none that is not mounted."""
        results = self._results
        for device, child in self.kernel.mounted.items():
            if child.honest and child.dead and child.number in results:
                assert self.registry.find(Device(device)), "a mount is lost"
        for number, result in results.items():
            assert self.callers[number].committed or result != "mount mounted", "a mount is kept that nobody wanted"
        self.registry.reconcile()
        assert {mount.device for mount in self.registry} <= self.kernel.mounted.keys()

    def teardown(self) -> None:
        """When no party acts any more, everything ends and nothing is left."""
        try:
            self.clock.pass_time(LONGEST_CALL)
            assert not self.server._tasks
            assert self.front.mounting == 0
            if self.stopped_at is None:
                self.the_broker_is_told_to_stop()
            assert self.serving.done()
            for child in self._children():
                child.listen()
                assert child.hung_up_on
            self.mounter.down = False  # the front can't close ended connections before
            self.clock.pass_time(2)
            self._end_children()
            assert self.front.accounts._served == 0, "a connection counts until it is closed"
            assert not self.front.slots._taken
            assert not self.front.long_slots._taken
            assert not self.front.dismissal_slots._taken
            assert not self.front.rescue_slots._taken
            assert not self.front.stuck
        finally:
            self._close()
        assert all_descriptors() <= self.descriptors_before

    def _end_children(self) -> None:
        """End all children, including those that begin as a result, which may take a moment."""
        while children := self._children():
            for child in children:
                child.end()
            self.clock.pass_time(2)  # the first second begins with the events of this moment

    def _close(self) -> None:
        for caller in self._callers():
            caller.read()
            caller.hang_up()
        self._end_children()
        for task in asyncio.all_tasks(self.clock):
            task.cancel()
        self.clock.settle()
        self.clock.close()
        self.listener.close()
        self.registry.close()
        os.close(self.kernel.descriptor)
        os.close(self.proc)
        self.directory.cleanup()


class TestFront(FrontUnderStress.TestCase):  # type: ignore[misc, valid-type]  # hypothesis makes it at run time
    settings = settings(
        derandomize=True, max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck)
    )

    @classmethod
    def setUpClass(cls) -> None:
        """Collect garbage of earlier tests now, and none meanwhile, because the tests count descriptors."""
        gc.collect()
        gc.disable()
        cls.addClassCleanup(gc.enable)
