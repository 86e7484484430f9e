"""Test programs that request allow_other on their own initiative, with and without permission.

docs/compatibility.md names them, and the option that makes them work without it. `callers` has others, for its table.
"""

from __future__ import annotations

import itertools
import signal
from typing import TYPE_CHECKING

import pytest

from tests.callers import build, images
from tests.callers.callers import Caller, Kit
from tests.callers.machines import STAND_IN, USER, Place, wait_until
from tests.callers.s3 import accepts

if TYPE_CHECKING:
    from tests.callers.conftest import MachineFor

pytestmark = [pytest.mark.e2e, pytest.mark.long]

numbers = itertools.count()

KIT = Kit(images.OTHERS, build.seaweedfs)

S3BACKER = Caller(
    name="s3backer",
    kit=KIT,
    library="libfuse 2",
    prepare="mkdir {dir}/bucket",
    serve="s3backer --test --size=1M --blockSize=4k -f {dir}/bucket {mnt}",
    file="stats",
    unmount="fusermount -u {mnt}",
)
QEMU = Caller(
    name="qemu-storage-daemon",
    kit=KIT,
    library="libfuse 3",
    prepare="rmdir {mnt} && touch {mnt} && truncate --size=8192 {dir}/raw",
    serve="qemu-storage-daemon --blockdev driver=file,node-name=n,filename={dir}/raw "
    "--export type=fuse,id=e,node-name=n,writable=on,mountpoint={mnt}",
)
FILER = 8888
WEED = Caller(
    name="SeaweedFS",
    kit=KIT,
    library="go-fuse (Go)",
    prepare="mkdir {dir}/store",
    serve=f"/callers/weed mount -filer=127.0.0.1:{FILER} -dir={{mnt}}",
)
WEED_SERVER = "/callers/weed server -filer -ip=127.0.0.1 -volume.max=1 -dir={dir}/store"
EXFAT = Caller(
    name="exfat-fuse",
    kit=KIT,
    library="libfuse 2",
    prepare="truncate --size=8M {dir}/image && mkfs.exfat {dir}/image > /dev/null",
    serve="mount.exfat-fuse {dir}/image {mnt}",
)


def place_for(caller: Caller, machine_for: MachineFor, user: str = USER, *, user_allow_other: bool = False) -> Place:
    machine = machine_for(caller, STAND_IN, user_allow_other=user_allow_other)
    return Place.make(machine, caller, user, f"allow-other-{next(numbers)}")


def check_refused(place: Place, command: str) -> None:
    """Check that the command fails without a mount, because of allow_other."""
    result = place.run(command, check=False)
    assert result.returncode != 0
    assert "option allow_other only allowed if 'user_allow_other' is set in" in result.stderr
    assert place.was_refused_allow_other
    assert not place.is_mounted()


def end(place: Place, by: signal.Signals = signal.SIGTERM) -> None:
    place.send(by)
    wait_until(lambda: not place.is_mounted())
    wait_until(lambda: not place.machine.processes())


def test_s3backer_needs_user_allow_other(machine_for: MachineFor) -> None:
    check_refused(place_for(S3BACKER, machine_for), S3BACKER.serve)
    place = place_for(S3BACKER, machine_for, user_allow_other=True)
    program = place.start(S3BACKER.serve)
    assert place.shell("stat --format %s {mnt}/file").stdout == "1048576\n"
    place.unmount()
    assert program.wait(timeout=20) == 0


def test_qemu_storage_daemon_goes_on_without_what_it_was_refused(machine_for: MachineFor) -> None:
    place = place_for(QEMU, machine_for)
    place.start(QEMU.serve)
    assert place.shell("stat --format %s {mnt}").stdout == "8192\n"
    assert place.was_refused_allow_other
    end(place)


def test_qemu_storage_daemon_with_allow_other_off_is_refused_nothing(machine_for: MachineFor) -> None:
    place = place_for(QEMU, machine_for)
    place.start(f"{QEMU.serve},allow-other=off")
    assert place.shell("stat --format %s {mnt}").stdout == "8192\n"
    assert not place.was_refused_allow_other
    end(place)


def test_qemu_storage_daemon_with_allow_other_on_needs_user_allow_other(machine_for: MachineFor) -> None:
    command = f"{QEMU.serve},allow-other=on"
    check_refused(place_for(QEMU, machine_for), command)
    place = place_for(QEMU, machine_for, user_allow_other=True)
    place.start(command)
    end(place)


@pytest.mark.parametrize(
    ("option", "user_allow_other"), [("", False), ("", True), (" -allowOthers=false", False)], ids=str
)
def test_seaweedfs_needs_user_allow_other_or_its_option(
    option: str, user_allow_other: bool, machine_for: MachineFor
) -> None:
    place = place_for(WEED, machine_for, user_allow_other=user_allow_other)
    words = place.filled(WEED_SERVER).split()
    place.machine.container.start(words, user=USER, env={"HOME": place.directory})
    # Without a filer, `weed mount` pauses longer each time, and gives up after a minute.
    wait_until(lambda: accepts(place.machine.container, FILER), 90)
    if option or user_allow_other:
        place.start(f"{WEED.serve}{option}")
        assert place.shell("echo there > {mnt}/new && cat {mnt}/new").stdout == "there\n"
        place.unmount()
    else:
        check_refused(place, WEED.serve)
    end(place, signal.SIGKILL)  # the server takes long to end


def test_exfat_fuse_cannot_mount_an_image_for_nobody(machine_for: MachineFor) -> None:
    """It requests allow_other, user= and blkdev, for an image too; the broker grants the latter two to no caller."""
    check_refused(place_for(EXFAT, machine_for), EXFAT.serve)
    for user, refusal in ((USER, "unknown option 'user=user'"), ("0:0", "option blkdev is privileged")):
        place = place_for(EXFAT, machine_for, user, user_allow_other=True)
        result = place.run(EXFAT.serve, check=False)
        assert result.returncode != 0
        assert f"fusermount: {refusal}\n" in result.stderr
        assert not place.is_mounted()
