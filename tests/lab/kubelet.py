"""Kubelet's work for a pod with volumes of a CSI driver: the same paths, the same calls, in the same order.

The rules are those of kubelet 1.31: pkg/kubelet/kuberuntime (containers), pkg/volume/csi (calls, and the files around
a target path), pkg/volume/emptydir, pkg/volume/util/subpath. Podman and runc stand in for containerd. Three things
differ: an ended container is restarted at once, not after a back-off; failed calls are repeated sooner; images come
from a table (`Images`) by their names in manifests.

    with kubelet.pod(manifests.load(path)) as pod:
        pod["consumer"].exec(["cat", "/data/file"])

When the block has ended, kubelet has removed the pod, and has checked that nothing of it is left.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import grpc

from fusermount3_broker.csi import csi_pb2 as csi
from tests.lab import cgroups, manifests, podman, volume_runtime
from tests.lab.csi import CsiError, Plugin
from tests.lab.images import BUSYBOX, image_tag
from tests.lab.manifests import CsiVolume, EmptyDir, Files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.lab.commands import Argument
    from tests.lab.node import Node
    from tests.lab.podman import Mount

REPUBLISH = 0.1
"""Seconds from one look at a pod to the next; kubelet's reconciler loop has the same."""

RETRY, LONGEST_RETRY = 0.1, 2.0
"""Seconds until a failed call is made again, and what that is doubled to; kubelet's are 0.5 and 122."""

PATIENCE = 60.0
"""Seconds in which a pod must have started, and be gone again."""

ACCESS_MODES = {
    "ReadWriteOnce": csi.VolumeCapability.AccessMode.SINGLE_NODE_WRITER,
    "ReadOnlyMany": csi.VolumeCapability.AccessMode.MULTI_NODE_READER_ONLY,
    "ReadWriteMany": csi.VolumeCapability.AccessMode.MULTI_NODE_MULTI_WRITER,
    "ReadWriteOncePod": csi.VolumeCapability.AccessMode.SINGLE_NODE_SINGLE_WRITER,
}

UNCERTAIN = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}
"""After these errors, a call may still be in progress; isFinalError in pkg/volume/csi/csi_client.go."""

PROPAGATION = {"None": "rprivate", "HostToContainer": "rslave"}


@dataclass(frozen=True)
class Image:
    """The substitute for an image: podman's name of one, additional files, and the command that it runs by itself.

    A container may use `devices`; in Kubernetes that takes `privileged`, which lets it use all.
    """

    tag: str
    volumes: Sequence[podman.Volume] = ()
    command: tuple[str, ...] = ()
    devices: Sequence[Path] = ()


#: Starts a server for the processes in a container's network, and ends it.
Server = Callable[[podman.Container], AbstractContextManager[object]]

Images = dict[str, Image]
"""The stand-ins for the images that manifests name."""


@dataclass(frozen=True)
class Call:
    """A NodePublishVolume call of kubelet: its duration in seconds, and its result."""

    volume: str
    seconds: float
    error: CsiError | None


class PodFailed(AssertionError):
    """A pod did not come to run, or did not go; the text is that of the pod's event."""


class Kubelet:
    """The kubelet of a node, to which one CSI driver has been registered."""

    def __init__(self, node: Node, driver: str, plugin: Plugin, images: Images) -> None:
        self.node = node
        self.driver = driver
        self.plugin = plugin
        self.images = images
        self.binds_as_containerd = False
        """Whether containers get the driver's volumes as from containerd, not as from podman; see `volume_runtime`."""

    @contextlib.contextmanager
    def pod(
        self, spec: manifests.Pod, uid: str = "", servers: Mapping[str, Server] = MappingProxyType({})
    ) -> Iterator[Pod]:
        """Run a pod; when the block ends, remove it.

        `servers` are by the name under which the pod finds them, at 127.0.0.1; they are started before its containers.
        """
        with self.new_pod(spec, uid) as pod:
            pod.set_up(servers)
            yield pod

    @contextlib.contextmanager
    def new_pod(self, spec: manifests.Pod, uid: str = "") -> Iterator[Pod]:
        """Make a pod that has only its directory; when the block ends, remove it with everything in it."""
        pod = Pod(self, spec, uid)
        pod.make_directories()
        try:
            yield pod
        finally:
            pod.tear_down()

    def directory_of(self, uid: str) -> Path:
        """Return the directory of a pod."""
        return self.node.kubelet / "pods" / uid

    def left(self) -> list[Path | Mount]:
        """Return the remains of pods that should be gone: mounts, and the files in kubelet's directory."""
        pods = self.node.kubelet / "pods"
        return [*self.node.mounts(), *(sorted(pods.iterdir()) if pods.exists() else [])]


