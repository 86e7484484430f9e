"""Mounting for a caller: what a child of the mounter does once it has joined the caller's namespaces.

It tells the front what it found, does what the front decided, if that rests on what it found, and gives the caller its
descriptor. The mount is undone unless somebody says `Keep`: the front, or the caller itself if there is none any more.
"""

import errno
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from broker import filesystem, invariants, mounts, plan, syscalls, targets
from broker.caller import NOW, Caller
from broker.conversation import Conversation, HungUp, StepError
from broker.plan import Record
from broker.twins import Twin

#: As whom a user namespace shows those who have no uid in it (/proc/sys/kernel/overflowuid).
OVERFLOW_UID = 65534
#: include/uapi/linux/magic.h
TMPFS_MAGIC = 0x01021994


class Mountpoint:
    """Where the caller wants the filesystem: on what it has pinned."""

    STEP = "mount"

    def __init__(self, caller: Caller, talk: Conversation) -> None:
        self._caller = caller
        self._talk = talk

    def attach(self, mount: int) -> None:
        """Raises OSError."""
        mounts.attach(mount, self._caller.pinned, self._caller.locks, self._talk.seconds)

    def detach(self, mount: int) -> None:
        """Raises OSError."""
        mounts.detach(mount, self._caller.pinned, self._caller.locks, self._talk.seconds)

    def keep(self) -> None:
        pass


class Volume:
    """Where the filesystem of a volume appears besides, or only: at the target, by the hands of the twin."""

    STEP = "mount on the volume"

    def __init__(self, twin: Twin, wanted: plan.MountPlan, but: int) -> None:
        """`but`: the mount namespace in which the caller has seen to its mounts itself, or 0."""
        self._twin = twin
        self._but = but
        self._owner = mounts.Fuse(wanted.uid, wanted.gid, wanted.allow_other)

    def attach(self, mount: int) -> None:
        """Raises OSError: EBUSY if somebody serves the volume, ENOENT if it is not published."""
        try:
            copy = targets.private_copy(mount)
        except OSError as error:
            if error.errno != errno.EINVAL:  # it is attached nowhere
                raise
            copy = os.dup(mount)
        try:
            owner = self._twin.put(copy)
        finally:
            os.close(copy)
        if owner != self._owner:
            self._twin.withdraw()
            raise PermissionError(errno.EPERM, "it is not as planned")

    def detach(self, _mount: int) -> None:
        """Raises OSError."""
        self._twin.withdraw()

    def keep(self) -> None:
        self._twin.keep(self._but)


Places = Sequence[Mountpoint | Volume]


class Keeping(NamedTuple):
    """What it takes to keep a mount when the front is gone, and where that is."""

    orphans: socket.socket
    commit_seconds: int
    target: bytes
    mount_namespace: int


def mount(talk: Conversation, caller: Caller, start: plan.StartMount, orphans: socket.socket) -> None:
    """Mount on what the caller has pinned."""
    wanted = _agreed(talk, caller)
    if wanted.sync_init and not _proceeds(talk, caller, wanted):
        return
    made = _create(talk, caller, wanted)
    places = [Mountpoint(caller, talk)]
    _attach(talk, caller, wanted, made, places)
    _settle(talk, caller, wanted, made, places, Keeping(orphans, start.commit_seconds, b"", caller.mount_namespace))


def mount_volume(
    talk: Conversation, caller: Caller, start: plan.StartVolumeMount, orphans: socket.socket, twin: Twin
) -> None:
    """Mount on a volume, and on what the caller has pinned, if anything; only on that, if the volume has it already."""
    wanted = _agreed(talk, caller)
    if start.group != plan.NO_GROUP:
        wanted = wanted._replace(gid=start.group)
    if wanted.sync_init and not _proceeds(talk, caller, wanted):
        return
    places: list[Mountpoint | Volume] = [Mountpoint(caller, talk)] if start.pinned else []
    if start.held:
        with talk.bounded("mount"):
            made = twin.clone()
            caller.check_serves(mounts.look(made).device)
    else:
        made = _create(talk, caller, wanted)
        places.append(Volume(twin, wanted, caller.mount_namespace if start.pinned else 0))
    # What is held was made in the broker's own namespaces, for root.
    _attach(talk, caller, None if start.held else wanted, made, places)
    mount_namespace = caller.mount_namespace if start.pinned else twin.mount_namespace
    keeping = Keeping(orphans, start.commit_seconds, start.target, mount_namespace)
    _settle(talk, caller, wanted, made, places, keeping)


