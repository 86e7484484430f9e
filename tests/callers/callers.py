"""The callers: unmodified FUSE programs, and our smallest filesystems on unmodified libraries.

Each `Caller` describes how to start a program and what it supports; `CALLERS` is the list, in the order of the rows of
the table in docs/compatibility.md. Commands are templates: {mnt} is the mountpoint, {dir} an empty directory of the
user's around it, {src} a directory in {dir}, with the file `hello` in it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tests.callers import build, images
from tests.lab.images import BUSYBOX
from tests.lab.podman import Volume
from tests.lab.programs import SOURCES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.lab.images import DebianRecipe

BOTH = "auto_unmount or not"
PLAIN = "only without auto_unmount"


@dataclass(frozen=True)
class Kit:
    """A container's image, and the directories mounted in it below /callers. Raises build.NotReachable."""

    image: DebianRecipe | str
    programs: Callable[[], Path]

    def tag(self) -> str:
        return build.image_tag(self.image)

    def volumes(self) -> list[Volume]:
        return [Volume(self.programs(), "/callers"), Volume(SOURCES, "/sources")]


@dataclass(frozen=True)
class Caller:
    """A program that calls fusermount3."""

    name: str
    kit: Kit
    library: str
    """The library that calls the helper for it."""
    serve: str
    """Serves in the foreground."""
    package: str = ""
    """The Debian package whose version is the caller's; or `version`, a command that prints it."""
    version: str = ""
    background: str = ""
    """Serves in the background, if it can."""
    auto_unmount: str = ""
    """Words after the command that ask for auto_unmount, if it can."""
    prepare: str = ""
    """A shell script that creates the source of the mount."""
    file: str = "hello"
    """The file that is read in the mount."""
    written: str = ""
    """The file that is written in the mount, if it is writable."""
    unmount: str = "fusermount3 -u {mnt}"
    stop: signal.Signals | None = signal.SIGTERM
    """The signal at which it unmounts by itself."""
    gives_up: str = ""
    """Its message when it gives up without a /dev/fuse that it can open; most callers don't look."""
    needs_device: str = BOTH
    """When it gives up for that reason."""
    clone_fd: str = ""
    """Words after the command that ask for more descriptors, if it can."""
    service: str = ""
    """The server that it is a client of: ssh or s3."""


GO = Kit(BUSYBOX, build.go_programs)
RUST = Kit(BUSYBOX, build.rust_programs)
RUST_AND_LIBFUSE_2 = Kit(images.TRIXIE, build.rust_programs)
BOOKWORM = Kit(images.BOOKWORM, partial(build.libfuse_programs, images.BOOKWORM, ("fuse", "fuse3")))
TRIXIE = Kit(images.TRIXIE, partial(build.libfuse_programs, images.TRIXIE, ("fuse3",)))
PYPI = Kit(images.BOOKWORM, partial(build.python_programs, "callers"))
SID = Kit(images.SID, partial(build.libfuse_programs, images.SID, ("fuse3",)))

NO_DEVICE = "fuse: device not found, try 'modprobe fuse' first"
NO_DEVICE_LATER = "fuse: device /dev/fuse not found"


def libfuse(
    name: str, kit: Kit, pkgconfig: str = "fuse3", gives_up: str = NO_DEVICE, needs_device: str = BOTH
) -> list[Caller]:
    """Return the callers that use the high-level and the low-level API of a libfuse."""
    is_2 = pkgconfig == "fuse"
    high_level = Caller(
        name=f"{name}, high-level API",
        kit=kit,
        library="libfuse 2" if is_2 else "libfuse 3",
        serve=f"/callers/whoamifs-{pkgconfig} -f {{mnt}}",
        background=f"/callers/whoamifs-{pkgconfig} {{mnt}}",
        version=f"pkg-config --modversion {pkgconfig}",
        auto_unmount="-o auto_unmount",
        file="whoami",
        written="files/new",
        unmount="fusermount -u {mnt}" if is_2 else "fusermount3 -u {mnt}",
        clone_fd="" if is_2 else "-o clone_fd",
        gives_up=gives_up,
        needs_device=needs_device,
    )
    low_level = replace(
        high_level,
        name=f"{name}, low-level API",
        serve=f"/callers/hello_ll-{pkgconfig} -f {{mnt}}",
        background=f"/callers/hello_ll-{pkgconfig} {{mnt}}",
        file="hello",
        written="hello",
    )
    return [high_level, low_level]


def fuser(release: str) -> Caller:
    """Return the caller that uses this release of the Rust library."""
    return Caller(
        name=f"fuser {release}",
        kit=RUST,
        library="itself (Rust)",
        serve=f"/callers/fuser_{release.replace('.', '_')} {{mnt}}",
        version=f"sh -c \"grep -A1 'name = .fuser.' /sources/rust/Cargo.lock | grep -o '{release}[.0-9]*'\"",
        auto_unmount="--auto-unmount",
        written="hello",
        gives_up="No such file or directory",
        needs_device=PLAIN,
    )


