"""Faults for a broker and its users. Each fault returns when its consequences have ended."""

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import psutil

from benchmarks.soak import disk
from benchmarks.soak.load import CALLERS, probe
from benchmarks.soak.scene import CONFIGURATION, Scene
from tests.e2e.conftest import wait_until
from tests.lab.broker import PROXY, Broker
from tests.lab.callers import REAPED, enter_private_namespace, fuse_mounts
from tests.lab.dying import die_together
from tests.lab.faults import (
    FRONT,
    MOUNTER,
    is_stopped,
    kill,
    kill_starting_fronts,
    status_of,
    wait_until_stopped,
)
from tests.lab.load import Beside

#: Seconds to wait for dead mounts that should be gone already: how late they are is worth knowing.
LATE = 60.0


def faults(scene: Scene) -> dict[str, Callable[[], object]]:
    """Return the faults, by their names in the report."""
    return {
        "front killed": lambda: kill(scene.broker, FRONT),
        "front killed, and others while they start": lambda: kill_starting_fronts(
            scene.broker, scene.chance.randint(1, 4), scene.chance
        ),
        "mounter killed": lambda: kill(scene.broker, MOUNTER),
        "front and mounter killed": lambda: kill(scene.broker, FRONT, MOUNTER),
        "all processes of the broker killed": partial(kill_everything, scene),
        "child of the mounter that waits for an operation killed": partial(kill_spare, scene),
        "FUSE program killed": partial(hit_program, scene, signal.SIGKILL),
        "FUSE program stopped, later killed": partial(hit_program, scene, signal.SIGSTOP),
        f"{scene.report.at_once} FUSE filesystems dead at once": partial(kill_very_many, scene),
        "proxy killed in the middle of a call": partial(kill_proxies, scene),
        "broker ended and started": partial(restart, scene),
        "configuration loaded again": partial(reload, scene),
        "broken configuration loaded": partial(reload_broken, scene),
        "table of mounts damaged while the broker was down": partial(damage_table, scene),
        "disk full": partial(disk.full, scene),
        "disk full, and the front killed": partial(disk.full_and_front_killed, scene),
        "disk full, and all processes of the broker killed": partial(disk.full_and_all_killed, scene),
        "flood of connections that say nothing": partial(flood, scene),
        "container killed with its mounts": partial(kill_container, scene),
    }


def kill_everything(scene: Scene) -> None:
    """Kill all processes of the broker together; it is started again some time later."""
    scene.kill_all()
    time.sleep(scene.chance.uniform(0, 1))
    scene.broker.start()


def kill_spare(scene: Scene) -> None:
    """Kill an idle child: a busy one takes its operation along, by design."""
    mounter = psutil.Process(status_of(scene.broker)["mounter"]["pid"])
    wait_until(lambda: has_killed_spare(scene, mounter), 60)  # under load few children are idle, and not for long


def has_killed_spare(scene: Scene, mounter: psutil.Process) -> bool:
    children = mounter.children()
    scene.chance.shuffle(children)
    return any(is_killed_if_idle(child, mounter) for child in children)


