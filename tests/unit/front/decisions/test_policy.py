"""The policy: which caller may mount on which mountpoint or unmount which mount, in fusermount3's words."""

from __future__ import annotations

import errno
import stat
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_broker.front.decisions import policy
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.model import Device, Mount, MountNamespace, Volume
from fusermount3_broker.messages.mounter import MountFacts, MountPlan, UnmountFacts, UnmountPlan
from fusermount3_broker.messages.refusal import Refusal
from fusermount3_broker.service.configuration import FILESYSTEMS, Configuration
from fusermount3_proxy.wire import MountRequest, UnmountRequest, VolumeRequest
from tests.unit.samples import VOLUME

CONFIGURATION = Configuration(source=b"/etc/broker.toml")
PROC = 0x9FA0

FACTS = MountFacts(
    uid=1000,
    gid=1001,
    root_mode=stat.S_IFDIR,
    foreign_sticky=False,
    filesystem=FILESYSTEMS["ext"],
    search_errno=0,
    access_errno=0,
    mount_namespace=7,
)


def decide(
    options: bytes = b"", live_mounts: int = 0, configuration: Configuration = CONFIGURATION, **facts: Any
) -> MountPlan:
    request = MountRequest(b"/m", options)
    return policy.decide_mount(b"1a2b", request, FACTS._replace(**facts), live_mounts, configuration)


def refusal(options: bytes = b"", **keywords: Any) -> tuple[int, str]:
    with pytest.raises(Refusal) as caught:
        decide(options, **keywords)
    return caught.value.errno, caught.value.text.decode()


# The mountpoint

NOT_A_PLACE = (errno.EINVAL, "mountpoint /m is not a directory or a regular file")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, None),
        ({"root_mode": stat.S_IFREG}, None),
        ({"foreign_sticky": True}, (errno.EPERM, "mountpoint /m not owned by user")),
        ({"foreign_sticky": True, "access_errno": errno.EACCES}, (errno.EPERM, "mountpoint /m not owned by user")),
        ({"access_errno": errno.EACCES}, (errno.EACCES, "user has no write access to mountpoint /m")),
        ({"access_errno": errno.EROFS}, (errno.EROFS, "user has no write access to mountpoint /m")),
        (
            {"root_mode": stat.S_IFREG, "access_errno": errno.EACCES},
            (errno.EACCES, "failed to open /m: Permission denied"),
        ),
        (
            {"root_mode": stat.S_IFREG, "access_errno": errno.ETXTBSY},
            (errno.ETXTBSY, "failed to open /m: Text file busy"),
        ),
        ({"search_errno": errno.EACCES}, (errno.EACCES, "failed to chdir to mountpoint: Permission denied")),
        (
            {"search_errno": errno.EACCES, "access_errno": errno.EROFS, "foreign_sticky": True},
            (errno.EACCES, "failed to chdir to mountpoint: Permission denied"),
        ),
        ({"uid": 0, "search_errno": errno.EACCES}, None),
        ({"root_mode": stat.S_IFREG, "foreign_sticky": True}, None),
        ({"root_mode": stat.S_IFLNK}, NOT_A_PLACE),
        ({"root_mode": stat.S_IFIFO}, NOT_A_PLACE),
        ({"root_mode": stat.S_IFSOCK}, NOT_A_PLACE),
        ({"root_mode": stat.S_IFCHR}, NOT_A_PLACE),
        ({"root_mode": stat.S_IFBLK}, NOT_A_PLACE),
        ({"filesystem": PROC}, (errno.EPERM, "mounting over filesystem type 0x00009fa0 is forbidden")),
        ({"filesystem": 0x62656572}, (errno.EPERM, "mounting over filesystem type 0x62656572 is forbidden")),
        # root in a container: neither the owner nor access(2) counts, but the filesystem does
        ({"uid": 0, "foreign_sticky": True}, None),
        ({"uid": 0, "access_errno": errno.EROFS}, None),
        ({"uid": 0, "root_mode": stat.S_IFREG, "access_errno": errno.EACCES}, None),
        ({"uid": 0, "root_mode": stat.S_IFIFO}, NOT_A_PLACE),
        ({"uid": 0, "filesystem": PROC}, (errno.EPERM, "mounting over filesystem type 0x00009fa0 is forbidden")),
    ],
)
def test_a_mountpoint_is_taken_or_refused(facts: dict[str, Any], expected: tuple[int, str] | None) -> None:
    if expected is None:
        plan = decide(**facts)
        assert plan.root_mode == stat.S_IFMT(facts.get("root_mode", FACTS.root_mode))
        assert plan.warnings == b""
    else:
        assert refusal(**facts) == expected


