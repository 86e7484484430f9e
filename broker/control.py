"""The administrator's way in: a socket that only root may open, on which a running broker tells how it is.

A question is one line with a command's name and its arguments, the answer one line of JSON; ``fusermount3-broker
status``, ``health``, ``mounts`` and ``abort`` ask it.
"""

import asyncio
import json
import math
import os
import socket
import time
from errno import ENOENT
from pathlib import Path
from typing import Any

from broker import rescue
from broker.front import Front
from broker.health import Health
from broker.operations import MounterFailed, OperationEnded, OperationFailed, OperationRefused
from broker.registry import Mount
from broker.states import MOUNT_STATES
from fusermount3_proxy import __version__


class NotRunning(Exception):
    """No broker answers on the control socket."""


def ask(path: Path, command: str) -> Any:
    """Return what the broker at the control socket `path` answers. Raises NotRunning."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(bytes(path))
            connection.sendall(command.encode() + b"\n")
            with connection.makefile("rb") as answer:
                return json.loads(answer.read())
    except (OSError, ValueError) as error:
        raise NotRunning(f"no broker answers at {path}: {error}") from None


async def serve(listener: socket.socket, front: Front, health: Health) -> asyncio.Server:
    """Answer questions on `listener` until the returned server is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(10):
                question = (await reader.readline()).decode("ascii", "replace").strip()
                writer.write(json.dumps(await _answer(front, health, question)).encode() + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass
        finally:
            writer.close()

    return await asyncio.start_unix_server(answer, sock=listener)


async def _answer(front: Front, health: Health, question: str) -> Any:
    match question.split():
        case ["status"]:
            return status(front)
        case ["health"]:
            return {"problem": await health.problem()}
        case ["mounts"]:
            front.registry.reconcile()
            return [_described(front, mount) for mount in front.registry]
        case ["abort", wanted]:
            return await _abort(front, wanted)
    return {"error": f"unknown command '{question}'"}


async def _abort(front: Front, wanted: str) -> dict[str, Any]:
    """Abort the connection of the mount with that id, or the only one whose id begins so; return that mount."""
    front.registry.reconcile()
    found = [mount for mount in front.registry if mount.request.startswith(wanted)]
    if not found:
        return {"error": f"no live mount has the id '{wanted}'"}
    if len(found) > 1:
        return {"error": f"'{wanted}' is ambiguous: {', '.join(mount.request for mount in found)}"}
    described = _described(front, found[0])
    try:
        await rescue.abort(front, found[0], "an administrator said so")
    except OperationFailed as error:
        reason = "it is already gone" if error.errno == ENOENT else os.strerror(error.errno)
        return {"error": f"'{found[0].request}' can't be aborted: {reason}"}
    except (OperationEnded, OperationRefused, MounterFailed):
        return {"error": f"'{found[0].request}' can't be aborted: the mounter doesn't answer"}
    return described


def status(front: Front) -> dict[str, Any]:
    """Return how the broker is: versions, processes, memory in bytes, and what it has counted."""
    front.registry.reconcile()
    return {
        "version": __version__,
        "configuration": os.fsdecode(front.configuration.source),
        "uptime_seconds": round(time.time() - front.started),
        "mounts": len(front.registry),
        "mount_states": dict.fromkeys(MOUNT_STATES, 0) | front.mount_states(),
        "requests": dict(front.requests),
        "latency": _latency(front),
        "limits_hit": dict(front.limits_hit),
        "supervisor": {"pid": os.getppid(), "rss_bytes": _rss(front, os.getppid())},
        "volumes": len(front.volumes or ()),
        "front": {"pid": os.getpid(), "rss_bytes": _rss(front, os.getpid()), "open_descriptors": _open_descriptors()},
        "mounter": {
            "pid": front.mounter.pid,
            "rss_bytes": _rss(front, front.mounter.pid),
            "restarts": front.mounter.restarts,
        },
        **_plugin(front),
    }


def _plugin(front: Front) -> dict[str, Any]:
    """Return how the CSI plugin's process is, by its name; nothing where there is none."""
    if front.plugin is None:
        return {}
    pid, restarts = front.plugin
    return {"plugin": {"pid": pid, "rss_bytes": _rss(front, pid), "restarts": restarts}}


def _latency(front: Front) -> dict[str, Any]:
    """Return the histograms by operation, as `figures` describes them, with the sum of all seconds."""
    found: dict[str, dict[str, Any]] = {}
    for metric in front.latency.collect():
        for sample in metric.samples:
            histogram = found.setdefault(sample.labels["operation"], {"buckets": []})
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                histogram["buckets"].append((None if math.isinf(bound) else bound, int(sample.value)))
            elif sample.name.endswith("_sum"):
                histogram["seconds"] = sample.value
    return found


def _rss(front: Front, pid: int) -> int:
    """Return the resident set of a process, in bytes (proc_pid_statm(5)); 0 if it is gone."""
    try:
        with open(f"{pid}/statm", opener=front.open_proc) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) - 1  # without the one for this


def _described(front: Front, mount: Mount) -> dict[str, Any]:
    """Return the mount as JSON has it: paths that are not UTF-8 with backslash escapes."""
    return {
        "request": mount.request,
        "device": mount.device,
        "mountpoint": mount.mountpoint.decode("utf-8", "backslashreplace"),
        "type": mount.type,
        "source": mount.source.decode("utf-8", "backslashreplace"),
        "uid": mount.uid,
        "pid": mount.pid,
        "command": mount.command,
        "container": mount.container,
        "volume": mount.volume.decode("utf-8", "backslashreplace"),
        "mount_namespace": mount.namespace,
        "mounted_at": mount.mounted_at,
        "state": front.state(mount),
        "waiting": front.states.waiting(mount.connection),
    }
