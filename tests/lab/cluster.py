"""A cluster of one node: the broker as its CSI plugin, started as its DaemonSet starts it, and kubelet."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tests.lab.broker import PROGRAM, Broker
from tests.lab.csi import Plugin
from tests.lab.kubelet import Kubelet
from tests.lab.node import Node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.kubelet import Images

NODE_ID = "lab-node"

DAEMONSET = Path(__file__).parents[2] / "packaging/kubernetes/base/daemonset.yaml"

OWN_NAMESPACE = ("unshare", "--mount", "--propagation=unchanged", "--")
"""A container's mount namespace, as far as kubelet's directory goes: it shares that with the node (Bidirectional)."""


def confinement() -> tuple[str, ...]:
    """Return the command that starts the broker as the DaemonSet does: it drops capabilities."""
    spec = yaml.safe_load(DAEMONSET.read_text())["spec"]["template"]["spec"]
    words = spec["containers"][0]["command"]
    return tuple(words[: words.index(PROGRAM.name)])


class Cluster:
    """A cluster that lives while its `with` block runs; at the end of it the broker must end well."""

    def __init__(self, driver: str, images: Images, configuration: str = "") -> None:
        self.node = Node()
        self._endpoint = self.node.directory / "csi" / "csi.sock"
        self._stack = contextlib.ExitStack()
        options = ("--endpoint", f"unix://{self._endpoint}", "--node-id", NODE_ID, "--driver-name", driver)
        self._service = ("csi", *options, "--kubelet-dir", self.node.kubelet)
        self._configuration = configuration
        self.plugin = Plugin(self._endpoint)
        self.kubelet = Kubelet(self.node, driver, self.plugin, images)
        self._broker: Broker | None = None

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.node)
            self._endpoint.parent.mkdir()
            self._broker = stack.enter_context(Broker(self._configuration, self._command, self._service))
            self.wait_until_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def _command(self) -> tuple[str | Path, ...]:
        return self.node.command(*OWN_NAMESPACE, *confinement(), PROGRAM)

    @contextlib.contextmanager
    def second_broker(self) -> Iterator[Broker]:
        """Start another broker for the node, as the DaemonSet's next pod does: with the same state, but another /run.

        Yields it as soon as it has begun; the first one is started again at the end, if it does not run any more.
        """
        second = Broker(self._configuration, self._command, self._service, self.broker.state)
        try:
            second.configure(self._configuration)
            second.launch()
            yield second
        finally:
            if second.is_running:
                second.stop()
            second.remove()
        if not self.broker.is_running:
            self.broker.start()
            self.wait_until_ready()

    @property
    def broker(self) -> Broker:
        assert self._broker is not None, "the cluster has not been started"
        return self._broker

    def wait_until_ready(self, seconds: float = 30) -> None:
        """Return when the plugin reports that it is ready, as the liveness probe queries it."""
        give_up = time.monotonic() + seconds
        while not self.plugin.is_ready():
            assert time.monotonic() < give_up, f"the plugin is not ready:\n{self.broker.log.read_text()}"
            time.sleep(0.02)
