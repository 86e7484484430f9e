"""Mount for a caller, in a child of the mounter that has joined the caller's namespaces.

The child reports the facts to the front, carries out the front's plan if it rests on these facts, and gives the caller
its descriptor. It attaches nothing before the front has recorded the mount. It undoes the mount unless the front sends
`Keep` or, when the front has died, the caller itself commits.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.messages.mounter import Record
from fusermount3_broker.mounter import filesystem, invariants, locked_flags, mount_tree, volume_targets
from fusermount3_broker.mounter.caller_namespaces import Caller
from fusermount3_broker.mounter.front_connection import Conversation, HungUp, StepError
from fusermount3_broker.mounter.namespaces import PidNamespace
from fusermount3_broker.mounter.volume_helper import VolumeHelper

#: The uid that a user namespace shows for users that are not mapped in it (/proc/sys/kernel/overflowuid).
OVERFLOW_UID = 65534


class Mountpoint:
    """The caller's mountpoint as a place for the filesystem: the directory or file that the caller has pinned."""

    STEP = "mount"

    def __init__(self, caller: Caller, talk: Conversation) -> None:
        self._caller = caller
        self._talk = talk

    def attach(self, mount: int) -> None:
        """Raises OSError."""
        mount_tree.attach(mount, self._caller.pinned, self._caller.locks, self._talk.seconds)

    def detach(self, mount: int) -> None:
        """Raises OSError."""
        mount_tree.detach(mount, self._caller.pinned, self._caller.locks, self._talk.seconds)

    def keep(self) -> None:
        pass


class Volume:
    """The volume's target as a place for the filesystem, alone or in addition; the helper attaches it there."""

    STEP = "mount on the volume"

    def __init__(self, helper: VolumeHelper, wanted: mounter.MountPlan, but: int) -> None:
        """`but`: the mount namespace in which the caller takes care of its mounts itself, or 0."""
        self._helper = helper
        self._but = but
        self._owner = mount_tree.Fuse(wanted.uid, wanted.gid, wanted.allow_other)

    def attach(self, mount: int) -> None:
        """Raises OSError: EBUSY if a FUSE program serves the volume, ENOENT if it is not published."""
        try:
            copy = volume_targets.private_copy(mount)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the mount is detached
                raise
            copy = os.dup(mount)
        try:
            owner = self._helper.attach(copy)
        finally:
            os.close(copy)
        if owner != self._owner:
            self._helper.withdraw()
            raise PermissionError(errno.EPERM, "it is not as planned")

    def detach(self, _mount: int) -> None:
        """Raises OSError."""
        self._helper.withdraw()

    def keep(self) -> None:
        self._helper.keep(self._but)


Places = Sequence[Mountpoint | Volume]


def mount(talk: Conversation, caller: Caller, start: mounter.StartMount | mounter.StartPlainMount) -> None:
    """Mount on the mountpoint that the caller has pinned."""
    wanted = _agreed(talk, caller)
    if wanted.sync_init and not _proceeds(talk, caller, wanted):
        return
    made = _create(talk, caller, wanted, caller)
    places = [Mountpoint(caller, talk)]
    with _closed_on_failure(talk, caller, made):
        agree_to_attach(talk, made, caller.mount_namespace, pids=caller.pids.seen)
        _attach(talk, caller, wanted, made, places)
    _settle(talk, caller, wanted, made, places, start.commit_seconds)


def mount_volume(talk: Conversation, caller: Caller, start: mounter.StartVolumeMount, helper: VolumeHelper) -> None:
    """Mount on a volume, and on the caller's pinned mountpoint, if any; only on the latter if the volume already has
    the filesystem."""
    if start.shared:
        if caller.in_user_namespace:  # the kernel lets nobody outside of it access the filesystem
            raise StepError(errno.EPERM, "share")
        caller.pids = PidNamespace(mounter.PIDS_SEEN)
    wanted = _agreed(talk, caller)
    if start.group != mounter.NO_GROUP:
        wanted = wanted._replace(gid=start.group)
    if wanted.sync_init and not _proceeds(talk, caller, wanted):
        return
    places: list[Mountpoint | Volume] = [Mountpoint(caller, talk)] if start.pinned else []
    if start.held:
        with talk.bounded("mount"):
            made = helper.clone()
            caller.check_serves(mount_tree.look(made).device)
    else:
        caller.cell.check()
        made = _create(talk, caller, wanted, helper)
        places.append(Volume(helper, wanted, caller.mount_namespace if start.pinned else 0))
    with _closed_on_failure(talk, caller, made):
        mount_namespace = caller.mount_namespace if start.pinned else helper.mount_namespace
        agree_to_attach(talk, made, mount_namespace, pids=caller.pids.seen)
        # The filesystem that the volume already has was made in the broker's own namespaces, for root.
        _attach(talk, caller, None if start.held else wanted, made, places)
    _settle(talk, caller, wanted, made, places, start.commit_seconds)


