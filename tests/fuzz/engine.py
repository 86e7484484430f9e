"""One target under atheris: ``python -m tests.fuzz.engine MODULE FLAGS…``, with libFuzzer's flags and directories.

It counts which code of proxy and broker each input reaches; so these are imported under its instrumentation, here, and
in a process of its own. That ends with its parent: fuzzing has no end of its own where the parent is killed.
"""

from __future__ import annotations

import ctypes
import importlib
import signal
import sys

import atheris

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    end_with_parent()
    module, *flags = sys.argv[1:]
    with atheris.instrument_imports(include=["fusermount3_proxy", "broker"]):
        target = importlib.import_module(module)
    atheris.Setup([sys.argv[0], *flags], target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
