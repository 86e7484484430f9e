"""Pods that run once for a volume: whether they have ended, and what their termination message says. Pure.

A pod answers with JSON in its termination message: `handle`, `capacity` and `nodeAffinity` of the volume that it has
created; `error`, if its status is not 0. Without JSON, the last line is the error.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fusermount3_controller import quantities
from fusermount3_controller.mount_pods import NO_FAILURE, condition
from fusermount3_controller.pod_volumes import GATE, KIND, STAGE_LABEL

#: What a handle may be: it stands in commands of templates, and in names of files.
_HANDLE = re.compile("[A-Za-z0-9@%+=:./_~][A-Za-z0-9@%+=:./_~-]{0,255}")
_NAMES = ("capacity", "error", "handle", "nodeAffinity")
_NUMBER = re.compile(r".*-(0|[1-9][0-9]{0,8})")
#: Of a failure, in characters.
_LONGEST_TEXT = 500


class Answer(NamedTuple):
    """What a pod says of the volume that it has created; `capacity` is in bytes. Empty: it says nothing of it."""

    handle: str = ""
    capacity: int = 0
    node_affinity: Mapping[str, Any] = {}


class RunPod(NamedTuple):
    """A pod of a stage that exists. `is_due`: it has ended. `said` is its termination message.

    `message` is why it has failed, or what it waits for.
    """

    name: str
    uid: str
    number: int
    stage: str
    is_gated: bool = False
    is_started: bool = False
    is_due: bool = False
    has_succeeded: bool = False
    is_ending: bool = False
    said: str = ""
    message: str = ""


def owner(pod: Mapping[str, Any]) -> str:
    """Return the UID of the PodVolume that the pod belongs to; empty, if it belongs to none."""
    owners = pod["metadata"].get("ownerReferences") or []
    return next((str(each.get("uid")) for each in owners if each.get("controller") and each.get("kind") == KIND), "")


def existing(pod: Mapping[str, Any], owned_by: str) -> RunPod | None:
    """Return what the pod is of the PodVolume with this UID; None, if it belongs to none or to another one."""
    metadata, spec, status = (pod.get(name) or {} for name in ("metadata", "spec", "status"))
    match = _NUMBER.fullmatch(metadata.get("name") or "")
    if not match or owner(pod) != owned_by:
        return None
    phase = status.get("phase")
    terminated = [
        state["terminated"]
        for each in status.get("containerStatuses") or []
        if (state := each.get("state") or {}).get("terminated")
    ]
    return RunPod(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        number=int(match[1]),
        stage=(metadata.get("labels") or {}).get(STAGE_LABEL, ""),
        is_gated=any(each.get("name") == GATE for each in spec.get("schedulingGates") or []),
        is_started=phase == "Running" or bool(terminated),
        is_due=phase in ("Failed", "Succeeded"),
        has_succeeded=phase == "Succeeded",
        is_ending=bool(metadata.get("deletionTimestamp")),
        said=next((each.get("message") or "" for each in terminated), ""),
        message=_why(status, terminated) if phase == "Failed" else _waiting(pod),
    )


def _why(status: Mapping[str, Any], terminated: list[Mapping[str, Any]]) -> str:
    for each in terminated:
        text = (each.get("message") or "").strip()
        if said := _object(text).get("error"):
            return str(said)[:_LONGEST_TEXT]
        reason = f"{each.get('reason') or 'Error'}, status {each.get('exitCode')}"
        return _sentence(reason, text.splitlines()[-1] if text else "")
    return _sentence(status.get("reason") or "it has failed", status.get("message"))


def _waiting(pod: Mapping[str, Any]) -> str:
    """Return why the pod does not begin; the same words each time for the same reason."""
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") != "SchedulingGated":
        return _sentence(scheduled.get("reason"), scheduled.get("message"))
    for each in (pod.get("status") or {}).get("containerStatuses") or []:
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, *NO_FAILURE):
            return _sentence(waiting["reason"], waiting.get("message"))
    return ""


def _sentence(reason: object, text: object) -> str:
    return ": ".join(str(each) for each in (reason, text) if each)[:_LONGEST_TEXT]


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text) if text.startswith("{") else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def answer(message: str) -> Answer:
    """Return what a pod has said that has succeeded. Raises ValueError, if it can't be meant so."""
    if not (text := message.strip()):
        return Answer()
    value = _object(text)
    if not value:
        raise ValueError("its termination message is neither empty nor an object of JSON")
    for name in value:
        if name not in _NAMES:
            raise ValueError(f"its termination message has {name!r}; there are {', '.join(_NAMES)}")
    handle, affinity = value.get("handle", ""), value.get("nodeAffinity") or {}
    if handle != "" and (not isinstance(handle, str) or not is_handle(handle)):
        raise ValueError(f"it answers a handle that can't be one: {str(handle)[:80]!r}")
    if not isinstance(affinity, dict) or (affinity and not isinstance(affinity.get("required"), dict)):
        raise ValueError("its nodeAffinity must be an object with 'required', as in a PersistentVolume")
    try:
        capacity = quantities.size(value["capacity"]) if "capacity" in value else 0
    except ValueError as error:
        raise ValueError(f"its capacity {error}") from None
    return Answer(handle, capacity, affinity)


def handle_in(message: str) -> str:
    """Return the handle of what a pod has begun to create that has failed; empty, if it says none."""
    found = _object(message.strip()).get("handle")
    return found if isinstance(found, str) and is_handle(found) else ""


def is_handle(text: str) -> bool:
    """Return whether a volume can be called so."""
    return bool(_HANDLE.fullmatch(text))
