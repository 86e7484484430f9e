"""A volume's filesystem before a FUSE program serves it: processes that look into the volume wait for the program.

The mounter creates it in the broker's own namespaces, for root. The front keeps its /dev/fuse descriptor and lends it
to a caller (`mounting.mount_volume`).

For the mounter's children that stay in the broker's own namespaces.
"""

import errno
import os

from fusermount3_broker.messages import mounter
from fusermount3_broker.mounter import filesystem, invariants, locked_flags, volume_consumers
from fusermount3_broker.mounter.front_connection import Conversation, HungUp, StepError
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_broker.mounter.mounting import agree_to_attach
from fusermount3_broker.mounter.namespaces import PidNamespace
from fusermount3_broker.mounter.volume_targets import Target


def mount(opened: Descriptors, talk: Conversation, start: mounter.StartEager) -> None:
    """Mount a new filesystem at the target once the front has recorded it, and send the front its descriptor.

    Unmount it again unless the front says `Keep`.
    """
    if not invariants.allow_target(start.target):
        raise StepError(errno.EPERM, "check the volume")
    opened.cell.check()
    os.fchdir(opened.proc)
    wanted = talk.hear()
    if not isinstance(wanted, mounter.MountPlan) or not invariants.allow_eager_mount(wanted):
        raise StepError(errno.EPERM, "check the plan")
    if start.group != mounter.NO_GROUP:
        wanted = wanted._replace(gid=start.group)
    with talk.bounded("mount"):
        device = os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices)
        made = filesystem.create(wanted, device, PidNamespace(mounter.PIDS_SEEN), opened.programs, None)
    with talk.bounded(locked_flags.STEP):
        made = opened.cell.lock(made, directory=True)
        opened.cell.close()
        filesystem.restrict(made, wanted)
    agree_to_attach(talk, made, os.stat("self/ns/mnt").st_ino, pids=mounter.PIDS_SEEN)
    with talk.bounded("mount on the volume"), Target(opened, start.target) as target:
        attached = target.attach(made, talk.seconds)
    try:
        talk.say(mounter.Mounted(), device)
        os.close(device)
        if not isinstance(talk.hear(), mounter.Keep):
            raise HungUp
    except HungUp:
        with talk.bounded("roll back"), Target(opened, start.target) as target:
            target.withdraw(made, attached.replaced, talk.seconds)
        talk.say(mounter.RolledBack())
        return
    former = volume_consumers.Former.of(opened, attached, start.former)
    if not former.connections:
        os.close(made)  # before the answer: an open descriptor would keep others from unmounting it
    talk.say(mounter.Kept())
    if former.connections:
        volume_consumers.restore(opened, start.target, former, made, talk.seconds, served=False)
