"""Unmounting for a caller: what a child of the mounter does once it has joined the caller's namespaces."""

import errno
import os

from broker import invariants, mounts, plan
from broker.caller import Caller
from broker.conversation import Conversation, HungUp, StepError


def unmount(talk: Conversation, caller: Caller, start: plan.StartUnmount) -> None:
    directory = caller.pinned
    if not invariants.is_name(start.name):
        raise StepError(errno.EINVAL, "access mountpoint")
    with talk.bounded("access mountpoint"):
        facts, looked = _unmount_facts(talk, caller, directory, start)
    talk.say(facts)
    wanted = talk.hear()
    if not isinstance(wanted, plan.UnmountPlan):
        return
    if not invariants.allow_unmount(caller.uid, _owner_of(looked)):
        raise StepError(errno.EPERM, "check the plan")
    with talk.bounded("unmount"):
        mounts.unmount(directory, start.name, looked, wanted.lazy, caller.locks, talk.seconds)
        caller.let_go()
    try:
        talk.say(plan.Unmounted())
        talk.hear()
    except HungUp:  # and nobody has told the caller
        caller.tell(wanted.request)


def _owner_of(looked: mounts.Looked) -> int | None:
    """Return whose FUSE filesystem was looked at; None if it is none, or is gone."""
    fuse = mounts.fuse_if_any(looked.mount_id)
    return fuse.uid if fuse else None


def _unmount_facts(
    talk: Conversation, caller: Caller, directory: int, start: plan.StartUnmount
) -> tuple[plan.UnmountFacts, mounts.Looked]:
    """Return what is on the entry, and the result of looking at it."""
    facts = plan.UnmountFacts(
        uid=caller.uid,
        mount_namespace=caller.mount_namespace,
        access_errno=0,
        mounted=False,
        device=0,
        dead=False,
        may_mount=caller.may_mount,
    )
    below = mounts.look(directory)
    caller.announce(talk, below.device)
    try:
        looked = mounts.look_up(directory, start.name)
    except OSError as error:
        return facts._replace(access_errno=error.errno or errno.EIO), mounts.Looked(0, 0)
    if looked.mount_id == below.mount_id:
        return facts, looked
    if start.only_dead:
        caller.announce(talk, looked.device)
    dead = start.only_dead and _is_dead(caller, directory, start.name, looked)
    return facts._replace(mounted=True, device=looked.device, dead=dead), looked


def _is_dead(caller: Caller, directory: int, name: bytes, looked: mounts.Looked) -> bool:
    """Whether a FUSE filesystem of the caller's is on the entry that nobody serves."""
    fuse = mounts.fuse_if_any(looked.mount_id)
    if fuse is None or fuse.uid != caller.uid:
        return False
    entry = os.open(name, mounts.LOOK, dir_fd=directory)
    try:
        return mounts.is_dead(entry, fuse)
    finally:
        os.close(entry)