def is_killed_if_idle(child: psutil.Process, mounter: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        held = held_while_idle(child, mounter)
        if not held:
            return False
        child.suspend()  # so that it can't change while it is examined
        wait_until_stopped([child])
        if is_stopped(child) and held_while_idle(child, mounter) == held:
            child.kill()
            return True
        child.resume()
    return False


def held_while_idle(child: psutil.Process, mounter: psutil.Process) -> dict[str, str]:
    """Return the descriptors of a child of the mounter that waits for an operation; empty if it does not wait.

    A child that waits reads from a socket of operations. Those outlive the mounter, so the supervisor has them, too; it
    does not have the conversation that an operation brings.
    """
    with suppress(OSError, ValueError, IndexError):  # it runs, or has ended
        held = descriptors_of(child.pid)  # first: if an operation arrives meanwhile, the next look differs
        awaited = awaited_by(child.pid, held)
        if awaited.startswith("socket:") and awaited in descriptors_of(mounter.ppid()).values():
            return held
    return {}


def awaited_by(pid: int, held: dict[str, str]) -> str:
    """Return the target of the descriptor, one of `held`, with which a process waits in a system call
    (proc_pid_syscall(5)); "" if it is none of them. Raises OSError, ValueError, IndexError if the process runs."""
    descriptor = int(Path(f"/proc/{pid}/syscall").read_text().split()[1], 16)
    return held.get(str(descriptor), "")


def descriptors_of(pid: int) -> dict[str, str]:
    """Return the target of each open descriptor of a process (proc_pid_fd(5)). Raises OSError."""
    found = {}
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, such as the one of this look at the process itself
            found[each.name] = str(each.readlink())
    return found


def hit_program(scene: Scene, number: signal.Signals) -> None:
    """Kill a FUSE program, or stop it first. Its remains must be gone in time."""
    container = scene.chance.choice(scene.load.workers).container
    place = f"/tmp/hit-{secrets.token_hex(4)}"
    container.exec(["mkdir", place])
    begun = time.monotonic()
    started = container.start(["whoamifs", "-f", place])
    wait_until(lambda: container.fuse_mounts(place) or started.poll() is not None, 60)
    if started.poll() is not None:
        scene.error(f"a program could not mount, status {started.returncode}: {started.communicate()[1]}", begun)
        return
    program = next(pid for pid in container.processes() if place in command_line(pid))
    os.kill(program, number)
    if number == signal.SIGSTOP:
        time.sleep(scene.chance.uniform(1, 3))
        scene.probe("beside a stopped program")
        os.kill(program, signal.SIGKILL)
    killed = time.monotonic()
    while (is_there := container.fuse_mounts(place)) and time.monotonic() - killed < LATE:
        time.sleep(0.05)
    note_gone(scene, killed, 1, len(is_there))
    scene.report.gone.append(time.monotonic() - killed)
    started.communicate(timeout=10)


def command_line(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error:
        return []


def kill_very_many(scene: Scene) -> None:
    """Kill the process that serves very many filesystems. All of them must be gone in time."""
    number = scene.report.at_once
    died = die_together(scene.broker.socket, scene.directory / "dying", number, LATE)
    scene.report.died.append(died)
    note_gone(scene, time.monotonic() - died.seconds, number, died.left)


def note_gone(scene: Scene, killed: float, number: int, left: int) -> None:
    """Note as leaked the dead mounts that remain now, or that were gone too late, which is now."""
    took = time.monotonic() - killed
    if left:
        scene.leaked(f"{left} of {number} dead mounts are left after {took:.1f} s", killed)
    elif took > REAPED:
        scene.leaked(f"{number} dead mounts were gone only after {took:.1f} s", killed)


def kill_proxies(scene: Scene) -> None:
    """Kill some proxies at random moments; what they began must go, at the latest when the descriptor is closed."""
    begun = time.monotonic()

    def call() -> list[str]:
        enter_private_namespace()
        mountpoint = scene.directory / "killed"
        mountpoint.mkdir(exist_ok=True)
        for _ in range(10):
            ours, theirs = socket.socketpair()
            command: list[str | Path] = [PROXY, "-o", "subtype=killed", "--", mountpoint]
            environment = {
                "_FUSE_COMMFD": str(theirs.fileno()),
                "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH": str(scene.broker.socket),
            }
            proxy = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL)
            time.sleep(scene.chance.uniform(0, 0.02))
            proxy.kill()
            proxy.wait()
            theirs.close()
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
            ours.close()
            for descriptor in descriptors:
                os.close(descriptor)
        give_up = time.monotonic() + REAPED
        while mounts_on(mountpoint) and time.monotonic() < give_up:
            time.sleep(0.05)
        return mounts_on(mountpoint)

    with Beside(call) as beside:
        for left in beside.result():
            scene.leaked(f"of a killed proxy: {left}", begun)


def mounts_on(mountpoint: Path) -> list[str]:
    return [mount.mountpoint for mount in fuse_mounts() if mount.mountpoint == str(mountpoint)]


def restart(scene: Scene) -> None:
    scene.broker.stop()
    scene.broker.start()


def reload(scene: Scene) -> None:
    scene.broker.configure(f"{CONFIGURATION}\nuser_allow_other = {scene.chance.choice(['true', 'false'])}")
    scene.broker.reload()


def reload_broken(scene: Scene) -> None:
    scene.broker.configure("user_alow_other = true")
    scene.broker.reload()
    scene.broker.configure(CONFIGURATION)


def damage_table(scene: Scene) -> None:
    """Damage the table of a separate broker: without the table, the owners of its mounts are unknown."""
    with Broker(CONFIGURATION) as other:
        other.stop()
        for file in other.state.iterdir():
            file.write_bytes(scene.chance.randbytes(8192))
        other.start()
        assert other.records("the table of mounts was damaged")
        begun = time.monotonic()
        for call in probe(other.socket, scene.directory / "damaged"):
            if call and call.status:
                scene.error(f"with a table that was damaged: {call.said}", begun)


def flood(scene: Scene) -> None:
    with ExitStack() as connections:
        for _ in range(200):
            connection = connections.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.settimeout(0.2)
            with suppress(OSError):
                connection.connect(str(scene.broker.socket))
        time.sleep(1)


def kill_container(scene: Scene) -> None:
    """Kill a container; the broker must notice that its mounts are gone."""
    listed = scene.census.listed
    before = len(listed())
    with scene.load.another_worker(scene.broker) as worker:
        wait_until(worker.container.fuse_mounts, 30)
        time.sleep(scene.chance.uniform(0, 1))
    wait_until(lambda: len(listed()) <= before + 2 * len(scene.load.workers) + CALLERS, 30)