def _agreed(talk: Conversation, caller: Caller) -> plan.MountPlan:
    """Return the front's plan, which rests on facts of this process's own. Raises StepError, HungUp, Dismissed."""
    with talk.bounded("access mountpoint"):
        facts = _mount_facts(talk, caller, caller.pinned) if caller.pinned >= 0 else _facts_of_volume(caller)
    wanted = talk.hear()
    if not rests_on(wanted, facts):
        talk.say(facts)
        wanted = talk.hear()
    if not isinstance(wanted, plan.MountPlan) or not rests_on(wanted, facts) or not invariants.allow_mount(wanted):
        raise StepError(errno.EPERM, "check the plan")
    if caller.pinned >= 0:
        with talk.bounded("mount"):
            if not invariants.KERNEL_FILESYSTEMS.keys().isdisjoint(mounts.hidden_by(caller.pinned)):
                # An engine that starts a program in the container looks for /proc and /dev/pts there.
                raise OSError(errno.EPERM, "it would hide a filesystem of the kernel")
    return wanted


def _proceeds(talk: Conversation, caller: Caller, wanted: plan.MountPlan) -> bool:
    """Give the caller its descriptor before there is a mount; whether that is wanted then."""
    caller.hand_over(wanted)
    talk.say(plan.HandedOver())
    proceed = talk.hear()
    if not isinstance(proceed, plan.Proceed):
        return False
    talk.seconds = proceed.seconds
    with talk.bounded("mount"):
        caller.take()
    return True


def _create(talk: Conversation, caller: Caller, wanted: plan.MountPlan) -> int:
    """Return the mount of a new filesystem, attached nowhere. Raises StepError."""
    with talk.bounded("mount"):
        rescue = caller.rescue(talk) if wanted.sync_init else None
        return filesystem.create(wanted, caller.device, caller.pids, rescue)


def _attach(talk: Conversation, caller: Caller, wanted: plan.MountPlan | None, made: int, places: Places) -> None:
    """Attach the mount everywhere, or nowhere; nowhere, too, if it is not what was `wanted`. Raises StepError."""
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
    """Take the mount away again, from where it was put last first. Raises StepError."""
    for place in reversed(places):
        with talk.bounded("roll back"):
            place.detach(made)


def _settle(
    talk: Conversation, caller: Caller, wanted: plan.MountPlan, made: int, places: Places, keeping: Keeping
) -> None:
    """Give the caller its descriptor, if it hasn't got it, and keep the mount, or undo it."""
    looked = mounts.look(made)
    mounted = plan.Mounted(looked.device, keeping.mount_namespace, caller.pids.visible, looked.lasting_id)
    try:
        if not wanted.sync_init:
            caller.hand_over(wanted)
        os.close(caller.device)  # at once: whoever keeps a copy keeps a dead daemon's mount from failing
        with suppress(HungUp):  # the front has died; that is seen below
            talk.say(mounted)
        if not _is_wanted(talk, caller, wanted, mounted, keeping):
            raise HungUp
    except HungUp:
        _detach(talk, made, places)
        with talk.bounded("roll back"):
            os.close(made)
            caller.let_go()
        talk.say(plan.RolledBack())
        return
    for place in places:
        place.keep()
    with talk.bounded("let go"):
        os.close(made)
        caller.let_go()
        caller.take()
    talk.say(plan.Kept())


