"""Pools of the mounter's children: the parent starts them, counts them and limits their number.

A few children wait for an operation, the others carry one out. A child counts until the kernel has ended it: closing a
descriptor that a caller sent may block for as long as a FUSE program chooses, and no signal interrupts that. So the
parent also keeps every operation's conversation socket open until its child is reaped; the front releases the
operation's slot only when it sees that socket close.

Each socket from which operations arrive has a `Pool` with a limit of its own, so that a pool full of callers'
operations leaves room for the broker's.
"""

import os
import select
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress

#: Milliseconds without a new operation after which a used spare child is replaced, unless it was the last: a fork and a
#: rehearsal would compete with the operation for the processor.
REPLACE_AFTER = 20
#: Seconds before a failed fork is retried (too many processes, or no memory). Operations wait meanwhile.
_FORK_AGAIN = 0.1


class _Child:
    """A child. `line` is the socket to it while it waits; `conversation` is its operation's socket, kept open."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.line = line
        self.conversation: int | None = None

    def receive_descriptors(self) -> None:
        """Receive the conversation socket from a child that has taken an operation; it sends none if it is exiting."""
        with suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(self.line, 1, 1)
            self.conversation = next(iter(descriptors), None)
        self.line.close()

    def close(self) -> None:
        """Close this process's descriptors for the child, in the parent or in another child."""
        self.line.close()
        os.close(self.pidfd)
        if self.conversation is not None:
            os.close(self.conversation)


#: Executes a program as a child, given the descriptors of the socket from which operations arrive and of the socket to
#: the parent. Returns its pid; raises OSError.
Execute = Callable[[int, int], int]


class Pool:
    """The children for the operations that arrive on `control`: at most `most`, of which `ready` wait if possible."""

    def __init__(self, control: socket.socket, ready: int, most: int, execute: Execute | None = None) -> None:
        """`execute` starts a child; without it, or if it fails, a child is forked."""
        self.control = control
        #: Another pool whose children count against the same limit.
        self.beside: Pool | None = None
        self._execute = execute
        self.spares: set[_Child] = set()
        self.busy: set[_Child] = set()
        self._ready = ready
        self._most = most

    @property
    def children(self) -> int:
        return len(self.spares) + len(self.busy)

    def wants_one(self, left: int) -> bool:
        """Return whether one more child is wanted and allowed; `left` is the number of other children that count."""
        count = self.children + (self.beside.children if self.beside else 0) + left
        return len(self.spares) < self._ready and count < self._most

    def start_child(self, line: socket.socket) -> int:
        """Return the pid of a new child with the socket `line` to the parent; 0 in a forked child. Raises OSError."""
        if self._execute:
            with suppress(OSError):
                return self._execute(self.control.fileno(), line.fileno())
        return os.fork()


def tell_parent(line: socket.socket, conversation: int) -> None:
    """Tell the parent, from a child, that the child has taken an operation with this conversation socket."""
    with suppress(OSError):  # the parent was killed
        socket.send_fds(line, [b"\0"], [conversation])
    line.close()


#: The work of a child, given its pool and its end of the socket to the parent.
Serve = Callable[[Pool, socket.socket], None]
#: Context in which a child of a pool is forked: the child keeps its resources, the parent doesn't.
Birth = Callable[[Pool], AbstractContextManager[None]]


class Parent:
    """Keeps the pools filled. `left`, pidfds of an earlier mounter's children, count against the first pool's limit."""

    def __init__(
        self,
        pools: Sequence[Pool],
        left: Collection[int],
        serve: Serve,
        birth: Birth = lambda _: nullcontext(),
    ) -> None:
        self._pools = pools
        self._left = set(left)
        self._serve = serve
        self._birth = birth
        self._waiting = select.poll()
        self._lines: dict[int, tuple[Pool, _Child]] = {}
        self._pidfds: dict[int, tuple[Pool, _Child]] = {}
        for pool in pools:
            self._waiting.register(pool.control, 0)  # only hang-up: the children read the records
        for pidfd in self._left:
            self._waiting.register(pidfd, select.POLLIN)

    def run(self) -> None:
        """Run until the other end of one of the sockets from which operations arrive has been closed."""
        ends = {pool.control.fileno() for pool in self._pools}
        while True:
            is_one_wanted = any(map(self._wants_one, self._pools))
            events = self._waiting.poll(REPLACE_AFTER if is_one_wanted else None)
            for descriptor, _ in events:
                if descriptor in ends:
                    return
                self._note(descriptor)
            for pool in self._pools:
                if self._wants_one(pool) and not (events and pool.spares) and not self._start(pool):
                    time.sleep(_FORK_AGAIN)

    def _wants_one(self, pool: Pool) -> bool:
        first = self._pools[0]
        return pool.wants_one(len(self._left) if first in (pool, pool.beside) else 0)

    def _note(self, descriptor: int) -> None:
        """Handle an event on a descriptor: a child has taken an operation, or has ended."""
        if descriptor in self._lines:
            pool, child = self._lines.pop(descriptor)
            self._waiting.unregister(descriptor)
            child.receive_descriptors()
            pool.spares.remove(child)
            pool.busy.add(child)
        elif descriptor in self._pidfds:
            self._reap_child(descriptor)
        elif descriptor in self._left:
            self._left.remove(descriptor)
            self._waiting.unregister(descriptor)
            os.close(descriptor)

    def _reap_child(self, pidfd: int) -> None:
        pool, child = self._pidfds.pop(pidfd)
        if self._lines.pop(child.line.fileno(), None):  # it was killed while it waited
            self._waiting.unregister(child.line)
        self._waiting.unregister(pidfd)
        with suppress(ChildProcessError):
            os.waitpid(child.pid, 0)
        child.close()
        pool.spares.discard(child)
        pool.busy.discard(child)

    def _start(self, pool: Pool) -> bool:
        """Start a child for the pool; return whether that succeeded."""
        with self._birth(pool), ExitStack() as opened:
            try:
                ours, theirs = map(opened.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                pid = pool.start_child(theirs)
            except OSError:
                return False
            opened.pop_all()
            if pid == 0:
                try:
                    ours.close()
                    self._close_all_but(pool)
                    self._serve(pool, theirs)
                finally:
                    os._exit(0)  # whatever happened: no exception may reach code that would print it
        theirs.close()
        child = _Child(pid, ours)
        pool.spares.add(child)
        self._lines[ours.fileno()] = self._pidfds[child.pidfd] = (pool, child)
        self._waiting.register(ours, select.POLLIN)
        self._waiting.register(child.pidfd, select.POLLIN)
        return True

    def _close_all_but(self, own: Pool) -> None:
        """Close, in a child, the parent's descriptors: no child may keep another child's conversation socket open."""
        for pool in self._pools:
            if pool is not own:
                pool.control.close()
        for _, child in self._pidfds.values():
            child.close()
        for pidfd in self._left:
            os.close(pidfd)