def in_go(name: str, module: str) -> Caller:
    """Return the caller that uses this Go library."""
    return Caller(
        name=module,
        kit=GO,
        library="itself (Go)",
        serve=f"/callers/{name} {{mnt}}",
        version=f"sh -c \"sed -n 's|^.*{module} v||p' /sources/go/go.mod\"",
        written="hello",
    )


SQUASHFS = "mksquashfs {src} {dir}/image -quiet -no-progress > /dev/null"
RESTIC = "env RESTIC_PASSWORD=x RESTIC_REPOSITORY={dir}/repository"
BORG = "env BORG_REPO={dir}/repository BORG_BASE_DIR={dir}/borg"
GOCRYPTFS = "-extpass 'echo secret' {dir}/cipher"
S3FS = "s3fs bucket {mnt} -o passwd_file={dir}/password,use_path_request_style,url={url}"

CALLERS = [
    *libfuse("libfuse 2", BOOKWORM, "fuse", needs_device=PLAIN),
    *libfuse("libfuse 3 of Debian 12", BOOKWORM, needs_device=PLAIN),
    *libfuse("libfuse 3 of Debian 13", TRIXIE),
    *libfuse("libfuse 3 of Debian sid", SID, gives_up=NO_DEVICE_LATER),
    Caller(
        name="archivemount",
        kit=BOOKWORM,
        library="libfuse 2",
        package="archivemount",
        prepare="tar -C {src} -cf {dir}/archive.tar hello",
        serve="archivemount -f -o nobackup {dir}/archive.tar {mnt}",
        background="archivemount -o nobackup {dir}/archive.tar {mnt}",
        auto_unmount="-o auto_unmount",
        written="new",
        unmount="fusermount -u {mnt}",
        gives_up=NO_DEVICE,
        needs_device=PLAIN,
    ),
    *(
        Caller(
            name=f"bindfs{option}",
            kit=BOOKWORM,
            library="libfuse 2",
            package="bindfs",
            serve=f"bindfs -f{option} {{src}} {{mnt}}",
            background=f"bindfs{option} {{src}} {{mnt}}",
            auto_unmount="-o auto_unmount",
            written="new",
            gives_up=NO_DEVICE,
            needs_device=PLAIN,
        )
        for option in ("", " --no-allow-other")
    ),
    Caller(
        name="borg mount",
        kit=BOOKWORM,
        library="libfuse 3 (Python, pyfuse3)",
        package="borgbackup",
        prepare=f"{BORG} borg init -e none && cd {{src}} && {BORG} borg create ::archive hello",
        serve=f"{BORG} borg mount -f ::archive {{mnt}}",
        background=f"{BORG} borg mount ::archive {{mnt}}",
        auto_unmount="-o auto_unmount",
        stop=None,  # with pyfuse3 it does not unmount on a signal, as a comment in its source admits
        needs_device=PLAIN,
        gives_up=NO_DEVICE,
    ),
    Caller(
        name="fuse-overlayfs",
        kit=BOOKWORM,
        library="libfuse 3",
        package="fuse-overlayfs",
        prepare="mkdir {dir}/upper {dir}/work",
        serve="fuse-overlayfs -f -o lowerdir={src},upperdir={dir}/upper,workdir={dir}/work {mnt}",
        background="fuse-overlayfs -o lowerdir={src},upperdir={dir}/upper,workdir={dir}/work {mnt}",
        written="new",
        gives_up=NO_DEVICE,
    ),
    Caller(
        name="mergerfs",
        kit=BOOKWORM,
        library="its own libfuse 2",
        package="mergerfs",
        prepare="mkdir {dir}/second",
        serve="mergerfs -f {src}:{dir}/second {mnt}",
        background="mergerfs {src}:{dir}/second {mnt}",
        auto_unmount="-o auto_unmount",
        written="new",
        unmount="mergerfs-fusermount -u {mnt}",
        gives_up=NO_DEVICE,
        needs_device=PLAIN,
    ),
    Caller(
        name="s3fs",
        kit=BOOKWORM,
        library="libfuse 2",
        package="s3fs",
        service="s3",
        prepare="umask 077 && echo key:secret > {dir}/password",
        serve=f"{S3FS} -f",
        background=S3FS,
        auto_unmount="-o auto_unmount",
        written="new",
        unmount="fusermount -u {mnt}",
        gives_up=NO_DEVICE,
        needs_device=PLAIN,
    ),
    Caller(
        name="squashfuse",
        kit=BOOKWORM,
        library="libfuse 3",
        package="squashfuse",
        prepare=SQUASHFS,
        serve="squashfuse -f {dir}/image {mnt}",
        background="squashfuse {dir}/image {mnt}",
        auto_unmount="-o auto_unmount",
        gives_up=NO_DEVICE,
        needs_device=PLAIN,
    ),
    Caller(
        name="squashfuse_ll",
        kit=BOOKWORM,
        library="libfuse 3",
        package="squashfuse",
        prepare=SQUASHFS,
        serve="squashfuse_ll -f {dir}/image {mnt}",
        background="squashfuse_ll {dir}/image {mnt}",
        auto_unmount="-o auto_unmount",
        gives_up=NO_DEVICE,
        needs_device=PLAIN,
    ),
    Caller(
        name="sshfs",
        kit=BOOKWORM,
        library="libfuse 3",
        package="sshfs",
        service="ssh",
        serve="sshfs -f {ssh} {mnt}",
        background="sshfs {ssh} {mnt}",
        auto_unmount="-o auto_unmount",
        written="new",
        gives_up=NO_DEVICE,
        needs_device=PLAIN,
    ),
    Caller(
        name="unionfs-fuse",
        kit=BOOKWORM,
        library="libfuse 2",
        package="unionfs-fuse",
        serve="unionfs -f {src}=RW {mnt}",
        background="unionfs {src}=RW {mnt}",
        auto_unmount="-o auto_unmount",
        written="new",
        unmount="fusermount -u {mnt}",
        gives_up=NO_DEVICE,
        needs_device=PLAIN,
    ),
    *(fuser(release) for release in ("0.12", "0.16", "0.18")),
    Caller(
        name="the fuser of mountpoint-s3",
        kit=RUST_AND_LIBFUSE_2,
        library="libfuse 2, as AWS builds it",
        serve="/callers/mountpoint_s3_fuser {mnt}",
        version="sed -n 's/^mountpoint-s3-fuser = .*\"=\\([.0-9]*\\)\".*/\\1/p' /sources/rust/libfuse/Cargo.toml",
        auto_unmount="--auto-unmount",
        written="hello",
        unmount="fusermount -u {mnt}",
        gives_up=NO_DEVICE,
        needs_device=PLAIN,
    ),
    in_go("gofuse", "github.com/hanwen/go-fuse/v2"),
    in_go("jacobsa", "github.com/jacobsa/fuse"),
    in_go("bazil", "bazil.org/fuse"),
    Caller(
        name="gocryptfs",
        kit=BOOKWORM,
        library="go-fuse 2.1 (Go)",
        package="gocryptfs",
        prepare=(
            f"mkdir {{dir}}/cipher && gocryptfs -q -init -scryptn 10 {GOCRYPTFS} && "
            "gocryptfs -q -extpass 'echo secret' {dir}/cipher {mnt} && cp {src}/hello {mnt} && fusermount3 -u {mnt}"
        ),
        serve=f"gocryptfs -q -fg {GOCRYPTFS} {{mnt}}",
        background=f"gocryptfs -q {GOCRYPTFS} {{mnt}}",
        written="new",
    ),
    Caller(
        name="rclone mount",
        kit=BOOKWORM,
        library="bazil.org/fuse (Go)",
        package="rclone",
        serve="rclone mount --config= --cache-dir={dir}/cache --vfs-cache-mode=writes {src} {mnt}",
        background="rclone mount --daemon --config= --cache-dir={dir}/cache --vfs-cache-mode=writes {src} {mnt}",
        written="new",
    ),
    Caller(
        name="restic mount",
        kit=BOOKWORM,
        library="anacrolix/fuse (Go)",
        package="restic",
        prepare=f"{RESTIC} restic init -q && cd {{src}} && {RESTIC} restic backup -q hello",
        serve=f"{RESTIC} restic mount -q --no-cache {{mnt}}",
        file="snapshots/latest/hello",
        stop=signal.SIGINT,
    ),
    Caller(
        name="mfusepy",
        kit=PYPI,
        library="libfuse 3 (Python, ctypes)",
        version="sed -n 's/^mfusepy==//p' /sources/python/callers.txt",
        prepare="mkdir {dir}/site && tar -C {dir}/site -xf /callers/site.tar",
        serve="env PYTHONPATH={dir}/site python3 /sources/hello_mfusepy.py {mnt}",
        auto_unmount="auto_unmount",
        written="hello",
        gives_up=NO_DEVICE,
        needs_device=PLAIN,
    ),
    *(
        Caller(
            name=f"pyfuse3 of Debian {release}",
            kit=kit,
            library="libfuse 3",
            package="python3-pyfuse3",
            serve="python3 /sources/whoami_pyfuse3.py {mnt}",
            file="whoami",
            stop=None,
            gives_up=NO_DEVICE,
        )
        for release, kit in (("12", BOOKWORM), ("13", TRIXIE))
    ),
]
