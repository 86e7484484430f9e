"""Prepares the cache entries of the tests (`tests.lab.cache`) in the background while others run (`tests.__main__`).

On a fresh machine it takes long to make root filesystems and to compile programs, and most tests wait more than they
compute. So this process makes the next entries at the lowest priority. A test that needs an entry which is being made
waits for it; an entry that can't be made here is left to that test, which reports why.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

from tests.callers import images as callers
from tests.cluster import binaries, buckets, test_installations
from tests.cluster import images as driver_images
from tests.csi import build as csi
from tests.csi import test_distributions
from tests.differential import sides
from tests.e2e import test_installed_from_source
from tests.kubernetes import programs
from tests.lab import debian, images, pypi, rpm, runtimes
from tests.machines.promises import MACHINES
from tests.packaging import test_pip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def entries() -> Iterator[Callable[[], object]]:
    """Yield the function that makes each entry, in the order in which the tests need them."""
    yield csi.csi_sanity
    for recipe in recipes():
        yield partial(images.rootfs, recipe)
    for name in programs.PACKAGES:
        yield partial(programs.program, name)
    yield programs.promtool
    for python in pypi.PYTHONS.values():
        yield partial(pypi.wheelhouse, python)
    for machine in MACHINES.values():
        yield machine.disk


def of_the_cluster() -> Iterator[Callable[[], object]]:
    """Yield those for the tests on a Kubernetes node, which come last and need what takes longest."""
    yield binaries.kubernetes
    yield partial(images.rootfs, binaries.ROOT)
    yield driver_images.driver_images
    yield partial(images.rootfs, driver_images.SERVER)
    yield partial(images.rootfs, buckets.DEBIANS)
    for name in buckets.MODULES:
        yield partial(buckets.built, name)
    yield buckets.mount_s3
    yield test_installations.definitions


def recipes() -> Iterator[images.DebianRecipe]:
    yield callers.COMPILERS
    yield from (callers.BOOKWORM, callers.TRIXIE, callers.SID, callers.OTHERS)
    yield from map(test_distributions.recipe, test_distributions.SUITES)
    yield from map(sides.recipe, sides.GENUINE)
    yield from (images.SSHFS, images.DEBIAN, images.MERGERFS, images.SYSTEMD, images.WITHOUT_MERGERFS)
    yield from (images.WITHOUT_FUSE, images.WITHOUT_FUSE_TRIXIE)
    yield test_installed_from_source.recipe()
    yield from map(runtimes.recipe, runtimes.SUITES)
    for suite in pypi.PYTHONS:
        yield from (debian.builder(suite), debian.inspector(suite), debian.machine(suite), test_pip.machine(suite))
    yield from (rpm.BUILDER, rpm.MACHINE)


LISTS = {"entries": entries, "cluster": of_the_cluster}
"""One process makes the entries of one list."""


def main(name: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background processes
    os.nice(19)
    for make in LISTS[name]():
        with contextlib.suppress(Exception):
            make()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1])
