"""A real Kubernetes node with its control plane, on this machine and apart from it; and a second one of that cluster.

Each runs in a root filesystem and in mount, network, pid, uts and ipc namespaces of its own. What it leaves on this
machine while it runs is a directory and cgroups with a name of their own, so several can run at once; when it ends,
both are removed. Process 1 of the node keeps its namespaces: when that is killed, the kernel ends all the others.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from fusermount3_broker.kernel import syscalls
from tests.cluster import binaries, configuration
from tests.cluster.binaries import KUBERNETES
from tests.lab import cgroups
from tests.lab.cgroups import CgroupRoot
from tests.lab.commands import Argument, run
from tests.lab.images import PATH, rootfs
from tests.lab.load import Beside
from tests.lab.pace import SLOWNESS
from tests.lab.podman import Mount, mountinfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.cluster.binaries import Release

ResultT = TypeVar("ResultT")

PATIENCE = 120.0
"""Seconds that the control plane and kubelet have to become ready."""

# kubelet sets these for the whole kernel: it gets files with what it would write, and this machine keeps its own.
_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}

# crun refuses a hierarchy of version 2 with controllers beside those of version 1.
# The second /proc has nothing mounted on it: else the kernel allows none in user namespaces (mount_too_revealing()).
_BEGIN = """
root=$1 programs=$2 name=$3 address=$4
mount --bind "$root" "$root"
cd "$root"
mount --bind "$programs" usr/local/bin
mount -t tmpfs -o mode=755 tmpfs run
mkdir run/proc
mount -t proc proc run/proc
mount -t proc proc proc
(cd etc/kubernetes/settings && find . -type f) | while read -r setting; do
    mount --bind "etc/kubernetes/settings/$setting" "proc/sys/$setting"
done
mount -t sysfs sysfs sys
mount --rbind /sys/fs/cgroup sys/fs/cgroup
if mountpoint --quiet sys/fs/cgroup/unified; then umount sys/fs/cgroup/unified; fi
mount --rbind /dev dev
pivot_root . mnt
umount --lazy /mnt
mount --make-rshared /
echo "$name" > /proc/sys/kernel/hostname
ip link set lo up
ip link add uplink type bridge
ip address add "$address/24" dev uplink
ip link set uplink up
ip route add default dev uplink
echo begun
exec catatonit -P
"""

_NAMESPACES = ("--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--propagation=private")

# As a service manager keeps its services.
_KEEP = 'while :; do "$@"; echo "$1 has ended with status $?"; sleep 1; done'


_IN_PLACE = "usr/local/sbin"
"""A program in here is found before that of the node's release."""


class NotReady(Exception):
    """The node can't be started; the message ends with what the program said."""


