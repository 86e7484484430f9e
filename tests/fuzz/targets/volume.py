"""kubelet's requests to publish a volume: an input is a serialized NodePublishVolumeRequest."""

from __future__ import annotations

import re

from google.protobuf.message import DecodeError

from fusermount3_broker.csi import volume_requests
from fusermount3_broker.csi.csi_pb2 import NodePublishVolumeRequest, VolumeCapability
from fusermount3_broker.messages import csi, csi_settings
from fusermount3_broker.messages.csi import Publish
from fusermount3_broker.messages.mount_options import MountOptions, parse
from fusermount3_broker.mounter import invariants

_SETTINGS = csi_settings.check("unix:///csi/csi.sock", "node", "fuse.example.org", "/var/lib/kubelet")
_TARGET = "/var/lib/kubelet/pods/0d4f6a2e-7b7a-4b54-9f5e-3f9fd3a1a111/volumes/kubernetes.io~csi/data/mount"
_LONGEST_TEXT = 2048

WORDS = [
    *(name.encode() for name in volume_requests.ATTRIBUTES),
    *(b"csi.storage.k8s.io/pod.uid", b"csi.storage.k8s.io/", b"/var/lib/kubelet/", b"pods/", b"/volumes/", b"../"),
    *(b"true", b"false", b"eager", b"onConnect", b"ro", b"fuse.", b"4294967295"),
]


def _seed(**attributes: str) -> bytes:
    request = NodePublishVolumeRequest(volume_id="csi-1", target_path=_TARGET, volume_context=attributes)
    request.volume_capability.mount.mount_flags.append("noatime")
    request.volume_capability.mount.volume_mount_group = "2000"
    request.volume_capability.access_mode.mode = VolumeCapability.AccessMode.SINGLE_NODE_WRITER
    return request.SerializeToString(deterministic=True)


SEEDS = [
    _seed(),
    _seed(fdPassingEmptyDirName="sockets", fdPassingSocketName="s3.sock", mountOptions="ro,max_read=4096"),
    _seed(mountTiming="eager", allowOther="false", oldClients="true"),
]


def check(data: bytes) -> None:
    """Check that kubelet gets a refusal that fits an event, or the front a request that only concerns that pod."""
    try:
        request = NodePublishVolumeRequest.FromString(data)
    except DecodeError:
        return
    try:
        published = volume_requests.publish(request, _SETTINGS)
    except volume_requests.Refusal as refusal:
        assert refusal.code == csi.INVALID_ARGUMENT
        assert refusal.text.isprintable()
        assert 0 < len(refusal.text) <= _LONGEST_TEXT
        return
    assert csi.load(csi.dump(published)) == published
    _check_places(published)
    assert published.read_only or not (request.readonly or _options(published).read_only)


def _check_places(published: Publish) -> None:
    """Check that the paths are beneath kubelet's directory, and the socket is in the pod's own directory."""
    assert re.fullmatch(rb"[0-9a-zA-Z][-0-9a-zA-Z]*", published.pod)
    assert published.directory.startswith(b"pods/%b/volumes/kubernetes.io~empty-dir/" % published.pod)
    target = published.target
    assert target and not {b"", b".", b".."} & set(target.split(b"/"))
    if all(len(name) <= 255 for name in target.split(b"/")):
        assert invariants.allow_target(target)
        assert invariants.allow_socket(published.directory, published.name, b"", target)


def _options(published: Publish) -> MountOptions:
    return parse(published.options, may_allow_other=True, where_allowed=b"", kernel=b"6.18")
