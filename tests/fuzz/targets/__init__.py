"""What is fuzzed: one module each. A target checks an input: it returns, or raises what must not be raised."""

from __future__ import annotations

from typing import Protocol

from tests.fuzz.targets import account, commandline, mountinfo, options, plan, volume, wire


class Target(Protocol):
    """A module of this package. `WORDS` are what its grammar knows, for the engine to try; `SEEDS` are valid inputs."""

    WORDS: list[bytes]
    SEEDS: list[bytes]

    def check(self, data: bytes) -> None: ...


TARGETS: dict[str, Target] = {
    "account": account,
    "commandline": commandline,
    "mountinfo": mountinfo,
    "options": options,
    "plan": plan,
    "volume": volume,
    "wire": wire,
}
