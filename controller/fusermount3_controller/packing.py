"""Objects of which a cluster has many, as text in the cache: as dictionaries, they take four times the memory. Pure."""

import json
from collections.abc import Mapping
from typing import Any


def packed(manifest: Mapping[str, Any]) -> bytes:
    """Return the manifest as JSON; of manifests whose fields have the same order, the same if they are equal."""
    return json.dumps(manifest, separators=(",", ":")).encode()


def unpacked(text: bytes) -> dict[str, Any]:
    """Return the manifest of which `packed` has made the text."""
    manifest: dict[str, Any] = json.loads(text)
    return manifest
