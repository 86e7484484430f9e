"""The caller of an operation: a child of the mounter joins its namespaces and takes its identity from the kernel."""

import errno
import fcntl
import os
import select
import socket
import struct
from contextlib import suppress

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.mounter import fuse_connections, mount_tree, namespaces
from fusermount3_broker.mounter.child_processes import Rescue
from fusermount3_broker.mounter.front_connection import BadRequest, Conversation, HungUp, rights
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_proxy import wire

#: Bytes of a descriptor in a control message: a C int.
_INT = 4


class Caller:
    """The caller, whose namespaces this process has joined and with whose rights it looks at files.

    `uid` and `gid` are as the caller sees them: the kernel translates them. `device` is /dev/fuse, opened in the
    caller's user namespace, which FUSE requires for the superblock that it will serve (fs/fuse/inode.c,
    fuse_fill_super). The real and saved uid stay the mounter's: they decide who may send signals to this process.
    """

    def __init__(self, opened: Descriptors, connection: int, pins: int = 1) -> None:
        """Receive the request and the descriptor that it pins, or none if `pins` is 0. Raises OSError."""
        # A copy: the descriptor itself stays open until this process ends, after the front has closed its own.
        self._connection = socket.socket(fileno=os.dup(connection))
        self._opened = opened
        self.pid = self._credentials()[0]
        self.locks = opened.locks
        self.cell = opened.cell
        self.programs = opened.programs
        #: Whether this process itself locks the flags of a mount.
        self.locks_flags = False
        self._pins = pins
        self._came = fuse_connections.descriptors_in_flight(opened.proc, connection)
        self.pinned, self._is_more = self._take_request()

    def _take_request(self) -> tuple[int, bool]:
        """Return the descriptor that came with the request, or -1, and whether more came. Raises OSError.

        The buffer has no room for more descriptors than the request takes. The others never enter this process's
        table, so dropping them asks no FUSE program.
        """
        room = socket.CMSG_LEN(_INT) if self._pins else 0
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        _, ancillary, cut, _ = self._connection.recvmsg(wire.MAX_MESSAGE, room, flags)
        return next(iter(wire.descriptors(ancillary)), -1), bool(cut & socket.MSG_CTRUNC)

    def check_request(self, talk: Conversation) -> None:
        """Raise BadRequest unless only the descriptor that the request takes, if any, came, opened with O_PATH; HungUp.

        If the descriptor was opened without O_PATH, announce its FUSE filesystem to the front: closing it asks the FUSE
        program, which can hang.
        """
        if self.pinned >= 0 and not fcntl.fcntl(self.pinned, fcntl.F_GETFL) & os.O_PATH:
            self.announce(talk, mount_tree.look(self.pinned).device)
        elif not self._is_more and (self.pinned >= 0) == bool(self._pins):
            return
        least = int(self.pinned >= 0) + int(self._is_more)
        raise BadRequest(max(least, self._came) if self._is_more else least)

    def take(self) -> None:
        """Receive the message that the front has already read, without its descriptors. Raises OSError."""
        self._connection.recv(wire.MAX_MESSAGE, socket.MSG_DONTWAIT)

    def let_go(self) -> None:
        """Close the pinned descriptor and the cell before the last message: both keep filesystems busy while open.

        The descriptor does so for what it pins, the cell for what was mounted.
        """
        if self.pinned >= 0:
            os.close(self.pinned)
            self.pinned = -1
        self.cell.close()

    def join(self, opened: Descriptors, pidfd: int) -> None:
        """Enter the caller's namespaces. Raises OSError."""
        bounding, effective = namespaces.capabilities_of(self.pid, opened.proc)
        self.may_mount = bool(effective >> syscalls.CAP_SYS_ADMIN & 1)
        pids = namespaces.pid_namespace(pidfd, opened.proc)
        self.in_user_namespace = namespaces.join_user_namespace(pidfd)
        traced = bool(bounding >> syscalls.CAP_SYS_PTRACE & 1)
        self.pids = namespaces.usable(pids, traced)
        self.device = os.open("dev/fuse", os.O_RDWR | os.O_CLOEXEC, dir_fd=opened.devices)
        _, self.uid, self.gid = self._credentials()
        groups = syscalls.peer_groups(self._connection.fileno())
        self.mount_namespace = namespaces.join_mount_namespace(pidfd, opened.proc)
        try:
            os.setgroups(groups)
        except PermissionError:
            pass  # a user namespace that denies setgroups(2): go on without groups, which is stricter
        syscalls.setfsids(self.uid, self.gid)
        # An executed program has ambient capabilities only if all these are one group (security/commoncap.c).
        os.setresgid(self.gid, self.gid, -1)
        # Root of a container may look into its users' directories, as root may with fusermount3.
        look = (syscalls.CAP_DAC_READ_SEARCH,) if self.uid == 0 else ()
        self._capabilities = (syscalls.CAP_SYS_ADMIN, syscalls.CAP_SETUID, syscalls.CAP_SETGID, *look)
        # The cell can't be joined from another user namespace.
        self.locks_flags &= not self.in_user_namespace and not self.cell.forbidden
        syscalls.capset(*self._capabilities, *((syscalls.CAP_SYS_CHROOT,) if self.locks_flags else ()))

    def lock(self, mount: int, *, directory: bool) -> int:
        """Return the mount, with nosuid and nodev locked if processes outside the caller's user namespace may meet it.

        If the host forbids locking, both flags can be cleared, as on a mount made by fusermount3. Raises OSError.
        """
        if not self.locks_flags:
            return mount
        try:
            return self.cell.lock(mount, directory=directory)
        finally:
            syscalls.capset(*self._capabilities)

    def take_device(self, device: int) -> None:
        """Use a device that the caller already has instead of the new one."""
        os.close(self.device)
        self.device = device

    def _credentials(self) -> tuple[int, int, int]:
        """Return the caller's pid, uid and gid, as this process currently sees them."""
        pid, uid, gid = struct.unpack("iII", self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, uid, gid

    def announce(self, talk: Conversation, device: int) -> None:
        """Announce to the front that the next step asks the filesystem of `device`, if it is FUSE. Raises HungUp."""
        if fuse_connections.exists(self._opened.fusectl, device):
            talk.say(mounter.Entering(device, self.uid, self.mount_namespace))

    def check_serves(self, device: int) -> None:
        """Raise OSError if the kernel shows that the caller's device serves another filesystem."""
        if fuse_connections.served_device(self._opened.proc, "self", self.device) not in (None, device):
            raise OSError(errno.EBADF, "it serves another filesystem")

    def rescue(self, talk: Conversation) -> Rescue:
        """Return the way out of a mount that waits for the FUSE program: abort its FUSE connection."""

        def unblock() -> None:
            with suppress(OSError):  # the connection has just ended
                fuse_connections.abort_own(self._opened.fusectl, self._opened.proc, self.device)

        return Rescue(talk.fileno(), unblock)

    def hand_over(self, wanted: mounter.MountPlan) -> None:
        """Send the device to the caller. Raises HungUp when the caller is gone."""
        warnings = tuple(wanted.warnings.splitlines())
        reply = wire.Reply(wanted.request_id, warnings=warnings, auto_unmount=wanted.auto_unmount)
        self._send(reply, [rights(self.device)])

    def tell(self, request: bytes) -> None:
        """Confirm to the waiting caller that its request has been carried out. Raises HungUp."""
        self._send(wire.Reply(request), [])

    def _send(self, reply: wire.Reply, ancillary: list[tuple[int, int, bytes]]) -> None:
        try:
            self._connection.sendmsg([wire.encode_reply(reply)], ancillary, NOW)
        except OSError:
            raise HungUp from None

    def commits(self, seconds: int) -> bool:
        """Return whether the caller confirms within `seconds` that it has taken the mount."""
        waiting = select.poll()
        waiting.register(self._connection, select.POLLIN)
        if not waiting.poll(1000 * seconds):
            return False
        try:
            said, _, cut, _ = self._connection.recvmsg(wire.MAX_MESSAGE, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return not cut and isinstance(wire.decode_request(said), wire.CommitRequest)
        except (OSError, wire.ProtocolError):
            return False


#: Never wait: a caller that has not read its socket for long counts as gone.
NOW = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
