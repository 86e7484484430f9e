"""What the front and the mounter say to each other: typed records, and nothing but these.

One operation is a conversation over a socket pair of its own, between the front and the child that the mounter forks
for it. The whole list of what may be said, in order:

    mount      front: MountPlan or Ask   (child: MountFacts   front: MountPlan)
               child: Mounted   front: Keep   child: Kept
                            or  front: Undo   child: RolledBack
    sync_init  as above, and before Mounted:  child: HandedOver   front: Proceed
    unmount    child: UnmountFacts   front: UnmountPlan   child: Unmounted   front: Told
    reap       child: Reaped
    survey     child: Surveyed
    abort      child: Aborted
    recognize  child: Recognized
    check      child: Checked
    publish    child: Published, with the sockets
    eager      front: MountPlan   child: Mounted, with the /dev/fuse descriptor   front: Keep   child: Kept
    unpublish  child: Unpublished
    stat       child: Stated
    any        front: LetGo, instead of a plan   child: HasLetGo
               child: Entering, before it asks a FUSE filesystem

A plan contains the facts on which it was decided, and the child carries it out only if they are what it finds. So the
front may guess: most callers mount on a directory of their own, on the filesystem that the last one had, and that
saves a round trip. Where the guess is wrong, the child tells what it found, and gets a plan that was decided on that.

Before it says `Mounted`, the child has sent the descriptor to the caller. It may say `Failed` at any turn before, and
be gone.

The front may hang up at any turn, and it does if it is killed. Before `Mounted` or `Unmounted` nothing is done then.
After that, the child takes the front's place: it tells the caller what the front has not told it, keeps the mount if
the caller commits, and says so (`Orphaned`) to the front that comes next; or it unmounts again.

The child ends when the conversation has, and so is the last who has the caller's connection, and what is left in it.

The mounter trusts neither the front nor its own reading: a record is loaded only when it has exactly the fields of
its class, each of the right type and within bounds. There is no field for flags that a caller chooses: what is
always so (nosuid, nodev) is no field at all.
"""

from typing import Annotated, NamedTuple

from broker.records import Vocabulary

# Numbers, each with all that it can be; one without a range is what any system call and SQLite take.
Seconds = Annotated[int, range(1_000_001)]
Errno = Annotated[int, range(4096)]  # include/linux/err.h, MAX_ERRNO
UserId = Annotated[int, range(2**32)]
GroupId = Annotated[int, range(2**32)]
FileMode = Annotated[int, range(2**16)]
FilesystemMagic = Annotated[int, range(2**64)]
DeviceNumber = Annotated[int, range(2**32)]
NamespaceInode = Annotated[int, range(2**32)]
#: No group; as chown(2) takes it.
NO_GROUP = 2**32 - 1


class StartMount(NamedTuple):
    """To the mounter, with three descriptors: conversation, caller's connection, caller's pidfd.

    `seconds` bounds each step that may block, `commit_seconds` the wait for the caller if there is no front that waits.
    What the caller said, with its descriptor, is still in the connection.
    """

    seconds: Seconds
    commit_seconds: Seconds


class StartUnmount(NamedTuple):
    """As `StartMount`. `name` is the entry in the directory that the caller sent.

    With `only_dead` the facts say whether the filesystem is dead.
    """

    seconds: Seconds
    name: bytes
    only_dead: bool


class StartReap(NamedTuple):
    """To the mounter, with one descriptor: conversation.

    Unmount the filesystem of `device` in the mount namespace of that inode, if it is dead; answered by `Reaped`.
    """

    seconds: Seconds
    device: DeviceNumber
    mount_namespace: NamespaceInode


class Reaped(NamedTuple):
    """How many mounts were dead, and are gone."""

    mounts: int


class StartSurvey(NamedTuple):
    """To the mounter, with one descriptor: conversation. Tell how these FUSE connections are.

    `connections` has a line for each, "DEVICE INODE PID DESCRIPTOR": the inode of its directory in fusectl, and the
    process and its descriptor that served it when somebody looked last, or 0 0. With `search` all processes are looked
    through for those that are not served so any more, which takes long.
    """

    seconds: Seconds
    search: bool
    connections: bytes


class Surveyed(NamedTuple):
    """A line "DEVICE WAITING PID DESCRIPTOR" for each connection that there is: how many requests wait in it, and which
    process serves it with which descriptor, 0 0 if none was found.
    """

    connections: bytes


class StartAbort(NamedTuple):
    """To the mounter, with one descriptor: conversation.

    Abort the FUSE connection of `device` whose directory in fusectl has the inode `connection`, once the number of its
    waiting requests has not moved for `unmoved` seconds; answered by `Aborted`. The front hangs up to call it off.
    """

    seconds: Seconds
    device: DeviceNumber
    connection: int
    unmoved: Seconds


class Aborted(NamedTuple):
    """The connection is aborted: who waited for an answer has an error."""


class StartRecognize(NamedTuple):
    """To the mounter, with one descriptor: conversation. Tell which of these mounts there still are.

    `mounts` has a line for each, "DEVICE ID": the device number of its superblock and its unique id, in the mount
    namespace of that inode.
    """

    seconds: Seconds
    mount_namespace: NamespaceInode
    mounts: bytes


