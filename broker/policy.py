"""The decisions, as pure functions: a request, the facts of the kernel and the configuration in, a plan or a
`Refusal` out.

The rules are those of fusermount3, whose words the refusals use because callers match them, with three that are
stricter: root of a container is a caller like any other where its mountpoint's filesystem is concerned; setuid and
devices are never allowed; and only what was mounted through the broker is unmounted.
"""

import os
import stat
from errno import EBUSY, EINVAL, EPERM

from broker import options
from broker.config import Configuration
from broker.options import Refusal
from broker.plan import MountFacts, MountPlan, UnmountFacts, UnmountPlan
from broker.registry import Mount
from fusermount3_proxy.wire import MountRequest, UnmountRequest

#: What mount(2) takes of options that are the filesystem's.
_PAGE = 4096
_KERNEL = ".".join(os.uname().release.split(".")[:2]).encode()


def decide_mount(
    id: bytes, request: MountRequest, facts: MountFacts, live_mounts: int, configuration: Configuration
) -> MountPlan:
    """Return the plan for `request`, which is known as `id` to the caller and in the log.

    `live_mounts` is how many filesystems the caller's mount namespace has from the broker. Raises Refusal.
    """
    privileged = facts.uid == 0
    if not privileged and live_mounts >= configuration.mount_max >= 0:
        raise Refusal(
            EPERM,
            b"too many FUSE filesystems mounted; mount_max=N can be set in %b" % configuration.source,
        )
    _check_mountpoint(request.mountpoint, facts, configuration, privileged)
    wanted = options.parse(
        request.options,
        may_allow_other=privileged or configuration.user_allow_other,
        where_allowed=configuration.source,
        kernel=_KERNEL,
    )
    _check_what_the_kernel_gets(request, wanted, facts)
    return _plan(id, request, wanted, facts)


def _check_what_the_kernel_gets(request: MountRequest, wanted: options.MountOptions, facts: MountFacts) -> None:
    """Raise Refusal for what mount(2) would fail with, although the calls that we use instead would take it."""
    warnings = wanted.warnings
    data = b"%b,fd=4,rootmode=%o,user_id=%d" % (options.kernel_data(request.options), facts.root_mode, facts.uid)
    for each in (b"%b,group_id=%d" % (data, facts.gid), data):  # fusermount3 tries both
        if len(each) >= _PAGE:
            warnings += (b"mount options too long",)
    valid = b"" not in (wanted.fsname, wanted.subtype, wanted.block_size) and (
        wanted.max_read is None or options.is_number(wanted.max_read)
    )
    if warnings != wanted.warnings or not valid:
        raise Refusal(EINVAL, b"mount failed: Invalid argument", warnings=warnings)


def _check_mountpoint(path: bytes, facts: MountFacts, configuration: Configuration, privileged: bool) -> None:
    """Raise Refusal unless the caller may mount there."""
    is_directory = stat.S_ISDIR(facts.root_mode)
    if not is_directory and not stat.S_ISREG(facts.root_mode):
        raise Refusal(EINVAL, b"mountpoint %b is not a directory or a regular file" % path)
    if not privileged:
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


def _plan(id: bytes, request: MountRequest, wanted: options.MountOptions, facts: MountFacts) -> MountPlan:
    return MountPlan(
        uid=facts.uid,
        gid=facts.gid,
        root_mode=facts.root_mode,
        foreign_sticky=facts.foreign_sticky,
        filesystem=facts.filesystem,
        search_errno=facts.search_errno,
        access_errno=facts.access_errno,
        request=id,
        warnings=b"\n".join(wanted.warnings),
        auto_unmount=wanted.auto_unmount,
        sync_init=request.sync_init,
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
    """Return the plan for `request`, known as `id`; `mount` is the broker's record of what is there, if it has one.

    A user may unmount their own, root of the mount namespace what anybody in it mounted. Raises Refusal.
    """
    if mount is not None and mount.namespace != facts.mount_namespace:
        mount = None  # a copy of it in another namespace; that one is not ours to take away
    if request.only_dead:
        _check_dead(request, facts, mount)
        return UnmountPlan(lazy=True, request=id)
    ours = facts.mounted and mount is not None
    if facts.uid == 0:
        problem = 0 if ours else facts.access_errno or (EPERM if facts.mounted else EINVAL)
        if problem:
            reason = os.strerror(problem).encode()
            raise Refusal(problem, b"failed to unmount %b: %b" % (request.mountpoint, reason))
    elif not ours or mount is None or mount.uid != facts.uid:
        raise Refusal(EPERM, b"entry for %b not found in /etc/mtab" % request.mountpoint)
    return UnmountPlan(lazy=request.lazy, request=id)


def _check_dead(request: UnmountRequest, facts: UnmountFacts, mount: Mount | None) -> None:
    """Raise Refusal unless this is the mount that was watched, and it is dead.

    A watcher that the broker mounted for names its mount. One that watches over a mount that its FUSE program made by
    itself can't; then any dead FUSE filesystem of the caller's own will do, as in fusermount3.
    """
    if not facts.mounted or not facts.dead:
        raise Refusal(EBUSY, b"%b is no dead mount" % request.mountpoint)
    if request.mount:
        watched = mount is not None and mount.request.encode() == request.mount and facts.uid in (0, mount.uid)
    else:
        # For root, "own" are also mounts that were made for it, such as volumes; so it must be able to mount by itself.
        watched = facts.uid != 0 or facts.may_mount
    if not watched:
        raise Refusal(EPERM, b"%b is not the mount that was watched" % request.mountpoint)
