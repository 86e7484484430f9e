"""Test that helm and kustomize make the same objects, and that settings of the chart make valid ones."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

import pytest
import yaml

from fusermount3_proxy import __version__
from tests.e2e.documented import DOCS, ROOT, block, blocks
from tests.kubernetes import objects as known
from tests.kubernetes import table
from tests.kubernetes.objects import (
    BASE,
    CHART,
    DEVICE_PLUGIN,
    EXAMPLES,
    KUSTOMIZATION,
    MIGRATION,
    containers,
    is_pulled_once,
    name_of,
    objects,
    of_files,
    the,
    validate,
)
from tests.kubernetes.rendered import OLD_DRIVER, OLDEST, rendered_by_helm, rendered_by_kustomize
from tests.lab.commands import CommandFailed, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes.objects import Object
    from tests.lab.commands import Argument

# Building them needs Podman.
pytestmark = pytest.mark.e2e

DOCUMENT = (DOCS / "kubernetes.md").read_text()


def without_namespace(by_name: dict[str, Object]) -> dict[str, Object]:
    """Return the objects without the namespace: a chart does not make the namespace that it is installed in."""
    return {name: each for name, each in by_name.items() if each["kind"] != "Namespace"}


def own_directories(by_name: dict[str, Object]) -> set[str]:
    """Return the directories of the node that the DaemonSet creates."""
    volumes = the("DaemonSet", list(by_name.values()))["spec"]["template"]["spec"]["volumes"]
    sources = [volume["hostPath"] for volume in volumes if "hostPath" in volume]
    made = {source["path"] for source in sources if source["type"] == "DirectoryOrCreate"}
    return made - {"/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices"}  # kubelet's, which makes it when needed


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
        ("--set=podAnnotations.name=value", "--set=healthPort=1234", "--set=registrarHealthPort=1235"),
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
        ("--set=metrics.port=80", "metrics.port"),
        ("--set=podMonitor.enabled=yes", "podMonitor.enabled"),
        ("--set=prometheusRule.labels.release=1", "prometheusRule.labels"),
        ("--set=extraContainers[0].name=own", "image"),
    ],
)
def test_what_makes_no_sense_is_refused(helm: Path, option: str, message: str) -> None:
    with pytest.raises(CommandFailed, match=f"(?s)values don't meet the specifications.*{message}"):
        rendered_by_helm(helm, option)


def test_the_table_of_values_is_as_they_are() -> None:
    assert table.FILE.read_text() == table.page(), "run .venv/bin/python -m tests.kubernetes.table"


#: Where nodes get the images after an installation by the page; a broker's image is in no public registry.
NAMED = (
    f"REGISTRY/fusermount3-broker:{__version__}",
    "registry.k8s.io/sig-storage/csi-node-driver-registrar:",
    "registry.k8s.io/sig-storage/livenessprobe:",
)


def images(rendered: list[Object]) -> list[str]:
    """Return the images of the DaemonSet's containers."""
    return [each["image"] for each in containers(the("DaemonSet", rendered)["spec"]["template"])]


def test_what_the_page_says_to_install_by_helm_can_be_pulled(helm: Path) -> None:
    commands = block("kubernetes.md", "kubectl create namespace").commands
    (install,) = [shlex.split(each) for each in commands if each.startswith("helm install ")]
    rendered = objects(run(["env", "--chdir", ROOT, helm, "template", *install[2:], *OLDEST]).stdout)
    for image, named in zip(images(rendered), NAMED, strict=True):
        assert image.startswith(named)


@pytest.mark.parametrize("base", [BASE, MIGRATION, DEVICE_PLUGIN], ids=lambda path: path.name)
def test_what_the_page_says_to_apply_can_be_pulled(kustomize: Path, base: Path, tmp_path: Path) -> None:
    (page,) = [each.text for each in blocks() if each.page == "kubernetes.md" and "# kustomization.yaml" in each.text]
    kustomization = yaml.safe_load(page)
    (resource,) = kustomization["resources"]
    assert resource.endswith("/packaging/kubernetes/base")
    kustomization["resources"] = [os.path.relpath(base, tmp_path.resolve())]
    (tmp_path / KUSTOMIZATION).write_text(yaml.safe_dump(kustomization))
    for image in images(list(rendered_by_kustomize(kustomize, tmp_path).values())):
        assert image.startswith(NAMED)


@pytest.mark.parametrize("directory", [BASE, MIGRATION, DEVICE_PLUGIN], ids=lambda path: path.name)
def test_an_image_that_a_node_has_is_not_pulled_again(kustomize: Path, directory: Path) -> None:
    for image in images(list(rendered_by_kustomize(kustomize, directory).values())):
        assert is_pulled_once(image), image


def test_the_chart_is_for_the_versions_that_the_page_names(helm: Path) -> None:
    requirements = DOCUMENT.partition("Requirements:")[2].partition("\n\n")[0]
    sidecars, oldest, *_ = re.findall(r"Kubernetes\s(1\.\d+)", requirements)
    assert (sidecars, oldest) == (known.SIDECARS, known.OLDEST)
    command: list[Argument] = [helm, "template", "release", CHART, "--kube-version"]
    run([*command, f"{oldest}.0"])
    major, minor = oldest.split(".")
    with pytest.raises(CommandFailed, match="kubeVersion"):
        run([*command, f"{major}.{int(minor) - 1}.9"])
