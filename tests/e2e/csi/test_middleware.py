"""Middleware: a mount pod whose program uses the volume of another mount pod, gocryptfs over sshfs.

There is no controller here: the tests write the mount pods that it would make.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fusermount3_broker.messages.sharing_key import sharing_key
from tests.callers.build import image_tag as downloaded
from tests.callers.conftest import or_not_run
from tests.callers.images import BOOKWORM
from tests.e2e.conftest import wait_until
from tests.e2e.csi.pods import DATA, DRIVER, SOCKETS, VOLUME, clients, consumer, kill, starter
from tests.e2e.csi.test_examples import secret_for
from tests.e2e.csi.test_mount_pods import OWN, TRUSTED
from tests.lab import manifests, sshd
from tests.lab.broker import PROXY
from tests.lab.images import BUSYBOX, SSHFS, image_tag
from tests.lab.kubelet import Image, Kubelet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.csi.conftest import RunCluster
    from tests.lab.kubelet import Pod, Server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PLAIN = {"volumeTemplate": "ssh"}
ENCRYPTED = {"volumeTemplate": "gocryptfs", "over": "ssh"}
#: Where the program of the upper mount pod has the lower volume.
LOWER = "/lower"
#: Where it mounts.
PLAINTEXT = "/mnt/plain"
PASSWORD = "-extpass 'echo secret' -nosyslog"
ENCRYPT = f"""
[ -d {LOWER}/cipher ] || {{ mkdir {LOWER}/cipher && gocryptfs -q -init -scryptn 10 {PASSWORD} {LOWER}/cipher; }}
mkdir -p {PLAINTEXT} && exec gocryptfs -q -fg {PASSWORD} {LOWER}/cipher {PLAINTEXT}
"""
#: Seconds in which kubelet is rid of a pod, whatever hangs.
PATIENCE = 60


@pytest.fixture
def kubelet(run_cluster: RunCluster) -> Kubelet:
    with or_not_run():
        debian = downloaded(BOOKWORM)
    kubelet = run_cluster("dead_mounts_seconds = 2\n[deadlines]\noperation = 3").kubelet
    kubelet.binds_as_containerd = True
    helpers = clients(PROXY)
    kubelet.images |= {"sshfs": Image(image_tag(SSHFS), helpers), "gocryptfs": Image(debian, helpers)}
    kubelet.images |= {"consumer": Image(image_tag(BUSYBOX))}
    return kubelet


@pytest.fixture
def ssh() -> Iterator[Path]:
    """The directory of an sshd."""
    with sshd.prepared() as directory:
        yield directory


def inline(name: str, attributes: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "csi": {"driver": DRIVER, "volumeAttributes": attributes}}


def a_pod(name: str, namespace: str, container: dict[str, Any], *volumes: dict[str, Any], **more: Any) -> manifests.Pod:
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [container], "volumes": [*volumes]},
    }
    return replace(manifests.parse(yaml.safe_dump(document), **more), namespace=namespace)


def lower(ssh: Path) -> manifests.Pod:
    """The mount pod of sshfs."""
    command, user = "exec sshfs -f -F /etc/sshfs/config server: /mnt", {"runAsUser": 1000, "runAsGroup": 1000}
    container = starter(command, image="sshfs", securityContext=user)
    container["volumeMounts"] += [
        {"name": "secret", "mountPath": "/etc/sshfs", "readOnly": True},
        {"name": "mountpoint", "mountPath": "/mnt"},
    ]
    own = inline(VOLUME, {"share": sharing_key("", PLAIN)})
    secret = {"name": "secret", "secret": {"secretName": "sshfs"}}
    empty = [{"name": name, "emptyDir": {}} for name in (SOCKETS, "mountpoint")]
    return a_pod("lower", TRUSTED, container, *empty, own, secret, secrets={"sshfs": secret_for(ssh)})


def upper() -> manifests.Pod:
    """The mount pod of gocryptfs. Its own emptyDir has another name: the lower volume is served by no program of it."""
    container = starter(ENCRYPT, image="gocryptfs")
    container["volumeMounts"] = [
        {"name": "own-sockets", "mountPath": "/sockets"},
        {"name": "lower", "mountPath": LOWER},
    ]
    own = inline(VOLUME, {"share": sharing_key("", ENCRYPTED), "fdPassingEmptyDirName": "own-sockets"})
    sockets = {"name": "own-sockets", "emptyDir": {}}
    return a_pod("upper", TRUSTED, container, sockets, own, inline("lower", PLAIN))


def user() -> manifests.Pod:
    return a_pod("user", OWN, consumer(propagation="None"), inline(VOLUME, ENCRYPTED))


@contextlib.contextmanager
def stacked(kubelet: Kubelet, ssh: Path) -> Iterator[tuple[Pod, Pod, Pod]]:
    """Run a pod that uses the encrypted volume, and both mount pods; remove them in this order when the block ends."""
    serving: Server = partial(sshd.serving, ssh)
    with contextlib.ExitStack() as held:
        below = held.enter_context(kubelet.pod(lower(ssh), servers={"server": serving}))
        above = held.enter_context(kubelet.pod(upper()))
        yield below, above, held.enter_context(kubelet.pod(user()))


def removed(pod: Pod) -> None:
    """Remove the pod, in time."""
    begun = time.monotonic()
    pod.tear_down()
    assert time.monotonic() - begun < PATIENCE


def test_what_a_pod_writes_is_encrypted_below_and_unmounted_from_the_top(kubelet: Kubelet, ssh: Path) -> None:
    with stacked(kubelet, ssh) as (below, above, using):
        using["consumer"].exec(["sh", "-c", f"echo hello > {DATA}/name"])
        assert using["consumer"].exec(["cat", f"{DATA}/name"]).stdout == "hello\n"
        files = {path.name for path in (ssh / "export/cipher").iterdir()}
        assert len(files) == 3, files
        assert "name" not in files
        assert b"hello" not in b"".join(path.read_bytes() for path in (ssh / "export/cipher").iterdir())
        unused = ["fusermount3-proxy", "--wait-unused", "--timeout", "0"]
        for pod in (above, below):
            assert pod["starter"].exec(unused, check=False).returncode == 1
        using.tear_down()
        assert above["starter"].exec(unused).returncode == 0
        assert below["starter"].exec(unused, check=False).returncode == 1, "the upper mount pod uses it"
        above.tear_down()
        assert below["starter"].exec(unused).returncode == 0


def test_a_program_that_waits_for_the_end_of_its_filesystem_ends(kubelet: Kubelet, ssh: Path) -> None:
    """gocryptfs unmounts at SIGTERM, as all programs on go-fuse, and waits until no mount of it is left anywhere."""
    with stacked(kubelet, ssh) as (_, above, using):
        using.tear_down()
        for restarts in (1, 2):  # a container that was restarted has the filesystem in its own mount of the volume
            # until the shell, its first process, has become gocryptfs, the kernel gives it no SIGTERM
            above["starter"].exec(["fusermount3-proxy", "--wait-mounted", PLAINTEXT, "--timeout", str(PATIENCE)])
            os.kill(above["starter"].pid, signal.SIGTERM)
            above.wait_until_restarted("starter", restarts)


def test_pods_read_again_when_the_lower_program_was_killed(kubelet: Kubelet, ssh: Path) -> None:
    with stacked(kubelet, ssh) as (below, above, using):
        using["consumer"].exec(["sh", "-c", f"echo hello > {DATA}/name"])
        kill(below)
        below.wait_until_restarted("starter", 1)
        kill(above)  # gocryptfs keeps the directory that it had
        above.wait_until_restarted("starter", 1)
        wait_until(lambda: using["consumer"].exec(["cat", f"{DATA}/name"], check=False).stdout == "hello\n", 30)


def test_nobody_waits_for_a_lower_volume_that_is_gone(kubelet: Kubelet, ssh: Path) -> None:
    with stacked(kubelet, ssh) as (below, above, using):
        removed(below)
        said = using["consumer"].exec(["ls", DATA], check=False)
        assert said.returncode != 0
        for pod in (using, above):
            removed(pod)


def test_nobody_waits_for_a_lower_program_that_hangs(kubelet: Kubelet, ssh: Path) -> None:
    with stacked(kubelet, ssh) as (below, above, using):
        os.kill(below["starter"].pid, signal.SIGSTOP)
        for pod in (using, above, below):
            removed(pod)