@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_every_filesystem_of_the_list_may_be_mounted_over(filesystem: str) -> None:
    decide(filesystem=FILESYSTEMS[filesystem])


def test_the_configuration_chooses_what_may_be_mounted_over() -> None:
    only_proc = replace(CONFIGURATION, mountpoint_filesystems=(PROC,))
    decide(filesystem=PROC, configuration=only_proc)
    assert refusal(configuration=only_proc)[1] == "mounting over filesystem type 0x0000ef53 is forbidden"


# The plan


def test_a_mount_is_its_callers_whatever_the_options_say() -> None:
    plan = decide(b"user_id=0,group_id=0,rootmode=100000,fd=9")
    assert (plan.uid, plan.gid, plan.root_mode) == (1000, 1001, stat.S_IFDIR)


@pytest.mark.parametrize(
    ("options", "source", "subtype"),
    [
        (b"", b"/dev/fuse", b""),
        (b"fsname=host:", b"host:", b""),
        (b"subtype=sshfs", b"sshfs", b"sshfs"),
        (b"fsname=host:,subtype=sshfs", b"host:", b"sshfs"),
    ],
)
def test_the_source_is_fsname_or_else_subtype_or_else_the_device(options: bytes, source: bytes, subtype: bytes) -> None:
    plan = decide(options)
    assert (plan.source, plan.subtype) == (source, subtype)


@pytest.mark.parametrize("options", [b"fsname=", b"subtype=", b"fsname=a,subtype="])
def test_an_empty_name_fails_as_in_the_kernel(options: bytes) -> None:
    assert refusal(options) == (errno.EINVAL, "mount failed: Invalid argument")


def test_options_reach_the_plan() -> None:
    flags = (
        b"ro,sync,dirsync,lazytime,noexec,noatime,nodiratime,strictatime,nosymfollow,default_permissions,auto_unmount"
    )
    plan = decide(flags + b",max_read=4096,blksize=512")
    expected = {
        "auto_unmount": True,
        "source": b"/dev/fuse",
        "subtype": b"",
        "allow_other": False,
        "default_permissions": True,
        "max_read": b"4096",
        "block_size": b"512",
        "read_only": True,
        "sync": True,
        "dirsync": True,
        "lazytime": True,
        "noexec": True,
        "noatime": True,
        "nodiratime": True,
        "strictatime": True,
        "nosymfollow": True,
    }
    assert {name: getattr(plan, name) for name in expected} == expected


def test_a_plan_has_no_word_for_setuid_or_device_files() -> None:
    assert not {field for field in MountPlan._fields if "suid" in field or "dev" in field}


@pytest.mark.parametrize("uid", [0, 1000])
def test_asking_for_setuid_and_device_files_changes_nothing_but_the_warnings(uid: int) -> None:
    plan = decide(b"suid,dev", uid=uid)
    assert plan._replace(warnings=b"") == decide(uid=uid)
    assert plan.warnings == b"unsafe option suid ignored\nunsafe option dev ignored"


# Permissions in the configuration


def test_users_allow_other_only_where_the_configuration_says_so() -> None:
    assert refusal(b"allow_other") == (
        errno.EPERM,
        "option allow_other only allowed if 'user_allow_other' is set in /etc/broker.toml",
    )
    assert decide(b"allow_other", configuration=replace(CONFIGURATION, user_allow_other=True)).allow_other


def test_root_may_always_allow_other() -> None:
    assert decide(b"allow_other", uid=0).allow_other


@pytest.mark.parametrize(
    ("uid", "mount_max", "live", "allowed"),
    [
        (1000, 2, 1, True),
        (1000, 2, 2, False),
        (1000, 2, 3, False),
        (1000, 0, 0, False),
        (1, 0, 0, False),
        (1000, -1, 10**6, True),
        (0, 2, 2, True),
        (0, 0, 5, True),
    ],
)
def test_users_have_mount_max_mounts_and_root_any_number(uid: int, mount_max: int, live: int, allowed: bool) -> None:
    configuration = replace(CONFIGURATION, mount_max=mount_max)
    if allowed:
        decide(uid=uid, live_mounts=live, configuration=configuration)
    else:
        expected = (errno.EPERM, "too many FUSE filesystems mounted; mount_max=N can be set in /etc/broker.toml")
        assert refusal(uid=uid, live_mounts=live, configuration=configuration) == expected


