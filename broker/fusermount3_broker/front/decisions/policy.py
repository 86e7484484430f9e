"""The decisions on requests, as pure functions: they take a request, the kernel's facts and the configuration, and
return a plan or raise a `Refusal`.

The rules are those of fusermount3, and so are the texts of refusals, because callers match them. Three rules are
stricter: root of a container has no privilege over other callers where the filesystem of its mountpoint is concerned;
setuid and devices are never allowed; and only mounts made through the broker are unmounted. In a volume, the author of
the pod's manifest has the last word on options, and on whether users other than the FUSE program's have access.
"""

import os
import stat
from collections.abc import Collection, Iterable
from errno import EACCES, EBUSY, EINVAL, ENOSPC, EPERM

from fusermount3_broker.front.model import Mount, Volume
from fusermount3_broker.messages import mount_options
from fusermount3_broker.messages.mounter import MountFacts, MountPlan, UnmountFacts, UnmountPlan
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service.configuration import FILESYSTEMS, Configuration
from fusermount3_proxy.wire import MountRequest, UnmountRequest, VolumeRequest

#: The most that mount(2) accepts as filesystem options, as source, and as type.
_PAGE = 4096
_KERNEL = ".".join(os.uname().release.split(".")[:2]).encode()


def decide_mount(
    id: bytes, request: MountRequest, facts: MountFacts, live_mounts: int, configuration: Configuration
) -> MountPlan:
    """Return the plan for `request`; `id` is its request ID for the caller and the log.

    `live_mounts` is the number of the broker's filesystems in the caller's mount namespace. Raises Refusal.
    """
    _check_number(facts, live_mounts, configuration)
    _check_mountpoint(request.mountpoint, facts, configuration)
    wanted = mount_options.parse(
        request.options,
        may_allow_other=facts.uid == 0 or configuration.user_allow_other,
        where_allowed=configuration.source,
        kernel=_KERNEL,
    )
    _check_what_the_kernel_gets(request.options, wanted, facts)
    return _plan(id, request.sync_init, wanted, facts)


def decide_volume_mount(
    id: bytes,
    request: MountRequest | VolumeRequest,
    facts: MountFacts,
    live_mounts: int,
    volume: Volume,
    configuration: Configuration,
) -> MountPlan:
    """As `decide_mount`, for a request that came through the socket of `volume`."""
    sync_init = False
    if isinstance(request, MountRequest):
        _check_number(facts, live_mounts, configuration)
        _check_mountpoint(request.mountpoint, facts, configuration)
        sync_init = request.sync_init
    return _plan_in_volume(id, request.options, sync_init, facts, volume)


def decide_eager_mount(id: bytes, volume: Volume) -> MountPlan:
    """Return the plan for a filesystem that exists before its FUSE program. Raises Refusal."""
    return _plan_in_volume(id, b"", False, EAGER_FACTS, volume)


#: A filesystem without a caller is root's, on the placeholder at the target.
EAGER_FACTS = MountFacts(
    uid=0,
    gid=0,
    root_mode=stat.S_IFDIR,
    foreign_sticky=False,
    filesystem=FILESYSTEMS["tmpfs"],
    search_errno=0,
    access_errno=0,
    mount_namespace=0,
)


def _plan_in_volume(id: bytes, said: bytes, sync_init: bool, facts: MountFacts, volume: Volume) -> MountPlan:
    wanted = mount_options.parse(said, volume.options, may_allow_other=True, where_allowed=b"", kernel=_KERNEL)
    _check_what_the_kernel_gets(said + b"," + volume.options, wanted, facts)
    plan = _plan(id, sync_init, wanted, facts)
    allow_other = volume.allow_other or volume.share != b""
    return plan._replace(allow_other=allow_other, read_only=plan.read_only or volume.read_only)


