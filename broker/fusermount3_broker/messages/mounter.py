"""Messages between the front and the mounter: typed records, and nothing else.

One operation is a conversation over a socket pair of its own, between the front and the child that the mounter forks
for it. The complete list of records, in order:

    mount      front: MountPlan or Ask   (child: MountFacts   front: MountPlan)
               child: Made      front: Attach
               child: Mounted   front: Keep   child: Kept
                            or  front: Undo   child: RolledBack
               plain: or before Made:  child: NotPlain
               sync_init: and before Made:  child: HandedOver   front: Proceed
    unmount    child: UnmountFacts   front: UnmountPlan   child: Unmounted   front: Told
               plain: or at first  child: NotPlain
    reap       child: Asked, for each filesystem in turn   child: Reaped
                            or  child: NobodyThere
    survey     child: Surveyed
    search     child: Found
    abort      child: Aborted
    recognize  child: Recognized   or  child: NobodyThere
    recognize at a volume  child: Recognized
    check      child: Checked
    publish    child: Published, with the sockets
    eager      front: MountPlan   child: Made   front: Attach
               child: Mounted, with the /dev/fuse descriptor   front: Keep   child: Kept
    borrow     child: Borrowed
    offer      child: Offered, with the node
    lend       child: Lent
    unpublish  child: Unpublished
    stat       child: Stated
    tombstone  child: TombstonePut
    restore    child: Restored
    any        front: LetGo, instead of a plan, or of Attach   child: HasLetGo
               child: Entering, before it asks a FUSE filesystem

A plan contains the facts on which it was decided, and the child carries it out only if it finds the same facts. So the
front may guess: most callers mount on a directory of their own, on the same filesystem as the last one, and guessing
saves a round trip. If the guess is wrong, the child reports the facts it found, and gets a plan decided on those.

When the child sends `Made`, the filesystem exists, and its mount is not attached anywhere: it ends with the child. The
front writes it into its table before it sends `Attach`. So every mount that a process can see or use is in the table,
whichever process is killed at whatever time; a row whose filesystem has ended is dropped at the next check. Before the
child sends `Mounted`, it has sent the descriptor to the caller; before that it may send `Failed` at any turn, and exit.

The front may hang up at any turn, and being killed hangs up, too. If that is before `Attach` or an `UnmountPlan`,
nothing is done. After them, the child goes on alone: it sends the caller the answer that the front has not sent, and
keeps the mount if the caller commits, or unmounts again.

The child ends after the conversation, and so is the last process to hold the caller's connection and the unread data in
it.

The mounter trusts neither the front nor its own parser: it loads a record only if it has exactly the fields of its
class, each of the right type and within bounds. No field holds flags that a caller chooses: flags that are always set
(nosuid, nodev) are not fields at all.
"""

from typing import Annotated, NamedTuple

