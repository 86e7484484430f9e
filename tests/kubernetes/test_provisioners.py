"""Test the templates that create volumes: their pods are valid, restricted, and can delete what was never there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from fusermount3_controller import offline
from tests.kubernetes.objects import PROVISIONERS, Object, containers, is_pulled_once, validate

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("file", PROVISIONERS, ids=lambda path: path.stem)
def test_the_pods_of_a_provisioner_are_valid_and_restricted(file: Path) -> None:
    manifest: Object = yaml.safe_load(file.read_text())
    assert manifest["metadata"]["name"] == file.stem
    pods, faults = offline.rendered([(file.name, manifest)], {})
    assert faults == []
    stages = [each["metadata"].get("labels", {}).get("fusermount3-proxy.dev/stage") for each in pods]
    for stage in ("volumeCreation", "volumeDeletion"):
        assert (stage in stages) == (file.stem != "memory"), "of memory, nothing is left that could be deleted"
    # Its own Pod Security Standard says what pods there may do.
    free = manifest["spec"]["volumeStaging"].get("namespace")
    for pod in pods:
        validate(pod)
        assert all(is_pulled_once(each["image"]) for each in containers(pod))
        if free and pod["metadata"].get("namespace") == free:
            continue
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in containers(pod):
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]} and not context.get("privileged")


#: The measure of the paper on Pods-as-Volumes (WoC '21), whose provisioners of buckets and encryption have so many.
@pytest.mark.parametrize(("name", "lines"), [("s3", 62), ("gocryptfs", 70)])
def test_a_provisioner_is_short(name: str, lines: int) -> None:
    (file,) = (path for path in PROVISIONERS if path.stem == name)
    assert len(file.read_text().splitlines()) <= lines
