"""What kubelet asks of a volume, checked and put into the broker's words: pure functions from messages to records.

Whatever is wrong is refused with a text that a user reads in an event of the pod, and understands without knowing CSI:
it names the field of the manifest. The table of `volumeAttributes` is `ATTRIBUTES`.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from broker import options
from broker.csi import csi_pb2, requests
from broker.csi.csi_pb2 import VolumeCapability
from broker.csi.requests import INVALID_ARGUMENT, NOT_FOUND, Code
from broker.csi.settings import Settings

#: The driver whose users' FUSE programs expect their own kind of socket; by this name the plugin takes its place.
OLD_DRIVER = "meta-fuse-csi-plugin.csi.storage.pfn.io"

#: Attributes that kubelet adds (CSIDriver's podInfoOnMount), and that of the pod's UID among them.
_KUBELETS = "csi.storage.k8s.io/"
_POD_UID = "csi.storage.k8s.io/pod.uid"

_MODES = VolumeCapability.AccessMode
_READER_ONLY = (_MODES.SINGLE_NODE_READER_ONLY, _MODES.MULTI_NODE_READER_ONLY)

#: What Kubernetes takes for the name of a pod's volume: a label of DNS (RFC 1123).
_VOLUME_NAME = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
#: What the UID of a pod looks like: a UUID, or 32 hexadecimal digits of a static pod.
_UID = re.compile("[0-9a-zA-Z][-0-9a-zA-Z]{0,127}")
#: Where kubelet has the volumes of a pod, in its directory: what is in that of its pods is there, or nowhere.
_TARGET_IN_POD = re.compile(r"pods/([^/]+)/volumes/kubernetes\.io~csi/[^/]+/mount")

# In bytes.
_LONGEST_SOCKET_NAME = 97  # with ".seqpacket" it is an address: as in `invariants`
_LONGEST_ID = 1024
_LONGEST_PATH = 4095
#: CSI allows as much for the mount flags, and for all attributes.
_LONGEST_OPTIONS = 8192
#: As much of what somebody wrote is repeated in a refusal.
_LONGEST_QUOTE = 128


class Refusal(Exception):
    """kubelet asks for what can't be: `code` is gRPC's, `text` what the user reads."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = printable(text)


class Attributes(NamedTuple):
    """What the volumeAttributes of a volume say, with the defaults. `old_clients`: by the driver's name, if None."""

    empty_dir: str = "fuse-fd-passing"
    socket: str = "fuse-csi-ephemeral.sock"
    mount_options: str = ""
    eager: bool = False
    allow_other: bool = True
    old_clients: bool | None = None


# Requests ----------------------------------------------------------------------------------------------------------


def publish(request: csi_pb2.NodePublishVolumeRequest, settings: Settings) -> requests.Publish:
    """Return what the front is asked, with the number 0. Raises Refusal."""
    volume_id = _volume_id(request.volume_id)
    target = _target(request.target_path, settings.kubelet_directory)
    mode, mount = _capability(request.volume_capability)
    _check_filesystem(mount.fs_type)
    attributes = _attributes(request.volume_context)
    wanted = _options((*mount.mount_flags, attributes.mount_options))
    pod = _pod(target, request.volume_context.get(_POD_UID, ""))
    old_clients = attributes.old_clients
    return requests.Publish(
        number=0,
        id=volume_id,
        target=target.encode(),
        pod=pod.encode(),
        directory=f"pods/{pod}/volumes/kubernetes.io~empty-dir/{attributes.empty_dir}".encode(),
        name=attributes.socket.encode(),
        old_clients=settings.driver_name == OLD_DRIVER if old_clients is None else old_clients,
        eager=attributes.eager,
        read_only=request.readonly or mode in _READER_ONLY or _parsed(wanted).read_only,
        allow_other=attributes.allow_other,
        options=wanted,
        group=_group(mount.volume_mount_group),
        alone=mode == _MODES.SINGLE_NODE_SINGLE_WRITER,
    )


def unpublish(request: csi_pb2.NodeUnpublishVolumeRequest, settings: Settings) -> requests.Unpublish:
    """Return what the front is asked, with the number 0. Raises Refusal."""
    target = _target(request.target_path, settings.kubelet_directory)
    return requests.Unpublish(0, _volume_id(request.volume_id), target.encode())


