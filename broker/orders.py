"""What the supervisor and the front say to each other: typed records, and nothing but these.

    supervisor: Begin, with the descriptors that the front works with   front: Ready or Failed
    supervisor: Configuration, with the file                            at any time then
    supervisor: MounterStarted, PluginStarted                           when there is another one

The front asks the supervisor for nothing: who takes the front over has no say in what is done with privilege.
"""

from typing import NamedTuple

from broker.records import Vocabulary


class Begin(NamedTuple):
    """With descriptors: for the mounter's operations, for its orphans, the roots of fusectl and of /proc, the control
    socket, with `metrics` that on which metrics are asked for, with `volumes` that which leads to the CSI plugin, and
    then those on which callers come.

    `state_directory` is where the tables of mounts and volumes are.
    """

    state_directory: bytes
    metrics: bool
    volumes: bool


class Configuration(NamedTuple):
    """Put this into force. With the descriptor of the file, which has been checked; without one, the defaults.

    `path` is the file's, for messages.
    """

    path: bytes


class MounterStarted(NamedTuple):
    pid: int
    restarts: int


class PluginStarted(NamedTuple):
    """The CSI plugin's process."""

    pid: int
    restarts: int


class Ready(NamedTuple):
    """The front serves."""


class Failed(NamedTuple):
    """The front can't begin; `text` says why."""

    text: bytes


Order = Begin | Configuration | MounterStarted | PluginStarted | Ready | Failed
_vocabulary: Vocabulary[Order] = Vocabulary(Order.__args__)
dump = _vocabulary.dump
load = _vocabulary.load
