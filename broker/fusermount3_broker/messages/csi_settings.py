"""The plugin's command line, checked: where it serves, the node's ID and the driver's name."""

import re
from pathlib import Path
from typing import NamedTuple

#: The longest path in an address of a Unix socket (unix(7)).
LONGEST_SOCKET = 107
#: The longest node ID (CSI, NodeGetInfoResponse).
LONGEST_NODE_ID = 256

_UNIX_ADDRESS = re.compile(r"unix:(?://)?(/[^/\0][^\0]*)")
#: CSI, GetPluginInfoResponse: a domain name of at most 63 characters.
_DRIVER_NAME = re.compile("[a-zA-Z0-9]([-.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?")
#: A namespace of Kubernetes: a label of DNS (RFC 1123).
_NAMESPACE = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class SettingsError(Exception):
    """The plugin can't run with these settings; the message names the option."""


class Csi(NamedTuple):
    """The CSI plugin's options from the command line, and kubelet's directory of volumes.

    `mount_namespaces` are those of mount pods, separated by commas.
    """

    endpoint: str
    node_id: str
    driver_name: str
    kubelet_directory: Path
    mount_namespaces: str


class Settings(NamedTuple):
    """`socket` is where kubelet connects; `kubelet_directory` has no trailing slash."""

    socket: Path
    node_id: str
    driver_name: str
    kubelet_directory: str


def check(endpoint: str, node_id: str, driver_name: str, kubelet_directory: str) -> Settings:
    """Return the settings that the options of these names specify. Raises SettingsError."""
    address = _UNIX_ADDRESS.fullmatch(endpoint)
    if not address:
        raise SettingsError(f"--endpoint must be like unix:///csi/csi.sock, not {endpoint!r}")
    if len(address[1].encode()) > LONGEST_SOCKET:
        raise SettingsError(f"--endpoint: the path of a socket has at most {LONGEST_SOCKET} bytes")
    if not 0 < len(node_id.encode()) <= LONGEST_NODE_ID:
        raise SettingsError(f"--node-id must be of 1 to {LONGEST_NODE_ID} bytes")
    if not _DRIVER_NAME.fullmatch(driver_name):
        raise SettingsError(f"--driver-name must be a domain name of at most 63 characters, not {driver_name!r}")
    if not kubelet_directory.startswith("/") or ".." in kubelet_directory.split("/"):
        raise SettingsError(f"--kubelet-dir must be an absolute path, not {kubelet_directory!r}")
    return Settings(Path(address[1]), node_id, driver_name, str(Path(kubelet_directory)).removesuffix("/"))


def check_mount_namespaces(listed: str) -> None:
    """Raise SettingsError unless these are names of namespaces, separated by commas; there may be none."""
    for each in listed.split(",") if listed else []:
        if not _NAMESPACE.fullmatch(each):
            raise SettingsError(f"--mount-namespaces must be names of namespaces, separated by commas, not {listed!r}")
