"""The administrator's control socket, which only root may open and on which a running broker reports its state.

A request is one line with a command's name and its arguments, the answer is one line of JSON; ``fusermount3-broker
status``, ``health``, ``mounts`` and ``abort`` use it.
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

from fusermount3_broker.front import connection_survey, hung_connections
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.health import Health
from fusermount3_broker.front.model import Mount
from fusermount3_broker.front.mount_states import MOUNT_STATES
from fusermount3_broker.front.mounter_client import MounterFailed, OperationEnded, OperationFailed, OperationRefused
from fusermount3_broker.front.peer import command_of
from fusermount3_broker.service.truncation import cut, in_json
from fusermount3_proxy import __version__

#: The most bytes of all mounts' texts in an answer, the number of texts of a mount, and the bytes that each text may
#: have in any case. Callers choose these texts.
_LONGEST_TEXTS, _TEXTS, _SHORTEST_TEXT = 8 << 20, 5, 64


async def serve(listener: socket.socket, front: Front, health: Health) -> asyncio.Server:
    """Answer requests on `listener` until the returned server is closed."""

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
            return {"problem": await health.problem(), **({"warning": front.withheld} if front.withheld else {})}
        case ["mounts"]:
            front.registry.reconcile()
            await connection_survey.refresh(front)
            most = _LONGEST_TEXTS // (_TEXTS * max(1, len(front.registry)))
            return [_described(front, mount, max(_SHORTEST_TEXT, most)) for mount in front.registry]
        case ["abort", wanted]:
            return await _abort(front, wanted)
        case ["abort", *_]:
            return {"error": "abort takes the request ID of one mount"}
    return {"error": f"unknown command '{question}'"}


async def _abort(front: Front, wanted: str) -> dict[str, Any]:
    """Abort the connection of the mount with this request ID; return that mount.

    No beginning of an ID is enough: who has chosen one by it has seen other mounts than there are now.
    """
    front.registry.reconcile()
    found = [mount for mount in front.registry if mount.request_id == wanted]
    if not found:
        return {"error": f"no live mount has the id '{wanted}'"}
    if len(found) > 1:
        return {"error": f"'{wanted}' is ambiguous: {', '.join(mount.request_id for mount in found)}"}
    described = _described(front, found[0], _LONGEST_TEXTS)
    try:
        await hung_connections.abort(front, found[0], "an administrator asked for it")
    except OperationFailed as error:
        reason = "it is already gone" if error.errno == ENOENT else os.strerror(error.errno)
        return {"error": f"'{found[0].request_id}' can't be aborted: {reason}"}
    except (OperationEnded, OperationRefused, MounterFailed):
        return {"error": f"'{found[0].request_id}' can't be aborted: the mounter doesn't answer"}
    return described


def status(front: Front) -> dict[str, Any]:
    """Return the broker's state: version, processes, memory in bytes, and counters."""
    front.registry.reconcile()
    return {
        "version": __version__,
        "configuration": os.fsdecode(front.configuration.source),
        "kernel": {
            "release": os.uname().release,
            "lacks": [{"name": each.name, "since": each.since, "otherwise": each.otherwise} for each in front.lacking],
        },
        "sockets": front.sockets,
        "uptime_seconds": round(time.monotonic() - front.started),
        "mounts": len(front.registry),
        "mount_states": dict.fromkeys(MOUNT_STATES, 0) | front.mount_states(),
        "requests": dict(front.requests),
        "latency": _latency(front),
        "limits_hit": dict(front.limits_hit),
        "children": front.children(),
        "supervisor": {"pid": os.getppid(), "rss_bytes": _rss(front, os.getppid())},
        "volumes": len(front.volumes or ()),
        "sources": sum(volume.share != b"" for volume in front.volumes or ()),
        "borrowers": len(front.borrowed),
        "tables": {table.name: table.problem or "ok" for table in front.tables},
        "front": {"pid": os.getpid(), "rss_bytes": _rss(front, os.getpid()), "open_descriptors": _open_descriptors()},
        "mounter": {
            "pid": front.mounter.pid,
            "rss_bytes": _rss(front, front.mounter.pid),
            "restarts": front.mounter.restarts,
        },
        **_plugin(front),
    }


def _plugin(front: Front) -> dict[str, Any]:
    """Return the state of the CSI plugin's process, under the key "plugin"; nothing if there is none."""
    if front.plugin is None:
        return {}
    pid, restarts = front.plugin
    return {"plugin": {"pid": pid, "rss_bytes": _rss(front, pid), "restarts": restarts}}


def _latency(front: Front) -> dict[str, Any]:
    """Return the histograms by operation, as `cli.rates` describes them, with the total seconds."""
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
    """Return the resident set size of a process, in bytes (proc_pid_statm(5)); 0 if the process is gone."""
    try:
        with open(f"{pid}/statm", opener=front.open_proc) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) - 1  # without the one that lists them


def _described(front: Front, mount: Mount, most: int) -> dict[str, Any]:
    """Return the mount for JSON: non-UTF-8 paths with backslash escapes, and no text of more than `most` bytes."""

    def text(value: bytes | str) -> str:
        return cut(value if isinstance(value, str) else value[:most].decode("utf-8", "backslashreplace"), most, in_json)

    program, _ = front.serving.of(mount)
    return {
        "request_id": mount.request_id,
        "device": mount.device,
        "mountpoint": text(mount.mountpoint),
        "type": text(mount.type),
        "source": text(mount.source),
        "uid": mount.uid,
        "pid": mount.pid,
        "command": mount.command,
        "program_pid": program,
        "program_command": command_of(program, front.open_proc),
        "container": mount.container,
        "account": text(mount.account),
        "volume": text(mount.volume),
        "share": mount.share.decode("ascii", "replace"),
        "borrowers": [text(each) for each, has in front.borrowed.items() if has == mount.connection],
        "mount_namespace": mount.namespace,
        "mounted_at": mount.mounted_at,
        "state": front.state(mount),
        "waiting": front.states.waiting(mount.connection),
    }