def check_volume_caller(volume: Volume, pod: str) -> None:
    """Raise Refusal unless the caller, who is in `pod`, may use the socket of `volume`."""
    if not pod:
        raise Refusal(
            EACCES,
            b"the broker can't see which pod the caller is in; run the broker with hostPID",
        )
    if pod != volume.pod:
        raise Refusal(EACCES, b"not a container of the pod of this volume")


def may_borrow(borrower: Volume, source: Volume, mount_namespaces: Collection[bytes]) -> bool:
    """Return whether a volume may get the filesystem that another one offers.

    Whoever may create pods may offer one under any key. So a pod uses only what comes from the namespaces of mount
    pods, or from its own, in which whoever creates pods may have what the others have.
    """
    is_trusted = source.namespace in mount_namespaces or source.namespace == borrower.namespace
    return source.share in borrower.keys and source.namespace != b"" and is_trusted


def sources_for(borrower: Volume, sources: Iterable[Volume], mount_namespaces: Collection[bytes]) -> list[Volume]:
    """Return the sources that the volume may use: those of mount namespaces first, else in the order given."""
    found = [source for source in sources if may_borrow(borrower, source, mount_namespaces)]
    return sorted(found, key=lambda source: source.namespace not in mount_namespaces)


def check_offer(source: Volume, has_one: bool) -> None:
    """Raise Refusal unless a program may offer a device on this volume; `has_one`: another program does."""
    if not source.share:
        raise Refusal(EINVAL, b"only a volume with the attribute 'share' can offer a device")
    if has_one:
        raise Refusal(EBUSY, b"another program of the pod offers a device")


def check_size(source: Volume, size: int) -> None:
    """Raise Refusal if a device of `size` bytes is too small for what the volume offers."""
    if size < source.capacity:
        raise Refusal(ENOSPC, b"the device has %d bytes, and the volume must have %d" % (size, source.capacity))


def _check_number(facts: MountFacts, live_mounts: int, configuration: Configuration) -> None:
    """Raise Refusal if a caller's mount namespace has `mount_max` filesystems already, unless the caller is root."""
    if facts.uid != 0 and live_mounts >= configuration.mount_max >= 0:
        raise Refusal(
            EPERM,
            b"too many FUSE filesystems mounted; mount_max=N can be set in %b" % configuration.source,
        )


def _check_what_the_kernel_gets(said: bytes, wanted: mount_options.MountOptions, facts: MountFacts) -> None:
    """Raise Refusal where mount(2) would fail, although the system calls that we use instead would succeed."""
    warnings = wanted.warnings
    data = b"%b,fd=4,rootmode=%o,user_id=%d" % (mount_options.kernel_data(said), facts.root_mode, facts.uid)
    for each in (b"%b,group_id=%d" % (data, facts.gid), data):  # fusermount3 tries both
        if len(each) >= _PAGE:
            warnings += (b"mount options too long",)
    source, filesystem_type = wanted.fsname or wanted.subtype or b"", b"fuse.%b" % (wanted.subtype or b"")
    if max(len(source), len(filesystem_type)) >= _PAGE:
        raise Refusal(EINVAL, b"mount failed: Invalid argument", warnings=warnings)
    valid = b"" not in (wanted.fsname, wanted.subtype, wanted.block_size) and (
        wanted.max_read is None or mount_options.is_number(wanted.max_read)
    )
    if warnings != wanted.warnings or not valid:
        raise Refusal(EINVAL, b"mount failed: Invalid argument", warnings=warnings)


