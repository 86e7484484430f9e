"""The processes that the supervisor starts (mounter, front, CSI plugin), with the descriptors kept across restarts."""

import io
import os
import socket
import stat
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from fusermount3_broker.messages import supervisor as orders
from fusermount3_broker.messages.csi_settings import Csi
from fusermount3_broker.service import configuration_file
from fusermount3_broker.service.configuration import Configuration
from fusermount3_broker.supervisor import orphans, restarts
from fusermount3_broker.supervisor.restarts import Backoff, NotBegun
from fusermount3_proxy import wire

#: Seconds that a process may take to start; and to end, in addition to the time that running operations may take.
_PATIENCE = 30
#: Maximum seconds before the restart of a process that callers need.
_LONGEST_PAUSE = 1.0
#: Maximum seconds before a restart of the plugin, which callers don't need. If the plugin has served for longer than
#: this, the next pause is the shortest again.
_LONGEST_PAUSE_OF_PLUGIN = 5.0
#: The files that assign uids to users (subuid(5), passwd(5)), and the maximum bytes of each that are passed on.
_SUBORDINATE_IDS = (Path("/etc/subuid"), Path("/etc/passwd"))
_LONGEST_OF_ACCOUNTS = 4 << 20


class Mounter:
    """The mounter process. The sockets to it are kept: a new mounter takes the operations that wait there."""

    def __init__(self, kubelet: int | None = None, max_requests: int = Configuration.max_requests) -> None:
        """`kubelet` is a descriptor of kubelet's directory, if volumes are served."""
        self._front_ends, self._own_ends = zip(*(restarts.pair() for _ in ("callers'", "own", "plain")), strict=True)
        self._kubelet = [] if kubelet is None else [kubelet]
        self._max_requests = max_requests
        self._process: subprocess.Popen[bytes] | None = None
        self._roots: list[int] = []
        self.restarts = 0
        #: Whether the host lets the mounter lock the flags of mounts.
        self.locks_flags = True
        self._serves_plain_calls = False
        self.pauses = Backoff(_LONGEST_PAUSE)

    @property
    def for_front(self) -> list[int]:
        """The descriptors for the front: the three sockets to the mounter, and the roots of fusectl and of /proc."""
        return [*(each.fileno() for each in self._front_ends), *self._roots]

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def started(self) -> orders.MounterStarted:
        return orders.MounterStarted(self.pid, self.restarts, self._serves_plain_calls)

    @property
    def fusectl(self) -> int:
        return self._roots[0]

    def start(self, left: Sequence[int] = ()) -> None:
        """Start the mounter and return when it serves. `left`: pidfds of an earlier one's children. Raises NotBegun."""
        with self.pauses.starting("mounter"):
            ours, theirs = restarts.pair()
            with ours:
                with theirs:
                    ends = [each.fileno() for each in (*self._own_ends, theirs)]
                    arguments = [str(self._max_requests), str(len(self._kubelet))]
                    descriptors = (*ends, *self._kubelet, *left)
                    self._process = restarts.start(
                        "fusermount3_broker.mounter.daemon", *descriptors, arguments=arguments
                    )
                ours.settimeout(_PATIENCE)
                said = None
                with suppress(OSError, wire.ProtocolError):
                    record, roots, _, _ = socket.recv_fds(ours, wire.MAX_MESSAGE, 2)
                    said = orders.load(record)
                    if isinstance(said, orders.MounterReady) and roots:
                        self.locks_flags, self._serves_plain_calls = said
                        self._keep(roots)
                        self.pauses.forget()
                        return
            raise _failure("mounter", self._process, said)

    def _keep(self, roots: list[int]) -> None:
        """Keep the roots from the first mounter, and close those from later ones, which are equivalent."""
        if not self._roots:
            self._roots = roots
            return
        for descriptor in roots:
            os.close(descriptor)

    def ended(self) -> int | None:
        """Return the exit status, once, and schedule the restart; None if the process still runs."""
        return restarts.ended(self._process, self.pauses)

    def restart(self, known: Collection[int] = ()) -> None:
        """Start another mounter, and pass it the children that the last one has left: all but the `known` ones.

        Raises NotBegun.
        """
        self.restarts += 1
        left = orphans.of([os.getpid()], known)
        try:
            self.start(left)
        finally:
            for descriptor in left:
                os.close(descriptor)

    def close(self) -> None:
        """Close the sockets, which ends the process, and wait for its end."""
        for each in self._front_ends + self._own_ends:
            each.close()
        for descriptor in self._roots:
            os.close(descriptor)
        if self._process:
            restarts.wait_for(self._process, _PATIENCE)


