"""The commands and files in docs/containers.md, for the tests that execute them."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.broker import PROGRAM, PROXY
from tests.lab.cache import Cache
from tests.lab.commands import run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.lab.broker import Broker

CDI_DIRECTORY = Path("/etc/cdi")
"""Podman 4.3 looks here and in /var/run/cdi, and can't be told to look elsewhere."""
CDI_FILE = "fusermount3-proxy-lab.json"

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


@contextlib.contextmanager
def known_to_engines(broker: Broker) -> Iterator[None]:
    """Have the engines on this host know the device, with this broker behind it, until the block ends.

    What a killed run left there is written over. One run of the tests waits for another.
    """
    command = documented("fusermount3-broker cdi generate")
    command[0] = str(PROGRAM)
    command[command.index("--output") + 1] = str(CDI_DIRECTORY / CDI_FILE)
    with Cache().locked("etc-cdi"):
        missing = not CDI_DIRECTORY.exists()
        try:
            run([*command, "--proxy", PROXY, "--socket", broker.socket])
            yield
        finally:
            (CDI_DIRECTORY / CDI_FILE).unlink(missing_ok=True)
            if missing:
                CDI_DIRECTORY.rmdir()


def containerfiles() -> list[str]:
    """Return the parts of Containerfiles, in their order."""
    return re.findall(r"^```Containerfile\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
