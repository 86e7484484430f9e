"""Which processes count as those of a pod whose consumers get the new filesystem, with a /proc that the test makes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.mounter import pods

if TYPE_CHECKING:
    from pathlib import Path

POD = "3f2c8b1e-5f0a-4f4e-9d7e-0d9c1f6a2b3c"
OTHER = POD.replace("3", "4")
ID = "0123456789abcdef" * 4
IN_SYSTEMD = POD.replace("-", "_")
PID = 7


def is_in_pod(proc: Path, cgroup: str, pod: str = POD) -> bool:
    """Return whether a process with this cgroup counts as one of the pod."""
    (proc / str(PID)).mkdir()
    (proc / str(PID) / "cgroup").write_text(cgroup)
    descriptor = os.open(proc, os.O_PATH)
    try:
        return pods.is_in_pod(descriptor, PID, pod.encode())
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods/besteffort/pod{POD}/{ID}",
        f"/kubepods/pod{POD}/{ID}/its own/pod{OTHER}",
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{IN_SYSTEMD}.slice/crio-{ID}.scope",
        f"/../../pod{POD}/{ID}",
    ],
)
def test_who_is_below_the_cgroup_that_kubelet_made_is_in_the_pod(tmp_path: Path, path: str) -> None:
    assert is_in_pod(tmp_path, f"0::{path}\n")


def test_a_static_pods_uid_has_no_dashes(tmp_path: Path) -> None:
    uid = POD.replace("-", "")
    assert is_in_pod(tmp_path, f"0::/kubepods/burstable/pod{uid}/{ID}\n", uid)


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods/besteffort/pod{OTHER}/{ID}/pod{POD}",
        f"/kubepods/besteffort/pod{OTHER}/{ID}/kubepods/pod{POD}/{ID}",
        f"/kubepods.slice/kubepods-pod{OTHER.replace('-', '_')}.slice/crio-{ID}.scope/kubepods-pod{IN_SYSTEMD}.slice",
        f"/kubepods/besteffort/pod{POD}0/{ID}",
        f"/system.slice/docker-{ID}.scope/kubepods/besteffort/pod{POD}",
        f"/machine.slice/kubepods/pod{POD}",
        f"/user.slice/user-1000.slice/user@1000.service/kubepods/pod{POD}",
        f"/pod{POD}",
        "/",
    ],
)
def test_whoever_names_a_cgroup_like_a_pods_is_not_in_it(tmp_path: Path, path: str) -> None:
    assert not is_in_pod(tmp_path, f"0::{path}\n")


def test_a_process_that_is_to_be_seen_in_two_pods_is_in_none(tmp_path: Path) -> None:
    assert not is_in_pod(tmp_path, f"2:pids:/kubepods/pod{POD}\n1:memory:/kubepods/pod{OTHER}\n")
