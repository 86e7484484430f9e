"""A volume in a directory that stands for kubelet's, and FUSE programs that mount on it, for tests of the mounter.

The directory tree is what kubelet makes; kubelet is not there. The mounter is real; the test plays the front.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from broker import plan, syscalls
from fusermount3_proxy import wire
from tests.e2e.hostile import COMMIT, O_PATH, mount_request
from tests.e2e.owned_front import PATIENCE, Conversation, OwnedFront, a_plan, facts_of, playing_the_front
from tests.lab import tinyfuse
from tests.lab.commands import run
from tests.lab.podman import Mount, mountinfo

if TYPE_CHECKING:
    from collections.abc import Iterator

SOCKET = "fuse.sock"
NONCE = b"0123456789abcdef"


class Volume:
    """The directories of a pod with one volume and one emptyDir, on a mount that is shared, as kubelet's are."""

    def __init__(self, kubelet: Path) -> None:
        self.pod = str(uuid.uuid4())
        self._kubelet = kubelet
        volumes = kubelet / "pods" / self.pod / "volumes"
        self.empty_dir = volumes / "kubernetes.io~empty-dir/fuse-fd-passing"
        self.target = volumes / "kubernetes.io~csi/data/mount"
        self.empty_dir.mkdir(parents=True)
        self.empty_dir.chmod(0o777)
        self.target.parent.mkdir(parents=True)

    @property
    def file(self) -> Path:
        """The file of a program that serves the volume."""
        return self.target / os.fsdecode(tinyfuse.NAME)

    def relative(self, path: Path) -> bytes:
        return bytes(path.relative_to(self._kubelet))

    def start_publish(self, *, old_clients: bool = False, serving: bool = False) -> plan.StartPublish:
        directory = self.relative(self.empty_dir)
        return plan.StartPublish(
            PATIENCE, self.relative(self.target), directory, SOCKET.encode(), old_clients, serving, NONCE
        )

    def start_unpublish(self, seconds: int = PATIENCE) -> plan.StartUnpublish:
        directory = self.relative(self.empty_dir)
        return plan.StartUnpublish(seconds, self.relative(self.target), directory, SOCKET.encode(), NONCE)

    def mounts(self) -> list[Mount]:
        """Return what is mounted at the target, from below."""
        return [mount for mount in mountinfo() if mount.mountpoint == str(self.target)]

    def types(self) -> list[str]:
        return [mount.fstype for mount in self.mounts()]


@contextlib.contextmanager
def a_volume(directory: Path) -> Iterator[tuple[OwnedFront, Volume]]:
    """Have a mounter and a volume that is not published yet, in this mount namespace; at the end nothing may be left.

    `directory` stands for kubelet's.
    """
    run(["mount", "--bind", directory, directory])
    run(["mount", "--make-shared", directory])
    try:
        volume = Volume(directory)
        with playing_the_front(directory) as front:
            yield front, volume
            assert front.begin(volume.start_unpublish()).hear() == plan.Unpublished()
        assert not [mount for mount in mountinfo() if mount.mountpoint.startswith(f"{directory}/")]
        assert not volume.target.exists()
    finally:
        run(["umount", "--lazy", directory])


def publish(front: OwnedFront, volume: Volume, *, old_clients: bool = False, serving: bool = False) -> list[int]:
    """Return the descriptors that come."""
    said, descriptors = front.begin(
        volume.start_publish(old_clients=old_clients, serving=serving)
    ).hear_with_descriptors()
    assert said == plan.Published(), said
    return descriptors


def unpublish(front: OwnedFront, volume: Volume, seconds: int = PATIENCE) -> None:
    said = front.begin(volume.start_unpublish(seconds)).hear()
    assert said == plan.Unpublished(), said


def stat(front: OwnedFront, volume: Volume, seconds: int = PATIENCE) -> plan.Stated:
    said = front.begin(plan.StartStat(seconds, volume.relative(volume.target))).hear()
    assert isinstance(said, plan.Stated), said
    return said


