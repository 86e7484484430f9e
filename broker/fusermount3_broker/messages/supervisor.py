"""Messages between the supervisor and the front, and the mounter's only one: typed records, and nothing else.

    mounter: MounterReady or Failed
    supervisor: Begin, with the descriptors that the front works with   front: Ready or Failed
    supervisor: Configuration, with the file                            at any time then
    supervisor: SubordinateIds, with the files                          at any time then
    supervisor: MounterStarted, PluginStarted                           when there is another one
    supervisor: ChildrenLeft, with their pidfds                         to a front that is not the first

The front requests nothing from the supervisor: an attacker who takes over the front has no say in what the supervisor
does with its privilege.
"""

from typing import NamedTuple

from fusermount3_broker.messages.records import Vocabulary


class Begin(NamedTuple):
    """With descriptors: to the mounter for callers' operations, for the broker's own and for plain calls, the roots of
    fusectl and of /proc, the control socket, with `metrics` the socket for metrics, with `volumes` the one to the CSI
    plugin, and then the sockets on which callers connect.

    `state_directory` holds the tables of mounts and volumes; `log_format` is one of `configuration.LOG_FORMATS`;
    `keeps_fusectl`: while the broker restarts, systemd keeps the superblock of fusectl. `mount_namespaces` are those of
    Kubernetes whose pods may offer their filesystems to all pods, separated by commas.
    """

    state_directory: bytes
    log_format: bytes
    metrics: bool
    volumes: bool
    keeps_fusectl: bool
    mount_namespaces: bytes = b""


class Configuration(NamedTuple):
    """Put this configuration into force. With the descriptor of the file, which has been checked; without one, the
    defaults.

    `path` is the file's, for messages.
    """

    path: bytes


class SubordinateIds(NamedTuple):
    """The owners of subordinate uids. With descriptors of the contents of /etc/subuid and /etc/passwd, unparsed; a
    missing file is an empty one.
    """


class MounterReady(NamedTuple):
    """With two descriptors: the roots of fusectl and of /proc.

    `locks_flags`: the host lets the mounter lock the flags of mounts. `serves_plain_calls`: it has children for
    `mounter.StartPlainMount` and `mounter.StartPlainUnmount`.
    """

    locks_flags: bool
    serves_plain_calls: bool


class MounterStarted(NamedTuple):
    pid: int
    restarts: int
    serves_plain_calls: bool


class PluginStarted(NamedTuple):
    """The CSI plugin's process."""

    pid: int
    restarts: int


class ChildrenLeft(NamedTuple):
    """Children of the mounter still run, which carry out operations of an earlier front, or have not ended since."""


class Ready(NamedTuple):
    """The front serves."""


class Failed(NamedTuple):
    """The front or the mounter can't start; `text` says why."""

    text: bytes


Order = (
    Begin
    | Configuration
    | SubordinateIds
    | MounterReady
    | MounterStarted
    | PluginStarted
    | ChildrenLeft
    | Ready
    | Failed
)
_vocabulary: Vocabulary[Order] = Vocabulary(Order.__args__)
dump = _vocabulary.dump
load = _vocabulary.load
