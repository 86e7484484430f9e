"""Test that each part can be installed and removed alone: the base, its overlay, the device plugin, the examples.

`kubectl delete` also removes whatever is in a namespace that it is told to remove.
"""

from __future__ import annotations

import itertools
import shlex
from typing import TYPE_CHECKING

import pytest

from tests.e2e.documented import blocks
from tests.kubernetes.objects import BASE, CHART, DEVICE_PLUGIN, DEVICE_PLUGIN_CDI, MIGRATION, PACKAGING
from tests.kubernetes.rendered import NAMESPACE, OLD_DRIVER, rendered_by_helm, rendered_by_kustomize

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes.objects import Object

# Building helm and kustomize needs Podman.
pytestmark = pytest.mark.e2e

PARTS = (BASE, MIGRATION, DEVICE_PLUGIN, PACKAGING / "examples")
#: Kinds of ours that are in no namespace.
OF_THE_CLUSTER = {"CSIDriver", "Namespace", "PersistentVolume"}
PAGES = ("kubernetes.md", "containers.md")


def identity(each: Object) -> tuple[str, str, str]:
    return each["kind"], namespace_of(each), each["metadata"]["name"]


def namespace_of(each: Object) -> str:
    """Return the object's namespace, empty if it is in none."""
    if each["kind"] in OF_THE_CLUSTER:
        return ""
    return str(each["metadata"].get("namespace", "default"))


def is_removed_with(each: Object, removed: list[Object]) -> bool:
    """Return whether the object vanishes when these are deleted: because it is one of them, or is in a namespace."""
    deleted = {identity(one) for one in removed}
    return identity(each) in deleted or ("Namespace", "", namespace_of(each)) in deleted


def commands(beginning: str) -> list[list[str]]:
    """Return the words of all documented commands that begin like this, without comments."""
    found = [line for each in blocks() if each.page in PAGES and not each.language for line in each.commands]
    return [shlex.split(line, comments=True) for line in found if line.startswith(f"{beginning} ")]


@pytest.fixture
def parts(kustomize: Path) -> dict[str, list[Object]]:
    return {each.name: list(rendered_by_kustomize(kustomize, each).values()) for each in PARTS}


def test_whoever_removes_a_part_removes_nothing_of_another(parts: dict[str, list[Object]]) -> None:
    for (removed, objects), (other, of_other) in itertools.permutations(parts.items(), 2):
        for each in of_other:
            assert not is_removed_with(each, objects), f"{identity(each)} of {other} goes with {removed}"


def test_a_part_is_in_a_namespace_that_it_brings(parts: dict[str, list[Object]]) -> None:
    for name, objects in parts.items():
        own = {each["metadata"]["name"] for each in objects if each["kind"] == "Namespace"}
        used = {namespace_of(each) for each in objects} - {""}
        assert used == (own or {"default"}), name


def test_with_cdi_the_device_plugin_is_removed_by_the_same_command(
    kustomize: Path, parts: dict[str, list[Object]]
) -> None:
    with_cdi = rendered_by_kustomize(kustomize, DEVICE_PLUGIN_CDI).values()
    assert all(is_removed_with(each, parts[DEVICE_PLUGIN.name]) for each in with_cdi)


def test_two_releases_of_the_chart_share_nothing(helm: Path) -> None:
    ours = rendered_by_helm(helm)
    other = rendered_by_helm(helm, f"--set=driverName={OLD_DRIVER}", release="other")
    assert len(ours) == len(other) == 3
    assert not ours.keys() & other.keys()


def test_helm_removes_all_that_it_has_installed(helm: Path) -> None:
    """`helm uninstall` leaves hooks, and what is annotated to be kept."""
    for each in rendered_by_helm(helm).values():
        assert not [name for name in each["metadata"].get("annotations", {}) if name.startswith("helm.sh/")]
    assert not (CHART / "crds").exists()


def test_what_is_applied_on_a_page_is_deleted_there() -> None:
    applied = {words[-1] for words in commands("kubectl apply --kustomize")}
    assert (
        applied
        == {words[-1] for words in commands("kubectl delete --kustomize")}
        == {
            ".",
            "packaging/kubernetes/device-plugin",
        }
    )


def test_what_is_installed_by_helm_is_removed_from_where_it_is() -> None:
    (install,), (uninstall,) = commands("helm install"), commands("helm uninstall")
    assert uninstall[2:] == [install[2], "--namespace", install[install.index("--namespace") + 1]]
    created, deleted = commands("kubectl create namespace"), commands("kubectl delete namespace")
    assert [words[3] for words in created] == [words[3] for words in deleted] == [NAMESPACE]
