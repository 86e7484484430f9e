"""Messages between the CSI plugin's process and the front: typed records, and nothing else.

    plugin: Publish     front: Done or Refused
    plugin: Unpublish   front: Done or Refused
    plugin: Stat        front: Stated or Refused
    plugin: Probe       front: Done or Refused
    plugin: TurnedAway

Each answer carries the `number` of its request; many requests may be in progress at once. The plugin has checked
kubelet's request (`volume_requests`) and decides nothing else. All paths are relative to kubelet's directory.

Each process sends ``Done(0)`` when it starts, to the process that is at the other end at that time: the socket pair
outlives both. The plugin repeats to a new front all requests that the last one has not answered; so a request may
arrive twice, and both may be in progress at the same time.
"""

from typing import Annotated, NamedTuple

from fusermount3_broker.messages.records import Vocabulary

#: A status code of gRPC (grpc.StatusCode), and the codes in use.
Code = Annotated[int, range(17)]
OK, CANCELLED, INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS = 0, 1, 3, 5, 6
FAILED_PRECONDITION, INTERNAL, UNAVAILABLE = 9, 13, 14
GroupId = Annotated[int, range(2**32)]
#: No group, as in chown(2).
NO_GROUP = 2**32 - 1


class Publish(NamedTuple):
    """Make the volume `id` available to its pod. Idempotent.

    `target` is the volume's target path at kubelet; `pod` the pod's UID; `directory` the directory of the pod's
    emptyDir in which to make the socket `name`. With `old_clients`, clients of meta-fuse-csi-plugin are served under
    that name, too. `eager`: mount now. `options` are mount options, separated by commas; `group` is the volume mount
    group, or NO_GROUP. With `alone` the volume may be published at no other target (ReadWriteOncePod). `namespace` is
    the pod's. The filesystem is offered to other pods under the key `share` (`messages.sharing_key`), unless that is
    empty. With keys in `borrows`, one a line, that of another pod is used if the pod has no emptyDir for the socket.
    A `block` volume is a device; one that is offered with this `share` must have `capacity` bytes.
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
    namespace: bytes
    share: bytes
    borrows: bytes
    block: bool
    capacity: int


class Unpublish(NamedTuple):
    """Remove the volume; done, too, if there is none."""

    number: int
    id: bytes
    target: bytes


class Stat(NamedTuple):
    """Report the state of the volume at `target`; if `target` is empty, of the target with the worst state."""

    number: int
    id: bytes
    target: bytes


class Probe(NamedTuple):
    """Report whether the broker could serve callers now."""

    number: int


class TurnedAway(NamedTuple):
    """The plugin itself has refused a request. The front counts these, so that one counter holds all refusals."""

    operation: bytes


class Done(NamedTuple):
    number: int


class Stated(NamedTuple):
    """Usage of the volume in bytes and inodes, if it is `served`; and, if it is abnormal, the reason (`trouble`).

    Of a `block` volume, only the total of bytes is known.
    """

    number: int
    served: bool
    total_bytes: int
    free_bytes: int
    available_bytes: int
    total_inodes: int
    free_inodes: int
    trouble: bytes
    block: bool = False


class Refused(NamedTuple):
    """The front refuses the request; kubelet shows `text` in an event of the pod."""

    number: int
    code: Code
    text: bytes


Question = Publish | Unpublish | Stat | Probe
Answer = Done | Stated | Refused
Record = Question | TurnedAway | Answer
_vocabulary: Vocabulary[Record] = Vocabulary(Record.__args__)
dump = _vocabulary.dump
load = _vocabulary.load
