"""Unmount for a caller, in a child of the mounter that has joined the caller's namespaces."""

import errno
import os

from fusermount3_broker.messages import mounter
from fusermount3_broker.mounter import invariants, mount_tree
from fusermount3_broker.mounter.caller_namespaces import Caller
from fusermount3_broker.mounter.front_connection import Conversation, HungUp, StepError

#: A plain unmount comes here if no children can serve plain calls any more.
Start = mounter.StartUnmount | mounter.StartPlainUnmount


def unmount(talk: Conversation, caller: Caller, start: Start) -> None:
    directory = caller.pinned
    if not invariants.is_name(start.name):
        raise StepError(errno.EINVAL, "access mountpoint")
    with talk.bounded("access mountpoint"):
        facts, looked = _unmount_facts(talk, caller, directory, start)
    talk.say(facts)
    wanted = talk.hear()
    if not isinstance(wanted, mounter.UnmountPlan):
        return
    if not invariants.allow_unmount(caller.uid, _owner_of(looked)):
        raise StepError(errno.EPERM, "check the plan")
    with talk.bounded("unmount"):
        mount_tree.unmount(directory, start.name, looked, wanted.lazy, caller.locks, talk.seconds)
        caller.let_go()
    try:
        talk.say(mounter.Unmounted())
        talk.hear()
    except HungUp:  # the front has died without answering the caller
        caller.tell(wanted.request_id)


def _owner_of(looked: mount_tree.Looked) -> int | None:
    """Return the uid that owns the FUSE filesystem of a mount; None if it is not FUSE, or is gone."""
    fuse = mount_tree.fuse_if_any(looked.mount_id)
    return fuse.uid if fuse else None


def _unmount_facts(
    talk: Conversation, caller: Caller, directory: int, start: Start
) -> tuple[mounter.UnmountFacts, mount_tree.Looked]:
    """Return the facts about the entry, and the topmost mount on it."""
    facts = mounter.UnmountFacts(
        uid=caller.uid,
        mount_namespace=caller.mount_namespace,
        access_errno=0,
        mounted=False,
        device=0,
        dead=False,
        may_mount=caller.may_mount,
    )
    below = mount_tree.look(directory)
    caller.announce(talk, below.device)
    try:
        looked = mount_tree.look_up(directory, start.name)
    except OSError as error:
        return facts._replace(access_errno=error.errno or errno.EIO), mount_tree.Looked(0, 0)
    if looked.mount_id == below.mount_id:
        return facts, looked
    only_dead = isinstance(start, mounter.StartUnmount) and start.only_dead
    if only_dead:
        caller.announce(talk, looked.device)
    dead = only_dead and _is_dead(caller, directory, start.name, looked)
    return facts._replace(mounted=True, device=looked.device, dead=dead), looked


def _is_dead(caller: Caller, directory: int, name: bytes, looked: mount_tree.Looked) -> bool:
    """Return whether a dead FUSE filesystem of the caller is mounted on the entry."""
    fuse = mount_tree.fuse_if_any(looked.mount_id)
    if fuse is None or fuse.uid != caller.uid:
        return False
    entry = os.open(name, mount_tree.LOOK, dir_fd=directory)
    try:
        return mount_tree.is_dead(entry, fuse)
    finally:
        os.close(entry)
