"""Who leads: when a replica takes the Lease, and that no two lead at once, whatever is slow, lost or restarted."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from httpx2 import Response, TransportError
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lightkube import ApiError

from fusermount3_controller import election, leader_election
from fusermount3_controller.election import Lease, Move
from fusermount3_controller.leader_election import LeaderElection
from tests.unit.controller.api_server import NAMESPACE, ApiServer, patched
from tests.unit.controller.samples import Manifest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator

PATH = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/lease"
NOW = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
REPLICAS = 2


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("lease", "unchanged", "move"),
    [
        (Lease("1"), 0, Move.TAKE),
        (Lease("1", "me"), 0, Move.RENEW),
        (Lease("1", "me"), 1000, Move.RENEW),
        (Lease("1", "other"), 0, Move.WAIT),
        (Lease("1", "other"), 14.9, Move.WAIT),
        (Lease("1", "other"), 15, Move.TAKE),
        (Lease("1", "other", 60), 15, Move.WAIT),
    ],
)
def test_a_lease_is_taken_that_nobody_holds_or_that_was_not_renewed_for_as_long_as_it_says(
    lease: Lease, unchanged: float, move: Move
) -> None:
    assert election.move(lease, "me", unchanged) is move


def test_a_holder_stops_earlier_than_another_one_begins_and_tries_more_than_once_until_then() -> None:
    assert 3 * election.RETRY < election.DEADLINE < election.DURATION - election.RETRY


def test_a_lease_says_who_holds_it_since_when_and_how_often_that_has_changed() -> None:
    manifest: Manifest = {"metadata": {"resourceVersion": "1"}}
    taken = election.held(election.parse(manifest), "me", NOW)
    assert taken == {
        "metadata": {"resourceVersion": "1"},
        "spec": {
            "holderIdentity": "me",
            "leaseDurationSeconds": 15,
            "acquireTime": "2026-01-01T12:00:00.000000Z",
            "renewTime": "2026-01-01T12:00:00.000000Z",
            "leaseTransitions": 1,
        },
    }
    renewed = election.held(election.parse(taken), "me", NOW + datetime.timedelta(seconds=2.5))["spec"]
    assert renewed == taken["spec"] | {"renewTime": "2026-01-01T12:00:02.500000Z"}
    released = election.released(election.parse(patched(taken, {"spec": renewed})))
    assert released["spec"] == {"holderIdentity": "", "leaseDurationSeconds": 1}
    other = election.held(election.parse(patched(taken, released)), "other", NOW)["spec"]
    assert (other["holderIdentity"], other["leaseTransitions"]) == ("other", 2)


def test_a_lease_counts_as_long_as_whoever_wrote_it_says() -> None:
    """A release with other times may run beside this one, while one takes the place of the other."""
    metadata: Manifest = {"resourceVersion": "1"}
    written = {"holderIdentity": "other", "leaseDurationSeconds": 60, "acquireTime": "a", "renewTime": "b"}
    written["leaseTransitions"] = 7
    assert election.parse({"metadata": metadata, "spec": written}) == Lease("1", "other", 60.0, "a", "b", 7)
    nothing = dict.fromkeys(written)
    assert election.parse({"metadata": metadata, "spec": nothing}) == election.parse({"metadata": metadata})
    assert election.held(Lease("1", "me"), "me", NOW)["spec"]["acquireTime"] is None


def test_a_change_of_something_else_does_not_keep_a_lease() -> None:
    assert election.is_same_term(Lease("1", "other", renewed="a"), Lease("2", "other", renewed="a"))
    assert not election.is_same_term(Lease("1", "other", renewed="a"), Lease("1", "other", renewed="b"))


# Two processes


class Replica:
    """`leads`: whether what a leader does is being done; `terms`: how often that has begun."""

    def __init__(self, election: LeaderElection, retry: float = 0.01) -> None:
        self.election = election
        self.leads = False
        self.terms = 0
        self.task = asyncio.create_task(election.keep(self._lead, retry))

    async def _lead(self) -> NoReturn:
        self.leads = True
        self.terms += 1
        try:
            while True:
                await asyncio.sleep(60)
        finally:
            self.leads = False

    async def end(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@contextlib.asynccontextmanager
async def replicas(*names: str) -> AsyncIterator[tuple[ApiServer, Clock, list[Replica]]]:
    server, clock = ApiServer(), Clock()
    await server.put(PATH, {})
    async with server.client() as client:
        running = [Replica(LeaderElection(client, NAMESPACE, "lease", name, clock)) for name in names]
        try:
            yield server, clock, running
        finally:
            for each in running:
                await each.end()


async def until(true: Any) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


def test_one_of_two_leads_and_the_other_one_at_once_when_it_has_ended() -> None:
    async def run() -> None:
        async with replicas("a", "b") as (server, _, (one, two)):
            await until(lambda: one.leads or two.leads)
            for _ in range(20):
                await asyncio.sleep(0.01)
                assert one.leads != two.leads
            first, second = (one, two) if one.leads else (two, one)
            assert first.election.is_leader() and not second.election.is_leader()
            # The clock stands still, so the Lease can't have run out.
            await first.end()
            assert not first.election.is_leader()
            await until(lambda: second.leads)
            assert server.objects[PATH]["spec"]["leaseTransitions"] == 2
        assert server.objects[PATH]["spec"]["holderIdentity"] == ""

    asyncio.run(run())


def test_who_can_not_renew_stops_in_time_and_leads_again_when_it_can() -> None:
    async def run() -> None:
        async with replicas("a") as (server, clock, (replica,)):
            await until(lambda: replica.leads)
            server.is_broken = True
            clock.now += election.DEADLINE - 0.5
            await asyncio.sleep(0.1)
            assert replica.leads
            clock.now += 0.5
            await until(lambda: not replica.leads)
            assert not replica.election.is_leader()
            server.is_broken = False
            await until(lambda: replica.leads)

    asyncio.run(run())


def test_who_hears_nothing_at_all_of_the_api_server_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with replicas("a") as (server, clock, (replica,)):
            await until(lambda: replica.leads)
            server.is_broken = True
            await asyncio.sleep(0.1)
            clock.now += election.DEADLINE - 0.5
            with monkeypatch.context() as patch:
                patch.setattr(replica.election._client, "get", lambda *_, **__: asyncio.Event().wait())
                await asyncio.sleep(0.1)
                clock.now += 0.5
                await until(lambda: not replica.leads)
            server.is_broken = False

    asyncio.run(run())


def test_who_finds_that_another_one_holds_the_lease_stops_at_once() -> None:
    async def run() -> None:
        async with replicas("a") as (server, _, (replica,)):
            await until(lambda: replica.leads)
            await server.put(PATH, {"spec": {"holderIdentity": "other", "renewTime": "x"}})
            await until(lambda: not replica.leads)

    asyncio.run(run())


def test_who_looks_seldom_stops_in_time_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for its next look, which would be in an hour, when its time is over."""
    monkeypatch.setattr(election, "DEADLINE", 0.05)

    async def run() -> None:
        server = ApiServer()
        await server.put(PATH, {})
        async with server.client() as client:
            replica = Replica(LeaderElection(client, NAMESPACE, "lease", "a"), retry=3600)
            try:
                await until(lambda: replica.terms > 1)
            finally:
                await replica.end()

    asyncio.run(run())


