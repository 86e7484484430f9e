"""The Kubernetes project's own tests of storage, by which drivers are judged.

They are those of k8s.io/kubernetes/test/e2e/storage/external. They run for volumes of claims and for inline volumes,
both served by mount pods through sshfs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
import yaml

from tests.callers.conftest import or_not_run
from tests.cluster import binaries, driver, images, installed_controller, server
from tests.cluster.shared_volumes import MOUNTS
from tests.kubernetes.objects import PACKAGING, PROVISIONING
from tests.lab.commands import Argument, run
from tests.lab.images import BUSYBOX, image_tag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.long.conftest import Figure
    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PROVISIONER, INLINE = PACKAGING / "provisioners/ssh.yaml", PACKAGING / "templates/sshfs.yaml"
CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": "ssh"},
    "provisioner": driver.NAME,
    "parameters": {"volumeTemplate": "ssh", "directory": f"{server.EXPORT}/volumes"},
}
#: What the suites are told of the driver.
DRIVER = {
    "ShortName": "ssh",
    "StorageClass": {"FromExistingClassName": "ssh"},
    "InlineVolumes": [
        {"Attributes": {"volumeTemplate": "sshfs", "directory": f"{server.EXPORT}/inline"}, "Shared": True}
    ],
    "DriverInfo": {
        "Name": driver.NAME,
        "SupportedSizeRange": {"Min": "1Mi"},
        "Capabilities": {"persistence": True, "exec": True, "multipods": True, "RWX": True, "singleNodeVolume": True},
    },
}
#: The images of the suites' pods: busybox is in place of nginx, too, of which they use the shell only.
_IMAGES = "registry.k8s.io/e2e-test-images"
SHELLS, AGNHOST = (f"{_IMAGES}/busybox:1.37.0-1", f"{_IMAGES}/nginx:1.14-4"), f"{_IMAGES}/agnhost:2.56"
#: The image of agnhost has the command `pause`, too, beside programs that look at the node.
_ENTRYPOINT = ["sh", "-c", '[ "$0" = pause ] && exec sleep infinity; exec /agnhost "$0" "$@"']
TIMEOUT = 3600


@pytest.fixture
def programs(node: ClusterNode) -> Iterator[Path]:
    """The programs of the suites, and a node that has their images, the controller, both templates and a class."""
    with or_not_run():
        found = binaries.storage_suites()
    for name in SHELLS:
        images.name_also(node, images.SHELL, name)
    lines = f"FROM {image_tag(BUSYBOX)}\nCOPY agnhost /\nENTRYPOINT {json.dumps(_ENTRYPOINT)}\n"
    images.load_one(node, AGNHOST, images.Built(lines, {"agnhost": found / "agnhost"}).tag())
    inline = yaml.safe_load(INLINE.read_text())
    inline["spec"] |= {"placement": "Shared", "allowInline": True}
    with installed_controller.installed(node, PROVISIONING):
        node.kubectl("replace", "--filename=-", input=yaml.safe_dump(inline))
        created = yaml.safe_dump_all([yaml.safe_load(PROVISIONER.read_text()), CLASS])
        node.kubectl("create", "--filename=-", input=created)
        server.execute(node, "mkdir -p volumes inline")
        for name in ("ssh", "sshfs"):
            copied = json.loads(node.kubectl("get", "secret", "sshfs", "--output=json").stdout)
            copied["metadata"] = {"name": name, "namespace": MOUNTS}
            node.kubectl("create", "--filename=-", input=json.dumps(copied))
        try:
            yield found
        finally:
            node.kubectl("delete", "--filename=-", "--ignore-not-found", input=created)


def test_the_kubernetes_projects_suites_of_storage(
    node: ClusterNode, programs: Path, figure: Figure, tmp_path: Path
) -> None:
    described, report = tmp_path / "driver.yaml", tmp_path / "report.xml"
    described.write_text(yaml.safe_dump(DRIVER))
    words: list[Argument] = [
        programs / "suites",
        f"--storage.testdriver={described}",
        f"--ginkgo.junit-report={report}",
        "--ginkgo.skip=Disruptive|Slow|Serial",
        f"--ginkgo.timeout={TIMEOUT}s",
    ]
    said = run(node.administrator_command(*words), check=False, timeout=TIMEOUT + 60)
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [each.attrib["name"] for each in cases if each.attrib["status"] in ("failed", "timedout", "panicked")]
    passed = [each.attrib["name"] for each in cases if each.attrib["status"] == "passed"]
    figure("passed", len(passed))
    assert passed and not failed and said.returncode == 0, f"{failed}\n{said.stdout[-20000:]}"
    assert server.execute(node, "ls volumes") == ""
