"""Virtual machines with other kernels, emulated: each boots as Debian boots, with systemd and cgroup v2.

A machine has three disks: the release's root filesystem with its kernel, a copy for each run; the *payload*, a
directory of this machine that it gets read-only at /payload, and whose program `run` it executes when it has booted;
and one on which it writes a tarball of what `run` has left in /results. What `run` prints comes back by the serial
line, as it comes. The machine has no network, and one processor: with two, QEMU 7.2 misses now and then that one of
them changes the kernel's code which the other executes, and Linux 6.12 panics. Emulation is 10 to 60 times slower than
this machine.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import Argument, run
from tests.lab.images import DebianRecipe, rootfs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BOOTS = (
    *("linux-image-cloud-{architecture}", "initramfs-tools", "zstd", "systemd-sysv", "dbus", "udev", "kmod"),
    *("passwd", "procps", "iproute2", "util-linux", "libpam-systemd"),
)
#: What the broker imports, and its tests.
_BROKER = (
    *("python3", "python3-click", "python3-h11", "python3-prometheus-client", "python3-psutil", "python3-pyxattr"),
    *("python3-systemd", "python3-rich", "python3-seccomp", "python3-protobuf", "python3-grpcio"),
    *("python3-pytest", "strace", "fuse3"),
)
#: Podman as Debian configures it.
PODMAN = ("podman", "crun", "apparmor", "busybox-static", "jq")
#: The compiler and the libraries of the tests' programs.
COMPILER = ("gcc", "libc6-dev", "pkgconf", "libfuse3-dev", "libfuse-dev")
#: SELinux enforcing, with Debian's policy.
SELINUX = ("selinux-policy-default", "selinux-utils", "policycoreutils")

_SERVICE = """\
[Unit]
RequiresMountsFor=/payload
[Service]
Type=oneshot
ExecStartPre=mkdir --parents /results
ExecStart=/bin/sh /payload/run
ExecStopPost=tar --create --file /dev/disk/by-id/virtio-results --directory /results .
ExecStopPost=systemctl poweroff --no-block
StandardOutput=file:/dev/{serial}
StandardError=inherit
{more}
[Install]
WantedBy=multi-user.target
"""
_PAYLOAD = """\
[Unit]
OnFailure=poweroff.target
[Mount]
What=/dev/disk/by-id/virtio-payload
Where=/payload
Options=ro
"""
#: The kernel's command line. The results have the serial line for themselves.
_KERNEL = (
    "root=/dev/disk/by-id/virtio-root rw console={serial} quiet systemd.show_status=false "
    "systemd.mask=serial-getty@{serial}.service panic=-1"
)
#: Bytes of the disks: room for what a run writes, and for its results.
_ROOT, _RESULTS = "8G", "64M"


class _Emulator(NamedTuple):
    """How to emulate an architecture: a command, the kernel's name of the serial line."""

    command: Sequence[str]
    serial: str


_EMULATORS = {
    # QEMU 7.2 emulates cmpxchg16b wrongly: the allocator of Linux 6.12, which uses it if it can, panics after a while.
    "amd64": _Emulator(("qemu-system-x86_64", "-cpu", "max,cx16=off"), "ttyS0"),
    "arm64": _Emulator(("qemu-system-aarch64", "-machine", "virt", "-cpu", "cortex-a72"), "ttyAMA0"),
}


class MachineFailed(Exception):
    """The machine did not power off in time, or left no results; the message ends with what it printed."""


