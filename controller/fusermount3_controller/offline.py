"""What comes out of objects in files: of pods, or of pods that are made up to show a template. Pure."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from fusermount3_controller import mount_pods, offline_volumes, shared_volumes, volume_templates
from fusermount3_controller.faults import Invalid
from fusermount3_controller.injection import inject
from fusermount3_controller.manifests import check_pod, check_storage, name_of
from fusermount3_controller.pod_volumes import PROVISIONED_BY
from fusermount3_controller.rendering import DRIVER, Manifest, is_block
from fusermount3_controller.served_volumes import Known
from fusermount3_controller.template_parameters import TEMPLATE_ATTRIBUTE
from fusermount3_controller.volume_templates import Placement

_CLAIM = "PersistentVolumeClaim"
#: The kinds that count; all others are none of the controller's.
_KINDS = (volume_templates.KIND, "Pod", "PersistentVolume", _CLAIM, "StorageClass", "Namespace")
#: The name of the volume in a pod that is made up.
_VOLUME = "data"

_T = TypeVar("_T")
#: An object, after the file that it is from.
Given = tuple[str, Mapping[str, Any]]


def rendered(given: Iterable[Given], attributes: Mapping[str, str]) -> tuple[list[Manifest], list[str]]:
    """Return the pods that come out, and a line for each thing that is wrong, with file, object and field.

    `attributes`: the volumeAttributes of a volume that is made up to show a template.
    """
    by_kind: dict[str, list[Given]] = {kind: [] for kind in _KINDS}
    for file, manifest in given:
        kind = manifest.get("kind")
        if isinstance(kind, str) and kind in by_kind:
            by_kind[kind].append((file, manifest))
    faults: list[str] = []
    for file, manifest in (*by_kind["PersistentVolume"], *by_kind[_CLAIM], *by_kind["StorageClass"]):
        _collected(partial(_checked, manifest), f"{file}: {name_of(manifest)}", faults)
    templates = _parsed(by_kind[volume_templates.KIND], faults)
    if faults:
        return [], faults
    if not templates:
        return [], ["there is no VolumeTemplate in these files"]
    known = Known(
        templates,
        {(_namespace(each), _name(each)): each for _, each in by_kind[_CLAIM]},
        {_name(each): each for _, each in by_kind["PersistentVolume"]},
        {_name(each): each for _, each in by_kind["StorageClass"]},
        namespaces={_name(each): each for _, each in by_kind["Namespace"]},
    )
    pods = by_kind["Pod"]
    is_made_up = not pods and not _persistent(known)
    if attributes and (pods or _persistent(known)):
        return [], ["--set is for files with templates alone: here, volumes have their own attributes"]
    if not pods:
        pods, known = _made_up(known, attributes)
    result: list[Manifest] = []
    for file, pod in pods:
        known = _with_namespace(pod, known)
        result += _collected(partial(_of_pod, pod, known), f"{file}: {name_of(pod)}", faults)
    for template in known.templates.values() if is_made_up else ():
        result += _collected(partial(_runs, template, attributes, known), f"made up: {template.name}", faults)
    return result, faults


def _parsed(given: list[Given], faults: list[str]) -> dict[str, volume_templates.VolumeTemplate]:
    result = {}
    for file, manifest in given:
        for template in _collected(partial(_parsed_one, manifest), f"{file}: {name_of(manifest)}", faults):
            result[template.name] = template
    return result


def _parsed_one(manifest: Mapping[str, Any]) -> list[volume_templates.VolumeTemplate]:
    return [volume_templates.parse(manifest)]


def _checked(manifest: Mapping[str, Any]) -> list[None]:
    check_storage(manifest)
    return []


def _collected(function: Callable[[], list[_T]], beginning: str, faults: list[str]) -> list[_T]:
    try:
        return function()
    except Invalid as error:
        faults += [f"{beginning}: {fault}" for fault in error.faults]
        return []


def _of_pod(pod: Mapping[str, Any], known: Known) -> list[Manifest]:
    check_pod(pod)
    shared = shared_volumes.of_new_pod(pod, known)
    return [inject(pod, known), *(mount_pods.shown(each) for each in shared)]


def _runs(template: volume_templates.VolumeTemplate, attributes: Mapping[str, str], known: Known) -> list[Manifest]:
    return list(offline_volumes.runs(template, attributes, known))


def _with_namespace(pod: Mapping[str, Any], known: Known) -> Known:
    """Return what is known with the pod's namespace, which has at least the label that all of them have."""
    name = _namespace(pod)
    labels = {"kubernetes.io/metadata.name": name}
    return known._replace(namespaces={name: {"metadata": {"labels": labels}}, **known.namespaces})


