"""The commands and files in docs/containers.md, for the tests that execute them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.broker import PROXY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.lab.broker import Broker

TEXT = (Path(__file__).parents[2] / "docs/containers.md").read_text()


def documented(command: str) -> list[str]:
    """Return the words of the command that begins with these."""
    lines = TEXT.replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{command} ")]
    return shlex.split(line)


def options_of(command: str) -> list[str]:
    """Return the options of a command that runs a container; it begins with these words."""
    words = documented(command)
    return words[2 : words.index("IMAGE")]


def with_paths_of(broker: Broker, options: Iterable[str]) -> list[str]:
    """Return the options with the places on this host in front of a colon, instead of those on an installed one."""
    here = {"/run/fusermount3-proxy": str(broker.socket.parent), "/usr/bin/fusermount3-proxy": str(PROXY)}
    split = [option.partition(":") for option in options]
    return [here.get(source, source) + colon + target for source, colon, target in split]


def containerfiles() -> list[str]:
    """Return the parts of Containerfiles, in their order."""
    return re.findall(r"^```Containerfile\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