from fusermount3_broker.messages.maintenance import Aborted as Aborted
from fusermount3_broker.messages.maintenance import Asked as Asked
from fusermount3_broker.messages.maintenance import Borrowed as Borrowed
from fusermount3_broker.messages.maintenance import Checked as Checked
from fusermount3_broker.messages.maintenance import Found as Found
from fusermount3_broker.messages.maintenance import Lent as Lent
from fusermount3_broker.messages.maintenance import NobodyThere as NobodyThere
from fusermount3_broker.messages.maintenance import Offered as Offered
from fusermount3_broker.messages.maintenance import Reaped as Reaped
from fusermount3_broker.messages.maintenance import Recognized as Recognized
from fusermount3_broker.messages.maintenance import Restored as Restored
from fusermount3_broker.messages.maintenance import StartAbort as StartAbort
from fusermount3_broker.messages.maintenance import StartBorrow as StartBorrow
from fusermount3_broker.messages.maintenance import StartCheck as StartCheck
from fusermount3_broker.messages.maintenance import StartFindInContainers as StartFindInContainers
from fusermount3_broker.messages.maintenance import StartLend as StartLend
from fusermount3_broker.messages.maintenance import StartOffer as StartOffer
from fusermount3_broker.messages.maintenance import StartReap as StartReap
from fusermount3_broker.messages.maintenance import StartRecognize as StartRecognize
from fusermount3_broker.messages.maintenance import StartRecognizeVolume as StartRecognizeVolume
from fusermount3_broker.messages.maintenance import StartRestore as StartRestore
from fusermount3_broker.messages.maintenance import StartSearch as StartSearch
from fusermount3_broker.messages.maintenance import StartStat as StartStat
from fusermount3_broker.messages.maintenance import StartSurvey as StartSurvey
from fusermount3_broker.messages.maintenance import StartTombstone as StartTombstone
from fusermount3_broker.messages.maintenance import Stated as Stated
from fusermount3_broker.messages.maintenance import Surveyed as Surveyed
from fusermount3_broker.messages.maintenance import TombstonePut as TombstonePut
from fusermount3_broker.messages.quantities import NO_GROUP as NO_GROUP
from fusermount3_broker.messages.quantities import DeviceNumber as DeviceNumber
from fusermount3_broker.messages.quantities import Errno as Errno
from fusermount3_broker.messages.quantities import FileMode as FileMode
from fusermount3_broker.messages.quantities import FilesystemMagic as FilesystemMagic
from fusermount3_broker.messages.quantities import GroupId as GroupId
from fusermount3_broker.messages.quantities import NamespaceInode as NamespaceInode
from fusermount3_broker.messages.quantities import Seconds as Seconds
from fusermount3_broker.messages.quantities import UserId as UserId
from fusermount3_broker.messages.records import Vocabulary


class StartMount(NamedTuple):
    """To the mounter, with three descriptors: conversation, caller's connection, caller's pidfd.

    `seconds` bounds each step that may block, `commit_seconds` the wait for the caller if no front is there to wait.
    The caller's request, with its descriptor, is still in the connection.
    """

    seconds: Seconds
    commit_seconds: Seconds


class StartPlainMount(NamedTuple):
    """As `StartMount`, to a child that does plain mounts only; it may answer `NotPlain` at any turn before `Made`."""

    seconds: Seconds
    commit_seconds: Seconds


class StartPlainUnmount(NamedTuple):
    """As `StartUnmount`, to a child that does plain unmounts only; it may answer `NotPlain` at first."""

    seconds: Seconds
    name: bytes


class NotPlain(NamedTuple):
    """The mount or unmount is not plain: the request is still in the connection, for another child."""


class StartUnmount(NamedTuple):
    """As `StartMount`. `name` is the entry in the directory that the caller sent.

    With `only_dead` the facts include whether the filesystem is dead.
    """

    seconds: Seconds
    name: bytes
    only_dead: bool


class StartPublish(NamedTuple):
    """To the mounter, with one descriptor: conversation. Make the mountpoint and the sockets of a volume; answered by
    `Published`.

    All paths are relative to kubelet's directory: `target` is the volume's path, `directory` the directory in which to
    make the socket `name`. With `old_clients` that is a stream socket, and ours (`fusermount3_proxy.client`) is beside
    it. What already exists and is the broker's own is kept, except sockets: they are made again. With `serving` the
    front holds them; then they are kept, too, if all still exist. If another owner has one of these names, or the
    target, `Failed` has EEXIST, and the step says which.

    A socket is made under a name that contains `nonce`, hexadecimal digits that only the broker knows and that are the
    same for a volume each time: so a leftover of a killed child can be recognized as the broker's.

    `shared`: other pods may have what the volume has. That counts when the volume is new, not when it exists already.
    """

    seconds: Seconds
    target: bytes
    directory: bytes
    name: bytes
    old_clients: bool
    serving: bool
    nonce: bytes
    shared: bool = False


class Published(NamedTuple):
    """The volume is in place. With one descriptor: a listening SOCK_SEQPACKET socket; with `old_clients`, a second: a
    listening SOCK_STREAM socket. With none, if the sockets were kept.
    """