def _check_mountpoint(path: bytes, facts: MountFacts, configuration: Configuration) -> None:
    """Raise Refusal unless the caller may mount on this mountpoint."""
    is_directory = stat.S_ISDIR(facts.root_mode)
    if not is_directory and not stat.S_ISREG(facts.root_mode):
        raise Refusal(EINVAL, b"mountpoint %b is not a directory or a regular file" % path)
    if facts.uid != 0:
        if is_directory and facts.search_errno:
            reason = os.strerror(facts.search_errno).encode()
            raise Refusal(facts.search_errno, b"failed to chdir to mountpoint: %b" % reason)
        if is_directory and facts.foreign_sticky:
            raise Refusal(EPERM, b"mountpoint %b not owned by user" % path)
        if is_directory and facts.access_errno:
            raise Refusal(facts.access_errno, b"user has no write access to mountpoint %b" % path)
        if facts.access_errno:
            reason = os.strerror(facts.access_errno).encode()
            raise Refusal(facts.access_errno, b"failed to open %b: %b" % (path, reason))
    if facts.filesystem not in configuration.mountpoint_filesystems:
        raise Refusal(EPERM, b"mounting over filesystem type 0x%08x is forbidden" % facts.filesystem)


def _plan(id: bytes, sync_init: bool, wanted: mount_options.MountOptions, facts: MountFacts) -> MountPlan:
    return MountPlan(
        uid=facts.uid,
        gid=facts.gid,
        root_mode=facts.root_mode,
        foreign_sticky=facts.foreign_sticky,
        filesystem=facts.filesystem,
        search_errno=facts.search_errno,
        access_errno=facts.access_errno,
        request_id=id,
        warnings=b"\n".join(wanted.warnings),
        auto_unmount=wanted.auto_unmount,
        sync_init=sync_init,
        source=wanted.fsname or wanted.subtype or b"/dev/fuse",
        subtype=wanted.subtype or b"",
        allow_other=wanted.allow_other,
        default_permissions=wanted.default_permissions,
        max_read=wanted.max_read or b"",
        block_size=wanted.block_size or b"",
        read_only=wanted.read_only,
        sync=wanted.sync,
        dirsync=wanted.dirsync,
        lazytime=wanted.lazytime,
        noexec=wanted.noexec,
        noatime=wanted.noatime,
        nodiratime=wanted.nodiratime,
        strictatime=wanted.strictatime,
        nosymfollow=wanted.nosymfollow,
    )


def decide_unmount(id: bytes, request: UnmountRequest, facts: UnmountFacts, mount: Mount | None) -> UnmountPlan:
    """Return the plan for `request` with the request ID `id`; `mount` is the broker's record of the mount, if any.

    A user may unmount their own mounts; root of the mount namespace may unmount any user's mounts in it. Raises
    Refusal.
    """
    if mount is not None and mount.namespace != facts.mount_namespace:
        mount = None  # a copy in another namespace, which is not the broker's to unmount
    if request.only_dead:
        _check_dead(request, facts, mount)
        return UnmountPlan(lazy=True, request_id=id)
    ours = facts.mounted and mount is not None
    if facts.uid == 0:
        problem = 0 if ours else facts.access_errno or (EPERM if facts.mounted else EINVAL)
        if problem:
            reason = os.strerror(problem).encode()
            raise Refusal(problem, b"failed to unmount %b: %b" % (request.mountpoint, reason))
    elif not ours or mount is None or mount.uid != facts.uid:
        raise Refusal(EPERM, b"entry for %b not found in /etc/mtab" % request.mountpoint)
    return UnmountPlan(lazy=request.lazy, request_id=id)


def _check_dead(request: UnmountRequest, facts: UnmountFacts, mount: Mount | None) -> None:
    """Raise Refusal unless this is the watched mount, and it is dead.

    A watcher of a mount that the broker made names that mount. A watcher of a mount that the FUSE program made by
    itself can't name it; then any dead FUSE filesystem of the caller is accepted, as in fusermount3.
    """
    if not facts.mounted or not facts.dead:
        raise Refusal(EBUSY, b"%b is no dead mount" % request.mountpoint)
    if request.mount:
        watched = mount is not None and mount.request_id.encode() == request.mount and facts.uid in (0, mount.uid)
    else:
        # For root, mounts made for it, such as volumes, are its own, too; so it must be able to mount by itself.
        watched = facts.uid != 0 or facts.may_mount
    if not watched:
        raise Refusal(EPERM, b"%b is not the mount that was watched" % request.mountpoint)
