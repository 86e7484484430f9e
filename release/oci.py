"""One OCI archive of the images of all architectures, from an archive of each that `podman save` has made.

The archive is an image layout (OCI image-spec, image-layout.md) with one index, which has a manifest for each
architecture. The same images give the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import IO

_TYPE = "application/vnd.oci.image"
INDEX, MANIFEST, CONFIGURATION = f"{_TYPE}.index.v1+json", f"{_TYPE}.manifest.v1+json", f"{_TYPE}.config.v1+json"
LAYER = f"{_TYPE}.layer.v1.tar"


def write(images: Mapping[str, Path], name: str, output: Path) -> str:
    """Write the archive of these docker-archives, by architecture. `name`: of the image, with its tag.

    Return the digest of the index, by which a registry knows the image. Raises tarfile.TarError.
    """
    with tarfile.open(output, "w") as archive:
        manifests = [_add_image(archive, architecture, images[architecture]) for architecture in sorted(images)]
        index = _add_json(archive, INDEX, {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests})
        entry = {**index, "annotations": {"org.opencontainers.image.ref.name": name}}
        _add(archive, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(archive, "index.json", json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}).encode())
    return str(index["digest"])


def _add_image(archive: tarfile.TarFile, architecture: str, image: Path) -> dict[str, Any]:
    """Add layers, configuration and manifest; return the manifest's descriptor."""
    with tarfile.open(image) as saved:
        (found,) = json.load(_file(saved, "manifest.json"))
        configuration = _file(saved, found["Config"]).read()
        layers = [_add_layer(archive, saved, layer) for layer in found["Layers"]]
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _add_blob(archive, CONFIGURATION, configuration),
        "layers": layers,
    }
    return {**_add_json(archive, MANIFEST, manifest), "platform": {"architecture": architecture, "os": "linux"}}


def _add_layer(archive: tarfile.TarFile, saved: tarfile.TarFile, name: str) -> dict[str, Any]:
    digest = hashlib.file_digest(_file(saved, name), "sha256").hexdigest()  # type: ignore[arg-type]  # it is a file
    member = tarfile.TarInfo(f"blobs/sha256/{digest}")
    member.size = saved.getmember(name).size
    archive.addfile(member, _file(saved, name))
    return {"mediaType": LAYER, "digest": f"sha256:{digest}", "size": member.size}


def _add_json(archive: tarfile.TarFile, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    return _add_blob(archive, kind, json.dumps(content).encode())


def _add_blob(archive: tarfile.TarFile, kind: str, content: bytes) -> dict[str, Any]:
    """Add a file that is named after its content, and return its descriptor."""
    digest = hashlib.sha256(content).hexdigest()
    _add(archive, f"blobs/sha256/{digest}", content)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file that root owns, dated 1970."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _file(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    assert file is not None, f"{name} is no file"
    return file
