"""Run all tests in about half the time: ``python -m tests [--prefetch] [arguments of pytest]``.

Most tests wait more than they compute, so two runs of pytest proceed at once. The output of the first run is shown as
it comes, that of the second run after it. With `--prefetch`, `tests.prefetch` meanwhile makes what later tests need.
The exit status is that of pytest, of the second run if the first one passed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The tests of the first run; the second run has all others, and takes about as long.
FIRST = ("tests/e2e",)
PREFETCH = "--prefetch"
#: How much slower all is that tests wait for (`tests.lab.pace`): the two runs share the processors.
_SLOWNESS = "3"
#: Seconds that the prefetching process has to end; it may have a container to remove.
_PATIENCE = 60


@contextlib.contextmanager
def prefetching() -> Iterator[None]:
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, "-m", "tests.prefetch"], stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(_PATIENCE)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C also reaches both runs, which clean up; wait for that
    os.environ.setdefault("FUSERMOUNT3PROXY_TEST_SLOWNESS", _SLOWNESS)
    pytest = [sys.executable, "-m", "pytest", *(each for each in arguments if each != PREFETCH)]
    with contextlib.ExitStack() as stack:
        if PREFETCH in arguments:
            stack.enter_context(prefetching())
        output = stack.enter_context(tempfile.TemporaryFile())
        rest = [*pytest, *(f"--ignore={each}" for each in FIRST), "tests"]
        second = stack.enter_context(subprocess.Popen(rest, stdout=output, stderr=subprocess.STDOUT))
        print(f"{' '.join(FIRST)}; beside them all others, which are shown afterwards", flush=True)
        first = subprocess.run([*pytest, *FIRST]).returncode
        status = first or second.wait()
        second.wait()
        output.seek(0)
        sys.stdout.flush()
        shutil.copyfileobj(output, sys.stdout.buffer)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
