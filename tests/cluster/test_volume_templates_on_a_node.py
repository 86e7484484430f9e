"""Volume templates on a real node: the API server checks them, and the pods that come out of them run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from tests.cluster import server
from tests.cluster.pods import applied
from tests.kubernetes.objects import CONTROLLER, TEMPLATES, Object, objects
from tests.lab.commands import Argument, run
from tests.lab.pypi import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

S3FS, SSHFS = (next(path for path in TEMPLATES if path.stem == name) for name in ("s3fs", "sshfs"))


@pytest.fixture(scope="module")
def resource(node_of_session: ClusterNode) -> Iterator[None]:
    node = node_of_session
    definition = (CONTROLLER / "volumetemplates.yaml").read_text()
    node.kubectl("create", "--filename=-", input=definition)
    node.kubectl("wait", "--for=condition=Established", "crd/volumetemplates.fusermount3-proxy.dev", "--timeout=60s")
    yield
    node.kubectl("delete", "--filename=-", input=definition)


def test_the_pod_that_is_shown_reads_and_writes(node: ClusterNode) -> None:
    command: list[Argument] = [
        ENVIRONMENT / "bin/fusermount3-controller",
        "render",
        SSHFS,
        "--set",
        "directory=reports",
    ]
    with applied(node, objects(run(command).stdout)) as pod:
        pod.wait_until_ready()
        assert pod.execute("cat", "/data/first").stdout == "first\n"
        pod.execute("sh", "-c", "echo template > /data/written")
        assert server.execute(node, "cat reports/written; rm reports/written") == "template\n"


@pytest.mark.usefixtures("resource")
def test_the_api_server_takes_the_templates_and_shows_them(node: ClusterNode) -> None:
    everything = yaml.safe_dump_all(each for path in TEMPLATES for each in objects(path.read_text()))
    node.kubectl("create", "--filename=-", input=everything)
    shown = node.kubectl("get", "vt").stdout.splitlines()
    assert shown[0].split() == ["NAME", "PLACEMENT", "IMAGE", "VOLUMES", "AGE"]
    assert [line.split()[0] for line in shown[1:]] == [path.stem for path in TEMPLATES]
    node.kubectl("delete", "--filename=-", input=everything)


@pytest.mark.usefixtures("resource")
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("placement: Sidecar", "placement: sidecar", "spec.placement: Unsupported value"),
        ("name: fuse", "name: s3fs", "containers[0].name: Unsupported value"),
        ("    directory:", "    mountOptions:", "this name is a volumeAttribute of the driver"),
        ("    directory:", "    di-rectory:", "a name has at most 63 letters"),
        ("required: true", "required: true\n      default: abc", "a default has no effect"),
        ("default: s3\n", "default: S3\n", "the default does not match the pattern"),
        ("name: s3fs", f"name: {'a' * 64}", "a name has at most 63 characters"),
    ],
)
def test_the_api_server_refuses_a_template(node: ClusterNode, old: str, new: str, says: str) -> None:
    text = S3FS.read_text()
    assert text.count(old) >= 1
    refused = node.kubectl("create", "--dry-run=server", "--filename=-", input=text.replace(old, new, 1), check=False)
    assert refused.returncode != 0
    assert says in refused.stderr


@pytest.mark.usefixtures("resource")
def test_what_is_in_a_pod_template_is_kept(node: ClusterNode) -> None:
    created = node.kubectl("create", "--dry-run=server", "--output=yaml", "--filename=-", input=SSHFS.read_text())
    (given,), kept = objects(SSHFS.read_text()), yaml.safe_load(created.stdout)
    assert _pod(kept) == _pod(given)


def _pod(template: Object) -> Object:
    pod: Object = template["spec"]["volumeStaging"]["podTemplate"]
    return pod
