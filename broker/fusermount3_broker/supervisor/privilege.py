"""The capabilities that the broker can't do without, and what to tell who starts it without them."""

import os
from pathlib import Path

from fusermount3_broker.kernel import syscalls

#: Of the mounter; docs/security.md explains what for. CAP_MKNOD is not among them: there is another way without it.
OF_THE_MOUNTER = {
    "DAC_READ_SEARCH": syscalls.CAP_DAC_READ_SEARCH,
    "SETGID": syscalls.CAP_SETGID,
    "SETUID": syscalls.CAP_SETUID,
    "SYS_CHROOT": syscalls.CAP_SYS_CHROOT,
    "SYS_PTRACE": syscalls.CAP_SYS_PTRACE,
    "SYS_ADMIN": syscalls.CAP_SYS_ADMIN,
}
#: Of the supervisor, if the front gets an account of its own: to give it its directory, and to end it.
_FOR_ANOTHER_ACCOUNT = {"CHOWN": syscalls.CAP_CHOWN, "KILL": syscalls.CAP_KILL}
#: What the broker's container is started with (docs/containers.md).
_OPTIONS = (
    "--pid=host --device=/dev/fuse --cap-add=SYS_ADMIN --cap-add=SYS_CHROOT --cap-add=SYS_PTRACE --cap-add=MKNOD"
    " --cap-add=SETUID --cap-add=SETGID --cap-add=DAC_READ_SEARCH --cap-add=CHOWN --cap-add=KILL --cap-add=SETPCAP"
    " --security-opt=seccomp=unconfined --security-opt=apparmor=unconfined --security-opt=label=disable"
    " -v /run/fusermount3-proxy:/run/fusermount3-proxy -v /var/lib/fusermount3-broker:/var/lib/fusermount3-broker"
)
#: uid_map of the first user namespace: all uids, as they are (user_namespaces(7)).
_ALL_UIDS = ["0", "0", "4294967295"]


def problem(*, front_has_account: bool) -> str:
    """Return what this process lacks to become the broker, and what to type instead; empty if it lacks nothing.

    `front_has_account`: the front will run as another user than this process.
    """
    needed = OF_THE_MOUNTER | (_FOR_ANOTHER_ACCOUNT if front_has_account else {})
    lacking = _lacking(needed)
    is_user, is_nested = os.geteuid() != 0, not _in_first_user_namespace()
    if not lacking and not is_nested:
        return ""
    if is_user and (is_nested or len(lacking) == len(needed)):
        return "only root can run the broker: type sudo before the command, or start the systemd service"
    if is_nested:
        return (
            "root of a user namespace, such as a rootless container's, can't run the broker: "
            "start it, or its container, as root of the host, with sudo"
        )
    names = [f"CAP_{each}" for each in lacking]
    if not is_user and "SYS_ADMIN" in lacking:  # a container without the options
        return f"the broker lacks {', '.join(names)}; a container of the broker is started with {_OPTIONS}"
    options = " ".join(f"--cap-add={each}" for each in lacking)
    return (
        f"the broker lacks {', '.join(names)}; a service of systemd needs {' '.join(names)} in CapabilityBoundingSet="
        f" and, with User=, in AmbientCapabilities=; a container, {options}"
    )


def _lacking(needed: dict[str, int]) -> list[str]:
    permitted = syscalls.capget()
    return [name for name, number in needed.items() if not permitted >> number & 1]


def _in_first_user_namespace() -> bool:
    try:
        return Path("/proc/self/uid_map").read_text().split() == _ALL_UIDS
    except OSError:  # a kernel without user namespaces
        return True