class ClusterNode:
    """A node in a directory, which `start` makes and `stop` removes.

    Another process can use the directory of a node that is running.
    """

    def __init__(
        self,
        directory: Path,
        release: Release = KUBERNETES,
        *,
        kubelet: Release | None = None,
        first: ClusterNode | None = None,
        machine: configuration.Machine | None = None,
    ) -> None:
        """`kubelet` is the release that its kubelet is of, if that is another one.

        `first` is the cluster's first node, which runs, if this is the second. `machine` is another one than these two.
        """
        self.directory = directory
        self.machine = machine or (configuration.FIRST if first is None else configuration.SECOND)
        self.release = release
        self._other_kubelet = kubelet
        self._first = first
        self.root = directory / "root"
        self.logs = directory / "logs"
        self._state = directory / "node.json"
        self._holder: subprocess.Popen[bytes] | None = None
        self._services: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ClusterNode:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all; return when pods can be created. NotReady with what a program said if it can't be started."""
        cgroup_root = CgroupRoot()
        self.directory.mkdir(parents=True)
        self._state.write_text(json.dumps({"cgroups": cgroup_root.path}))
        self._fill(cgroup_root)
        self._boot()

    def reboot(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Cut the power, and start again with the files that there are; return as `start` does.

        `meanwhile` is called while the node is off.
        """
        self._cut_the_power()
        meanwhile()
        self._boot()

    def stop(self) -> None:
        """End all processes at once, as a switch cuts the power, and remove the directory and the cgroups."""
        if not self._state.exists():
            return
        self._cut_the_power()
        shutil.rmtree(self.directory)

    def end(self, *services: str) -> None:
        """Kill these services, named as their programs; `begin` starts them again, and nothing else does."""
        for name in services:
            process = self._services.pop(name)
            # The shell that would start the service again, and then the service.
            for each in psutil.Process(process.pid).children(recursive=True):
                each.kill()
                each.wait(PATIENCE)
            process.wait(PATIENCE)

    def begin(self, *services: str) -> None:
        """Start services that were ended; return when the API server and kubelet answer."""
        for name in services:
            self._serve(next(service for service in self.machine.services if service[0] == name))
        self._wait_until_ready()

    def upgrade_kubelet(self) -> None:
        """End the kubelet of another release, and start that of the node's."""
        self.end("kubelet")
        (self.root / _IN_PLACE / "kubelet").unlink()
        self.begin("kubelet")

    def is_running(self) -> bool:
        try:
            state = json.loads(self._state.read_text())
            return bool(psutil.Process(state["init"]).create_time() == state["created"])
        except (FileNotFoundError, KeyError, psutil.NoSuchProcess):
            return False

    @property
    def programs(self) -> Path:
        """Return the directory with the programs of the node's release."""
        return binaries.kubernetes(self.release)

    @property
    def pid(self) -> int:
        """Return the pid, on this machine, of the node's process 1."""
        return int(json.loads(self._state.read_text())["init"])

    @property
    def cgroups(self) -> str:
        """Return the cgroup below which kubelet has those of the pods."""
        return str(json.loads(self._state.read_text())["cgroups"])

    def command(self, *argv: Argument) -> list[Argument]:
        """Return the command that runs `argv` in the node, with its root filesystem."""
        namespaces = ["--mount", "--net", "--pid", "--uts", "--ipc"]
        return ["nsenter", f"--target={self.pid}", *namespaces, "--", "env", f"PATH={PATH}", *argv]

    def run(self, argv: Sequence[Argument], *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the node; see commands.run."""
        return run(self.command(*argv), check=check)

    def administrator_command(self, *argv: Argument) -> list[Argument]:
        """Return the command that runs `argv` as the cluster's administrator, with the files of this machine."""
        settings = {
            "KUBECONFIG": f"{self.root}{configuration.DIRECTORY}/{configuration.ADMIN}",
            "KUBECACHEDIR": self.directory / "kubectl-cache",
        }
        env = ["env", *(f"{name}={value}" for name, value in settings.items())]
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *env, *argv]

    def kubectl_command(self, *words: Argument) -> list[Argument]:
        """Return the command that runs kubectl so."""
        return self.administrator_command(self.programs / "kubectl", *words)

    def kubectl(
        self,
        *words: Argument,
        input: str = "",  # noqa: A002  # subprocess.run's name for it
        check: bool = True,
        timeout: float = 300.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl; see commands.run."""
        return run(self.kubectl_command(*words), input=input, check=check, timeout=timeout)

    def in_network(self, body: Callable[[], ResultT]) -> ResultT:
        """Return the result of `body`, called in a process on the network of the node."""

        def there() -> ResultT:
            with Path(f"/proc/{self.pid}/ns/net").open("rb") as namespace:
                syscalls.setns(namespace.fileno(), 0)
            return body()

        with Beside(there) as beside:
            return beside.result()

    def seen(self, path: Path | str) -> Path:
        """Return a path at which this process, too, sees the node's `path`."""
        return Path(f"/proc/{self.pid}/root{path}")

    def mounts(self) -> list[Mount]:
        return mountinfo(self.pid)

    def _fill(self, cgroup_root: CgroupRoot) -> None:
        self.root.mkdir()
        self.logs.mkdir()
        run(["tar", "--zstd", "--extract", "--directory", self.root, "--file", rootfs(binaries.ROOT)], timeout=120)
        files = self.root / configuration.DIRECTORY.relative_to("/")
        files.mkdir()
        first = self._first.root / configuration.DIRECTORY.relative_to("/") if self._first else None
        configuration.write(files, cgroup_root.path, self.machine, first)
        if self._other_kubelet:
            shutil.copy(binaries.kubernetes(self._other_kubelet) / "kubelet", self.root / _IN_PLACE)
        (self.root / "etc/hosts").write_text("127.0.0.1 localhost\n")
        (self.root / "etc/resolv.conf").write_text("nameserver 127.0.0.1\n")  # nobody answers
        for name, value in _SETTINGS.items():
            setting = files / "settings" / name
            setting.parent.mkdir(parents=True, exist_ok=True)
            setting.write_text(f"{value}\n")

    def _boot(self) -> None:
        path = self.cgroups
        for hierarchy in cgroups.hierarchies():
            (hierarchy / path.lstrip("/")).mkdir()
        holder = self._begin(self.programs)
        (init,) = psutil.Process(holder.pid).children()
        state = {"cgroups": path, "init": init.pid, "created": init.create_time()}
        self._state.write_text(json.dumps(state))
        if self._first:
            self._connect(self._first)
        for service in self.machine.services:
            self._serve(service)
        self._wait_until_ready()

    def _cut_the_power(self) -> None:
        state = json.loads(self._state.read_text())
        if self.is_running():
            init = psutil.Process(state["init"])
            init.kill()
            init.wait(PATIENCE)
        for process in (*self._services.values(), *([self._holder] if self._holder else [])):
            process.kill()
            process.wait(PATIENCE)
        self._services.clear()
        CgroupRoot(state["cgroups"]).remove()

    def _wait_until_ready(self) -> None:
        self._wait_for("kube-apiserver", lambda: self._answers("get", "--raw", "/readyz"))
        # What the node's object says may be older than this kubelet.
        health = f"/api/v1/nodes/{self.machine.name}/proxy/healthz"
        if self.machine.is_node:
            self._wait_for("kubelet", lambda: self._answers("get", "--raw", health) and self._is_ready())
        # Without it, no pod can be created.
        self._wait_for("kube-controller-manager", lambda: self._answers("get", "serviceaccount", "default"))

    def _begin(self, programs: Path) -> subprocess.Popen[bytes]:
        """Start process 1 in its namespaces; return the process that waits for it."""
        arguments: list[Argument] = [self.root, programs, self.machine.name, self.machine.address]
        with (self.logs / "begin").open("wb") as log:
            holder = subprocess.Popen(
                ["unshare", *_NAMESPACES, "sh", "-euc", _BEGIN, "sh", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._holder = holder
        assert holder.stdout is not None
        with holder.stdout as output:
            if output.readline() != b"begun\n":
                raise NotReady((self.logs / "begin").read_text())
        return holder

    def _connect(self, first: ClusterNode) -> None:
        """Lay a cable from this node to the first, and tell both where the pods of the other are."""
        here, there = (f"--net=/proc/{each.pid}/ns/net" for each in (self, first))
        ends = ["name", "cable", "netns", f"{self.pid}"]
        run(["nsenter", there, "ip", "link", "add", "cable", "type", "veth", "peer", *ends])
        for end, other in ((here, first.machine), (there, self.machine)):
            run(["nsenter", end, "ip", "link", "set", "cable", "master", "uplink", "up"])
            run(["nsenter", end, "ip", "route", "replace", other.pods, "via", other.address])

    def _serve(self, service: Sequence[str]) -> None:
        with (self.logs / service[0]).open("ab") as log:
            self._services[service[0]] = subprocess.Popen(
                self.command("sh", "-c", _KEEP, "sh", *service),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )

    def _answers(self, *words: str) -> bool:
        return self.kubectl(*words, check=False).returncode == 0

    def _is_ready(self) -> bool:
        ready = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
        return self.kubectl("get", "node", self.machine.name, "--output", ready, check=False).stdout == "True"

    def _wait_for(self, service: str, true: Callable[[], bool]) -> None:
        give_up = time.monotonic() + SLOWNESS * PATIENCE
        while not true():
            if time.monotonic() > give_up:
                raise NotReady(f"{service}:\n{(self.logs / service).read_text(errors='replace')[-4000:]}")
            time.sleep(0.2)
