"""kubelet's requests for volumes, checked and translated into records for the front: pure functions.

Each error is refused with a text that appears in an event of the pod, and that users understand without knowing CSI: it
names the field of the manifest. The table of `volumeAttributes` is `ATTRIBUTES`.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fusermount3_broker.csi import csi_pb2
from fusermount3_broker.csi.csi_pb2 import VolumeCapability
from fusermount3_broker.messages import csi, mount_options, refusal, sharing_key
from fusermount3_broker.messages.csi import INVALID_ARGUMENT, NOT_FOUND, Code
from fusermount3_broker.messages.csi_settings import Settings
from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_broker.messages.volume_sockets import LONGEST_SOCKET

#: The driver whose users' FUSE programs expect their own kind of socket; under this name the plugin replaces it.
OLD_DRIVER = "meta-fuse-csi-plugin.csi.storage.pfn.io"

#: Prefix of the attributes that kubelet adds (CSIDriver's podInfoOnMount), and those about the pod.
_KUBELETS = "csi.storage.k8s.io/"
_POD_UID = "csi.storage.k8s.io/pod.uid"
_NAMESPACE = "csi.storage.k8s.io/pod.namespace"
_SERVICE_ACCOUNT = "csi.storage.k8s.io/serviceAccount.name"
#: Kubelet's attribute of an inline volume, which is "true" there.
_EPHEMERAL = "csi.storage.k8s.io/ephemeral"
#: The attribute that names a VolumeTemplate. Beside it are the template's parameters, which are the controller's.
TEMPLATE = "volumeTemplate"
#: The attribute with which a mount pod offers its filesystem to other pods.
SHARE = "share"

_MODES = VolumeCapability.AccessMode
_READER_ONLY = (_MODES.SINGLE_NODE_READER_ONLY, _MODES.MULTI_NODE_READER_ONLY)

#: A pod's volume name in Kubernetes: a label of DNS (RFC 1123).
_VOLUME_NAME = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
#: The UID of a pod: a UUID, or 32 hexadecimal digits for a static pod.
_UID = re.compile("[0-9a-zA-Z][-0-9a-zA-Z]{0,127}")
_SHARING_KEY = re.compile(f"[0-9a-f]{{{sharing_key.LENGTH}}}")
#: The path of a pod's volume in kubelet's directory: a target in its directory of pods must match this.
_TARGET_IN_POD = re.compile(r"pods/([^/]+)/volumes/kubernetes\.io~csi/[^/]+/mount")
#: The path of a pod's block volume in kubelet's directory.
_DEVICE_OF_POD = re.compile(r"plugins/kubernetes\.io/csi/volumeDevices/publish/[^/]+/([^/]+)")

# In bytes.
_LONGEST_ID = 1024
_LONGEST_PATH = 4095
#: CSI's limit for the mount flags, and for all attributes.
_LONGEST_OPTIONS = 8192
#: The most of a user's text that a refusal quotes.
_LONGEST_QUOTE = 128


class Refusal(Exception):
    """kubelet's request can't be met: `code` is gRPC's, `text` is for the user."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = visible(text)


class Attributes(NamedTuple):
    """The volumeAttributes of a volume, with the defaults. `old_clients`: by the driver's name, if None."""

    empty_dir: str = "fuse-fd-passing"
    socket: str = "fuse-csi-ephemeral.sock"
    mount_options: str = ""
    eager: bool = False
    allow_other: bool = True
    old_clients: bool | None = None
    share: str = ""
    capacity: int = 0


# Requests ----------------------------------------------------------------------------------------------------------