def health(request: csi_pb2.NodeGetVolumeHealthRequest, settings: Settings) -> requests.Stat:
    """Return what the front is asked, with the number 0. Raises Refusal."""
    volume_id = _volume_id(request.volume_id)
    path = request.volume_publish_path
    target = _target(path, settings.kubelet_directory, outside=NOT_FOUND) if path else ""
    return requests.Stat(0, volume_id, target.encode())


def stat(request: csi_pb2.NodeGetVolumeStatsRequest, settings: Settings) -> requests.Stat:
    """Return what the front is asked, with the number 0. Raises Refusal."""
    volume_id = _volume_id(request.volume_id)
    target = _target(request.volume_path, settings.kubelet_directory, outside=NOT_FOUND)
    return requests.Stat(0, volume_id, target.encode())


def stats(stated: requests.Stated) -> csi_pb2.NodeGetVolumeStatsResponse:
    """Return what kubelet is told of a volume. One that nobody serves has room for nothing."""
    usage = csi_pb2.VolumeUsage
    return csi_pb2.NodeGetVolumeStatsResponse(
        usage=[
            usage(
                unit=usage.BYTES,
                total=stated.total_bytes,
                available=stated.available_bytes,
                used=max(0, stated.total_bytes - stated.free_bytes),
            ),
            usage(
                unit=usage.INODES,
                total=stated.total_inodes,
                available=stated.free_inodes,
                used=max(0, stated.total_inodes - stated.free_inodes),
            ),
        ],
        volume_condition=csi_pb2.VolumeCondition(
            abnormal=bool(stated.trouble),
            message=stated.trouble.decode("utf-8", "replace") or "the volume is served",
        ),
    )


def health_of(volume_id: str, stated: requests.Stated) -> csi_pb2.NodeGetVolumeHealthResponse:
    """Return what kubelet is told of how a volume is: nothing, if it is well."""
    answer = csi_pb2.NodeGetVolumeHealthResponse(volume_health=csi_pb2.VolumeHealth(volume_id=volume_id))
    if stated.trouble:
        answer.volume_health.health_statuses.add(
            status=csi_pb2.INACCESSIBLE, reason="NotServed", message=stated.trouble.decode("utf-8", "replace")
        )
    return answer


# Fields ------------------------------------------------------------------------------------------------------------


def _volume_id(value: str) -> bytes:
    if not value:
        raise Refusal(INVALID_ARGUMENT, "the volume id is missing")
    if "\0" in value or len(value.encode()) > _LONGEST_ID:
        raise Refusal(INVALID_ARGUMENT, f"a volume id has at most {_LONGEST_ID} bytes, none of them NUL")
    return value.encode()


def _target(path: str, directory: str, outside: Code = INVALID_ARGUMENT) -> str:
    """Return the path of a volume relative to kubelet's `directory`; it is refused with `outside` if it isn't there."""
    if not path:
        raise Refusal(INVALID_ARGUMENT, "the target path is missing")
    if "\0" in path or len(path.encode()) > _LONGEST_PATH:
        raise Refusal(INVALID_ARGUMENT, f"a target path has at most {_LONGEST_PATH} bytes, none of them NUL")
    names = path.removeprefix(f"{directory}/").split("/")
    inside = [name for name in names if name not in ("", ".")]
    if not path.startswith(f"{directory}/") or not inside or ".." in inside:
        raise Refusal(outside, f"no volume can be at {_quoted(path)}: kubelet's directory is '{directory}'")
    return "/".join(inside)


def _capability(capability: VolumeCapability) -> tuple[int, VolumeCapability.MountVolume]:
    """Return access mode and mount of a volume's capability. Raises Refusal."""
    kind = capability.WhichOneof("access_type")
    if kind is None:
        raise Refusal(INVALID_ARGUMENT, "the volume capability is missing")
    if kind != "mount":
        raise Refusal(INVALID_ARGUMENT, "volumeMode must be Filesystem: this driver has no block devices")
    if capability.access_mode.mode not in _MODES.Mode.values() or capability.access_mode.mode == _MODES.UNKNOWN:
        raise Refusal(INVALID_ARGUMENT, "the access mode is missing, or an unknown one")
    return capability.access_mode.mode, capability.mount


def _check_filesystem(name: str) -> None:
    if name and not re.fullmatch(r"fuse(\..*)?", name):
        raise Refusal(INVALID_ARGUMENT, f"fsType must be fuse, or left out, not {_quoted(name)}")


def _group(value: str) -> int:
    """Return the volume mount group, which is the pod's fsGroup. Raises Refusal."""
    if not value:
        return requests.NO_GROUP
    if not re.fullmatch("[0-9]{1,10}", value) or int(value) >= requests.NO_GROUP:
        raise Refusal(INVALID_ARGUMENT, f"fsGroup must be the number of a group, not {_quoted(value)}")
    return int(value)


