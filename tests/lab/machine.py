"""Virtual machines with kernels of other releases, emulated: each boots as Debian boots, with systemd and cgroup v2.

A machine has three disks: the release's root filesystem with its kernel, a copy for each run; the *payload*, a
directory of this machine that it gets read-only at /payload, and whose program `run` it executes when it has booted;
and one on which it writes a tarball of what `run` has left in /results. What `run` prints comes back by the serial
line, as it comes. The machine has no network. Emulation is 10 to 60 times slower than this machine.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import Argument, run
from tests.lab.images import DebianRecipe, rootfs

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGES = (
    # a machine that boots
    *("linux-image-cloud-amd64", "initramfs-tools", "zstd", "systemd-sysv", "dbus", "udev", "kmod", "apparmor"),
    *("passwd", "procps", "iproute2", "util-linux", "libpam-systemd"),
    # containers, as Debian configures them
    *("podman", "crun", "uidmap", "slirp4netns", "busybox-static", "jq"),
    *("docker.io", "iptables", "dbus-user-session"),
    # what the broker imports
    *("python3", "python3-click", "python3-h11", "python3-prometheus-client", "python3-psutil", "python3-pyxattr"),
    *("python3-systemd", "python3-rich", "python3-seccomp", "python3-protobuf", "python3-grpcio"),
    # its tests, and FUSE programs
    *("python3-pytest", "strace", "fuse3", "sshfs", "bindfs", "openssh-server"),
)
#: Packages that only some releases have: since Debian 13, docker.io is without its client.
_MORE = {"trixie": ("docker-cli",), "sid": ("docker-cli",)}

_SERVICE = """\
[Unit]
RequiresMountsFor=/payload
[Service]
Type=oneshot
ExecStartPre=mkdir --parents /results
ExecStart=/bin/sh /payload/run
ExecStopPost=tar --create --file /dev/disk/by-id/virtio-results --directory /results .
ExecStopPost=systemctl poweroff --no-block
StandardOutput=file:/dev/ttyS0
StandardError=inherit
[Install]
WantedBy=multi-user.target
"""
_PAYLOAD = """\
[Mount]
What=/dev/disk/by-id/virtio-payload
Where=/payload
Options=ro
"""
#: The kernel's command line. The results have the serial line for themselves.
_KERNEL = (
    "root=/dev/disk/by-id/virtio-root",
    "rw",
    "console=ttyS0",
    "quiet",
    "systemd.show_status=false",
    "systemd.mask=serial-getty@ttyS0.service",
    "panic=-1",
)
#: QEMU 7.2 emulates cmpxchg16b wrongly: the allocator of Linux 6.12, which uses it if it can, panics after a while.
_CPU = "max,cx16=off"
#: Bytes of the disks: room for what a run writes, and for its results.
_ROOT, _RESULTS = "8G", "64M"


class MachineFailed(Exception):
    """The machine did not power off in time, or left no results; the message ends with what it printed."""


@dataclass(frozen=True)
class Release:
    """A release of Debian, whose kernel a machine has."""

    suite: str

    @property
    def recipe(self) -> DebianRecipe:
        return DebianRecipe(f"machine-{self.suite}", (*_PACKAGES, *_MORE.get(self.suite, ())), self.suite)

    def disk(self, cache: Cache | None = None) -> Path:
        """Return a directory with the disk `root.qcow2`, `kernel` and `initrd`."""
        recipe = recipe_hash(self.recipe.key(), _SERVICE, _PAYLOAD, _ROOT)
        return (cache or Cache()).entry(f"machine-{self.suite}", recipe, self._build)

    def _build(self, directory: Path) -> None:
        with tempfile.TemporaryDirectory(dir=directory) as temporary:
            root, raw = Path(temporary, "root"), Path(temporary, "raw")
            root.mkdir()
            run(["tar", "--zstd", "--extract", "--file", rootfs(self.recipe), "--directory", root], timeout=600)
            (kernel,), (initrd,) = root.glob("boot/vmlinuz-*"), root.glob("boot/initrd.img-*")
            shutil.copy(kernel, directory / "kernel")
            shutil.copy(initrd, directory / "initrd")
            units = root / "etc/systemd/system"
            (units / "payload.service").write_text(_SERVICE)
            (units / "payload.mount").write_text(_PAYLOAD)
            (units / "multi-user.target.wants").mkdir(exist_ok=True)
            (units / "multi-user.target.wants/payload.service").symlink_to("../payload.service")
            (root / "etc/fstab").write_text("")
            run(["truncate", f"--size={_ROOT}", raw])
            run(["mke2fs", "-q", "-t", "ext4", "-d", root, raw], timeout=600)
            run(["qemu-img", "convert", "-O", "qcow2", raw, directory / "root.qcow2"], timeout=600)


@contextlib.contextmanager
def results(release: Release, payload: Path, log: Path, seconds: float) -> Iterator[Path]:
    """Run a machine with this payload; yield the directory with its results. Raises MachineFailed.

    `log` receives what it prints. It must have powered off after so many seconds.
    """
    disk = release.disk()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        root, given, written = directory / "root", directory / "payload", directory / "results"
        run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", disk / "root.qcow2", root])
        size = int(run(["du", "--summarize", "--block-size=1M", payload]).stdout.split()[0])
        run(["truncate", f"--size={size + size // 4 + 32}M", given])
        run(["mke2fs", "-q", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-d", payload, given], timeout=600)
        run(["truncate", f"--size={_RESULTS}", written])
        emulator: list[Argument] = [
            *("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", _CPU, "-smp", "2", "-m", "4G"),
            *("-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio", "-nic", "none"),
            *("-kernel", disk / "kernel", "-initrd", disk / "initrd", "-append", " ".join(_KERNEL)),
            *_drive("root", root, "qcow2"),
            *_drive("payload", given, "raw", "readonly=on"),
            *_drive("results", written, "raw"),
        ]
        with log.open("wb") as output:
            machine = subprocess.Popen(emulator, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            try:
                machine.wait(seconds)
            except subprocess.TimeoutExpired:
                raise MachineFailed(f"{release.suite}: still running after {seconds} s\n{_end_of(log)}") from None
            finally:
                machine.kill()
                machine.wait()
        extracted = directory / "extracted"
        extracted.mkdir()
        if run(["tar", "--extract", "--file", written, "--directory", extracted], check=False).returncode != 0:
            raise MachineFailed(f"{release.suite}: no results\n{_end_of(log)}")
        yield extracted


def _drive(name: str, file: Path, form: str, *more: str) -> list[Argument]:
    """Return the emulator's arguments for a disk that the machine finds as /dev/disk/by-id/virtio-NAME."""
    backend = ",".join((f"id={name}", f"file={file}", f"format={form}", "if=none", "cache=unsafe", *more))
    return ["-drive", backend, "-device", f"virtio-blk-pci,drive={name},serial={name}"]


def _end_of(log: Path) -> str:
    return log.read_bytes()[-4000:].decode(errors="replace")
