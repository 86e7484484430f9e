"""One call, from the request to the answer: who is it, what do they want, may they, is it done, did it arrive.

A `Call` has a connection and a task of its own. Everything that might touch a caller's filesystem is the mounter's
(`operations`); everything that is decided is `policy`'s. What a call holds (descriptors, the conversation with the
mounter) is closed when it ends, however it ends, and a mount that was not committed is undone by that.
"""

import asyncio
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from errno import EBADMSG, EIO, EOPNOTSUPP, ETIMEDOUT

from broker import log, orphans, policy, rescue
from broker.channel import Channel, HungUp
from broker.front import Front
from broker.limits import GONE, Account, LimitReached, check_mounts, too_many_operations
from broker.operations import MounterFailed, Operation, OperationEnded, OperationFailed, OperationRefused
from broker.options import Refusal
from broker.peer import Peer, PeerGone, command_of, identify
from broker.places import Places
from broker.plan import (
    Ask,
    HandedOver,
    Keep,
    Kept,
    Mounted,
    MountFacts,
    MountPlan,
    Proceed,
    Record,
    RolledBack,
    StartMount,
    StartUnmount,
    StartVolumeMount,
    Told,
    Unmounted,
    UnmountFacts,
    filesystem_type,
)
from broker.registry import Device, Mount, MountNamespace
from fusermount3_proxy import wire
from fusermount3_proxy.wire import (
    CommitRequest,
    MountRequest,
    ProceedRequest,
    ProtocolError,
    Reply,
    UnmountRequest,
    VolumeRequest,
)

#: What a refusal quotes may be as long as a whole message, and a reply has to hold it.
_LONGEST_TEXT = 16 * 1024


def let_in(front: Front, channel: Channel, begin: "Begin") -> "Call | None":
    """Return the call of who has connected, begun by `begin`, for `serve`; None if it was turned away, or is gone."""
    call = begin(front, channel)
    try:
        call.enter()
        return call
    except LimitReached as reached:
        call.turn_away(reached)
    except Refusal as refusal:
        call.refuse(refusal)
    except PeerGone:
        front.gone += 1
        front.requests["request caller went away"] += 1
    call.end()
    return None


#: Makes the call of who has connected.
Begin = Callable[[Front, Channel], "Call"]


async def serve(call: "Call") -> None:
    """Serve a caller that was let in."""
    try:
        await call.wait_for_turn()
        await call.serve()
    except Refusal as refusal:
        try:
            await call.let_go()
        finally:  # also when the broker stops meanwhile
            call.refuse(refusal)
    except ProtocolError as error:
        call.refuse(Refusal(error.errno, f"bad request: {error.text}".encode()))
    except MounterFailed as error:
        call.failed(error)
    except HungUp:
        call.decided(log.INFO, "caller went away")
    except asyncio.CancelledError:
        call.decided(log.NOTICE, "ended: the broker stops")
        raise
    finally:
        call.end()