class Recognized(NamedTuple):
    """A line for each mount that there still is: its device number."""

    devices: bytes


class StartCheck(NamedTuple):
    """To the mounter, with one descriptor: conversation. Answered by `Checked`, if a mount could be begun now."""

    seconds: int


class Checked(NamedTuple):
    pass


class StartPublish(NamedTuple):
    """To the mounter, with one descriptor: conversation. Make what a volume needs; answered by `Published`.

    All paths are relative to kubelet's directory: `target` is where the volume is to be, `directory` where the socket
    `name` is made. With `old_clients` that is a stream socket, and beside it is ours (`fusermount3_proxy.client`).
    What is there already and is the broker's own is kept, but for sockets: they are made again. With `serving` the
    front has them; then they stay, too, if all are still there. If one of these names is something else's, or the
    target is, `Failed` has EEXIST, and the step says which.

    A socket is made under a name with `nonce` in it, hexadecimal digits that only the broker knows, and which are the
    same for a volume each time: what a child has left there that was killed is the broker's.
    """

    seconds: Seconds
    target: bytes
    directory: bytes
    name: bytes
    old_clients: bool
    serving: bool
    nonce: bytes


class Published(NamedTuple):
    """The volume has its place. With one descriptor: a listening SOCK_SEQPACKET socket; with `old_clients`, a second:
    a listening SOCK_STREAM socket. With none, if the sockets have stayed."""


class StartEager(NamedTuple):
    """To the mounter, with one descriptor: conversation. Mount a new filesystem at `target`, which is published, in
    place of one that is dead; nobody serves it yet. `Mounted` comes with its /dev/fuse. `group` as in
    `StartVolumeMount`."""

    seconds: Seconds
    target: bytes
    group: GroupId


class StartVolumeMount(NamedTuple):
    """As `StartMount`, for a volume: the filesystem appears at `target`, too, in place of one that is dead there.

    With `pinned`, the caller sent its own mountpoint; else it appears at the target only, and the facts are those of a
    directory that may be used. With `held`, a fourth descriptor: the /dev/fuse of the filesystem that is at the target
    already (`StartEager`). With `read_only` nobody who comes by the target may write. `group` is the filesystem's
    group_id, instead of the caller's gid; `NO_GROUP`: that one.
    """

    seconds: Seconds
    commit_seconds: Seconds
    target: bytes
    pinned: bool
    held: bool
    read_only: bool
    group: GroupId


class StartUnpublish(NamedTuple):
    """To the mounter, with one descriptor: conversation. Take a volume away, whatever is left of it.

    Fields as in `StartPublish`; `directory` may be empty if it is not known. Answered by `Unpublished`. What the broker
    has not made stays.
    """

    seconds: Seconds
    target: bytes
    directory: bytes
    name: bytes
    nonce: bytes


class Unpublished(NamedTuple):
    pass


class StartStat(NamedTuple):
    """To the mounter, with one descriptor: conversation. Ask the filesystem at `target` how full it is."""

    seconds: Seconds
    target: bytes


class Stated(NamedTuple):
    """What statfs(2) says of a volume, in bytes and inodes, if it is `served`: some FUSE program has mounted it and has
    answered. `published`: there is a volume at all. `errno` is why it is not served: ENODATA if nobody has mounted it
    yet, ENOTCONN if nobody serves it any more, ETIMEDOUT if it hangs, or what the program has answered.

    A child that has said ETIMEDOUT may go on until the program answers or is gone.
    """

    published: bool
    served: bool
    errno: Errno
    total_bytes: int
    free_bytes: int
    available_bytes: int
    total_inodes: int
    free_inodes: int


class Entering(NamedTuple):
    """What follows asks the FUSE filesystem of `device`, and blocks if that hangs. The caller is `uid` in its own user
    namespace, and in this mount namespace.
    """

    device: DeviceNumber
    uid: UserId
    mount_namespace: NamespaceInode


class StartDismissal(NamedTuple):
    """To the mounter, with the conversation and any number of callers' connections.

    Empty them and close them, when the front has.
    """

    seconds: Seconds


class BadDescriptors(NamedTuple):
    """The caller did not send the one O_PATH descriptor that its request takes, but so many."""

    descriptors: int


class MountFacts(NamedTuple):
    """Who asks, as their user namespace sees them, and what they point at, as they themselves may see it.

    `root_mode` is the S_IFMT part of the mountpoint's st_mode; `foreign_sticky`: it is a sticky directory of somebody
    else; `filesystem` is its statfs f_type; `search_errno` is 0 or why a directory can't be entered, `access_errno` 0
    or what access(2) for writing it says; `mount_namespace` is the inode number of the caller's.
    """

    uid: UserId
    gid: GroupId
    root_mode: FileMode
    foreign_sticky: bool
    filesystem: FilesystemMagic
    search_errno: Errno
    access_errno: Errno
    mount_namespace: NamespaceInode


