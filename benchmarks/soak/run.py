"""The order of events in a soak: load, each fault once, then faults at random, and a final check for leftovers."""

import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.soak.faults import faults
from benchmarks.soak.report import MOST_CHILDREN, Report
from benchmarks.soak.scene import Scene
from tests.e2e.conftest import settle
from tests.lab.callers import REAPED, Seen
from tests.lab.flush_attack import FlushAttack, most_children
from tests.lab.load import Beside, Holding, holding

AT_ONCE = 1000
#: The attack runs beside other faults. The first attack begins before any of them.
ATTACK = "flush attack beside"
#: Minimum and maximum duration of an attack, in seconds.
ATTACK_SECONDS = 3, 12


class Soak:
    """One soak."""

    def __init__(self, scene: Scene, stack: ExitStack, only: Collection[str]) -> None:
        self._scene = scene
        self._report = scene.report
        all_faults = {ATTACK: self._begin_attack} | faults(scene)
        self._faults = {kind: fault for kind, fault in all_faults.items() if not only or kind in only}
        assert self._faults, f"these are the faults: {', '.join(all_faults)}"
        self._report.faults.update(dict.fromkeys(self._faults, 0))
        self._attack: FlushAttack | None = None
        self._attack_ends = 0.0
        stack.callback(self._end_attack)
        count = partial(most_children, scene.broker.config, scene.load.stopped)
        self._children = stack.enter_context(Beside(count))

    def run(self, seconds: float) -> None:
        """Run for so many seconds; longer, if not every fault has happened by then."""
        end = time.monotonic() + seconds
        self._report.begin = self._holding()
        order = list(self._faults)
        while order or time.monotonic() < end:
            if not order:  # each kind once before any is repeated
                order = self._scene.chance.sample(sorted(self._faults), len(self._faults))
            self._happen(order.pop(0))
            if time.monotonic() > self._attack_ends:
                self._end_attack()
            time.sleep(self._scene.chance.uniform(0, 1))
        self._finish()

    def _happen(self, kind: str) -> None:
        """Inject the fault, and record its effect on callers."""
        scene = self._scene
        what = f"{kind}, beside an attack" if self._attack else kind
        begun = time.monotonic()
        print(f"{begun - self._report.started:.1f} s: {what}", file=sys.stderr, flush=True)
        for step in (self._faults[kind], partial(scene.probe, f"after {what}"), partial(scene.look_for_unknown, what)):
            try:
                step()
            except Exception as error:
                scene.error_of(what, error, begun)
            scene.ensure_running(what)
        self._report.faults[kind] += 1

    def _begin_attack(self) -> None:
        self._end_attack()
        attack = FlushAttack(self._scene.broker)
        self._attack = attack.__enter__()
        self._attack_ends = time.monotonic() + self._scene.chance.uniform(*ATTACK_SECONDS)
        self._scene.load.others.append(attack.container)

    def _end_attack(self) -> None:
        if attack := self._attack:
            self._scene.load.others.clear()
            attack.__exit__()  # may be interrupted; then it is tried again at the end
            self._report.attacks += attack.requests
            self._attack = None

    def _finish(self) -> None:
        """End the load, and check what remains of it."""
        report, scene = self._report, self._scene
        self._end_attack()
        report.cycles, seen = scene.load.stop()
        report.seen = Seen.together([report.seen, seen])
        now = time.monotonic()
        report.children = self._children.result()
        if report.children > MOST_CHILDREN:
            scene.error(f"the mounter had {report.children} children at once", now)
        while (listed := scene.census.listed()) and time.monotonic() - now < REAPED:
            time.sleep(0.1)
        for mount in listed:
            scene.leaked(f"in the broker's list: {mount['mountpoint']}", now)
        settle(scene.broker)
        report.end = self._holding()
        for record in scene.broker.records("internal error"):
            scene.error(str(record), now)
        report.excuse()

    def _holding(self) -> Holding:
        pid = self._scene.broker.process.pid
        return min((holding(pid) for _ in range(10)), key=lambda each: each.pss)


def soak(
    seconds: float, seed: int, log: Path | None = None, at_once: int = AT_ONCE, only: Collection[str] = ()
) -> Report:
    """Run for so many seconds, and return the report.

    `at_once` filesystems die together; of the faults only those in `only` happen, if any are given. A copy of the
    broker's log goes into the file `log`. Leaves nothing else, whatever happens.
    """
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        directory = Path(temporary)
        directory.chmod(0o755)
        scene = Scene(Report(seed, seconds / 60, at_once, time.monotonic()), stack, directory)
        if log:
            stack.callback(lambda: log.write_bytes(scene.broker.log.read_bytes()))
        Soak(scene, stack, only).run(seconds)
    return scene.report
