"""The sentences of the log: what an event says to somebody who reads the log without its fields.

This is the only place that makes a sentence of fields. An event without an entry here is a sentence already, and has
no fields that one would miss.

Callers choose some of the values. They are quoted, have no control characters and no line breaks, and a bounded length.
"""

from collections.abc import Callable, Mapping

from fusermount3_broker.kernel import cgroups
from fusermount3_broker.messages.untrusted_text import quoted, shortened

#: The most characters of a path, of a reason, of another value, and of a whole sentence.
_LONGEST_PATH, _LONGEST_REASON, _LONGEST_NAME, LONGEST = 120, 200, 80, 800

Value = str | int | float | bytes


class _Fields:
    """The fields of a record, in words."""

    def __init__(self, fields: Mapping[str, Value]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        value = self._fields.get(name, "")
        return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)

    @property
    def reason(self) -> str:
        return shortened(self.text("text"), _LONGEST_REASON)

    @property
    def caller(self) -> str:
        """Who called: uid 1000 in container 9ea7f6a7f41c."""
        uid = f"uid {self.text('caller_uid')}" if "caller_uid" in self._fields else "an unknown caller"
        return uid + self.within

    @property
    def within(self) -> str:
        """The container, or the unit of systemd, if it is known: " in container 9ea7f6a7f41c"."""
        cgroup = self.text("caller_container")
        return f" in {in_words(cgroup)}" if cgroup else ""

    @property
    def place(self) -> str:
        """Where: the mountpoint, the volume, or both."""
        path = quoted(self.text("mountpoint"), _LONGEST_PATH)
        if "volume" not in self._fields:
            return path
        return f"{path} and on {self.volume}" if self.text("mountpoint") else self.volume

    @property
    def volume(self) -> str:
        """The volume and its pod, or the target if that is all that is known."""
        if "volume" not in self._fields:
            return f"the volume at {self.target}"
        pod = f" of pod {quoted(self.text('pod'), _LONGEST_NAME)}" if "pod" in self._fields else ""
        return f"volume {quoted(self.text('volume'), _LONGEST_NAME)}{pod}"

    @property
    def target(self) -> str:
        return quoted(self.text("target"), _LONGEST_PATH)

    @property
    def request(self) -> str:
        id = self.text("request_id")
        return f" (request {quoted(id, _LONGEST_NAME)})" if id else ""

    @property
    def type(self) -> str:
        return quoted(self.text("type"), _LONGEST_NAME)

    @property
    def account(self) -> str:
        """The holder of an account (`front.decisions.limits.AccountName`)."""
        kind, _, name = self.text("account").partition(" ")
        return in_words(name.rpartition("/")[2]) if kind == "container" else shortened(f"{kind} {name}", _LONGEST_NAME)


def in_words(cgroup: str) -> str:
    """Return the words for the container or the unit whose cgroup has that name: "container 9ea7f6a7f41c"."""
    kind, name = cgroups.described(cgroup)
    return f"{kind} {quoted(name, _LONGEST_NAME)}".strip()


def sentence(event: str, fields: Mapping[str, Value]) -> str | None:
    """Return the sentence for an event with these fields; None if the event is a sentence already.

    A detail may follow the event after a colon, as in "mount rolled back: the caller did not take the mount".
    """
    name, _, detail = event.partition(": ")
    make = _SENTENCES.get(name)
    if make is None:
        return None
    known = _Fields(fields)
    because = f": {detail}" if detail else ""
    return shortened(f"{make(known)}{because}{known.request}", LONGEST)


def _calls(operation: str, doing: str) -> dict[str, Callable[[_Fields], str]]:
    """Return the sentences for the results of a mount on a mountpoint or volume, or of an unmount."""
    return {
        f"{operation} refused": lambda of: f"refused to {doing} {of.place} for {of.caller}: {of.reason}",
        f"{operation} caller went away": lambda of: f"did not {doing} {of.place}: {of.caller} went away",
        f"{operation} ended": lambda of: f"did not {doing} {of.place} for {of.caller}",
        f"{operation} mounted": lambda of: f"mounted {of.type} on {of.place} for {of.caller}",
        f"{operation} unmounted": lambda of: f"unmounted {of.place} for {of.caller}",
        f"{operation} rolled back": lambda of: f"undid the mount on {of.place} for {of.caller}",
        f"{operation} not rolled back": lambda of: f"could not undo the mount on {of.place} for {of.caller}",
    }


def _of_kubelet(operation: str) -> dict[str, Callable[[_Fields], str]]:
    """Return the sentences for the results of a request of kubelet."""
    return {
        f"{operation} refused": lambda of: f"refused to {operation} {of.volume}: {of.reason}",
        f"{operation} given up by kubelet": lambda of: (
            f"kubelet no longer waits for the broker to {operation} {of.volume}"
        ),
    }


_SENTENCES: dict[str, Callable[[_Fields], str]] = {
    **_calls("mount", "mount on"),
    **_calls("volume", "mount on"),
    **_calls("unmount", "unmount"),
    "device offered": lambda of: f"{of.caller} offers the device {of.text('device')} for {of.volume}",
    "device refused": lambda of: f"refused the device that {of.caller} offers for {of.volume}: {of.reason}",
    "device caller went away": lambda of: f"took no device for {of.volume}: {of.caller} went away",
    "device ended": lambda of: f"took no device for {of.volume} from {of.caller}",
    "request refused": lambda of: f"refused a request of {of.caller}: {of.reason}",
    "request caller went away": lambda of: f"{of.caller} went away before it said what it wanted",
    "request ended": lambda of: f"did not hear out {of.caller}",
    "requests refused": lambda of: f"refused {of.text('requests')} requests of {of.account}: {of.reason}",
    "callers went away before they were admitted": lambda of: (
        f"{of.text('requests')} callers went away before they were admitted"
    ),
    "unmounted a dead mount": lambda of: f"unmounted the dead mount on {of.place}{of.within}",
    "put a tombstone in the place of a dead mount": lambda of: (
        f"put a tombstone in the place of the dead mount of the volume at {of.target}{of.within}"
    ),
    "aborted a FUSE connection": lambda of: f"aborted the FUSE connection of the mount on {of.place}{of.within}",
    "publish published": lambda of: f"published {of.volume}",
    "unpublish unpublished": lambda of: f"unpublished {of.volume}",
    "unpublish nothing there": lambda of: f"found nothing to unpublish at {of.target}",
    **_of_kubelet("publish"),
    **_of_kubelet("unpublish"),
    **_of_kubelet("stat"),
    "a volume has the filesystem of its mount pod again": lambda of: (
        f"{of.volume} has the filesystem of its mount pod again"
    ),
    "can't give a volume the filesystem of its mount pod": lambda of: (
        f"can't give {of.volume} the filesystem of its mount pod: {of.reason}"
    ),
    "can't remove an incomplete volume": lambda of: f"can't remove what was made of {of.volume}: {of.reason}",
}