class MountPlan(NamedTuple):
    """A FUSE mount, by the names of mount(8), after the facts on which it was decided.

    Empty `subtype`, `max_read`, `block_size`: not given. `request`, `warnings`, one a line, and `auto_unmount` go into
    the reply with which the child hands the descriptor to the caller; with `sync_init` that comes before the mount.
    """

    uid: UserId
    gid: GroupId
    root_mode: FileMode
    foreign_sticky: bool
    filesystem: FilesystemMagic
    search_errno: Errno
    access_errno: Errno
    request: bytes
    warnings: bytes
    auto_unmount: bool
    sync_init: bool
    source: bytes
    subtype: bytes
    allow_other: bool
    default_permissions: bool
    max_read: bytes
    block_size: bytes
    read_only: bool
    sync: bool
    dirsync: bool
    lazytime: bool
    noexec: bool
    noatime: bool
    nodiratime: bool
    strictatime: bool
    nosymfollow: bool


class Ask(NamedTuple):
    """The front does not guess: it wants the facts."""


class HandedOver(NamedTuple):
    """The caller has its descriptor, and nothing is mounted yet."""


class Proceed(NamedTuple):
    """Mount now: the FUSE program serves. `seconds` bounds what the kernel waits for it."""

    seconds: Seconds


class Mounted(NamedTuple):
    """The mount is in place. `device` is the minor number of the superblock, its name under fusectl; `mount_namespace`
    is the caller's, or the broker's own if it is at the target of a volume only.

    With `pids_visible` the FUSE program sees the pids of who uses its filesystem, otherwise 0. `mount_id` is the unique
    id of the mount, by which it is known for as long as it is there, or 0 where the kernel has none.
    """

    device: DeviceNumber
    mount_namespace: NamespaceInode
    pids_visible: bool
    mount_id: int = 0


class Keep(NamedTuple):
    """The descriptor has been delivered; the mount stays."""


class Undo(NamedTuple):
    """The caller has not taken the mount."""


class LetGo(NamedTuple):
    """Instead of a plan: there will be none."""


class HasLetGo(NamedTuple):
    """The child has nothing open any more that is the caller's but the connection."""


class Kept(NamedTuple):
    """The child has let go of the mount."""


class RolledBack(NamedTuple):
    """The mount was not wanted, and is gone again."""


class Orphaned(NamedTuple):
    """To whoever is the front: a mount that was kept although the front which had it made was killed.

    Fields as in `MountPlan` and `Mounted`; `pid` is the caller's, `target` that of its volume, or empty.
    """

    device: DeviceNumber
    mount_namespace: NamespaceInode
    uid: UserId
    pid: int
    request: bytes
    source: bytes
    subtype: bytes
    target: bytes
    mount_id: int = 0


class UnmountFacts(NamedTuple):
    """Who asks, and what is on the entry: the minor device number of its superblock, if it is a mountpoint at all.

    `access_errno` is 0, or why the caller can't look at it; the rest then says nothing. `dead`: it is a FUSE filesystem
    with the caller's user_id that nobody serves; looked up only if the start record asks for it. `may_mount`: the
    caller has CAP_SYS_ADMIN itself.
    """

    uid: UserId
    mount_namespace: NamespaceInode
    access_errno: Errno
    mounted: bool
    device: DeviceNumber
    dead: bool
    may_mount: bool


class UnmountPlan(NamedTuple):
    """`request` goes into the reply, if the child has to give it."""

    lazy: bool
    request: bytes


class Unmounted(NamedTuple):
    pass


class Told(NamedTuple):
    """The caller has been told that it is done."""


class Failed(NamedTuple):
    """The child could not go on: `step` names the call that failed. Nothing is left mounted."""

    errno: Errno
    step: bytes


Start = (
    StartMount
    | StartVolumeMount
    | StartUnmount
    | StartReap
    | StartSurvey
    | StartAbort
    | StartRecognize
    | StartCheck
    | StartDismissal
    | StartPublish
    | StartEager
    | StartUnpublish
    | StartStat
)
Record = (
    Start
    | Entering
    | Reaped
    | Surveyed
    | Aborted
    | Checked
    | Recognized
    | Published
    | Unpublished
    | Stated
    | BadDescriptors
    | MountFacts
    | Ask
    | MountPlan
    | HandedOver
    | Proceed
    | Mounted
    | Keep
    | Undo
    | LetGo
    | HasLetGo
    | Kept
    | RolledBack
    | Orphaned
    | UnmountFacts
    | UnmountPlan
    | Unmounted
    | Told
    | Failed
)


def filesystem_type(subtype: bytes) -> str:
    """Return how mountinfo calls a FUSE filesystem of that subtype."""
    return "fuse" + (f".{subtype.decode('utf-8', 'backslashreplace')}" if subtype else "")


#: After these a child has nothing more to say, and only waits for the end.
LAST_WORDS = (
    *(Kept, RolledBack, Unmounted, Reaped, Surveyed, Aborted, Checked, HasLetGo, BadDescriptors, Failed),
    *(Recognized, Published, Unpublished, Stated),
)
_vocabulary: Vocabulary[Record] = Vocabulary(Record.__args__)
dump = _vocabulary.dump
load = _vocabulary.load