def test_a_mountpoint_is_refused_before_an_option_is() -> None:
    assert refusal(b"bogus", filesystem=PROC)[1] == "mounting over filesystem type 0x00009fa0 is forbidden"


@given(
    st.binary(max_size=30),
    st.builds(
        MountFacts,
        uid=st.integers(0, 2**32 - 1),
        gid=st.integers(0, 2**32 - 1),
        root_mode=st.sampled_from([stat.S_IFDIR, stat.S_IFREG]) | st.integers(0, 2**32 - 1),
        foreign_sticky=st.booleans(),
        filesystem=st.sampled_from([*FILESYSTEMS.values()]) | st.integers(0, 2**64 - 1),
        search_errno=st.sampled_from([0, errno.EACCES, errno.ELOOP]),
        access_errno=st.sampled_from([0, errno.EACCES, errno.EROFS, errno.ELOOP]),
        mount_namespace=st.integers(0, 2**32 - 1),
    ),
    st.integers(0, 2000),
)
def test_any_request_on_any_facts_is_planned_or_refused(options: bytes, facts: MountFacts, live_mounts: int) -> None:
    try:
        plan = policy.decide_mount(b"1a2b", MountRequest(b"/m", options), facts, live_mounts, CONFIGURATION)
    except Refusal as refusal:
        assert refusal.errno
        assert refusal.text
    else:
        assert {name: getattr(plan, name) for name in facts._fields[:-1]} == dict(
            zip(facts._fields[:-1], facts[:-1], strict=True)
        )


# Mounts in a volume


def decide_in_volume(request: MountRequest | VolumeRequest, volume: Volume = VOLUME, **facts: Any) -> MountPlan:
    return policy.decide_volume_mount(b"1a2b", request, FACTS._replace(**facts), 0, volume, CONFIGURATION)


@pytest.mark.parametrize("request_in_volume", [MountRequest(b"/m", b"ro"), VolumeRequest(b"ro")])
def test_others_may_enter_a_volume_without_a_word_from_the_configuration(
    request_in_volume: MountRequest | VolumeRequest,
) -> None:
    plan = decide_in_volume(request_in_volume)
    assert (plan.allow_other, plan.read_only, plan.uid, plan.gid) == (True, True, 1000, 1001)


def test_others_may_not_where_the_volume_says_so_whatever_the_program_asks_for() -> None:
    private = replace(VOLUME, allow_other=False)
    for options in (b"", b"allow_other"):
        assert not decide_in_volume(VolumeRequest(options), private).allow_other


@pytest.mark.parametrize("options", [b"", b"rw", b"fsname=x\\", b"subtype=a\\\\\\"])
def test_options_of_a_volume_have_the_last_word(options: bytes) -> None:
    volume = replace(VOLUME, options=b"ro,noexec,max_read=4096")
    for request in (MountRequest(b"/m", options), VolumeRequest(options)):
        plan = decide_in_volume(request, volume)
        assert (plan.read_only, plan.noexec, plan.max_read) == (True, True, b"4096")


def test_a_read_only_volume_is_that_whatever_its_options_say() -> None:
    volume = replace(VOLUME, read_only=True, options=b"rw")
    assert decide_in_volume(VolumeRequest(b"rw"), volume).read_only
    assert policy.decide_eager_mount(b"1a2b", volume).read_only


def test_a_mountpoint_is_checked_in_a_volume_too() -> None:
    with pytest.raises(Refusal, match="no write access"):
        decide_in_volume(MountRequest(b"/m", b""), access_errno=errno.EACCES)
    with pytest.raises(Refusal, match="forbidden"):
        decide_in_volume(MountRequest(b"/m", b""), filesystem=PROC)


def test_what_has_no_mountpoint_needs_none() -> None:
    assert decide_in_volume(VolumeRequest(), access_errno=errno.EACCES).uid == 1000


def test_a_volume_that_is_mounted_before_its_program_is_there_is_roots() -> None:
    plan = policy.decide_eager_mount(b"1a2b", replace(VOLUME, options=b"fsname=bucket,subtype=s3"))
    assert (plan.uid, plan.gid, plan.allow_other, plan.root_mode) == (0, 0, True, stat.S_IFDIR)
    assert (plan.source, plan.subtype, plan.request_id) == (b"bucket", b"s3", b"1a2b")