def publish(request: csi_pb2.NodePublishVolumeRequest, settings: Settings) -> csi.Publish:
    """Return the front's request, with the number 0. Raises Refusal."""
    volume_id = _volume_id(request.volume_id)
    target = _target(request.target_path, settings.kubelet_directory)
    mode, mount, is_block = _capability(request.volume_capability)
    _check_filesystem(mount.fs_type)
    attributes = _attributes(request.volume_context)
    wanted = _options((*mount.mount_flags, attributes.mount_options))
    pod = _pod(target, request.volume_context.get(_POD_UID, ""), is_block)
    old_clients = settings.driver_name == OLD_DRIVER if attributes.old_clients is None else attributes.old_clients
    if attributes.share:
        _check_share(request.volume_context, attributes, old_clients)
    keys = _keys_to_borrow(request, is_block=is_block)
    if is_block and not keys:
        why = f"'{TEMPLATE}' and a CSIDriver with podInfoOnMount: a mount pod offers the device"
        raise Refusal(INVALID_ARGUMENT, f"a volume with volumeMode Block needs the attribute {why}")
    if attributes.capacity and not attributes.share:
        raise Refusal(INVALID_ARGUMENT, f"volumeAttributes: 'shareCapacity' is for volumes with '{SHARE}'")
    return csi.Publish(
        number=0,
        id=volume_id,
        target=target.encode(),
        pod=pod.encode(),
        directory=f"pods/{pod}/volumes/kubernetes.io~empty-dir/{attributes.empty_dir}".encode(),
        name=attributes.socket.encode(),
        old_clients=old_clients,
        eager=attributes.eager,
        read_only=request.readonly or mode in _READER_ONLY or _parsed(wanted).read_only,
        allow_other=attributes.allow_other,
        options=wanted,
        group=_group(mount.volume_mount_group),
        alone=mode == _MODES.SINGLE_NODE_SINGLE_WRITER,
        namespace=_text(request.volume_context.get(_NAMESPACE, "")),
        share=attributes.share.encode(),
        borrows="".join(f"{key}\n" for key in keys).encode(),
        block=is_block,
        capacity=attributes.capacity,
    )


def unpublish(request: csi_pb2.NodeUnpublishVolumeRequest, settings: Settings) -> csi.Unpublish:
    """Return the front's request, with the number 0. Raises Refusal."""
    target = _target(request.target_path, settings.kubelet_directory)
    return csi.Unpublish(0, _volume_id(request.volume_id), target.encode())


def health(request: csi_pb2.NodeGetVolumeHealthRequest, settings: Settings) -> csi.Stat:
    """Return the front's request, with the number 0. Raises Refusal."""
    volume_id = _volume_id(request.volume_id)
    path = request.volume_publish_path
    target = _target(path, settings.kubelet_directory, outside=NOT_FOUND) if path else ""
    return csi.Stat(0, volume_id, target.encode())


def stat(request: csi_pb2.NodeGetVolumeStatsRequest, settings: Settings) -> csi.Stat:
    """Return the front's request, with the number 0. Raises Refusal."""
    volume_id = _volume_id(request.volume_id)
    target = _target(request.volume_path, settings.kubelet_directory, outside=NOT_FOUND)
    return csi.Stat(0, volume_id, target.encode())


def stats(stated: csi.Stated) -> csi_pb2.NodeGetVolumeStatsResponse:
    """Return the answer to NodeGetVolumeStats. A volume that no FUSE program serves has no room."""
    usage = csi_pb2.VolumeUsage
    room = usage(
        unit=usage.BYTES,
        total=stated.total_bytes,
        available=stated.available_bytes,
        used=max(0, stated.total_bytes - stated.free_bytes),
    )
    inodes = usage(
        unit=usage.INODES,
        total=stated.total_inodes,
        available=stated.free_inodes,
        used=max(0, stated.total_inodes - stated.free_inodes),
    )
    return csi_pb2.NodeGetVolumeStatsResponse(
        usage=[usage(unit=usage.BYTES, total=stated.total_bytes)] if stated.block else [room, inodes],
        volume_condition=csi_pb2.VolumeCondition(
            abnormal=bool(stated.trouble),
            message=stated.trouble.decode("utf-8", "replace") or "the volume is served",
        ),
    )


