"""A caller that tries to exhaust the broker, for containers that have Python and nothing of this project.

    greedy.py half-open N    keep N connections open without sending anything; replace those that are refused
    greedy.py no-commit N    begin N mounts and never commit them
    greedy.py storm N        N processes at a time connect, request a mount, and die before the reply
    greedy.py deaf N         N processes repeat requests that are refused, and read no reply
    greedy.py surplus N      N processes send as many descriptors as a message can carry, and hang up
    greedy.py flush N        N processes send a file of a FUSE filesystem, in all kinds of requests, a hundred a second

Prints each distinct reply once, as soon as it is read. Runs until it is killed.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import selectors
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

BROKER = "/run/fusermount3-proxy/broker.sock"
MOUNT = b"protocol=1\0operation=mount\0mountpoint=/tmp\0options=\0"


def connect() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(BROKER)
    return connection


def send(connection: socket.socket, message: bytes, descriptors: int) -> None:
    place = os.open("/tmp", os.O_PATH)
    try:
        rights = array.array("i", [place] * descriptors)
        connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    except OSError:
        pass  # the broker had refused it already
    finally:
        os.close(place)


#: A file of a FUSE filesystem whose program does not answer when the file is closed.
UNFLUSHED = "/home/user/mnt/file"


def flood() -> None:
    """Send the unflushed file as a mount request's descriptor, as a surplus descriptor, and with an invalid request."""
    file = os.open(UNFLUSHED, os.O_RDWR | os.O_CREAT)
    place = os.open("/tmp", os.O_PATH)
    for said in itertools.cycle([(MOUNT, [file]), (MOUNT, [file, place]), (b"noise", [file]), (MOUNT, [place, file])]):
        message, descriptors = said
        with connect() as connection:
            rights = array.array("i", descriptors)
            with contextlib.suppress(OSError):  # the broker had refused it already
                connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        time.sleep(0.01)


def tell(answers: set[bytes], answer: bytes) -> None:
    text = dict(field.partition(b"=")[::2] for field in answer.split(b"\0")).get(b"text", b"")
    if text not in answers:
        answers.add(text)
        os.write(1, text + b"\n")


def keep(number: int, message: bytes | None) -> None:
    """Keep `number` connections open, on each of which `message` was sent with a descriptor; nothing if it is None."""
    waiting, answers = selectors.DefaultSelector(), set[bytes]()

    def another() -> None:
        connection = connect()
        if message:
            send(connection, message, 1)
        waiting.register(connection, selectors.EVENT_READ)

    for _ in range(number):
        another()
    print("begun", flush=True)
    while True:
        for key, _ in waiting.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            try:
                answer = connection.recv(65536)
            except OSError:
                answer = b""
            tell(answers, answer)
            if not answer or b"errno=0" not in answer:
                waiting.unregister(connection)
                connection.close()
                another()


def repeat(message: bytes, descriptors: int, *, dies: bool) -> None:
    """Send `message` on one connection after another. With `dies`, a separate process sends each."""
    kept = []
    while True:
        if dies and (child := os.fork()):
            os.waitpid(child, 0)
            continue
        try:
            connection = connect()
        except OSError:
            continue
        send(connection, message, descriptors)
        if dies:
            os._exit(0)
        kept.append(connection)
        del kept[:-20]


def main() -> None:
    what, number = sys.argv[1], int(sys.argv[2])
    if what in ("half-open", "no-commit"):
        keep(number, MOUNT if what == "no-commit" else None)
    acts: dict[str, Callable[[], None]] = {
        "flush": flood,
        "storm": lambda: repeat(MOUNT, 1, dies=True),
        "deaf": lambda: repeat(b"noise", 1, dies=False),
        "surplus": lambda: repeat(MOUNT, 253, dies=True),
    }
    for _ in itertools.repeat(None, number):
        if os.fork() == 0:
            acts[what]()
    print("begun", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        time.sleep(1)


main()
