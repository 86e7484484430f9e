"""One call, from the request to the reply: read the request, decide, carry it out, confirm.

Each `Call` has its own task. The mounter does everything that might touch a caller's filesystem (`mounter_client`);
`policy` makes all decisions.
"""

import asyncio
import stat
import time
from contextlib import ExitStack, suppress
from errno import EBADMSG, EOPNOTSUPP, ETIMEDOUT

from fusermount3_broker.front import hung_connections
from fusermount3_broker.front.caller_connection import CallerConnection
from fusermount3_broker.front.decisions import policy
from fusermount3_broker.front.decisions.limits import Account, check_mounts
from fusermount3_broker.front.failure_texts import explained
from fusermount3_broker.front.model import Device, Mount, MountNamespace
from fusermount3_broker.front.mounter_client import (
    Operation,
    OperationEnded,
    OperationFailed,
    OperationNotPlain,
    OperationRefused,
)
from fusermount3_broker.front.peer import Peer
from fusermount3_broker.front.tables.database import NotWritten
from fusermount3_broker.front.tables.mount_table import filesystem_type
from fusermount3_broker.messages.mounter import (
    Ask,
    Attach,
    HandedOver,
    Keep,
    Kept,
    Made,
    Mounted,
    MountFacts,
    MountPlan,
    Proceed,
    Record,
    RolledBack,
    StartMount,
    StartPlainMount,
    StartPlainUnmount,
    StartUnmount,
    Told,
    Unmounted,
    UnmountFacts,
)
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service import log
from fusermount3_broker.service.channel import HungUp
from fusermount3_proxy import wire
from fusermount3_proxy.wire import (
    CommitRequest,
    DeviceRequest,
    MountRequest,
    ProceedRequest,
    ProtocolError,
    Reply,
    UnmountRequest,
    UnusedRequest,
    VolumeRequest,
)

#: The requests with which a connection may begin.
FirstRequest = MountRequest | VolumeRequest | UnmountRequest | UnusedRequest | DeviceRequest
#: From linux/limits.h: the mountpoint in a request may be longer than any path.
_PATH_MAX = 4096