def _persistent(known: Known) -> list[str]:
    """Return the names of PersistentVolumes that name a template."""
    sources = {name: (volume.get("spec") or {}).get("csi") or {} for name, volume in known.volumes.items()}
    return [
        name
        for name, csi in sources.items()
        if csi.get("driver") == DRIVER and TEMPLATE_ATTRIBUTE in (csi.get("volumeAttributes") or {})
    ]


def _made_up(known: Known, attributes: Mapping[str, str]) -> tuple[list[Given], Known]:
    """Return pods for the PersistentVolumes that name a template, else for the templates; and the claims, too."""
    if names := _persistent(known):
        claims = {("default", name): {"spec": {"volumeName": name}} for name in names}
        known = known._replace(claims={**known.claims, **claims})
        return [("made up", _claimed(name, known)) for name in names], known
    csi = {
        name: {"driver": DRIVER, "volumeAttributes": {TEMPLATE_ATTRIBUTE: name, **attributes}}
        for name in known.templates
    }
    shared = {name: csi[name] for name, each in known.templates.items() if each.placement is Placement.SHARED}
    known = known._replace(
        claims={("default", name): {"spec": {"volumeName": name}} for name in shared},
        # As one that was created for a claim: it can be whatever the template allows.
        volumes={
            name: {
                "metadata": {"name": name, "annotations": {PROVISIONED_BY: DRIVER}},
                "spec": {
                    "csi": {"volumeHandle": name, **each},
                    "volumeMode": str(known.templates[name].provisioning.volume_modes[0]),
                },
            }
            for name, each in shared.items()
        },
        # Whoever asks for nothing but the template wants to see it, whomever it is for.
        templates={
            name: each._replace(sharing=each.sharing._replace(namespaces=())) for name, each in known.templates.items()
        },
    )
    pods = [_claimed(name, known) if name in shared else _pod(name, {"csi": csi[name]}) for name in csi]
    return [("made up", pod) for pod in pods], known


def _claimed(name: str, known: Known) -> Manifest:
    """Return a pod with the PersistentVolume of this name, whose claim has it, too."""
    source = {"persistentVolumeClaim": {"claimName": name}}
    return _pod(name, source, with_device=is_block(known.volumes[name]))


def _pod(name: str, source: Manifest, *, with_device: bool = False) -> Manifest:
    """Return a pod that passes Pod Security `restricted`, and has a container with the volume at /data, or with the
    device /dev/data.
    """
    path = f"/dev/{_VOLUME}" if with_device else f"/{_VOLUME}"
    place: Manifest = {"volumeMounts": [{"name": _VOLUME, "mountPath": path}]}
    if with_device:
        place = {"volumeDevices": [{"name": _VOLUME, "devicePath": path}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "app",
                    "image": "busybox:1.37",
                    "command": ["sh", "-c", f"trap 'exit 0' TERM; ls -l {path}; sleep infinity & wait"],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    **place,
                }
            ],
            "volumes": [{"name": _VOLUME, **source}],
        },
    }


def _name(manifest: Mapping[str, Any]) -> str:
    return str((manifest.get("metadata") or {}).get("name"))


def _namespace(manifest: Mapping[str, Any]) -> str:
    return str((manifest.get("metadata") or {}).get("namespace") or "default")
