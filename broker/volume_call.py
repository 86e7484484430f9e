"""Calls on the sockets of a volume: what is mounted by them appears at the volume's target, too, or only there.

A `VolumeCall` is a call as any other (`call`), but for who may make it, what is decided by the volume, and where the
mounter puts the mount. The clients of meta-fuse-csi-plugin say nothing: an `OldCall` mounts for them, sends the
descriptor as soon as they have connected, and asks for no confirmation.
"""

import json
import os
import socket
from dataclasses import replace

from broker import log, policy
from broker.call import Call
from broker.channel import Channel, HungUp
from broker.config import FILESYSTEMS
from broker.front import Front
from broker.limits import Account
from broker.operations import Operation
from broker.peer import Peer
from broker.plan import Mounted, MountFacts, MountPlan, StartVolumeMount
from broker.publications import Publication, Publications, Unserved
from broker.registry import Mount
from fusermount3_proxy.wire import MountRequest, Reply, UnmountRequest, VolumeRequest


class VolumeCall(Call):
    """A call on the volume that `publication` serves."""

    def __init__(self, publications: Publications, publication: Publication, front: Front, channel: Channel) -> None:
        super().__init__(front, channel)
        self._publications = publications
        self._publication = publication
        self._volume = publication.volume
        self._target = self._volume.target
        self._known |= {"target": self._target, "volume": self._volume.id}
        #: The volume's filesystem, while that waits for its program and this may be it.
        self._lent: Unserved | None = None

    async def _read_request(self) -> MountRequest | VolumeRequest | UnmountRequest:
        self._check_caller()
        return await super()._read_request()

    def _check_caller(self) -> None:
        """Raise Refusal unless the caller is of the volume's pod."""
        peer, _ = self._caller
        policy.check_volume_caller(self._volume, peer.pod)

    async def _mount(self, peer: Peer, account: Account, request: MountRequest | VolumeRequest) -> None:
        self._name = VolumeRequest.OPERATION
        try:
            await super()._mount(peer, account, request)
        finally:
            if self._lent:
                self._publication.take_back()

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
        )
        return await self._begin(peer, start, *held)

    def _decide(self, request: MountRequest | VolumeRequest, facts: MountFacts, live_mounts: int) -> MountPlan:
        id, configuration = self.id.encode(), self._front.configuration
        return policy.decide_volume_mount(id, request, facts, live_mounts, self._volume, configuration)

    def _usual_filesystem(self, request: MountRequest | VolumeRequest) -> int:
        is_pinned = isinstance(request, MountRequest)
        return super()._usual_filesystem(request) if is_pinned else FILESYSTEMS["tmpfs"]  # that of the placeholder

    def _record(self, peer: Peer, request: MountRequest | VolumeRequest, plan: MountPlan, mounted: Mounted) -> Mount:
        mount = replace(super()._record(peer, request, plan, mounted), volume=self._target)
        return replace(mount, type=self._lent.mount.type, source=self._lent.mount.source) if self._lent else mount

    async def _committed(self) -> bool:
        committed = await super()._committed()
        if committed and self._lent:
            self._publication.hand_over()
            self._lent = None
        return committed


class OldCall(VolumeCall):
    """A call by a stream socket, of a client that only waits for a descriptor, and takes a closed connection for no."""

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
                self._give(lent.device)
            except HungUp:
                self._publication.take_back()
                raise
            self._publication.hand_over()
            mount = lent.mount
        else:
            mount = await self._mount_and_give()
        mount = replace(mount, request=self.id, pid=peer.pid, command=self._command)
        self._front.registry.add(replace(mount, container=peer.container, account=peer.account))
        self.decided(log.INFO, "mounted", device=mount.device, type=mount.type, source=mount.source)

    async def _mount_and_give(self) -> Mount:
        device, mount = await self._publications.mount_now(self._publication)
        try:
            self._give(device)
        finally:
            os.close(device)
        return mount

    def _give(self, device: int) -> None:
        """Send the descriptor, as those clients expect it. Raises HungUp."""
        message = json.dumps({"volumeName": self._volume.id.decode("utf-8", "replace")}).encode()
        try:
            socket.send_fds(self._channel.socket, [message], [device], socket.MSG_NOSIGNAL)
        except OSError:
            raise HungUp from None

    def _send(self, reply: Reply) -> None:
        """They understand no reply."""
