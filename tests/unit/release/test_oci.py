"""The archive of an image for several architectures: an OCI image layout, in which each part is found by its digest."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from release import oci

LAYERS = {"amd64": b"a layer", "arm64": b"another layer"}


def saved(place: Path, architecture: str) -> Path:
    """Write an archive as packaging/container/normalize.py does."""
    configuration = json.dumps({"architecture": architecture, "config": {"Labels": {"a": "b"}}}).encode()
    manifest = [{"Config": "c.json", "RepoTags": ["localhost/x:1"], "Layers": ["layer.tar"]}]
    files = {"layer.tar": LAYERS[architecture], "c.json": configuration, "manifest.json": json.dumps(manifest).encode()}
    path = place / f"{architecture}.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Path]:
    return {architecture: saved(tmp_path, architecture) for architecture in ("arm64", "amd64")}


def blob(archive: tarfile.TarFile, descriptor: dict[str, Any]) -> bytes:
    """Return the content that the descriptor names, of the size and the digest that it gives."""
    file = archive.extractfile(f"blobs/{descriptor['digest'].replace(':', '/')}")
    assert file is not None
    content = file.read()
    assert len(content) == descriptor["size"]
    assert hashlib.sha256(content).hexdigest() == descriptor["digest"].partition(":")[2]
    return content


def test_each_architecture_is_found_from_the_index(images: dict[str, Path], tmp_path: Path) -> None:
    digest = oci.write(images, "localhost/x:1", tmp_path / "x.oci.tar")
    with tarfile.open(tmp_path / "x.oci.tar") as archive:
        layout, index = (archive.extractfile(name) for name in ("oci-layout", "index.json"))
        assert layout is not None and index is not None
        assert json.load(layout) == {"imageLayoutVersion": "1.0.0"}
        (entry,) = json.load(index)["manifests"]
        assert entry["digest"] == digest
        assert entry["annotations"] == {"org.opencontainers.image.ref.name": "localhost/x:1"}
        manifests = json.loads(blob(archive, entry))["manifests"]
        assert [each["platform"] for each in manifests] == [
            {"architecture": architecture, "os": "linux"} for architecture in ("amd64", "arm64")
        ]
        for each in manifests:
            manifest = json.loads(blob(archive, each))
            architecture = each["platform"]["architecture"]
            assert json.loads(blob(archive, manifest["config"]))["architecture"] == architecture
            assert [blob(archive, layer) for layer in manifest["layers"]] == [LAYERS[architecture]]


def test_the_same_images_give_the_same_bytes(images: dict[str, Path], tmp_path: Path) -> None:
    oci.write(images, "localhost/x:1", tmp_path / "one")
    oci.write(dict(reversed(images.items())), "localhost/x:1", tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
