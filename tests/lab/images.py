"""Container images out of Debian packages: they need no registry, and their contents are known.

`image_tag(RECIPE)` returns the name of an image that podman has, after making the image if necessary. That takes
seconds to a minute the first time (packages are downloaded), half a second later: a Debian root filesystem stays in
the cache as a tarball, and an image in podman is used again if it was imported from just that tarball.

`BUSYBOX`, `SSHFS`, `DEBIAN` and `SYSTEMD` are the images of the lab; `scratch_tag` makes one that holds nothing but
the given files. All but the last have the users root and `user` (uid and gid 1000), and the empty directories /mnt,
which is root's, and /home/user/mnt, the user's, to mount on.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.cache import Cache, DownloadFailed, read_manifest, recipe_hash, sha256
from tests.lab.commands import run
from tests.lab.foreign import run_emulating

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

REPOSITORY = "localhost/fusermount3-proxy-lab"
ROOTFS = "rootfs.tar.zst"
DIGEST_LABEL = "fusermount3-proxy-lab.tarball"
NAME_LABEL = "fusermount3-proxy-lab.name"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class DebianRecipe:
    """A Debian root filesystem: the suite's minimal system with apt, and packages with their dependencies.

    Recommended packages are left out.
    """

    name: str
    packages: Sequence[str]
    suite: str = "bookworm"
    hooks: Sequence[str] = ()
    """More options of mmdebstrap, for the last steps."""
    other_suites: Sequence[str] = ()
    """Suites from which packages may come, too."""
    architecture: str = ""
    """Debian's name of it, if it isn't this machine's."""

    def key(self) -> str:
        more = (*self.other_suites, *([self.architecture] if self.architecture else []))
        return recipe_hash(self.name, self.suite, *self.packages, *MMDEBSTRAP, *self.hooks, *more)


MMDEBSTRAP = (
    "mmdebstrap",
    "--quiet",
    "--variant=apt",
    "--aptopt=Acquire::Check-Valid-Until false",  # an outdated mirror serves a test as well
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    '--customize-hook=chroot "$1" useradd --uid 1000 --user-group --create-home --shell /bin/sh user',
    '--customize-hook=install --directory --owner=1000 --group=1000 "$1/home/user/mnt"',
)

SSHFS = DebianRecipe("sshfs", ("sshfs",))
"""sshfs and its dependencies, libfuse 3 and ssh; no Python."""

MERGERFS = DebianRecipe("mergerfs", ("passwd", "mergerfs"))
"""mergerfs and its dependencies; it brings its own libfuse and its own helper."""

DEBIAN = DebianRecipe(
    "debian",
    (
        "sshfs",  # C, libfuse 3
        "bindfs",  # C, libfuse 2
        "archivemount",  # C, libfuse 2: it calls /bin/fusermount
        *("fuse2fs", "e2fsprogs"),  # C, libfuse 2; what makes its filesystems
        "rclone",  # Go, bazil.org/fuse
        "python3-pyfuse3",  # Python, libfuse 3's low-level API
        "procps",
    ),
)
"""FUSE programs of each kind."""

_FUSE_PACKAGES = (
    '--customize-hook=mkdir "$1/packages" && cd "$1/packages" && '
    "APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get download fuse3 fuse",
)
WITHOUT_FUSE = DebianRecipe("without-fuse", ("libfuse3-3", "libfuse2", "adduser", "mount"), hooks=_FUSE_PACKAGES)
"""What the packages fuse3 and fuse depend on, and in /packages themselves, to be installed later."""

WITHOUT_MERGERFS = DebianRecipe(
    "without-mergerfs",
    ("passwd", "fuse3", "libfuse2", "libstdc++6"),
    hooks=(
        '--customize-hook=mkdir "$1/packages" && cd "$1/packages" && '
        "APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get download mergerfs",
    ),
)
"""The dependencies of mergerfs, and its package in /packages."""

WITHOUT_FUSE_TRIXIE = DebianRecipe(
    "without-fuse-trixie", ("libfuse3-4", "libfuse2t64", "adduser", "mount"), suite="trixie", hooks=_FUSE_PACKAGES
)
"""The same of the next release, which has the helper in /usr/bin and no longer in /bin."""

