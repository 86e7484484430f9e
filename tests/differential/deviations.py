"""The intended differences of the proxy: the single table, and the comparison that accounts for it.

A deviation removes its difference from a pair of observations, if the difference occurs and looks exactly as expected.
Two observations agree when no difference remains. docs/compatibility.md has the same table for human readers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fusermount3_proxy import FUSERMOUNT_VERSION
from tests.differential.model import ROOT, STRANGER, Case, Comm, MountLine, Observation

if TYPE_CHECKING:
    from collections.abc import Callable

Pair = tuple[Observation, Observation]
"""The results of the genuine helper and of the proxy."""


@dataclass(frozen=True)
class Deviation:
    """`example` is a case of the corpus in which it occurs; `take_away` returns the pair without it.

    If the release whose behaviour the proxy imitates behaves the same, `release` is an older one that doesn't.
    """

    name: str
    reason: str
    example: str
    take_away: Callable[[Case, Observation, Observation], Pair]
    release: tuple[int, int] = (3, 18)


def disagreement(case: Case, genuine: Observation, proxy: Observation, without: str = "") -> Pair | None:
    """Return the pair without all deviations but the one named `without`, or None if its observations then agree."""
    for deviation in DEVIATIONS:
        if deviation.name != without:
            genuine, proxy = deviation.take_away(case, genuine, proxy)
    return None if genuine == proxy else (genuine, proxy)


# Appearance of the differences -----------------------------------------------------------------------------------


def says(case: Case, observation: Observation, pattern: bytes) -> bool:
    """Whether this one message is its entire output, apart from warnings."""
    warnings = rb"(?:%b: (?:unsafe option|note:)[^\n]*\n)*" % re.escape(case.argv[0])
    message = rb"%b: %b\n" % (re.escape(case.argv[0]), pattern)
    return re.fullmatch(warnings + message, observation.stderr, re.DOTALL) is not None


def refuses(case: Case, observation: Observation, pattern: bytes) -> bool:
    return observation.status == 1 and not observation.messages and says(case, observation, pattern)


def succeeds(observation: Observation) -> bool:
    return observation.status == 0 and not observation.stderr


def has_step(case: Case, *names: str) -> bool:
    return any(step.name in names for step in case.setup)


def items(case: Case) -> list[bytes]:
    return [item for argument in case.argv for item in argument.split(b",")]


def request_id(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    line = rb"%b: broker request [0-9a-f]{8}\n\Z" % re.escape(case.argv[0])
    if proxy.status == 1 and (found := re.search(line, proxy.stderr)):
        return genuine, replace(proxy, stderr=proxy.stderr[: found.start()])
    return genuine, proxy


def version(_: Case, genuine: Observation, proxy: Observation) -> Pair:
    line = rb"fusermount3 version: 3\.[0-9]+\.[0-9]+\n"
    if (
        re.fullmatch(line, genuine.stdout)
        and proxy.stdout == b"fusermount3 version: %b\n" % FUSERMOUNT_VERSION.encode()
    ):
        return replace(genuine, stdout=proxy.stdout), proxy
    return genuine, proxy


def configuration_file(_: Case, genuine: Observation, proxy: Observation) -> Pair:
    named = re.sub(rb" set in /[^ \n]*/broker\.toml\n", b" set in /etc/fuse.conf\n", proxy.stderr)
    return genuine, replace(proxy, stderr=named)


def peer_gone(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    killed_by_sigpipe = -13
    if case.comm is Comm.PEERLESS and genuine.status == killed_by_sigpipe and genuine.mounts and not proxy.mounts:
        expected = replace(genuine, status=1, mounts=(), mounts_at_end=())
        expected = replace(expected, stderr=b"%b: sending file descriptor: Broken pipe\n" % case.argv[0])
        return expected, proxy
    return genuine, proxy


def unsafe_options(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    if case.uid != ROOT or not {b"suid", b"dev"}.intersection(items(case)):
        return genuine, proxy
    warning = rb"%b: unsafe option (suid|dev) ignored\n" % re.escape(case.argv[0])
    proxy = replace(proxy, stderr=re.sub(warning, b"", proxy.stderr))
    mounts = tuple(with_nosuid_nodev(line) for line in genuine.mounts)
    return replace(genuine, mounts=mounts, mounts_at_end=mounts if genuine.mounts_at_end else ()), proxy


def with_nosuid_nodev(line: MountLine) -> MountLine:
    access, *words = [word for word in line.options.split(b",") if word not in (b"nosuid", b"nodev")]
    return replace(line, options=b",".join([access, b"nosuid", b"nodev", *words]))


def block_devices(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    if case.uid == ROOT and refuses(case, proxy, b"option blkdev is privileged") and genuine.status == 1:
        return replace(genuine, stderr=proxy.stderr), proxy
    return genuine, proxy


def special_files(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    if case.uid == ROOT and refuses(case, proxy, rb"mountpoint .* is not a directory or a regular file"):
        return proxy, proxy
    return genuine, proxy


def filesystems(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    if case.uid == ROOT and refuses(case, proxy, rb"mounting over filesystem type 0x[0-9a-f]{8,} is forbidden"):
        return proxy, proxy
    return genuine, proxy


def others_mounts(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    pattern = (
        rb"failed to unmount .*: Operation not permitted" if case.uid == ROOT else rb"entry for .* not found in .*"
    )
    quiet = proxy.status == 1 and not proxy.stderr
    if (
        any(argument.startswith((b"-u", b"--unm")) for argument in case.argv)
        and (quiet or refuses(case, proxy, pattern))
        and set(genuine.mounts) <= set(proxy.mounts)
        and (case.uid == ROOT or has_step(case, "kernel_mount", "bind"))
    ):
        return proxy, proxy
    return genuine, proxy


def unknown_uid(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    if case.uid == STRANGER and refuses(case, genuine, b"could not determine username") and succeeds(proxy):
        return proxy, proxy
    return genuine, proxy


def no_mtab(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    if refuses(case, genuine, b"failed to open /etc/mtab: No such file or directory") and succeeds(proxy):
        return proxy, proxy
    return genuine, proxy


def fuse_conf(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    if not has_step(case, "fuse_conf"):
        return genuine, proxy
    complaint = rb"%b: (unknown parameter in|reading|failed to open) /etc/fuse.conf[ :].*\n" % re.escape(case.argv[0])
    genuine = replace(genuine, stderr=re.sub(complaint, b"", genuine.stderr))
    if succeeds(genuine) and refuses(case, proxy, rb"option allow_other only allowed if .*"):
        return proxy, proxy
    return genuine, proxy


def no_device(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    if refuses(case, genuine, rb"fuse device [^\n]*not found[^\n]*") and succeeds(proxy):
        return proxy, proxy
    return genuine, proxy


def other_device(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    if b"FUSE_KERN_DEVICE" in dict(case.environment) and genuine.status == 1 and succeeds(proxy):
        return proxy, proxy
    return genuine, proxy


def sync_init(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    if refuses(case, genuine, b"unrecognized option '--sync-init'"):
        return proxy, proxy
    if refuses(case, proxy, rb"option '--[^ ]*' is ambiguous; possibilities:.*"):
        return genuine, replace(proxy, stderr=proxy.stderr.replace(b" '--sync-init'", b""))
    return genuine, proxy


def roots_symlink(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    """Releases before 3.18 report the root of the filesystem to the kernel as a symlink, which the kernel refuses."""
    found = refuses(case, genuine, rb"mount failed: (Transport endpoint is not connected)")
    nothing = refuses(case, genuine, rb"mount failed: (No such file or directory|Too many levels of symbolic links)")
    told = refuses(case, proxy, rb"failed to access mountpoint .*: (No such file or .*|Too many levels of .*)")
    if case.uid == ROOT and ((found and succeeds(proxy)) or (nothing and told)):
        return proxy, proxy
    return genuine, proxy


def closed_comm_socket(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    """3.14 notices only after it has mounted, 3.17 prints another message."""
    if not refuses(case, proxy, rb"fstat of comm fd -?[0-9]+ failed: Bad file descriptor") or genuine.status != 1:
        return genuine, proxy
    told = refuses(case, genuine, rb"file descriptor -?[0-9]+ is not a socket, can't send fuse fd")
    late = re.fullmatch(rb"sending file descriptor: [^\n]*\n", genuine.stderr) is not None
    return (proxy, proxy) if told or late else (genuine, proxy)


def escaped_type(_: Case, genuine: Observation, proxy: Observation) -> Pair:
    escaped = any(b"\\043" in line.type for line in genuine.mounts)
    if escaped and proxy.watched and genuine.mounts == genuine.mounts_at_end and not proxy.mounts_at_end:
        return replace(genuine, mounts_at_end=()), proxy
    return genuine, proxy


def way(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    if case.uid != ROOT and refuses(case, proxy, rb"bad mount point .*: Permission denied"):
        return proxy, proxy
    return genuine, proxy


def roots_auto_unmount(case: Case, genuine: Observation, proxy: Observation) -> Pair:
    own = case.uid == ROOT and b"--auto-unmount" in case.argv and has_step(case, "kernel_mount")
    if own and proxy.watched and genuine.mounts == proxy.mounts == proxy.mounts_at_end and not genuine.mounts_at_end:
        return proxy, proxy
    return genuine, proxy


# The table -------------------------------------------------------------------------------------------------------

DEVIATIONS = (
    Deviation(
        "request ID",
        "a refusal by the broker is followed by the line that names it in the broker's log",
        "options: -o foo",
        request_id,
    ),
    Deviation(
        "version",
        "the proxy offers what 3.18 offers, whichever release it replaces",
        "version: -V",
        version,
    ),
    Deviation(
        "configuration file",
        "a message that names the file to change names the broker's: changing /etc/fuse.conf would not help",
        "options: -o allow_other",
        configuration_file,
    ),
    Deviation(
        "peer gone",
        "the genuine helper dies of SIGPIPE and leaves the mount behind, which nobody serves",
        "comm socket: a socket whose peer is gone",
        peer_gone,
    ),
    Deviation(
        "suid and dev",
        "root of a container is not root of the host: every mount is nosuid,nodev",
        "options: root: -o suid,dev,ro",
        unsafe_options,
    ),
    Deviation(
        "blkdev",
        "a container has no block devices of its own",
        "options: root: -o blkdev",
        block_devices,
    ),
    Deviation(
        "special files",
        "what root mounts on is a directory or a regular file, as for everybody",
        "mountpoint: root: mount on fifo",
        special_files,
    ),
    Deviation(
        "forbidden filesystems",
        "root of a container must not cover its /proc or /sys, which the host's security rests on",
        "mountpoint: root: mount on /proc/sys",
        filesystems,
    ),
    Deviation(
        "unmount",
        "only what was mounted through the broker is unmounted by it; root may call umount(2) for the rest",
        "unmount: root: -u: a tmpfs",
        others_mounts,
    ),
    Deviation(
        "root's --auto-unmount",
        "what was mounted without the broker is unmounted for root only if it may mount by itself",
        "watcher: root: --auto-unmount of a mount of one's own",
        roots_auto_unmount,
    ),
    Deviation(
        "way to the mountpoint",
        "the genuine helper walks it with root's rights, and so tells what is in directories closed to the user",
        "mountpoint: mount on locked/../dir",
        way,
    ),
    Deviation(
        "unknown uid",
        "a container may run as a uid that its passwd doesn't know",
        "deviating: a uid that passwd doesn't know mounts",
        unknown_uid,
    ),
    Deviation(
        "mtab",
        "an image may lack /etc/mtab; the kernel knows what is mounted",
        "deviating: the user unmounts without an mtab",
        no_mtab,
    ),
    Deviation(
        "fuse.conf",
        "it is the administrator of the host who decides, in the broker's configuration",
        "deviating: fuse.conf of the container allows allow_other",
        fuse_conf,
    ),
    Deviation(
        "no /dev/fuse",
        "a container has none: the broker opens its own",
        "deviating: there is no /dev/fuse",
        no_device,
    ),
    Deviation(
        "FUSE_KERN_DEVICE",
        "which device is opened on the host is not for a container to say",
        "deviating: FUSE_KERN_DEVICE names another device",
        other_device,
    ),
    Deviation(
        "--sync-init",
        "libfuse 3.19 asks for it first; and unlike 3.19 the proxy reports every failure in the status",
        "deviating: --sync-init",
        sync_init,
    ),
    Deviation(
        "symlink as root's mountpoint",
        "3.18 mounts on what the link leads to, as for everybody else; older releases fail",
        "mountpoint: root: mount on link",
        roots_symlink,
        release=(3, 17),
    ),
    Deviation(
        "closed _FUSE_COMMFD",
        "3.18 looks before it mounts; 3.14 leaves a mount behind that nobody serves",
        "comm socket: nothing in its place",
        closed_comm_socket,
        release=(3, 14),
    ),
    Deviation(
        "subtype with a #",
        "the genuine helper's watcher doesn't find it in mtab, where the # is escaped, and leaves the mount behind",
        "watcher: auto_unmount with a subtype that mtab escapes",
        escaped_type,
    ),
)
