"""Events, by which users learn what becomes of their pods and claims. Pure."""

import datetime
import hashlib
from typing import Any, NamedTuple

from fusermount3_broker.messages.untrusted_text import visible

_COMPONENT = "fusermount3-controller"
#: Of a name, in characters, before the digits.
_LONGEST_NAME = 230
#: Of a message, in characters (core/v1, validation of events).
_LONGEST_TEXT = 1024
#: Where events of objects are that have no namespace.
_NAMESPACE = "default"


class Involved(NamedTuple):
    """The object that an event is about; `namespace` is empty, if it has none."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


def event(involved: Involved, reason: str, text: str, now: datetime.datetime, *, is_warning: bool) -> dict[str, Any]:
    """Return the event; who tells the same of the same object gives it the same name, so it is there once."""
    text = visible(text)[:_LONGEST_TEXT]
    digits = hashlib.sha256(" ".join((involved.uid, reason, text)).encode()).hexdigest()[:16]
    time = now.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    namespace = {"namespace": involved.namespace} if involved.namespace else {}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{involved.name[:_LONGEST_NAME].rstrip('.-')}.{digits}",
            "namespace": involved.namespace or _NAMESPACE,
        },
        "involvedObject": {
            "apiVersion": involved.api_version,
            "kind": involved.kind,
            **namespace,
            "name": involved.name,
            "uid": involved.uid,
        },
        "reason": reason,
        "type": "Warning" if is_warning else "Normal",
        "message": text,
        "source": {"component": _COMPONENT},
        "reportingComponent": _COMPONENT,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
