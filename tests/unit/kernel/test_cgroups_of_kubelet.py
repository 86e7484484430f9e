"""The pod of a process, from the cgroups that kubelet and the runtimes make, with both cgroup drivers and versions.

The names are those of kubelet's pkg/kubelet/cm/cgroup_manager_linux.go (`ToCgroupfs` and `ToSystemd` of a `CgroupName`)
and of the runtimes: containerd, CRI-O, which with crun has one more level, and cri-dockerd.
"""

from __future__ import annotations

import os
from itertools import product

import pytest

from fusermount3_broker.kernel.cgroups import pod_of

ID, BROKERS_ID = "0123456789abcdef" * 4, "fedcba9876543210" * 4
UID, BROKERS_UID = "3f2c8b1e-5f0a-4f4e-9d7e-0d9c1f6a2b3c", "91b6c0de-0000-4000-8000-0123456789ab"
STATIC_UID = UID.replace("-", "")
"""A static pod's UID is a hash."""

CLASSES = ((), ("burstable",), ("besteffort",))
"""The service classes of pods; guaranteed ones are directly below all pods."""
ROOTS = ((), ("kubelet",), ("kubelet", "nodes"))
"""What kubelet's cgroupRoot may be; with kind it is /kubelet."""
SCOPES = ("cri-containerd-{}.scope", "crio-{}.scope", "crio-{}.scope/container", "docker-{}.scope")


def cgroupfs(name: tuple[str, ...], container: str) -> str:
    """Return the path of a container's cgroup with kubelet's cgroup driver cgroupfs."""
    return "/" + "/".join((*name, container))


def systemd(name: tuple[str, ...], scope: str) -> str:
    """Return the same with the driver systemd: each slice has the names of those above it, with "_" for "-"."""
    escaped = [part.replace("-", "_") for part in name]
    return "/" + "/".join([*("-".join(escaped[: end + 1]) + ".slice" for end in range(len(escaped))), scope])


def made(root: tuple[str, ...], service: tuple[str, ...], uid: str, container: str) -> list[str]:
    """Return the paths that a container of a pod may have."""
    name = (*root, "kubepods", *service, f"pod{uid}")
    return [cgroupfs(name, container), *(systemd(name, scope.format(container)) for scope in SCOPES)]


def lines(path: str) -> list[bytes]:
    """Return what /proc/PID/cgroup has for a path: with version 2, with version 1, and with both."""
    return [
        f"0::{path}\n".encode(),
        f"12:pids:{path}\n1:name=systemd:{path}\n".encode(),
        f"5:cpu:{path}\n0::/\n".encode(),
    ]


@pytest.mark.parametrize("uid", [UID, STATIC_UID])
@pytest.mark.parametrize(("root", "service"), [*product(ROOTS, CLASSES)])
def test_on_the_node(root: tuple[str, ...], service: tuple[str, ...], uid: str) -> None:
    for path in made(root, service, uid, ID):
        assert {pod_of(line) for line in lines(path)} == {uid}, path


@pytest.mark.parametrize("brokers", CLASSES)
@pytest.mark.parametrize(("root", "service"), [*product(ROOTS, CLASSES)])
def test_in_the_cgroup_namespace_of_the_broker(
    root: tuple[str, ...], service: tuple[str, ...], brokers: tuple[str, ...]
) -> None:
    """The kernel shows a path relative to the root of the reader's namespace (cgroup_namespaces(7))."""
    for path, own in zip(made(root, service, UID, ID), made(root, brokers, BROKERS_UID, BROKERS_ID), strict=True):
        relative = f"/{os.path.relpath(path, own)}"
        assert {pod_of(line) for line in lines(relative)} == {UID}, relative
