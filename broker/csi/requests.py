"""What the CSI plugin's process and the front say to each other: typed records, and nothing but these.

    plugin: Publish     front: Done or Refused
    plugin: Unpublish   front: Done or Refused
    plugin: Stat        front: Stated or Refused
    plugin: Probe       front: Done or Refused
    plugin: TurnedAway

Each answer has the `number` of its request; many may be under way at once. The plugin has checked what kubelet said
(`volume`) and decides nothing else. All paths are relative to kubelet's directory.

Each says ``Done(0)`` when it begins, and is heard by whoever is at the other end then: the socket pair outlives both.
The plugin asks a new front again what the last one has not answered; so a request may come twice, at the same time.
"""

from typing import Annotated, NamedTuple

from broker.records import Vocabulary

#: A status code of gRPC (grpc.StatusCode), and those that are used.
Code = Annotated[int, range(17)]
OK, CANCELLED, INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS = 0, 1, 3, 5, 6
FAILED_PRECONDITION, INTERNAL, UNAVAILABLE = 9, 13, 14
GroupId = Annotated[int, range(2**32)]
#: No group: as chown(2) takes it.
NO_GROUP = 2**32 - 1


class Publish(NamedTuple):
    """Make the volume `id` available to its pod; again, if it is so already.

    `target` is where kubelet wants it; `pod` the pod's UID; `directory` that of the pod's emptyDir in which the socket
    `name` is made. With `old_clients` those of meta-fuse-csi-plugin are served at that name, too. `eager`: mount now.
    `options` are mount options, separated by commas; `group` is the volume mount group, or NO_GROUP. With `alone` it
    may be published at no other target (ReadWriteOncePod).
    """

    number: int
    id: bytes
    target: bytes
    pod: bytes
    directory: bytes
    name: bytes
    old_clients: bool
    eager: bool
    read_only: bool
    allow_other: bool
    options: bytes
    group: GroupId
    alone: bool


class Unpublish(NamedTuple):
    """Take the volume away; done, too, if there is none."""

    number: int
    id: bytes
    target: bytes


class Stat(NamedTuple):
    """Say how the volume is at `target`; if that is empty, wherever it is worst."""

    number: int
    id: bytes
    target: bytes


class Probe(NamedTuple):
    """Say whether callers could be served now."""

    number: int


class TurnedAway(NamedTuple):
    """The plugin has refused a request itself. The front counts those, so that there is one count of all."""

    operation: bytes


class Done(NamedTuple):
    number: int


class Stated(NamedTuple):
    """How full the volume is, in bytes and inodes, if it is `served`; and, if it is not well, why (`trouble`)."""

    number: int
    served: bool
    total_bytes: int
    free_bytes: int
    available_bytes: int
    total_inodes: int
    free_inodes: int
    trouble: bytes


class Refused(NamedTuple):
    """It can't be done; kubelet shows `text` in an event of the pod."""

    number: int
    code: Code
    text: bytes


Question = Publish | Unpublish | Stat | Probe
Answer = Done | Stated | Refused
Record = Question | TurnedAway | Answer
_vocabulary: Vocabulary[Record] = Vocabulary(Record.__args__)
dump = _vocabulary.dump
load = _vocabulary.load
