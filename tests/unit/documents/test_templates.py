"""docs/templates.md: its commands print pods, its examples work together, its tables have what the controller has."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest
import yaml
from click.testing import CliRunner

from fusermount3_controller import (
    cli,
    cluster_cache,
    expressions,
    mount_pod_steps,
    mount_pods,
    pod_annotations,
    pod_rules,
    provisioning_fields,
    rendering,
    serving_certificates,
    template_expressions,
    template_parameters,
    volume_templates,
)
from fusermount3_controller.admission import RESULTS
from fusermount3_controller.controller_metrics import FAILED, MALFORMED, Metrics
from fusermount3_controller.offline import rendered
from fusermount3_controller.served_volumes import Kind
from fusermount3_controller.template_expressions import Stage
from tests.e2e.documented import PAGES, ROOT, block, blocks

if TYPE_CHECKING:
    from fusermount3_controller.rendering import Manifest

PAGE = PAGES["templates.md"].read_text()
TEMPLATES = ROOT / "packaging/kubernetes/templates"
OF_PAGE = [yaml.safe_load(each.text) for each in blocks() if (each.page, each.language) == ("templates.md", "yaml")]
EXAMPLES = [each for each in OF_PAGE if each["kind"] != "Kustomization"]


def rows(heading: str) -> dict[str, str]:
    """Return the rows of the table whose first column has this heading, by their first column."""
    (table,) = re.findall(rf"^\| {re.escape(heading)} .*\n\|[-| ]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return dict(re.findall(r"^\| (.*?) \| (.*) \|$", table, re.MULTILINE))


@pytest.mark.parametrize("command", block("templates.md", "fusermount3-controller render").commands)
def test_a_command_prints_a_pod(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(command)
    assert program == "fusermount3-controller"
    result = CliRunner().invoke(cli.commands, words)
    assert (result.exit_code, yaml.safe_load(result.output)["kind"]) == (0, "Pod")


def test_the_command_for_a_new_one_prints_a_template() -> None:
    program, *words = shlex.split(block("templates.md", "fusermount3-controller new-template").text)
    assert program == "fusermount3-controller"
    result = CliRunner().invoke(cli.commands, words)
    assert (result.exit_code, result.stderr) == (0, "")
    assert list(volume_templates.parse(yaml.safe_load(result.stdout)).parameters) == ["bucket"]


def test_the_examples_are_a_template_and_a_pod_that_uses_it() -> None:
    result, faults = rendered([("page", each) for each in EXAMPLES], {})
    assert faults == []
    (pod,) = result
    assert pod["spec"]["initContainers"][0]["command"][:3] == ["s3fs", "photos", "/mnt"]


def test_the_mistakes_are_told_as_shown() -> None:
    template, pod = EXAMPLES
    (container,) = template["spec"]["volumeStaging"]["podTemplate"]["spec"]["containers"]
    wrong: Manifest = yaml.safe_load(yaml.safe_dump(template).replace("name: s3\nspec", "name: s3fs\nspec"))
    wrong["spec"]["volumeStaging"]["podTemplate"]["spec"]["containers"] = [
        {"name": "fuse", "image": container["image"], "args": ["s3fs", "{{ params.bukcet }}"]}
    ]
    said = rendered([("template.yaml", wrong)], {})[1]
    pod["spec"]["volumes"][0]["csi"]["volumeAttributes"]["bucket"] = "Photos"
    said += rendered([("template.yaml", template), ("pod.yaml", pod)], {})[1]
    (shown,) = [each.text for each in blocks() if (each.page, each.language) == ("templates.md", "text")]
    assert shown.splitlines() == said


def test_each_template_is_listed_with_its_parameters() -> None:
    found = {}
    for file in sorted(TEMPLATES.glob("*.yaml")):
        manifest = yaml.safe_load(file.read_text())
        if manifest["kind"] == "VolumeTemplate":
            parameters = manifest["spec"]["parameters"].items()
            names = [f"**{name}**" if each.get("required") else name for name, each in parameters]
            found[f"[{file.stem}](../packaging/kubernetes/templates/{file.name})"] = ", ".join(names)
    assert rows("template") == found


def test_each_name_is_explained() -> None:
    assert set(re.findall(r"`(\w+)`", " ".join(rows("name")))) == template_expressions.OF_SIDECARS
    used: dict[str, set[Stage]] = {}
    for stage in Stage:
        for name in template_expressions.VARIABLES[stage] | template_expressions.OBJECTS[stage]:
            used.setdefault(name, set()).add(stage)
    told = {name for names in rows("variable with `Shared`") for name in re.findall(r"`(\w+)`", names)}
    assert told == used.keys() - template_expressions.OF_SIDECARS
    assert f"at most {expressions.LARGEST_OBJECT} characters of JSON" in " ".join(PAGE.split())
    assert set(re.findall(r"`(\w+)`", " ".join(rows("filter")))) == set(expressions.FILTERS)
    known = {f"parameters.NAME.{name}" for name in (*template_parameters.Parameter._fields, "description")}
    known |= {"parameters", "placement", "volumeStaging.podTemplate", *volume_templates.SHARING_FIELDS}
    known |= {"provisioningModes", "volumeStaging.namespace"}
    known |= {
        f"{stage}.{name}" for stage, names in provisioning_fields.RUNS.items() for name in (*names, "podTemplate")
    }
    assert {name for names in rows("field of `spec`") for name in re.findall("`([^`]*)`", names)} == known
    written = {pod_annotations.INJECT, pod_annotations.ADDITIONAL_MOUNTS, pod_annotations.ORIGINAL_GRACE}
    written |= {
        f"fusermount3-proxy.dev/{name}-{kind}" for name in pod_annotations.RESOURCES for kind in ("limit", "request")
    }
    assert set(re.findall(r"`(.*?)`", " ".join(rows("annotation of the pod")))) == written


def test_numbers_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"at most {expressions.LONGEST_SOURCE} characters, what comes out of it {expressions.LONGEST_RESULT}" in text
    assert f"and a value {template_parameters.LONGEST_VALUE}." in text
    assert f"of at least {rendering.GRACE_OF_SIDECAR}," in text
    assert f"waits up to {rendering.TRIES} seconds" in text
    cpu, memory = rendering.DEFAULT_REQUESTS.values()
    assert f"requests of {cpu} CPU and {memory} memory" in text
    assert f"`{pod_rules.MOUNTPOINT}`, on which" in text
    assert f"the namespace `{rendering.SHARED_NAMESPACE}`" in text


def test_the_page_says_what_does_not_exist() -> None:
    """Whoever adds a command that does more has to change the page."""
    assert set(cli.commands.commands) == {"new-template", "render", "webhook"}
    assert "a claim needs a PersistentVolume" in PAGE


def test_what_it_says_of_mount_pods_is_so() -> None:
    text = " ".join(PAGE.split())
    assert f"at the latest after {rendering.GRACE_OF_SHARED} seconds" in text
    assert f"the old one has {mount_pod_steps.GRACE_OF_REPLACED} seconds to end" in text
    assert f"its priority class is `{rendering.PRIORITY_CLASS}`" in text
    assert (
        f"{', '.join(f'`{phase}`' for phase in mount_pods.Phase)}."
        in rows("metric")["`fusermount3_controller_mount_pods`"]
    )
    objects = list(yaml.safe_load_all((ROOT / "packaging/kubernetes/controller/mount-pods.yaml").read_text()))
    (quota,) = [each["spec"]["hard"]["pods"] for each in objects if each["kind"] == "ResourceQuota"]
    assert f"a ResourceQuota of {quota} pods" in text


def test_the_right_to_make_pods_elsewhere_is_bound_as_the_manifests_do() -> None:
    (command,) = [each.text for each in blocks() if each.page == "templates.md" and "rolebinding" in each.text]
    objects = list(yaml.safe_load_all((ROOT / "packaging/kubernetes/controller/rbac.yaml").read_text()))
    (bound,) = [each for each in objects if each["metadata"].get("namespace") == rendering.SHARED_NAMESPACE]
    (subject,) = bound["subjects"]
    words = shlex.split(command)
    assert words[3] == bound["metadata"]["name"]
    assert words[words.index("--clusterrole") + 1] == bound["roleRef"]["name"]
    assert words[words.index("--serviceaccount") + 1] == f"{subject['namespace']}:{subject['name']}"


def test_all_metrics_are_listed() -> None:
    metrics = Metrics()
    metrics.show_cache(lambda: dict.fromkeys(Kind, 0), lambda: 0.0)
    metrics.show_certificate(lambda: 0.0)
    metrics.show_leader(lambda: False)
    found = set(re.findall("^# TYPE (\\S+) ", metrics.exposition().decode(), re.MULTILINE))
    assert {f"`{name}`" for name in found if not name.endswith("_created")} == set(rows("metric"))
    for result in (*RESULTS, FAILED, MALFORMED):
        assert f"`{result}`" in rows("metric")["`fusermount3_controller_admissions_total`"]


def test_what_it_says_of_the_controller_is_so() -> None:
    text = " ".join(PAGE.split())
    life, authority = serving_certificates.CERTIFICATE_LIFE.days, serving_certificates.AUTHORITY_LIFE.days
    assert f"after {life * 2 // 3} of its {life} days" in text and authority == 3650
    assert serving_certificates.SETTLE.total_seconds() == 3600
    assert cluster_cache.RESYNC == 60
    configuration, _ = yaml.safe_load_all((ROOT / "packaging/kubernetes/controller/webhook.yaml").read_text())
    assert [each["timeoutSeconds"] for each in configuration["webhooks"]] == [5, 2]
    assert configuration["webhooks"][0]["name"] in text
