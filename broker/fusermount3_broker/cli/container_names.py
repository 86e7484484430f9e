"""The names of containers and pods, from the state that their engines and kubelet keep on this host.

A cgroup tells a container's ID, or a pod's UID, and nobody's name. The engines' files do, which only root can write:

- Podman and CRI-O: ``NAME-containers/containers.json`` and ``volatile-containers.json`` in the directories of
  containers-storage.conf(5). Those of rootless Podman are in a user's home directory, where nothing is looked up.
- Docker: ``containers/ID/config.v2.json`` in its data directory.
- kubelet: the directory ``/var/log/pods/NAMESPACE_POD_UID`` of each pod.

No program of an engine is run, and no file of a container is read. What can't be read, or is no such file, names
nothing.
"""

import json
import os
import stat
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusermount3_broker.kernel import cgroups

#: The most bytes of a file that is read.
_LONGEST = 16 << 20
_STORAGE = (Path("var/lib/containers/storage"), Path("run/containers/storage"))
_DOCKER = Path("var/lib/docker")
#: Seconds for which a display takes a name for the same container's: engines can rename one.
_KEPT = 60.0


class ContainerNames:
    """Names as of now; make another one to look again."""

    def __init__(self, root: Path = Path("/"), known: dict[str, str] | None = None) -> None:
        """`root` is the root directory of the host; `known` has the names of cgroups that need not be looked up, and
        gets those that are.
        """
        self._root = root
        self._known = {} if known is None else known
        self._containers: dict[str, str] | None = None
        self._pods: dict[str, str] | None = None
        self._docker: Path | None = None

    def name(self, cgroup: str) -> str:
        """Return the name of the container, or "NAMESPACE/POD" of the pod, whose cgroup has that name; else ""."""
        if cgroup not in self._known:
            self._known[cgroup] = self._look_up(cgroup)
        return self._known[cgroup]

    def _look_up(self, cgroup: str) -> str:
        part = cgroup.encode("utf-8", "replace")
        if id := cgroups.container_id(part):
            return self._name_in_storage(id) or self._name_in_docker(id)
        if uid := cgroups.pod_named(part):
            return self.pod(uid.replace(b"_", b"-").decode())
        return ""

    def may_name(self, path: str) -> bool:
        """Return whether only root could make the cgroup at that path, and so give it the ID of a container.

        Its parent tells: systemd gives the cgroup of a unit with `User=` and `Delegate=` to that user.
        """
        parent = path.strip("/").rpartition("/")[0]
        top = self._root / "sys/fs/cgroup"  # version 2; below it, the hierarchies of version 1
        owners = {status.st_uid for each in (top, *_directories(top)) if (status := _status(each / parent))}
        return bool(owners) and owners <= {0, os.geteuid()}

    def _name_in_storage(self, id: str) -> str:
        if self._containers is None:
            self._containers = {}
            with suppress(OSError, ValueError):  # ValueError: a path with a NUL byte
                self._containers.update(self._in_storage())
        return self._containers.get(id, "")

    def _in_storage(self) -> Iterator[tuple[str, str]]:
        """Yield the ID and the name of each container of Podman and CRI-O."""
        for directory in self._storage_directories():
            for kind in ("containers", "volatile-containers"):
                for file in sorted(directory.glob(f"*-containers/{kind}.json")):
                    listed = _json(file)
                    for each in listed if isinstance(listed, list) else ():
                        match each:
                            case {"id": str(id), "names": [str(name), *_]}:
                                yield id, name

    def _storage_directories(self) -> list[Path]:
        """Return the directories of containers, as configured and by default."""
        with suppress(ValueError, RecursionError):
            match tomllib.loads(_content(self._root / "etc/containers/storage.conf").decode()):
                case {"storage": dict(storage)}:
                    configured = [storage.get("graphroot"), storage.get("runroot")]
                    own = [self._root / each.lstrip("/") for each in configured if isinstance(each, str) and each]
                    return [*own, *(self._root / each for each in _STORAGE)]
        return [self._root / each for each in _STORAGE]

    def _name_in_docker(self, id: str) -> str:
        if self._docker is None:
            settings = _json(self._root / "etc/docker/daemon.json")
            own = settings.get("data-root") if isinstance(settings, dict) else None
            self._docker = self._root / (own.lstrip("/") if isinstance(own, str) and own else _DOCKER)
        state = _json(self._docker / "containers" / id / "config.v2.json")
        name = state.get("Name") if isinstance(state, dict) else None
        return name.lstrip("/") if isinstance(name, str) else ""

    def pod(self, uid: str) -> str:
        """Return "NAMESPACE/POD" of the pod with that UID, else ""."""
        if self._pods is None:
            self._pods = {}
            with suppress(OSError):
                for entry in os.listdir(self._root / "var/log/pods"):
                    match entry.split("_"):
                        case [namespace, pod, its_uid]:
                            self._pods[its_uid] = f"{namespace}/{pod}"
        return self._pods.get(uid, "")


class RememberedNames:
    """Names for a display that looks each second: the files are read again only for a container that is new, and for
    all of them once a minute."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._known: dict[str, str] = {}
        self._forget_at = 0.0

    def look(self) -> ContainerNames:
        """Return the names as of now."""
        if time.monotonic() >= self._forget_at:
            self._known, self._forget_at = {}, time.monotonic() + _KEPT
        return ContainerNames(self._root, self._known)


def _directories(directory: Path) -> list[Path]:
    try:
        return [Path(each) for each in os.scandir(directory) if each.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _json(file: Path) -> Any:
    """Return the content of a file of root's; None if there is none, or it is no JSON."""
    try:
        return json.loads(_content(file))
    except (ValueError, RecursionError):
        return None


def _content(file: Path) -> bytes:
    """Return the content of a regular file that only root, or who runs this program, can write; else nothing."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        status = os.fstat(descriptor)
        is_trusted = status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not (stat.S_ISREG(status.st_mode) and is_trusted and status.st_size <= _LONGEST):
            return b""
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read(_LONGEST)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
