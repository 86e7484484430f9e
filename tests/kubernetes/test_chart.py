"""Test that helm and kustomize make the same objects, and that settings of the chart make valid ones."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

from tests.e2e.documented import ROOT, block
from tests.kubernetes import table
from tests.kubernetes.objects import BASE, CHART, EXAMPLES, MIGRATION, name_of, objects, of_files, the, validate
from tests.kubernetes.rendered import OLD_DRIVER, OLDEST, rendered_by_helm, rendered_by_kustomize
from tests.lab.commands import CommandFailed, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes.objects import Object

# Building them needs Podman.
pytestmark = pytest.mark.e2e


def without_namespace(by_name: dict[str, Object]) -> dict[str, Object]:
    """Return the objects without the namespace: a chart does not make the namespace that it is installed in."""
    return {name: each for name, each in by_name.items() if each["kind"] != "Namespace"}


def own_directories(by_name: dict[str, Object]) -> set[str]:
    """Return the directories of the node that the DaemonSet creates."""
    volumes = the("DaemonSet", list(by_name.values()))["spec"]["template"]["spec"]["volumes"]
    sources = [volume["hostPath"] for volume in volumes if "hostPath" in volume]
    return {source["path"] for source in sources if source["type"] == "DirectoryOrCreate"}


def test_lint(helm: Path) -> None:
    run([helm, "lint", "--strict", *OLDEST, CHART])


def test_chart_and_base_are_the_same(helm: Path, kustomize: Path) -> None:
    base = rendered_by_kustomize(kustomize, BASE)
    assert rendered_by_helm(helm) == without_namespace(base)
    assert len(base) == 4


def test_chart_and_overlay_are_the_same(helm: Path, kustomize: Path) -> None:
    overlay = rendered_by_kustomize(kustomize, MIGRATION)
    name = "meta-fuse-csi-plugin"
    rendered = rendered_by_helm(helm, f"--set=driverName={OLD_DRIVER}", release=name, namespace=name)
    assert rendered == without_namespace(overlay)


def test_the_two_drivers_share_nothing_on_a_node(kustomize: Path) -> None:
    base, overlay = (own_directories(rendered_by_kustomize(kustomize, each)) for each in (BASE, MIGRATION))
    assert len(base) == len(overlay) == 2
    assert not base & overlay


@pytest.mark.parametrize("directory", [BASE, MIGRATION], ids=lambda path: path.name)
def test_what_kustomize_makes_is_valid(kustomize: Path, directory: Path) -> None:
    for each in rendered_by_kustomize(kustomize, directory).values():
        validate(each)


def test_the_examples_can_be_applied_at_once(kustomize: Path) -> None:
    rendered = rendered_by_kustomize(kustomize, EXAMPLES[0].parent)
    assert rendered.keys() == {name_of(each) for each in of_files(EXAMPLES)}


@pytest.mark.parametrize(
    "options",
    [
        ("--set=kubeletDir=/var/data/kubelet",),
        ("--set=imagePullPolicy=Always", "--set=imagePullSecrets[0].name=secret"),
        ("--set=images.broker.repository=elsewhere/broker", "--set=images.broker.tag=v1"),
        ("--set=nodeSelector.disk=ssd", "--set=tolerations=null", "--set=priorityClassName="),
        ('--set-json=affinity={"nodeAffinity": {}}', "--set=maxUnavailable=2"),
        ("--set=podAnnotations.name=value", "--set=healthPort=1234"),
        ("--set=resources.broker.limits=null", "--set=resources.sidecars.limits.memory=1Gi"),
    ],
    ids=lambda options: options[0].partition("=")[2],
)
def test_what_is_set_makes_valid_objects(helm: Path, options: tuple[str, ...]) -> None:
    rendered = rendered_by_helm(helm, *options)
    for each in rendered.values():
        validate(each)
    assert rendered != rendered_by_helm(helm)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--set=driver=name", "driver"),
        ("--set=driverName=not_a_name", "driverName"),
        ("--set=kubeletDir=relative", "kubeletDir"),
        ("--set=kubeletDir=/var/lib/kubelet/", "kubeletDir"),
        ("--set=imagePullPolicy=Sometimes", "imagePullPolicy"),
        ("--set=images.broker.digest=sha256", "digest"),
        ("--set=healthPort=0", "healthPort"),
    ],
)
def test_what_makes_no_sense_is_refused(helm: Path, option: str, message: str) -> None:
    with pytest.raises(CommandFailed, match=f"(?s)values don't meet the specifications.*{message}"):
        rendered_by_helm(helm, option)


def test_the_table_of_values_is_as_they_are() -> None:
    assert table.FILE.read_text() == table.page(), "run .venv/bin/python -m tests.kubernetes.table"


def test_what_the_page_says_to_install_is_of_the_images_that_it_names(helm: Path) -> None:
    commands = block("kubernetes.md", "kubectl create namespace").commands
    (install,) = [shlex.split(each) for each in commands if each.startswith("helm install ")]
    rendered = objects(run(["env", "--chdir", ROOT, helm, "template", *install[2:], *OLDEST]).stdout)
    containers = the("DaemonSet", rendered)["spec"]["template"]["spec"]["containers"]
    assert {each["image"].rpartition(":")[0] for each in containers} == {
        "REGISTRY/fusermount3-broker",
        "REGISTRY/sig-storage/csi-node-driver-registrar",
        "REGISTRY/sig-storage/livenessprobe",
    }
