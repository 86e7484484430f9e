"""A caller that wants everything for itself, for containers with Python and nothing of this project's.

    greedy.py half-open N    keep N connections open, on which nothing is said; those that are refused are made again
    greedy.py no-commit N    have N mounts begun, and never say that they are wanted
    greedy.py storm N        N processes at a time connect, ask for a mount, and die before the answer
    greedy.py deaf N         N processes ask for what is refused, again and again, and read nothing
    greedy.py surplus N      N processes send all the descriptors that a message can have, and hang up

Each different answer is printed, once, as soon as it is read. It goes on until it is killed.
"""

import array
import itertools
import os
import selectors
import signal
import socket
import sys
import time

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
        pass  # it was refused before
    finally:
        os.close(place)


def tell(answers: set[bytes], answer: bytes) -> None:
    text = dict(field.partition(b"=")[::2] for field in answer.split(b"\0")).get(b"text", b"")
    if text not in answers:
        answers.add(text)
        os.write(1, text + b"\n")


def keep(number: int, message: bytes | None) -> None:
    """Keep so many connections on which `message`, with a descriptor, was said."""
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
    """Say `message` on one connection after the other. With `dies` each is said by a process of its own."""
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
    acts = {
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
