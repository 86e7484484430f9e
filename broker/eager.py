"""The filesystem of a volume before anybody serves it: who looks into the volume waits for its program.

It is made in the broker's own namespaces, for root. The front keeps its descriptor, and lends it to a caller
(`mounting.mount_volume`).

For the mounter's children that stay in the broker's own namespaces.
"""

import errno
import os

from broker import consumers, filesystem, invariants, mounts, plan
from broker.conversation import Conversation, HungUp, StepError
from broker.descriptors import Descriptors
from broker.namespaces import PidNamespace
from broker.targets import Target


def mount(opened: Descriptors, talk: Conversation, start: plan.StartEager) -> None:
    """Mount a new filesystem at the target, and give the front its descriptor; undo that unless it is to stay."""
    if not invariants.allow_target(start.target):
        raise StepError(errno.EPERM, "check the volume")
    os.fchdir(opened.proc)
    wanted = talk.hear()
    if not isinstance(wanted, plan.MountPlan) or not invariants.allow_eager_mount(wanted):
        raise StepError(errno.EPERM, "check the plan")
    if start.group != plan.NO_GROUP:
        wanted = wanted._replace(gid=start.group)
    with talk.bounded("mount"):
        device = os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices)
        made = filesystem.create(wanted, device, PidNamespace(visible=True, here=True), None)
    with talk.bounded("mount on the volume"), Target(opened, start.target) as target:
        replaced = target.put(made, talk.seconds)
    mounted = plan.Mounted(mounts.look(made).device, os.stat("self/ns/mnt").st_ino, pids_visible=True)
    try:
        talk.say(mounted, device)
        os.close(device)
        if not isinstance(talk.hear(), plan.Keep):
            raise HungUp
    except HungUp:
        with talk.bounded("roll back"), Target(opened, start.target) as target:
            target.withdraw(made, replaced, talk.seconds)
        talk.say(plan.RolledBack())
        return
    talk.say(plan.Kept())
    if replaced is not None:
        consumers.restore(opened, start.target, mounts.look(replaced).device, made, 0, talk.seconds, served=False)
