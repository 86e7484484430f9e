"""What the pod templates of a VolumeTemplate may say. Pure.

The Pod Security Standard `restricted` is one source of these rules: the containers run in namespaces that enforce it.
What must be set for it is filled in when the template is rendered; here is refused what contradicts it. These fields
can't have expressions, so what is found to be allowed stays so, whatever users say.

Another namespace, which an administrator has made for pods with privileges, has its own Pod Security Standard: there,
the API server decides what is allowed.
"""

import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from fusermount3_controller import expressions
from fusermount3_controller.expressions import ExpressionError
from fusermount3_controller.faults import Fault, quoted, unknown

#: The container's name in a template.
CONTAINER = "fuse"
#: Where the program mounts, an emptyDir; and the directory of the driver's socket.
MOUNTPOINT = "/mnt"
#: Where a mount pod has the volume itself: kubelet sets up only what a container has.
OWN_VOLUME = "/fuse-volume"
MOUNTPOINT_VOLUME = "mountpoint"
SOCKET_DIRECTORY = "/run/fusermount3-proxy"
SOCKET_VARIABLE = "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH"

#: Types of volumes that the standard allows.
_VOLUME_TYPES = (
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
)
#: What an injected container brings with it. All else of a pod is its author's.
_OF_SIDECARS = ("containers", "terminationGracePeriodSeconds", "volumes")
#: What a template may also say of a pod of its own. The node is chosen by where the volume is used.
_OF_PODS = (
    *("automountServiceAccountToken", "dnsConfig", "dnsPolicy", "enableServiceLinks", "hostAliases"),
    *("imagePullSecrets", "priorityClassName", "securityContext", "serviceAccountName"),
)
#: What it may also say of a pod that ends by itself.
_OF_RUNS = ("activeDeadlineSeconds", "restartPolicy")
#: What a template may say of the container; `restartPolicy` and the startup probe are the controller's.
_OF_CONTAINERS = (
    *("args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe", "name", "ports"),
    *("readinessProbe", "resources", "securityContext", "startupProbe", "terminationMessagePath"),
    *("terminationMessagePolicy", "volumeMounts", "workingDir"),
)
_OF_METADATA = ("annotations", "labels")
_SHELLS = ("ash", "bash", "dash", "sh")
#: Of a security context, fields with one value that the standard allows.
_ONLY = {
    "allowPrivilegeEscalation": (False, "the program must not gain privileges"),
    "privileged": (False, "no container of ours needs privileges"),
    "runAsNonRoot": (True, "the program must not run as root"),
    "procMount": ("Default", "all of /proc stays masked"),
}
_SECCOMP_TYPES = ("Localhost", "RuntimeDefault")
_SELINUX_TYPES = ("", "container_engine_t", "container_init_t", "container_kvm_t", "container_t")
_CONTAINER_NAME = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class Role(Enum):
    """What a pod template is for: a container in pods of users, a pod that serves a volume, or one that ends.

    The last ones run when a volume is validated, created, expanded, unstaged or deleted.
    """

    SIDECAR = (_OF_SIDECARS, "a sidecar is a part of a pod that decides this", True)
    MOUNT_POD = ((*_OF_SIDECARS, *_OF_PODS), "a template can't decide this", True)
    #: In a namespace that the template names.
    FREE_MOUNT_POD = ((*_OF_SIDECARS, *_OF_PODS), "a template can't decide this", False)
    RUN = ((*_OF_SIDECARS, *_OF_PODS, *_OF_RUNS), "a template can't decide this", True)

    def __init__(self, fields: Sequence[str], why: str, is_restricted: bool) -> None:
        #: Of a pod's spec, what such a template may have; and why it has nothing else.
        self.fields = fields
        self.why = why
        #: Whether the namespace enforces `restricted`.
        self.is_restricted = is_restricted