def agree_to_attach(talk: Conversation, made: int, mount_namespace: int, *, pids: int) -> None:
    """Announce to the front the mount to attach in that mount namespace, and return when the front has recorded it.

    `made` is the very mount that will be attached: its ID goes into the table. Raises HungUp and Dismissed: then
    nothing may be attached.
    """
    looked = mount_tree.look(made)
    talk.say(mounter.Made(looked.device, mount_namespace, pids, looked.lasting_id))
    if not isinstance(talk.hear(), mounter.Attach):
        raise HungUp


@contextmanager
def _closed_on_failure(talk: Conversation, caller: Caller, made: int) -> Iterator[None]:
    """Close the mount if the block fails, before the front learns of it: a detached filesystem ends with its mount, and
    its row in the table becomes meaningless. Raises StepError."""
    try:
        yield
    except BaseException:
        with talk.bounded("roll back"):
            os.close(made)
            caller.cell.close()
        raise


def _agreed(talk: Conversation, caller: Caller) -> mounter.MountPlan:
    """Return the front's plan, which rests on facts that this process found. Raises StepError, HungUp, Dismissed."""
    with talk.bounded("access mountpoint"):
        facts = _mount_facts(talk, caller, caller.pinned) if caller.pinned >= 0 else _facts_of_volume(caller)
    wanted = talk.hear()
    if not is_decided_on(wanted, facts):
        talk.say(facts)
        wanted = talk.hear()
    if (
        not isinstance(wanted, mounter.MountPlan)
        or not is_decided_on(wanted, facts)
        or not invariants.allow_mount(wanted)
    ):
        raise StepError(errno.EPERM, "check the plan")
    if caller.pinned >= 0:
        with talk.bounded("mount"):
            if not invariants.KERNEL_FILESYSTEMS.keys().isdisjoint(mount_tree.hidden_by(caller.pinned)):
                # A container engine that starts a program in the container looks for /proc and /dev/pts there.
                raise OSError(errno.EPERM, "it would hide a filesystem of the kernel")
    return wanted


def _proceeds(talk: Conversation, caller: Caller, wanted: mounter.MountPlan) -> bool:
    """Give the caller its descriptor before the mount exists; return whether the front wants the mount then."""
    caller.hand_over(wanted)
    talk.say(mounter.HandedOver())
    proceed = talk.hear()
    if not isinstance(proceed, mounter.Proceed):
        return False
    talk.seconds = proceed.seconds
    with talk.bounded("mount"):
        caller.take()
    return True


def _create(talk: Conversation, caller: Caller, wanted: mounter.MountPlan, locker: Caller | VolumeHelper) -> int:
    """Return a detached mount of a new filesystem, whose flags `locker` has locked. Raises StepError."""
    with talk.bounded("mount"):
        rescue = caller.rescue(talk) if wanted.sync_init else None
        made = filesystem.create(wanted, caller.device, caller.pids, caller.programs, rescue)
    with talk.bounded(locked_flags.STEP):
        locked = locker.lock(made, directory=stat.S_ISDIR(wanted.root_mode))
        filesystem.restrict(locked, wanted)
    return locked


def _attach(talk: Conversation, caller: Caller, wanted: mounter.MountPlan | None, made: int, places: Places) -> None:
    """Attach the mount at all places or none; at none, too, if it is not as `wanted`. Raises StepError."""
    attached: list[Mountpoint | Volume] = []
    for place in places:
        try:
            place.attach(made)
        except OSError as error:
            _detach(talk, made, attached)
            raise StepError(error.errno or errno.EIO, place.STEP) from None
        attached.append(place)
    in_container = caller.pids.descriptor is not None and caller.pinned >= 0
    if wanted and in_container and not _is_as_planned(made, wanted):
        _detach(talk, made, attached)
        raise StepError(errno.EPERM, "check the plan")


def _detach(talk: Conversation, made: int, places: Places) -> None:
    """Detach the mount from its places, in reverse order. Raises StepError."""
    for place in reversed(places):
        with talk.bounded("roll back"):
            place.detach(made)