INSTALL_FUSE = "apt-get install --quiet --yes /packages/fuse3_*.deb"
"""The command for a shell that does so, without a network."""

SYSTEMD = DebianRecipe(
    "systemd",
    (
        "systemd",
        "systemd-sysv",
        "dbus",
        "python3",
        "python3-click",
        "python3-h11",
        "python3-prometheus-client",
        "python3-psutil",
        "python3-pyxattr",
        "python3-prometheus-client",
        "python3-systemd",
        "python3-rich",
        "python3-seccomp",
        "fuse3",
        "sshfs",
        "procps",
    ),
)
"""A system that boots (Options(privileged=True, extra=["--systemd=always"]), command /sbin/init) and has
what the broker imports."""


@dataclass(frozen=True)
class Entry:
    """A path of an image: a directory, a symbolic link (`link` set) or a copy of a file of the host (`file` set)."""

    path: str
    mode: int = 0o755
    owner: int = 0
    file: Path | None = None
    link: str | None = None


SKELETON = (
    *(Entry(path) for path in ("dev", "etc", "proc", "run", "sys", "var")),
    *(Entry(path, 0o1777) for path in ("tmp", "var/tmp")),
    Entry("root", 0o700),
    Entry("home"),
    Entry("home/user", owner=1000),
    Entry("home/user/mnt", owner=1000),
    Entry("mnt"),
)

BUSYBOX = "busybox"
"""The name of the image with a static busybox, its links and nothing else: no libc, no FUSE."""


def image_tag(image: DebianRecipe | str, cache: Cache | None = None) -> str:
    """Return podman's name of an image of the lab, made now unless podman has it already."""
    if image == BUSYBOX:
        return tag_of_entries(BUSYBOX, busybox_entries(), users=True)
    assert isinstance(image, DebianRecipe), f"the lab has no image {image!r}"
    return debian_tag(image, cache or Cache())


def scratch_tag(files: Mapping[str, tuple[Path, int]], directories: Mapping[str, int] | None = None) -> str:
    """Return the name of an image that holds just these files and directories, all owned by root.

    They are {path: (file on the host, mode)} and {path: mode}.

    Without `directories` there is one mountpoint, /mnt, to which every user may write (and on which it may mount).
    """
    entries = [Entry(path.strip("/"), mode) for path, mode in (directories or {"/mnt": 0o777}).items()]
    entries += [Entry(path.strip("/"), mode, file=file) for path, (file, mode) in files.items()]
    tag = tag_of_entries("scratch", entries, users=False)
    prune_scratch()
    return tag


def debian_tag(recipe: DebianRecipe, cache: Cache) -> str:
    """Do the work of `image_tag`; the tarball is in the cache."""
    tarball = rootfs(recipe, cache)
    tag = f"{REPOSITORY}/{recipe.name}:{recipe.key()}"
    with cache.locked(f"image-{recipe.name}-{recipe.key()}"):
        return imported(tag, tarball, read_manifest(tarball.parent)[ROOTFS], recipe.name)


def rootfs(recipe: DebianRecipe, cache: Cache | None = None) -> Path:
    """Return the tarball of a root filesystem, compressed with zstd."""
    name = f"rootfs-{recipe.name}"
    return (cache or Cache()).entry(name, recipe.key(), lambda path: build_rootfs(recipe, path / ROOTFS)) / ROOTFS


def tag_of_entries(name: str, entries: Iterable[Entry], *, users: bool) -> str:
    """Import these paths as an image; the same content has the same tag, and is imported once."""
    with tempfile.TemporaryDirectory() as directory:
        tarball = Path(directory) / "rootfs.tar"
        write_tarball(tarball, entries, users=users)
        digest = sha256(tarball)
        with Cache().locked(f"image-{name}-{digest[:16]}"):
            return imported(f"{REPOSITORY}/{name}:{digest[:16]}", tarball, digest, name)


def imported(tag: str, tarball: Path, digest: str, name: str) -> str:
    """Return the tag, after `podman import` if podman has no such image or one from another tarball."""
    if label_of(tag) != digest:
        changes = [f"ENV PATH={PATH}", f"LABEL {DIGEST_LABEL}={digest}", f"LABEL {NAME_LABEL}={name}"]
        options = [word for change in changes for word in ("--change", change)]
        run(["podman", "import", "--quiet", *options, tarball, tag], timeout=300)
    return tag


