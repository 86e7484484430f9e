#!/usr/bin/python3
"""Runc, for podman; it also binds volumes, as containerd has runc do it: after a stat(2) of each.

Podman itself calls statfs(2) on what it binds, which only a FUSE program can answer, and which no container runtime of
Kubernetes does. So these volumes are an annotation of the container: a list of mounts as in the configuration of an OCI
runtime.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

_NAME = "lab.volumes"


def annotation(mounts: list[dict[str, object]]) -> str:
    """Return the annotation for a container with these mounts, as podman's argument: without commas and quotes."""
    return f"{_NAME}={base64.b64encode(json.dumps(mounts).encode()).decode()}"


if __name__ == "__main__":
    if "create" in sys.argv:
        configuration = Path(sys.argv[sys.argv.index("--bundle") + 1]) / "config.json"
        content = json.loads(configuration.read_text())
        for mount in json.loads(base64.b64decode(content["annotations"][_NAME])):
            Path(mount["source"]).stat()
            content["mounts"].append(mount)
        configuration.write_text(json.dumps(content))
    os.execvp("runc", ["runc", *sys.argv[1:]])
