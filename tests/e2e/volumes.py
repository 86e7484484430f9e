"""A volume in a stand-in for the directory of kubelet, and FUSE programs that mount on it, for tests of the mounter.

The directory tree is as kubelet makes it, but no kubelet runs. The mounter is real; the test plays the front.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_proxy import wire
from tests.e2e.hostile import COMMIT, O_PATH, mount_request
from tests.e2e.owned_front import PATIENCE, Conversation, OwnedFront, a_plan, facts_of, playing_the_front
from tests.lab import cgroups, tinyfuse
from tests.lab.cgroups import CgroupRoot
from tests.lab.commands import run
from tests.lab.forked import ending_afterwards
from tests.lab.podman import Mount, mountinfo

if TYPE_CHECKING:
    from collections.abc import Iterator

SOCKET = "fuse.sock"
NONCE = b"0123456789abcdef"


class Volume:
    """The directories of a pod with one volume and one emptyDir, on a shared mount like those of kubelet."""

    def __init__(self, kubelet: Path) -> None:
        self.pod = str(uuid.uuid4())
        self.cgroups = CgroupRoot()
        self._kubelet = kubelet
        volumes = kubelet / "pods" / self.pod / "volumes"
        self.empty_dir = volumes / "kubernetes.io~empty-dir/fuse-fd-passing"
        self.target = volumes / "kubernetes.io~csi/data/mount"
        self.empty_dir.mkdir(parents=True)
        self.empty_dir.chmod(0o777)
        self.target.parent.mkdir(parents=True)

    def beside(self) -> Volume:
        """Return a volume of another pod."""
        return Volume(self._kubelet)

    @property
    def file(self) -> Path:
        """The file that a FUSE program serves in the volume."""
        return self.target / os.fsdecode(tinyfuse.NAME)

    def sub_path(self, container: str) -> Path:
        """Return where kubelet bind-mounts a part of the volume for a container; its parent directory exists."""
        path = self._kubelet / "pods" / self.pod / "volume-subpaths/data" / container / "0"
        path.parent.mkdir(parents=True)
        return path

    def enter_pod(self) -> None:
        """Move this process into the cgroup of the pod, which is named as by kubelet."""
        (cgroups.make(self.cgroups.pod(self.pod)) / "cgroup.procs").write_text("0")

    def relative(self, path: Path) -> bytes:
        return bytes(path.relative_to(self._kubelet))

    def start_publish(
        self, *, old_clients: bool = False, serving: bool = False, shared: bool = False
    ) -> mounter.StartPublish:
        directory = self.relative(self.empty_dir)
        return mounter.StartPublish(
            PATIENCE, self.relative(self.target), directory, SOCKET.encode(), old_clients, serving, NONCE, shared
        )

    def start_mount(
        self,
        *,
        pinned: bool = False,
        held: bool = False,
        read_only: bool = False,
        group: int = mounter.NO_GROUP,
        former: bytes = b"",
        shared: bool = False,
    ) -> mounter.StartVolumeMount:
        target = self.relative(self.target)
        return mounter.StartVolumeMount(PATIENCE, 1, target, pinned, held, read_only, group, former, shared)

    def start_eager(self) -> mounter.StartEager:
        return mounter.StartEager(PATIENCE, self.relative(self.target), mounter.NO_GROUP, b"")

    def start_unpublish(self, seconds: int = PATIENCE) -> mounter.StartUnpublish:
        directory = self.relative(self.empty_dir)
        return mounter.StartUnpublish(seconds, self.relative(self.target), directory, SOCKET.encode(), NONCE)

    def mounts(self) -> list[Mount]:
        """Return the mounts at the target, from bottom to top, which is not always the order of mountinfo."""
        here = {mount.parent: mount for mount in mountinfo() if mount.mountpoint == str(self.target)}
        ids = {mount.id for mount in here.values()}
        stack = [mount for parent, mount in here.items() if parent not in ids]
        while stack and (above := here.get(stack[-1].id)):
            stack.append(above)
        return stack

    def types(self) -> list[str]:
        return [mount.fstype for mount in self.mounts()]


@contextlib.contextmanager
def a_volume(directory: Path) -> Iterator[tuple[OwnedFront, Volume]]:
    """Yield a mounter and an unpublished volume in this mount namespace; check at the end that nothing remains.

    `directory` stands for the directory of kubelet.
    """
    run(["mount", "--bind", directory, directory])
    run(["mount", "--make-shared", directory])
    volume = Volume(directory)
    try:
        with playing_the_front(directory) as front:
            yield front, volume
            unpublish(front, volume)
        assert not [mount for mount in mountinfo() if mount.mountpoint.startswith(f"{directory}/")]
        assert not volume.target.exists()
    finally:
        run(["umount", "--lazy", directory])
        volume.cgroups.remove()


def mount_fusectl() -> Path:
    """Mount fusectl, unless it is mounted as systemd does; return its mountpoint."""
    place = Path("/sys/fs/fuse/connections")
    if not any(mount.mountpoint == str(place) for mount in mountinfo()):
        run(["mount", "-t", "fusectl", "fusectl", place])
    return place


def publish(front: OwnedFront, volume: Volume, **wanted: bool) -> list[int]:
    """Publish the volume, `wanted` as for `Volume.start_publish`; return the received descriptors."""
    said, descriptors = front.begin(volume.start_publish(**wanted)).hear_with_descriptors()
    assert said == mounter.Published(), said
    return descriptors


def unpublish(front: OwnedFront, volume: Volume, seconds: int = PATIENCE) -> None:
    said = front.begin(volume.start_unpublish(seconds)).hear()
    assert said == mounter.Unpublished(), said


def stat(front: OwnedFront, volume: Volume, seconds: int = PATIENCE) -> mounter.Stated:
    said = front.begin(mounter.StartStat(seconds, volume.relative(volume.target))).hear()
    assert isinstance(said, mounter.Stated), said
    return said


class Program:
    """A FUSE program in its own process that mounts on the volume, then commits the mount and serves, or does neither.

    `place` is its own mountpoint, if it needs one. With `namespace` it has its own mount namespace; with
    `user_namespace` it also has its own user namespace. With that, or `in_pod`, it is in the cgroup of the pod, where
    the mounter looks for it. `kill` ends it.
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
        in_pod: bool = False,
        hangs: bool = False,
        commits: bool = True,
        mode: int = 0o644,
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
                with ending_afterwards():
                    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
                    if user_namespace or in_pod:
                        volume.enter_pod()
                    if namespace or user_namespace:
                        _unshare(user_namespace)
                    self._run(address, uid, content, hangs, commits, mode)
            listener.settimeout(PATIENCE)
            self.connection, _ = listener.accept()
        self.connection.settimeout(PATIENCE)
        self.connection.recv(1, socket.MSG_PEEK)  # wait until it has sent

    def _run(self, address: str, uid: int, content: bytes, hangs: bool, commits: bool, mode: int) -> None:
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
            tinyfuse.serve(device, content, hangs, mode)
        signal.pause()

    def begin(self, *, held: int | None = None, **wanted: Any) -> Conversation:
        """Start a mount for the program in the mounter, `wanted` as for `Volume.start_mount`."""
        start = self._volume.start_mount(pinned=self.place is not None, held=held is not None, **wanted)
        pidfd = os.pidfd_open(self.pid)
        conversation = self._front.begin(start, self.connection.fileno(), pidfd, *([] if held is None else [held]))
        os.close(pidfd)
        return conversation

    def mount(self, conversation: Conversation | None = None, **wanted: object) -> Conversation:
        """Mount for the program, up to the decision whether to keep the mount."""
        conversation = conversation or self.begin()
        conversation.say(a_plan(facts_of(conversation), allow_other=True, **wanted))
        said = conversation.attached()
        assert isinstance(said, mounter.Mounted), said
        return conversation

    def keep(self, conversation: Conversation) -> None:
        """Keep the mount that the program has committed."""
        self.connection.recv(1, socket.MSG_PEEK)
        conversation.say(mounter.Keep())
        said = conversation.hear()
        assert said == mounter.Kept(), said
        conversation.close()

    def kill(self) -> None:
        """Kill the program, as in a crash."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()


def serve(
    front: OwnedFront, volume: Volume, content: bytes = b"hello", *, former: bytes = b"", **program: object
) -> Program:
    """Return a program that serves the volume, with its mount kept; `former` as in `mounter.StartVolumeMount`."""
    started = Program(front, volume, content, **program)  # type: ignore[arg-type]  # the arguments of Program
    started.keep(started.mount(started.begin(former=former)))
    return started


def _unshare(user_namespace: bool) -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS | (syscalls.CLONE_NEWUSER if user_namespace else 0))
    if user_namespace:
        for name, said in (("uid_map", "0 0 1"), ("setgroups", "deny"), ("gid_map", "0 0 1")):
            Path(f"/proc/self/{name}").write_text(said)
    syscalls.mount(None, b"/", None, syscalls.MS_REC | syscalls.MS_PRIVATE, None)
