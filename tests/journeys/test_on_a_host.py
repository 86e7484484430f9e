"""Journeys on one host of containers: from a machine with Podman to a mount, by the pages alone."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.e2e.conftest import wait_until
from tests.e2e.documented import ROOT, block, blocks, documented
from tests.journeys.host import CLONE, Host
from tests.journeys.journey import Journey, walking
from tests.lab import tinyfuse
from tests.lab.sshd import CLIENT_DIRECTORY, sshd_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.long]

INSTALL = "install-systemd.md"
#: Of the author, and of all who are to have it.
PROGRAM = ["-v", "/usr/local/bin/whoamifs:/usr/bin/whoamifs:ro"]


def install(host: Host, journey: Journey) -> None:
    """Build and install the packages; the host comes with them built."""
    journey.typed()  # make deb
    words = documented("apt-get install ./build/deb/fusermount3-broker_*.deb", INSTALL)
    host.type(journey, " ".join(words))


def run(options: list[str], image: str, script: str) -> str:
    """Return the command that runs a script in a container."""
    return shlex.join(["podman", "run", "--rm", *options, image, "sh", "-euc", script])


def options_of(command: str, page: str = "containers.md") -> list[str]:
    words = documented(command, page)
    return words[words.index("run") + 1 : words.index("IMAGE")]


HELLO = "from the other side\n"


@contextlib.contextmanager
def server(host: Host, user: str = "root") -> Iterator[str]:
    """Serve files to this user's sshfs, and yield the beginning of its command."""
    with sshd_for(host.container) as sshd:
        sshd.authorize(host.container, user)
        (sshd.export / "hello").write_text(HELLO)
        yield f"sshfs {shlex.join(sshd.sshfs_arguments())}"


def use(sshfs: str, mountpoint: str = "/mnt") -> str:
    """Return the script that mounts by sshfs, and reads."""
    return f"{sshfs} {mountpoint} && cat {mountpoint}/hello && fusermount3 -u {mountpoint}"


@pytest.fixture
def sshfs(host: Host) -> Iterator[str]:
    """A script that mounts by sshfs, and reads."""
    with server(host) as command:
        yield use(command)


#: The user's keys.
KEYS = ["-v", f"{CLIENT_DIRECTORY}:{CLIENT_DIRECTORY}:ro"]


def test_sshfs_in_podman(host: Host, sshfs: str) -> None:
    image = host.sshfs()
    with walking("Debian packages and sshfs in Podman") as journey:
        install(host, journey)
        assert host.type(journey, run([*options_of("docker run"), *KEYS], image, sshfs)).stdout == HELLO
        journey.mounted()


def test_ci_job(host: Host) -> None:
    image = host.busybox()
    containerfile = f"FROM {image}\nRUN whoamifs --probe /mnt\n"
    with walking("a CI job") as journey:
        install(host, journey)
        (host.container.root() / CLONE.lstrip("/") / "Containerfile").write_text(containerfile)
        words = [*documented("podman build", "ci.md")[:-1], "--pull=never", "--network=none", *PROGRAM, "."]
        assert "ok=yes" in host.type(journey, shlex.join(words)).stdout.splitlines()
        journey.mounted()


def cdi(host: Host, journey: Journey) -> list[str]:
    """Register the device as documented; return the option that requests it."""
    generate, _ = block("containers.md", "fusermount3-broker cdi generate").commands
    host.type(journey, generate)
    return options_of("podman run --device")


def test_cdi(host: Host, sshfs: str) -> None:
    image = host.sshfs()
    with walking("CDI, with an image that nobody changed") as journey:
        install(host, journey)
        option = cdi(host, journey)
        assert host.type(journey, run([*option, *KEYS], image, sshfs)).stdout == HELLO
        journey.mounted()


#: What Docker's containers need here, beside the servers of the machine: the cgroups that the machine sees.
CGROUPS = "/sys/fs/cgroup:/sys/fs/cgroup:ro"
NESTED = {"network_mode": "host", "volumes": [KEYS[1], CGROUPS]}


def test_cdi_with_docker(docker_host: Host) -> None:
    host, journey = docker_host, Journey()
    host.run("docker", "import", "/srv/sshfs.tar", "sshfs")
    install(host, journey)
    option = cdi(host, journey)
    with server(host) as sshfs:
        command = ["docker", "run", "--rm", "--network=host", f"--volume={CGROUPS}", *option, *KEYS, "sshfs"]
        assert host.run(*command, "sh", "-euc", use(sshfs)).stdout == HELLO


def test_docker_compose(docker_host: Host) -> None:
    host, page = docker_host, "where-it-runs.md"
    host.run("docker", "import", "/srv/sshfs.tar", "sshfs")
    project = host.container.root() / CLONE.lstrip("/")
    (text,) = [each.text for each in blocks() if each.page == page and each.text.startswith("# compose.yaml")]
    up, look = block(page, "docker compose up").commands
    with server(host) as sshfs, walking("Docker Compose") as journey:
        install(host, journey)
        files = text.replace("IMAGE", "sshfs").replace("sshfs -f user@server:/srv", f"{sshfs} -f")
        (project / "compose.yaml").write_text(files)
        (project / "compose.override.yaml").write_text(yaml.safe_dump({"services": {"files": NESTED}}))
        host.type(journey, up)
        journey.typed()
        wait_until(lambda: host.run("sh", "-c", f"cd {CLONE} && {look}", check=False).stdout == "hello\n")
        journey.mounted()
        host.run("sh", "-c", f"cd {CLONE} && docker compose down")


