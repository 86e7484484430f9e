"""Giving up capabilities, for good (capabilities(7))."""

from contextlib import suppress

from broker import syscalls


def keep(*wanted: int) -> None:
    """Give up all capabilities but those `wanted`, as far as they are there. Raises OSError."""
    permitted = syscalls.capget()
    drop_bounding(*wanted)
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.capset(*(each for each in wanted if permitted >> each & 1))


def drop_bounding(*but: int) -> None:
    """Have no program that is executed from now on get capabilities `but` these. Without CAP_SETPCAP, nothing is done.

    Raises OSError.
    """
    capability = 0
    while (present := _in_bounding(capability)) is not None:
        if present and capability not in but:
            with suppress(PermissionError):
                syscalls.prctl(syscalls.PR_CAPBSET_DROP, capability)
        capability += 1


def _in_bounding(capability: int) -> bool | None:
    """Whether the bounding set has that capability; None if there is no such."""
    try:
        return bool(syscalls.prctl(syscalls.PR_CAPBSET_READ, capability))
    except OSError:
        return None
