"""The places in kubelet's directory that the mounter accepts, whatever the front asks for."""

from __future__ import annotations

import stat

import pytest

from fusermount3_broker.messages import volume_sockets
from fusermount3_broker.messages.mounter import MountPlan
from fusermount3_broker.mounter import invariants

POD = b"0b1c2d3e-1111-2222-3333-444455556666"
ANOTHER = b"0b1c2d3e-1111-2222-3333-444455557777"
NONCE = b"0123456789abcdef"
TARGET = b"pods/%b/volumes/kubernetes.io~csi/data/mount" % POD
DIRECTORY = b"pods/%b/volumes/kubernetes.io~empty-dir/fuse-fd-passing" % POD


@pytest.mark.parametrize("target", [TARGET, b"target", b"csi-mount/target"])
def test_a_target_is_where_kubelet_has_volumes_or_away_from_its_pods(target: bytes) -> None:
    assert invariants.allow_target(target)


@pytest.mark.parametrize(
    "target",
    [
        *(b"", b"/", b".", b"..", b"../x", b"x/../y", b"x/./y", b"x//y", b"/x", b"x/", b"a/" * 2050 + b"b"),
        *(b"x" * 256, b"pods", b"pods/%b" % POD, b"pods/%b/volumes/kubernetes.io~csi/data" % POD),
        *(TARGET + b"/x", TARGET.replace(b"/mount", b"/vol_data.json"), TARGET.replace(b"~csi", b"~secret")),
        *(TARGET.replace(b"volumes", b"plugins"), DIRECTORY, DIRECTORY + b"/mount"),
    ],
)
def test_no_target_is_anything_else(target: bytes) -> None:
    assert not invariants.allow_target(target)


@pytest.mark.parametrize("target", [TARGET, b"csi-mount/target"])
@pytest.mark.parametrize("name", [b"s", b"x" * volume_sockets.LONGEST_SOCKET])
def test_a_socket_is_in_an_emptydir_of_the_pod(target: bytes, name: bytes) -> None:
    assert invariants.allow_socket(DIRECTORY, name, NONCE, target)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"x/y", b"/x", b"x" * (volume_sockets.LONGEST_SOCKET + 1)])
def test_no_socket_has_a_name_that_is_none_or_too_long(name: bytes) -> None:
    assert not invariants.allow_socket(DIRECTORY, name, NONCE, TARGET)


@pytest.mark.parametrize(
    "directory",
    [
        *(
            b"",
            b"x",
            b"plugins",
            DIRECTORY + b"/x",
            DIRECTORY.rpartition(b"/")[0],
            DIRECTORY + b"/..",
            b"/" + DIRECTORY,
        ),
        *(DIRECTORY.replace(b"~empty-dir", b"~csi"), DIRECTORY.replace(b"pods", b"plugins")),
        *(DIRECTORY.replace(POD, ANOTHER), DIRECTORY.replace(b"fuse-fd-passing", b"..")),
    ],
)
def test_no_socket_is_anywhere_else(directory: bytes) -> None:
    assert not invariants.allow_socket(directory, b"s", NONCE, TARGET)


def test_a_volume_of_an_earlier_version_has_no_nonce() -> None:
    assert invariants.allow_socket(DIRECTORY, b"s", b"", TARGET)


@pytest.mark.parametrize("nonce", [NONCE + b"0", b"/", b"../..", b"\0", b"ABCDEF", b"0 "])
def test_no_nonce_is_anything_else(nonce: bytes) -> None:
    assert not invariants.allow_socket(DIRECTORY, b"s", nonce, TARGET)


def test_what_is_mounted_before_there_is_a_program_is_roots_directory() -> None:
    nothing = {name: kind() for name, kind in MountPlan.__annotations__.items() if kind in (bool, bytes)}
    numbers = dict.fromkeys(MountPlan._fields, 0)
    wanted = MountPlan(**{**numbers, **nothing, "root_mode": stat.S_IFDIR})
    assert invariants.allow_eager_mount(wanted)
    for other in (
        wanted._replace(uid=1000),
        wanted._replace(root_mode=stat.S_IFREG),
        wanted._replace(sync_init=True),
        wanted._replace(max_read=b"1,user_id=0"),
        wanted._replace(block_size=b"512,rootmode=100000"),
    ):
        assert not invariants.allow_eager_mount(other)