def health_of(volume_id: str, stated: csi.Stated) -> csi_pb2.NodeGetVolumeHealthResponse:
    """Return the answer to NodeGetVolumeHealth: without a status if the volume is healthy."""
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
    """Return the path of a volume relative to kubelet's `directory`. Raises Refusal, with the code `outside` if it lies
    outside.
    """
    if not path:
        raise Refusal(INVALID_ARGUMENT, "the target path is missing")
    if "\0" in path or len(path.encode()) > _LONGEST_PATH:
        raise Refusal(INVALID_ARGUMENT, f"a target path has at most {_LONGEST_PATH} bytes, none of them NUL")
    names = path.removeprefix(f"{directory}/").split("/")
    inside = [name for name in names if name not in ("", ".")]
    if not path.startswith(f"{directory}/") or not inside or ".." in inside:
        raise Refusal(outside, f"no volume can be at {_quoted(path)}: kubelet's directory is '{directory}'")
    return "/".join(inside)


def _capability(capability: VolumeCapability) -> tuple[int, VolumeCapability.MountVolume, bool]:
    """Return access mode and mount of a volume's capability, and whether it is a block volume. Raises Refusal."""
    kind = capability.WhichOneof("access_type")
    if kind is None:
        raise Refusal(INVALID_ARGUMENT, "the volume capability is missing")
    if capability.access_mode.mode not in _MODES.Mode.values() or capability.access_mode.mode == _MODES.UNKNOWN:
        raise Refusal(INVALID_ARGUMENT, "the access mode is missing, or an unknown one")
    return capability.access_mode.mode, capability.mount, kind == "block"


def _check_filesystem(name: str) -> None:
    if name and not re.fullmatch(r"fuse(\..*)?", name):
        raise Refusal(INVALID_ARGUMENT, f"fsType must be fuse, or left out, not {_quoted(name)}")


def _group(value: str) -> int:
    """Return the volume mount group, which is the pod's fsGroup. Raises Refusal."""
    if not value:
        return csi.NO_GROUP
    if not re.fullmatch("[0-9]{1,10}", value) or int(value) >= csi.NO_GROUP:
        raise Refusal(INVALID_ARGUMENT, f"fsGroup must be the number of a group, not {_quoted(value)}")
    return int(value)


def _pod(target: str, told: str, is_block: bool) -> str:
    """Return the UID of the pod that the volume is for, from the target path and from kubelet's attribute (`told`).

    The path is kubelet's, while attributes are a user's where CSIDriver has no podInfoOnMount; so they must agree.
    Raises Refusal.
    """
    in_target = (_DEVICE_OF_POD if is_block else _TARGET_IN_POD).fullmatch(target)
    if not in_target and (is_block or target.startswith("pods/")):
        what = "block volumes" if is_block else "the volumes of a pod"
        raise Refusal(INVALID_ARGUMENT, f"{_quoted(target)} is not where kubelet has {what}")
    pod = in_target[1] if in_target else told
    if not pod:
        why = f"neither the target path nor the CSIDriver's podInfoOnMount ({_POD_UID}) names a pod"
        raise Refusal(INVALID_ARGUMENT, f"can't tell whose volume it is: {why}")
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


def _parsed(text: bytes) -> mount_options.MountOptions:
    try:
        return mount_options.parse(text, may_allow_other=True, where_allowed=b"", kernel=b"these")
    except refusal.Refusal as error:
        reason = error.text[:_LONGEST_QUOTE].decode("utf-8", "replace")
        raise Refusal(INVALID_ARGUMENT, f"mountOptions: {reason}") from None


def _quoted(text: str) -> str:
    return repr(text[:_LONGEST_QUOTE])


# volumeAttributes --------------------------------------------------------------------------------------------------


def _attributes(context: Mapping[str, str]) -> Attributes:
    """Return the volumeAttributes without those that kubelet adds, and without a template's. Raises Refusal."""
    has_template = TEMPLATE in context
    found: dict[str, Any] = {}
    for name, value in context.items():
        if name.startswith(_KUBELETS) or (has_template and name not in ATTRIBUTES):
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


