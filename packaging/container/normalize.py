"""Removes from a saved image what differs at each build: the container in which Podman built it.

    normalize.py SAVED OUTPUT

SAVED is an archive of `podman save --format docker-archive`. In Docker's format, the only one with health checks, the
configuration contains the id and the name of that container, so that no two images would have the same digest.
"""

import hashlib
import io
import json
import sys
import tarfile
from typing import IO, Any


def normalized(configuration: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of an image without the fields that describe the container."""
    kept = {name: value for name, value in configuration.items() if name not in ("container", "container_config")}
    return kept | {"config": {name: value for name, value in kept["config"].items() if name != "Hostname"}}


def rewrite(saved: tarfile.TarFile, output: tarfile.TarFile) -> None:
    """Write the image anew: its layers, its configuration, and the manifest that names both."""
    (manifest,) = json.load(_file(saved, "manifest.json"))
    configuration = json.dumps(normalized(json.load(_file(saved, manifest["Config"])))).encode()
    manifest["Config"] = f"{hashlib.sha256(configuration).hexdigest()}.json"
    for layer in manifest["Layers"]:
        _add(output, layer, _file(saved, layer), saved.getmember(layer).size)
    for name, content in ((manifest["Config"], configuration), ("manifest.json", json.dumps([manifest]).encode())):
        _add(output, name, io.BytesIO(content), len(content))


def _file(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    assert file is not None, f"{name} is no file"
    return file


def _add(archive: tarfile.TarFile, name: str, content: IO[bytes], size: int) -> None:
    """Add a file that root owns, dated 1970."""
    member = tarfile.TarInfo(name)
    member.size = size
    archive.addfile(member, content)


if __name__ == "__main__":
    _, _saved, _output = sys.argv
    with tarfile.open(_saved) as _from, tarfile.open(_output, "w") as _to:
        rewrite(_from, _to)
