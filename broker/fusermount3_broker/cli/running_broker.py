"""The command line of a running broker.

So `systemctl reload` has the file checked that the service uses, which `systemctl edit` may have changed.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import click

from fusermount3_broker.kernel import error_texts


class NoBroker(Exception):
    """The process is no broker, or can't be looked at; the message says which."""


def option(pid: int, commands: Mapping[str, click.Command], name: str) -> Path | None:
    """Return the path that an option has on the command line of a broker, made absolute; None if it is not there.

    `commands` are those that become the broker, by their names. Raises NoBroker.
    """
    try:
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")[:-1]
        at = next(index for index, word in enumerate(words) if word in commands)
        context = commands[words[at]].make_context(words[at], words[at + 1 :], resilient_parsing=True)
        path: Path | None = context.params[name]
        return Path(os.readlink(f"/proc/{pid}/cwd"), path) if path and not path.is_absolute() else path
    except StopIteration:
        raise NoBroker(f"process {pid} is no broker") from None
    except OSError as error:
        raise NoBroker(f"process {pid} can't be looked at: {error_texts.of(error)}") from None