class LaunchedFront:
    """A front process that has no orders yet. It imports its modules meanwhile, beside a mounter that starts."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.conversation, theirs = restarts.pair()
        with theirs:
            self.process = restarts.start("fusermount3_broker.front.daemon", theirs.fileno())

    def close(self) -> None:
        """Close the socket to it, upon which it exits, and wait for that."""
        self.conversation.close()
        restarts.wait_for(self.process, _PATIENCE)


class Front:
    """The front process. `kept`: the descriptors that it gets with `begin`, the same at each start."""

    def __init__(
        self, begin: orders.Begin, kept: Sequence[int | socket.socket], launched: LaunchedFront | None = None
    ) -> None:
        """`launched` is the process that the first `start` takes; without one, it launches one itself."""
        self._begin = begin
        self._kept = kept
        self._launched = launched
        self._process: subprocess.Popen[bytes] | None = None
        self._conversation: socket.socket | None = None
        self._configuration: tuple[orders.Configuration, bytes | None] = (orders.Configuration(b""), None)
        self._subordinate_ids: tuple[bytes, ...] = ()
        self._seconds = 0
        self.pauses = Backoff(_LONGEST_PAUSE)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def state_directory(self) -> Path:
        return Path(os.fsdecode(self._begin.state_directory))

    def start(self, mounter: Mounter, plugin: "Plugin | None" = None) -> None:
        """Start the front with the current configuration, and return when it serves. Raises NotBegun."""
        with self.pauses.starting("front"):
            self._hang_up()
            launched, self._launched = self._launched or LaunchedFront(), None
            self._process, self._conversation = launched.process, launched.conversation
            descriptors = [each if isinstance(each, int) else each.fileno() for each in self._kept]
            self.tell(self._begin, *descriptors)
            self._tell_configuration()
            self._subordinate_ids = _contents_of(_SUBORDINATE_IDS)
            self._tell_files(orders.SubordinateIds(), *self._subordinate_ids)
            self.tell(mounter.started)
            if plugin and plugin.is_started:
                self.tell(plugin.started)
            self._conversation.settimeout(_PATIENCE)
            self._check_that_it_serves(self._process, self._conversation)
            self.pauses.forget()

    def restart(self, mounter: Mounter, plugin: "Plugin | None" = None) -> None:
        """Start another front, and pass it the children that serve callers of the last one. Raises NotBegun."""
        self.start(mounter, plugin)
        left = orphans.of([mounter.pid, os.getpid()], {each.pid for each in (mounter, self, plugin) if each})
        if left:
            self.tell(orders.ChildrenLeft(), *left)
        for descriptor in left:
            os.close(descriptor)

    def _check_that_it_serves(self, process: subprocess.Popen[bytes], conversation: socket.socket) -> None:
        """Raises NotBegun."""
        try:
            said = orders.load(self._first_word(conversation))
        except (OSError, wire.ProtocolError):
            said = None
        if isinstance(said, orders.Ready):
            return
        raise _failure("front", process, said)

    @staticmethod
    def _first_word(conversation: socket.socket) -> bytes:
        """Raises OSError."""
        try:
            return conversation.recv(wire.MAX_MESSAGE)
        except ConnectionResetError:  # it has ended with unread orders, but has sent a record before
            return conversation.recv(wire.MAX_MESSAGE)

    def _hang_up(self) -> None:
        if self._conversation:
            self._conversation.close()

    def tell(self, order: orders.Order, *descriptors: int) -> None:
        """Send an order to the front. If the front has just died, the next one gets the order when it starts."""
        assert self._conversation is not None
        with suppress(OSError):
            socket.send_fds(self._conversation, [orders.dump(order)], descriptors)

    def configure(self, path: Path | None) -> None:
        """Apply the configuration file. Raises ConfigurationError, OSError."""
        with configuration_file.open_file(path) as file:
            content = file.read(configuration_file.LONGEST_FILE + 1) if file else None
        path = path or configuration_file.DEFAULT_PATH
        deadlines = configuration_file.read(io.BytesIO(content or b""), path).deadlines
        self._seconds = 2 * deadlines.operation + deadlines.commit
        self._configuration = orders.Configuration(bytes(path)), content
        if self._process:
            self._tell_configuration()

    def _tell_configuration(self) -> None:
        order, content = self._configuration
        if content is None:
            self.tell(order)
        else:
            self._tell_files(order, content)

    def renew_subordinate_ids(self) -> None:
        """Send the front the files that assign uids to users, if they have changed. Raises OSError."""
        contents = _contents_of(_SUBORDINATE_IDS)
        if contents != self._subordinate_ids:
            self._tell_files(orders.SubordinateIds(), *contents)
            self._subordinate_ids = contents

    def _tell_files(self, order: orders.Order, *contents: bytes) -> None:
        """Send an order to the front, with a file for each of the contents. Raises OSError."""
        with ExitStack() as held:
            files = [held.enter_context(os.fdopen(os.memfd_create("order"), "w+b")) for _ in contents]
            for file, content in zip(files, contents, strict=True):
                file.write(content)
                file.seek(0)
            self.tell(order, *(file.fileno() for file in files))

    def ended(self) -> int | None:
        """Return the exit status, once, and schedule the restart; None if the process still runs."""
        return restarts.ended(self._process, self.pauses)

    def close(self) -> None:
        """Close the socket to the front, upon which it finishes running operations and exits, and wait for that."""
        self._hang_up()
        if self._process:
            restarts.wait_for(self._process, self._seconds + _PATIENCE)


class Plugin:
    """The CSI plugin process. The socket pair between it and the front is kept: records there wait for a new plugin."""

    def __init__(self, csi: Csi, log_format: str) -> None:
        """`log_format` is one of `configuration.LOG_FORMATS`."""
        self._csi = csi
        self._log_format = log_format
        self._front_end, self._own_end = restarts.pair()
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._started_at = 0.0
        self.pauses = Backoff(_LONGEST_PAUSE_OF_PLUGIN)

    @property
    def for_front(self) -> socket.socket:
        return self._front_end

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def started(self) -> orders.PluginStarted:
        assert self._process is not None
        return orders.PluginStarted(self._process.pid, self._starts - 1)

    def start(self) -> None:
        """Raises NotBegun."""
        endpoint, node_id, driver_name, kubelet_directory, _ = self._csi
        arguments = [self._log_format, endpoint, node_id, driver_name, str(kubelet_directory)]
        with self.pauses.starting("CSI plugin"):
            self._process = restarts.start("fusermount3_broker.csi.plugin", self._own_end.fileno(), arguments=arguments)
        self._starts += 1
        self._started_at = time.monotonic()

    def ended(self) -> int | None:
        """Return the exit status, once, and schedule the restart; None if the process still runs."""
        if time.monotonic() - self._started_at > _LONGEST_PAUSE_OF_PLUGIN:
            self.pauses.forget()
        return restarts.ended(self._process, self.pauses)

    def close(self) -> None:
        """Close the sockets, which ends the process, and wait for its end."""
        self._front_end.close()
        self._own_end.close()
        if self._process:
            restarts.wait_for(self._process, _PATIENCE)


def _failure(name: str, process: subprocess.Popen[bytes], said: orders.Order | None) -> NotBegun:
    """End a process that does not serve; return the exception to raise: what it said itself, if it did."""
    failure = restarts.not_begun(name, process)
    if isinstance(said, orders.Failed):
        return NotBegun(said.text.decode("utf-8", "replace"), killed=False)
    return failure


def _contents_of(paths: Sequence[Path]) -> tuple[bytes, ...]:
    """Return the contents of the files; empty for a file that can't be read, or is not a regular file."""
    contents = []
    for path in paths:
        content = b""
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    content = file.read(_LONGEST_OF_ACCOUNTS)
        contents.append(content)
    return tuple(contents)