def _is_wanted(
    talk: Conversation,
    caller: Caller,
    wanted: plan.MountPlan,
    mounted: plan.Mounted,
    keeping: Keeping,
) -> bool:
    """Whether the mount is to stay: that is for the front to say, and for the caller if there is none any more."""
    try:
        return isinstance(talk.hear(), plan.Keep)
    except HungUp:
        if wanted.sync_init:
            caller.tell(wanted.request)
        if not caller.commits(keeping.commit_seconds):
            return False
    orphan = plan.Orphaned(
        device=mounted.device,
        mount_namespace=mounted.mount_namespace,
        uid=caller.uid,
        pid=caller.pid,
        request=wanted.request,
        source=wanted.source,
        subtype=wanted.subtype,
        target=keeping.target,
        mount_id=mounted.mount_id,
    )
    with suppress(OSError):  # the broker is gone, altogether
        keeping.orphans.send(plan.dump(orphan), NOW)
    return True


def _is_as_planned(mount: int, wanted: plan.MountPlan) -> bool:
    """Whether the filesystem is the caller's, and others may enter it only if they should.

    In its container somebody may have got hold of who created it, and of what it was created from.
    """
    fuse = mounts.fuse_if_any(mounts.look(mount).mount_id)
    return fuse == mounts.Fuse(wanted.uid, wanted.gid, wanted.allow_other)


def rests_on(wanted: Record, facts: plan.MountFacts) -> bool:
    """Whether the plan was decided on these facts."""
    return isinstance(wanted, plan.MountPlan) and all(
        getattr(wanted, name) == value for name, value in facts._asdict().items() if name != "mount_namespace"
    )


def _mount_facts(talk: Conversation, caller: Caller, mountpoint: int) -> plan.MountFacts:
    looked = mounts.look(mountpoint)
    try:
        fuse = mounts.fuse_of(looked.mount_id)
    except LookupError:
        raise StepError(errno.EINVAL, "mount") from None
    if fuse and fuse.uid != caller.uid and not fuse.allow_other:
        # FUSE would refuse it to the caller, but not to this process, whose real uid is its own.
        raise OSError(errno.EACCES, "another user's FUSE filesystem")
    caller.announce(talk, looked.device)
    status = os.fstat(mountpoint)
    return plan.MountFacts(
        uid=caller.uid,
        gid=caller.gid,
        root_mode=stat.S_IFMT(status.st_mode),
        foreign_sticky=bool(status.st_mode & stat.S_ISVTX) and not _owns(caller, status.st_uid),
        filesystem=syscalls.fstatfs_type(mountpoint),
        search_errno=_access(mountpoint, os.X_OK) if stat.S_ISDIR(status.st_mode) else 0,
        access_errno=_access(mountpoint, os.W_OK),
        mount_namespace=caller.mount_namespace,
    )


def _facts_of_volume(caller: Caller) -> plan.MountFacts:
    """Return the facts of a volume's target, which is nobody's but the broker's: a directory, on a tmpfs."""
    return plan.MountFacts(
        uid=caller.uid,
        gid=caller.gid,
        root_mode=stat.S_IFDIR,
        foreign_sticky=False,
        filesystem=TMPFS_MAGIC,
        search_errno=0,
        access_errno=0,
        mount_namespace=caller.mount_namespace,
    )


def _access(mountpoint: int, mode: int) -> int:
    """Return 0 if the caller may do that there, else the errno that says why not."""
    try:
        syscalls.faccessat2(mountpoint, b"", mode, syscalls.AT_EMPTY_PATH | syscalls.AT_EACCESS)
        return 0
    except OSError as error:
        return error.errno or errno.EIO


def _owns(caller: Caller, owner: int) -> bool:
    """Whether `owner` is the caller. In a user namespace, everybody who is not mapped looks like the overflow uid."""
    return owner == caller.uid and not (caller.in_user_namespace and owner == OVERFLOW_UID)
