"""The fields of VolumeTemplates by which volumes are created and deleted, called as in Pods-as-Volumes. Pure.

Only shared volumes have them: a sidecar's volume is whatever its pod says.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from fusermount3_controller import pod_rules, template_expressions
from fusermount3_controller.expressions import has_any, paths_in
from fusermount3_controller.faults import Fault, object_in, quoted, unknown_in
from fusermount3_controller.pod_rules import Role
from fusermount3_controller.quantities import size
from fusermount3_controller.template_expressions import Stage

_E = TypeVar("_E", bound=StrEnum)


class Mode(StrEnum):
    """Whether volumes are made for claims, or exist and are named by an administrator's PersistentVolume."""

    DYNAMIC = "Dynamic"
    STATIC = "Static"


class VolumeMode(StrEnum):
    """What a pod gets: a directory, or a device."""

    FILESYSTEM = "Filesystem"
    BLOCK = "Block"


class AccessMode(StrEnum):
    """Who may use a volume at the same time (core/v1, PersistentVolumeAccessMode)."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_ONLY_MANY = "ReadOnlyMany"
    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"


class Provisioning(NamedTuple):
    """What a template says of volumes beside how they are staged; capacities are in bytes.

    `handle` and `capacity` are those of a volume that is created, with expressions; empty: the default handle, and what
    the claim requests. `pods`: pod templates of stages.
    """

    modes: tuple[Mode, ...] = (Mode.STATIC,)
    volume_modes: tuple[VolumeMode, ...] = (VolumeMode.FILESYSTEM,)
    access_modes: tuple[AccessMode, ...] = tuple(AccessMode)
    min_capacity: int | None = None
    max_capacity: int | None = None
    handle: str = ""
    capacity: str = ""
    pods: Mapping[Stage, Mapping[str, Any]] = {}


#: The stages whose pods end, and what else can be said of them.
RUNS: Mapping[Stage, tuple[str, ...]] = {
    Stage.VALIDATION: ("volumeModes", "accessModes", "minCapacity", "maxCapacity"),
    Stage.CREATION: ("handle", "capacity"),
    Stage.EXPANSION: (),
    Stage.UNSTAGING: (),
    Stage.DELETION: (),
}
FIELDS = ("provisioningModes", *RUNS)
#: Stages of volumes that are made for claims.
_OF_DYNAMIC = (Stage.CREATION, Stage.EXPANSION, Stage.UNSTAGING, Stage.DELETION)


def parse(spec: Mapping[str, Any], parameters: frozenset[str], faults: list[Fault], *, shared: bool) -> Provisioning:
    """Return what the spec of a template says; what is wrong with it is added to `faults`."""
    if not shared:
        why = "has no effect with placement Sidecar: such volumes are neither created nor unstaged"
        faults += [Fault(f"spec.{name}", why) for name in FIELDS if name in spec]
        return Provisioning()
    modes = _choices(spec, "provisioningModes", "spec.provisioningModes", Mode, faults) or (Mode.STATIC,)
    given = {stage: object_in(spec, stage, f"spec.{stage}", faults) for stage in RUNS}
    for stage, fields in RUNS.items():
        faults += unknown_in(given[stage], (*fields, "podTemplate"), f"spec.{stage}")
        if stage in _OF_DYNAMIC and stage in spec and Mode.DYNAMIC not in modes:
            faults.append(Fault(f"spec.{stage}", "has no effect unless provisioningModes has Dynamic"))
    pods = {stage: pod for stage in RUNS if (pod := _pod(given[stage], stage, parameters, faults))}
    if Stage.CREATION in pods and Stage.DELETION not in pods:
        faults.append(Fault(f"spec.{Stage.DELETION}.podTemplate", "is missing: what is created has to be deleted"))
    validation, field = given[Stage.VALIDATION], f"spec.{Stage.VALIDATION}"
    least, most = (_size(validation, name, f"{field}.{name}", faults) for name in ("minCapacity", "maxCapacity"))
    if least and most and least > most:
        faults.append(Fault(f"{field}.minCapacity", "is more than maxCapacity"))
    return Provisioning(
        modes=modes,
        volume_modes=_choices(validation, "volumeModes", f"{field}.volumeModes", VolumeMode, faults)
        or Provisioning().volume_modes,
        access_modes=_choices(validation, "accessModes", f"{field}.accessModes", AccessMode, faults)
        or tuple(AccessMode),
        min_capacity=least,
        max_capacity=most,
        handle=_handle(given[Stage.CREATION], parameters, faults),
        capacity=_capacity(given[Stage.CREATION], parameters, faults),
        pods=pods,
    )


def capacity_faults(field: str, capacity: int | None, allowed: Provisioning) -> Iterator[Fault]:
    """Yield what is wrong with the capacity of a volume, in bytes; None: it has none."""
    if capacity is not None and allowed.max_capacity and capacity > allowed.max_capacity:
        yield Fault(field, f"a volume has at most {allowed.max_capacity} bytes, not {capacity}")
    if capacity is not None and allowed.min_capacity and capacity < allowed.min_capacity:
        yield Fault(field, f"a volume has at least {allowed.min_capacity} bytes, not {capacity}")


def block_faults(field: str, mode: str, options: Iterable[object]) -> Iterator[Fault]:
    """Yield what is wrong with the mount options of a volume: nobody mounts one with the mode `Block`.

    Kubernetes ignores them. Here they are refused, for who writes `ro` must not find out that pods can write.
    """
    if mode == VolumeMode.BLOCK and any(options):
        yield Fault(field, "a volume with volumeMode Block is not mounted, so it can have none: leave them out")


def _choices(parent: Mapping[str, Any], name: str, field: str, kind: type[_E], faults: list[Fault]) -> tuple[_E, ...]:
    given = parent.get(name)
    if given is None:
        return ()
    if not isinstance(given, list) or not given or any(each not in list(kind) for each in given):
        faults.append(Fault(field, f"must be a list of {', '.join(kind)}, not {quoted(given)}"))
        return ()
    return tuple(kind(each) for each in dict.fromkeys(given))


def _size(parent: Mapping[str, Any], name: str, field: str, faults: list[Fault]) -> int | None:
    if parent.get(name) is None:
        return None
    try:
        return size(parent[name])
    except ValueError as error:
        faults.append(Fault(field, str(error)))
        return None


def _text(parent: Mapping[str, Any], name: str, parameters: frozenset[str], faults: list[Fault]) -> str:
    """Return a field of a volume that is to be created, which may have expressions."""
    field, value = f"spec.{Stage.CREATION}.{name}", parent.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or not value:
        faults.append(Fault(field, f"must be a string, not {quoted(value)}"))
        return ""
    faults += template_expressions.text_faults(value, field, template_expressions.names(Stage.CREATION, parameters))
    return value


def _handle(parent: Mapping[str, Any], parameters: frozenset[str], faults: list[Fault]) -> str:
    value = _text(parent, "handle", parameters, faults)
    if value and not faults and not paths_in(value) & {"defaultHandle", "pvc.metadata.uid"}:
        why = "must have {{ defaultHandle }} in it: who deletes a volume would delete another one with the same handle"
        faults.append(Fault(f"spec.{Stage.CREATION}.handle", why))
    return value


def _capacity(parent: Mapping[str, Any], parameters: frozenset[str], faults: list[Fault]) -> str:
    value = parent.get("capacity")
    if isinstance(value, str) and has_any(value):
        return _text(parent, "capacity", parameters, faults)
    found = _size(parent, "capacity", f"spec.{Stage.CREATION}.capacity", faults)
    return "" if found is None else str(found)


def _pod(given: Mapping[str, Any], stage: Stage, parameters: frozenset[str], faults: list[Fault]) -> Mapping[str, Any]:
    field = f"spec.{stage}.podTemplate"
    pod = object_in(given, "podTemplate", field, faults)
    if pod:
        faults += pod_rules.faults(pod, field, Role.RUN)
        faults += template_expressions.faults(pod, field, template_expressions.names(stage, parameters))
    return pod
