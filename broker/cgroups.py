"""What cgroups are called, by who makes them: container engines, kubelet, systemd; and which pod a process is in.

Pure functions, for the front and for the mounter, which imports little: no regular expressions.
"""

from collections.abc import Sequence

_HEX = b"0123456789abcdef"
#: Hexadecimal digits in the id of a container.
_LENGTH_OF_ID = 64
#: Where each cgroup right below is a container, by whatever name.
OF_CONTAINERS = (b"machine.slice", b"lxc")
_SERVICE_CLASSES = (b"besteffort", b"burstable")


def pod_of(cgroup: bytes) -> str:
    """Return the UID of the Kubernetes pod to which a process with this /proc/PID/cgroup belongs; empty for others.

    Only kubelet makes pods: what somebody has made in a cgroup of their own is none, whatever it is called.
    """
    pods = {pod for path in paths(cgroup) if (pod := _pod(path.split(b"/")))}
    return pods.pop().replace(b"_", b"-").decode() if len(pods) == 1 else ""


def paths(cgroup: bytes) -> list[bytes]:
    """Return the paths in a /proc/PID/cgroup (cgroups(7), of version 1 and 2)."""
    return [line.split(b":", 2)[-1] for line in cgroup.split(b"\n") if line]  # a name has any other byte


def _pod(parts: Sequence[bytes]) -> bytes:
    """Return what a path's outermost pod is called in it; empty if it is in none."""
    for number, part in enumerate(parts):
        if uid := pod_named(part):
            return uid if _is_of_pods(parts[:number]) else b""
    return b""


def _is_of_pods(parts: Sequence[bytes]) -> bool:
    """Whether that is where kubelet has its pods. Who looks from a pod beside them sees only how far up that is."""
    if parts and _is_service_class(parts[-1]):
        parts = parts[:-1]
    if set(parts) == {b"", b".."}:
        return True
    return bool(parts and _is_kubepods(parts[-1].removesuffix(b".slice"))) and not any(map(_is_somebodys, parts[:-1]))


def _is_somebodys(part: bytes) -> bool:
    """Whether others than the host's root may make cgroups below one of that name."""
    return part in OF_CONTAINERS or is_container(part) or bool(pod_named(part) or user_of(part)) or is_unit(part)


def is_container(part: bytes) -> bool:
    """Whether it is named as one of Docker, Podman, containerd or CRI-O, of LXC, or of what systemd runs as one.

    The former have the container's id, with a prefix and ".scope" where systemd has made the cgroup.
    """
    name = part.removesuffix(b".scope")
    before, id = name[:-_LENGTH_OF_ID], name[-_LENGTH_OF_ID:]
    if len(id) == _LENGTH_OF_ID and _is_made_of(id, _HEX) and before[-1:] in (b"", b"-", b"_", b":"):
        return True
    return any(_is_between(part, *ends) for ends in _CONTAINERS_OF_OTHERS)


_CONTAINERS_OF_OTHERS = ((b"lxc.payload.", b""), (b"machine-", b".scope"), (b"systemd-nspawn@", b".service"))


def pod_named(part: bytes) -> bytes:
    """Return the UID of the pod whose containers' cgroup is named so: "pod" and its UID, in which systemd has "_" for
    "-", and before it that of the cgroup above. Empty for any other name.
    """
    before, pod, uid = part.removesuffix(b".slice").rpartition(b"pod")
    if not pod or len(uid) < 8 or not _is_made_of(uid[:8], _HEX) or not _is_made_of(uid, _HEX + b"-_"):
        return b""
    above = before.removesuffix(b"-")
    is_below_kubepods = above != before and (above.startswith(b"kubepods") or b"-kubepods" in above[1:])
    return uid if is_below_kubepods or not before else b""


def user_of(part: bytes) -> bytes:
    """Return the uid of the user, but for root, for whom systemd has a slice of that name; empty for any other name."""
    uid = part.removeprefix(b"user-").removesuffix(b".slice")
    is_uid = uid.isdigit() and not uid.startswith(b"0")
    return uid if is_uid and part == b"user-%b.slice" % uid else b""


def is_unit(part: bytes) -> bool:
    """Whether it is named as a service or scope of systemd."""
    return _is_between(part, b"", b".service") or _is_between(part, b"", b".scope")


def _is_kubepods(name: bytes) -> bool:
    """Whether kubelet calls that of all pods so."""
    return name == b"kubepods" or _is_between(name, b"", b"-kubepods")


def _is_service_class(part: bytes) -> bool:
    """Whether it is that of the pods of a class of service."""
    above, _, kind = part.removesuffix(b".slice").rpartition(b"-")
    return part in _SERVICE_CLASSES or (part.endswith(b".slice") and kind in _SERVICE_CLASSES and _is_kubepods(above))


def _is_between(part: bytes, begin: bytes, end: bytes) -> bool:
    """Whether it begins and ends so, with something between."""
    return len(part) > len(begin) + len(end) and part.startswith(begin) and part.endswith(end)


def _is_made_of(part: bytes, bytes_: bytes) -> bool:
    return not part.translate(None, bytes_)
