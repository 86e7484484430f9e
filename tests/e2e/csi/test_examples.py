"""The manifests of packaging/kubernetes/examples, as shipped, with real programs and real servers."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.callers.build import image_tag as downloaded
from tests.callers.conftest import or_not_run
from tests.callers.images import BOOKWORM
from tests.callers.s3 import s3_for
from tests.e2e.conftest import wait_until
from tests.e2e.csi import pods
from tests.e2e.csi.pods import kill, wait_for_volume
from tests.lab import manifests, sshd
from tests.lab.broker import PROXY
from tests.lab.images import BUSYBOX, SSHFS, image_tag
from tests.lab.kubelet import Image, Kubelet, Pod

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.kubelet import Images, Server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

EXAMPLES = Path(__file__).parents[3] / "packaging/kubernetes/examples"
ALL = sorted(path for path in EXAMPLES.glob("*.yaml") if path.name != "kustomization.yaml")
SSH_SECRET, S3_SECRET = "sshfs", "s3"
S3_HOST = "s3.example"
ACCOUNT = {"AWS_ACCESS_KEY_ID": b"somebody", "AWS_SECRET_ACCESS_KEY": b"secret"}


@pytest.fixture(scope="module")
def example_images() -> Images:
    """The replacements for the images of the examples: Debian's programs, and the proxy under its names."""
    with or_not_run():
        debian = downloaded(BOOKWORM)
    helpers = pods.clients(PROXY)
    return {
        "busybox:1.37": Image(image_tag(BUSYBOX)),
        "example/app:1.0": Image(image_tag(BUSYBOX), helpers),
        "example/sshfs:1.0": Image(image_tag(SSHFS), helpers),
        "example/s3fs:1.0": Image(debian, helpers),
        "example/rclone:1.0": Image(debian, helpers),
    }


@pytest.fixture
def examples(kubelet: Kubelet, example_images: Images) -> Kubelet:
    """The kubelet of the cluster, with these images."""
    return Kubelet(kubelet.node, kubelet.driver, kubelet.plugin, example_images)


@pytest.fixture
def ssh() -> Iterator[Path]:
    """The directory of an sshd that serves the files `hello` and `reports/first`."""
    with sshd.prepared() as directory:
        export = directory / "export"
        (export / "hello").write_text("hello\n")
        (export / "reports").mkdir()
        (export / "reports/first").write_text("first\n")
        for path in export.rglob("*"):
            path.chmod(0o777 if path.is_dir() else 0o666)
        yield directory


def secret_for(directory: Path) -> dict[str, bytes]:
    """Return the data about an sshd that the examples need, as `kubectl create secret` reads them from files."""
    files = sshd.client_files(directory, "server", "/etc/sshfs")
    return {name: content.encode() for name, content in files.items()}


@contextlib.contextmanager
def running(kubelet: Kubelet, name: str, ssh: Path) -> Iterator[Pod]:
    """The pod of an example, with the server of which it is a client; all its containers must end when asked to."""
    spec = manifests.load(EXAMPLES / f"{name}.yaml", {SSH_SECRET: secret_for(ssh), S3_SECRET: ACCOUNT})
    server: Server = partial(sshd.serving, ssh)
    servers = {S3_HOST: s3_for} if name in ("s3fs", "rclone") else {"server": server}
    with kubelet.pod(spec, servers=servers) as pod:
        wait_for_volume(pod, "app", "/reports" if name == "subpath" else "/data")
        yield pod
        pod.stop_loop()
        for container in reversed([*spec.init_containers, *spec.containers]):
            assert pod[container.name].stop(20) != 137, f"{container.name} ignores SIGTERM"


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_each_example_is_one_that_kubelet_can_do(path: Path) -> None:
    secrets = {SSH_SECRET: {"config": b""}, S3_SECRET: ACCOUNT}
    assert manifests.load(path, secrets).csi_volumes()


SSHFS_EXAMPLES = ["sshfs", "persistent", "eager", "two-containers", "user-namespace", "fs-group", "read-only"]


@pytest.mark.parametrize("name", SSHFS_EXAMPLES)
def test_sshfs_serves_the_other_container(examples: Kubelet, ssh: Path, name: str) -> None:
    with running(examples, name, ssh) as pod:
        assert pod["app"].exec(["cat", "/data/hello"]).stdout == "hello\n"
        written = pod["app"].exec(["sh", "-c", "echo new > /data/new"], check=False)
        if name == "read-only":
            assert "Read-only file system" in written.stderr
            assert not (ssh / "export/new").exists()
        else:
            assert (written.returncode, written.stderr) == (0, "")
            assert (ssh / "export/new").read_text() == "new\n"
        assert pod.republish_errors() == []


def test_sshfs_serves_a_part_of_it(examples: Kubelet, ssh: Path) -> None:
    with running(examples, "subpath", ssh) as pod:
        assert pod["app"].exec(["ls", "/reports"]).stdout == "first\n"
        kill(pod, "sshfs")
        pod.wait_until_restarted("sshfs", 1)
        wait_until(lambda: pod["app"].exec(["ls", "/reports"], check=False).stdout == "first\n")


def test_the_group_of_the_pod_may_write(examples: Kubelet, ssh: Path) -> None:
    with running(examples, "fs-group", ssh) as pod:
        assert pod["app"].exec(["stat", "-c", "%g", "/data/hello"]).stdout == "2000\n"
        assert "group_id=2000" in pod["app"].fuse_mounts("/data")[0].super_options


@pytest.mark.parametrize("name", ["s3fs", "rclone"])
def test_a_bucket(examples: Kubelet, ssh: Path, name: str) -> None:
    with running(examples, name, ssh) as pod:
        assert pod["app"].exec(["cat", "/data/hello"]).stdout == "hello\n"
        pod["app"].exec(["sh", "-c", "echo new > /data/new"])
        assert sorted(pod["app"].exec(["ls", "/data"]).stdout.split()) == ["hello", "new"]