@pytest.mark.parametrize("options", [b"nonsense", b"max_read=x", b"blkdev"])
def test_a_mistake_in_the_options_of_a_volume_is_refused(options: bytes) -> None:
    volume = replace(VOLUME, options=options)
    with pytest.raises(Refusal):
        policy.decide_eager_mount(b"", volume)
    with pytest.raises(Refusal):
        decide_in_volume(VolumeRequest(), volume)


@pytest.mark.parametrize(
    ("pod", "reason"),
    [(VOLUME.pod, None), ("another", "not a container of the pod of this volume"), ("", "run the broker with hostPID")],
)
def test_only_its_own_pod_may_use_a_volume(pod: str, reason: str | None) -> None:
    if reason is None:
        policy.check_volume_caller(VOLUME, pod)
        return
    with pytest.raises(Refusal, match=reason) as caught:
        policy.check_volume_caller(VOLUME, pod)
    assert caught.value.errno == errno.EACCES


def test_a_source_is_for_others_whatever_else_it_says() -> None:
    source = replace(VOLUME, share=b"k", allow_other=False)
    assert policy.decide_eager_mount(b"", source).allow_other


SOURCE = replace(VOLUME, share=b"k", namespace=b"fuse-mounts")
BORROWER = replace(VOLUME, borrows=b"k\nof identity\n", namespace=b"shop").as_borrower()


@pytest.mark.parametrize(
    ("source", "borrower", "expected"),
    [
        (SOURCE, BORROWER, True),
        (replace(SOURCE, share=b"of identity"), BORROWER, True),
        (replace(SOURCE, namespace=b"shop"), BORROWER, True),
        (replace(SOURCE, namespace=b"another"), BORROWER, False),
        (replace(SOURCE, namespace=b""), replace(BORROWER, namespace=b""), False),
        (replace(SOURCE, share=b"other"), BORROWER, False),
        (replace(SOURCE, share=b""), BORROWER, False),
        (replace(SOURCE, share=b""), replace(BORROWER, borrows=b""), False),
    ],
)
def test_a_volume_gets_only_what_a_pod_of_a_trusted_namespace_offers(
    source: Volume, borrower: Volume, expected: bool
) -> None:
    assert policy.may_borrow(borrower, source, {b"fuse-mounts"}) == expected


# Unmounting

MOUNT = Mount(
    device=Device(5),
    connection=1,
    namespace=MountNamespace(7),
    uid=1000,
    pid=1,
    command="sshfs",
    container="",
    mountpoint=b"/m",
    type="fuse",
    source=b"s",
    mounted_at=1.0,
    request_id="r",
    account=AccountName("uid 1000"),
)
THERE = UnmountFacts(uid=1000, mount_namespace=7, access_errno=0, mounted=True, device=5, dead=False, may_mount=False)
NO_ENTRY = (errno.EPERM, "entry for /m not found in /etc/mtab")


@pytest.mark.parametrize(
    ("facts", "mount", "expected"),
    [
        ({}, MOUNT, None),
        ({}, None, NO_ENTRY),
        ({}, replace(MOUNT, uid=1001), NO_ENTRY),
        ({}, replace(MOUNT, uid=0), NO_ENTRY),
        ({}, replace(MOUNT, namespace=MountNamespace(8)), NO_ENTRY),
        ({"mounted": False}, None, NO_ENTRY),
        ({"mounted": False}, MOUNT, NO_ENTRY),
        ({"mounted": False, "access_errno": errno.ENOENT}, None, NO_ENTRY),
        ({"uid": 0}, MOUNT, None),
        ({"uid": 0}, replace(MOUNT, uid=0), None),
        ({"uid": 0}, None, (errno.EPERM, "failed to unmount /m: Operation not permitted")),
        (
            {"uid": 0},
            replace(MOUNT, namespace=MountNamespace(8)),
            (errno.EPERM, "failed to unmount /m: Operation not permitted"),
        ),
        ({"uid": 0, "mounted": False}, None, (errno.EINVAL, "failed to unmount /m: Invalid argument")),
        (
            {"uid": 0, "mounted": False, "access_errno": errno.ENOENT},
            None,
            (errno.ENOENT, "failed to unmount /m: No such file or directory"),
        ),
    ],
    ids=lambda value: value.type if isinstance(value, Mount) else None,
)
@pytest.mark.parametrize("lazy", [False, True])
def test_a_mount_is_unmounted_by_its_owner_or_root_in_its_own_namespace(
    facts: dict[str, Any], mount: Mount | None, expected: tuple[int, str] | None, lazy: bool
) -> None:
    request = UnmountRequest(b"/m", b"m", lazy)
    if expected is None:
        assert policy.decide_unmount(b"id", request, THERE._replace(**facts), mount) == UnmountPlan(lazy, b"id")
        return
    with pytest.raises(Refusal) as caught:
        policy.decide_unmount(b"id", request, THERE._replace(**facts), mount)
    assert (caught.value.errno, caught.value.text.decode()) == expected