class Call:
    """A call as it becomes known. `id` is its name in the log and in what the user reads.

    Here the mounts are in place, at the caller's own mountpoint; what is otherwise on the socket of a volume is in
    `volume_call`.
    """

    def __init__(self, front: Front, channel: Channel) -> None:
        self.id = secrets.token_hex(4)
        self.held = ExitStack()
        self._front = front
        self._channel = channel
        self._begun = time.monotonic()
        self._name = "request"
        self._operation: Operation | None = None
        self._account_name = GONE
        self._caller: tuple[Peer, Account]
        self._known: dict[str, log.Value] = {}
        self._command = ""
        self._warnings: tuple[bytes, ...] = ()

    def enter(self) -> None:
        """Find out who calls, and have their account pay for what follows.

        Takes no longer than it must: there may be very many at the door. Raises Refusal, PeerGone.
        """
        try:
            peer = identify(self._channel.socket, self._front.open_proc)
        except OSError as error:  # no descriptors left, for example
            raise Refusal(error.errno or EIO, f"the broker can't identify its caller: {error}".encode()) from None
        self.held.callback(os.close, peer.pidfd)
        self._account_name = peer.account
        accounts = self._front.accounts
        account = accounts.enter(peer.account, self._front.configuration, self._begun)
        self.held.callback(accounts.leave, account)
        self._caller = peer, account
        self._pause = account.pause(self._front.configuration, self._begun)

    async def wait_for_turn(self) -> None:
        """Wait if those who pay for this have asked for much just now: that is to be at nobody else's expense."""
        if self._pause:
            await asyncio.sleep(self._pause)

    async def serve(self) -> None:
        """Receive the request and carry it out. Raises Refusal, ProtocolError, MounterFailed, HungUp."""
        peer, account = self._caller
        orphans.adopt_waiting(self._front)  # this may be about one of them
        self._known |= {"caller_uid": peer.uid, "caller_gid": peer.gid, "caller_pid": peer.pid}
        self._known["caller_container"] = peer.container
        request = await self._read_request()
        self._name = request.OPERATION
        self._known["mountpoint"] = request.mountpoint
        if isinstance(request, UnmountRequest):
            await self._unmount(peer, request)
        else:
            self._known["options"] = request.options
            await self._mount(peer, account, request)

    async def _read_request(self) -> MountRequest | VolumeRequest | UnmountRequest:
        """Return the request, which the mounter's child is to take with what came with it."""
        try:
            async with asyncio.timeout(self._front.configuration.deadlines.request):
                data, _ = await self._channel.peek()
        except TimeoutError:
            raise Refusal(ETIMEDOUT, b"no request came in time") from None
        request = wire.decode_request(data)
        if not isinstance(request, MountRequest | VolumeRequest | UnmountRequest):
            raise ProtocolError(EBADMSG, f"'{request.OPERATION}' before a mount")
        return request

    async def _begin(
        self, peer: Peer, start: StartMount | StartVolumeMount | StartUnmount, *descriptors: int
    ) -> Operation:
        """Have the mounter begin, when there is a place for it; the operation ends with the call at the latest.

        Raises MounterFailed, LimitReached.
        """
        places = self._front.places
        await self._take_place(places)
        try:
            self._operation = await self._front.mounter.begin(
                start, [self._channel.socket.fileno(), peer.pidfd, *descriptors]
            )
        except BaseException:
            places.give_back(peer.account)
            raise
        self.held.callback(places.give_back_after, peer.account, self._operation)
        return self._operation

    async def _take_place(self, places: Places) -> None:
        """Take a place for the caller's account. Raises LimitReached, before the caller gives up."""
        configuration = self._front.configuration
        try:
            await places.take(self._account_name, 2 * configuration.deadlines.operation)
        except TimeoutError:
            raise too_many_operations(self._account_name, configuration) from None

    def _describe(self, peer: Peer) -> None:
        """Look up, for the log, what people call the caller; takes a while, so it is done while the mounter works."""
        self._known["caller_command"] = self._command = command_of(peer.pid, self._front.open_proc)

    # Mounting --------------------------------------------------------------------------------------------------

    async def _mount(self, peer: Peer, account: Account, request: MountRequest | VolumeRequest) -> None:
        """Mount in the caller's namespaces, and keep the mount once the descriptor has arrived where it belongs."""
        counted = self._count_mount(account)
        if request.sync_init:
            await self._take_place(self._front.long_places)
            self.held.callback(self._front.long_places.give_back, account.name)
        operation = await self._begin_mount(peer, request)
        with _explained(b"mount failed", request):
            plan, said = await self._agree(peer, request, operation, counted)
            if isinstance(said, HandedOver):
                said = await self._proceed(operation)
        if isinstance(said, RolledBack):
            raise HungUp
        if not isinstance(said, Mounted):
            raise Refusal(EIO, b"mount failed: Input/output error")
        self._tell_foreign_pids(said)
        mount = self._record(peer, request, plan, said)
        self._front.registry.add(mount)  # before it is committed: if this front is killed, the next one knows it
        counted.close()
        if request.sync_init:
            self._send(Reply(self.id.encode()))
        if await self._committed():
            operation.say(Keep())  # a child that was killed can't undo the mount: it stays all the same
            # It is kept even if the broker stops now.
            with suppress(OperationEnded, OperationFailed, OperationRefused, asyncio.CancelledError):
                await operation.expect(Kept)
            self.decided(log.INFO, "mounted", device=mount.device, type=mount.type, source=mount.source)
        elif await self._undo(operation, mount):
            self._front.registry.find(mount.device)  # which drops it
            self.decided(log.NOTICE, "rolled back: the caller did not take the mount")
        else:  # it stays in the registry, so that its owner can unmount it
            self.decided(log.WARNING, "not rolled back: it is covered, or its guardian was killed", device=mount.device)

    async def _begin_mount(self, peer: Peer, request: MountRequest | VolumeRequest) -> Operation:
        """Have the mounter begin. Raises Refusal, MounterFailed."""
        if isinstance(request, VolumeRequest):
            raise Refusal(EOPNOTSUPP, b"this socket is no volume's, there is nothing to mount on without a mountpoint")
        deadlines = self._front.configuration.deadlines
        return await self._begin(peer, StartMount(deadlines.operation, deadlines.commit))

    def _decide(self, request: MountRequest | VolumeRequest, facts: MountFacts, live_mounts: int) -> MountPlan:
        """Return the plan for the request. Raises Refusal."""
        assert isinstance(request, MountRequest)
        return policy.decide_mount(self.id.encode(), request, facts, live_mounts, self._front.configuration)

    async def _undo(self, operation: Operation, mount: Mount) -> bool:
        """Whether the mount is gone again."""
        async with rescue.aborted_if_hung(self._front, mount):
            return await operation.undo()

    def _count_mount(self, account: Account) -> ExitStack:
        """Count a mount before it is there, until what is returned is closed. Raises LimitReached."""
        most = self._front.configuration.limits.mounts
        limit = most - account.mounting if most else -1  # which none ever reaches: nobody counts then
        live = self._front.registry.count(account.name, limit) + account.mounting
        check_mounts(account, live, self._front.configuration)
        account.mounting += 1
        self._front.mounting += 1
        counted = self.held.enter_context(ExitStack())
        counted.callback(self._front.ends_mounting, account)
        return counted

    async def _agree(
        self, peer: Peer, request: MountRequest | VolumeRequest, operation: Operation, counted: ExitStack
    ) -> tuple[MountPlan, Record]:
        """Agree on a plan with the mounter's child; return it, and what the child says when it has begun.

        Until `counted` is closed, the mount counts for its namespace, once that is known. Raises Refusal and what
        `operation` raises.
        """
        guess = self._guess(peer, request)
        guessed = counted.enter_context(ExitStack())
        if guess:
            self._front.guessing += 1
            guessed.callback(self._front.ends_guessing)
            self._warnings = tuple(guess.warnings.splitlines())
        operation.say(guess or Ask())
        self._describe(peer)
        said = await operation.hear()
        if guess and not isinstance(said, MountFacts):
            return guess, said
        if not isinstance(said, MountFacts):
            raise OperationEnded
        guessed.close()
        if isinstance(request, MountRequest):
            self._front.usual_filesystem = said.filesystem
        limit = self._front.configuration.mount_max
        namespace = MountNamespace(said.mount_namespace)
        others = self._front.guessing + self._front.mounting_in[namespace]  # counted before they are there
        live = self._front.registry.count(namespace, limit - others) + others
        plan = self._decide(request, said, live)
        self._front.mounting_in[namespace] += 1
        counted.callback(self._front.ends_mounting_in, namespace)
        self._warnings = tuple(plan.warnings.splitlines())
        operation.say(plan)
        return plan, await operation.hear()

    def _guess(self, peer: Peer, request: MountRequest | VolumeRequest) -> MountPlan | None:
        """Return the plan that is right if the caller and its mountpoint are as most are; see `plan`.

        None where a namespace may come to its limit: there the facts say how many mounts are the caller's.
        """
        configuration = self._front.configuration
        at_once = self._front.mounting + configuration.max_requests
        if self._front.registry.most_in_a_namespace() + at_once > configuration.mount_max >= 0:
            return None
        usual = MountFacts(
            uid=peer.uid,
            gid=peer.gid,
            root_mode=stat.S_IFDIR,
            foreign_sticky=False,
            filesystem=self._usual_filesystem(request),
            search_errno=0,
            access_errno=0,
            mount_namespace=0,
        )
        try:
            return self._decide(request, usual, 0)
        except Refusal:
            return None  # the facts may give another reason, which the user is to read then

    def _usual_filesystem(self, _request: MountRequest | VolumeRequest) -> int:
        return self._front.usual_filesystem

    async def _proceed(self, operation: Operation) -> Record:
        """The FUSE program has its descriptor before there is a mount: wait until it is ready to serve, then mount.

        Return what the child says then. Raises Refusal and what `operation` raises.
        """
        seconds = self._front.configuration.deadlines.sync_init
        if not await self._receives(ProceedRequest, seconds):
            raise Refusal(ETIMEDOUT, b"mount failed: Connection timed out")
        operation.say(Proceed(seconds))
        gone = asyncio.ensure_future(self._channel.closed())
        said = asyncio.ensure_future(operation.hear(seconds))
        try:
            await asyncio.wait([gone, said], return_when=asyncio.FIRST_COMPLETED)
            if not said.done():
                raise HungUp
            return said.result()
        finally:
            gone.cancel()
            said.cancel()
            await asyncio.wait([gone, said])  # each watches its socket until it is really over

    async def _committed(self) -> bool:
        """Whether the caller confirms that the FUSE program has the descriptor."""
        return await self._receives(CommitRequest, self._front.configuration.deadlines.commit)

    async def _receives(self, kind: type[wire.Request], seconds: int) -> bool:
        """Whether the caller's next message, in time, is of that kind."""
        try:
            async with asyncio.timeout(seconds):
                data, with_descriptors = await self._channel.peek()
            return isinstance(wire.decode_request(data), kind) and not with_descriptors
        except (HungUp, TimeoutError, ProtocolError):
            return False

    def _record(self, peer: Peer, request: MountRequest | VolumeRequest, plan: MountPlan, mounted: Mounted) -> Mount:
        device = Device(mounted.device)
        return Mount(
            device=device,
            connection=self._front.registry.connection(device),
            namespace=MountNamespace(mounted.mount_namespace),
            uid=plan.uid,
            pid=peer.pid,
            command=self._command,
            container=peer.container,
            account=peer.account,
            mountpoint=request.mountpoint,
            type=filesystem_type(plan.subtype),
            source=plan.source,
            mounted_at=time.time(),
            request=self.id,
            mount_id=mounted.mount_id,
        )

    def _tell_foreign_pids(self, mounted: Mounted) -> None:
        if not mounted.pids_visible and not self._front.told_foreign_pids:
            self._front.told_foreign_pids = True
            self._front.log(
                log.WARNING,
                "this broker can't join the pid namespaces of its callers: their FUSE programs see pid 0 in "
                "requests. Run it with hostPID, or --pid=host, if they need pids.",
            )

    # Unmounting ------------------------------------------------------------------------------------------------

    async def _unmount(self, peer: Peer, request: UnmountRequest) -> None:
        start = StartUnmount(self._front.configuration.deadlines.operation, request.name, request.only_dead)
        operation = await self._begin(peer, start)
        self._describe(peer)
        registry = self._front.registry
        with _explained(b"failed to unmount %b" % request.mountpoint, request):
            facts = await operation.expect(UnmountFacts)
            device = Device(facts.device)
            mount = registry.find(device) if facts.mounted else None
            operation.say(policy.decide_unmount(self.id.encode(), request, facts, mount))
            if mount and mount.namespace == facts.mount_namespace:
                await rescue.unmounted(self._front, operation, mount)
            else:
                await operation.expect(Unmounted)
        registry.find(device)  # which drops it, if that was its last mount
        self.decided(log.INFO, "unmounted", device=device)
        self._send(Reply(self.id.encode()))
        operation.say(Told())

    # Answers ---------------------------------------------------------------------------------------------------

    def turn_away(self, reached: LimitReached) -> None:
        """Tell the caller that it may not come in. The log is told once for many such (`Server`)."""
        self.id = self._front.refusals.add(self._account_name, reached, self.id)
        self._front.limits_hit[reached.limit] += 1
        self._front.requests["request refused"] += 1
        self._answer(reached)

    def refuse(self, refusal: Refusal) -> None:
        """Tell the caller and the log."""
        if isinstance(refusal, LimitReached):
            self._front.limits_hit[refusal.limit] += 1
        self.decided(log.NOTICE, "refused", errno=refusal.errno, text=refusal.text)
        self._answer(refusal)

    def failed(self, error: MounterFailed) -> None:
        """Tell the caller and the log what is the broker's own fault."""
        self._front.log(log.ERROR, str(error))
        self.refuse(Refusal(EIO, b"the broker's mounter takes no requests"))

    def _answer(self, refusal: Refusal) -> None:
        warnings = refusal.warnings or self._warnings
        self._send(Reply(self.id.encode(), refusal.errno, refusal.text[:_LONGEST_TEXT], warnings))

    def _send(self, reply: Reply) -> None:
        """Tell the caller, if it is still there."""
        with suppress(HungUp):
            self._channel.send(wire.encode_reply(reply))

    async def let_go(self) -> None:
        """End what the mounter has begun, so that it is over when the caller reads that it was refused."""
        if self._operation:
            await self._operation.let_go()

    def end(self) -> None:
        """Let go of everything. The connection is closed before the conversation ends."""
        with self.held, self._channel:
            self._hang_up()

    def _hang_up(self) -> None:
        """End the connection, as far as it is the front's: see `channel` for why somebody else closes it last."""
        self._channel.shut()
        if self._operation and self._operation.stuck:
            rescue.leave(self._front, self._operation, rescue.own(self._front, self._operation.entering))
        if not (self._operation and self._operation.alive):
            self._front.dismissals.add(self._account_name, self._channel.give_away())

    def decided(self, priority: int, result: str, **fields: log.Value) -> None:
        """Write the one record of the call."""
        took = time.monotonic() - self._begun
        self._front.requests[f"{self._name} {result.partition(':')[0]}"] += 1
        self._front.latency.labels(self._name).observe(took)
        message, milliseconds = f"{self._name} {result}", round(1000 * took, 2)
        self._front.log(priority, message, request_id=self.id, milliseconds=milliseconds, **self._known, **fields)


@contextmanager
def _explained(prefix: bytes, request: MountRequest | VolumeRequest | UnmountRequest) -> Iterator[None]:
    """Turn the failure of an operation into the refusal that the user reads; `prefix` says what failed."""
    begun = time.monotonic()
    try:
        yield
    except OperationFailed as error:
        if error.step == "access mountpoint":
            prefix = b"failed to access mountpoint %b" % request.mountpoint
        elif error.step == "mount on the volume":
            prefix = b"failed to mount on the volume"
        raise Refusal(error.errno, b"%b: %b" % (prefix, os.strerror(error.errno).encode())) from None
    except OperationRefused as error:
        if error.descriptors == 1:
            raise ProtocolError(EBADMSG, "the file descriptor was not opened with O_PATH") from None
        came = f"'{request.OPERATION}' takes {request.DESCRIPTORS} file descriptors, {error.descriptors} came"
        raise ProtocolError(EBADMSG, came) from None
    except OperationEnded:  # by its alarm, if it took that long
        problem = ETIMEDOUT if time.monotonic() - begun > 0.9 else EIO
        raise Refusal(problem, b"%b: %b" % (prefix, os.strerror(problem).encode())) from None