def label_of(tag: str) -> str | None:
    """Return the digest of the tarball from which podman's image was made; None if there is no such image."""
    template = f'{{{{index .Config.Labels "{DIGEST_LABEL}"}}}}'
    result = run(["podman", "image", "inspect", "--format", template, tag], check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def prune_scratch() -> None:
    """Delete unused scratch images that are days old: each build of the proxy makes new ones."""
    run(
        [
            "podman",
            "image",
            "prune",
            "--all",
            "--force",
            "--filter",
            f"label={NAME_LABEL}=scratch",
            "--filter",
            "until=72h",
        ],
        check=False,  # it fails if another run deletes the same image at this moment
    )


def build_rootfs(recipe: DebianRecipe, tarball: Path) -> None:
    """Make the tarball of a root filesystem. DownloadFailed with mmdebstrap's last lines if that fails."""
    options = [*recipe.hooks, f"--include={','.join(recipe.packages)}"]
    sources = [line for suite in (recipe.suite, *recipe.other_suites) for line in debian_sources(suite)]
    argv = [*MMDEBSTRAP, *options, recipe.suite, str(tarball), *sources]
    if recipe.architecture:
        result = run_emulating([*argv, f"--architectures={recipe.architecture}"])
    else:
        result = subprocess.run(argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode != 0:
        raise DownloadFailed(f"mmdebstrap failed for the image {recipe.name}:\n{result.stdout[-4000:]}")


def debian_sources(suite: str) -> list[str]:
    """Return lines for sources.list: the archives that apt on this host uses for this suite.

    If it uses none, the lines name the suite on the mirror that it uses for another.
    """
    template = "$(ORIGIN)\t$(COMPONENT)\t$(RELEASE)\t$(REPO_URI)"
    output = run(["apt-get", "indextargets", "--format", template, "Created-By: Packages"]).stdout
    targets = [tuple(line.split("\t")) for line in output.splitlines()]
    archives = list(
        dict.fromkeys(
            (release, uri) for origin, component, release, uri in targets if origin == "Debian" and component == "main"
        )
    )
    if not archives:
        raise RuntimeError("apt on this host has no Debian archive: run apt-get update, or see sources.list(5)")
    matching = [archive for archive in archives if archive[0] == suite or archive[0].startswith(f"{suite}-")]
    if not matching:
        # The shortest name is the release itself, not its -updates or -security, which may be elsewhere.
        _, mirror = min(archives, key=lambda archive: len(archive[0]))
        matching = [(suite, mirror)]
    return [f"deb {uri} {release} main" for release, uri in matching]


def busybox_entries(busybox: Path = Path("/bin/busybox")) -> list[Entry]:
    """Return the host's static busybox with a link for each of its commands."""
    commands = run([busybox, "--list"]).stdout.split()
    links = [Entry(f"bin/{command}", link="busybox") for command in commands if command != "busybox"]
    return [*SKELETON, Entry("bin"), Entry("bin/busybox", file=busybox), *links]


USERS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
    "etc/group": "root:x:0:\nuser:x:1000:\n",
}


def write_tarball(tarball: Path, entries: Iterable[Entry], *, users: bool) -> None:
    """Write the entries as a tarball. The same entries give the same bytes: no times, no names of the host's users."""
    with tarfile.open(tarball, "w") as tar:
        for entry in entries:
            info, content = tar_member(entry)
            tar.addfile(info, io.BytesIO(content))
        for path, text in USERS.items() if users else ():
            info = tarfile.TarInfo(path)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))


def tar_member(entry: Entry) -> tuple[tarfile.TarInfo, bytes]:
    """Return the header and the content of an entry."""
    info = tarfile.TarInfo(entry.path)
    info.mode, info.uid, info.gid = entry.mode, entry.owner, entry.owner
    content = b""
    if entry.link is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
    elif entry.file is not None:
        content = entry.file.read_bytes()
        info.size = len(content)
    else:
        info.type = tarfile.DIRTYPE
    return info, content
