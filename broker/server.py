"""The front: it accepts callers, learns who they are, has their requests decided, and answers.

One task a connection, from the first byte to the last: `_serve` receives the request, `_mount` and `_unmount` tell
what becomes of it. Everything that might touch a caller's filesystem is the mounter's (`operations`); everything
that is decided is `policy`'s. What a connection holds (descriptors, the conversation with the mounter) is closed
when its task ends, however it ends.
"""

import asyncio
import os
import secrets
import socket
import stat
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from errno import EBADMSG, EIO, ETIMEDOUT

from broker import log, policy
from broker.channel import Channel, HungUp, close_all
from broker.config import Configuration
from broker.operations import Mounter, Operation, OperationEnded, OperationFailed
from broker.options import Refusal
from broker.peer import Peer, PeerGone, describe, identify
from broker.plan import (
    Ask,
    Keep,
    Mounted,
    MountFacts,
    MountPlan,
    Record,
    StartMount,
    StartUnmount,
    Unmounted,
    UnmountFacts,
)
from broker.registry import Device, Mount, MountNamespace, Registry
from fusermount3_proxy import wire
from fusermount3_proxy.wire import CommitRequest, MountRequest, ProtocolError, Reply, UnmountRequest


class Server:
    """The front's state: configuration, mounter, registry, and what has been counted.

    `configuration` may be replaced at any time; a request is decided by the one in force when it is decided.
    """

    def __init__(self, configuration: Configuration, mounter: Mounter, registry: Registry, write_log: log.Log) -> None:
        self.configuration = configuration
        self.mounter = mounter
        self.registry = registry
        self.log = write_log
        self.started = time.time()
        self.requests: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(configuration.max_requests)
        self._told_foreign_pids = False
        self._last_filesystem = 0

    async def run(self, listeners: Sequence[socket.socket], stop: asyncio.Event) -> None:
        """Serve the callers that come on `listeners` until `stop`; then finish what was begun."""
        for listener in listeners:
            listener.setblocking(False)
        accepting = [asyncio.create_task(self._accept(listener)) for listener in listeners]
        await stop.wait()
        for task in accepting:
            task.cancel()
        await asyncio.gather(*accepting, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept callers while there are places; the others wait in the kernel's queue."""
        loop = asyncio.get_running_loop()
        while True:
            await self._places.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors left, for example: callers wait, and it passes
                self._places.release()
                self.log(log.ERROR, f"cannot accept a caller: {error}")
                await asyncio.sleep(0.1)
                continue
            except asyncio.CancelledError:
                self._places.release()
                raise
            task = loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._places.release()
        if not task.cancelled() and (error := task.exception()):
            self.log(log.ERROR, f"internal error: {error!r}")

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one caller, from request to answer."""
        call = Call(secrets.token_hex(4))
        with Channel(connection) as channel, ExitStack() as held:
            try:
                call.peer = identify(channel.socket)
                held.callback(os.close, call.peer.pidfd)
                request, pinned = await self._receive(channel, held)
                await self._carry_out(call, channel, held, request, pinned)
            except Refusal as refusal:
                self._refuse(call, channel, refusal)
            except ProtocolError as error:
                self._refuse(call, channel, Refusal(error.errno, f"bad request: {error.text}".encode()))
            except (HungUp, PeerGone):
                self._decided(call, log.INFO, "caller went away")

    async def _receive(self, channel: Channel, held: ExitStack) -> tuple[MountRequest | UnmountRequest, int]:
        """Return the request and the descriptor that it pins, which `held` closes."""
        try:
            async with asyncio.timeout(self.configuration.deadlines.request):
                data, descriptors = await channel.receive()
        except TimeoutError:
            raise Refusal(ETIMEDOUT, b"no request came in time") from None
        held.callback(close_all, descriptors)
        request = wire.decode_request(data, len(descriptors))
        if isinstance(request, CommitRequest):
            raise ProtocolError(EBADMSG, "'commit' before a mount")
        return request, descriptors[0]

    async def _carry_out(
        self,
        call: "Call",
        channel: Channel,
        held: ExitStack,
        request: MountRequest | UnmountRequest,
        pinned: int,
    ) -> None:
        call.operation = request.OPERATION
        call.mountpoint = request.mountpoint
        if isinstance(request, MountRequest):
            call.options = request.options
            await self._mount(call, channel, held, request, pinned)
        else:
            await self._unmount(call, channel, held, request, pinned)

    async def _mount(
        self, call: "Call", channel: Channel, held: ExitStack, request: MountRequest, mountpoint: int
    ) -> None:
        """Mount in the caller's namespaces, and keep the mount once the descriptor has arrived where it belongs."""
        operation = held.enter_context(
            self.mounter.begin(
                StartMount(self.configuration.deadlines.operation),
                channel.socket,
                call.require_peer().pidfd,
                mountpoint,
            )
        )
        with _explained(b"mount failed", request.mountpoint):
            plan = self._guess(call, request)
            operation.say(plan or Ask())
            call.describe_peer()
            said = await operation.hear()
            if plan is None or not isinstance(said, Mounted):
                plan, said = await self._mount_on_facts(call, request, operation, said)
        self._tell_foreign_pids(said)
        mount = self._record(call, plan, said)
        if await self._committed(channel):
            self.registry.add(mount)
            with suppress(OperationEnded):  # a child that was killed can't undo the mount: it stays all the same
                operation.say(Keep())
            self._decided(call, log.INFO, "mounted", device=mount.device, type=mount.type, source=mount.source)
        else:
            await operation.undo()
            self._decided(call, log.NOTICE, "rolled back: the caller did not take the mount", errno=0)

    def _guess(self, call: "Call", request: MountRequest) -> MountPlan | None:
        """Return the plan that is right if the caller and its mountpoint are as most are; see `plan`."""
        if len(self.registry) >= self.configuration.mount_max >= 0:
            return None  # the facts say how many are the caller's
        peer = call.require_peer()
        usual = MountFacts(peer.uid, peer.gid, stat.S_IFDIR, False, self._last_filesystem, 0, 0)
        try:
            return policy.decide_mount(call.id.encode(), request, usual, 0, self.configuration)
        except Refusal:
            return None  # the facts may give another reason, which the user is to read then

    async def _mount_on_facts(
        self, call: "Call", request: MountRequest, operation: Operation, facts: Record
    ) -> tuple[MountPlan, Mounted]:
        """Decide on what the child found, and have that carried out. Raises Refusal and what `operation` raises."""
        if not isinstance(facts, MountFacts):
            raise OperationEnded
        self._last_filesystem = facts.filesystem
        limit = self.configuration.mount_max
        live = self.registry.count(MountNamespace(facts.mount_namespace), limit)
        plan = policy.decide_mount(call.id.encode(), request, facts, live, self.configuration)
        operation.say(plan)
        return plan, await operation.expect(Mounted)

    async def _committed(self, channel: Channel) -> bool:
        """Whether the caller confirms that the FUSE program has the descriptor."""
        try:
            async with asyncio.timeout(self.configuration.deadlines.commit):
                data, descriptors = await channel.receive()
            close_all(descriptors)
            return isinstance(wire.decode_request(data, len(descriptors)), CommitRequest)
        except (HungUp, TimeoutError, ProtocolError):
            return False

    def _record(self, call: "Call", plan: MountPlan, mounted: Mounted) -> Mount:
        peer = call.require_peer()
        device = Device(mounted.device)
        return Mount(
            device=device,
            born=self.registry.born(device),
            namespace=MountNamespace(mounted.mount_namespace),
            uid=plan.uid,
            pid=peer.pid,
            command=call.command,
            container=call.container,
            mountpoint=call.mountpoint,
            type="fuse" + (f".{os.fsdecode(plan.subtype)}" if plan.subtype else ""),
            source=plan.source,
            mounted_at=time.time(),
            request=call.id,
        )

    async def _unmount(
        self, call: "Call", channel: Channel, held: ExitStack, request: UnmountRequest, directory: int
    ) -> None:
        start = StartUnmount(self.configuration.deadlines.operation, request.name, request.only_dead)
        operation = held.enter_context(self.mounter.begin(start, channel.socket, call.require_peer().pidfd, directory))
        call.describe_peer()
        with _explained(b"failed to unmount %b" % request.mountpoint, request.mountpoint):
            facts = await operation.expect(UnmountFacts)
            device = Device(facts.device)
            mount = self.registry.find(device) if facts.mounted else None
            operation.say(policy.decide_unmount(request, facts, mount))
            await operation.expect(Unmounted)
        self.registry.find(device)
        self._decided(call, log.INFO, "unmounted", device=device)
        channel.send(wire.encode_reply(Reply(call.id.encode())))

    def _tell_foreign_pids(self, mounted: Mounted) -> None:
        if not mounted.pids_visible and not self._told_foreign_pids:
            self._told_foreign_pids = True
            self.log(
                log.WARNING,
                "this broker can't join the pid namespaces of its callers: their FUSE programs see pid 0 in "
                "requests. Run it with hostPID, or --pid=host, if they need pids.",
            )

    def _refuse(self, call: "Call", channel: Channel, refusal: Refusal) -> None:
        self._decided(call, log.NOTICE, "refused", errno=refusal.errno, text=refusal.text)
        try:
            reply = Reply(call.id.encode(), refusal.errno, refusal.text, refusal.warnings)
            channel.send(wire.encode_reply(reply))
        except HungUp:
            pass

    def _decided(self, call: "Call", priority: int, result: str, **fields: log.Value) -> None:
        """Write the one record of the request."""
        self.requests[f"{call.operation or 'none'} {result.partition(':')[0]}"] += 1
        self.log(priority, f"{call.operation or 'request'} {result}", request_id=call.id, **call.facts(), **fields)


class Call:
    """One request as it becomes known, for its log record. `id` is in what the user reads, too."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.peer: Peer | None = None
        self.operation = ""
        self.mountpoint = b""
        self.options = b""
        self.command = self.container = ""
        self._begun = time.monotonic()

    def require_peer(self) -> Peer:
        assert self.peer is not None, "a request is carried out for an identified peer only"
        return self.peer

    def describe_peer(self) -> None:
        """Look up what people call the caller; done while the mounter works, because it takes a while."""
        self.command, self.container = describe(self.require_peer().pid)

    def facts(self) -> dict[str, log.Value]:
        """Return what is known by now."""
        known: dict[str, log.Value] = {"milliseconds": round(1000 * (time.monotonic() - self._begun), 2)}
        if self.peer:
            known |= {
                "caller_uid": self.peer.uid,
                "caller_gid": self.peer.gid,
                "caller_pid": self.peer.pid,
                "caller_command": self.command,
                "caller_container": self.container,
            }
        if self.operation:
            known["mountpoint"] = self.mountpoint
        if self.options:
            known["options"] = self.options
        return known


class _explained:
    """Turn the failure of an operation into the refusal that the user reads; `prefix` says what failed."""

    def __init__(self, prefix: bytes, mountpoint: bytes) -> None:
        self._prefix = prefix
        self._mountpoint = mountpoint
        self._begun = time.monotonic()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, OperationFailed):
            prefix = self._prefix
            if error.step == "access mountpoint":
                prefix = b"failed to access mountpoint %b" % self._mountpoint
            raise Refusal(error.errno, b"%b: %b" % (prefix, os.strerror(error.errno).encode())) from None
        if isinstance(error, OperationEnded):
            problem = ETIMEDOUT if time.monotonic() - self._begun > 0.9 else EIO
            raise Refusal(problem, b"%b: %b" % (self._prefix, os.strerror(problem).encode())) from None
