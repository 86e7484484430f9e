"""``python -m tests.fuzz.keep``: add to the corpus the inputs found by the engine that take new steps.

A step leads from one line to the next in proxy or broker; it is new if no other input takes it. The shortest inputs
come first.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.runner import CORPUS, FOUND, ROOT
from tests.fuzz.targets import TARGETS, Target

_OURS = (f"{ROOT}/broker/", f"{ROOT}/fusermount3_proxy/")
#: Maximum length of a kept input: longer ones tell a reader too little.
_LONGEST = 200

Step = tuple[str, int, int]


def steps(target: Target, data: bytes) -> set[Step]:
    """Return the steps of the code under test for an input."""
    taken: set[Step] = set()
    before: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS):
            return None
        if event == "line":
            taken.add((name, before.get(frame, 0), frame.f_lineno))
        before[frame] = frame.f_lineno
        return trace

    sys.settrace(trace)
    try:
        target.check(data)
    finally:
        sys.settrace(None)
    return taken


def keep(name: str) -> None:
    target = TARGETS[name]
    known: set[Step] = set()
    for data in (*target.SEEDS, *(path.read_bytes() for path in (CORPUS / name).iterdir())):
        known |= steps(target, data)
    found = [path.read_bytes() for path in (FOUND / name / "inputs").iterdir()]
    for data in sorted(found, key=len):
        if len(data) <= _LONGEST and (new := steps(target, data) - known):
            known |= new
            kept = Path(CORPUS, name, f"found-{hashlib.sha256(data).hexdigest()[:8]}")
            kept.write_bytes(data)
            print(f"{kept.relative_to(ROOT)}: {len(new)} steps more")


if __name__ == "__main__":
    for each in TARGETS:
        keep(each)
