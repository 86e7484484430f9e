"""Create the superblock of a FUSE filesystem where a container may see the process that does: superblock_creator.c."""

from collections.abc import Collection

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import child_processes
from fusermount3_broker.mounter.child_processes import Rescue
from fusermount3_broker.mounter.programs import SUPERBLOCK_CREATOR, Programs


def create(
    programs: Programs,
    context: int,
    device: int,
    pid_namespace: int | None,
    commands: Collection[int],
    rescue: Rescue | None,
) -> None:
    """Create the superblock of a configured `context` that uses `device`, in the pid namespace if one is given.

    `commands` are those of fsconfig(2); each one is only tried if the kernel lacks the one before. Expects the
    mounter's /proc as the working directory. `rescue` is as in `child_processes.in_child`. Raises OSError.
    """
    pids = -1 if pid_namespace is None else pid_namespace
    descriptors = programs.directory, pids, device, context
    arguments = [SUPERBLOCK_CREATOR.encode(), *(b"%d" % each for each in (*descriptors, *commands))]
    keep = [each for each in descriptors if each >= 0]
    with child_processes.waiting_for_grandchildren():
        child = child_processes.execute(programs.superblock_creator, arguments, keep, syscalls.CAP_SYS_ADMIN)
        child_processes.wait(child, rescue)
