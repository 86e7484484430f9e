"""The broker says what the running kernel lacks. tests/machines does the same on such kernels."""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

import pytest

from fusermount3_broker.kernel import features, syscalls

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = (Path(__file__).parents[3] / "docs/compatibility.md").read_text()


def failing(number: int) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


class WithoutOptions(socket.socket):
    """A socket of a kernel that knows none of the newer options."""

    def getsockopt(self, *_: int) -> NoReturn:
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")


#: How a kernel refuses what it does not know.
OLD: dict[str, tuple[object, str, object]] = {
    "SO_PEERPIDFD": (socket, "socketpair", lambda: (WithoutOptions(), WithoutOptions())),
    "MOVE_MOUNT_BENEATH": (syscalls, "move_mount", failing(errno.EINVAL)),
    "FSCONFIG_CMD_CREATE_EXCL": (syscalls, "fsconfig", failing(errno.EOPNOTSUPP)),
    "statmount(2)": (syscalls, "statmount", failing(errno.ENOSYS)),
    "Landlock's scopes": (syscalls, "landlock_abi", lambda: 5),
    "fuse_connection in fdinfo": (features, "CONNECTION", b"nothing"),
}


@pytest.mark.parametrize("name", [feature.name for feature in features.FEATURES])
def test_what_an_old_kernel_refuses_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {feature.name for feature in features.lacking()}
    module, function, old = OLD[name]
    monkeypatch.setattr(module, function, old)
    assert name in {feature.name for feature in features.lacking()} >= before


@pytest.mark.parametrize(
    ("release", "is_withheld"), [("6.11", False), ("6.12.0-rc1+", True), ("6.18.3-cloud", True), ("7.0", True)]
)
def test_statmount_is_withheld_where_the_kernel_has_it(
    release: str, is_withheld: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(sysname="Linux", release=release))
    (statmount,) = (each for each in features.FEATURES if each.name == "statmount(2)")
    others = [each for each in features.FEATURES if each is not statmount]
    assert bool(features.withheld([statmount])) is is_withheld
    assert features.withheld(others) == ""


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - no iterator that is itself a descriptor
    features.lacking()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_an_old_kernel_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    assert features.too_old() == ""
    monkeypatch.setattr(socket, "socketpair", lambda: (WithoutOptions(), WithoutOptions()))
    assert features.too_old().startswith(f"{features.running()} is too old: ")


@pytest.mark.parametrize(
    "release, name",
    [
        ("6.1.0-40-cloud-amd64", "Linux 6.1"),
        ("6.18.44-fc", "Linux 6.18"),
        ("7.0-rc1", "Linux 7.0"),
        ("6.12+", "Linux 6.12+"),
    ],
)
def test_the_kernel_has_the_name_that_people_use(release: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "node", release, "#1", "x86_64")))
    assert features.running() == name


def test_the_page_lists_each_feature() -> None:
    section = PAGE.partition("## Kernels\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+)` \| ([0-9.]+) \| (.+) \|$", section, re.MULTILINE)
    assert rows == [(each.name, each.since, each.otherwise) for each in features.FEATURES]
