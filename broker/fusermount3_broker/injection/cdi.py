"""The specification of our device for container engines (Container Device Interface, version 0.3.0).

With it, `podman run --device fusermount3-proxy.dev/fuse=on IMAGE` gives any image what it needs. That version is the
first, and the only one that Podman 4.3, containerd and CRI-O have in common.
"""

import json
from pathlib import Path
from typing import Any

from fusermount3_broker.injection.container_edits import DEFAULT_PROXY as DEFAULT_PROXY
from fusermount3_broker.injection.container_edits import Bind, Injection, injection
from fusermount3_broker.injection.container_edits import InjectionError as InjectionError

VERSION = "0.3.0"
KIND = "fusermount3-proxy.dev/fuse"
NAME = "on"
#: The device's name on the command line of an engine, and in answers to kubelet.
DEVICE = f"{KIND}={NAME}"


def specification_for(proxy: Path, socket: Path, *, device_node: bool) -> str:
    """Return the specification for a host with the static executable and the broker's socket at these paths.

    Raises InjectionError.
    """
    return specification(injection(proxy, socket, device_node=device_node))


def specification(injection: Injection) -> str:
    """Return the specification as the text of a file in /etc/cdi, in JSON, which is also YAML."""
    edits: dict[str, Any] = {}
    if injection.environment:
        edits["env"] = [f"{name}={value}" for name, value in injection.environment.items()]
    if injection.devices:
        edits["deviceNodes"] = [{"path": device, "permissions": "rw"} for device in injection.devices]
    edits["mounts"] = [_mount(bind) for bind in injection.binds]
    devices = [{"name": NAME, "containerEdits": edits}]
    return json.dumps({"cdiVersion": VERSION, "kind": KIND, "devices": devices}, indent=2) + "\n"


def _mount(bind: Bind) -> dict[str, Any]:
    return {"hostPath": bind.source, "containerPath": bind.target, "options": ["bind", "ro", "nosuid"]}
