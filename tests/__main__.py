"""Run all tests in a fraction of the time: ``python -m tests [--prefetch] [arguments of pytest]``.

Most tests wait more than they compute, so `AT_ONCE` processes of pytest-xdist run them, each the tests of one file
after the other. With `--prefetch`, `tests.prefetch` meanwhile makes what later tests need. The exit status is that of
pytest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Files whose tests run at the same time, on two processors.
AT_ONCE = 3
PREFETCH = "--prefetch"
#: How much slower all is that tests wait for (`tests.lab.pace`): they share the processors.
_SLOWNESS = "3"
#: Seconds that the prefetching process has to end; it may have a container to remove.
_PATIENCE = 60


@contextlib.contextmanager
def prefetching() -> Iterator[None]:
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "tests.prefetch"]
    processes = [
        subprocess.Popen([*command, name], stdin=quiet, stdout=quiet, stderr=quiet) for name in ("entries", "cluster")
    ]
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT)
        for process in processes:
            process.wait(_PATIENCE)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C also reaches pytest, which cleans up; wait for that
    os.environ.setdefault("FUSERMOUNT3PROXY_TEST_SLOWNESS", _SLOWNESS)
    given = [each for each in arguments if each != PREFETCH]
    pytest = [sys.executable, "-m", "pytest", f"--numprocesses={AT_ONCE}", "--dist=loadfile", *given]
    with prefetching() if PREFETCH in arguments else contextlib.nullcontext():
        return subprocess.run(pytest).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
