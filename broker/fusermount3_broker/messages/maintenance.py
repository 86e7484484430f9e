"""The broker's own operations and some of kubelet's, which no caller requests: records of `mounter`."""

from typing import NamedTuple

from fusermount3_broker.messages.quantities import DeviceNumber, Errno, NamespaceInode, Seconds


class StartReap(NamedTuple):
    """To the mounter, with one descriptor: conversation.

    Probe whether FUSE filesystems in the mount namespace with that inode are dead; with `unmount`, unmount the dead
    ones. `devices` has a line for each filesystem, its device number. The child answers each with `Asked`, in that
    order, and all of them with `Reaped`. After a filesystem that did not answer, it does not probe the following ones.
    """

    seconds: Seconds
    mount_namespace: NamespaceInode
    unmount: bool
    devices: bytes


class Asked(NamedTuple):
    """The answer of the filesystem of `device`, and how many of its mounts the child has unmounted.

    `answer` is 0 if a FUSE program serves it; ENOTCONN: it is dead; EAGAIN: it was not probed, because requests wait
    in its connection, which therefore is not dead; ETIMEDOUT: no answer came; ENOENT: it is not mounted there; ENODATA:
    it reveals nothing to this user namespace. Any other value reveals nothing either.
    """

    device: DeviceNumber
    answer: Errno
    mounts: int


class Reaped(NamedTuple):
    """All filesystems that could be probed have been."""


class NobodyThere(NamedTuple):
    """No process is in the mount namespace: two scans of all processes found none."""


class StartSurvey(NamedTuple):
    """To the mounter, with one descriptor: conversation. Report the state of these FUSE connections.

    `connections` has a line for each, "DEVICE INODE PID DESCRIPTOR": the inode of its directory in fusectl, and the
    process that served it at the last search, with its descriptor, or 0 0. The child examines no other process.
    """

    seconds: Seconds
    connections: bytes


class Surveyed(NamedTuple):
    """A line "DEVICE WAITING SERVED" for each connection that exists: the number of requests that wait in it, and 1 if
    that descriptor of that process serves it, else 0.
    """

    connections: bytes


class StartSearch(NamedTuple):
    """To the mounter, with one descriptor: conversation. Find the processes that serve FUSE connections.

    `devices` has a line for each connection, its device number; `pids` one for each process to examine, in this order,
    until all connections are found or too much time has passed.
    """

    seconds: Seconds
    devices: bytes
    pids: bytes


class Found(NamedTuple):
    """A line "DEVICE PID DESCRIPTOR" for each connection that one of the processes serves."""

    connections: bytes


class StartAbort(NamedTuple):
    """To the mounter, with one descriptor: conversation.

    Abort the FUSE connection of `device` whose directory in fusectl has the inode `connection`, once the number of its
    waiting requests has not changed for `unmoved` seconds; answered by `Aborted`. The front hangs up to cancel.
    """

    seconds: Seconds
    device: DeviceNumber
    connection: int
    unmoved: Seconds


class Aborted(NamedTuple):
    """The connection is aborted: processes that waited for an answer got an error."""


class StartRecognize(NamedTuple):
    """To the mounter, with one descriptor: conversation. Report which of these mounts still exist.

    `mounts` has a line for each, "DEVICE ID": the device number of its superblock and its unique ID, in the mount
    namespace with that inode.
    """

    seconds: Seconds
    mount_namespace: NamespaceInode
    mounts: bytes


class StartRecognizeVolume(NamedTuple):
    """To the mounter, with one descriptor: conversation. Report whether the filesystem of `device` is still mounted at
    the `target` of a volume, alive or dead, or in a container of its pod or, if it is `shared`, of any pod; answered by
    `Recognized`. `type` and `source` are those of the filesystem in mountinfo, unescaped.
    """

    seconds: Seconds
    target: bytes
    device: DeviceNumber
    type: bytes
    source: bytes
    shared: bool


class StartFindInContainers(NamedTuple):
    """To the mounter, with one descriptor: conversation. Report whether a container of the pod of the volume at
    `target` has the filesystem of `device`, in another mount namespace than that with the inode `but`; answered by
    `Recognized`. `type` and `source` as in `StartRecognizeVolume`.
    """

    seconds: Seconds
    target: bytes
    device: DeviceNumber
    type: bytes
    source: bytes
    but: NamespaceInode


