"""Calls on the sockets of a volume: their mounts appear at the volume's target, too, or only there.

A `VolumeCall` differs from any other call (`call`) in three points: only callers of the volume's pod may make it, the
volume decides some mount options, and the mounter attaches the mount elsewhere. The clients of meta-fuse-csi-plugin
send no request: an `OldCall` mounts for them, sends the descriptor as soon as they have connected, and expects no
confirmation.
"""

import json
import os
import socket
import time
from dataclasses import replace
from errno import EBUSY

from fusermount3_broker.front.call import Call, FirstRequest
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions import policy
from fusermount3_broker.front.decisions.limits import Account
from fusermount3_broker.front.failure_texts import explained
from fusermount3_broker.front.lent_devices import Offer
from fusermount3_broker.front.model import Mount
from fusermount3_broker.front.mounter_client import Operation
from fusermount3_broker.front.peer import Peer
from fusermount3_broker.front.published_volumes import Publication, Publications, Unserved
from fusermount3_broker.front.restored_containers import former
from fusermount3_broker.front.serving_processes import MOMENT
from fusermount3_broker.messages.mounter import Made, MountFacts, MountPlan, Offered, StartOffer, StartVolumeMount
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service import log
from fusermount3_broker.service.channel import Channel, HungUp
from fusermount3_broker.service.configuration import FILESYSTEMS
from fusermount3_proxy.wire import DeviceRequest, MountRequest, Reply, UnmountRequest, VolumeRequest


class VolumeCall(Call):
    """A call on the volume of `publication`."""

    def __init__(self, publications: Publications, publication: Publication, front: Front, channel: Channel) -> None:
        super().__init__(front, channel)
        self._publications = publications
        self._publication = publication
        self._volume = publication.volume
        self._target = self._volume.target
        self._known |= {"target": self._target, "volume": self._volume.id, "pod": self._volume.pod}
        #: The filesystem of an eager volume, while this call's FUSE program may be the one that will serve it.
        self._lent: Unserved | None = None
        #: The mount that has been made.
        self._mounted: Mount | None = None
        #: Whether the connection stays open after the call.
        self._is_kept = False

    async def _read_request(self) -> FirstRequest:
        self._check_caller()
        return await super()._read_request()

    def _answer_unused(self) -> None:
        """Answer whether other pods have the filesystem of this volume, which no other pod gets any more.

        It is asked again and again, so not logged.
        """
        users = self._publications.borrowing.retire(self._volume) + self._publications.lending.retire(self._target)
        text = b"volumes of other pods that use the filesystem: %d" % users if users else b""
        self._send(Reply(self.id.encode(), EBUSY if users else 0, text))

    async def _offer(self, peer: Peer, request: DeviceRequest) -> None:
        """Offer the caller's device to block volumes of other pods, as long as the connection lives. Raises Refusal."""
        self._name = request.OPERATION
        policy.check_offer(self._volume, self._publications.lending.is_offered(self._target))
        with explained(b"can't offer the device", request):
            start = StartOffer(self._front.configuration.deadlines.operation, self._target)
            operation = await self._begin(peer, start)
            self._describe(peer)
            said, (node,) = await operation.expect_with_descriptors(Offered, 1)
        try:
            policy.check_size(self._volume, said.size)
        except Refusal:
            os.close(node)
            raise
        self._end_operation()
        self._send(Reply(self.id.encode()))
        self._is_kept = True
        connection = Channel(self._channel.give_away())
        self._publications.lending.offer(Offer(self._volume, said, node, connection, peer.account))
        self.decided(log.INFO, "offered", device=f"{os.major(said.device)}:{os.minor(said.device)}", size=said.size)

    def _hang_up(self) -> None:
        """As for any call; but leave the connection of an offer to who has it now."""
        if self._is_kept:
            self._leave()
        else:
            super()._hang_up()

    def _check_caller(self) -> None:
        """Raise Refusal unless the caller is in the volume's pod."""
        peer, _ = self._caller
        policy.check_volume_caller(self._volume, peer.pod)

    async def _mount(self, peer: Peer, account: Account, request: MountRequest | VolumeRequest) -> None:
        self._name = VolumeRequest.OPERATION
        try:
            await super()._mount(peer, account, request)
        finally:
            if self._lent and not self._publication.take_back():
                self._front.serving.suspect(self._lent.mount, time.monotonic() + MOMENT)
        if self._mounted:
            self._publications.restored_containers.look_at(self._mounted, self._volume)

    async def _unmount(self, peer: Peer, request: UnmountRequest) -> Mount | None:
        mount = await super()._unmount(peer, request)
        if mount and mount.volume == self._target:
            if self._volume.share:
                self._publications.borrowing.unmounted(self._volume, mount)
            else:
                self._publications.unmounted_volumes.unmounted(self._volume, mount)
        return mount

    def _may_be_plain(self, _request: MountRequest | VolumeRequest) -> bool:
        return False

    async def _begin_mount(self, peer: Peer, request: MountRequest | VolumeRequest) -> Operation:
        deadlines = self._front.configuration.deadlines
        self._lent = self._publication.lend()
        held = [self._lent.device] if self._lent else []
        start = StartVolumeMount(
            seconds=deadlines.operation,
            commit_seconds=deadlines.commit,
            target=self._target,
            pinned=isinstance(request, MountRequest),
            held=bool(held),
            read_only=self._volume.read_only,
            group=self._volume.group,
            former=former(self._front, self._target),
            shared=self._volume.share != b"",
        )
        return await self._begin(peer, start, *held)

    def _decide(self, request: MountRequest | VolumeRequest, facts: MountFacts, live_mounts: int) -> MountPlan:
        id, configuration = self.id.encode(), self._front.configuration
        return policy.decide_volume_mount(id, request, facts, live_mounts, self._volume, configuration)

    def _usual_filesystem(self, request: MountRequest | VolumeRequest) -> int:
        is_pinned = isinstance(request, MountRequest)
        return super()._usual_filesystem(request) if is_pinned else FILESYSTEMS["tmpfs"]  # the placeholder's

    def _record(self, peer: Peer, request: MountRequest | VolumeRequest, plan: MountPlan, made: Made) -> Mount:
        mount = replace(super()._record(peer, request, plan, made), volume=self._target, share=self._volume.share)
        if self._lent:
            mount = replace(mount, type=self._lent.mount.type, source=self._lent.mount.source)
        self._mounted = mount
        return mount

    def _not_mounted(self, mount: Mount) -> None:
        """As for any mount; but restore the record of a lent filesystem, which still exists."""
        if self._lent and self._front.registry.find(mount.device):
            self._front.registry.restore(self._lent.mount)
        super()._not_mounted(mount)

    async def _committed(self) -> bool:
        committed = await super()._committed()
        if committed and self._lent:
            self._publication.hand_over()
            self._lent = None
        if committed and self._mounted:
            self._publications.unmounted_volumes.forget(self._target)
            self._publications.borrowing.committed(self._volume, self._mounted)
        return committed


