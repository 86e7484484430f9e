"""Normalizing a saved image: the parts removed and the parts kept."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def load_normalize() -> ModuleType:
    """Load normalize.py, a script beside the image build files, in no package."""
    spec = importlib.util.spec_from_file_location("normalize", ROOT / "packaging/container/normalize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


normalize = load_normalize()

SETTINGS = {"Entrypoint": ["program"], "Healthcheck": {"Test": ["CMD", "program", "health"]}}


def saved(container: str) -> tarfile.TarFile:
    """Return an image as Podman saves it after building it in the container of that name."""
    own = SETTINGS | {"Hostname": container}
    configuration = {"container": container, "container_config": own, "config": own, "created": "2026-11-20T12:00:00Z"}
    manifest = [{"Config": "old.json", "RepoTags": ["localhost/image:1"], "Layers": ["layer.tar"]}]
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name, content in (
            ("layer.tar", b"layer"),
            ("old.json", json.dumps(configuration).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
            (f"{container}/json", b"of an older format"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    output.seek(0)
    return tarfile.open(fileobj=output)


def rewritten(container: str) -> bytes:
    output = io.BytesIO()
    with saved(container) as source, tarfile.open(fileobj=output, mode="w") as target:
        normalize.rewrite(source, target)
    return output.getvalue()


@pytest.fixture
def files() -> dict[str, bytes]:
    """The files of a rewritten image."""
    with tarfile.open(fileobj=io.BytesIO(rewritten("one"))) as tar:
        found = {}
        for each in tar:
            file = tar.extractfile(each)
            assert file is not None
            found[each.name] = file.read()
        return found


def test_two_builds_are_the_same() -> None:
    assert rewritten("one") == rewritten("two")


def test_the_manifest_names_layers_and_the_configuration_by_its_digest(files: dict[str, bytes]) -> None:
    (manifest,) = json.loads(files["manifest.json"])
    digest = hashlib.sha256(files[manifest["Config"]]).hexdigest()
    assert manifest == {"Config": f"{digest}.json", "RepoTags": ["localhost/image:1"], "Layers": ["layer.tar"]}
    assert files.keys() == {"manifest.json", "layer.tar", manifest["Config"]}
    assert files["layer.tar"] == b"layer"


def test_settings_stay(files: dict[str, bytes]) -> None:
    (manifest,) = json.loads(files["manifest.json"])
    configuration: dict[str, Any] = json.loads(files[manifest["Config"]])
    assert configuration == {"config": SETTINGS, "created": "2026-11-20T12:00:00Z"}