def _pod(target: str, told: str) -> str:
    """Return the UID of the pod that the volume is for: what kubelet has `told`, and what the target's path says.

    The path is kubelet's, while attributes are a user's where CSIDriver has no podInfoOnMount; so they must agree.
    Raises Refusal.
    """
    in_target = _TARGET_IN_POD.fullmatch(target)
    if target.startswith("pods/") and not in_target:
        raise Refusal(INVALID_ARGUMENT, f"{_quoted(target)} is not where kubelet has the volumes of a pod")
    pod = in_target[1] if in_target else told
    if not pod:
        why = f"neither the target path nor the CSIDriver's podInfoOnMount ({_POD_UID}) names a pod"
        raise Refusal(INVALID_ARGUMENT, f"whose volume is it? {why}")
    if not _UID.fullmatch(pod):
        raise Refusal(INVALID_ARGUMENT, f"{_quoted(pod)} is not the UID of a pod")
    if told not in ("", pod):
        raise Refusal(INVALID_ARGUMENT, f"the target path is pod {pod}'s, but {_POD_UID} is {_quoted(told)}")
    return pod


def _options(parts: Iterable[str]) -> bytes:
    """Return the mount options of PersistentVolume and volumeAttributes, in this order, as one. Raises Refusal."""
    text = ",".join(part for part in parts if part)
    if "\0" in text or len(text.encode()) > _LONGEST_OPTIONS:
        raise Refusal(INVALID_ARGUMENT, f"mount options have at most {_LONGEST_OPTIONS} bytes, none of them NUL")
    _parsed(text.encode())
    return text.encode()


def _parsed(text: bytes) -> options.MountOptions:
    try:
        return options.parse(text, may_allow_other=True, where_allowed=b"", kernel=b"these")
    except options.Refusal as refusal:
        reason = refusal.text[:_LONGEST_QUOTE].decode("utf-8", "replace")
        raise Refusal(INVALID_ARGUMENT, f"mountOptions: {reason}") from None


def printable(text: str) -> str:
    """Return `text` with escapes for what would break a line, or is not to be seen."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _quoted(text: str) -> str:
    return repr(text[:_LONGEST_QUOTE])


# volumeAttributes --------------------------------------------------------------------------------------------------


def _attributes(context: Mapping[str, str]) -> Attributes:
    """Return what the volumeAttributes say; kubelet's own are left out. Raises Refusal."""
    found: dict[str, Any] = {}
    for name, value in context.items():
        if name.startswith(_KUBELETS):
            continue
        if name not in ATTRIBUTES:
            near = difflib.get_close_matches(name, ATTRIBUTES, 1, cutoff=0.0)[0]
            raise Refusal(INVALID_ARGUMENT, f"volumeAttributes: unknown {_quoted(name)}, did you mean '{near}'?")
        field, read = ATTRIBUTES[name]
        try:
            found[field] = read(value)
        except ValueError as error:
            why = f"'{name}' must be {error}, not {_quoted(value)}"
            raise Refusal(INVALID_ARGUMENT, f"volumeAttributes: {why}") from None
    return Attributes(**found)


def _volume_name(value: str) -> str:
    if not _VOLUME_NAME.fullmatch(value):
        raise ValueError("the name of an emptyDir volume of the pod")
    return value


def _socket_name(value: str) -> str:
    if (
        "/" in value
        or not value.isprintable()
        or value in ("", ".", "..")
        or len(value.encode()) > _LONGEST_SOCKET_NAME
    ):
        raise ValueError(f"the name of a file, of at most {_LONGEST_SOCKET_NAME} bytes")
    return value


def _is_eager(value: str) -> bool:
    if value not in ("onConnect", "eager"):
        raise ValueError("'onConnect' or 'eager'")
    return value == "eager"


def _boolean(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("'true' or 'false', in quotes")
    return value == "true"


#: The volumeAttributes: which field of `Attributes` each is, and what reads its value, or raises ValueError.
ATTRIBUTES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "fdPassingEmptyDirName": ("empty_dir", _volume_name),
    "fdPassingSocketName": ("socket", _socket_name),
    "mountOptions": ("mount_options", str),
    "mountTiming": ("eager", _is_eager),
    "allowOther": ("allow_other", _boolean),
    "oldClients": ("old_clients", _boolean),
}
