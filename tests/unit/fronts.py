"""A front with a real registry and counters, behind which there is no mounter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from broker.config import Configuration
from broker.front import Front
from broker.operations import Mounter
from broker.registry import Device, Mount, MountNamespace, Registry
from tests.unit.fakes import FakeFusectl


class FrontWithoutMounter:
    """`front`, what it logged, and the table of connections that stands for the kernel's."""

    def __init__(self, directory: Path) -> None:
        self.fusectl = FakeFusectl(directory / "connections")
        self.logged: list[str] = []
        registry = Registry(directory / "state", self.fusectl.descriptor)
        mounter = cast(Mounter, SimpleNamespace(restarts=0))
        self.front = Front(Configuration(), mounter, registry, self._log, self.fusectl.descriptor)

    def _log(self, priority: int, message: str, **_: Any) -> None:
        self.logged.append(f"{priority} {message}")

    def mount(self, number: int, text: str = "/mnt") -> Device:
        """Record a mount, in which `text` is whatever a caller can choose."""
        device = Device(number)
        names = {
            "command": text,
            "container": text,
            "account": text,
            "mountpoint": text.encode(),
            "type": text,
            "source": text.encode(),
        }
        self.front.registry.add(
            Mount(
                device=device,
                connection=self.fusectl.connect(number),
                namespace=MountNamespace(7),
                uid=1000,
                pid=1,
                mounted_at=1.0,
                request="1a2b",
                **cast(Any, names),
            )
        )
        return device
