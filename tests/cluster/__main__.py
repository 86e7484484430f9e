"""`make cluster`: a Kubernetes node with the driver of this working tree, explained step by step, for developers.

    python -m tests.cluster up | down [DIRECTORY]

Ends with a pod that reads a file through sshfs. The node runs on until `make cluster-down`.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import yaml

from tests.cluster import binaries, driver, images, server
from tests.cluster.node import ClusterNode
from tests.demo import show, step, tell
from tests.lab.commands import run

DIRECTORY = Path(__file__).parents[2] / "build/cluster"
POD = "sshfs"


def up(directory: Path) -> None:
    node = ClusterNode(directory)
    if node.is_running():
        sys.exit("a node runs already: `make cluster-down` ends it")
    node.stop()  # what is left of one, if the machine was switched off
    step("The programs: Kubernetes from its Go modules (once, it takes a while), containerd, runc and etcd from Debian")
    show("kubelet --version", run([binaries.kubernetes() / "kubelet", "--version"]).stdout)
    step("The driver's images, from this working tree (some minutes, if it has changed), and those of the pods")
    images.driver_images()
    images.others()
    try:
        _start(node)
    except BaseException:
        node.stop()
        raise
    for name, command in {"kubectl": node.kubectl_command(), "in": node.command()}.items():
        script = directory / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, command))} "$@"\n')
        script.chmod(0o755)
    shown = os.path.relpath(directory)
    tell("It runs on. To use it, and to end it:")
    show(f"{shown}/kubectl get pods --all-namespaces", node.kubectl("get", "pods", "--all-namespaces").stdout)
    show(f"{shown}/in ctr --namespace k8s.io containers list", "(a command on the node, here containerd's client)")
    show("make cluster-down", f"(the logs of the node are in {shown}/logs)")


def _start(node: ClusterNode) -> None:
    step("A node starts, in namespaces of its own: control plane, containerd, kubelet")
    node.start()
    show("kubectl get nodes", node.kubectl("get", "nodes", "--output=wide").stdout)
    step("Its containerd gets the images, for it reaches no registry")
    images.load(node)
    step("The driver is installed, as docs/kubernetes.md says")
    driver.install(node)
    namespace = ("--namespace", driver.NAMESPACE)
    show(" ".join(["kubectl", *namespace, "get pods"]), node.kubectl(*namespace, "get", "pods").stdout)
    step("An SSH server starts in a pod, with a file `hello`; a Secret holds what its clients need")
    server.deploy(node)
    step(f"The pod of packaging/kubernetes/examples/{POD}.yaml starts. No container of it has any privilege")
    node.kubectl("apply", "--filename=-", input=yaml.safe_dump_all(driver.example(POD)))
    node.kubectl("wait", "--for=condition=Ready", f"pod/{POD}", "--timeout=120s")
    step("Its other container reads the file through sshfs")
    read = node.kubectl("exec", POD, "--container=app", "--", "cat", "/data/hello").stdout
    show(f"kubectl exec {POD} --container=app -- cat /data/hello", read)
    if read != "hello\n":
        sys.exit("that is not what is in the file")


def down(directory: Path) -> None:
    ClusterNode(directory).stop()


if __name__ == "__main__":
    word, chosen = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else DIRECTORY
    {"up": up, "down": down}[word](Path(chosen).absolute())
