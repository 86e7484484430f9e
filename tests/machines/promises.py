"""The promises that may depend on the kernel, and the tests that show each; arguments of pytest.

Emulation is slow: each promise has the tests that need the kernel, not all that exist.
"""

from __future__ import annotations

PROMISES: dict[str, tuple[str, ...]] = {
    "what the kernel lacks is said": ("tests/e2e/test_kernel.py",),
    "the package is installed, the service serves": ("tests/machines/installed.py",),
    "Docker and rootless Podman": ("tests/machines/engines.py",),
    "mount, use and unmount, as user and root": (
        "tests/e2e/test_containers.py::test_a_program_mounts_serves_and_unmounts_as",
        "tests/e2e/test_isolation.py::test_two_containers_mount_at_the_same_path_and_each_sees_its_own",
        "tests/e2e/test_isolation.py::test_a_mount_ends_with_its_container",
    ),
    "auto_unmount": ("tests/e2e/test_auto_unmount.py",),
    "pids of the container": (
        "tests/e2e/test_isolation.py::test_who_may_trace_processes_sees_no_pids_and_the_log_says_why",
    ),
    "the caller is who it is": (
        "tests/e2e/test_bad_input.py::test_a_request_is_not_carried_out_for_a_process_that_has_ended",
        "tests/e2e/test_killed_caller.py",
    ),
    "a filesystem is always new": ("tests/e2e/test_sync_init.py",),
    "mounts stay when a process is killed": ("tests/e2e/test_killed_front.py", "tests/e2e/test_restart.py"),
    "dead mounts are removed": ("tests/e2e/test_dead_mounts.py",),
    "hung filesystems hold up nobody else": ("tests/e2e/test_hung.py",),
    "nosuid and nodev are locked": ("tests/e2e/test_locked_flags.py",),
    "the front is confined": ("tests/e2e/test_sandbox.py",),
    "no filesystem of the kernel is hidden": (
        "tests/e2e/test_owned_front.py::test_nothing_is_mounted_on_what_hides_a_filesystem_of_the_kernel",
    ),
    "volumes": ("tests/e2e/test_volume_mounts.py",),
}
