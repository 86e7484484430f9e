"""docs/provisioning.md: its objects get a volume, and its words and numbers are those of the controller."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from fusermount3_controller import claims, pod_volume_steps, pod_volumes, rendering, run_results
from fusermount3_controller.offline import rendered
from fusermount3_controller.pod_volumes import Phase
from fusermount3_controller.served_volumes import Known
from fusermount3_controller.volume_templates import parse
from tests import cluster
from tests.e2e.documented import PAGES, blocks
from tests.kubernetes.objects import PROVISIONERS

PAGE = PAGES["provisioning.md"].read_text()
TEXT = " ".join(PAGE.split())
CLASS, CLAIM, SCRATCH = (
    yaml.safe_load(each.text) for each in blocks() if (each.page, each.language) == ("provisioning.md", "yaml")
)
CLUSTER = Path(cluster.__file__).parent
(S3,) = (path for path in PROVISIONERS if path.stem == "s3")


def test_the_claim_gets_a_volume_of_the_template() -> None:
    template = parse(yaml.safe_load(S3.read_text()))
    assert CLAIM["spec"]["storageClassName"] == CLASS["metadata"]["name"]
    CLAIM["metadata"]["uid"] = "1"
    volume = pod_volumes.parse(claims.pod_volume(CLAIM, CLASS, Known({"s3": template})))
    assert volume.spec["parameters"] == {"endpoint": "https://s3.example"}


def test_the_claim_for_memory_gets_it_and_no_pod_makes_it() -> None:
    (file,) = (path for path in PROVISIONERS if path.stem == SCRATCH["spec"]["storageClassName"])
    template = parse(yaml.safe_load(file.read_text()))
    assert template.provisioning.pods == {}
    assert SCRATCH["spec"]["accessModes"][0] in template.provisioning.access_modes


def test_its_pods_can_be_seen() -> None:
    pods, faults = rendered([("s3.yaml", yaml.safe_load(S3.read_text()))], {})
    assert faults == []
    assert [each["spec"]["containers"][0]["name"] for each in pods] == ["app", "fuse", "rclone", "rclone"]


def test_each_phase_is_explained() -> None:
    assert re.findall(r"^\| `([A-Z]\w+)` \|", PAGE, re.MULTILINE) == list(Phase)


def test_its_numbers_are_those_of_the_code() -> None:
    first, longest = pod_volume_steps.FIRST_PAUSE, pod_volume_steps.LONGEST_PAUSE
    assert f"after {first} seconds, then after twice as long each time, up to {longest} seconds" in TEXT
    assert [pod_volume_steps.pause_after(number) for number in (1, 2, 100)] == [first, 2 * first, longest]
    cpu, memory = rendering.DEFAULT_REQUESTS_OF_RUNS.values()
    assert f"requests of {cpu} CPU and {memory} memory" in TEXT
    assert "A handle has at most 256 letters, digits and `@%+=:./_~-`" in TEXT
    assert run_results.is_handle("a" * 256) and not run_results.is_handle("a" * 257)
    assert all(run_results.is_handle(f"a{character}") for character in "@%+=:./_~-")
    for annotation in (pod_volumes.RETRY, pod_volumes.ABANDON):
        assert f"{annotation}=" in TEXT
    lines = {path.stem: len(path.read_text().splitlines()) for path in PROVISIONERS}
    assert f"PaV: 127 | {lines['s3']} lines |" in PAGE
    assert f"PaV: 85 | {lines['gocryptfs']} lines |" in PAGE


def test_each_provisioner_is_listed_with_its_parameters() -> None:
    found = {}
    for path in PROVISIONERS:
        parameters = ", ".join(yaml.safe_load(path.read_text())["spec"].get("parameters", {}))
        found[f"[{path.stem}](../packaging/kubernetes/provisioners/{path.name})"] = parameters
    assert dict(re.findall(r"^\| (\[\w+\]\(\S+\)) \| .*? \| ?(.*?) ?\|$", PAGE, re.MULTILINE)) == found


def test_each_test_that_it_names_is_there() -> None:
    named = set(re.findall(r"`((?:long/)?test_\w+\.py)`", PAGE))
    assert "test_scenarios_of_pav.py" in named
    assert [each for each in sorted(named) if not (CLUSTER / each).is_file()] == []