class Program:
    """A FUSE program that mounts on the volume, in a process of its own, commits that, and serves; or does neither.

    `place` is its own mountpoint, if it wants one; with `namespace` it is in a mount namespace of its own, with
    `user_namespace` also in such a one. It dies with `kill`.
    """

    def __init__(
        self,
        front: OwnedFront,
        volume: Volume,
        content: bytes = b"hello",
        *,
        place: Path | None = None,
        uid: int = 0,
        namespace: bool = False,
        user_namespace: bool = False,
        hangs: bool = False,
        commits: bool = True,
    ) -> None:
        self._front = front
        self._volume = volume
        self.place = place
        address = f"\0fusermount3-broker-test-{os.getpid()}-{id(self)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen()
            self.pid = os.fork()
            if self.pid == 0:
                with contextlib.suppress(BaseException):
                    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
                    if namespace or user_namespace:
                        _unshare(user_namespace)
                    self._run(address, uid, content, hangs, commits)
                os._exit(1)
            listener.settimeout(PATIENCE)
            self.connection, _ = listener.accept()
        self.connection.settimeout(PATIENCE)
        self.connection.recv(1, socket.MSG_PEEK)  # it has sent

    def _run(self, address: str, uid: int, content: bytes, hangs: bool, commits: bool) -> None:
        descriptors = [os.open(self.place, O_PATH)] if self.place else []
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(address)
        request = mount_request(self.place) if self.place else wire.encode_request(wire.VolumeRequest())
        socket.send_fds(connection, [request], descriptors)
        for each in descriptors:
            os.close(each)
        _, (device,), _, _ = socket.recv_fds(connection, 1 << 16, 1)
        if commits:
            connection.send(COMMIT)
            tinyfuse.serve(device, content, hangs)
        signal.pause()

    def begin(self, *, read_only: bool = False, group: int = plan.NO_GROUP, held: int | None = None) -> Conversation:
        """Have the mounter begin to mount for it."""
        start = plan.StartVolumeMount(
            seconds=PATIENCE,
            commit_seconds=1,
            target=self._volume.relative(self._volume.target),
            pinned=self.place is not None,
            held=held is not None,
            read_only=read_only,
            group=group,
        )
        pidfd = os.pidfd_open(self.pid)
        conversation = self._front.begin(start, self.connection.fileno(), pidfd, *([] if held is None else [held]))
        os.close(pidfd)
        return conversation

    def mount(self, conversation: Conversation | None = None, **wanted: object) -> Conversation:
        """Mount for it, as far as it is not decided whether that is kept."""
        conversation = conversation or self.begin()
        conversation.say(a_plan(facts_of(conversation), allow_other=True, **wanted))
        said = conversation.hear()
        assert isinstance(said, plan.Mounted), said
        return conversation

    def keep(self, conversation: Conversation) -> None:
        """Keep the mount, which the program has committed."""
        self.connection.recv(1, socket.MSG_PEEK)
        conversation.say(plan.Keep())
        said = conversation.hear()
        assert said == plan.Kept(), said
        conversation.close()

    def kill(self) -> None:
        """End it as a crash does."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()


def serve(front: OwnedFront, volume: Volume, content: bytes = b"hello", **program: object) -> Program:
    """Return a program that serves the volume; its mount is kept."""
    started = Program(front, volume, content, **program)  # type: ignore[arg-type]  # as there
    started.keep(started.mount())
    return started


def _unshare(user_namespace: bool) -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS | (syscalls.CLONE_NEWUSER if user_namespace else 0))
    if user_namespace:
        for name, said in (("uid_map", "0 0 1"), ("setgroups", "deny"), ("gid_map", "0 0 1")):
            Path(f"/proc/self/{name}").write_text(said)
    syscalls.mount(None, b"/", None, syscalls.MS_REC | syscalls.MS_PRIVATE, None)
