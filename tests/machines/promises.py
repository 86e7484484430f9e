"""The machines, the promises that may depend on the kernel, and the tests that show each; arguments of pytest.

Emulation is slow: each promise has the tests that need the kernel, not all that exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.lab.machine import COMPILER, PODMAN, SELINUX, Machine

if TYPE_CHECKING:
    from collections.abc import Iterable

_ENGINES = (*PODMAN, "uidmap", "slirp4netns", "docker.io", "iptables", "dbus-user-session")
_PROGRAMS = ("sshfs", "bindfs", "openssh-server")

MACHINES = {
    machine.name: machine
    for machine in (
        Machine("bookworm", "bookworm", (*_ENGINES, *_PROGRAMS)),
        # since Debian 13, docker.io is without its client
        Machine("trixie", "trixie", (*_ENGINES, "docker-cli", *_PROGRAMS)),
        Machine("sid", "sid", (*_ENGINES, "docker-cli", *_PROGRAMS)),
        Machine("bullseye", "bookworm", kernel="bullseye"),
        Machine("selinux", "trixie", (*PODMAN, *SELINUX)),
        Machine("arm64", "bookworm", (*PODMAN, *COMPILER), architecture="arm64"),
    )
}

TOO_OLD = "the service says that the kernel is too old, and does not start"
LACKING = "what the kernel lacks is said"
INSTALLED = "the package is installed, the service serves"
LABELS = "SELinux enforces its policy on containers"
PIDS = "pids of the container"
NEW = "a filesystem is always new"
CONFINED = "the front is confined"

PROMISES: dict[str, tuple[str, ...]] = {
    TOO_OLD: ("tests/machines/too_old.py",),
    LACKING: ("tests/e2e/test_kernel.py",),
    INSTALLED: ("tests/machines/installed.py",),
    LABELS: ("tests/machines/labels.py",),
    "Docker and rootless Podman": ("tests/machines/engines.py",),
    "mount, use and unmount, as user and root": (
        "tests/e2e/test_containers.py::test_a_program_mounts_serves_and_unmounts_as",
        "tests/e2e/test_isolation.py::test_two_containers_mount_at_the_same_path_and_each_sees_its_own",
        "tests/e2e/test_isolation.py::test_a_mount_ends_with_its_container",
    ),
    "a mount without the interpreter is as any other": (
        "tests/e2e/test_plain_mounts.py::test_both_mount_on_a_file",
        "tests/e2e/test_plain_mounts.py::test_where_not_any_user_may_mount_python_decides",
        "tests/e2e/test_plain_mounts.py::test_a_front_that_hangs_up_leaves_nothing",
    ),
    "auto_unmount": (
        "tests/e2e/test_auto_unmount.py::test_what_a_killed_program_leaves_is_unmounted_although_nobody_else_may_enter_it",
        "tests/e2e/test_auto_unmount.py::test_a_mount_that_somebody_still_holds_is_left_until_it_is_dead",
        "tests/e2e/test_auto_unmount.py::test_what_was_mounted_there_since_is_not_the_watchers",
    ),
    PIDS: ("tests/e2e/test_isolation.py::test_who_may_trace_processes_sees_no_pids_and_the_log_says_why",),
    "the caller is who it is": (
        "tests/e2e/test_bad_input.py::test_a_request_is_not_carried_out_for_a_process_that_has_ended",
        "tests/e2e/test_killed_caller.py::test_at_each_step_of_a_mount",
        "tests/e2e/test_killed_caller.py::test_forged_credentials_change_nothing",
        "tests/e2e/test_owned_front.py::test_the_namespaces_are_those_of_who_connected_whatever_pidfd_comes_with_it",
    ),
    NEW: (
        "tests/e2e/test_sync_init.py",
        "tests/e2e/test_attacks.py::test_a_descriptor_that_was_made_another_of_a_live_connection_is_no_new_filesystem",
    ),
    "mounts stay when a process is killed": ("tests/e2e/test_killed_front.py", "tests/e2e/test_restart.py"),
    "dead mounts are removed": (
        "tests/e2e/test_dead_mounts.py::test_what_a_program_leaves_is_gone_soon",
        "tests/e2e/test_dead_mounts.py::test_a_program_that_hangs_is_left_alone_and_not_asked",
        "tests/e2e/test_dead_mounts.py::test_a_mount_that_died_while_the_broker_was_down_is_gone_soon_after_it_is_up",
        "tests/e2e/test_dead_mounts.py::test_a_descriptor_on_its_way_between_processes_is_not_death",
    ),
    "hung filesystems hold up nobody else": (
        "tests/e2e/test_hung.py::test_whoever_has_mounted_it_can_be_ended",
        "tests/e2e/test_hung.py::test_others_are_served_while_some_hang",
        "tests/e2e/test_hung.py::test_an_unmount_that_blocks_in_the_kernel_has_the_connection_aborted_soon",
    ),
    "nosuid and nodev are locked": ("tests/e2e/test_locked_flags.py",),
    CONFINED: (
        "tests/e2e/test_sandbox.py::test_the_front_cannot",
        "tests/e2e/test_sandbox.py::test_the_front_can_do_its_work",
        "tests/e2e/test_sandbox.py::test_the_front_of_a_broker_that_runs_has_entered_its_sandbox",
        "tests/e2e/test_sandbox.py::test_the_mounter_has_its_capabilities_and_no_others",
    ),
    "no filesystem of the kernel is hidden": (
        "tests/e2e/test_owned_front.py::test_nothing_is_mounted_on_what_hides_a_filesystem_of_the_kernel",
    ),
    "volumes": tuple(
        f"tests/e2e/test_volume_mounts.py::test_{name}"
        for name in (
            "a_program_is_seen_at_its_own_mountpoint_and_at_the_volume",
            "in_a_user_namespace_a_program_serves_the_volume_and_is_asked_for_its_size",
            "what_is_not_kept_is_taken_away_everywhere",
            "a_volume_that_is_served_has_no_other_program",
            "who_reads_all_the_time_sees_one_program_after_the_other_and_no_placeholder",
            "a_program_that_dies_while_it_is_asked_whether_it_is_alive_is_dead",
            "what_replaces_a_dead_mount_and_is_not_kept_leaves_it_as_it_was",
            "a_volume_whose_program_hangs_is_said_to_hang_in_time",
            "a_volume_whose_program_hangs_is_unpublished_in_time",
            "whatever_is_left_of_a_volume_is_taken_away_and_once_more_is_no_mistake",
            "who_looks_into_an_eager_volume_waits_for_its_program",
            "containers_that_have_the_dead_filesystem_get_the_new_one_but_only_those_of_the_pod",
        )
    ),
    "containers start on a volume whose program is gone": ("tests/e2e/test_tombstones.py",),
}

#: What some machines show; the others show all that no machine has for itself.
_SHOWN = {
    "bullseye": (TOO_OLD,),
    "selinux": (LABELS,),
    "arm64": (LACKING, INSTALLED, PIDS, NEW, CONFINED),
}
#: What is left of that in CI, which has minutes for each machine.
_SMOKE = (TOO_OLD, LACKING, INSTALLED, LABELS)


def shown(machine: Machine) -> list[str]:
    """Return the promises that a machine shows."""
    return list(_SHOWN.get(machine.name, [promise for promise in PROMISES if promise not in (TOO_OLD, LABELS)]))


def selection(machine: Machine, *, smoke: bool) -> list[str]:
    """Return the arguments of pytest for a machine."""
    return selectors_of(promise for promise in shown(machine) if not smoke or promise in _SMOKE)


def selectors_of(promises: Iterable[str]) -> list[str]:
    """Return the arguments of pytest for these promises."""
    return [selector for promise in promises for selector in PROMISES[promise]]
