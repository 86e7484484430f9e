"""Some callers insist on a setuid-root helper (AppImage, cvmfs, test suites): so installed, the proxy gains nothing."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.e2e.caller import call
from tests.e2e.conftest import let_users_in
from tests.lab.broker import PROXY
from tests.lab.commands import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

AS_USER = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"]


@pytest.fixture
def setuid_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The proxy as a setuid and setgid root program in a path that all users can reach."""
    directory = tmp_path_factory.mktemp("setuid")
    let_users_in(directory)
    helper = directory / "fusermount3"
    shutil.copy(PROXY, helper)
    helper.chmod(0o6755)
    yield helper
    helper.unlink()


def test_it_answers_as_always(setuid_proxy: Path) -> None:
    assert run([*AS_USER, setuid_proxy, "-V"]).stdout.startswith("fusermount3 version: 3.")


def test_the_ids_are_given_up_before_anything_else(setuid_proxy: Path) -> None:
    trace = run(["strace", "-u", "nobody", "-o", "/dev/stdout", setuid_proxy, "-V"]).stdout
    calls = [line.partition("(")[0] for line in trace.splitlines() if "(" in line]
    before = calls[: calls.index("setresuid")]
    assert before[-1] == "setresgid"
    # The calls that the C library makes in every setuid program, and the queries of the ids.
    harmless = {"execve", "access", "brk", "arch_prctl", "set_tid_address", "set_robust_list", "rseq", "prlimit64"}
    harmless |= {"readlink", "readlinkat", "getrandom", "mprotect", "fcntl", "getresuid", "getresgid", "setresgid"}
    assert set(before) <= harmless


def test_it_cannot_read_what_its_caller_may_not(setuid_proxy: Path, tmp_path: Path) -> None:
    """Only root may enter the directory of the mountpoint: a helper with root's rights would find its way."""
    private = tmp_path / "private"
    (private / "mountpoint").mkdir(parents=True)
    private.chmod(0o700)
    let_users_in(tmp_path)
    outcome = call([*AS_USER, setuid_proxy, "-o", "ro", "--", private / "mountpoint"])
    assert outcome.status == 1
    assert outcome.stderr == f"{setuid_proxy}: failed to access mountpoint {private}/mountpoint: Permission denied\n"