def mounts(host: Host) -> dict[str, str]:
    """Return the name of the FUSE program of each mount, by mountpoint; it is empty until the broker has looked."""
    listed = json.loads(host.run("fusermount3-broker", "mounts", "--json").stdout)
    return {each["mountpoint"]: each["program_command"] for each in listed}


def wait_until_shown(host: Host, mountpoint: str, program: str) -> None:
    """Return when the broker shows this mount alone, and which program serves it."""
    wait_until(lambda: mounts(host) == {mountpoint: program})


#: By its path in the image, which Python looks in.
AUTHORS = "/usr/lib/python3/dist-packages/tests"


@pytest.fixture
def program(host: Host) -> list[str]:
    """Options of the engine that give a container tests/programs/hello_alone.py and its modules."""
    volumes = []
    for path in (tinyfuse.__file__, ROOT / "tests/programs/hello_alone.py"):
        name = str(Path(path).relative_to(ROOT / "tests"))
        (host.container.root() / "srv" / Path(name).name).write_bytes(Path(path).read_bytes())
        volumes += ["-v", f"/srv/{Path(name).name}:{AUTHORS}/{name}:ro"]
    return volumes


def test_a_program_that_its_author_wrote_by_the_page(host: Host, program: list[str]) -> None:
    image = host.python()
    with walking("a FUSE author's own program") as journey:
        install(host, journey)
        cdi(host, journey)
        options = [word for word in options_of("podman run --rm -it", "fuse-programs.md") if word != "-it"]
        for user, mountpoint in (("root", "/mnt"), ("user", "/home/user/mnt")):
            given = [*options, *program, "--detach", f"--name={user}", f"--user={user}"]
            host.type(journey, shlex.join(["podman", "run", *given, image, "sleep", "infinity"]))
            inside = f"podman exec {user}"
            assert host.type(journey, f"{inside} fusermount3 -V").stdout == "fusermount3 version: 3.18.2\n"
            pid = host.run("podman", "exec", user, "python3", "-m", "tests.programs.hello_alone", mountpoint).stdout
            assert host.run("podman", "exec", user, "cat", f"{mountpoint}/file").stdout == "hello"
            journey.mounted()
            wait_until_shown(host, mountpoint, "python3")
            host.run("podman", "exec", user, "sh", "-c", f"kill -KILL {pid}")
            host.type(journey, f"{inside} fusermount3 -u {mountpoint}")
            assert mounts(host) == {}
            host.run("podman", "stop", "--time=0", user)


def test_a_refusal_is_found_in_the_log_and_mended(host: Host) -> None:
    image = host.sshfs()
    with (
        server(host, "user") as sshfs,
        walking("an administrator who reads why a mount was refused, and allows it") as journey,
    ):
        install(host, journey)
        script = use(f"{sshfs} -o allow_other", "/home/user/mnt")
        command = run([*options_of("docker run"), *KEYS, "--user=user"], image, script)
        refused = host.type(journey, command, check=False)
        assert refused.returncode == 1
        requests = re.findall(r"^fusermount3: broker request ([0-9a-f]{8})$", refused.stderr, re.MULTILINE)
        (find,) = block("messages.md", "journalctl").commands
        (sentence,) = host.type(journey, find.replace("3f6c0e52", requests[-1])).stdout.splitlines()
        assert "refused to mount on /home/user/mnt for uid 1000 in container " in sentence
        (key, file) = re.findall(r"'(\w+)' is set in (\S+)", sentence)[0]
        edit, *others = block(INSTALL, "$EDITOR").commands
        assert edit.endswith(f" {file}")
        host.type(journey, f"EDITOR='sed -i s/^#{key}.*/{key}=true/' && {edit}")
        for each in others:
            host.type(journey, each)
        assert host.type(journey, command).stdout == HELLO
        journey.mounted()


def test_an_upgrade_from_the_last_release(released_host: Host) -> None:
    host = released_host
    image = host.sshfs()
    container = [*options_of("docker run"), *KEYS]
    with server(host) as sshfs:
        host.run("podman", "run", "--rm", "--detach", "--name=live", *container, image, "sleep", "infinity")
        host.run("podman", "exec", "live", *shlex.split(sshfs), "/mnt")
        read = ("podman", "exec", "live", "cat", "/mnt/hello")
        assert host.run(*read).stdout == HELLO
        broker = host.systemctl("show", "--value", "--property=MainPID", "fusermount3-broker")
        with walking("upgrade from 0.1.0 with a live mount, which is read again") as journey:
            install(host, journey)
            assert host.systemctl("show", "--value", "--property=MainPID", "fusermount3-broker") != broker
            assert host.run(*read).stdout == HELLO
            journey.mounted()
            wait_until_shown(host, "/mnt", "sshfs")
            assert host.type(journey, run(container, image, use(sshfs))).stdout == HELLO
        # The proxy in the container is still that of the last release.
        host.run("podman", "exec", "live", "fusermount3", "-u", "/mnt")
        assert mounts(host) == {}
        host.run("podman", "stop", "--time=0", "live")
