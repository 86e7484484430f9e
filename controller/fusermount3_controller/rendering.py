"""What a template becomes for one volume: a container with its volumes, or a pod of its own. Pure.

The controller adds what every program needs, and what Pod Security `restricted` asks for, unless the template says it.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from fusermount3_controller import expressions, pod_rules
from fusermount3_controller.expressions import ExpressionError, Variable
from fusermount3_controller.faults import Fault, Invalid
from fusermount3_controller.pod_rules import MOUNTPOINT, SOCKET_DIRECTORY, SOCKET_VARIABLE
from fusermount3_controller.provisioning_fields import VolumeMode
from fusermount3_controller.quantities import size_or_none
from fusermount3_controller.volume_templates import VolumeTemplate

Manifest = dict[str, Any]

#: The driver's name in Kubernetes, and its defaults of these volumeAttributes (the broker's csi/volume_requests.py).
DRIVER = "csi.fusermount3-proxy.dev"
DEFAULT_DIRECTORY = "fuse-fd-passing"
DEFAULT_SOCKET = "fuse-csi-ephemeral.sock"

#: The namespace of pods that serve a volume for others.
SHARED_NAMESPACE = "fuse-mounts"
#: The name of the driver's volume in such a pod, and of the emptyDir with its socket: another one than that by which
#: a volume of users is known to be served in their pod, for a mount pod can be a user.
_SHARED_VOLUME, _SHARED_DIRECTORY = "volume", "fd-passing"
#: In packaging/kubernetes/controller: above all that could be evicted for what other pods need to start.
PRIORITY_CLASS = "fuse-mounts"
#: Names the template in the labels of such a pod.
TEMPLATE_LABEL = "fusermount3-proxy.dev/template"

#: Seconds that a program has to write back what it holds: in a pod of its own it waits for the last user.
GRACE_OF_SIDECAR = 60
GRACE_OF_SHARED = 600
#: GCS FUSE's defaults; no limits, because a program that reaches one takes the volume with it.
DEFAULT_REQUESTS = {"cpu": "250m", "memory": "256Mi"}
#: Of a pod that runs once for a volume: it asks a server for something.
DEFAULT_REQUESTS_OF_RUNS = {"cpu": "50m", "memory": "64Mi"}
_OF_RESTRICTED_PODS: Manifest = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
#: Seconds, one a try, that a program may take to mount.
TRIES = 120
#: The longest name of a container or volume (RFC 1123).
_LONGEST_NAME = 63

_AUTOSCALER = {"cluster-autoscaler.kubernetes.io/daemonset-pod": "true"}


class Use(NamedTuple):
    """A volume of a pod that is served by a program of a template: `volume` is its name in the pod.

    `directory` and `socket`: the emptyDir in which the driver makes its socket, and the socket's name.
    `persistent_volume`: that of the volume; empty, if it is inline or not bound yet.
    """

    volume: str
    template: VolumeTemplate
    parameters: Mapping[str, str]
    directory: str = DEFAULT_DIRECTORY
    socket: str = DEFAULT_SOCKET
    read_only: bool = False
    fs_group: int | None = None
    persistent_volume: Mapping[str, Any] = {}

    @property
    def container(self) -> str:
        """The name of the container that serves the volume in its pod."""
        return container_name(self.volume)


class Program(NamedTuple):
    """A container, the volumes that it needs, and the seconds that it has to end."""

    container: Manifest
    volumes: list[Manifest]
    grace: int


def container_name(volume: str) -> str:
    """Return the name of the container that serves the volume with this name in a pod."""
    return _short(f"fuse-{volume}")


def sidecar(use: Use) -> Program:
    """Return what a pod gets that has the volume. Raises Invalid."""
    program = _program(use, _rendered(use, {}), use.container)
    return program._replace(container={"name": use.container, "restartPolicy": "Always", **program.container})


def mount_pod(use: Use, node: str = "") -> Manifest:
    """Return the pod that serves the volume for all pods on its node; without, on any. Raises Invalid.

    It is the same for all of them, whatever they call the volume, and whether they may write. In a namespace that the
    template names, which says itself what pods may do, it is as the template has it.
    """
    use = Use(
        volume=_SHARED_VOLUME,
        template=use.template,
        parameters=use.parameters,
        directory=_SHARED_DIRECTORY,
        fs_group=use.fs_group,
        persistent_volume=use.persistent_volume,
    )
    rendered = _rendered(use, staged(use.persistent_volume, node))
    metadata, spec = rendered.get("metadata") or {}, rendered["spec"]
    program = _program(use, rendered, pod_rules.CONTAINER, GRACE_OF_SHARED)
    context = {
        **({} if use.template.namespace else _OF_RESTRICTED_PODS),
        **({} if use.fs_group is None else {"fsGroup": use.fs_group}),
        **(spec.get("securityContext") or {}),
    }
    rest = {name: value for name, value in spec.items() if name not in ("containers", "securityContext", "volumes")}
    own: Manifest = {"driver": DRIVER, "volumeAttributes": {"fdPassingEmptyDirName": use.directory}}
    place = {"name": use.volume, "mountPath": pod_rules.OWN_VOLUME, "readOnly": True}
    container = {**program.container, "volumeMounts": [*program.container["volumeMounts"], place]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "mp-",
            "namespace": use.template.namespace or SHARED_NAMESPACE,
            "labels": {**(metadata.get("labels") or {}), TEMPLATE_LABEL: use.template.name},
            "annotations": {**_AUTOSCALER, **(metadata.get("annotations") or {})},
        },
        "spec": {
            "automountServiceAccountToken": "serviceAccountName" in spec,
            "tolerations": [{"operator": "Exists"}],
            **rest,
            "terminationGracePeriodSeconds": program.grace,
            "securityContext": context,
            "containers": [container],
            "volumes": [*program.volumes, {"name": use.volume, "csi": own}],
        },
    }


def on_node(spec: Manifest, node: str) -> Manifest:
    """Return the spec of a pod that has to run on this node, whatever keeps others away; empty: on any."""
    result = {"priorityClassName": PRIORITY_CLASS, "tolerations": [{"operator": "Exists"}], **spec}
    if node:
        # Not spec.nodeName: the scheduler would not be asked whether there is room, nor make any.
        field = {"key": "metadata.name", "operator": "In", "values": [node]}
        terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
        result["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return result


def node_of(spec: Mapping[str, Any]) -> str:
    """Return the node on which a pod has to run, by the spec that `on_node` has returned for it."""
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return str(required["nodeSelectorTerms"][0]["matchFields"][0]["values"][0])


def run(
    template: str, pod: Mapping[str, Any], variables: Mapping[str, Variable], parameters: Mapping[str, str]
) -> Manifest:
    """Return a pod that runs once for a volume, and says in its termination message what came of it. Raises Invalid."""
    rendered = rendered_pod(template, pod, variables, parameters)
    metadata, spec = rendered.get("metadata") or {}, rendered["spec"]
    (given,) = spec["containers"]
    container = {
        **given,
        "resources": given.get("resources") or {"requests": dict(DEFAULT_REQUESTS_OF_RUNS)},
        "terminationMessagePolicy": given.get("terminationMessagePolicy", "FallbackToLogsOnError"),
        "securityContext": _restricted(given.get("securityContext") or {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"labels": metadata.get("labels") or {}, "annotations": metadata.get("annotations") or {}},
        "spec": {
            "automountServiceAccountToken": "serviceAccountName" in spec,
            **spec,
            "restartPolicy": "Never",
            "securityContext": {**_OF_RESTRICTED_PODS, **(spec.get("securityContext") or {})},
            "containers": [container],
        },
    }


def staged(persistent_volume: Mapping[str, Any], node: str) -> dict[str, Variable]:
    """Return the variables of a volume on a node. What an inline volume does not have, yields nothing."""
    spec = persistent_volume.get("spec") or {}
    claim = spec.get("claimRef")
    return {
        "accessModes": spec.get("accessModes"),
        "capacity": size_or_none((spec.get("capacity") or {}).get("storage")),
        "handle": (spec.get("csi") or {}).get("volumeHandle"),
        "node": {"metadata": {"name": node}} if node else None,
        "pv": persistent_volume or None,
        "pvc": {"metadata": claim} if claim else None,
        "volumeMode": spec.get("volumeMode"),
    }


def is_block(persistent_volume: Mapping[str, Any]) -> bool:
    """Return whether the volume is a device."""
    return (persistent_volume.get("spec") or {}).get("volumeMode") == VolumeMode.BLOCK


def _rendered(use: Use, others: Mapping[str, Variable]) -> Manifest:
    variables: dict[str, Variable] = {
        **others,
        "fsGroup": use.fs_group,
        "mountpoint": MOUNTPOINT,
        "readOnly": use.read_only,
    }
    return rendered_pod(use.template.name, use.template.pod, variables, use.parameters)


def rendered_pod(
    template: str, pod: Mapping[str, Any], variables: Mapping[str, Variable], parameters: Mapping[str, str]
) -> Manifest:
    """Return a pod template of a template with the values of its expressions; words are strings. Raises Invalid."""
    try:
        for name, value in variables.items():
            expressions.check_size(name, value)
        result = expressions.render_all(pod, variables, parameters)
        assert isinstance(result, dict)
        for container in result["spec"]["containers"]:
            _write_words(container)
    except ExpressionError as error:
        raise Invalid([Fault(f"the template '{template}'", str(error))]) from None
    return result


def _write_words(container: Manifest) -> None:
    """Make strings of all words of the command and values of variables: the API server takes nothing else there."""
    for name in ("args", "command"):
        if isinstance(words := container.get(name), list):
            container[name] = [word if word is None else expressions.text(word) for word in words]
    for variable in container.get("env") or []:
        if variable.get("value") is not None:
            variable["value"] = expressions.text(variable["value"])


def _program(use: Use, rendered: Manifest, name: str, default_grace: int = GRACE_OF_SIDECAR) -> Program:
    spec = rendered["spec"]
    (given,) = spec["containers"]
    names = {each["name"]: _short(f"{use.container}-{each['name']}") for each in spec.get("volumes") or []}
    mountpoint = _short(f"{use.container}-{pod_rules.MOUNTPOINT_VOLUME}")
    context = given.get("securityContext") or {}
    # What serves a block volume mounts nothing.
    probe = None if is_block(use.persistent_volume) else _startup_probe()
    container = {
        **given,
        "name": name,
        "env": [
            *(given.get("env") or []),
            {"name": SOCKET_VARIABLE, "value": f"{SOCKET_DIRECTORY}/{use.socket}"},
        ],
        "resources": given.get("resources") or {"requests": dict(DEFAULT_REQUESTS)},
        **({"startupProbe": probe} if probe and not given.get("startupProbe") else {}),
        "terminationMessagePolicy": given.get("terminationMessagePolicy", "FallbackToLogsOnError"),
        "securityContext": context if use.template.namespace else _restricted(context),
        "volumeMounts": [
            {"name": use.directory, "mountPath": SOCKET_DIRECTORY},
            {"name": mountpoint, "mountPath": MOUNTPOINT},
            *({**mount, "name": names[mount["name"]]} for mount in given.get("volumeMounts") or []),
        ],
    }
    volumes = [
        {"name": use.directory, "emptyDir": {}},
        {"name": mountpoint, "emptyDir": {}},
        *({**each, "name": names[each["name"]]} for each in spec.get("volumes") or []),
    ]
    return Program(container, volumes, spec.get("terminationGracePeriodSeconds", default_grace))


def _startup_probe() -> Manifest:
    command = ["fusermount3-proxy", "--wait-mounted", MOUNTPOINT]
    return {"exec": {"command": command}, "periodSeconds": 1, "timeoutSeconds": 10, "failureThreshold": TRIES}


def _restricted(context: Manifest) -> Manifest:
    """Return the security context with what Pod Security `restricted` asks for."""
    return {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        **context,
        "capabilities": {"drop": ["ALL"]},
    }


def _short(name: str) -> str:
    """Return `name`, or its beginning with digits that no other name has, if it is too long."""
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
