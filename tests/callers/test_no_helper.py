"""Test programs that call mount(2) without a helper of libfuse's: their messages in an unprivileged container.

docs/compatibility.md names them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from tests.callers import build, images
from tests.callers.callers import Caller, Kit
from tests.callers.machines import ROOT, STAND_IN, USER, Place
from tests.lab.broker import PROXY
from tests.lab.podman import Volume

if TYPE_CHECKING:
    from tests.callers.conftest import MachineFor

pytestmark = [pytest.mark.e2e, pytest.mark.long]

numbers = itertools.count()

KIT = Kit(images.OTHERS, build.seaweedfs)


@dataclass(frozen=True)
class WithGlusterHelper(Kit):
    """A kit with the proxy in place of GlusterFS's helper, too."""

    def volumes(self) -> list[Volume]:
        return [*super().volumes(), Volume(PROXY, "/usr/bin/fusermount-glusterfs")]


NTFS_3G = Caller(
    name="ntfs-3g",
    kit=KIT,
    library="itself",
    prepare="truncate --size=8M {dir}/image && mkntfs -F -q {dir}/image > /dev/null 2>&1",
    serve="ntfs-3g {dir}/image {mnt}",
)
LOWNTFS_3G = replace(NTFS_3G, name="lowntfs-3g", serve="lowntfs-3g {dir}/image {mnt}")
# It has no server to connect to, and mounts nevertheless; the answers are user name and password.
DAVFS2 = Caller(
    name="davfs2",
    kit=KIT,
    library="itself",
    serve="sh -c 'yes | head -n 8 | mount.davfs http://127.0.0.1:1/ {mnt}'",
)
LXCFS = Caller(name="lxcfs", kit=KIT, library="libfuse 3", serve="lxcfs -f {mnt}")
# It mounts before it connects to the server, which doesn't exist.
GLUSTERFS = Caller(
    name="GlusterFS",
    kit=KIT,
    library="itself",
    prepare="printf '%s\\n' 'volume all' ' type protocol/client' ' option remote-host 127.0.0.1' "
    "' option remote-subvolume all' end-volume > {dir}/volume",
    serve="glusterfs --no-daemon -f {dir}/volume -l /dev/stderr {mnt}",
)
GLUSTERFS_WITH_THE_PROXY = replace(GLUSTERFS, kit=WithGlusterHelper(KIT.image, KIT.programs))
REFUSED = "Operation not permitted"


@pytest.mark.parametrize(
    ("program", "user", "says"),
    [
        (NTFS_3G, USER, f"ntfs-3g-mount: mount failed: {REFUSED}"),
        (NTFS_3G, ROOT, f"ntfs-3g-mount: mount failed: {REFUSED}"),
        (LOWNTFS_3G, ROOT, f"ntfs-3g-mount: mount failed: {REFUSED}"),
        (DAVFS2, USER, "mount.davfs: program is not setuid root"),
        (DAVFS2, ROOT, f"mount.davfs: mounting failed: {REFUSED}"),
        (LXCFS, ROOT, "Failed to setup private cgroup mounts for lxcfs"),
        (GLUSTERFS, ROOT, f"fusermount-glusterfs: mount failed: {REFUSED}"),
        (GLUSTERFS_WITH_THE_PROXY, ROOT, "fusermount-glusterfs: old style mounting not supported"),
    ],
    ids=lambda each: each.name if isinstance(each, Caller) else None,
)
def test_what_does_not_ask_a_helper_does_not_mount(
    program: Caller, user: str, says: str, machine_for: MachineFor
) -> None:
    place = Place.make(machine_for(program, STAND_IN), program, user, f"no-helper-{next(numbers)}")
    result = place.run(program.serve, check=False)
    assert result.returncode != 0
    assert says in result.stdout + result.stderr
    assert not place.is_mounted()
    asked = [record for record in place.machine.broker.records() if record.get("mountpoint") == place.mountpoint]
    assert asked == []