@dataclass(frozen=True)
class Machine:
    """A machine with the root filesystem of a release of Debian."""

    name: str
    suite: str
    packages: Sequence[str] = ()
    """More than it boots with, and the broker and pytest need."""
    kernel: str = ""
    """The release from which its kernel comes, if it is another."""
    architecture: str = "amd64"

    @property
    def recipe(self) -> DebianRecipe:
        boots = [each.format(architecture=self.architecture) for each in _BOOTS]
        if self.kernel:
            boots[0] += f"/{self.kernel}"
        return DebianRecipe(
            f"machine-{self.name}",
            (*boots, *_BROKER, *self.packages),
            self.suite,
            other_suites=[self.kernel] if self.kernel else [],
            architecture=self.architecture if self.is_foreign else "",
        )

    @property
    def is_foreign(self) -> bool:
        return self.architecture != _native()

    @property
    def has_selinux(self) -> bool:
        return set(SELINUX) <= set(self.packages)

    @property
    def emulator(self) -> _Emulator:
        return _EMULATORS[self.architecture]

    @property
    def command_line(self) -> str:
        """The kernel's."""
        selinux = " security=selinux selinux=1 enforcing=1" if self.has_selinux else ""
        return _KERNEL.format(serial=self.emulator.serial) + selinux

    @property
    def service(self) -> str:
        """The unit that executes the payload. With SELinux, it is as unconfined as the shell of an administrator."""
        more = "SELinuxContext=unconfined_u:unconfined_r:unconfined_t:s0-s0:c0.c1023" if self.has_selinux else ""
        return _SERVICE.format(serial=self.emulator.serial, more=more)

    def disk(self, cache: Cache | None = None) -> Path:
        """Return a directory with the disk `root.qcow2`, `kernel` and `initrd`."""
        recipe = recipe_hash(self.recipe.key(), self.service, _PAYLOAD, _ROOT, self.command_line)
        return (cache or Cache()).entry(f"machine-{self.name}", recipe, self._build)

    def _build(self, directory: Path) -> None:
        with tempfile.TemporaryDirectory(dir=directory) as temporary:
            root, raw = Path(temporary, "root"), Path(temporary, "raw")
            root.mkdir()
            run(["tar", "--zstd", "--extract", "--file", rootfs(self.recipe), "--directory", root], timeout=600)
            (kernel,), (initrd,) = root.glob("boot/vmlinuz-*"), root.glob("boot/initrd.img-*")
            shutil.copy(kernel, directory / "kernel")
            shutil.copy(initrd, directory / "initrd")
            units = root / "etc/systemd/system"
            (units / "payload.service").write_text(self.service)
            (units / "payload.mount").write_text(_PAYLOAD)
            (units / "multi-user.target.wants").mkdir(exist_ok=True)
            (units / "multi-user.target.wants/payload.service").symlink_to("../payload.service")
            (root / "etc/fstab").write_text("")
            if self.has_selinux:
                # The policy forbids Podman to load it.
                (root / "etc/modules-load.d/overlay.conf").write_text("overlay\n")
                _label(root)
            run(["truncate", f"--size={_ROOT}", raw])
            run(["mke2fs", "-q", "-t", "ext4", "-d", root, raw], timeout=600)
            run(["qemu-img", "convert", "-O", "qcow2", raw, directory / "root.qcow2"], timeout=600)


@cache
def _native() -> str:
    return run(["dpkg", "--print-architecture"]).stdout.strip()


def _label(root: Path) -> None:
    """Give each file the label of the policy, as `fixfiles relabel` does at the first boot. setfiles(8) needs proc."""
    contexts = "/etc/selinux/default/contexts/files/file_contexts"
    script = f'mount -t proc proc "$1/proc" && chroot "$1" setfiles -q -F -e /proc {contexts} / 2>&1 | tail -n 20'
    run(["unshare", "--mount", "sh", "-euc", script, "sh", root], timeout=600)


@contextlib.contextmanager
def results(
    machine: Machine, payload: Path, log: Path, seconds: float, *, without: Sequence[str] = ()
) -> Iterator[Path]:
    """Run a machine with this payload; yield the directory with its results. Raises MachineFailed.

    `log` receives what it prints. It must have powered off after so many seconds. `without` are units that it does not
    start.
    """
    disk = machine.disk()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        root, given, written = directory / "root", directory / "payload", directory / "results"
        run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", disk / "root.qcow2", root])
        size = int(run(["du", "--summarize", "--block-size=1M", payload]).stdout.split()[0])
        run(["truncate", f"--size={size + size // 4 + 32}M", given])
        run(["mke2fs", "-q", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-d", payload, given], timeout=600)
        run(["truncate", f"--size={_RESULTS}", written])
        command_line = " ".join([machine.command_line, *(f"systemd.mask={unit}" for unit in without)])
        emulator: list[Argument] = [
            *("setpriv", "--pdeathsig", "KILL", "--"),  # if the tests are killed, a machine would go on for hours
            *(*machine.emulator.command, "-accel", "tcg", "-smp", "1", "-m", "4G"),
            *("-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio", "-nic", "none"),
            *("-kernel", disk / "kernel", "-initrd", disk / "initrd", "-append", command_line),
            *_drive("root", root, "qcow2"),
            *_drive("payload", given, "raw", "readonly=on"),
            *_drive("results", written, "raw"),
        ]
        with log.open("wb") as output:
            running = subprocess.Popen(emulator, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            try:
                running.wait(seconds)
            except subprocess.TimeoutExpired:
                raise MachineFailed(f"{machine.name}: still running after {seconds} s\n{_end_of(log)}") from None
            finally:
                running.kill()
                running.wait()
        extracted = directory / "extracted"
        extracted.mkdir()
        run(["tar", "--extract", "--file", written, "--directory", extracted], check=False)
        if not any(extracted.iterdir()):
            raise MachineFailed(f"{machine.name}: no results\n{_end_of(log)}")
        yield extracted


def _drive(name: str, file: Path, form: str, *more: str) -> list[Argument]:
    """Return the emulator's arguments for a disk that the machine finds as /dev/disk/by-id/virtio-NAME."""
    backend = ",".join((f"id={name}", f"file={file}", f"format={form}", "if=none", "cache=unsafe", *more))
    return ["-drive", backend, "-device", f"virtio-blk-pci,drive={name},serial={name}"]


def _end_of(log: Path) -> str:
    return log.read_bytes()[-4000:].decode(errors="replace")
