"""Inspection of mounts without a caller: find dead mounts, serving processes, and mounts that still exist.

The mounter's children do this for the front's `mount_watch`, `dead_mounts` and `restore`. A child that joins a mount
namespace inspects all requested mounts there, and reports each result at once: if it is killed at a mount that hangs,
the front knows which one.
"""

import errno
import os
import signal
from collections import defaultdict
from contextlib import suppress

from fusermount3_broker.kernel import syscalls
from fusermount3_broker.messages import mounter
from fusermount3_broker.mounter import fuse_connections, mount_tree, namespaces
from fusermount3_broker.mounter.child_processes import User
from fusermount3_broker.mounter.front_connection import Conversation
from fusermount3_broker.mounter.kept_descriptors import Descriptors
from fusermount3_broker.mounter.liveness_probe import Prober, Silent

#: Seconds for one filesystem, counted from the look at its mountpoint; then the child is killed.
_SECONDS_EACH = 2
#: Seconds after which a search for the processes that serve FUSE connections reports what it has found.
_SECONDS_OF_SEARCH = 1.0


def survey(opened: Descriptors, talk: Conversation, start: mounter.StartSurvey) -> None:
    """Report the state of FUSE connections."""
    with talk.bounded("survey"):
        surveyed = fuse_connections.survey(opened.fusectl, opened.proc, start.connections)
    talk.say(mounter.Surveyed(surveyed))


def search(opened: Descriptors, talk: Conversation, start: mounter.StartSearch) -> None:
    """Report which of the given processes serve which FUSE connections."""
    with talk.bounded("search"):
        proc = opened.proc
        found = fuse_connections.search(
            proc,
            start.devices,
            start.pids,
            _SECONDS_OF_SEARCH,
            lambda server, device: fuse_connections.is_connected(proc, server, device),
        )
    talk.say(mounter.Found(found))


def recognize(opened: Descriptors, talk: Conversation, start: mounter.StartRecognize) -> None:
    """Report which of the given mounts still exist in a mount namespace."""
    if not _join(opened, talk, start.mount_namespace):
        talk.say(mounter.NobodyThere())
        return
    with talk.bounded("look"):
        devices = mount_tree.still_there(start.mounts)
    talk.say(mounter.Recognized(devices))


def reap(opened: Descriptors, talk: Conversation, start: mounter.StartReap) -> None:
    """Ask filesystems in a mount namespace whether they are dead, and unmount those that are."""
    with talk.bounded("look"):
        devices = [int(line) for line in start.devices.splitlines()]
        alive = fuse_connections.alive(opened.fusectl, devices)
    if not _join(opened, talk, start.mount_namespace):
        talk.say(mounter.NobodyThere())
        return
    with talk.bounded("look"):
        reaper = _Reaper(opened.locks, start.unmount)
    try:
        for device in devices:
            with talk.bounded("unmount", _SECONDS_EACH):
                answer, unmounted = (errno.EAGAIN, 0) if device in alive else reaper.reap(device)
            talk.say(mounter.Asked(device, answer, unmounted))
            if answer == errno.ETIMEDOUT:
                return  # the front decides what happens next; do not wait for it here
        talk.say(mounter.Reaped())
    finally:
        signal.alarm(0)  # a prober ends no sooner than the FUSE program that keeps it waiting, so set no limit
        reaper.end()


class _Reaper:
    """The mounts in this process's mount namespace, and the prober that asks them."""

    def __init__(self, locks: int, unmount: bool) -> None:
        self._locks = locks
        self._unmount = unmount
        self._places: dict[int, list[bytes]] = defaultdict(list)
        self._prober: Prober | None = None
        for mount in mount_tree.table():
            self._places[mount.device].append(mount.place)

    def end(self) -> None:
        if self._prober:
            self._prober.__exit__()

    def reap(self, device: int) -> tuple[int, int]:
        """Return the filesystem's answer, as in `maintenance.Asked`, and the number of its mounts unmounted."""
        answer = errno.ENOENT
        unmounted = 0
        for place in self._places.get(device, ()):
            try:
                found, looked = self._ask_at(place, device)
            except Silent:
                return errno.ETIMEDOUT, unmounted
            except OSError:  # it has just been unmounted elsewhere, or the mount below it has
                continue
            answer = found if answer == errno.ENOENT else answer
            if found == errno.ENOTCONN and self._unmount:
                with suppress(OSError):  # a later round tries again
                    unmounted += mount_tree.unmount_dead(place, looked, self._locks, 1)
        return answer, unmounted

    def _ask_at(self, place: bytes, device: int) -> tuple[int, mount_tree.Looked]:
        """Return the answer of the topmost filesystem at `place`, and its mount; ENOENT if it has another device.

        Of several mounts of a filesystem at one place, each has its turn. Raises OSError, Silent.
        """
        with mount_tree.opened(place) as entry:
            looked = mount_tree.look(entry)
            fuse = mount_tree.fuse_if_any(looked.mount_id)
        if looked.device != device or fuse is None:
            return errno.ENOENT, looked
        prober = self._prober_as(User(fuse.uid, fuse.gid))  # which may fork: an open entry keeps the mount busy
        with mount_tree.opened(place) as entry:
            return (prober.ask(entry) if mount_tree.look(entry) == looked else errno.ENOENT), looked

    def _prober_as(self, user: User) -> Prober:
        if self._prober is None or not self._prober.alive or self._prober.user != user:
            if self._prober:
                self._prober.__exit__()
                self._prober = None
            self._prober = Prober(user)
        return self._prober


def _join(opened: Descriptors, talk: Conversation, mount_namespace: int) -> bool:
    """Join a mount namespace, keeping the capabilities needed to unmount there; return False if no process is in it."""
    with talk.bounded("join"):
        try:
            namespace = fuse_connections.mount_namespace(opened.proc, mount_namespace)
        except ProcessLookupError:
            return False
        namespaces.join_mount_namespace_of_owner(namespace, opened.proc)
        os.close(namespace)
        syscalls.capset(syscalls.CAP_SYS_ADMIN, syscalls.CAP_SETUID, syscalls.CAP_SETGID, syscalls.CAP_DAC_READ_SEARCH)
    return True