class Call(CallerConnection):
    """A call that mounts at the caller's own mountpoint, or unmounts.

    `volume_call` contains the differences for calls on the socket of a volume.
    """

    async def serve(self) -> None:
        """Receive the request and carry it out. Raises Refusal, ProtocolError, MounterFailed, HungUp."""
        peer, account = self._caller
        self._known |= {"caller_uid": peer.uid, "caller_gid": peer.gid, "caller_pid": peer.pid}
        self._known["caller_container"] = peer.container
        request = await self._read_request()
        if isinstance(request, UnusedRequest):
            self._answer_unused()
            return
        if isinstance(request, DeviceRequest):
            await self._offer(peer, request)
            return
        self._name = request.OPERATION
        self._known["mountpoint"] = request.mountpoint
        if isinstance(request, UnmountRequest):
            await self._unmount(peer, request)
        else:
            self._known["options"] = request.options
            await self._mount(peer, account, request)

    def _answer_unused(self) -> None:
        """Answer whether the volume is unused. Raises Refusal."""
        raise Refusal(EOPNOTSUPP, b"this is not the socket of a volume")

    async def _offer(self, _peer: Peer, _request: DeviceRequest) -> None:
        """Offer the caller's device to volumes of other pods. Raises Refusal."""
        raise Refusal(EOPNOTSUPP, b"this is not the socket of a volume")

    async def _read_request(self) -> FirstRequest:
        """Return the request. It stays in the socket, for the mounter's child to take with its descriptors."""
        try:
            async with asyncio.timeout(self._front.configuration.deadlines.request):
                data, _ = await self._channel.peek()
        except TimeoutError:
            raise Refusal(ETIMEDOUT, b"no request came in time") from None
        request = wire.decode_request(data)
        if not isinstance(request, FirstRequest):
            raise ProtocolError(EBADMSG, f"'{request.OPERATION}' before a mount")
        return request

    # Mounting --------------------------------------------------------------------------------------------------

    async def _mount(self, peer: Peer, account: Account, request: MountRequest | VolumeRequest) -> None:
        """Mount in the caller's namespaces, and keep the mount once the FUSE program has the descriptor."""
        counted = self._count_mount(account)
        if request.sync_init:
            await self._take_slot(self._front.long_slots)
            self.held.callback(self._front.long_slots.give_back, account.name)
        with explained(b"mount failed", request):
            operation, plan, said = await self._begin_and_agree(peer, request, counted)
            if isinstance(said, HandedOver):
                said = await self._proceed(operation)
            if not isinstance(said, Made):
                raise OperationEnded
            self._front.tell_hidden_pids(said.pids, peer.container)
            mount = self._record(peer, request, plan, said)
            self._write_down(mount)
            counted.close()
            await self._attach(operation, mount)
        if request.sync_init:
            self._send(Reply(self.id.encode()))
        if await self._committed():
            operation.say(Keep())  # even a killed child leaves the mount: it can't undo it
            # The mount is kept even if the broker stops now.
            with suppress(OperationEnded, OperationFailed, OperationRefused, asyncio.CancelledError):
                await operation.expect(Kept)
            self.decided(log.INFO, "mounted", device=mount.device, type=mount.type, source=mount.source)
        elif await self._undo(operation, mount):
            self._not_mounted(mount)
            self.decided(log.NOTICE, "rolled back: the caller did not take the mount")
        else:  # the mount stays in the registry, so that its owner can unmount it
            self.decided(log.WARNING, "not rolled back: it is covered, or its guardian was killed", device=mount.device)

    async def _begin_and_agree(
        self, peer: Peer, request: MountRequest | VolumeRequest, counted: ExitStack
    ) -> tuple[Operation, MountPlan, Record]:
        """Start the mount operation, and agree on a plan; first with a child for plain mounts if this may be one.

        Return the operation, and what `_agree` returns; raises as that, and MounterFailed.
        """
        if self._may_be_plain(request):
            deadlines = self._front.configuration.deadlines
            operation = await self._begin(peer, StartPlainMount(deadlines.operation, deadlines.commit))
            attempt = counted.enter_context(ExitStack())
            try:
                return operation, *await self._agree(peer, request, operation, attempt)
            except OperationNotPlain:
                attempt.close()
                self._end_operation()
        operation = await self._begin_mount(peer, request)
        return operation, *await self._agree(peer, request, operation, counted)

    def _may_be_plain(self, request: MountRequest | VolumeRequest) -> bool:
        is_mount = isinstance(request, MountRequest)
        return self._front.mounter.serves_plain_calls and is_mount and not request.sync_init

    async def _begin_mount(self, peer: Peer, request: MountRequest | VolumeRequest) -> Operation:
        """Start the mount operation of the mounter. Raises Refusal, MounterFailed."""
        if isinstance(request, VolumeRequest):
            raise Refusal(EOPNOTSUPP, b"this is not the socket of a volume: a mountpoint is required")
        deadlines = self._front.configuration.deadlines
        return await self._begin(peer, StartMount(deadlines.operation, deadlines.commit))

    def _decide(self, request: MountRequest | VolumeRequest, facts: MountFacts, live_mounts: int) -> MountPlan:
        """Return the plan for the request. Raises Refusal."""
        assert isinstance(request, MountRequest)
        return policy.decide_mount(self.id.encode(), request, facts, live_mounts, self._front.configuration)

    def _write_down(self, mount: Mount) -> None:
        """Record the mount before it is attached, so that it is known whichever process is killed. Raises Refusal."""
        try:
            self._front.registry.add(mount)
        except NotWritten as error:
            raise Refusal(error.errno, b"mount failed: %b" % error.text.encode()) from None

    async def _attach(self, operation: Operation, mount: Mount) -> None:
        """Have the child attach the recorded mount. Raises HungUp, and the errors of `operation`."""
        operation.say(Attach())
        self._front.serving.find_candidates(mount)  # while the child attaches it
        try:
            said = await operation.hear()
        except (OperationEnded, OperationFailed, OperationRefused):
            self._not_mounted(mount)
            raise
        if isinstance(said, RolledBack):  # the caller has gone away meanwhile
            self._not_mounted(mount)
            raise HungUp
        if not isinstance(said, Mounted):
            raise OperationEnded

    def _not_mounted(self, mount: Mount) -> None:
        """Forget a mount that was not kept, unless it still exists."""
        self._front.registry.find(mount.device)  # drops its record if the mount is gone

    async def _undo(self, operation: Operation, mount: Mount) -> bool:
        """Undo the mount. Return whether the child has unmounted it."""
        async with hung_connections.aborted_if_hung(self._front, mount):
            return await operation.undo()

    def _count_mount(self, account: Account) -> ExitStack:
        """Count a mount before it exists, until the returned stack is closed. Raises LimitReached."""
        most = self._front.configuration.limits.mounts
        limit = most - account.mounting if most else -1  # never reached, so the registry doesn't check each mount
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
        """Agree on a plan with the mounter's child. Return the plan, and the child's next record once it has begun.

        Until `counted` is closed, the mount counts for its namespace, once that is known. Raises Refusal and the errors
        of `operation`.
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
        others = self._front.guessing + self._front.mounting_in[namespace]  # mounts that don't exist yet
        live = self._front.registry.count(namespace, limit - others) + others
        plan = self._decide(request, said, live)
        self._front.mounting_in[namespace] += 1
        counted.callback(self._front.ends_mounting_in, namespace)
        self._warnings = tuple(plan.warnings.splitlines())
        operation.say(plan)
        return plan, await operation.hear()

    def _guess(self, peer: Peer, request: MountRequest | VolumeRequest) -> MountPlan | None:
        """Return the plan for the usual caller and mountpoint, to save a round trip; see `messages.mounter`.

        Return None if a namespace may reach its limit: then the facts are needed to count the mounts of the caller's
        namespace. Return None, too, if the usual facts lead to a refusal.
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
            return None  # the actual facts may give another reason, which the user is to read

    def _usual_filesystem(self, _request: MountRequest | VolumeRequest) -> int:
        return self._front.usual_filesystem

    async def _proceed(self, operation: Operation) -> Record:
        """Wait until the FUSE program, which has its descriptor before the mount, is ready to serve; then mount.

        Return the child's next record. Raises Refusal, HungUp, and the errors of `operation`.
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
            await asyncio.wait([gone, said])  # each watches its socket until it has really ended

    async def _committed(self) -> bool:
        """Return whether the caller confirms that the FUSE program has the descriptor."""
        return await self._receives(CommitRequest, self._front.configuration.deadlines.commit)

    async def _receives(self, kind: type[wire.Request], seconds: int) -> bool:
        """Return whether the caller's next message is a `kind` without descriptors and comes within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                data, with_descriptors = await self._channel.peek()
            return isinstance(wire.decode_request(data), kind) and not with_descriptors
        except (HungUp, TimeoutError, ProtocolError):
            return False

    def _record(self, peer: Peer, request: MountRequest | VolumeRequest, plan: MountPlan, made: Made) -> Mount:
        device = Device(made.device)
        return Mount(
            device=device,
            connection=self._front.registry.connection(device),
            namespace=MountNamespace(made.mount_namespace),
            uid=plan.uid,
            pid=peer.pid,
            command=self._command,
            container=peer.container,
            account=peer.account,
            mountpoint=request.mountpoint[:_PATH_MAX],
            type=filesystem_type(plan.subtype),
            source=plan.source,
            mounted_at=time.time(),
            request_id=self.id,
            mount_id=made.mount_id,
        )

    # Unmounting ------------------------------------------------------------------------------------------------

    async def _unmount(self, peer: Peer, request: UnmountRequest) -> Mount | None:
        """Unmount for the caller, and answer; return the mount, unless it was gone already. Raises Refusal."""
        registry = self._front.registry
        with explained(b"failed to unmount %b" % request.mountpoint, request):
            operation, facts = await self._begin_unmount(peer, request)
            if self._is_late(request, facts):
                await self.let_go()
                self.decided(log.INFO, "unmounted: it was dead, and is gone already")
                self._send(Reply(self.id.encode()))
                return None
            device = Device(facts.device)
            mount = registry.find(device) if facts.mounted else None
            operation.say(policy.decide_unmount(self.id.encode(), request, facts, mount))
            if mount and mount.namespace == facts.mount_namespace:
                await hung_connections.unmounted(self._front, operation, mount)
            else:
                await operation.expect(Unmounted)
        registry.find(device)  # drops its record if that was its last mount
        self.decided(log.INFO, "unmounted", device=device)
        self._send(Reply(self.id.encode()))
        operation.say(Told())
        return mount

    async def _begin_unmount(self, peer: Peer, request: UnmountRequest) -> tuple[Operation, UnmountFacts]:
        """Start the unmount operation, first with a child for plain unmounts if this may be one; return its facts, too.

        Raises MounterFailed, LimitReached and the errors of the operation.
        """
        seconds = self._front.configuration.deadlines.operation
        if self._front.mounter.serves_plain_calls and not request.only_dead:
            operation = await self._begin(peer, StartPlainUnmount(seconds, request.name))
            self._describe(peer)
            try:
                return operation, await operation.expect(UnmountFacts)
            except OperationNotPlain:
                self._end_operation()
        operation = await self._begin(peer, StartUnmount(seconds, request.name, request.only_dead))
        self._describe(peer)
        return operation, await operation.expect(UnmountFacts)

    def _is_late(self, request: UnmountRequest, facts: UnmountFacts) -> bool:
        """Whether the caller wants to unmount what the broker has just unmounted because it was dead."""
        if facts.mounted or request.only_dead:
            return False
        namespace, mountpoint = MountNamespace(facts.mount_namespace), request.mountpoint[:_PATH_MAX]
        return self._front.states.was_unmounted(namespace, facts.uid, mountpoint, time.monotonic())
