"""Inquiries about suspects (`serving_processes`): they find the process that serves a mount or, if there is none,
whether the mount is dead.

A process serves a connection if it has a /dev/fuse descriptor of it, and Linux shows in fdinfo which connection a
descriptor belongs to. Only a privileged process may look there, so a child of the mounter does; and it looks only at
processes of the account that pays for the mount: the number of other accounts' descriptors doesn't matter. A mount for
which it finds no process may still be served, by a process of another account or by one that is about to get the
descriptor. So another child then asks the filesystem itself, and only what the filesystem reports as dead is dead, and
unmounted.

At the target of a volume, nothing is unmounted: there, a child puts a tombstone in the place of the dead mount
(`mounter.tombstone`), so that containers can start on the volume again. A tombstone is in no table; a volume has at
most one.

All suspect mounts of an account form one inquiry. An account has one inquiry at a time, and the next inquiry is for the
account that has waited longest. A filesystem that doesn't answer ends the operation in which it was asked, and comes
last the next time: so it costs only its own account.
"""

import asyncio
import os
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress
from errno import ENODATA, ENOENT, ENOTCONN, ETIMEDOUT
from itertools import islice

from fusermount3_broker.front import hung_connections
from fusermount3_broker.front.context import Front
from fusermount3_broker.front.decisions.limits import AccountName
from fusermount3_broker.front.model import Device, Mount, MountNamespace
from fusermount3_broker.front.mounter_client import (
    MounterFailed,
    Operation,
    OperationEnded,
    OperationFailed,
    OperationRefused,
)
from fusermount3_broker.front.peer import account_of_process, uid_of
from fusermount3_broker.front.serving_processes import MOMENT, Suspect
from fusermount3_broker.messages.mounter import (
    Asked,
    Found,
    NobodyThere,
    Reaped,
    StartReap,
    StartSearch,
    StartTombstone,
    TombstonePut,
)
from fusermount3_broker.service import log

#: The most seconds between looks at a mount that seemed unserved but was not dead. The first interval is one second,
#: and each one is twice as long as the last: usually the FUSE program is just ending.
AGAIN = 30.0
_MOST_DOUBLINGS = 10
#: Inquiries at the same time.
AT_ONCE = 8
#: Children that ask filesystems at the same time: of one account, and in total. A child spends most of its time
#: waiting: for an answer, and for the kernel, which lets each reader of the mounts finish before umount2(2) returns.
CHILDREN_OF_AN_ACCOUNT, CHILDREN_AT_ONCE = 6, 16
#: The most filesystems that one child asks; other children ask the next ones of the same mount namespace meanwhile.
MOST_OF_A_CHILD = 100
#: The most mounts in one inquiry: a line for each must fit into a record.
MOST_AT_ONCE = 1000
#: The most processes examined in one inquiry, newest first: their pids must fit into the same record.
MOST_PROCESSES = 4000
#: Processes whose account is looked up before the event loop runs other tasks.
_PROCESSES_A_TURN = 50
#: Seconds before a retry of what the mounter could not do.
_SOON = 1.0
#: Seconds in which a child that has reported no answer ends, unless it blocks.
_LAST_WORD = 0.5
#: How often a dead mount is looked for at the target of its volume: it comes back there if its successor fails.
_MOST_TRIES = 8


