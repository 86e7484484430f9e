"""A real S3 server for s3fs: moto, from PyPI, in the network namespace of a container, like `tests.lab.sshd`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tests.callers.build import SITE, python_programs
from tests.lab.commands import run

if TYPE_CHECKING:
    from collections.abc import Iterator

PORT = 9000
"""Any port will do: a network namespace has all of them to itself."""

URL = f"http://127.0.0.1:{PORT}"
BUCKET = "bucket"


class Networked(Protocol):
    """A container or another machine with a network namespace of its own."""

    @property
    def pid(self) -> int:
        """The pid of a process in it."""


@contextlib.contextmanager
def s3_for(container: Networked) -> Iterator[str]:
    """Yield the URL of a server for the processes in this container; the server ends with the block.

    There is one bucket, BUCKET, with a file `hello` in it. Raises `build.NotReachable` if moto can't be downloaded.
    """
    site = python_programs("s3-server") / SITE
    with tempfile.TemporaryDirectory(prefix="fusermount3-proxy-lab-s3-") as name:
        directory = Path(name)
        run(["tar", "--extract", "--file", site, "--directory", directory])
        with (directory / "log").open("wb") as log:
            server = subprocess.Popen(
                [*in_network_of(container), sys.executable, "-m", "moto.server", "--host=0.0.0.0", f"--port={PORT}"],
                env={
                    "PYTHONPATH": str(directory),
                    "PATH": "/usr/bin:/bin",
                    # Whatever the server's name, its first part is not a bucket.
                    "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
            )
        try:
            wait_until_serving(container, server, directory / "log")
            put(container, BUCKET)
            put(container, f"{BUCKET}/hello", "hello\n")
            yield URL
        finally:
            server.terminate()
            server.wait(timeout=60)


def in_network_of(container: Networked) -> list[str]:
    return ["nsenter", f"--net=/proc/{container.pid}/ns/net", "--"]


PUT = """
import sys, urllib.request
headers = {"Content-Type": "application/octet-stream"}  # without it moto takes the content for a form
request = urllib.request.Request(sys.argv[1], data=sys.argv[2].encode(), headers=headers, method="PUT")
urllib.request.urlopen(request, timeout=60).close()
"""


def put(container: Networked, path: str, content: str = "") -> None:
    """Create a bucket, or an object in a bucket."""
    run([*in_network_of(container), sys.executable, "-c", PUT, f"{URL}/{path}", content])


_GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode(), end='')"


def get(container: Networked, url: str = URL) -> str:
    """Return what is at a URL in the container's network; by default, the list of the buckets."""
    return run([*in_network_of(container), sys.executable, "-c", _GET, url]).stdout


def accepts(container: Networked, port: int) -> bool:
    """Return whether a server accepts connections in the container's network, at this port."""
    connect = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 10)"
    return run([*in_network_of(container), sys.executable, "-c", connect, str(port)], check=False).returncode == 0


def wait_until_serving(
    container: Networked, server: subprocess.Popen[bytes], log: Path, seconds: float = 90, port: int = PORT
) -> None:
    give_up = time.monotonic() + seconds
    while not accepts(container, port):
        assert server.poll() is None and time.monotonic() < give_up, log.read_text()
        time.sleep(0.1)
