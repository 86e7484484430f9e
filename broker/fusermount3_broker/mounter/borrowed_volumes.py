"""A volume that has the filesystem of another pod's volume: a copy of the mount at the other's target.

All copies are mounts of one filesystem, and one FUSE program serves them all. Each has attributes of its own.

For the mounter's children that are in the broker's own mount namespace.
"""

import errno

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.mounter import (
    fuse_connections,
    locked_flags,
    mount_tree,
    volume_consumers,
    volume_targets,
)
from fusermount3_broker.mounter.front_connection import Conversation, HungUp
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_broker.mounter.volume_targets import Attached, Target


def borrow(opened: Descriptors, talk: Conversation, start: mounter.StartBorrow) -> None:
    """Attach a copy of the source's mount at the target, and in the containers of its pod that had a former one."""
    volume_targets.begin(opened, start.source, start.target)
    with talk.bounded("open the filesystem of the mount pod"), Target(opened, start.source) as source:
        source.check_shared()
        copy = source.clone(talk.seconds, start.device)
        if not fuse_connections.is_connection(opened.fusectl, start.device, start.connection):
            raise FileNotFoundError(errno.ENOENT, "another filesystem has that number")
        locked_flags.check_locked(copy)
        attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
        if start.read_only:
            attributes |= syscalls.MOUNT_ATTR_RDONLY
        syscalls.mount_setattr(copy, b"", syscalls.AT_EMPTY_PATH, attributes)
    if talk.is_over(0):
        raise HungUp  # the next front may have published or removed the volume since
    with talk.bounded("make the target"), Target(opened, start.target) as target, target.alone(talk.seconds):
        target.make()
    with talk.bounded("mount on the volume"), Target(opened, start.target) as target:
        device, attached = _attach(target, copy, start.device, talk.seconds)
    talk.say(mounter.Borrowed(device, attached is not None))
    if device == start.device:
        former = volume_consumers.Former.of(opened, attached or Attached(), start.former)
        volume_consumers.restore(opened, start.target, former, copy, talk.seconds, served=True)


def _attach(target: Target, copy: int, device: int, seconds: int) -> tuple[int, Attached | None]:
    """Attach the copy, which is of that device, unless a FUSE program serves what is at the target.

    Return the device that is at the target then, and where the copy was attached, if it was. Raises OSError.
    """
    try:
        return device, target.attach(copy, seconds)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    with target.topmost() as top:
        return mount_tree.look(top).device, None
