"""Run one target under atheris: ``python -m tests.fuzz.engine MODULE FLAGS…``, with libFuzzer's flags and directories.

Atheris records which code of proxy and broker each input reaches, so both are imported under its instrumentation, in a
separate process. The process dies with its parent: otherwise fuzzing would not end if the parent were killed.
"""

from __future__ import annotations

import ctypes
import importlib
import signal
import sys

import atheris

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, for whatever reason (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    end_with_parent()
    module, *flags = sys.argv[1:]
    with atheris.instrument_imports(include=["fusermount3_proxy", "fusermount3_broker"]):
        target = importlib.import_module(module)
    atheris.Setup([sys.argv[0], *flags], target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
