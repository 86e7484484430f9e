"""What a shell offers for arguments that name a running broker's mounts: their request IDs, and their containers.

bash inserts what is offered as it is, into a command line of root's. So nothing is offered that a shell would take for
more than a word. Whatever goes wrong, the shell offers nothing, and prints nothing: the user is typing.
"""

import re
from collections.abc import Callable

import click
from click.shell_completion import CompletionItem

from fusermount3_broker.cli import mounts
from fusermount3_broker.cli.control_client import MALFORMED, NotRunning
from fusermount3_broker.cli.mounts import Answered
from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_broker.service import configuration_file

_REQUEST_ID = re.compile(r"[0-9a-f]{8}")
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]*")


def request_ids(context: click.Context, _: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the request IDs that begin so and are not on the line yet, each with its mountpoint."""
    on_the_line = context.params.get("ids") or ()
    offered = _offered(context, lambda mount: (mount["request_id"], mount["mountpoint"] or mount["volume"]))
    return [
        CompletionItem(id, help=place)
        for id, place in offered
        if _REQUEST_ID.fullmatch(id) and id.startswith(typed.lower()) and id not in on_the_line
    ]


def containers(context: click.Context, _: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the names that begin so, and the IDs of containers without one."""
    offered = _offered(context, lambda mount: (mount["container_name"] or mount["container_id"], ""))
    return [
        CompletionItem(name)
        for name, _ in sorted(set(offered))
        if _CONTAINER.fullmatch(name) and name.startswith(typed)
    ]


def _offered(context: click.Context, pair_of: Callable[[Answered], tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pair of each mount, visible; nothing if no broker answers, or this user may not ask it."""
    try:
        at = configuration_file.load(context.params.get("config_path")).control_socket
        return [(visible(first), visible(second)) for first, second in map(pair_of, mounts.ask(at))]
    except (NotRunning, configuration_file.ConfigurationError, *MALFORMED):
        return []
