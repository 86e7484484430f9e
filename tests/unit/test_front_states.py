"""The front under whatever callers and children may do, in any order, also at the same time.

The front's own code serves real sockets. Hypothesis plays everybody else: callers, the mounter's children, the kernel's
table of connections, the operator, and the clock, which goes only when it says so.
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

from broker import plan
from broker.config import FILESYSTEMS, Configuration, Deadlines, Limits
from broker.front import Front
from broker.mounting import rests_on
from broker.operations import Mounter, MounterFailed, Operation
from broker.plan import MountFacts, MountPlan, Record, UnmountFacts
from broker.registry import Device, Registry
from broker.server import Server
from fusermount3_proxy import wire
from fusermount3_proxy.wire import CommitRequest, MountRequest, ProceedRequest, ProtocolError, UnmountRequest
from tests.unit.fakes import FakeFusectl, all_descriptors

T = TypeVar("T")

NAMESPACE = 7
NO_DEVICE = 99
MOST_CALLS = 6
#: A quarter of them are for one account, which all callers here are; so some have to wait.
MOST_REQUESTS = 4 * (MOST_CALLS - 2)
#: None that depends on the clock, which is the machine's where requests are counted.
NO_LIMITS = Limits(mounts=0, requests_per_second=0, concurrent=0)
DEADLINES = (
    Deadlines(request=5, operation=5, unmount=1, commit=10, sync_init=20),
    Deadlines(request=1, operation=1, unmount=1, commit=1, sync_init=1),
)
#: Seconds after which every call is over, whatever others do or don't: the sum of all that it may wait for.
LONGEST_CALL = 5 + 2 * (2 * 5) + 2 * (5 + 1) + 20 + (20 + 1) + 10 + 2 * (5 + 1) + 5
#: And when it has been told to stop, two steps of the mounter and a commit.
LONGEST_STOP = 2 * 5 + 10

#: What the record of a call begins with, and only that.
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


#: What a child may say at the wrong time, and what it may never say.
CHILDS_WORDS = {
    **{kind.__name__: plan.dump(a_record_of(kind)) for kind in Record.__args__},
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
    """An event loop whose time goes by only in `pass_time`; it runs until nobody has anything to do at that time."""

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
    """A caller with a connection of its own; its mountpoint is called as its `number`."""

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
        """Read all that there is; each record must be a reply, and bring one descriptor at most."""
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
    """Does in its turn what a child of the mounter does, as far as others can see it; or, if it is told so, does not.

    `honest`: it has said only what is so. `device` is what it has mounted, and may have to unmount.
    """

    def __init__(self, start: Record, conversation: socket.socket, connections: list[int], kernel: Kernel) -> None:
        self.start = start
        self.socket = conversation
        self.socket.setblocking(False)
        self.connections = [socket.socket(fileno=os.dup(each)) for each in connections]
        self.kernel = kernel
        self.request = self.take() if isinstance(start, plan.StartMount | plan.StartUnmount) else None
        self.plan: MountPlan | None = None
        self.device: int | None = None
        self.unmounts: int | None = None
        self.honest = True
        self.finished = self.hung_up_on = self.dead = False
        self.heard: list[Record] = []

    def take(self) -> wire.Request | None:
        """Take a record of the caller's, and close what came with it; return the request that it is."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.connections[0], wire.MAX_MESSAGE, 253, socket.MSG_DONTWAIT)
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
        """The number of the caller for whom it works; None if it only takes what nobody wants."""
        request = self.request
        return int(request.mountpoint) if isinstance(request, MountRequest | UnmountRequest) else None

    def listen(self) -> None:
        """Hear all that was said, and whether it was the end."""
        while not self.hung_up_on and not self.dead:
            try:
                data = self.socket.recv(wire.MAX_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue
            if data:
                self.heard.append(plan.load(data))
            self.hung_up_on = not data

    def say(self, record: Record | bytes, descriptors: int = 0) -> bool:
        """Whether somebody still listens."""
        data = record if isinstance(record, bytes) else plan.dump(record)
        try:
            socket.send_fds(self.socket, [data], [0] * descriptors)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def say_last(self, record: Record) -> None:
        self.finished = True
        self.say(record)

    def act(self, facts: MountFacts) -> None:
        """Do what is next. `facts` are what it finds."""
        self.listen()
        if not self.finished and self.heard:
            self._answer(self.heard.pop(0), facts)
        elif isinstance(self.start, plan.StartUnmount) and self.unmounts is None and not self.hung_up_on:
            self._tell_what_is_mounted(facts)
        elif self.hung_up_on:
            if self.device is not None and not isinstance(self.take(), CommitRequest):
                self._roll_back()  # or else it has taken the front's place
            self.end()

    def _answer(self, said: Record, facts: MountFacts) -> None:
        match said:
            case plan.LetGo():
                self.say_last(plan.HasLetGo())
            case plan.Ask():
                self.say(facts)
            case MountPlan() if not rests_on(said, facts):
                self.say(facts)
            case MountPlan():
                self.plan = said
                if said.sync_init:
                    self._hand_over()
                    self.say(plan.HandedOver())
                else:
                    self._mount()
            case plan.Proceed():
                self.take()
                self._mount()
            case plan.Undo():
                self._roll_back()
            case plan.Keep():
                self.take()
                self.device = None
                self.say_last(plan.Kept())
            case plan.UnmountPlan():
                self.kernel.unmount(self.unmounts or NO_DEVICE)
                self.say_last(plan.Unmounted())
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

    def _mount(self) -> None:
        assert self.plan
        self.device = self.kernel.mount(self)
        handed_over = self.plan.sync_init or self._hand_over()
        if not handed_over or not self.say(plan.Mounted(self.device, NAMESPACE, pids_visible=True)):
            self._roll_back()

    def _hand_over(self) -> bool:
        """Send a descriptor to the caller; whether it is still there."""
        assert self.plan
        reply = wire.encode_reply(wire.Reply(self.plan.request))
        try:
            socket.send_fds(self.connections[0], [reply], [0], socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def _roll_back(self) -> None:
        if self.device is not None:
            self.kernel.unmount(self.device)
            self.device = None
            self.say_last(plan.RolledBack())

    def end(self) -> None:
        """End, in order or not: what is mounted stays."""
        self.dead = True
        self.socket.close()
        for each in self.connections:
            each.close()


class Kernel(FakeFusectl):
    """What is mounted, and which child did it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.mounted: dict[int, FakeChild] = {}
        self._gone = itertools.count()

    def mount(self, child: FakeChild) -> int:
        """Mount; return the number, the lowest that is free."""
        device = next(number for number in range(100, 200) if number not in self.mounted)
        self.connect(device)
        self.mounted[device] = child
        return device

    def unmount(self, device: int) -> None:
        """Unmount it, or find that it is gone already."""
        if self.mounted.pop(device, None):
            (self.path / str(device)).rename(self.path / f"gone-{next(self._gone)}")  # its inode is not used again

    def oldest(self) -> int:
        """Return the number of the mount that is oldest; one that there never is, if there is none."""
        return next(iter(self.mounted), NO_DEVICE)


class FakeMounter:
    """Begins operations with children that are played by the test; none while it is `down`."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.children: list[FakeChild] = []
        self.down = False
        self.orphans, self.child_of_another_front = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.orphans.setblocking(False)

    def close(self) -> None:
        self.orphans.close()
        self.child_of_another_front.close()

    async def begin(self, start: Any, descriptors: list[int]) -> Operation:
        if self.down:
            raise MounterFailed("it is down")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connections = descriptors if isinstance(start, plan.StartDismissal) else descriptors[:1]
        child = FakeChild(start, theirs, connections, self.kernel)
        if isinstance(start, plan.StartAbort):  # every filesystem hangs: how long one may be slow has no bound
            child.say_last(plan.Aborted())
        self.children.append(child)
        return Operation(ours, start.seconds)

    async def dismiss(self, connections: list[socket.socket], seconds: int) -> Operation:
        return await self.begin(plan.StartDismissal(seconds), [each.fileno() for each in connections])


class FrontUnderStress(RuleBasedStateMachine):
    """After each rule the front has done all that it can do at that time."""

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

    # What others do

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
    @rule(data=st.data(), record=st.sampled_from([plan.Failed(errno.EIO, b"join"), plan.BadDescriptors(3)]))
    def a_child_fails(self, data: st.DataObject, record: Record) -> None:
        """One that has mounted doesn't fail before it has unmounted."""
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
        """And all goes well, up to the end or less far."""
        self.a_caller_connects()
        caller = self.callers[-1]
        caller.ask(MountRequest(b"%d" % caller.number, b"", sync_init))
        self._all_goes_well(caller, steps)

    @precondition(lambda self: self._has_room() and self.kernel.mounted)
    @rule(steps=st.integers(0, 3))
    def a_caller_unmounts(self, steps: int) -> None:
        """As `a_caller_mounts`."""
        self.a_caller_connects()
        caller = self.callers[-1]
        caller.ask(UnmountRequest(b"%d" % caller.number, b"mnt"))
        self._all_goes_well(caller, steps)

    @precondition(lambda self: self._callers())
    @rule(data=st.data(), steps=st.integers(1, 6))
    def all_goes_well_for_a_while(self, data: st.DataObject, steps: int) -> None:
        """A caller and its child do what is next for them."""
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
            if child.heard or child.hung_up_on or (isinstance(child.start, plan.StartUnmount) and not child.unmounts):
                child.act(FACTS)
            elif child.device is not None and not caller.committed:
                caller.commit()
            elif child.plan and child.plan.sync_init and not caller.proceeded:
                caller.proceed()

    def _mounts(self) -> list[int]:
        """Return the numbers of what is mounted; not while a child has a descriptor of it, which keeps it alive."""
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

    # What must be so

    @property
    def _results(self) -> dict[int, str]:
        """How the calls ended that are over, by the number of the caller; those of which it is known."""
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
        """Each call that is over has one record, but that those who were turned away share theirs."""
        turned_away = self.turned_away + sum(each.requests for each in self.front.refusals._refused.values())
        assert len({record["request_id"] for record in self.records}) == len(self.records)
        assert len(self.records) + turned_away + len(self.server._tasks) == len(self.callers)
        counted = sum(number for ended, number in self.front.requests.items() if ended.startswith(CALLS))
        assert len(self.records) + turned_away == counted

    def _check_callers(self) -> None:
        """A caller is told that its call is over, and why, and not later than all deadlines together."""
        results = self._results
        for caller in self._callers():
            if caller.number in results or self.clock.now - caller.connected_at > LONGEST_CALL:
                caller.read()
                assert caller.ended
                assert caller.replies or not results.get(caller.number, "").endswith(" refused")

    def _check_children(self) -> None:
        """A child is hung up on when the call is over."""
        results = self._results
        for child in self._children():
            child.listen()
            assert child.hung_up_on or child.number not in results

    def _check_mounts(self) -> None:
        """What is mounted for good is in the registry, and nothing that is not mounted."""
        results = self._results
        for device, child in self.kernel.mounted.items():
            if child.honest and child.dead and child.number in results:
                assert self.registry.find(Device(device)), "a mount is lost"
        for number, result in results.items():
            assert self.callers[number].committed or result != "mount mounted", "a mount is kept that nobody wanted"
        self.registry.reconcile()
        assert {mount.device for mount in self.registry} <= self.kernel.mounted.keys()

    def teardown(self) -> None:
        """When nobody does anything any more, all ends, and nothing is left."""
        try:
            self.clock.pass_time(LONGEST_CALL)
            assert not self.server._tasks
            assert self.front.mounting == self.front.accounts._served == 0
            if self.stopped_at is None:
                self.the_broker_is_told_to_stop()
            assert self.serving.done()
            for child in self._children():
                child.listen()
                assert child.hung_up_on
            self._end_children()
            assert not self.front.places._taken
            assert not self.front.long_places._taken
            assert not self.front.stuck
        finally:
            self._close()
        assert all_descriptors() <= self.descriptors_before

    def _end_children(self) -> None:
        """End all, also those that are begun thereupon, which may take a moment."""
        while children := self._children():
            for child in children:
                child.end()
            self.clock.pass_time(2)  # the first second begins with what has just happened

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
        self.mounter.close()
        os.close(self.kernel.descriptor)
        os.close(self.proc)
        self.directory.cleanup()


class TestFront(FrontUnderStress.TestCase):  # type: ignore[misc, valid-type]  # hypothesis makes it at run time
    settings = settings(
        derandomize=True, max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck)
    )

    @classmethod
    def setUpClass(cls) -> None:
        """Descriptors are counted: so the garbage collector closes now what others left, and nothing meanwhile."""
        gc.collect()
        gc.disable()
        cls.addClassCleanup(gc.enable)