class Recognized(NamedTuple):
    """A line for each mount that still exists: its device number."""

    devices: bytes


class StartCheck(NamedTuple):
    """To the mounter, with one descriptor: conversation. Answered by `Checked`, if a mount could start now."""

    seconds: int


class Checked(NamedTuple):
    pass


class StartRestore(NamedTuple):
    """To the mounter, with one descriptor: conversation.

    Where a container of the pod has the tombstone, or a `former` filesystem of the volume as in
    `mounter.StartVolumeMount`, have the filesystem of `device` take its place, if that is at `target`; `connection` is
    the inode of its connection. If the volume is `eager`, also where a container sees the placeholder: it may have no
    propagation. In the mount namespace `but`, if that is not 0, it takes the place of the tombstone only. Answered by
    `Restored`.
    """

    seconds: Seconds
    target: bytes
    device: DeviceNumber
    connection: int
    but: NamespaceInode
    former: bytes
    eager: bool


class Restored(NamedTuple):
    """All containers that could be reached have been looked at."""


class StartTombstone(NamedTuple):
    """To the mounter, with one descriptor: conversation. Put a filesystem that nobody serves, but that can be looked
    at, in the place of the filesystem of `device` at `target` if that is dead; answered by `TombstonePut`.
    """

    seconds: Seconds
    target: bytes
    device: DeviceNumber


class TombstonePut(NamedTuple):
    """Whether it has `replaced` the dead filesystem; if not, that is not dead, or not topmost there any more."""

    replaced: bool


class StartBorrow(NamedTuple):
    """To the mounter, with one descriptor: conversation. Have the filesystem of `device`, which is at the target
    `source`, also at the target `target`, unless a FUSE program serves what is there; answered by `Borrowed`.

    `connection` is the inode of its connection. With `read_only`, access through `target` is read-only. `former` as in
    `mounter.StartVolumeMount`, for the containers of the pod of `target`.
    """

    seconds: Seconds
    source: bytes
    device: DeviceNumber
    connection: int
    target: bytes
    read_only: bool
    former: bytes


class Borrowed(NamedTuple):
    """The filesystem of `device` is at the target; `new`: it was not there before."""

    device: DeviceNumber
    new: bool


class StartOffer(NamedTuple):
    """To the mounter, with three descriptors: conversation, caller's connection, caller's pidfd. Look at the open block
    device that the caller, a process of the pod of `source`, has sent; answered by `Offered`.

    The caller's request, with that descriptor, is still in the connection.
    """

    seconds: Seconds
    source: bytes


class Offered(NamedTuple):
    """The caller may read the device with the number `device`, and write to it unless it is `read_only`. `size` is in
    bytes.

    With one descriptor: a node of the device, opened O_PATH, which proves to the mounter that it has said this.
    """

    device: DeviceNumber
    size: int
    read_only: bool


class StartLend(NamedTuple):
    """To the mounter, with two descriptors: conversation, and the node of `Offered`. Have that device, which the pod of
    `source` has offered, at the target `target`; answered by `Lent`.

    `read_only`: it is for readers only.
    """

    seconds: Seconds
    source: bytes
    target: bytes
    read_only: bool


class Lent(NamedTuple):
    """The device is at the target."""


class StartStat(NamedTuple):
    """To the mounter, with one descriptor: conversation. Ask the filesystem at `target` for its usage."""

    seconds: Seconds
    target: bytes


class Stated(NamedTuple):
    """The statfs(2) answer for a volume, in bytes and inodes, if it is `served`: some FUSE program has mounted it and
    has answered. `published`: the volume exists. `errno` is why it is not served: ENODATA if no FUSE program has
    mounted it yet, ENOTCONN if none serves it any more, ETIMEDOUT if it hangs, or the error that the program has
    answered.

    Of a block volume, only the size of the device is known, as the total. ENODEV: that device is gone.

    A child that has sent ETIMEDOUT may go on until the program answers or is gone.
    """

    published: bool
    served: bool
    errno: Errno
    total_bytes: int
    free_bytes: int
    available_bytes: int
    total_inodes: int
    free_inodes: int
