"""A FUSE program mounts in each kind of container, and the proxy refuses what the real helper refuses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.caller import call_in
from tests.e2e.conftest import Start, containers, has_ended_all, wait_until
from tests.lab.images import BUSYBOX, image_tag, scratch_tag
from tests.lab.programs import Variant, whoamifs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import Popen

    from tests.lab.broker import Broker
    from tests.lab.podman import Container

pytestmark = pytest.mark.e2e


@dataclass(frozen=True)
class Kind:
    """A kind of container; `uid` and `gid` are those of its processes, as seen inside."""

    user: str | None = None
    user_namespace: bool = False
    read_only: bool = False

    @property
    def ids(self) -> tuple[str, str]:
        uid, _, gid = (self.user or "0:0").partition(":")
        return uid, gid

    def start(self, start: Start) -> Container:
        return start(image_tag(BUSYBOX), user=self.user, user_namespace=self.user_namespace, read_only=self.read_only)


KINDS = {
    "root": Kind(),
    "a user": Kind("1000:1000"),
    "a uid that is in no passwd file": Kind("12345:12345"),
    "root of a user namespace": Kind(user_namespace=True),
    "a user of a user namespace": Kind("1000:1000", user_namespace=True),
    "an unknown uid of a user namespace": Kind("12345:12345", user_namespace=True),
    "root with a read-only root directory": Kind(read_only=True),
    "a user with a read-only root directory": Kind("1000:1000", read_only=True),
}

MOUNTPOINT = "/tmp/m"


def serve(container: Container, mountpoint: str = MOUNTPOINT, *options: str) -> Popen[str]:
    """Start whoamifs at `mountpoint`, creating the directory if needed; return when it is mounted."""
    container.exec(["mkdir", "-p", mountpoint])
    program = container.start(["whoamifs", "-f", *options, mountpoint])
    wait_until(lambda: container.fuse_mounts(mountpoint) or program.poll() is not None)
    assert program.poll() is None, program.communicate()
    return program


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_program_mounts_serves_and_unmounts_as(kind: Kind, start: Start) -> None:
    container = kind.start(start)
    uid, gid = kind.ids
    program = serve(container)

    (mount,) = container.fuse_mounts()
    assert (mount.mountpoint, mount.fstype) == (MOUNTPOINT, "fuse.whoamifs")
    assert {"rw", "nosuid", "nodev"} <= mount.options

    owners = {line.split()[-1]: line.split()[2:4] for line in ls(container, "-lna", MOUNTPOINT)}
    assert owners == {name: [uid, gid] for name in (".", "whoami", "files")} | {"..": ["0", "0"]}

    reader = f'read -r seen < {MOUNTPOINT}/whoami; echo "pid=$$, seen: $seen"'
    said = container.exec(["sh", "-c", reader]).stdout.rstrip()
    pid = said.removeprefix("pid=").partition(",")[0]
    assert int(pid) > 0
    assert said == f"pid={pid}, seen: uid={uid} gid={gid} pid={pid}"

    container.exec(["sh", "-c", f"cat > {MOUNTPOINT}/files/file"], input="written\n")
    assert container.exec(["cat", f"{MOUNTPOINT}/files/file"]).stdout == "written\n"
    assert ls(container, "-n", f"{MOUNTPOINT}/files/file")[0].split()[2:4] == [uid, gid]

    result = container.exec(["fusermount3", "-u", MOUNTPOINT])
    assert (result.stdout, result.stderr) == ("", "")
    _, said = program.communicate(timeout=20)
    assert program.returncode == 0
    assert "fusermount" not in said  # libfuse sometimes prints a message of its own
    assert container.fuse_mounts() == []
    assert container.exec(["ls", MOUNTPOINT]).stdout == ""


def ls(container: Container, *arguments: str) -> list[str]:
    lines = container.exec(["ls", *arguments]).stdout.splitlines()
    return [line for line in lines if not line.startswith("total")]


SCRATCH = [
    *(pytest.param(kind, Variant.FUSE3_STATIC, id=f"{name}, libfuse 3") for name, kind in KINDS.items()),
    *(pytest.param(KINDS[name], Variant.FUSE2_STATIC, id=f"{name}, libfuse 2") for name in ("root", "a user")),
]


@pytest.mark.parametrize("kind, variant", SCRATCH)
def test_a_from_scratch_image_needs_only_the_program_and_the_proxy_as(
    kind: Kind, variant: Variant, start: Start, proxy: Path
) -> None:
    files = {f"/usr/bin/{name}": (proxy, 0o755) for name in ("fusermount3", "fusermount")}
    tag = scratch_tag({"/program": (whoamifs(variant), 0o755), **files})
    container = start(
        tag,
        command=("/program", "--pause"),
        user=kind.user,
        user_namespace=kind.user_namespace,
        read_only=kind.read_only,
        extra=("--tmpfs", "/mnt") if kind.read_only else (),
    )
    # The probe itself compares the uid, gid and pid that the FUSE program sees with its own.
    result = container.exec(["/program", "--probe", "/mnt"], check=False)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "ok=yes"), result.stdout + result.stderr
    assert "whoami uid={} gid={}".format(*kind.ids) in result.stdout
    assert "read-back=written through the mount" in result.stdout
    wait_until(lambda: has_ended_all(container))


USERS = {
    "a user": Kind("1000:1000"),
    "a user of a user namespace": Kind("1000:1000", user_namespace=True),
    "an unknown uid": Kind("12345:12345"),
}
ROOTS = {"root": Kind(), "root of a user namespace": Kind(user_namespace=True)}


def kinds(*groups: dict[str, Kind]) -> pytest.MarkDecorator:
    """Run the test in a container of each of these kinds."""
    every = {name: kind for group in groups for name, kind in group.items()}
    return pytest.mark.parametrize("container", every.values(), ids=every.keys(), indirect=True)


@pytest.fixture(scope="module")
def container(request: pytest.FixtureRequest, session_broker: Broker) -> Iterator[Container]:
    """A container shared by the tests that must mount nothing in it."""
    with containers(session_broker) as start:
        yield request.param.start(start)


def refusal(container: Container, path: str) -> str:
    """Check that the helper refuses to mount at `path`; return the first line of its message."""
    outcome = call_in(container, ["fusermount3", "--", path], container.options.user)
    assert (outcome.status, outcome.stdout, outcome.descriptor) == (1, "", None), outcome
    assert container.fuse_mounts() == []
    return outcome.stderr.splitlines()[0].removeprefix("fusermount3: ")


@kinds(USERS)
@pytest.mark.usefixtures("broker")
class TestUsersAreRefused:
    def test_a_directory_that_is_not_theirs_to_write(self, container: Container) -> None:
        assert refusal(container, "/mnt") == "user has no write access to mountpoint /mnt"

    def test_a_sticky_directory_of_another(self, container: Container) -> None:
        assert refusal(container, "/tmp") == "mountpoint /tmp not owned by user"

    def test_a_symbolic_link(self, container: Container) -> None:
        container.exec(["sh", "-c", "mkdir /tmp/there && ln -s there /tmp/link"])
        message = "mountpoint /tmp/link is not a directory or a regular file"
        assert refusal(container, "/tmp/link") == message
        assert refusal(container, "/tmp/link/") == message

    def test_a_file_that_is_not_theirs_to_write(self, container: Container) -> None:
        assert refusal(container, "/etc/passwd") == "failed to open /etc/passwd: Permission denied"

    def test_a_directory_below_one_that_is_closed_to_them(self, container: Container) -> None:
        assert refusal(container, "/root/m/x") == "bad mount point /root/m/x: Permission denied"

    def test_a_directory_of_proc_even_their_own(self, container: Container) -> None:
        assert refusal(container, "/proc/self/task").startswith("user has no write access to mountpoint /proc/")


@kinds(ROOTS)
@pytest.mark.usefixtures("broker")
@pytest.mark.parametrize("path, kernel_type", [("/proc", 0x9FA0), ("/sys", 0x62656572), ("/proc/sys", 0x9FA0)])
def test_not_even_root_mounts_over_a_filesystem_of_the_kernel(
    path: str, kernel_type: int, container: Container
) -> None:
    assert refusal(container, path) == f"mounting over filesystem type 0x{kernel_type:08x} is forbidden"


@kinds(ROOTS, USERS)
@pytest.mark.usefixtures("broker")
class TestNobodyMountsOn:
    def test_a_fifo(self, container: Container) -> None:
        container.exec(["mkfifo", "/tmp/fifo"])
        assert refusal(container, "/tmp/fifo") == "mountpoint /tmp/fifo is not a directory or a regular file"

    def test_a_device(self, container: Container) -> None:
        assert refusal(container, "/dev/null") == "mountpoint /dev/null is not a directory or a regular file"

    def test_what_is_not_there(self, container: Container) -> None:
        message = "failed to access mountpoint /tmp/nothing: No such file or directory"
        assert refusal(container, "/tmp/nothing") == message


@kinds(ROOTS, USERS)
@pytest.mark.usefixtures("broker")
def test_only_what_the_broker_mounted_is_unmounted(container: Container) -> None:
    for path in ("/proc", "/dev/shm", "/dev/fuse", "/tmp/nothing"):
        result = container.exec(["fusermount3", "-u", "-z", path], check=False)
        assert (result.returncode, result.stdout) == (1, "")
        assert path in result.stderr
    assert {"/proc", "/dev/shm", "/dev/fuse"} <= {mount.mountpoint for mount in container.mountinfo()}


def test_a_root_directory_that_is_read_only_is_refused_to_a_user(start: Start) -> None:
    container = Kind("1000:1000", read_only=True).start(start)
    assert refusal(container, "/home/user/mnt") == "user has no write access to mountpoint /home/user/mnt"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_regular_file_is_a_mountpoint_for(kind: Kind, start: Start) -> None:
    container = kind.start(start)
    container.exec(["touch", "/tmp/file"])
    outcome = call_in(container, ["fusermount3", "/tmp/file"], kind.user)
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "", "")
    assert [mount.mountpoint for mount in container.fuse_mounts()] == ["/tmp/file"]
    result = container.exec(["fusermount3", "-u", "/tmp/file"])
    assert (result.stdout, result.stderr) == ("", "")
    outcome.close()


def test_a_user_mounts_on_a_directory_of_another_that_everybody_may_write_to(start: Start) -> None:
    container = Kind("1000:1000").start(start)
    container.exec(["sh", "-c", "mkdir /srv && chmod 777 /srv"], user="0:0")
    serve(container, "/srv")
    container.exec(["fusermount3", "-u", "/srv"])


def test_what_a_user_mounts_another_cannot_enter_or_unmount(start: Start) -> None:
    container = start(image_tag(BUSYBOX))
    container.exec(["mkdir", MOUNTPOINT], user="1000:1000")
    program = container.start(["whoamifs", "-f", MOUNTPOINT], user="1000:1000")
    wait_until(lambda: container.fuse_mounts() or program.poll() is not None)

    assert "Permission denied" in container.exec(["ls", MOUNTPOINT], user="12345:12345", check=False).stderr
    result = container.exec(["fusermount3", "-u", MOUNTPOINT], user="12345:12345", check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(f"fusermount3: entry for {MOUNTPOINT} not found in /etc/mtab\n")
    assert container.fuse_mounts() != []

    container.exec(["fusermount3", "-u", MOUNTPOINT], user="0:0")  # root may unmount it
    assert program.wait(timeout=20) == 0


def test_a_busy_filesystem_is_unmounted_only_lazily(start: Start) -> None:
    container = Kind("1000:1000").start(start)
    program = serve(container)
    reader = container.start(["sh", "-c", f"echo $$ > /tmp/reader; cd {MOUNTPOINT} && echo there && exec sleep 1000"])
    assert reader.stdout and reader.stdout.readline() == "there\n"

    result = container.exec(["fusermount3", "-u", MOUNTPOINT], check=False)
    assert result.returncode == 1
    message = f"fusermount3: failed to unmount {MOUNTPOINT}: Device or resource busy"
    assert result.stderr.splitlines()[0] == message
    quiet = container.exec(["fusermount3", "-u", "-q", MOUNTPOINT], check=False)
    assert (quiet.returncode, quiet.stderr) == (1, "")
    assert container.fuse_mounts() != []

    container.exec(["fusermount3", "-uz", MOUNTPOINT])
    assert container.fuse_mounts() == []
    container.exec(["sh", "-c", "kill $(cat /tmp/reader)"])
    assert program.wait(timeout=20) == 0


@pytest.mark.parametrize("name", ["fusermount3", "fusermount"])
def test_the_proxy_works_under_both_names_with_its_stdio_closed(name: str, start: Start) -> None:
    container = Kind("1000:1000").start(start)
    container.exec(["mkdir", MOUNTPOINT])
    closed = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', name]
    outcome = call_in(container, [*closed, MOUNTPOINT, "-o", "ro,fsname=source"], "1000:1000")
    assert outcome.status == 0
    assert outcome.descriptor is not None
    assert Path(f"/proc/self/fd/{outcome.descriptor}").readlink() == Path("/dev/fuse")
    assert [(mount.source, "ro" in mount.options) for mount in container.fuse_mounts()] == [("source", True)]
    container.exec([*closed, "-u", MOUNTPOINT])
    assert container.fuse_mounts() == []
    assert container.exec([*closed, "-u", MOUNTPOINT], check=False).returncode == 1
    outcome.close()


def test_messages_begin_with_the_name_that_the_caller_gave(start: Start) -> None:
    container = Kind("1000:1000").start(start)
    container.exec(["ln", "-s", "/usr/bin/fusermount3", "/tmp/my own"])
    for name in ("/usr/bin/fusermount3", "fusermount", "/tmp/my own"):
        result = container.exec([name, "-u", "/tmp/x"], check=False)
        assert result.stderr.splitlines()[0] == f"{name}: entry for /tmp/x not found in /etc/mtab"
        assert all(line.startswith(f"{name}: ") for line in result.stderr.splitlines())


def test_the_mountpoint_may_be_relative_and_have_any_name(start: Start) -> None:
    container = Kind("1000:1000").start(start)
    name = "a b\nc,d\\e=é"
    container.exec(["mkdir", f"/tmp/{name}"])
    program = container.start(["whoamifs", "-f", name], workdir="/tmp")
    wait_until(lambda: container.fuse_mounts() or program.poll() is not None)
    assert [mount.mountpoint for mount in container.fuse_mounts()] == [f"/tmp/{name}"]
    container.exec(["fusermount3", "-u", f"./{name}//"], workdir="/tmp")
    assert program.wait(timeout=20) == 0


def test_a_filesystem_whose_program_is_dead_is_unmounted(start: Start) -> None:
    container = Kind("1000:1000").start(start)
    serve(container)
    container.exec(["sh", "-c", "kill -KILL $(pidof whoamifs)"])
    wait_until(lambda: "not connected" in container.exec(["ls", MOUNTPOINT], check=False).stderr)
    container.exec(["fusermount3", "-u", MOUNTPOINT])


def test_twenty_programs_mount_at_once(start: Start) -> None:
    container = Kind("1000:1000").start(start)
    places = [f"/tmp/m{number}" for number in range(20)]
    container.exec(["mkdir", *places])
    script = 'for place; do whoamifs --probe "$place" > "$place.out" & done; wait; cat /tmp/*.out'
    output = container.exec(["sh", "-c", script, "sh", *places]).stdout
    assert output.count("ok=yes\n") == len(places), output
