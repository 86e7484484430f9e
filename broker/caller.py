"""The caller of an operation: a child of the mounter joins its namespaces, with its identity as the kernel tells it."""

import errno
import fcntl
import os
import select
import socket
import struct
from contextlib import suppress

from broker import connections, namespaces, plan, syscalls
from broker.children import Rescue
from broker.conversation import BadRequest, Conversation, HungUp, receive, rights
from broker.descriptors import Descriptors
from fusermount3_proxy import wire


class Caller:
    """The caller, whose namespaces this process has joined and with whose rights it looks at files.

    The kernel translates: uid and gid are those that the caller itself sees. `device` is /dev/fuse, opened in the
    caller's user namespace, as FUSE demands of the superblock that it will serve (fs/fuse/inode.c, fuse_fill_super).
    Real and saved uid stay the mounter's own: they are what decides who may send signals to a process.
    """

    def __init__(self, opened: Descriptors, connection: int, pins: int = 1) -> None:
        """Take the request, and the descriptor that it pins, or none with 0 `pins`. Raises BadRequest, OSError."""
        # A copy: the descriptor itself stays open until this process ends, after the front has closed its own.
        self._connection = socket.socket(fileno=os.dup(connection))
        self._opened = opened
        self.pid = self._credentials()[0]
        self.locks = opened.locks
        descriptors = self.take()
        if len(descriptors) != pins or not all(fcntl.fcntl(each, fcntl.F_GETFL) & os.O_PATH for each in descriptors):
            raise BadRequest(len(descriptors))
        self.pinned = descriptors[0] if pins else -1

    def take(self) -> list[int]:
        """Take what the caller has said, which the front has read; return what came with it. Raises OSError."""
        try:
            return receive(self._connection, socket.MSG_DONTWAIT)[1]
        except wire.ProtocolError as error:
            raise OSError(error.errno, error.text) from None

    def let_go(self) -> None:
        """Close what is pinned, before the last word: it is busy as long as it is open."""
        if self.pinned >= 0:
            os.close(self.pinned)
            self.pinned = -1

    def join(self, opened: Descriptors, pidfd: int) -> None:
        """Enter the caller's namespaces. Raises OSError."""
        bounding, effective = namespaces.capabilities_of(self.pid, opened.proc)
        self.may_mount = bool(effective >> syscalls.CAP_SYS_ADMIN & 1)
        self.in_user_namespace = namespaces.join_user_namespace(pidfd)
        traced = bool(bounding >> syscalls.CAP_SYS_PTRACE & 1)
        self.pids = namespaces.pid_namespace(pidfd, opened.proc, self.in_user_namespace, traced)
        self.device = os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices)
        _, self.uid, self.gid = self._credentials()
        groups = syscalls.peer_groups(self._connection.fileno())
        self.mount_namespace = namespaces.join_mount_namespace(pidfd, opened.proc)
        try:
            os.setgroups(groups)
        except PermissionError:
            pass  # a user namespace that denies setgroups(2): then without groups, the stricter answer
        syscalls.setfsids(self.uid, self.gid)
        # Root of a container may look into its users' directories, as the helper's root does.
        look = (syscalls.CAP_DAC_READ_SEARCH,) if self.uid == 0 else ()
        syscalls.capset(syscalls.CAP_SYS_ADMIN, syscalls.CAP_SETUID, syscalls.CAP_SETGID, *look)

    def take_device(self, device: int) -> None:
        """Take a device that is the caller's already instead of one that is new."""
        os.close(self.device)
        self.device = device

    def _credentials(self) -> tuple[int, int, int]:
        """Return pid, uid and gid of the caller, as this process sees them at the moment."""
        pid, uid, gid = struct.unpack("iII", self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, uid, gid

    def announce(self, talk: Conversation, device: int) -> None:
        """Tell the front that the filesystem of `device` is asked next, if that is FUSE. Raises HungUp."""
        if connections.exists(self._opened.fusectl, device):
            talk.say(plan.Entering(device, self.uid, self.mount_namespace))

    def check_serves(self, device: int) -> None:
        """Raise OSError if what the caller is to get serves another filesystem, as far as the kernel tells."""
        if connections.served_device(self._opened.proc, "self", self.device) not in (None, device):
            raise OSError(errno.EBADF, "it serves another filesystem")

    def rescue(self, talk: Conversation) -> Rescue:
        """Return the way out of a mount that waits for the FUSE program: that is given up."""

        def unblock() -> None:
            with suppress(OSError):  # it has just ended
                connections.abort_own(self._opened.fusectl, self._opened.proc, self.device)

        return Rescue(talk.fileno(), unblock)

    def hand_over(self, wanted: plan.MountPlan) -> None:
        """Send the device to the caller. Raises HungUp when the caller is gone."""
        warnings = tuple(wanted.warnings.splitlines())
        reply = wire.Reply(wanted.request, warnings=warnings, auto_unmount=wanted.auto_unmount)
        self._send(reply, [rights(self.device)])

    def tell(self, request: bytes) -> None:
        """Tell the caller, who waits for it, that its request has been carried out. Raises HungUp."""
        self._send(wire.Reply(request), [])

    def _send(self, reply: wire.Reply, ancillary: list[tuple[int, int, bytes]]) -> None:
        try:
            self._connection.sendmsg([wire.encode_reply(reply)], ancillary, NOW)
        except OSError:
            raise HungUp from None

    def commits(self, seconds: int) -> bool:
        """Whether the caller says, in time, that it has taken the mount."""
        waiting = select.poll()
        waiting.register(self._connection, select.POLLIN)
        if not waiting.poll(1000 * seconds):
            return False
        try:
            said, _, cut, _ = self._connection.recvmsg(wire.MAX_MESSAGE, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return not cut and isinstance(wire.decode_request(said), wire.CommitRequest)
        except (OSError, wire.ProtocolError):
            return False


#: A caller that has not read its socket for long counts as gone.
NOW = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