class Pod:
    """One pod. `set_up` and `tear_down` consist of steps that a test may take one by one."""

    def __init__(self, kubelet: Kubelet, spec: manifests.Pod, uid: str = "") -> None:
        self.kubelet = kubelet
        self.node = kubelet.node
        self.spec = spec
        self.uid = uid or str(uuid.uuid4())
        self.directory = kubelet.directory_of(self.uid)
        self.cgroup = self.node.cgroups.pod(self.uid)
        self.calls: list[Call] = []
        """The calls of NodePublishVolume, in their order."""
        self.restarts: dict[str, int] = {}
        self.last_logs: dict[str, str] = {}
        """The output of containers that have been restarted since."""
        self._unhealthy: dict[str, int] = {}
        self._servers = contextlib.ExitStack()
        self._sandbox: podman.Container | None = None
        self._containers: dict[str, podman.Container] = {}
        self._loop: _Loop | None = None

    def __getitem__(self, container: str) -> podman.Container:
        """Return a container in its current run."""
        return self._containers[container]

    # Setting up: SyncPod of pkg/kubelet/kubelet.go

    def set_up(self, servers: Mapping[str, Server] = MappingProxyType({})) -> None:
        """Do everything that makes the pod run, until each container is ready. Raises PodFailed."""
        self.set_up_volumes()
        self.start_sandbox([*servers])
        for server in servers.values():
            self._servers.enter_context(server(self.sandbox))
        self.start_containers()

    def make_directories(self) -> None:
        """Make the pod's directory; see makePodDataDirs in pkg/kubelet/kubelet_pods.go."""
        for path in (self.directory, self.directory / "volumes", self.directory / "plugins"):
            path.mkdir(mode=0o750, parents=True)

    def set_up_volumes(self) -> None:
        """Set all volumes up concurrently, as kubelet does: none waits for another. Raises PodFailed."""
        with ThreadPoolExecutor() as beside:
            for result in [beside.submit(self.set_up_volume, volume) for volume in self.spec.volumes]:
                result.result()

    def set_up_volume(self, volume: manifests.Volume, seconds: float = PATIENCE) -> None:
        """Set a volume up; for one of a CSI driver, repeat until that succeeds. Raises PodFailed."""
        match volume:
            case EmptyDir():
                self._make_empty_dir(volume)
            case Files():
                self._make_files(volume)
            case CsiVolume():
                assert volume.driver == self.kubelet.driver, f"no driver {volume.driver} on this node"
                self._retry(lambda: self.publish(volume), seconds)

    def volume_path(self, volume: manifests.Volume) -> Path:
        """Return the path of a volume on the node; for one of a CSI driver, that is the target path."""
        volumes = self.directory / "volumes"
        match volume:
            case EmptyDir():
                return volumes / "kubernetes.io~empty-dir" / volume.name
            case Files():
                return volumes / "kubernetes.io~projected" / volume.name
            case CsiVolume():
                return volumes / "kubernetes.io~csi" / volume.directory / "mount"

    def target(self, volume: str = "") -> Path:
        """Return the target path of a volume of the driver; of the only one, if none is named."""
        return self.volume_path(self.csi_volume(volume))

    def csi_volume(self, name: str = "") -> CsiVolume:
        (found,) = [volume for volume in self.spec.csi_volumes() if name in ("", volume.name)]
        return found

    def handle(self, volume: CsiVolume) -> str:
        """Return the volume's id; makeVolumeHandle in pkg/volume/csi/csi_mounter.go."""
        invented = hashlib.sha256(f"{self.uid}{volume.name}".encode()).hexdigest()
        return volume.handle or f"csi-{invented}"

    def publish(self, volume: CsiVolume) -> None:
        """Call NodePublishVolume once; see SetUpAt in pkg/volume/csi/csi_mounter.go. Raises CsiError."""
        target = self.volume_path(volume)
        target.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        (target.parent / "vol_data.json").write_text(json.dumps({"volumeHandle": self.handle(volume)}))
        begun = time.perf_counter()
        try:
            self.kubelet.plugin.publish(self.publish_request(volume))
        except CsiError as error:
            self.calls.append(Call(volume.name, time.perf_counter() - begun, error))
            if error.code not in UNCERTAIN and not self.node.mounts(target):
                _rmdir(target)
            raise
        self.calls.append(Call(volume.name, time.perf_counter() - begun, None))

    def publish_request(self, volume: CsiVolume) -> csi.NodePublishVolumeRequest:
        """Return the request with all fields that kubelet sets for a driver with podInfoOnMount."""
        mount = csi.VolumeCapability.MountVolume(mount_flags=volume.mount_options)
        if self.spec.fs_group is not None:  # the driver has VOLUME_MOUNT_GROUP
            mount.volume_mount_group = str(self.spec.fs_group)
        pod_info = {
            "csi.storage.k8s.io/pod.name": self.spec.name,
            "csi.storage.k8s.io/pod.namespace": self.spec.namespace,
            "csi.storage.k8s.io/pod.uid": self.uid,
            "csi.storage.k8s.io/serviceAccount.name": self.spec.service_account,
            "csi.storage.k8s.io/ephemeral": "true" if volume.ephemeral else "false",
        }
        mode = csi.VolumeCapability.AccessMode(mode=ACCESS_MODES[volume.access_mode])
        return csi.NodePublishVolumeRequest(
            volume_id=self.handle(volume),
            target_path=str(self.volume_path(volume)),
            volume_capability=csi.VolumeCapability(mount=mount, access_mode=mode),
            readonly=volume.read_only,
            volume_context={**volume.attributes, **pod_info},
        )

    def stats(self, volume: str = "", patience: float = 10) -> csi.NodeGetVolumeStatsResponse:
        """Call NodeGetVolumeStats, as kubelet does for its metrics. Raises CsiError."""
        found = self.csi_volume(volume)
        return self.kubelet.plugin.stats(self.handle(found), self.volume_path(found), patience)

    def _make_empty_dir(self, volume: EmptyDir) -> None:
        """Follow pkg/volume/emptydir: all may write; with an fsGroup, the group is inherited (SetVolumeOwnership)."""
        path = self.volume_path(volume)
        path.mkdir(mode=0o750, parents=True)
        if volume.in_memory:
            self.node.run(["mount", "-t", "tmpfs", "tmpfs", path])
        directory = self.node.seen(path)
        directory.chmod(0o777)
        self._give_to_group(directory)

    def _give_to_group(self, directory: Path) -> None:
        if self.spec.fs_group is not None:
            os.chown(directory, -1, self.spec.fs_group)
            directory.chmod(0o2777)

    def _make_files(self, volume: Files) -> None:
        path = self.volume_path(volume)
        path.mkdir(mode=0o755, parents=True)
        for name, content in volume.contents.items():
            (path / name).write_bytes(content)
            (path / name).chmod(volume.mode)
            if self.spec.fs_group is not None:
                os.chown(path / name, -1, self.spec.fs_group)
                (path / name).chmod(volume.mode | 0o440)

    # Containers: SyncPod of pkg/kubelet/kuberuntime/kuberuntime_manager.go

    def start_containers(self) -> None:
        """Start the containers, and keep the pod running from then on until `tear_down`. Raises PodFailed."""
        self._loop = _Loop(self)
        for container in self.spec.init_containers:
            self._start(container)
            if container.sidecar:
                self._wait_for(container, container.startup)
            else:
                self._wait_for_end(container)
        for container in self.spec.containers:
            self._start(container)
        for container in self.spec.containers:
            self._wait_for(container, container.startup)
            self._wait_for(container, container.readiness)

    def wait_until_restarted(self, container: str, restarts: int, seconds: float = PATIENCE) -> podman.Container:
        """Return the container once it has been restarted so many times."""
        give_up = time.monotonic() + seconds
        while self.restarts.get(container, 0) < restarts:
            self.check_loop()
            assert time.monotonic() < give_up, f"{container} was restarted {self.restarts.get(container, 0)} times only"
            time.sleep(0.02)
        return self._containers[container]

    def check_loop(self) -> None:
        """Raise the exception that ended the loop that keeps the pod running."""
        if self._loop and self._loop.error:
            raise self._loop.error

    def republish_errors(self) -> list[CsiError]:
        """Return the errors of NodePublishVolume that came after each volume had been published once."""
        published: set[str] = set()
        errors = []
        for call in list(self.calls):
            if call.error is None:
                published.add(call.volume)
            elif call.volume in published:
                errors.append(call.error)
        return errors

    def start_sandbox(self, hosts: Sequence[str] = ()) -> None:
        """Start the container that holds what the containers of a pod share: network, and a user namespace.

        `hosts` are more names for 127.0.0.1 (hostAliases of a pod's spec).
        """
        names = " ".join(["localhost", *hosts])
        self._hosts.write_text(f"127.0.0.1\t{names}\n")
        extra = ["--cgroup-parent", self.cgroup]
        options = podman.Options(user_namespace=not self.spec.host_users, extra=extra)
        sandbox = podman.Container(image_tag(BUSYBOX), options=options, podman=self._podman())
        self._sandbox = sandbox.__enter__()

    @property
    def _hosts(self) -> Path:
        """Return the file that is /etc/hosts of each container; makeHostsMount in pkg/kubelet/kubelet_pods.go."""
        return self.directory / "etc-hosts"

    @property
    def sandbox(self) -> podman.Container:
        """Return the container whose network all others share."""
        assert self._sandbox is not None, "the pod has no sandbox"
        return self._sandbox

    def _podman(self) -> tuple[Argument, ...]:
        return self.node.command("podman")

    def _start(self, spec: manifests.Container) -> None:
        image = self.kubelet.images[spec.image]
        command = (*(spec.command or image.command), *spec.args)
        volumes = [*image.volumes]
        extra = ["--cgroup-parent", self.cgroup]
        if not self.spec.host_users:
            extra += ["--userns", f"container:{self.sandbox.name}"]
        bound = []
        for number, mount in enumerate(spec.mounts):
            if self._is_bound_as_by_containerd(mount):
                bound.append(self._mount_of_runtime(mount))
            else:
                extra += ["--mount", self._mount_argument(spec, number, mount)]
        if bound:
            extra += ["--runtime", volume_runtime.__file__, "--annotation", volume_runtime.annotation(bound)]
        extra += ["--mount", f"type=bind,src={self._hosts},dst=/etc/hosts"]
        extra += ["--mount", f"type=bind,src={self._file_for_last_words(spec)},dst={spec.last_words}"]
        groups = [*self.spec.supplemental_groups, *([] if self.spec.fs_group is None else [self.spec.fs_group])]
        extra += [word for group in groups for word in ("--group-add", str(group))]
        extra += [f"--device={device}" for device in image.devices]
        extra += [f"--cap-add={name}" for name in spec.add_capabilities]
        extra += [f"--cap-drop={name}" for name in spec.drop_capabilities]
        extra += [] if spec.may_escalate else ["--security-opt=no-new-privileges"]
        options = podman.Options(
            user=_user(spec.user, spec.group),
            read_only=spec.read_only_root,
            network=f"container:{self.sandbox.name}",
            volumes=volumes,
            env=spec.env,
            extra=extra,
        )
        container = podman.Container(image.tag, command, options, self._podman())
        try:
            self._containers[spec.name] = container.__enter__()
        except podman.CommandFailed as error:
            raise PodFailed(f"container {spec.name}: {error}") from None

    def _file_for_last_words(self, container: manifests.Container) -> Path:
        """Return a new file that the container may write to; makeMounts in kuberuntime_container.go."""
        path = self.directory / "containers" / container.name / uuid.uuid4().hex[:8]
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        path.touch()
        path.chmod(0o666)
        return path

    def _volume_of(self, mount: manifests.VolumeMount) -> manifests.Volume:
        (volume,) = [volume for volume in self.spec.volumes if volume.name == mount.volume]
        return volume

    def _is_bound_as_by_containerd(self, mount: manifests.VolumeMount) -> bool:
        is_whole = isinstance(self._volume_of(mount), CsiVolume) and not mount.sub_path
        return is_whole and self.kubelet.binds_as_containerd

    def _mount_of_runtime(self, mount: manifests.VolumeMount) -> dict[str, object]:
        """Return the mount for the configuration of an OCI runtime."""
        options = ["rbind", PROPAGATION[mount.propagation], "ro" if mount.read_only else "rw"]
        source = str(self.volume_path(self._volume_of(mount)))
        return {"destination": mount.path, "type": "bind", "source": source, "options": options}

    def _mount_argument(self, container: manifests.Container, number: int, mount: manifests.VolumeMount) -> str:
        """Return podman's argument for a mount of a container; makeMounts in pkg/kubelet/kubelet_pods.go."""
        volume = self._volume_of(mount)
        source = self.volume_path(volume)
        if mount.sub_path:
            source = self._bind_sub_path(container, number, volume, mount)
        propagation = PROPAGATION[mount.propagation]
        read_only = ",ro" if mount.read_only or isinstance(volume, Files) else ""
        return f"type=bind,src={source},dst={mount.path},bind-propagation={propagation}{read_only}"

    def _bind_sub_path(
        self, container: manifests.Container, number: int, volume: manifests.Volume, mount: manifests.VolumeMount
    ) -> Path:
        """Return a bind of part of a volume, made now; doBindSubPath in pkg/volume/util/subpath/subpath_linux.go."""
        name = volume.directory if isinstance(volume, CsiVolume) else volume.name
        bind = self.directory / "volume-subpaths" / name / container.name / str(number)
        part = self.volume_path(volume) / mount.sub_path
        seen = self.node.seen(part)
        if not seen.exists():
            seen.mkdir(mode=0o750, parents=True)
            seen.chmod(0o777)
        self.node.unmount(bind)  # the bind from before a restart may be of another filesystem
        bind.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        bind.mkdir(mode=0o750, exist_ok=True) if seen.is_dir() else bind.touch()
        self.node.run(["mount", "--no-canonicalize", "--bind", part, bind])
        return bind

    def _wait_for(self, container: manifests.Container, probe: manifests.Probe | None) -> None:
        """Return when a probe has succeeded. Raises PodFailed."""
        if probe is None:
            return
        give_up = time.monotonic() + min(PATIENCE, probe.failures * probe.period)
        while self[container.name].exec(probe.command, check=False).returncode != 0:
            self.check_loop()
            if time.monotonic() > give_up:
                said = self.last_logs.get(container.name, "") + self[container.name].logs()
                raise PodFailed(f"container {container.name} did not get ready:\n{said}")
            time.sleep(min(probe.period, 1.0))

    def _wait_for_end(self, container: manifests.Container) -> None:
        running = self._containers.pop(container.name)
        status = self.node.run(["podman", "wait", running.name]).stdout.strip()
        logs = running.logs()
        running.remove()
        if status != "0":
            raise PodFailed(f"container {container.name} ended with {status}:\n{logs}")

    # Keeping it running

    def has_to_restart(self) -> manifests.Container | None:
        """Return a container that has ended and should not have."""
        sidecars = [each for each in self.spec.init_containers if each.sidecar]
        for spec in (*sidecars, *self.spec.containers):
            container = self._containers.get(spec.name)
            if container and has_ended(container.pid):
                return spec
        return None

    def is_unhealthy(self, spec: manifests.Container) -> bool:
        """Return whether the liveness probe has failed so often, in a row, that the container has to be restarted."""
        assert spec.liveness is not None
        running = self._containers.get(spec.name)
        if not running or has_ended(running.pid):
            return False
        failed = running.exec(spec.liveness.command, check=False).returncode != 0
        self._unhealthy[spec.name] = self._unhealthy.get(spec.name, 0) + 1 if failed else 0
        return self._unhealthy[spec.name] >= spec.liveness.failures

    def restart(self, spec: manifests.Container) -> None:
        """Start a new container in the place of one that has ended."""
        self.last_logs[spec.name] = self._containers[spec.name].logs()
        self._containers[spec.name].remove()
        self._unhealthy[spec.name] = 0
        self._start(spec)
        self.restarts[spec.name] = self.restarts.get(spec.name, 0) + 1

    def enter(self) -> None:
        """Make this process one of the pod's, without a container: it is in the pod's cgroup then."""
        (cgroups.make(self.cgroup) / "cgroup.procs").write_text(str(os.getpid()))

    # Tearing down: killPod, then the reconciler of volumes

    def tear_down(self) -> None:
        """Remove the pod, and check that nothing of it is left. Raises PodFailed."""
        self.stop_containers()
        for volume in reversed(self.spec.volumes):
            self.tear_down_volume(volume)
        self.remove_directories()

    def stop_loop(self) -> None:
        """Stop republishing volumes and restarting containers: the pod is about to go."""
        if self._loop:
            self._loop.stop()

    def stop_containers(self) -> None:
        """Stop the loop that keeps the pod running, then its containers, sidecars last."""
        self.stop_loop()
        for name in reversed([*self._containers]):
            self._containers.pop(name).remove()
        self._servers.close()
        if self._sandbox:
            self._sandbox.remove()
            self._sandbox = None
        cgroups.remove(self.cgroup)

    def tear_down_volume(self, volume: manifests.Volume, seconds: float = PATIENCE) -> None:
        """Tear a volume down, with the binds of parts of it. Raises PodFailed."""
        self._remove_sub_paths(volume)
        path = self.volume_path(volume)
        if not (path.parent if isinstance(volume, CsiVolume) else path).exists():
            return
        match volume:
            case CsiVolume():
                self._retry(lambda: self.unpublish(volume), seconds)
                path.parent.rmdir()
            case EmptyDir() | Files():
                self.node.unmount(path)
                shutil.rmtree(path)

    def unpublish(self, volume: CsiVolume) -> None:
        """Call NodeUnpublishVolume once; see TearDownAt in pkg/volume/csi/csi_mounter.go. Raises CsiError."""
        target = self.volume_path(volume)
        self.kubelet.plugin.unpublish(self.handle(volume), target)
        if mounts := self.node.mounts(target):
            raise PodFailed(f"still mounted at {target}: {mounts}")
        _rmdir(target)
        (target.parent / "vol_data.json").unlink(missing_ok=True)

    def remove_directories(self) -> None:
        """Remove the pod's directory, which by now contains nothing but empty directories. Raises PodFailed."""
        mounts = self.node.mounts(self.directory)
        if mounts:
            raise PodFailed(f"still mounted: {mounts}")
        shutil.rmtree(self.directory / "containers", ignore_errors=True)
        self._hosts.unlink(missing_ok=True)
        for directory, _, files in os.walk(self.directory, topdown=False):
            if files:
                raise PodFailed(f"left in {directory}: {files}")
            Path(directory).rmdir()

    def _remove_sub_paths(self, volume: manifests.Volume) -> None:
        """Do what CleanSubPaths of pkg/volume/util/subpath/subpath_linux.go does."""
        name = volume.directory if isinstance(volume, CsiVolume) else volume.name
        top = self.directory / "volume-subpaths" / name
        for bind in sorted(top.glob("*/*")):
            self.node.unmount(bind)
            bind.rmdir() if bind.is_dir() else bind.unlink()
        if top.exists():
            for directory, _, _ in os.walk(top, topdown=False):
                Path(directory).rmdir()

    def _retry(self, call: Callable[[], None], seconds: float) -> None:
        """Call until it succeeds. Raises PodFailed after so many seconds."""
        give_up, pause = time.monotonic() + seconds, RETRY
        while True:
            try:
                return call()
            except CsiError as error:
                if time.monotonic() + pause > give_up:
                    raise PodFailed(str(error)) from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY)


