"""Liveness probe: ask many FUSE filesystems in turn whether a FUSE program serves them, with a short timeout for each.

FUSE answers only the user of a mount (fs/fuse/dir.c, fuse_allow_current_process), whatever rights root has. So a forked
child takes on that user's identity and probes all mounts of that user: a FUSE connection that has ended answers
ENOTCONN at once. A probing child that gets no answer is abandoned, and with it the mounter's child that started it.
"""

import errno
import os
import select
import socket
import struct
from contextlib import suppress

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.mounter import child_processes, mount_tree
from fusermount3_broker.mounter.child_processes import User

#: Seconds in which a filesystem may answer. The probe waits only to see that a FUSE program exists. Shorter than the
#: time for which an unmount retries a busy mount (`mount_tree.BUSY_MOMENT`).
SECONDS = 0.25
_ANSWER = struct.Struct("=i")


class Silent(Exception):
    """The filesystem did not answer in time. The child that asked may still be running."""


class Prober:
    """A child process that probes as `user`. Leaving the ``with`` block ends it, and waits for that without a limit."""

    def __init__(self, user: User) -> None:
        """Raises OSError."""
        self.user = user
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        capabilities = [syscalls.CAP_SETUID, syscalls.CAP_SETGID]
        with theirs:
            self._pid = child_processes.begin(lambda: _serve(theirs), [theirs.fileno()], capabilities, user)
        self._conversation = ours
        self._silent = False
        #: Whether the child can take another question.
        self.alive = True

    def __enter__(self) -> "Prober":
        return self

    def __exit__(self, *_: object) -> None:
        self._conversation.close()
        if self._silent:
            child_processes.kill(self._pid, self.user)
        os.waitpid(self._pid, 0)

    def ask(self, entry: int) -> int:
        """Return the errno with which the filesystem of `entry` answers: 0 if a FUSE program serves it, ENODATA if it
        reports nothing to this user namespace.

        Raises Silent if no answer comes; the prober can't be used again after that. Raises OSError if the child has
        been killed.
        """
        self.alive = False
        socket.send_fds(self._conversation, [b"?"], [entry])
        waiting = select.poll()
        waiting.register(self._conversation, select.POLLIN)
        if not waiting.poll(1000 * SECONDS):
            self._silent = True
            raise Silent
        answer = self._conversation.recv(_ANSWER.size)
        if not answer:
            raise OSError(errno.EINTR, "the child was killed")
        self.alive = True
        (number,) = _ANSWER.unpack(answer)
        return int(number)


def _serve(conversation: socket.socket) -> None:
    """Answer questions until the parent closes its end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(conversation, 1, 1)
        if not data:
            return
        for entry in descriptors:
            answer = _answer(entry)
            os.close(entry)  # before the answer: it keeps the mount busy
            with suppress(OSError):
                conversation.send(_ANSWER.pack(answer))


def _answer(entry: int) -> int:
    try:
        said = mount_tree.statvfs(entry)
    except OSError as error:
        return error.errno or errno.EIO
    # For users who may not access it, the kernel returns zeros without asking the program (fs/fuse/inode.c,
    # fuse_statfs).
    return 0 if any((*said[:8], said.f_namemax)) else errno.ENODATA
