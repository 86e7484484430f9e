"""VolumeTemplates that have volumes: they don't vanish while they have, and say how many. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fusermount3_controller.rendering import Manifest

#: Of a template, as long as it has volumes that were created for claims.
FINALIZER = "fusermount3-proxy.dev/volumes"
#: The reason of the event on a template that is to be deleted.
HELD = "VolumeTemplateHasVolumes"


class Held(NamedTuple):
    """A template as it is, whether it can be used or not; `volumes`: how many it says that it has."""

    name: str
    uid: str
    version: str
    finalizers: tuple[str, ...] = ()
    is_ending: bool = False
    volumes: int = 0


class Patch(NamedTuple):
    """A merge patch of a template; `of_status`: of its status."""

    patch: Manifest
    of_status: bool = False


def parse(manifest: Mapping[str, Any]) -> Held:
    metadata, status = manifest["metadata"], manifest.get("status") or {}
    return Held(
        metadata["name"],
        metadata.get("uid", ""),
        metadata.get("resourceVersion", ""),
        tuple(metadata.get("finalizers") or ()),
        bool(metadata.get("deletionTimestamp")),
        status.get("volumes", 0),
    )


def patches(template: Held, volumes: int) -> Iterator[Patch]:
    """Yield what has the template say how many volumes it has, and stay or go as they do."""
    others = [each for each in template.finalizers if each != FINALIZER]
    is_held = FINALIZER in template.finalizers
    wanted = [*others, FINALIZER] if volumes and (is_held or not template.is_ending) else others
    if template.volumes != volumes:
        yield Patch({"status": {"volumes": volumes}}, of_status=True)
    elif wanted != list(template.finalizers):
        # Whoever has added another one meanwhile must not lose it.
        yield Patch({"metadata": {"resourceVersion": template.version, "finalizers": wanted}})


def message(template: Held, volumes: int) -> str:
    """Return why the template does not go; empty, if nobody has told it to, or nothing holds it."""
    if not template.is_ending or not volumes:
        return ""
    return f"it has {volumes} volume{'' if volumes == 1 else 's'}, and goes when the last one is deleted"