class StartEager(NamedTuple):
    """To the mounter, with one descriptor: conversation. Mount a new filesystem at `target`, which is published, in
    place of a dead one; no FUSE program serves it yet. `Mounted` comes with its /dev/fuse descriptor. `group` and
    `former` as in `StartVolumeMount`.
    """

    seconds: Seconds
    target: bytes
    group: GroupId
    former: bytes


class StartVolumeMount(NamedTuple):
    """As `StartMount`, for a volume: the filesystem appears at `target`, too, in place of a dead one there.

    With `pinned`, the caller sent its own mountpoint; else the filesystem appears at the target only, and the facts are
    those of a directory that may be used. With `held`, a fourth descriptor: the /dev/fuse of the filesystem that is
    already at the target (`StartEager`). With `read_only`, access through the target is read-only. `group` is the
    filesystem's group_id, instead of the caller's gid; with `NO_GROUP` it is the caller's gid. `former` has a line for
    each filesystem that the volume had before and that still exists: its device number and the inode of its connection
    in fusectl. Where a container of the pod has one of these, the new filesystem takes its place. With `shared`, other
    pods will have the filesystem, too, and its program sees the pids of their processes.
    """

    seconds: Seconds
    commit_seconds: Seconds
    target: bytes
    pinned: bool
    held: bool
    read_only: bool
    group: GroupId
    former: bytes
    shared: bool = False


class StartUnpublish(NamedTuple):
    """To the mounter, with one descriptor: conversation. Remove a volume, or whatever remains of it.

    Fields as in `StartPublish`; `directory` may be empty if it is not known. Answered by `Unpublished`. What the broker
    has not made is kept. Unless the filesystem is `borrowed`, it is aborted if its program hangs.
    """

    seconds: Seconds
    target: bytes
    directory: bytes
    name: bytes
    nonce: bytes
    borrowed: bool = False


class Unpublished(NamedTuple):
    pass


class Entering(NamedTuple):
    """The next step asks the FUSE filesystem of `device`, and blocks if that hangs. The caller is `uid` in its own user
    namespace, and in this mount namespace.
    """

    device: DeviceNumber
    uid: UserId
    mount_namespace: NamespaceInode


class StartDismissal(NamedTuple):
    """To the mounter, with the conversation and any number of callers' connections.

    Drain and close them, once the front has closed its own descriptors of them.
    """

    seconds: Seconds


class BadDescriptors(NamedTuple):
    """The caller did not send the one O_PATH descriptor that its request takes, but this number of descriptors."""

    descriptors: int


class MountFacts(NamedTuple):
    """The caller's IDs as its user namespace has them, and the mountpoint that it sent, as its own rights let it see
    it.

    `root_mode` is the S_IFMT part of the mountpoint's st_mode; `foreign_sticky`: it is a sticky directory of another
    user; `filesystem` is its statfs f_type; `search_errno` is 0 or the error of entering the directory, `access_errno`
    0 or the error of access(2) for writing. Root may mount anywhere, so for uid 0 these three are not looked at and 0.
    `mount_namespace` is the inode number of the caller's.
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

    Empty `subtype`, `max_read`, `block_size`: not given. `request_id`, `warnings` (one a line) and `auto_unmount` go
    into the reply with which the child hands the descriptor to the caller; with `sync_init` it precedes the mount.
    """

    uid: UserId
    gid: GroupId
    root_mode: FileMode
    foreign_sticky: bool
    filesystem: FilesystemMagic
    search_errno: Errno
    access_errno: Errno
    request_id: bytes
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
    """The front does not guess: it requests the facts."""


class HandedOver(NamedTuple):
    """The caller has its descriptor, and nothing is mounted yet."""


class Proceed(NamedTuple):
    """Mount now: the FUSE program serves. `seconds` bounds the kernel's wait for it."""

    seconds: Seconds


#: The FUSE program sees pids; it doesn't, because the mounter is not in a pid namespace above that of the caller, or
#: because the caller may trace processes.
PIDS = PIDS_SEEN, PIDS_FOREIGN, PIDS_TRACED = range(3)
Pids = Annotated[int, range(len(PIDS))]


