"""The proxy of meta-fuse-csi-plugin, where it is available, and the minimal driver that it needs.

The plugin has mounted the filesystem before a program asks for it. Its proxy connects to a stream socket, sends
nothing, receives one message with the descriptor, removes the socket's path, and passes the descriptor on: it does not
mount, so only the descriptor's way is measured with it.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from fusermount3_broker.kernel import syscalls

MODULE = "github.com/pfnet-research/meta-fuse-csi-plugin"
ADDRESS = re.compile(r"\S+://\S+ ?")


class NotMeasured(Exception):
    """The reason why the proxy is not available here."""


def install(directory: Path) -> Path:
    """Return the executable, newly built in `directory` from its Go module. Raises NotMeasured."""
    module = json.loads(go(directory, directory, 60, "mod", "download", "-modcacherw", "-json", f"{MODULE}@latest"))
    executable = directory / "meta-fuse-proxy"
    build = ["build", "-modcacherw", "-o", str(executable), "./cmd/fusermount3-proxy"]
    go(directory, Path(module["Dir"]), 300, *build)
    return executable


def go(directory: Path, sources: Path, seconds: int, *arguments: str) -> str:
    """Return the output of a go command in `sources`; its caches are in `directory`.

    Raises NotMeasured if it fails, takes longer, or there is no go.
    """
    program = shutil.which("go")
    if not program:
        raise NotMeasured("no go on this machine")
    environment = {
        **os.environ,
        "GOTOOLCHAIN": "local",
        "CGO_ENABLED": "0",
        "GOPATH": str(directory / "go"),
        "GOMODCACHE": str(directory / "go/pkg/mod"),
        "GOCACHE": str(directory / "go-build"),
    }
    try:
        ended = subprocess.run(
            [program, *arguments], env=environment, cwd=sources, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"go {arguments[0]} took longer than {seconds} seconds") from None
    if ended.returncode != 0:
        raise NotMeasured(reason(ended.stdout, ended.stderr))
    return ended.stdout


def reason(stdout: str, stderr: str) -> str:
    """Return the error that go has printed, in JSON or not, in one line, without addresses, which vary."""
    with suppress(ValueError, KeyError):
        stderr = json.loads(stdout)["Error"]
    return ADDRESS.sub("", " ".join(stderr.split()))[:300]


class Driver:
    """Serves the plugin's protocol on `socket`, one message for each `publish`, until the `with` block ends."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "driver.sock"
        self._bound = directory / "driver.bound"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._serve)
        self._device = -1

    def __enter__(self) -> "Driver":
        self._listener.bind(str(self._bound))
        self._listener.listen()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def publish(self, mountpoint: Path) -> None:
        """Mount a filesystem at `mountpoint`; the next client that connects gets its descriptor."""
        os.link(self._bound, self.socket)  # the client will remove the path
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        data = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount(b"fuse", bytes(mountpoint), b"fuse", flags, data.encode())

    def _serve(self) -> None:
        message = json.dumps({"volumeName": "benchmark"}).encode()
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # the socket was shut down
            with connection:
                socket.send_fds(connection, [message], [self._device])
            os.close(self._device)