def _check_share(context: Mapping[str, str], attributes: Attributes, old_clients: bool) -> None:
    """Raise Refusal unless a volume with these attributes can offer its filesystem to other pods.

    Only kubelet can say that a volume is inline, and in which namespace its pod is. Without podInfoOnMount, the author
    of the pod may say so, but does not know the UID.
    """
    problem = ""
    if TEMPLATE in context:
        problem = f"can't be beside '{TEMPLATE}'"
    elif not context.get(_POD_UID) or not context.get(_NAMESPACE):
        problem = "needs a CSIDriver with podInfoOnMount"
    elif context.get(_EPHEMERAL) != "true":
        problem = "is for inline volumes only"
    elif not attributes.allow_other:
        problem = "is for other pods, so 'allowOther' can't be 'false'"
    elif old_clients:
        problem = "can't be beside 'oldClients'"
    if problem:
        raise Refusal(INVALID_ARGUMENT, f"volumeAttributes: '{SHARE}' {problem}")


def _keys_to_borrow(request: csi_pb2.NodePublishVolumeRequest, *, is_block: bool) -> list[str]:
    """Return the keys under which the filesystem of a volume of a template may be offered: without and with the
    identity of the pod. Raises Refusal.

    None for other volumes, and where kubelet doesn't say which pod it is: then the program must be in the pod.
    """
    context = request.volume_context
    if TEMPLATE not in context or not context.get(_POD_UID) or not context.get(_NAMESPACE):
        return []
    mount = request.volume_capability.mount
    group = _group(mount.volume_mount_group)
    identities = [None, (context[_NAMESPACE], context.get(_SERVICE_ACCOUNT, ""))]
    return [
        sharing_key.sharing_key(
            volume="" if context.get(_EPHEMERAL) == "true" else request.volume_id,
            attributes=context,
            mount_options=mount.mount_flags,
            group=None if group == csi.NO_GROUP else group,
            identity=identity,
            block=is_block,
        )
        for identity in identities
    ]


def _text(value: str) -> bytes:
    """Return a value that kubelet has added. Raises Refusal."""
    if "\0" in value or len(value.encode()) > _LONGEST_ID:
        raise Refusal(INVALID_ARGUMENT, f"{_NAMESPACE} has at most {_LONGEST_ID} bytes, none of them NUL")
    return value.encode()


def _volume_name(value: str) -> str:
    if not _VOLUME_NAME.fullmatch(value):
        raise ValueError("the name of an emptyDir volume of the pod")
    return value


def _socket_name(value: str) -> str:
    if "/" in value or not value.isprintable() or value in ("", ".", "..") or len(value.encode()) > LONGEST_SOCKET:
        raise ValueError(f"the name of a file, of at most {LONGEST_SOCKET} bytes")
    return value


def _is_eager(value: str) -> bool:
    if value not in ("onConnect", "eager"):
        raise ValueError("'onConnect' or 'eager'")
    return value == "eager"


def _boolean(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("'true' or 'false', in quotes")
    return value == "true"


def _bytes(value: str) -> int:
    if not re.fullmatch("[0-9]{1,19}", value):
        raise ValueError("a number of bytes")
    return int(value)


def _key(value: str) -> str:
    if not _SHARING_KEY.fullmatch(value):
        raise ValueError(f"a key of {sharing_key.LENGTH} hexadecimal digits")
    return value


#: The volumeAttributes: the field of `Attributes` for each, and the function that reads its value, or raises
#: ValueError.
ATTRIBUTES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "fdPassingEmptyDirName": ("empty_dir", _volume_name),
    "fdPassingSocketName": ("socket", _socket_name),
    "mountOptions": ("mount_options", str),
    "mountTiming": ("eager", _is_eager),
    "allowOther": ("allow_other", _boolean),
    "oldClients": ("old_clients", _boolean),
    SHARE: ("share", _key),
    "shareCapacity": ("capacity", _bytes),
}
