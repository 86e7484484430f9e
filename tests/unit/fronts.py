"""A front with a real registry and counters, but without a mounter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fusermount3_broker.front.context import Front
from fusermount3_broker.front.model import Device, Mount, MountNamespace
from fusermount3_broker.front.mounter_client import Mounter
from fusermount3_broker.front.tables.mount_table import Registry
from fusermount3_broker.service.configuration import Configuration
from tests.unit.fakes import FakeFusectl


class FrontWithoutMounter:
    """`front`, its log, and a fake of the kernel's table of FUSE connections."""

    def __init__(self, directory: Path) -> None:
        self.fusectl = FakeFusectl(directory / "connections")
        self.logged: list[str] = []
        registry = Registry(directory / "state", self.fusectl.descriptor)
        mounter = cast(Mounter, SimpleNamespace(restarts=0, pid=0))
        self.front = Front(Configuration(), mounter, registry, self._log, self.fusectl.descriptor)

    def _log(self, priority: int, message: str, **_: Any) -> None:
        self.logged.append(f"{priority} {message}")

    def mount(self, number: int, text: str = "/mnt") -> Device:
        """Record a mount with `text` in every field that a caller can choose."""
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
                request_id="1a2b",
                **cast(Any, names),
            )
        )
        return device