def test_nobody_asks_more_often_than_told() -> None:
    async def run() -> None:
        server, clock = ApiServer(), Clock()
        await server.put(PATH, {})
        async with server.client() as client:
            running = [Replica(LeaderElection(client, NAMESPACE, "lease", name, clock), retry=60) for name in "ab"]
            try:
                await until(lambda: any(each.leads for each in running))
                await asyncio.sleep(0.2)
                asked = len(server.requests)
                await asyncio.sleep(0.2)
                assert len(server.requests) == asked
            finally:
                for each in running:
                    await each.end()

    asyncio.run(run())


def test_what_fails_in_a_leader_ends_it_and_releases_the_lease() -> None:
    async def run() -> None:
        async def fails() -> NoReturn:
            raise ValueError("a defect")

        server = ApiServer()
        await server.put(PATH, {})
        async with server.client() as client:
            with pytest.raises(ValueError, match="a defect"):
                await LeaderElection(client, NAMESPACE, "lease", "a").keep(fails, retry=0.01)
        assert server.objects[PATH]["spec"]["holderIdentity"] == ""

    asyncio.run(run())


def test_a_lease_is_released_when_what_a_leader_does_has_ended() -> None:
    """Until then, requests of it may be on their way."""
    holders = []

    async def run() -> None:
        server, leading = ApiServer(), asyncio.Event()
        await server.put(PATH, {})
        async with server.client() as client:

            async def lead() -> NoReturn:
                leading.set()
                try:
                    while True:
                        await asyncio.sleep(60)
                finally:
                    for _ in range(5):
                        lease = await client.get(leader_election._LEASE, "lease", namespace=NAMESPACE)
                        holders.append(election.parse(lease.to_dict()).holder)

            task = asyncio.create_task(LeaderElection(client, NAMESPACE, "lease", "a").keep(lead, retry=0.01))
            await leading.wait()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert holders == ["a"] * 5
        assert server.objects[PATH]["spec"]["holderIdentity"] == ""

    asyncio.run(run())


def test_who_ends_while_no_api_server_answers_just_ends() -> None:
    async def run() -> None:
        async with replicas("a") as (server, _, (replica,)):
            await until(lambda: replica.leads)
            server.is_broken = True
            await replica.end()
            assert not replica.leads and not replica.election.is_leader()
            server.is_broken = False

    asyncio.run(run())


# All orders


class Turn:
    """Others go on before the awaiting coroutine does."""

    def __await__(self) -> Generator[None]:
        yield


