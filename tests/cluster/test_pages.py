"""What the pages tell an administrator to do on a running cluster, and the versions that they name."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.cluster import binaries, driver, first_pod, images
from tests.cluster.commands import execute
from tests.cluster.pods import applied
from tests.e2e.conftest import wait_until
from tests.e2e.documented import PAGES, block
from tests.kubernetes.objects import the

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PAGE = "kubernetes.md"


def test_the_page_names_the_versions_of_the_node(node: ClusterNode) -> None:
    (found,) = json.loads(node.kubectl("get", "nodes", "--output=json").stdout)["items"]
    about = found["status"]["nodeInfo"]
    assert about["kubeletVersion"] == f"v{node.release.version}"
    runtime, _, version = about["containerRuntimeVersion"].partition("://")
    hierarchy = node.run(["stat", "--file-system", "--format=%T", "/sys/fs/cgroup"]).stdout.strip()
    cgroups = {"tmpfs": 1, "cgroup2fs": 2}[hierarchy]
    assert (
        f" node with Kubernetes {binaries.KUBERNETES.version}, {runtime} {version.partition('.')[0]} and runc, "
        f"with cgroups of version {cgroups}."
    ) in " ".join(PAGES[PAGE].read_text().split())


def test_the_first_pod(node: ClusterNode) -> None:
    first_pod.reads(node)


def test_what_a_program_said_is_found(node: ClusterNode) -> None:
    objects = driver.example("sshfs")
    the("Pod", objects)["spec"]["initContainers"][0]["command"][-2] = "server:missing"
    commands = block(PAGE, "kubectl describe pod").commands
    broker = node.kubectl(
        *("--namespace", driver.NAMESPACE, "get", "pods", "--output", "jsonpath={.items[*].metadata.name}")
    ).stdout
    names = {"POD": "sshfs", "CONTAINER": "sshfs", "BROKER": broker}
    with applied(node, objects) as pod:
        restarted = "--for=jsonpath={.status.initContainerStatuses[0].restartCount}=1"
        node.kubectl("wait", restarted, f"pod/{pod.name}", "--timeout=60s")

        def said(number: int) -> str:
            words = commands[number].partition("#")[0]
            return execute(node, words, names={name: names[name] for name in names if name in words})

        # Both, because of terminationMessagePolicy. While kubelet removes a container, its log can't be retrieved.
        problem = "server:missing: No such file or directory"
        assert problem in said(0)
        wait_until(lambda: problem in said(1), 60)
        assert broker in said(2) and " node " in said(2)
        wait_until(lambda: "put a tombstone in the place of a dead mount" in said(3), 60)
        log = [json.loads(line) for line in said(3).splitlines()]
        assert "server:missing" in [record.get("source") for record in log]
        assert "REQUEST" in said(4)
        assert "mounts" in said(5)


def test_an_archive_is_imported(node: ClusterNode) -> None:
    (command,) = block(PAGE, "ctr ").commands
    archive = images.driver_images() / command.split()[-1]
    directory = node.seen("/root")
    shutil.copy(archive, directory)
    try:
        node.run(["env", "--chdir=/root", *command.split()])
        assert images.BROKER in node.run(["ctr", "--namespace", "k8s.io", "images", "list", "--quiet"]).stdout.split()
    finally:
        (directory / archive.name).unlink()