class Made(NamedTuple):
    """The filesystem exists, and its mount is not attached anywhere. `device` is the minor number of the superblock,
    its name under fusectl; `mount_namespace` is where the mount will be attached: the caller's namespace, or the
    broker's own if it goes to the target of a volume only.

    `pids` is one of `PIDS`: whether the FUSE program sees the pids of the processes that use its filesystem, or why it
    sees 0 instead. `mount_id` is the unique ID of the mount, which identifies it for as long as it exists, or 0 where
    the kernel has none.
    """

    device: DeviceNumber
    mount_namespace: NamespaceInode
    pids: Pids
    mount_id: int = 0


class Attach(NamedTuple):
    """The mount is in the table: attach it."""


class Mounted(NamedTuple):
    """The mount is in place."""


class Keep(NamedTuple):
    """The descriptor has been delivered; the mount stays."""


class Undo(NamedTuple):
    """The caller has not taken the mount."""


class LetGo(NamedTuple):
    """Instead of a plan: there will be none. Instead of `Attach`: mount nothing."""


class HasLetGo(NamedTuple):
    """The child holds no descriptor of the caller's any more, except the connection."""


class Kept(NamedTuple):
    """The child has released the mount, which stays."""


class RolledBack(NamedTuple):
    """The mount was not wanted, and is removed again."""


class UnmountFacts(NamedTuple):
    """The caller's uid and namespace, and the state of the entry: the minor device number of its superblock, if it is a
    mountpoint at all.

    `access_errno` is 0, or why the caller can't look at the entry; the other fields then mean nothing. `dead`: it is a
    FUSE filesystem with the caller's user_id that no FUSE program serves; checked only if the start record asks for it.
    `may_mount`: the caller has CAP_SYS_ADMIN itself.
    """

    uid: UserId
    mount_namespace: NamespaceInode
    access_errno: Errno
    mounted: bool
    device: DeviceNumber
    dead: bool
    may_mount: bool


class UnmountPlan(NamedTuple):
    """`request_id` goes into the reply, if the child has to send it."""

    lazy: bool
    request_id: bytes


class Unmounted(NamedTuple):
    pass


class Told(NamedTuple):
    """The front has sent the caller the answer that the unmount is done."""


class Failed(NamedTuple):
    """The child could not go on: `step` names the call that failed. Nothing remains mounted."""

    errno: Errno
    step: bytes


Start = (
    StartMount
    | StartPlainMount
    | StartVolumeMount
    | StartUnmount
    | StartPlainUnmount
    | StartReap
    | StartSurvey
    | StartSearch
    | StartAbort
    | StartRecognize
    | StartCheck
    | StartDismissal
    | StartPublish
    | StartBorrow
    | StartOffer
    | StartLend
    | StartEager
    | StartRecognizeVolume
    | StartFindInContainers
    | StartUnpublish
    | StartStat
    | StartTombstone
    | StartRestore
)
Record = (
    Start
    | Entering
    | Asked
    | Reaped
    | NobodyThere
    | Surveyed
    | Found
    | Aborted
    | Checked
    | Recognized
    | Published
    | Borrowed
    | Offered
    | Lent
    | Unpublished
    | Stated
    | TombstonePut
    | Restored
    | BadDescriptors
    | NotPlain
    | MountFacts
    | Ask
    | MountPlan
    | HandedOver
    | Proceed
    | Made
    | Attach
    | Mounted
    | Keep
    | Undo
    | LetGo
    | HasLetGo
    | Kept
    | RolledBack
    | UnmountFacts
    | UnmountPlan
    | Unmounted
    | Told
    | Failed
)


#: After these a child sends nothing more, and only waits for the end of the conversation.
LAST_WORDS = (
    *(Kept, RolledBack, Unmounted, Reaped, Surveyed, Aborted, Checked, HasLetGo, BadDescriptors, Failed),
    *(Recognized, Published, Borrowed, Offered, Lent, Unpublished, Stated, TombstonePut, Restored, NobodyThere, Found),
    NotPlain,
)
_vocabulary: Vocabulary[Record] = Vocabulary(Record.__args__)
dump = _vocabulary.dump
load = _vocabulary.load