def faults(pod: Mapping[str, Any], field: str, role: Role) -> Iterator[Fault]:
    """Yield what is wrong with a pod template of a template."""
    yield from _unknown(pod, ("metadata", "spec"), field)
    metadata, spec = pod.get("metadata") or {}, pod.get("spec")
    if not isinstance(spec, Mapping):
        yield Fault(f"{field}.spec", "must be an object, the pod's spec")
        return
    if not isinstance(metadata, Mapping):
        yield Fault(f"{field}.metadata", f"must be an object, not {quoted(metadata)}")
    else:
        known = () if role is Role.SIDECAR else _OF_METADATA
        yield from _unknown(metadata, known, f"{field}.metadata", role.why)
        yield from _object_faults(metadata, _OF_METADATA, f"{field}.metadata")
    field = f"{field}.spec"
    yield from _unknown(spec, role.fields, field, role.why)
    if spec.get("restartPolicy", "Never") != "Never":
        yield Fault(f"{field}.restartPolicy", "must be Never: the controller decides whether it runs again")
    seconds = spec.get("terminationGracePeriodSeconds", 60)
    if not isinstance(seconds, int) or isinstance(seconds, bool) or seconds < 1:
        yield Fault(f"{field}.terminationGracePeriodSeconds", f"must be a number of seconds, not {quoted(seconds)}")
    names: set[str] = set()
    for where, volume in _elements(spec, "volumes", field):
        if isinstance(volume, Fault):
            yield volume
            continue
        names.add(str(volume.get("name")))
        yield from _volume_faults(volume, where, role)
    yield from _container_faults(spec, field, names, role)
    if role is not Role.SIDECAR:
        yield from _context_faults(spec, field, role, of_pod=True)


def _unknown(value: Mapping[str, Any], known: Sequence[str], field: str, why: str = "") -> Iterator[Fault]:
    for name in value:
        if name not in known:
            yield Fault(f"{field}.{name}", why) if why else Fault(field, unknown(name, known))