class Reaper:
    """Makes inquiries; each call of `begin` starts those that are due."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._serving = front.serving
        #: The accounts that have an inquiry, or (`_blocked`) a child that can't end.
        self._busy: set[AccountName] = set()
        self._blocked: Counter[AccountName] = Counter()
        self._inquiries: set[asyncio.Task[None]] = set()
        #: The processes of each account, newest first, as of `_listed_at`.
        self._processes: dict[AccountName, list[int]] = {}
        self._listed_at = 0.0
        self._listing = asyncio.Lock()
        self._children = asyncio.Semaphore(CHILDREN_AT_ONCE)
        #: Connections whose filesystem was unmounted where its FUSE program was.
        self._reaped: set[int] = set()

    def begin(self) -> float | None:
        """Begin the inquiries that are due, as far as there is room; return when the next one will be due, if any."""
        now = time.monotonic()
        accounts: dict[AccountName, list[Suspect]] = defaultdict(list)
        later = []
        for suspect in list(self._serving.suspects.values()):
            account = suspect.mount.account
            if suspect.due > now:
                later.append(suspect.due)
            elif account not in self._busy:
                accounts[account].append(suspect)
        room = AT_ONCE - len(self._inquiries)
        for account in sorted(accounts, key=lambda each: min(suspect.due for suspect in accounts[each]))[:room]:
            due = sorted(accounts[account], key=lambda each: (each.tries, each.due))[:MOST_AT_ONCE]
            self._begin(account, due)
        return min(later, default=None)

    def may_unmount(self, mount: Mount) -> bool:
        """Whether the broker unmounts this mount anywhere when it is dead. Nothing is unmounted at the target of a
        volume."""
        if self._front.configuration.dead_mounts_seconds == 0:
            return False
        is_at_target_only = not mount.mountpoint or mount.namespace == self._front.mount_namespace
        return not (mount.volume and (is_at_target_only or mount.connection in self._reaped))

    def forget_all_but(self, connections: set[int]) -> None:
        self._reaped &= connections

    async def end(self) -> None:
        for task in self._inquiries:
            task.cancel()
        await asyncio.gather(*self._inquiries, return_exceptions=True)

    def _begin(self, account: AccountName, suspects: list[Suspect]) -> None:
        self._busy.add(account)
        task = asyncio.create_task(self._inquire(account, suspects))
        self._inquiries.add(task)
        task.add_done_callback(lambda _: self._is_over(account, task))

    def _is_over(self, account: AccountName, task: "asyncio.Task[None]") -> None:
        self._inquiries.discard(task)
        self._free(account)
        if not task.cancelled() and (error := task.exception()):
            self._front.log(log.ERROR, f"internal error: {error!r}")

    def _free(self, account: AccountName) -> None:
        if not self._blocked[account]:
            del self._blocked[account]
            self._busy.discard(account)
        self._serving.news.set()

    async def _inquire(self, account: AccountName, suspects: list[Suspect]) -> None:
        """Find the processes that serve these mounts of the account, or whether the mounts are dead. Each mount that is
        still suspect then has a new time at which it is due."""
        for suspect in suspects:
            suspect.due = time.monotonic() + _SOON
        left = [each for each in suspects if self._is_there(each)]
        if dead := next((each for each in left if each.needs_tombstone), None):
            async with self._children:
                await self._put_tombstone(dead)  # the others have their turn in the next inquiry
            left = [each for each in left if not each.needs_tombstone and each is not dead]
        live = [each for each in left if not self._front.states.is_dead(each.mount.connection)]
        if live:
            await self._search(live, {pid for each in live for pid in each.candidates})
            live = [each for each in live if self._is_suspect(each)]
        if live:
            await self._search(live, await self._processes_of(account))
        groups: dict[tuple[MountNamespace, bool], list[Suspect]] = defaultdict(list)
        for suspect in filter(self._is_suspect, left):
            now = time.monotonic()
            suspect.candidates = ()
            suspect.since = now if suspect.since is None else suspect.since
            if now < suspect.since + MOMENT and not self._front.states.is_dead(suspect.mount.connection):
                suspect.due = suspect.since + MOMENT
                continue
            unmount = self.may_unmount(suspect.mount) and suspect.namespace == suspect.mount.namespace
            groups[suspect.namespace, unmount].append(suspect)
        own_children = asyncio.Semaphore(CHILDREN_OF_AN_ACCOUNT)

        async def ask(namespace: MountNamespace, unmount: bool, group: list[Suspect]) -> None:
            async with own_children, self._children:
                await self._ask(namespace, unmount, group)

        await asyncio.gather(*(ask(*key, part) for key, group in groups.items() for part in _batches(group)))

    def _is_there(self, suspect: Suspect) -> bool:
        """Whether the mount still exists; if not, forget it."""
        mount = self._front.registry.find(suspect.mount.device)
        if mount and mount.connection == suspect.mount.connection:
            return self._is_suspect(suspect)
        if self._is_suspect(suspect):
            self._serving.forget(suspect.mount.device)
        return False

    def _is_suspect(self, suspect: Suspect) -> bool:
        return self._serving.suspects.get(suspect.mount.device) is suspect

    async def _processes_of(self, account: AccountName) -> list[int]:
        """Return the pids of the processes of an account, newest first: a process that has just begun to serve is
        likely new."""
        wanted_at = time.monotonic()
        async with self._listing:
            if self._listed_at < wanted_at:
                self._listed_at = time.monotonic()
                self._processes = await self._list_processes()
        return self._processes.get(account, [])

    async def _list_processes(self) -> dict[AccountName, list[int]]:
        front = self._front
        directory = front.open_proc(".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            pids = sorted((int(name) for name in os.listdir(directory) if name.isdecimal()), reverse=True)
        finally:
            os.close(directory)
        processes = defaultdict(list)
        for number, pid in enumerate(pids):
            if number % _PROCESSES_A_TURN == 0:
                await asyncio.sleep(0)
            with suppress(OSError):  # it has ended
                account, _ = account_of_process(pid, uid_of(pid, front.proc), front.open_proc)
                processes[account].append(pid)
        return processes

    async def _search(self, suspects: list[Suspect], pids: Collection[int]) -> None:
        """Have a child find which of the processes serves which of the mounts."""
        if not pids:
            return
        mounts = {suspect.mount.device: suspect.mount for suspect in suspects}
        devices, processes = _lines(mounts), _lines(islice(pids, MOST_PROCESSES))
        start = StartSearch(self._front.configuration.deadlines.operation, devices, processes)
        with suppress(MounterFailed, OperationFailed, OperationRefused, OperationEnded):
            with await self._front.mounter.begin(start, []) as operation:
                try:
                    found = await operation.expect(Found)
                finally:
                    self._leave_if_stuck(operation, suspects[0].mount.account)
            for line in found.connections.splitlines():
                device, pid, descriptor = map(int, line.split())
                self._serving.found(mounts[Device(device)], pid, descriptor)

    async def _ask(self, namespace: MountNamespace, unmount: bool, suspects: list[Suspect]) -> None:
        """Have a child ask the filesystems, and unmount the dead ones if `unmount` is set.

        If the child can't look, or the remaining mounts need another child, they are due again.
        """
        devices = _lines(suspect.mount.device for suspect in suspects)
        start = StartReap(self._front.configuration.deadlines.operation, namespace, unmount, devices)
        remaining = suspects.copy()
        for suspect in suspects if unmount else ():
            self._front.states.note_unmounting(suspect.mount, time.monotonic())
        with (
            suppress(MounterFailed, OperationFailed, OperationRefused),
            await self._front.mounter.begin(start, []) as operation,
        ):
            try:
                await self._hear(operation, remaining)
            except OperationEnded:  # killed by its alarm, or not even that: something hangs
                if remaining:
                    self._try_again(remaining[0])
                    self._leave_if_stuck(operation, remaining[0].mount.account, remaining[0].mount)
                    del remaining[0]
                for each in remaining:
                    each.due = time.monotonic()
        for each in remaining:
            self._front.states.note_not_unmounted(each.mount)

    async def _hear(self, operation: Operation, remaining: list[Suspect]) -> None:
        """Process the child's reports, and remove from `remaining` the mounts that they cover. Raises as
        `Operation.hear` does; raises OperationEnded after a filesystem that doesn't answer, which stays in
        `remaining`."""
        while True:
            said = await operation.hear()
            if isinstance(said, NobodyThere):
                for suspect in remaining:
                    self._conclude(suspect, ENOENT, 0)
                return
            if isinstance(said, Reaped):
                return
            if not (isinstance(said, Asked) and remaining and said.device == remaining[0].mount.device):
                raise OperationEnded
            if said.answer == ETIMEDOUT:
                await self._end_of(operation, _LAST_WORD)
                raise OperationEnded
            self._conclude(remaining.pop(0), said.answer, said.mounts)

    def _leave_if_stuck(self, operation: Operation, account: AccountName, mount: Mount | None = None) -> None:
        """Start waiting for the end of a child that can't end; its account has no other child until then. `mount` is
        the one that holds the child, if known."""
        if operation.stuck:
            self._blocked[account] += 1
            hung_connections.leave(self._front, operation, mount).add_done_callback(lambda _: self._unblock(account))

    def _unblock(self, account: AccountName) -> None:
        self._blocked[account] -= 1
        self._free(account)

    def _conclude(self, suspect: Suspect, answer: int, unmounted: int) -> None:
        """Record the filesystem's answer (`maintenance.Asked`), and how often the mount was unmounted."""
        mount = suspect.mount
        if answer == ENOTCONN:
            self._front.states.note_dead(mount.connection)
        if unmounted:
            self._tell("unmounted", "unmounted a dead mount: its program is gone", mount)
        else:
            self._front.states.note_not_unmounted(mount)
        if not self._is_there(suspect):
            return
        if mount.volume and suspect.namespace != self._front.mount_namespace and answer in (ENOENT, ENOTCONN):
            self._reaped.add(mount.connection)
            suspect.namespace = self._front.mount_namespace  # it may still be mounted at the target
            suspect.due = time.monotonic()
        elif self._may_need_tombstone(suspect, answer):
            suspect.needs_tombstone = True
            suspect.due = time.monotonic()
            if self._front.states.is_dead(mount.connection):
                suspect.tries = 0
        elif answer == ENOTCONN and not self.may_unmount(mount):
            self._serving.forget(mount.device)
        else:
            self._try_again(suspect)

    def _may_need_tombstone(self, suspect: Suspect, answer: int) -> bool:
        """Whether a dead mount may be at the target of its volume, after this answer.

        A filesystem of a pod's user namespace says nothing there. If the process that was known to serve it has ended
        or closed its descriptor, the mounter searches the pod for another.
        """
        if suspect.namespace != self._front.mount_namespace or not self._front.configuration.dead_mounts_seconds:
            return False
        mount = suspect.mount
        is_dead = self._front.states.is_dead(mount.connection)
        return bool(mount.volume) and (is_dead or (answer == ENODATA and suspect.was_served))

    async def _put_tombstone(self, suspect: Suspect) -> None:
        """Have a child put a tombstone in the place of the mount, if that is dead and at the target of its volume; at
        those of its borrowers, too."""
        mount = suspect.mount
        self._try_again(suspect)
        borrowers = (
            self._front.volumes.borrowers(mount.share) if self._front.volumes is not None and mount.share else []
        )
        replaced = [await self._is_replaced(mount, each) for each in (mount.volume, *(b.target for b in borrowers))]
        if any(replaced):
            self._front.states.note_dead(mount.connection)
            self._tell("replaced", "put a tombstone in the place of a dead mount: its program is gone", mount)
        is_dead = self._front.states.is_dead(mount.connection)
        suspect.needs_tombstone = is_dead
        if is_dead and mount.share:
            self._front.shared_died(mount.share)
        if self._is_there(suspect) and is_dead and (suspect.tries >= _MOST_TRIES or any(replaced)):
            self._serving.forget(mount.device)

    async def _is_replaced(self, mount: Mount, target: bytes) -> bool:
        """Have a child put a tombstone in the place of the mount at a target; return whether it has."""
        start = StartTombstone(self._front.configuration.deadlines.operation, target, mount.device)
        with (
            suppress(MounterFailed, OperationFailed, OperationRefused, OperationEnded),
            await self._front.mounter.begin(start, []) as operation,
        ):
            try:
                return (await operation.expect(TombstonePut)).replaced
            finally:
                self._leave_if_stuck(operation, mount.account, mount)
        return False

    async def _end_of(self, operation: Operation, seconds: float) -> None:
        """Hang up, and wait for the child's end. Raises OperationEnded if it doesn't end in time: it blocks."""
        operation.hang_up()
        try:
            await asyncio.wait_for(operation.ended(), seconds)
        except TimeoutError:
            operation.give_up()
            raise OperationEnded from None

    def _try_again(self, suspect: Suspect) -> None:
        suspect.due = time.monotonic() + min(AGAIN, 2.0 ** min(suspect.tries, _MOST_DOUBLINGS))
        suspect.tries += 1

    def _tell(self, result: str, message: str, mount: Mount) -> None:
        self._front.requests[f"reap {result}"] += 1
        self._front.log(
            log.NOTICE,
            message,
            request_id=mount.request_id,
            mountpoint=mount.mountpoint,
            caller_container=mount.container,
            device=mount.device,
            **({"target": mount.volume} if mount.volume else {}),
        )


def _batches(group: list[Suspect]) -> Iterable[list[Suspect]]:
    return (group[first : first + MOST_OF_A_CHILD] for first in range(0, len(group), MOST_OF_A_CHILD))


def _lines(numbers: Iterable[int]) -> bytes:
    return b"".join(b"%d\n" % number for number in numbers)
