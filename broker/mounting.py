"""Mounting for a caller: what a child of the mounter does once it has joined the caller's namespaces.

It tells the front what it found, does what the front decided, if that rests on what it found, and gives the caller its
descriptor. The mount is undone unless somebody says `Keep`: the front, or the caller itself if there is none any more.
"""

import errno
import os
import socket
import stat
from contextlib import suppress

from broker import filesystem, invariants, mounts, plan, syscalls
from broker.caller import NOW, Caller
from broker.conversation import Conversation, HungUp, StepError
from broker.plan import Record

#: As whom a user namespace shows those who have no uid in it (/proc/sys/kernel/overflowuid).
OVERFLOW_UID = 65534


def mount(talk: Conversation, caller: Caller, commit_seconds: int, orphans: socket.socket) -> None:
    mountpoint = caller.pinned
    with talk.bounded("access mountpoint"):
        facts = _mount_facts(talk, caller, mountpoint)
    wanted = talk.hear()
    if not rests_on(wanted, facts):
        talk.say(facts)
        wanted = talk.hear()
    if not isinstance(wanted, plan.MountPlan) or not rests_on(wanted, facts) or not invariants.allow_mount(wanted):
        raise StepError(errno.EPERM, "check the plan")
    with talk.bounded("mount"):
        if not invariants.KERNEL_FILESYSTEMS.keys().isdisjoint(mounts.hidden_by(mountpoint)):
            # An engine that starts a program in the container looks for /proc and /dev/pts there.
            raise OSError(errno.EPERM, "it would hide a filesystem of the kernel")
    if wanted.sync_init:
        caller.hand_over(wanted)
        talk.say(plan.HandedOver())
        proceed = talk.hear()
        if not isinstance(proceed, plan.Proceed):
            return
        talk.seconds = proceed.seconds
        with talk.bounded("mount"):
            caller.take()
    with talk.bounded("mount"):
        rescue = caller.rescue(talk) if wanted.sync_init else None
        mount = filesystem.create(wanted, caller.device, caller.pids, rescue)
        looked = mounts.look(mount)
    try:
        mounts.attach(mount, mountpoint, caller.locks, talk.seconds)
    except OSError as error:
        raise StepError(error.errno or errno.EIO, "mount") from None
    if caller.pids.descriptor is not None and not _is_as_planned(mount, wanted):
        with talk.bounded("roll back"):
            mounts.detach(mount, mountpoint, caller.locks, talk.seconds)
        raise StepError(errno.EPERM, "check the plan")
    mounted = plan.Mounted(looked.device, caller.mount_namespace, caller.pids.visible, looked.lasting_id)
    try:
        if not wanted.sync_init:
            caller.hand_over(wanted)
        os.close(caller.device)  # at once: whoever keeps a copy keeps a dead daemon's mount from failing
        with suppress(HungUp):  # the front has died; that is seen below
            talk.say(mounted)
        if not _is_wanted(talk, caller, wanted, mounted, commit_seconds, orphans):
            raise HungUp
        with talk.bounded("let go"):
            os.close(mount)
            caller.let_go()
            caller.take()
        talk.say(plan.Kept())
    except HungUp:
        with talk.bounded("roll back"):
            mounts.detach(mount, mountpoint, caller.locks, talk.seconds)
            os.close(mount)
            caller.let_go()
        talk.say(plan.RolledBack())


def _is_wanted(
    talk: Conversation,
    caller: Caller,
    wanted: plan.MountPlan,
    mounted: plan.Mounted,
    commit_seconds: int,
    orphans: socket.socket,
) -> bool:
    """Whether the mount is to stay: that is for the front to say, and for the caller if there is none any more."""
    try:
        return isinstance(talk.hear(), plan.Keep)
    except HungUp:
        if wanted.sync_init:
            caller.tell(wanted.request)
        if not caller.commits(commit_seconds):
            return False
    orphan = plan.Orphaned(
        device=mounted.device,
        mount_namespace=mounted.mount_namespace,
        uid=caller.uid,
        pid=caller.pid,
        request=wanted.request,
        source=wanted.source,
        subtype=wanted.subtype,
        target=b"",
        mount_id=mounted.mount_id,
    )
    with suppress(OSError):  # the broker is gone, altogether
        orphans.send(plan.dump(orphan), NOW)
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
