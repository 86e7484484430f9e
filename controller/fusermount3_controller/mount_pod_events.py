"""The events by which users learn of the mount pod of a volume: they are written on the pods that use it. Pure."""

import datetime
from typing import Any

from fusermount3_controller import events
from fusermount3_controller.events import Involved
from fusermount3_controller.mount_pods import User

#: The reasons, and the type of each.
CREATED, FAILED = "MountPodCreated", "MountPodFailed"
_TYPES = {CREATED: "Normal", FAILED: "Warning"}


def event(user: User, reason: str, text: str, now: datetime.datetime) -> dict[str, Any]:
    """Return the event, which has the same name whoever tells the same."""
    pod = Involved("v1", "Pod", user.namespace, user.name, user.uid)
    return events.event(pod, reason, text, now, is_warning=_TYPES[reason] == "Warning")
