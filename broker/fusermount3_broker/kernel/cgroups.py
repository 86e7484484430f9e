"""Parse the names that container engines, kubelet and systemd give to cgroups: find the pod of a process, and say in
words which container a cgroup is.

Pure functions, for the front and for the mounter, which imports little: no regular expressions.
"""

from collections.abc import Sequence

_HEX = b"0123456789abcdef"
#: Hexadecimal digits in a container ID.
_LENGTH_OF_ID = 64
#: … and those of them that engines show.
SHORT_ID = 12
#: Cgroups whose direct children are containers, whatever their names.
OF_CONTAINERS = (b"machine.slice", b"lxc")
_SERVICE_CLASSES = (b"besteffort", b"burstable")


def pod_of(cgroup: bytes) -> str:
    """Return the UID of the Kubernetes pod of a process with this /proc/PID/cgroup; empty if it is in none.

    Only kubelet makes pods: a cgroup that a user or container has made below its own is none, whatever its name.
    """
    pods = {pod for path in paths(cgroup) if (pod := _pod(path.split(b"/")))}
    return pods.pop().replace(b"_", b"-").decode() if len(pods) == 1 else ""


def paths(cgroup: bytes) -> list[bytes]:
    """Return the paths in a /proc/PID/cgroup (cgroups(7), of version 1 and 2)."""
    return [line.split(b":", 2)[-1] for line in cgroup.split(b"\n") if line]  # a name may hold any byte but newline


def _pod(parts: Sequence[bytes]) -> bytes:
    """Return the UID of the outermost pod in a path, as written there; empty if the path is in no pod."""
    for number, part in enumerate(parts):
        if uid := pod_named(part):
            return uid if _is_of_pods(parts[:number]) else b""
    return b""


def _is_of_pods(parts: Sequence[bytes]) -> bool:
    """Return whether kubelet keeps its pods there. A process in a sibling pod sees only ".." for each level up."""
    if parts and _is_service_class(parts[-1]):
        parts = parts[:-1]
    if set(parts) == {b"", b".."}:
        return True
    return bool(parts and _is_kubepods(parts[-1].removesuffix(b".slice"))) and not any(map(_is_delegated, parts[:-1]))


def _is_delegated(part: bytes) -> bool:
    """Return whether users other than the host's root may make cgroups below one of that name."""
    return part in OF_CONTAINERS or is_container(part) or bool(pod_named(part) or user_of(part)) or is_unit(part)


def is_container(part: bytes) -> bool:
    """Return whether a cgroup is named like a container: of Docker, Podman, containerd or CRI-O; of LXC; of systemd.

    The first four use the container's ID, with a prefix and ".scope" where systemd has made the cgroup.
    """
    return bool(container_id(part)) or any(_is_between(part, *ends) for ends in _CONTAINERS_OF_OTHERS)


def container_id(part: bytes) -> str:
    """Return the engine's ID of the container whose cgroup has that name; empty if the name has no ID."""
    name = part.removesuffix(b".scope")
    before, id = name[:-_LENGTH_OF_ID], name[-_LENGTH_OF_ID:]
    is_id = len(id) == _LENGTH_OF_ID and _is_made_of(id, _HEX) and before[-1:] in (b"", b"-", b"_", b":")
    return id.decode() if is_id else ""


def described(name: str) -> tuple[str, str]:
    """Say, for people, whose cgroup it is that has this name.

    Return "container" and its ID, as short as engines show it, or the name by which its engine knows it; "pod" and its
    UID; else "" and the name, which is a systemd unit's mostly.
    """
    part = name.encode("utf-8", "replace")
    if id := container_id(part):
        return "container", id[:SHORT_ID]
    if pod := pod_named(part):
        return "pod", pod.replace(b"_", b"-").decode()
    for begin, end in _CONTAINERS_OF_OTHERS:
        if _is_between(part, begin, end):
            own = name[len(begin) : len(name) - len(end)]
            return "container", own.replace(r"\x2d", "-")  # as systemd escapes "-" (systemd.unit(5))
    return "", name


_CONTAINERS_OF_OTHERS = ((b"lxc.payload.", b""), (b"machine-", b".scope"), (b"systemd-nspawn@", b".service"))


def pod_named(part: bytes) -> bytes:
    """Return the UID of the pod whose containers are in a cgroup of that name; empty for any other name.

    The name is "pod" and the UID. systemd replaces "-" by "_" in the UID, and prefixes the name of the cgroup above.
    """
    before, pod, uid = part.removesuffix(b".slice").rpartition(b"pod")
    if not pod or len(uid) < 8 or not _is_made_of(uid[:8], _HEX) or not _is_made_of(uid, _HEX + b"-_"):
        return b""
    above = before.removesuffix(b"-")
    is_below_kubepods = above != before and (above.startswith(b"kubepods") or b"-kubepods" in above[1:])
    return uid if is_below_kubepods or not before else b""


def user_of(part: bytes) -> bytes:
    """Return the uid of the user, other than root, whose systemd slice has that name; empty for any other name."""
    uid = part.removeprefix(b"user-").removesuffix(b".slice")
    is_uid = uid.isdigit() and not uid.startswith(b"0")
    return uid if is_uid and part == b"user-%b.slice" % uid else b""


def is_unit(part: bytes) -> bool:
    """Return whether a cgroup is named like a service or scope of systemd."""
    return _is_between(part, b"", b".service") or _is_between(part, b"", b".scope")


def _is_kubepods(name: bytes) -> bool:
    """Return whether kubelet gives that name to the cgroup of all pods."""
    return name == b"kubepods" or _is_between(name, b"", b"-kubepods")


def _is_service_class(part: bytes) -> bool:
    """Return whether a cgroup is that of the pods of a quality-of-service class."""
    above, _, kind = part.removesuffix(b".slice").rpartition(b"-")
    return part in _SERVICE_CLASSES or (part.endswith(b".slice") and kind in _SERVICE_CLASSES and _is_kubepods(above))


def _is_between(part: bytes, begin: bytes, end: bytes) -> bool:
    """Return whether a name begins and ends so, with at least one byte between."""
    return len(part) > len(begin) + len(end) and part.startswith(begin) and part.endswith(end)


def _is_made_of(part: bytes, bytes_: bytes) -> bool:
    return not part.translate(None, bytes_)
