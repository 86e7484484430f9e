"""Two controllers as processes of this working tree, on the network of a node's control plane.

They have the rights of their ServiceAccount, and the API server asks them as it asks pods: through a Service.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import yaml

from tests.cluster import configuration
from tests.kubernetes.objects import CONTROLLER, Object
from tests.lab.pace import SLOWNESS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.cluster.node import ClusterNode

NAME, MOUNTS = "fusermount3-controller", "fuse-mounts"
PROGRAM = "from fusermount3_controller.cli import main; main()"
CONFIGURATIONS = ("mutatingwebhookconfiguration", "validatingwebhookconfiguration")
PATIENCE = 60.0
"""Seconds in which they are ready."""

_PORT, _HEALTH_PORT = 18443, 18080


class Controllers:
    """Two controllers, whose logs are in a directory."""

    def __init__(self, node: ClusterNode, directory: Path) -> None:
        self.node = node
        self.logs = [directory / f"controller-{number}" for number in range(2)]
        self.pids: list[int] = []
        self._kubeconfig = directory / "controller.kubeconfig"

    def install(self, templates: Sequence[Object]) -> None:
        """Make the controller's objects, and these templates; they come first, for nobody answers the webhooks yet."""
        kubectl = self.node.kubectl
        kubectl("create", f"--filename={CONTROLLER}/volumetemplates.yaml")
        kubectl("wait", "--for=condition=Established", "crd/volumetemplates.fusermount3-proxy.dev", "--timeout=60s")
        kubectl("create", "--filename=-", input=yaml.safe_dump_all(templates))
        kubectl("apply", "--kustomize", str(CONTROLLER))
        kubectl("delete", "deployment,service", NAME, f"--namespace={NAME}")
        kubectl("create", "--filename=-", input=yaml.safe_dump_all([_SERVICE, *map(_endpoint, range(2))]))
        token = kubectl("create", "token", NAME, f"--namespace={NAME}", "--duration=1h").stdout.strip()
        administrator = self.node.root / configuration.DIRECTORY.relative_to("/") / configuration.ADMIN
        kubeconfig = json.loads(administrator.read_text())
        kubeconfig["users"][0]["user"] = {"token": token}
        kubeconfig["contexts"][0]["context"]["namespace"] = NAME
        self._kubeconfig.write_text(json.dumps(kubeconfig))

    @contextlib.contextmanager
    def running(self, program: str = PROGRAM) -> Iterator[None]:
        """They run in the block, from when both are ready."""
        with contextlib.ExitStack() as stack:
            for number, log in enumerate(self.logs):
                ports = [f"--port={_PORT + number}", f"--health-port={_HEALTH_PORT + number}"]
                command = [sys.executable, "-c", program, "webhook", f"--address={configuration.ADDRESS}", *ports]
                file = stack.enter_context(log.open("ab"))
                process = subprocess.Popen(
                    self.node.administrator_command("env", f"KUBECONFIG={self._kubeconfig}", *command),
                    stdout=file,
                    stderr=file,
                )
                self.pids.append(process.pid)
                stack.callback(process.wait, 30)
                stack.callback(process.terminate)
            stack.callback(self.pids.clear)
            self.node.in_network(self._wait_until_ready)
            yield

    def said(self) -> str:
        """Return the ends of their logs."""
        return "\n".join(log.read_text()[-4000:] for log in self.logs if log.exists())

    def _wait_until_ready(self) -> None:
        give_up = time.monotonic() + SLOWNESS * PATIENCE
        waiting = {_HEALTH_PORT, _HEALTH_PORT + 1}
        while waiting:
            assert time.monotonic() < give_up, self.said()
            time.sleep(0.1)
            waiting = {port for port in waiting if not _is_ready(port)}


def exposition(number: int) -> str:
    """Return the metrics of a controller, to a process on its network."""
    with urlopen(f"http://{configuration.ADDRESS}:{_HEALTH_PORT + number}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def _is_ready(port: int) -> bool:
    with contextlib.suppress(URLError, ConnectionError), urlopen(f"http://{configuration.ADDRESS}:{port}/readyz"):
        return True
    return False


_SERVICE: Object = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": NAME, "namespace": NAME},
    "spec": {"ports": [{"name": "webhook", "port": 443}]},
}


def _endpoint(number: int) -> Object:
    """Return where a controller is; without a selector, nobody else says it of the Service."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{NAME}-{number}",
            "namespace": NAME,
            "labels": {"kubernetes.io/service-name": NAME, "endpointslice.kubernetes.io/managed-by": "tests"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [configuration.ADDRESS]}],
        "ports": [{"name": "webhook", "port": _PORT + number}],
    }
