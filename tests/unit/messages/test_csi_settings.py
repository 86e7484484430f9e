"""The CSI plugin's settings from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusermount3_broker.messages.csi_settings import Settings, SettingsError, check, check_mount_namespaces

GOOD = ("unix:///csi/csi.sock", "node-1", "fuse.example.org", "/var/lib/kubelet")


def test_the_settings_are_what_the_options_say() -> None:
    assert check(*GOOD) == Settings(Path("/csi/csi.sock"), "node-1", "fuse.example.org", "/var/lib/kubelet")
    assert check("unix:/csi/csi.sock", *GOOD[1:]) == check(*GOOD)
    assert check(*GOOD[:3], "/var/lib/kubelet/") == check(*GOOD)


@pytest.mark.parametrize(
    "endpoint", ["", "/csi.sock", "tcp://127.0.0.1:1", "unix:csi.sock", "unix://csi.sock", "unix:", "unix:///a\0"]
)
def test_the_endpoint_is_a_unix_socket(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="--endpoint must be like unix:"):
        check(endpoint, *GOOD[1:])


def test_the_path_of_the_socket_fits_into_its_address() -> None:
    assert check("unix:///" + "x" * 106, *GOOD[1:]).socket
    with pytest.raises(SettingsError, match="--endpoint: the path of a socket has at most 107 bytes"):
        check("unix:///" + "x" * 107, *GOOD[1:])


@pytest.mark.parametrize("node_id", ["", "x" * 257])
def test_the_node_has_an_id_that_csi_allows(node_id: str) -> None:
    with pytest.raises(SettingsError, match="--node-id"):
        check(GOOD[0], node_id, *GOOD[2:])


@pytest.mark.parametrize("name", ["", "-a", "a.", "a_b", "a/b", "x" * 64, "a\n"])
def test_the_driver_has_a_name_that_csi_allows(name: str) -> None:
    with pytest.raises(SettingsError, match="--driver-name"):
        check(*GOOD[:2], name, GOOD[3])


@pytest.mark.parametrize("directory", ["", "kubelet", "/var/../etc"])
def test_kubelets_directory_is_an_absolute_path(directory: str) -> None:
    with pytest.raises(SettingsError, match="--kubelet-dir"):
        check(*GOOD[:3], directory)


@pytest.mark.parametrize("listed", ["", "fuse-mounts", "fuse-mounts,a", "x" * 63])
def test_any_number_of_namespaces_may_have_mount_pods(listed: str) -> None:
    check_mount_namespaces(listed)


@pytest.mark.parametrize("listed", [",", "a,", "A", "a b", "a/b", "x" * 64, "-a", "a\n"])
def test_the_namespaces_of_mount_pods_have_names(listed: str) -> None:
    with pytest.raises(SettingsError, match="--mount-namespaces must be names of namespaces"):
        check_mount_namespaces(listed)