class SlowServer:
    """A Lease, of which each request takes as long as somebody wants; those on their way arrive when `arrive` says."""

    def __init__(self) -> None:
        self.lease: Manifest = {"metadata": {"resourceVersion": "1"}}
        self.sent: list[tuple[Manifest, list[bool]]] = []

    async def get(self, *_: object, **__: object) -> Any:
        await Turn()
        lease = copy.deepcopy(self.lease)
        await Turn()
        return SimpleNamespace(to_dict=lambda: lease)

    async def patch(self, _: object, __: str, patch: Manifest, **___: object) -> None:
        answer: list[bool] = []
        self.sent.append((copy.deepcopy(patch), answer))
        while not answer:
            await Turn()
        if not answer[0]:
            status = {"kind": "Status", "code": 409, "message": "the object has been modified"}
            raise ApiError(response=Response(409, json=status))

    def arrive(self, number: int) -> None:
        patch, answer = self.sent.pop(number)
        version = self.lease["metadata"]["resourceVersion"]
        is_good = patch["metadata"].pop("resourceVersion") == version
        if is_good:
            self.lease = patched(self.lease, patch)
            self.lease["metadata"]["resourceVersion"] = str(int(version) + 1)
        answer.append(is_good)


def _asked(coroutine: Coroutine[Any, Any, None], server: SlowServer, before: Callable[[], None]) -> None:
    """Let a replica do this; `before` its answer comes, something happens."""
    with contextlib.suppress(StopIteration):
        while True:
            coroutine.send(None)
            if server.sent:
                server.arrive(0)
                before()


def test_an_answer_that_comes_late_makes_nobody_a_leader() -> None:
    """Others have seen the Lease since the server has changed it."""
    server, clock = SlowServer(), Clock()
    client: Any = server
    replica = LeaderElection(client, NAMESPACE, "lease", "a", clock)

    def pass_time() -> None:
        clock.now += election.DURATION

    _asked(replica.ask(), server, pass_time)
    assert server.lease["spec"]["holderIdentity"] == "a"
    assert not replica.is_leader()


def test_nobody_releases_what_another_one_holds() -> None:
    server = SlowServer()
    client: Any = server
    replica = LeaderElection(client, NAMESPACE, "lease", "a", Clock())
    _asked(replica.ask(), server, lambda: None)
    assert replica.is_leader()
    server.lease["spec"]["holderIdentity"] = "other"
    _asked(replica.release(), server, lambda: None)
    assert server.lease["spec"]["holderIdentity"] == "other"


class Elections(RuleBasedStateMachine):
    """Replicas that ask, wait, lose their answers, restart and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.server, self.clock = SlowServer(), Clock()
        self.begun = 0
        self.asking: dict[int, Coroutine[Any, Any, None]] = {}
        self.replicas = [self._new() for _ in range(REPLICAS)]

    def _new(self) -> LeaderElection:
        self.begun += 1
        client: Any = self.server
        return LeaderElection(client, NAMESPACE, "lease", f"replica {self.begun}", self.clock)

    def _go_on(self, number: int) -> None:
        try:
            self.asking[number].send(None)
        except (StopIteration, ApiError):
            del self.asking[number]

    @rule(number=st.integers(0, REPLICAS - 1))
    def ask(self, number: int) -> None:
        """Begin a look, or go on with it."""
        if number not in self.asking:
            self.asking[number] = self.replicas[number].ask()
        self._go_on(number)

    @rule(number=st.integers(0, REPLICAS - 1))
    def look(self, number: int) -> None:
        """Look, with a server that answers at once."""
        self.ask(number)
        while number in self.asking:
            while self.server.sent:
                self.server.arrive(0)
            self._go_on(number)

    @rule(number=st.integers(0, REPLICAS - 1))
    def end(self, number: int) -> None:
        if number not in self.asking:
            self.asking[number] = self.replicas[number].release()
            self._go_on(number)

    @precondition(lambda self: self.asking)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """The answer does not come in time; what was sent may still arrive."""
        number = data.draw(st.sampled_from(sorted(self.asking)))
        with contextlib.suppress(TransportError):
            self.asking.pop(number).throw(TransportError("no answer"))

    @precondition(lambda self: self.server.sent)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.server.arrive(data.draw(st.integers(0, len(self.server.sent) - 1)))

    @rule(number=st.integers(0, REPLICAS - 1))
    def restart(self, number: int) -> None:
        """It is killed, and comes back with another identity."""
        if number in self.asking:
            self.asking.pop(number).close()
        self.replicas[number] = self._new()

    @rule(seconds=st.sampled_from([2.0, 5.0, 9.9, 10.0, 15.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def at_most_one_leads(self) -> None:
        assert sum(each.is_leader() for each in self.replicas) <= 1

    def teardown(self) -> None:
        """With answers again, one leads soon."""
        for each in self.asking.values():
            each.close()
        self.asking.clear()
        for _ in range(2):
            for number in range(REPLICAS):
                self.look(number)
            self.clock.now += election.DURATION
        for number in range(REPLICAS):
            self.look(number)
        assert sum(each.is_leader() for each in self.replicas) == 1


TestElections = Elections.TestCase