class OldCall(VolumeCall):
    """A call on a stream socket, of a client that only waits for a descriptor; a closed connection means refusal."""

    async def serve(self) -> None:
        """Mount, and send the descriptor. Raises Refusal, HungUp."""
        peer, account = self._caller
        self._name = VolumeRequest.OPERATION
        self._known |= {"caller_uid": peer.uid, "caller_gid": peer.gid, "caller_pid": peer.pid}
        self._known["caller_container"] = peer.container
        self._check_caller()
        self._describe(peer)
        self._count_mount(account)
        if lent := self._publication.lend():
            try:
                mount = self._write_down_as_callers(lent.mount, peer)
                self._give(lent.device)
            except BaseException:
                self._front.registry.restore(lent.mount)
                self._publication.take_back()
                raise
            self._publication.hand_over()
        else:
            mount = await self._mount_and_give(peer)
        self.decided(log.INFO, "mounted", device=mount.device, type=mount.type, source=mount.source)
        self._publications.restored_containers.look_at(mount, self._volume)

    def _write_down_as_callers(self, mount: Mount, peer: Peer) -> Mount:
        """Record the mount as the caller's, and return it so. Raises Refusal."""
        mount = replace(mount, request_id=self.id, pid=peer.pid, command=self._command)
        mount = replace(mount, container=peer.container, account=peer.account)
        self._write_down(mount)
        self._front.serving.find_candidates(mount)
        return mount

    async def _mount_and_give(self, peer: Peer) -> Mount:
        device, mount = await self._publications.mount_now(self._publication)
        try:
            mount = self._write_down_as_callers(mount, peer)
            self._give(device)
        finally:
            os.close(device)
        return mount

    def _give(self, device: int) -> None:
        """Send the descriptor in the format that these clients expect. Raises HungUp."""
        message = json.dumps({"volumeName": self._volume.id.decode("utf-8", "replace")}).encode()
        try:
            socket.send_fds(self._channel.socket, [message], [device], socket.MSG_NOSIGNAL)
        except OSError:
            raise HungUp from None

    def _send(self, reply: Reply) -> None:
        """Send nothing: these clients understand no reply."""
