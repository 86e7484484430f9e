"""Pods from their manifests: the fields that kubelet learns of a pod, and no others.

`load` reads a file as `kubectl apply` does, with all its documents, and returns the pod in it: with the volumes to
which its claims are bound, and with the values that a container's environment takes from secrets. A field that the lab
does not implement is either known to have no effect there (`WITHOUT_EFFECT`), or an error: a test must not pass
because a manifest was not read.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

WITHOUT_EFFECT = {
    "Pod": {
        *("terminationGracePeriodSeconds", "nodeSelector", "tolerations", "automountServiceAccountToken"),
        *("enableServiceLinks", "affinity", "priorityClassName"),
    },
    "container": {"imagePullPolicy", "resources", "ports", "terminationMessagePolicy"},
    "container's securityContext": {"seccompProfile", "privileged", "runAsNonRoot"},
    "pod's securityContext": {"seccompProfile", "fsGroupChangePolicy", "runAsNonRoot"},
}


@dataclass(frozen=True)
class Probe:
    """A command that succeeds when a container has started, or is ready; times in seconds."""

    command: tuple[str, ...]
    period: float
    failures: int


@dataclass(frozen=True)
class VolumeMount:
    """The place of a volume in a container; `propagation` is None, HostToContainer or Bidirectional."""

    volume: str
    path: str
    read_only: bool
    sub_path: str
    propagation: str


@dataclass(frozen=True)
class Container:
    """A container of a pod.

    `command` is empty if the image's own is run; with `sidecar`, its restartPolicy is Always.
    """

    name: str
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: Mapping[str, str]
    mounts: tuple[VolumeMount, ...]
    user: int | None
    group: int | None
    read_only_root: bool
    add_capabilities: tuple[str, ...]
    drop_capabilities: tuple[str, ...]
    may_escalate: bool
    sidecar: bool
    startup: Probe | None
    readiness: Probe | None
    liveness: Probe | None
    last_words: str
    """The path of its termination message."""


@dataclass(frozen=True)
class EmptyDir:
    name: str
    in_memory: bool = False


@dataclass(frozen=True)
class Files:
    """The contents of a secret or a config map."""

    name: str
    contents: Mapping[str, bytes]
    mode: int = 0o644


@dataclass(frozen=True)
class CsiVolume:
    """An ephemeral inline volume or a claimed one; `handle` is empty for the first, because kubelet generates it.

    `directory` is kubelet's name for it in the pod's directory: the name of the volume in the pod or, for a claimed
    one, that of the PersistentVolume.
    """

    name: str
    directory: str
    driver: str
    handle: str = ""
    read_only: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict)
    mount_options: tuple[str, ...] = ()
    access_mode: str = "ReadWriteOnce"

    @property
    def ephemeral(self) -> bool:
        return not self.handle


Volume = EmptyDir | Files | CsiVolume


@dataclass(frozen=True)
class Pod:
    """A pod. Of `init_containers` the sidecars run until the pod ends, the others to their end before the next."""

    name: str
    namespace: str
    service_account: str
    volumes: tuple[Volume, ...]
    init_containers: tuple[Container, ...]
    containers: tuple[Container, ...]
    fs_group: int | None
    supplemental_groups: tuple[int, ...]
    host_users: bool

    def csi_volumes(self) -> list[CsiVolume]:
        return [volume for volume in self.volumes if isinstance(volume, CsiVolume)]


class NotUnderstood(AssertionError):
    """A manifest has a field that the lab does not implement."""


#: By name, the secrets that `kubectl create secret generic` has made before.
Secrets = Mapping[str, Mapping[str, bytes]]


def load(path: Path, secrets: Secrets = MappingProxyType({})) -> Pod:
    """Return the one pod of a file. Raises NotUnderstood."""
    return parse(path.read_text(), secrets)


def parse(text: str, secrets: Secrets = MappingProxyType({})) -> Pod:
    """Return the one pod of the documents in `text`. Raises NotUnderstood."""
    documents = Documents([document for document in yaml.safe_load_all(text) if document], secrets)
    (pod,) = documents.of_kind("Pod")
    return _pod(pod, documents)


class Documents:
    """The objects that were applied together."""

    def __init__(self, documents: Sequence[Mapping[str, Any]], secrets: Secrets) -> None:
        self._documents = documents
        self._secrets = secrets

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [document for document in self._documents if document["kind"] == kind]

    def get(self, kind: str, name: str) -> Mapping[str, Any]:
        found = [document for document in self.of_kind(kind) if document["metadata"]["name"] == name]
        if len(found) != 1:
            raise NotUnderstood(f"{len(found)} objects {kind} {name}")
        return found[0]

    def contents(self, kind: str, name: str) -> dict[str, bytes]:
        """Return the data of a Secret or ConfigMap."""
        if kind == "Secret" and name in self._secrets:
            return dict(self._secrets[name])
        document = self.get(kind, name)
        _only(document, kind, {"apiVersion", "kind", "metadata", "type", "data", "stringData"})
        encoded = document.get("data") or {}
        decoded = {
            key: base64.b64decode(value) if kind == "Secret" else value.encode() for key, value in encoded.items()
        }
        return decoded | {key: value.encode() for key, value in (document.get("stringData") or {}).items()}


def _only(mapping: Mapping[str, Any], what: str, known: Iterable[str]) -> None:
    """Raise NotUnderstood if `mapping` has a key that is neither known nor without effect."""
    if unknown := mapping.keys() - set(known) - WITHOUT_EFFECT.get(what, set()):
        raise NotUnderstood(f"{what}: {', '.join(sorted(unknown))}")


def _pod(document: Mapping[str, Any], documents: Documents) -> Pod:
    metadata, spec = document["metadata"], document["spec"]
    known = {"volumes", "containers", "initContainers", "securityContext", "hostUsers", "serviceAccountName"}
    _only(spec, "Pod", known | {"restartPolicy"})
    if spec.get("restartPolicy", "Always") != "Always":
        raise NotUnderstood(f"Pod: restartPolicy {spec['restartPolicy']}")
    security = spec.get("securityContext") or {}
    _only(security, "pod's securityContext", {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"})
    return Pod(
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        service_account=spec.get("serviceAccountName", "default"),
        volumes=tuple(_volume(volume, documents) for volume in spec.get("volumes") or ()),
        init_containers=tuple(_container(each, security, documents) for each in spec.get("initContainers") or ()),
        containers=tuple(_container(each, security, documents) for each in spec["containers"]),
        fs_group=security.get("fsGroup"),
        supplemental_groups=tuple(security.get("supplementalGroups") or ()),
        host_users=spec.get("hostUsers", True),
    )


def _volume(volume: Mapping[str, Any], documents: Documents) -> Volume:
    name = volume["name"]
    (kind,) = volume.keys() - {"name"}
    source = volume[kind] or {}
    match kind:
        case "emptyDir":
            _only(source, "emptyDir", {"medium", "sizeLimit"})
            return EmptyDir(name, in_memory=source.get("medium") == "Memory")
        case "secret":
            _only(source, "secret", {"secretName", "defaultMode"})
            return Files(name, documents.contents("Secret", source["secretName"]), source.get("defaultMode", 0o644))
        case "configMap":
            _only(source, "configMap", {"name", "defaultMode"})
            return Files(name, documents.contents("ConfigMap", source["name"]), source.get("defaultMode", 0o644))
        case "csi":
            _only(source, "csi", {"driver", "readOnly", "volumeAttributes"})
            attributes = source.get("volumeAttributes") or {}
            read_only = source.get("readOnly", False)
            return CsiVolume(name, name, source["driver"], read_only=read_only, attributes=attributes)
        case "persistentVolumeClaim":
            _only(source, "persistentVolumeClaim", {"claimName", "readOnly"})
            return _claimed(name, source, documents)
    raise NotUnderstood(f"volume {name}: {kind}")


def _claimed(name: str, source: Mapping[str, Any], documents: Documents) -> CsiVolume:
    """Return the volume to which a claim is bound; the claim must name it."""
    claim = documents.get("PersistentVolumeClaim", source["claimName"])["spec"]
    persistent = documents.get("PersistentVolume", claim["volumeName"])
    known = {"csi", "accessModes", "mountOptions", "capacity", "storageClassName", "persistentVolumeReclaimPolicy"}
    _only(persistent["spec"], "PersistentVolume", known | {"claimRef", "volumeMode"})
    csi = persistent["spec"]["csi"]
    _only(csi, "PersistentVolume's csi", {"driver", "volumeHandle", "volumeAttributes", "readOnly"})
    return CsiVolume(
        name,
        persistent["metadata"]["name"],
        csi["driver"],
        handle=csi["volumeHandle"],
        read_only=source.get("readOnly", False) or csi.get("readOnly", False),
        attributes=csi.get("volumeAttributes") or {},
        mount_options=tuple(persistent["spec"].get("mountOptions") or ()),
        access_mode=persistent["spec"]["accessModes"][0],
    )


def _container(spec: Mapping[str, Any], of_pod: Mapping[str, Any], documents: Documents) -> Container:
    known = {"name", "image", "command", "args", "env", "envFrom", "volumeMounts", "securityContext", "restartPolicy"}
    _only(spec, "container", known | {"startupProbe", "readinessProbe", "livenessProbe", "terminationMessagePath"})
    own = spec.get("securityContext") or {}
    known = {"runAsUser", "runAsGroup", "readOnlyRootFilesystem", "capabilities", "allowPrivilegeEscalation"}
    _only(own, "container's securityContext", known)
    if own.get("privileged"):
        raise NotUnderstood(f"container {spec['name']}: privileged")
    capabilities = own.get("capabilities") or {}
    return Container(
        name=spec["name"],
        image=spec["image"],
        command=tuple(spec.get("command") or ()),
        args=tuple(spec.get("args") or ()),
        env=_environment(spec, documents),
        mounts=tuple(_mount(mount) for mount in spec.get("volumeMounts") or ()),
        user=own.get("runAsUser", of_pod.get("runAsUser")),
        group=own.get("runAsGroup", of_pod.get("runAsGroup")),
        read_only_root=own.get("readOnlyRootFilesystem", False),
        add_capabilities=tuple(capabilities.get("add") or ()),
        drop_capabilities=tuple(capabilities.get("drop") or ()),
        may_escalate=own.get("allowPrivilegeEscalation", True),
        sidecar=spec.get("restartPolicy") == "Always",
        startup=_probe(spec.get("startupProbe")),
        readiness=_probe(spec.get("readinessProbe")),
        liveness=_probe(spec.get("livenessProbe")),
        last_words=spec.get("terminationMessagePath", "/dev/termination-log"),
    )


def _environment(spec: Mapping[str, Any], documents: Documents) -> dict[str, str]:
    environment: dict[str, str] = {}
    for source in spec.get("envFrom") or ():
        ((kind, reference),) = source.items()
        contents = documents.contents({"secretRef": "Secret", "configMapRef": "ConfigMap"}[kind], reference["name"])
        environment |= {name: value.decode() for name, value in contents.items()}
    for variable in spec.get("env") or ():
        if "valueFrom" in variable:
            ((kind, reference),) = variable["valueFrom"].items()
            of_kind = {"secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap"}[kind]
            value = documents.contents(of_kind, reference["name"])[reference["key"]].decode()
        else:
            value = variable.get("value", "")
        environment[variable["name"]] = value
    return environment


def _mount(mount: Mapping[str, Any]) -> VolumeMount:
    _only(mount, "volumeMount", {"name", "mountPath", "readOnly", "subPath", "mountPropagation"})
    return VolumeMount(
        volume=mount["name"],
        path=mount["mountPath"],
        read_only=mount.get("readOnly", False),
        sub_path=mount.get("subPath", ""),
        propagation=mount.get("mountPropagation", "None"),
    )


def _probe(probe: Mapping[str, Any] | None) -> Probe | None:
    if probe is None:
        return None
    _only(probe, "probe", {"exec", "periodSeconds", "failureThreshold", "timeoutSeconds", "initialDelaySeconds"})
    command = tuple(probe["exec"]["command"])
    return Probe(command, float(probe.get("periodSeconds", 10)), int(probe.get("failureThreshold", 3)))
