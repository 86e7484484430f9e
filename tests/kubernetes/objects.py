"""The objects in the files of packaging/kubernetes, and checks that apply to all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

PACKAGING = Path(__file__).parents[2] / "packaging/kubernetes"
BASE = PACKAGING / "base"
MIGRATION = PACKAGING / "meta-fuse-csi-plugin"
DEVICE_PLUGIN = PACKAGING / "device-plugin"
DEVICE_PLUGIN_CDI = PACKAGING / "device-plugin-cdi"
CONTROLLER = PACKAGING / "controller"
PROVISIONING = PACKAGING / "provisioning"
CHART = PACKAGING / "chart"
KUSTOMIZATION = "kustomization.yaml"
EXAMPLES = sorted(path for path in (PACKAGING / "examples").glob("*.yaml") if path.name != KUSTOMIZATION)
#: Of the kind VolumeTemplate.
TEMPLATES = sorted(path for path in (PACKAGING / "templates").glob("*.yaml") if path.name != KUSTOMIZATION)
#: Of the kind VolumeTemplate, which also create volumes.
PROVISIONERS = sorted((PACKAGING / "provisioners").glob("*.yaml"))

#: The first Kubernetes for which the driver is, the first one with sidecars, and the newest one with available schemas.
OLDEST, SIDECARS, NEWEST = "1.25", "1.29", kubernetes_validate.latest_version()

Object = dict[str, Any]


def objects(text: str) -> list[Object]:
    """Return the objects of the YAML documents in `text`."""
    return [document for document in yaml.safe_load_all(text) if document]


def of_files(paths: list[Path]) -> list[Object]:
    return [each for path in paths for each in objects(path.read_text())]


def of_base() -> list[Object]:
    """Return the objects of the base, from its files."""
    return of_files([path for path in sorted(BASE.glob("*.yaml")) if path.name != KUSTOMIZATION])


def the(kind: str, among: list[Object]) -> Object:
    """Return the only object of this kind."""
    (found,) = [each for each in among if each["kind"] == kind]
    return found


def definition(kind: str, among: list[Object]) -> Object:
    """Return the definition of this kind of our own."""
    (found,) = [
        each for each in among if each["kind"] == "CustomResourceDefinition" and each["spec"]["names"]["kind"] == kind
    ]
    return found


def name_of(each: Object) -> str:
    return f"{each['kind']} {each['metadata']['name']}"


def validate(each: Object) -> None:
    """Validate with the API's schemas, which allow no other fields. Raises kubernetes_validate.ValidationError."""
    for version in (SIDECARS if has_sidecar(each) else OLDEST, NEWEST):
        kubernetes_validate.validate(each, version, strict=True)


def has_sidecar(each: Object) -> bool:
    return any("restartPolicy" in container for container in each.get("spec", {}).get("initContainers", []))


def containers(pod: Object) -> list[Object]:
    spec: Object = pod["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def is_pulled_once(image: str) -> bool:
    """Return whether kubelet pulls the image only if the node lacks it: if it has a digest, or a tag but `latest`."""
    name, _, digest = image.partition("@")
    _, _, tag = name.rpartition("/")[2].partition(":")
    return bool(digest) or tag not in ("", "latest")
