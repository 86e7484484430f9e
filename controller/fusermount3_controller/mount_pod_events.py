"""The events by which users learn of the mount pod of a volume: they are written on the pods that use it. Pure."""

import datetime
import hashlib
from typing import Any

from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_controller.mount_pods import User

#: The reasons, and the type of each.
CREATED, FAILED = "MountPodCreated", "MountPodFailed"
_TYPES = {CREATED: "Normal", FAILED: "Warning"}
_COMPONENT = "fusermount3-controller"
#: Of a name, in characters, before the digits.
_LONGEST_NAME = 230
#: Of a message, in characters (core/v1, validation of events).
_LONGEST_TEXT = 1024


def event(user: User, reason: str, text: str, now: datetime.datetime) -> dict[str, Any]:
    """Return the event; who tells the same of the same pod gives it the same name, so it is there once."""
    text = visible(text)[:_LONGEST_TEXT]
    digits = hashlib.sha256(" ".join((user.uid, reason, text)).encode()).hexdigest()[:16]
    time = now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{user.name[:_LONGEST_NAME].rstrip('.-')}.{digits}", "namespace": user.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": user.namespace,
            "name": user.name,
            "uid": user.uid,
        },
        "reason": reason,
        "type": _TYPES[reason],
        "message": text,
        "source": {"component": _COMPONENT},
        "reportingComponent": _COMPONENT,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
