"""Objects of Kubernetes as YAML: read as the API server would, and written for people and for kubectl. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from fusermount3_controller.faults import Fault, Invalid, quoted

#: Of a file, in characters.
LONGEST_TEXT = 1 << 20
#: Values in one object, with all that its aliases stand for.
_MOST_VALUES = 20000
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
#: How deep values may be nested: far from what this program and Python could not copy or print.
_DEEPEST = 50
_TOO_DEEP = "is nested too deeply"
#: The lists of objects in a pod's spec that the controller looks at, and those within containers.
_LISTS, _LISTS_OF_CONTAINERS = ("containers", "initContainers", "volumes"), ("env", "volumeMounts")

Manifest = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """What Kubernetes makes of YAML: a date is a string; and a key twice is a mistake."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                why = f"the key {quoted(key.value)} is there twice"
                raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes each value where it belongs."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def load(text: str) -> list[Manifest]:
    """Return the objects in the documents of `text`; those of a List are taken out of it. Raises Invalid."""
    if len(text) > LONGEST_TEXT:
        raise Invalid([Fault("", f"has more than {LONGEST_TEXT} characters")])
    try:
        documents = [each for each in yaml.load_all(text, _Loader) if each is not None]
    except (yaml.YAMLError, RecursionError) as error:
        raise Invalid([Fault("", _reason(error))]) from None
    result = []
    for document in documents:
        if not isinstance(document, dict):
            raise Invalid([Fault("", f"must be objects of Kubernetes, not {quoted(document)}")])
        size, height = _measured(document, {})
        if size > _MOST_VALUES:
            raise Invalid([Fault("", f"has an object of more than {_MOST_VALUES} values")])
        if height > _DEEPEST:
            raise Invalid([Fault("", _TOO_DEEP)])
        items = document.get("items") if document.get("kind") == "List" else [document]
        result += [each for each in items or [] if isinstance(each, dict)]
    return result


def dump(manifests: Iterable[Mapping[str, Any]]) -> str:
    """Return the objects as documents of YAML, with their fields in the order in which they are."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, explicit_start=True)


def name_of(manifest: Mapping[str, Any]) -> str:
    """Return kind and name, as in "Pod app"."""
    metadata = manifest.get("metadata")
    name = metadata.get("name") or metadata.get("generateName") if isinstance(metadata, Mapping) else None
    return f"{manifest.get('kind', 'an object without a kind')} {name or 'without a name'}"


def check_storage(manifest: Mapping[str, Any]) -> None:
    """Check the same in a PersistentVolume, a PersistentVolumeClaim or a StorageClass. Raises Invalid."""
    paths = ("metadata", "parameters", "spec", "spec.csi", "spec.csi.volumeAttributes")
    for path in paths:
        value: Any = manifest
        for name in path.split("."):
            value = value.get(name) or {}
            if not _is_object(value):
                raise Invalid([Fault(path, f"must be an object, not {quoted(value)}")])


def check_pod(pod: Mapping[str, Any]) -> None:
    """Check that what the controller looks at in a pod has the right type. Raises Invalid.

    The API server checks this before the controller gets a pod; nobody does with a file.
    """
    faults = [Fault(name, "must be an object") for name in ("metadata", "spec") if not _is_object(pod.get(name))]
    if faults:
        raise Invalid(faults)
    annotations = pod["metadata"].get("annotations") or {}
    if not _is_object(annotations) or not all(isinstance(each, str) for each in annotations.values()):
        faults.append(Fault("metadata.annotations", "must be strings, in quotes"))
    spec = pod["spec"]
    seconds = spec.get("terminationGracePeriodSeconds")
    if seconds is not None and not isinstance(seconds, int):
        faults.append(Fault("spec.terminationGracePeriodSeconds", "must be a number of seconds"))
    if not _is_object(spec.get("securityContext") or {}):
        faults.append(Fault("spec.securityContext", "must be an object"))
    for name in _LISTS:
        field = f"spec.{name}"
        faults += _list_faults(spec.get(name), field)
        if name == "volumes" or faults:
            continue
        for index, container in enumerate(spec.get(name) or []):
            for below in _LISTS_OF_CONTAINERS:
                faults += _list_faults(container.get(below), f"{field}[{index}].{below}")
    for index, volume in enumerate(spec.get("volumes") or []) if not faults else ():
        for source in ("csi", "persistentVolumeClaim", "ephemeral"):
            field = f"spec.volumes[{index}].{source}"
            if not _is_object(value := volume.get(source) or {}):
                faults.append(Fault(field, "must be an object"))
            elif not _is_object(value.get("volumeAttributes") or {}):
                faults.append(Fault(f"{field}.volumeAttributes", "must be an object"))
    if faults:
        raise Invalid(faults)


def _list_faults(value: object, field: str) -> list[Fault]:
    if value is None:
        return []
    if not isinstance(value, list):
        return [Fault(field, "must be a list")]
    return [
        Fault(f"{field}[{index}]", "must be an object with a name")
        for index, each in enumerate(value)
        if not isinstance(each, Mapping) or not isinstance(each.get("name"), str)
    ]


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _measured(value: object, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return how many values there are in `value`, too many if it contains itself, and how deep they are nested."""
    if not isinstance(value, dict | list):
        return 1, 0
    if id(value) not in known:
        known[id(value)] = _MOST_VALUES, 0
        elements = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        below = [_measured(each, known) for each in elements]
        known[id(value)] = 1 + sum(size for size, _ in below), 1 + max((height for _, height in below), default=0)
    return known[id(value)]


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    reason = " ".join(str(error).split())
    if "unhashable key" in reason:
        return f"an expression must be in quotes, for {{ begins an object of YAML: {reason}"
    return f"is not YAML: {reason}"
