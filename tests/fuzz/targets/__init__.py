"""The fuzz targets, one module each. `check` takes an input: it returns, or raises an exception if the input fails."""

from __future__ import annotations

from typing import Protocol

from tests.fuzz.targets import account, commandline, configuration, mountinfo, options, plan, rows, volume, wire


class Target(Protocol):
    """A module of this package. `WORDS` are tokens of its grammar for the engine to try; `SEEDS` are valid inputs."""

    WORDS: list[bytes]
    SEEDS: list[bytes]

    def check(self, data: bytes) -> None: ...


TARGETS: dict[str, Target] = {
    "account": account,
    "commandline": commandline,
    "configuration": configuration,
    "mountinfo": mountinfo,
    "options": options,
    "plan": plan,
    "rows": rows,
    "volume": volume,
    "wire": wire,
}
