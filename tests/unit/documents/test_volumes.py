"""docs/volumes.md: what users write works with the template of docs/templates.md, with either placement."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from fusermount3_controller import mount_pod_events, pod_annotations
from fusermount3_controller.offline import rendered
from tests.e2e.documented import PAGES, blocks

if TYPE_CHECKING:
    from fusermount3_controller.rendering import Manifest

PAGE = PAGES["volumes.md"].read_text()
POD, STORAGE, INLINE = [each.text for each in blocks() if (each.page, each.language) == ("volumes.md", "yaml")]
(TEMPLATE,) = [
    yaml.safe_load(each.text)
    for each in blocks()
    if each.page == "templates.md" and "kind: VolumeTemplate" in each.text and each.language == "yaml"
]


def template(placement: str, **spec: Any) -> Manifest:
    result: Manifest = yaml.safe_load(yaml.safe_dump(TEMPLATE))
    result["spec"] |= {"placement": placement, **spec}
    return result


def pods_of(*manifests: Manifest) -> list[Manifest]:
    result, faults = rendered([("page", each) for each in manifests], {})
    assert faults == []
    for each in result:
        kubernetes_validate.validate(each, "1.30", strict=True)
    return result


def with_inline() -> Manifest:
    pod: Manifest = yaml.safe_load(POD)
    pod["spec"] |= yaml.safe_load(INLINE)
    return pod


def test_a_pod_with_a_claim_gets_a_sidecar_or_a_mount_pod() -> None:
    pod, storage = yaml.safe_load(POD), list(yaml.safe_load_all(STORAGE))
    for each in storage:
        kubernetes_validate.validate(each, "1.30", strict=True)
    (injected,) = pods_of(template("Sidecar"), *storage, pod)
    assert injected["spec"]["initContainers"][0]["command"][1] == "photos"
    same, mount_pod = pods_of(template("Shared"), *storage, pod)
    assert same == pod
    assert mount_pod["spec"]["containers"][0]["command"][1] == "photos"


def test_six_lines_are_enough_without_a_claim() -> None:
    (volume,) = yaml.safe_load(INLINE)["volumes"]
    assert len(textwrap.dedent(INLINE).splitlines()) == 1 + 6
    assert volume["csi"]["volumeAttributes"].keys() == {"volumeTemplate", "bucket"}
    (injected,) = pods_of(template("Sidecar"), with_inline())
    assert injected["spec"]["initContainers"][0]["command"][1] == "photos"
    assert len(pods_of(template("Shared", allowInline=True), with_inline())) == 2


@pytest.mark.parametrize("change", [{"spec": {"hostUsers": False}}, {"volumes": INLINE}])
def test_what_a_shared_volume_is_not_for_is_refused(change: Any) -> None:
    pod, storage = yaml.safe_load(POD), list(yaml.safe_load_all(STORAGE))
    pod = with_inline() if "volumes" in change else pod | {"spec": {**pod["spec"], **change["spec"]}}
    assert rendered([("page", each) for each in (template("Shared"), *storage, pod)], {})[1]


def test_the_events_are_those_that_are_written() -> None:
    for reason in mount_pod_events._TYPES:
        assert f"| `{reason}` |" in PAGE
        assert f"`{reason}" in PAGES["troubleshooting.md"].read_text()


def test_whoever_migrates_is_told_of_annotations_that_there_are() -> None:
    page, prefix = PAGES["migrating.md"].read_text(), pod_annotations._PREFIX
    told = {f"{prefix}{name}" for name in re.findall(rf"`{re.escape(prefix)}([a-z-]+)", page)}
    of_device_plugin = f"{prefix}fuse"
    assert told == {pod_annotations.INJECT, pod_annotations.ADDITIONAL_MOUNTS, of_device_plugin}
    names = {f"{resource}-{kind}" for resource in pod_annotations.RESOURCES for kind in ("limit", "request")}
    assert names <= set(re.findall(r"[`/]([a-z-]+)`", page))
