"""The examples of packaging/kubernetes on a real node, whose API server admits no pod that isn't `restricted`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.callers.conftest import or_not_run
from tests.cluster import buckets, configuration, driver, server
from tests.cluster.pods import applied
from tests.kubernetes.objects import EXAMPLES, the

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from tests.cluster.node import ClusterNode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

READ_AND_WRITE = ("sshfs", "eager", "fs-group", "persistent", "two-containers", "user-namespace")
READ = ("read-only", "subpath")


def test_all_examples_run_here() -> None:
    assert {path.stem for path in EXAMPLES} == {*READ_AND_WRITE, *READ, *buckets.REAL, *buckets.STAND_INS}


@pytest.mark.parametrize("name", READ_AND_WRITE)
def test_the_other_container_reads_and_writes(node: ClusterNode, name: str) -> None:
    with applied(node, driver.example(name)) as pod:
        pod.wait_until_ready()
        assert pod.execute("cat", "/data/hello").stdout == "hello\n"
        pod.execute("sh", "-c", f"echo {name} > /data/written")
        assert server.execute(node, "cat written; rm written") == f"{name}\n"


def test_a_read_only_volume(node: ClusterNode) -> None:
    with applied(node, driver.example("read-only")) as pod:
        pod.wait_until_ready()
        assert pod.execute("cat", "/data/hello").stdout == "hello\n"
        written = pod.execute("sh", "-c", "echo new > /data/written", check=False)
        assert "Read-only file system" in written.stderr


def test_a_directory_of_the_volume(node: ClusterNode) -> None:
    with applied(node, driver.example("subpath")) as pod:
        pod.wait_until_ready()
        assert pod.execute("cat", "/reports/first").stdout == "first\n"


@pytest.fixture(scope="module")
def stores(node_of_session: ClusterNode) -> Iterator[None]:
    """Programs that mount buckets, servers that have the buckets, and what the examples tell users to create."""
    node = node_of_session
    with contextlib.ExitStack() as stack:
        with or_not_run():
            buckets.load(node)
            stack.enter_context(buckets.moto(node))
            stack.enter_context(buckets.fake_gcs(node))
        for words in (["secret", "generic", "s3"], ["serviceaccount", "bucket-reader"]):
            node.kubectl("create", *words, *(buckets.KEYS if words[0] == "secret" else []))
            stack.callback(node.kubectl, "delete", words[0], words[-1])
        yield


def with_these_servers(name: str) -> list[dict[str, Any]]:
    """Return the objects of an example, whose pod finds the servers of the tests."""
    found = driver.example(name)
    spec = the("Pod", found)["spec"]
    spec["hostAliases"] = [{"ip": configuration.ADDRESS, "hostnames": [buckets.S3_HOST]}]
    if name == "gcsfuse":
        # It would otherwise be Google's, and ask Google who the service account is.
        spec["initContainers"][0]["command"][1:1] = [
            f"--custom-endpoint={buckets.GCS}/storage/v1/",
            "--anonymous-access",
            "--enable-hns=false",  # fake-gcs-server has no folders, which gcsfuse asks for by gRPC
        ]
    return found


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize("name", buckets.REAL)
def test_a_bucket(node: ClusterNode, name: str) -> None:
    with applied(node, with_these_servers(name)) as pod:
        pod.wait_until_ready()
        assert pod.execute("cat", "/data/hello").stdout == "hello\n"
        pod.execute("sh", "-c", f"echo {name} > /data/{name}")
        assert pod.execute("cat", f"/data/{name}").stdout == f"{name}\n"
    # The program has ended after the app, so it has written everything.
    assert buckets.stored(node, name, name) == f"{name}\n"


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize("name", buckets.STAND_INS)
def test_a_bucket_with_a_stand_in_for_the_program(node: ClusterNode, name: str) -> None:
    with applied(node, driver.example(name)) as pod:
        pod.wait_until_ready()
        assert pod.execute("cat", "/data/hello").stdout == "hello\n"