NOT_DEAD = (errno.EBUSY, "/m is no dead mount")
NOT_WATCHED = (errno.EPERM, "/m is not the mount that was watched")


@pytest.mark.parametrize(
    ("watched", "facts", "mount", "expected"),
    [
        (b"r", {"dead": True}, MOUNT, None),
        (b"r", {"dead": True, "uid": 0}, MOUNT, None),
        (b"r", {"dead": False}, MOUNT, NOT_DEAD),
        (b"r", {"dead": False, "uid": 0}, MOUNT, NOT_DEAD),
        (b"r", {"dead": True, "mounted": False}, None, NOT_DEAD),
        (b"r", {"dead": True}, replace(MOUNT, request_id="another"), NOT_WATCHED),
        (b"r", {"dead": True}, None, NOT_WATCHED),
        (b"r", {"dead": True}, replace(MOUNT, namespace=MountNamespace(8)), NOT_WATCHED),
        (b"", {"dead": True}, None, None),
        (b"", {"dead": True}, MOUNT, None),
        (b"", {"dead": False}, None, NOT_DEAD),
        # a watcher may name only a mount of its own user
        (b"r", {"dead": True, "uid": 1001}, MOUNT, NOT_WATCHED),
        (b"r", {"dead": True, "uid": 1001, "may_mount": True}, MOUNT, NOT_WATCHED),
        (b"r", {"dead": True, "uid": 0, "may_mount": True}, None, NOT_WATCHED),
        # for root, only a mount that it could have made by itself: the others are volumes that were made for it
        (b"", {"dead": True, "uid": 0}, None, NOT_WATCHED),
        (b"", {"dead": True, "uid": 0}, MOUNT, NOT_WATCHED),
        (b"", {"dead": True, "uid": 0, "may_mount": True}, None, None),
        (b"", {"dead": False, "uid": 0, "may_mount": True}, None, NOT_DEAD),
        (b"", {"dead": True, "may_mount": True}, None, None),
    ],
    ids=lambda value: value.request_id if isinstance(value, Mount) else None,
)
def test_a_watcher_unmounts_what_it_watched_when_that_is_dead(
    watched: bytes, facts: dict[str, Any], mount: Mount | None, expected: tuple[int, str] | None
) -> None:
    request = UnmountRequest(b"/m", b"m", only_dead=True, mount=watched)
    if expected is None:
        assert policy.decide_unmount(b"id", request, THERE._replace(**facts), mount) == UnmountPlan(True, b"id")
        return
    with pytest.raises(Refusal) as caught:
        policy.decide_unmount(b"id", request, THERE._replace(**facts), mount)
    assert (caught.value.errno, caught.value.text.decode()) == expected


LONGEST = 4095  # the longest string that mount(2) takes, without the NUL


@pytest.mark.parametrize(
    "text",
    [
        b"fsname=" + b"x" * (LONGEST + 1),
        b"fsname=" + b"x" * 65_000,
        b"subtype=" + b"x" * (LONGEST + 1 - len("fuse.")),
        b"subtype=" + b"x" * 40_000,
        b"fsname=" + b"x" * 30_000 + b",subtype=" + b"y" * 30_000,
    ],
    ids=len,
)
def test_a_source_or_a_type_that_mount_would_not_take_is_refused(text: bytes) -> None:
    """A plan holds both, and one may stand for the other: it would be longer than any message."""
    assert refusal(text) == (errno.EINVAL, "mount failed: Invalid argument")


@pytest.mark.parametrize("text", [b"fsname=" + b"x" * LONGEST, b"subtype=" + b"x" * (LONGEST - len("fuse."))], ids=len)
def test_the_longest_source_and_type_are_taken(text: bytes) -> None:
    assert decide(text).source