def _object_faults(value: object, names: Sequence[str], field: str) -> Iterator[Fault]:
    """Yield a fault unless `value` is missing, or an object in which these names have objects."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        yield Fault(field, f"must be an object, not {quoted(value)}")
        return
    for name in names:
        yield from _object_faults(value.get(name), (), f"{field}.{name}")


def _elements(parent: Mapping[str, Any], name: str, field: str) -> Iterator[tuple[str, Mapping[str, Any] | Fault]]:
    """Yield the objects of a list, each after its field; or what is wrong with them."""
    values = parent.get(name) or []
    where = f"{field}.{name}"
    if not isinstance(values, list):
        yield where, Fault(where, f"must be a list, not {quoted(values)}")
        return
    for index, value in enumerate(values):
        if isinstance(value, Mapping):
            yield f"{where}[{index}]", value
        else:
            yield where, Fault(f"{where}[{index}]", f"must be an object, not {quoted(value)}")


def _volume_faults(volume: Mapping[str, Any], field: str, role: Role) -> Iterator[Fault]:
    name = volume.get("name")
    if not isinstance(name, str) or expressions.has_any(name):
        yield Fault(f"{field}.name", "must be a name, written out")
    elif name == MOUNTPOINT_VOLUME and role is not Role.RUN:
        yield Fault(f"{field}.name", "is the name of the volume on which the program mounts; choose another one")
    for kind, source in volume.items():
        if kind in ("name", *_VOLUME_TYPES):
            continue
        if role.is_restricted:
            allowed = ", ".join(_VOLUME_TYPES)
            yield Fault(f"{field}.{kind}", f"Pod Security 'restricted' does not allow it; it allows {allowed}")
        else:
            yield from _written_out(source, f"{field}.{kind}", "no expression decides what of the node a pod has")
    if len(volume.keys() - {"name"}) != 1:
        yield Fault(field, "must have a name and one type, such as emptyDir")


def _container_faults(spec: Mapping[str, Any], field: str, volumes: set[str], role: Role) -> Iterator[Fault]:
    containers = spec.get("containers")
    field = f"{field}.containers"
    if not isinstance(containers, list) or len(containers) != 1 or not isinstance(containers[0], Mapping):
        yield Fault(field, "must be one container" + ("" if role is Role.RUN else f", with the name '{CONTAINER}'"))
        return
    (container,) = containers
    field = f"{field}[0]"
    name = container.get("name")
    if role is not Role.RUN and name != CONTAINER:
        yield Fault(f"{field}.name", f"must be '{CONTAINER}', not {quoted(name)}")
    elif not isinstance(name, str) or not _CONTAINER_NAME.fullmatch(name):
        yield Fault(f"{field}.name", f"must be of at most 63 lower-case letters, digits and '-', not {quoted(name)}")
    if not isinstance(container.get("image"), str) or not container["image"]:
        yield Fault(f"{field}.image", "is missing")
    yield from _unknown(container, _OF_CONTAINERS, field)
    yield from _object_faults(container.get("resources"), ("limits", "requests"), f"{field}.resources")
    yield from _context_faults(container, field, role, of_pod=False)
    yield from _port_faults(container, field)
    yield from _handler_faults(container, field)
    yield from _mount_faults(container, field, volumes, role)
    yield from _environment_faults(container, field)
    yield from _script_faults(container, field)


def _written_out(value: object, field: str, why: str) -> Iterator[Fault]:
    """Yield a fault for the first expression in a value."""
    for where, text in expressions.strings(value, field):
        if expressions.has_any(text):
            yield Fault(where, f"must be written out: {why}")
            return


def _context_faults(parent: Mapping[str, Any], field: str, role: Role, *, of_pod: bool) -> Iterator[Fault]:
    context = parent.get("securityContext") or {}
    field = f"{field}.securityContext"
    if not isinstance(context, Mapping):
        yield Fault(field, f"must be an object, not {quoted(context)}")
        return
    faults = list(_written_out(context, field, "no expression decides what is allowed"))
    yield from faults
    if role.is_restricted and not faults:
        yield from _restricted_faults(context, field, of_pod=of_pod)


def _restricted_faults(context: Mapping[str, Any], field: str, *, of_pod: bool) -> Iterator[Fault]:
    for name, (value, why) in _ONLY.items():
        if name in context and context[name] != value:
            yield Fault(f"{field}.{name}", f"must be {json.dumps(value)}: {why}")
    if context.get("runAsUser") == 0:
        yield Fault(f"{field}.runAsUser", "must not be 0: the program must not run as root")
    profile = context.get("seccompProfile") or {"type": "RuntimeDefault"}
    if not isinstance(profile, Mapping) or profile.get("type") not in _SECCOMP_TYPES:
        yield Fault(f"{field}.seccompProfile.type", f"must be {' or '.join(_SECCOMP_TYPES)}")
    profile = context.get("appArmorProfile") or {"type": "RuntimeDefault"}
    if not isinstance(profile, Mapping) or profile.get("type") not in _SECCOMP_TYPES:
        yield Fault(f"{field}.appArmorProfile.type", f"must be {' or '.join(_SECCOMP_TYPES)}")
    options = context.get("seLinuxOptions") or {}
    if not isinstance(options, Mapping) or options.get("type", "") not in _SELINUX_TYPES:
        yield Fault(f"{field}.seLinuxOptions.type", f"must be one of {', '.join(filter(None, _SELINUX_TYPES))}")
    elif options.get("user") or options.get("role"):
        yield Fault(f"{field}.seLinuxOptions", "must have no user and no role")
    if "windowsOptions" in context:
        yield Fault(f"{field}.windowsOptions", "the driver is for Linux")
    if of_pod:
        if context.get("sysctls"):
            yield Fault(f"{field}.sysctls", "a FUSE program needs none")
    else:
        yield from _capability_faults(context, field)


def _capability_faults(context: Mapping[str, Any], field: str) -> Iterator[Fault]:
    capabilities = context.get("capabilities") or {}
    if not isinstance(capabilities, Mapping) or capabilities.get("add"):
        yield Fault(f"{field}.capabilities.add", "the program needs no capability: the broker mounts for it")
    elif capabilities.get("drop", ["ALL"]) != ["ALL"]:
        yield Fault(f"{field}.capabilities.drop", "must be [ALL], or left out")


def _port_faults(container: Mapping[str, Any], field: str) -> Iterator[Fault]:
    for where, port in _elements(container, "ports", field):
        if isinstance(port, Fault):
            yield port
        elif port.get("hostPort"):
            yield Fault(f"{where}.hostPort", "Pod Security does not allow ports of the node")


def _handler_faults(container: Mapping[str, Any], field: str) -> Iterator[Fault]:
    """Probes and hooks must not name a host: the kubelet, which connects, is not confined as the pod is."""
    probes = {name: container.get(name) for name in ("livenessProbe", "readinessProbe", "startupProbe")}
    lifecycle = container.get("lifecycle") or {}
    hooks = {f"lifecycle.{name}": each for name, each in lifecycle.items()} if isinstance(lifecycle, Mapping) else {}
    for name, handler in (probes | hooks).items():
        for kind in ("httpGet", "tcpSocket"):
            action = handler.get(kind) if isinstance(handler, Mapping) else None
            if isinstance(action, Mapping) and "host" in action:
                yield Fault(f"{field}.{name}.{kind}.host", "Pod Security does not allow another host")


def _mount_faults(container: Mapping[str, Any], field: str, volumes: set[str], role: Role) -> Iterator[Fault]:
    reserved = () if role is Role.RUN else (MOUNTPOINT, OWN_VOLUME, SOCKET_DIRECTORY)
    for where, mount in _elements(container, "volumeMounts", field):
        if isinstance(mount, Fault):
            yield mount
            continue
        if str(mount.get("name")) not in volumes:
            yield Fault(f"{where}.name", f"there is no volume {quoted(mount.get('name'))} in the template")
        path = mount.get("mountPath")
        if not isinstance(path, str) or not path.startswith("/") or expressions.has_any(path):
            yield Fault(f"{where}.mountPath", "must be an absolute path, written out")
        elif any(_is_within(path, own) for own in reserved):
            why = f"{MOUNTPOINT}, {OWN_VOLUME} and {SOCKET_DIRECTORY} have volumes of the controller"
            yield Fault(f"{where}.mountPath", why)
        if "mountPropagation" in mount:
            yield Fault(f"{where}.mountPropagation", "the program mounts through the broker, which needs none")


def _is_within(path: str, directory: str) -> bool:
    normal = posixpath.normpath(path)
    return normal == directory or normal.startswith(f"{directory}/")


def _environment_faults(container: Mapping[str, Any], field: str) -> Iterator[Fault]:
    for where, variable in _elements(container, "env", field):
        if isinstance(variable, Fault):
            yield variable
        elif variable.get("name") == SOCKET_VARIABLE:
            yield Fault(f"{where}.name", "the controller sets this variable")


def _script_faults(container: Mapping[str, Any], field: str) -> Iterator[Fault]:
    """In a script for a shell, what users say must be quoted."""
    words = [
        (f"{field}.{name}[{index}]", word)
        for name in ("command", "args")
        if isinstance(container.get(name), list)
        for index, word in enumerate(container[name])
        if isinstance(word, str)
    ]
    if not words or posixpath.basename(words[0][1]) not in _SHELLS:
        return
    options = [index for index, (_, word) in enumerate(words) if word.startswith("-") and word.endswith("c")]
    if not options or options[0] + 1 >= len(words):
        return
    where, script = words[options[0] + 1]
    try:
        if not expressions.are_quoted_for_shell(script):
            yield Fault(where, "expressions in a script must end with `| tobash`, or users could write commands")
    except ExpressionError:
        return  # told as a fault of the expression