def _settle(
    talk: Conversation, caller: Caller, wanted: mounter.MountPlan, made: int, places: Places, commit_seconds: int
) -> None:
    """Give the caller its descriptor, unless it already has it, and keep or undo the mount."""
    try:
        if not wanted.sync_init:
            caller.hand_over(wanted)
        os.close(caller.device)  # at once: any open copy keeps a dead FUSE program's mount from failing
        with suppress(HungUp):  # the front has died; handled below
            talk.say(mounter.Mounted())
        caller.cell.close()  # while the caller hands the device on; `made` keeps the filesystem from ending here
        if not _is_wanted(talk, caller, wanted, commit_seconds):
            raise HungUp
    except HungUp:
        _detach(talk, made, places)
        with talk.bounded("roll back"):
            os.close(made)
            caller.let_go()
        talk.say(mounter.RolledBack())
        return
    for place in places:
        place.keep()
    with talk.bounded("let go"):
        os.close(made)
        caller.let_go()
        caller.take()
    talk.say(mounter.Kept())


def _is_wanted(talk: Conversation, caller: Caller, wanted: mounter.MountPlan, commit_seconds: int) -> bool:
    """Return whether to keep the mount: the front decides, or the caller if the front has died."""
    try:
        return isinstance(talk.hear(), mounter.Keep)
    except HungUp:
        if wanted.sync_init:
            caller.tell(wanted.request_id)
        return caller.commits(commit_seconds)


def _is_as_planned(mount: int, wanted: mounter.MountPlan) -> bool:
    """Return whether the caller owns the filesystem, and others may access it only if planned.

    A process in the caller's container may have taken control of the process that created the filesystem, and of the
    context from which it was created.
    """
    fuse = mount_tree.fuse_if_any(mount_tree.look(mount).mount_id)
    return fuse == mount_tree.Fuse(wanted.uid, wanted.gid, wanted.allow_other)


def is_decided_on(wanted: Record, facts: mounter.MountFacts) -> bool:
    """Return whether the plan rests on these facts."""
    return isinstance(wanted, mounter.MountPlan) and all(
        getattr(wanted, name) == value for name, value in facts._asdict().items() if name != "mount_namespace"
    )


def _mount_facts(talk: Conversation, caller: Caller, mountpoint: int) -> mounter.MountFacts:
    looked = mount_tree.look(mountpoint)
    try:
        fuse = mount_tree.fuse_of(looked.mount_id)
    except LookupError:
        raise StepError(errno.EINVAL, "mount") from None
    if fuse and fuse.uid != caller.uid and not fuse.allow_other:
        # FUSE would deny the caller access, but not this process, whose real uid is its own.
        raise OSError(errno.EACCES, "another user's FUSE filesystem")
    caller.announce(talk, looked.device)
    status = os.fstat(mountpoint)
    is_user = caller.uid != 0  # root may mount anywhere
    return mounter.MountFacts(
        uid=caller.uid,
        gid=caller.gid,
        root_mode=stat.S_IFMT(status.st_mode),
        foreign_sticky=is_user and bool(status.st_mode & stat.S_ISVTX) and not _owns(caller, status.st_uid),
        filesystem=syscalls.fstatfs_type(mountpoint),
        search_errno=_access(mountpoint, os.X_OK) if is_user and stat.S_ISDIR(status.st_mode) else 0,
        access_errno=_access(mountpoint, os.W_OK) if is_user else 0,
        mount_namespace=caller.mount_namespace,
    )


def _facts_of_volume(caller: Caller) -> mounter.MountFacts:
    """Return the facts of a volume's target, which belongs to the broker alone: a directory on a tmpfs."""
    return mounter.MountFacts(
        uid=caller.uid,
        gid=caller.gid,
        root_mode=stat.S_IFDIR,
        foreign_sticky=False,
        filesystem=syscalls.TMPFS_MAGIC,
        search_errno=0,
        access_errno=0,
        mount_namespace=caller.mount_namespace,
    )


def _access(mountpoint: int, mode: int) -> int:
    """Return 0 if the caller has access `mode` to the mountpoint, else the errno."""
    try:
        syscalls.faccessat2(mountpoint, b"", mode, syscalls.AT_EMPTY_PATH | syscalls.AT_EACCESS)
        return 0
    except OSError as error:
        return error.errno or errno.EIO


def _owns(caller: Caller, owner: int) -> bool:
    """Return whether `owner` is the caller. In a user namespace, every unmapped user appears as the overflow uid."""
    return owner == caller.uid and not (caller.in_user_namespace and owner == OVERFLOW_UID)