class _Loop:
    """A thread that keeps a pod running: publishes its volumes again and again, and restarts containers that ended."""

    def __init__(self, pod: Pod) -> None:
        self.error: BaseException | None = None
        self._look_at: dict[str, float] = {}
        self._pod = pod
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pod {pod.uid}")
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(REPUBLISH):
                for volume in self._pod.spec.csi_volumes():
                    with contextlib.suppress(CsiError):  # `calls` records it
                        self._pod.publish(volume)
                self._keep_alive()
        except BaseException as error:
            self.error = error

    def _keep_alive(self) -> None:
        pod = self._pod
        to_restart = [ended] if (ended := pod.has_to_restart()) else []
        for spec in pod.spec.containers:
            if spec.liveness and time.monotonic() > self._look_at.get(spec.name, 0):
                self._look_at[spec.name] = time.monotonic() + spec.liveness.period
                to_restart += [spec] if pod.is_unhealthy(spec) else []
        for spec in to_restart:
            with contextlib.suppress(PodFailed):  # a volume in it may be dead; next time it may not be
                pod.restart(spec)


def has_ended(pid: int) -> bool:
    """Return whether a process that existed has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        return bool(waiting.poll(0))
    finally:
        os.close(descriptor)


def _user(user: int | None, group: int | None) -> str | None:
    if user is None:
        return None if group is None else f"0:{group}"
    return f"{user}:{group or 0}"


def _rmdir(path: Path) -> None:
    """Remove an empty directory that may be gone already. The node must have nothing mounted on it."""
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()
