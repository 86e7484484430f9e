"""The specification by which container engines know our device (Container Device Interface, version 0.3.0).

`podman run --device fusermount3-proxy.dev/fuse=on IMAGE` then gives any image what it needs. That version is the
first, and all that Podman 4.3, containerd and CRI-O have in common.
"""

import json
from typing import Any

from broker.injection import Bind, Injection

VERSION = "0.3.0"
KIND = "fusermount3-proxy.dev/fuse"
NAME = "on"
#: What is written on the command line of an engine, and what kubelet is told.
DEVICE = f"{KIND}={NAME}"


def specification(injection: Injection) -> str:
    """Return the specification, as the text of a file in /etc/cdi; JSON, which is YAML, too."""
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
