"""Client of the control socket: send a command to the running broker, and read its answer."""

import json
import socket
import time
from pathlib import Path
from typing import Any

from fusermount3_broker.kernel import error_texts

#: The most bytes of an answer, and the seconds that one may take. A compromised front may send anything, for as long as
#: it likes.
LONGEST_ANSWER, PATIENCE = 64 << 20, 10.0


#: What code raises that takes an answer for one of another structure.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class NotRunning(Exception):
    """No broker answers on the control socket."""


def ask(path: Path, command: str) -> Any:
    """Return the answer of the broker at the control socket `path`: JSON of any shape, untrusted.

    Raises NotRunning.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(bytes(path))
            connection.sendall(command.encode() + b"\n")
            return json.loads(_all_of(connection, time.monotonic() + PATIENCE))
    except (OSError, ValueError) as error:
        raise NotRunning(f"no broker answers at {path}: {error_texts.of(error)}") from None
    except RecursionError:
        raise NotRunning(f"no broker answers at {path}: an answer that is nested too deeply") from None


def _all_of(connection: socket.socket, give_up: float) -> bytes:
    """Return all data until the other end hangs up. Raises OSError, TimeoutError, ValueError if it is too long."""
    answer = bytearray()
    while part := connection.recv(1 << 20):
        answer += part
        if len(answer) > LONGEST_ANSWER:
            raise ValueError(f"an answer of more than {LONGEST_ANSWER} bytes")
        connection.settimeout(max(0.001, give_up - time.monotonic()))
    return bytes(answer)
