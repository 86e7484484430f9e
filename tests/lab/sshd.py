"""A real sshd as the other end of sshfs, reachable from a container that has no network.

The sshd runs on the host, with the host's files, but is started in the network namespace of the container (nsenter
--net): an unmodified sshfs connects to 127.0.0.1 there, and no other process of the host can reach this sshd. The
image needs nothing but sshfs and ssh.

It runs as an unprivileged user who can log in as no other user, with keys of its own, for SFTP only, and reads no
configuration other than the one in its temporary directory.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.commands import Argument, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.podman import Container

PORT = 2222
"""Any port will do: a network namespace has all of them to itself."""

SERVER_USER = "daemon"
"""An account of every Debian that owns nothing. Not nobody: nss-systemd calls that one locked, and sshd
heeds it."""

CLIENT_DIRECTORY = "/tmp/lab-ssh"

SERVER_CONFIG = """\
ListenAddress 127.0.0.1:{port}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowTcpForwarding no
Subsystem sftp internal-sftp
ForceCommand internal-sftp -d {directory}/export
"""

CLIENT_CONFIG = """\
Host {host}
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {directory}/key
    IdentitiesOnly yes
    UserKnownHostsFile {directory}/known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
    LogLevel ERROR
"""


@dataclass(frozen=True)
class Sshd:
    """A running sshd and the directory that it exports.

    sshfs in the container: ["sshfs", *sshd.sshfs_arguments(), "/mnt"], after sshd.authorize(container).
    """

    process: subprocess.Popen[bytes]
    directory: Path
    """Keys, configuration, log; deleted at the end."""

    @property
    def export(self) -> Path:
        """Return the directory of the host that sshfs_arguments() name; owned by SERVER_USER."""
        return self.directory / "export"

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def sshfs_arguments(self) -> list[str]:
        """Return client configuration and source, the arguments of sshfs before the mountpoint."""
        return ["-F", f"{CLIENT_DIRECTORY}/config", f"lab:{self.export}"]

    def authorize(self, container: Container, user: str | None = None) -> None:
        """Give this user of the container the key and configuration to connect with.

        The image needs sh, and a passwd entry for the user: ssh refuses to run without.
        """
        script = f'umask 077 && mkdir -p {CLIENT_DIRECTORY} && cat > {CLIENT_DIRECTORY}/"$1"'
        for name, content in client_files(self.directory, "lab", CLIENT_DIRECTORY).items():
            container.exec(["sh", "-c", script, "sh", name], user=user, input=content)


@contextlib.contextmanager
def sshd_for(container: Container) -> Iterator[Sshd]:
    """Start an sshd that processes in this container reach at 127.0.0.1; it ends with the block."""
    with prepared() as directory, serving(directory, container) as sshd:
        yield sshd


@contextlib.contextmanager
def prepared() -> Iterator[Path]:
    """Prepare the directory of an sshd that is not started yet; it is removed after the block."""
    directory = Path(tempfile.mkdtemp(prefix="fusermount3-proxy-lab-sshd-"))
    try:
        prepare(directory)
        yield directory
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def serving(directory: Path, container: Container) -> Iterator[Sshd]:
    """Start the sshd of a `prepared` directory, in the network of this container; it ends with the block."""
    process = start(directory, container.pid)
    try:
        wait_until_listening(process, directory / "log")
        yield Sshd(process, directory)
    finally:
        stop(process)


def prepare(directory: Path) -> None:
    """Make keys, configuration and the exported directory."""
    for key in ("host_key", "user_key"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", directory / key])
    (directory / "authorized_keys").write_bytes((directory / "user_key.pub").read_bytes())
    (directory / "config").write_text(SERVER_CONFIG.format(directory=directory, port=PORT))
    (directory / "export").mkdir()
    (directory / "log").touch()
    for path in (directory, *directory.iterdir()):
        shutil.chown(path, SERVER_USER)


def client_files(directory: Path, host: str, at: str) -> dict[str, str]:
    """Return the files, by name, that a client needs for an sshd with this directory, for the directory `at`.

    The server is `host` then, for `ssh -F config`.
    """
    return {
        "key": (directory / "user_key").read_text(),
        "known_hosts": f"[127.0.0.1]:{PORT} {(directory / 'host_key.pub').read_text()}",
        "config": CLIENT_CONFIG.format(host=host, port=PORT, user=SERVER_USER, directory=at),
    }


def start(directory: Path, netns_of: int) -> subprocess.Popen[bytes]:
    """Start sshd in the network namespace of that process and as SERVER_USER, both by nsenter."""
    server = pwd.getpwnam(SERVER_USER)
    identity = [f"--setuid={server.pw_uid}", f"--setgid={server.pw_gid}"]
    # By its absolute path: sshd starts itself again for each connection.
    sshd: list[Argument] = ["/usr/sbin/sshd", "-D", "-E", directory / "log", "-f", directory / "config"]
    return subprocess.Popen(
        ["nsenter", f"--net=/proc/{netns_of}/ns/net", *identity, "--", *sshd],
        stdin=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def wait_until_listening(process: subprocess.Popen[bytes], log: Path, seconds: float = 10.0) -> None:
    """Return when sshd accepts connections. RuntimeError with sshd's own words if it does not."""
    deadline = time.monotonic() + seconds
    while "Server listening" not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"sshd did not start: {log.read_text(errors='replace').strip()}")
        time.sleep(0.01)


def stop(process: subprocess.Popen[bytes], seconds: float = 5.0) -> None:
    """End sshd and before it its sessions, which would otherwise live as long as their clients.

    A session is a chain of processes, and each reaps its child: so the last one is killed, the others follow, and no
    orphan is left to a process 1 that might not reap.
    """
    deadline = time.monotonic() + seconds
    while (sessions := descendants(process.pid)) and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.kill(sessions[-1], signal.SIGKILL)
        time.sleep(0.01)
    process.terminate()
    process.wait(timeout=10)


def descendants(pid: int) -> list[int]:
    """Return children, their children and so on; the last one has no children.

    See /proc/PID/task/TID/children in proc(5).
    """
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [grandchild for child in children for grandchild in descendants(child)]
