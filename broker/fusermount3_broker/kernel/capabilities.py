"""Drop capabilities for good (capabilities(7))."""

from contextlib import suppress

from fusermount3_broker.kernel import syscalls


def keep(*wanted: int) -> None:
    """Drop all capabilities but those of `wanted` that this process has. Raises OSError."""
    permitted = syscalls.capget()
    drop_bounding(*wanted)
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.capset(*(each for each in wanted if permitted >> each & 1))


def drop_bounding(*but: int) -> None:
    """Prevent programs executed from now on from gaining capabilities `but` these. Without CAP_SETPCAP, do nothing.

    Raises OSError.
    """
    capability = 0
    while (present := _in_bounding(capability)) is not None:
        if present and capability not in but:
            with suppress(PermissionError):
                syscalls.prctl(syscalls.PR_CAPBSET_DROP, capability)
        capability += 1


def _in_bounding(capability: int) -> bool | None:
    """Return whether the bounding set has that capability; None if the kernel doesn't know it."""
    try:
        return bool(syscalls.prctl(syscalls.PR_CAPBSET_READ, capability))
    except OSError:
        return None
