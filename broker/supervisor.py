"""``fusermount3-broker serve`` and ``csi``: the process that starts the others, and starts them again if they end.

It makes the sockets, starts the mounter and the front, with ``csi`` the plugin, too, and from then on does nothing but
wait for signals: SIGHUP loads the configuration again; SIGTERM and SIGINT end the broker when what was begun is
finished; SIGCHLD says that one of them has ended. It reads nothing that anybody but the administrator wrote. What must
outlive the others is kept open here: callers wait in the sockets while there is no front, and operations in the
conversation with the mounter while there is none. Mounts outlive them all.
"""

import io
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from systemd import daemon

from broker import config, log, orders, sandbox, sockets
from broker.config import Configuration, ConfigurationError, Socket
from fusermount3_proxy import wire

_SIGNALS = {signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
#: Seconds that a process may take to begin; and to end, after the time that what was begun may take.
_PATIENCE = 30
#: Seconds before a process that has ended is started again.
_PAUSE = 0.05
#: The most seconds before the plugin is, of which callers have no need; and as long as it must have served for the
#: pauses to begin with the shortest again.
_LONGEST_PAUSE = 5.0


class StartError(Exception):
    """The broker can't start, or can't go on; the message says why."""


class Csi(NamedTuple):
    """What the CSI plugin is told on its command line, and where kubelet has its volumes."""

    endpoint: str
    node_id: str
    driver_name: str
    kubelet_directory: Path


def serve(path: Path | None, socket_paths: tuple[Path, ...], csi: Csi | None = None) -> None:
    """Serve until a signal ends it. `path` is the configuration file, `socket_paths` replace the sockets in it.

    With `csi`, volumes are served, too.

    Raises StartError, ConfigurationError.
    """
    configuration = config.load(path)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    write_log = log.open_log()
    try:
        with ExitStack() as held:
            mounter = Mounter(_open_directory(csi.kubelet_directory, held) if csi else None)
            held.callback(mounter.close)
            plugin = Plugin(csi) if csi else None
            if plugin:
                held.callback(plugin.close)
            listening = _listen(configuration, socket_paths, held)
            control = held.enter_context(sockets.listening_for_administrators(configuration.control_socket))
            _prepare_state(configuration.state_directory)
            begin = orders.Begin(bytes(configuration.state_directory), listening.metrics is not None, csi is not None)
            metrics = [listening.metrics] if listening.metrics else []
            volumes = [plugin.for_front] if plugin else []
            front = Front(begin, [*mounter.for_front, control, *metrics, *volumes, *listening.callers])
            held.callback(front.close)
            front.configure(path)
            if plugin:
                plugin.start()
            front.start(mounter, plugin)
            daemon.notify("READY=1")
            if not listening.fusectl_is_kept:
                sockets.keep_fusectl(mounter.fusectl)
            _supervise(path, mounter, front, plugin, write_log)
            daemon.notify("STOPPING=1")
    except (sockets.SocketError, OSError) as error:
        raise StartError(str(error)) from None


def _supervise(
    path: Path | None, mounter: "Mounter", front: "Front", plugin: "Plugin | None", write_log: log.Log
) -> None:
    """Return when a signal says that it is time to end. Raises StartError."""
    while (number := _next_signal(plugin)) in (None, signal.SIGHUP, signal.SIGCHLD):
        if number == signal.SIGHUP:
            _reload(path, front, write_log)
            continue
        if plugin and plugin.is_due:
            plugin.start()
            front.tell(plugin.started)
        if plugin and (status := plugin.ended()) is not None:
            write_log(log.ERROR, f"the CSI plugin has ended with status {status}, another is started")
        if (status := mounter.ended()) is not None:
            write_log(log.ERROR, f"the mounter has ended with status {status}, another is started")
            mounter.restart()
            front.tell(orders.MounterStarted(mounter.pid, mounter.restarts))
        if (status := front.ended()) is not None:
            write_log(log.ERROR, f"the front has ended with status {status}, another is started")
            front.restart(mounter, plugin)


def _next_signal(plugin: "Plugin | None") -> int | None:
    """Return the next signal; None when the plugin is due to be started again before one comes."""
    if plugin is None or plugin.due is None:
        return signal.sigwait(_SIGNALS)
    received = signal.sigtimedwait(_SIGNALS, max(0.0, plugin.due - time.monotonic()))
    return received.si_signo if received else None


def _open_directory(path: Path, held: ExitStack) -> int:
    """Return a descriptor of the directory, which is closed with `held`. Raises OSError."""
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    held.callback(os.close, descriptor)
    return descriptor


def _reload(path: Path | None, front: "Front", write_log: log.Log) -> None:
    """Put the configuration in the file into force; a file with a mistake leaves the old one.

    Sockets, that of the metrics too, `max_requests` and the state directory stay as they were when the broker started.
    """
    daemon.notify("RELOADING=1")
    try:
        front.configure(path)
    except ConfigurationError as error:
        write_log(log.ERROR, f"configuration not loaded, the old one stays in force: {error}")
    daemon.notify("READY=1")


def _listen(configuration: Configuration, paths: tuple[Path, ...], held: ExitStack) -> sockets.Listening:
    """Return the sockets on which callers come and metrics are asked for: those that systemd passed, else those that
    are configured."""
    listening = sockets.inherited()
    if not listening.callers:
        listeners = sockets.Listeners(tuple(Socket(path=each) for each in paths) or configuration.socket)
        held.callback(listeners.close)
        listening.callers = listeners.sockets
    if not listening.metrics and configuration.metrics:
        listening.metrics = held.enter_context(sockets.listening_for_metrics(configuration.metrics))
    return listening


def _prepare_state(directory: Path) -> None:
    """Make the state directory, if it is missing, and have it be the front's, whose uid may be another than before."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = sandbox.user()
    if own is None:
        return
    os.chown(directory, *own)
    for file in directory.iterdir():
        with suppress(OSError):  # what the front may have put there is not its own, but for plain files
            _give(file, *own)


def _give(file: Path, uid: int, gid: int) -> None:
    """Have the file be theirs, if it is a regular file of no other name. Raises OSError."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            os.fchown(descriptor, uid, gid)
    finally:
        os.close(descriptor)


class Mounter:
    """The mounter's process. The sockets that lead to it are kept: a new one takes up what waits there."""

    def __init__(self, kubelet: int | None = None) -> None:
        """Start it; `kubelet` is a descriptor of kubelet's directory, if volumes are served. Raises StartError."""
        self._front_ends, self._own_ends = zip(*(_pair() for _ in ("operations", "orphans")), strict=True)
        self._kubelet = [] if kubelet is None else [kubelet]
        self.restarts = 0
        self._process, self._roots = _start_mounter(self._own_ends, self._kubelet)
        #: For the front: the two ways to the mounter, and the roots of fusectl and of /proc, as descriptors.
        self.for_front = [*(each.fileno() for each in self._front_ends), *self._roots]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def fusectl(self) -> int:
        return self._roots[0]

    def ended(self) -> int | None:
        """Return the status with which it has ended; None if it has not."""
        return self._process.poll()

    def restart(self) -> None:
        """Raises StartError."""
        time.sleep(_PAUSE)
        self.restarts += 1
        self._process, roots = _start_mounter(self._own_ends, self._kubelet)
        for descriptor in roots:  # those of the first one are as good
            os.close(descriptor)

    def close(self) -> None:
        """Hang up, which ends it, and wait for that."""
        for each in self._front_ends + self._own_ends:
            each.close()
        for descriptor in self._roots:
            os.close(descriptor)
        _wait(self._process, _PATIENCE)


def _start_mounter(ends: Sequence[socket.socket], kubelet: Sequence[int]) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a mounter, and return it and the descriptors that it gives when it is ready. Raises StartError."""
    ours, theirs = _pair()
    with ours:
        with theirs:
            process = _start("broker.mounter", *(each.fileno() for each in ends), theirs.fileno(), *kubelet)
        ours.settimeout(_PATIENCE)
        with suppress(OSError):
            _, roots, _, _ = socket.recv_fds(ours, 16, 2)
            if roots:
                return process, roots
        process.kill()
        raise StartError(f"the mounter ended with status {process.wait()} when it was started")


class Front:
    """The front's process. `kept`: what it gets with `begin`, which is the same each time that it is started."""

    def __init__(self, begin: orders.Begin, kept: Sequence[int | socket.socket]) -> None:
        self._begin = begin
        self._kept = kept
        self._process: subprocess.Popen[bytes] | None = None
        self._configuration: tuple[orders.Configuration, bytes | None] = (orders.Configuration(b""), None)
        self._seconds = 0

    def start(self, mounter: Mounter, plugin: "Plugin | None" = None) -> None:
        """Start it, and return when it serves. Raises StartError."""
        self._conversation, theirs = _pair()
        with theirs:
            self._process = _start("broker.daemon", theirs.fileno())
        descriptors = [each if isinstance(each, int) else each.fileno() for each in self._kept]
        self.tell(self._begin, *descriptors)
        self._tell_configuration()
        self.tell(orders.MounterStarted(mounter.pid, mounter.restarts))
        if plugin:
            self.tell(plugin.started)
        self._conversation.settimeout(_PATIENCE)
        try:
            said = orders.load(self._first_word())
        except (OSError, wire.ProtocolError):
            said = orders.Failed(b"the front did not begin")
        if isinstance(said, orders.Failed):
            raise StartError(said.text.decode("utf-8", "replace"))

    def _first_word(self) -> bytes:
        """Raises OSError."""
        try:
            return self._conversation.recv(wire.MAX_MESSAGE)
        except ConnectionResetError:  # it has ended without reading all that it was told, but not without a word
            return self._conversation.recv(wire.MAX_MESSAGE)

    def restart(self, mounter: Mounter, plugin: "Plugin | None" = None) -> None:
        """Start another, with the configuration that is in force. Raises StartError."""
        time.sleep(_PAUSE)
        self._conversation.close()
        self.start(mounter, plugin)

    def tell(self, order: orders.Order, *descriptors: int) -> None:
        """Tell the front; one that has just died is started again, and told then."""
        with suppress(OSError):
            socket.send_fds(self._conversation, [orders.dump(order)], descriptors)

    def configure(self, path: Path | None) -> None:
        """Put the configuration in the file into force. Raises ConfigurationError."""
        with config.open_file(path) as file:
            content = file.read() if file else None
        path = path or config.DEFAULT_PATH
        deadlines = config.read(io.BytesIO(content or b""), path).deadlines
        self._seconds = 2 * deadlines.operation + deadlines.commit
        self._configuration = orders.Configuration(bytes(path)), content
        if self._process:
            self._tell_configuration()

    def _tell_configuration(self) -> None:
        order, content = self._configuration
        if content is None:
            self.tell(order)
            return
        with os.fdopen(os.memfd_create("configuration"), "w+b") as file:
            file.write(content)
            file.seek(0)
            self.tell(order, file.fileno())

    def ended(self) -> int | None:
        """Return the status with which it has ended; None if it has not."""
        return self._process.poll() if self._process else None

    def close(self) -> None:
        """Hang up, which ends it when what was begun is finished, and wait for that."""
        if self._process:
            self._conversation.close()
            _wait(self._process, self._seconds + _PATIENCE)


class Plugin:
    """The CSI plugin's process. The way between it and the front is kept: what waits there waits for a new one, too."""

    def __init__(self, csi: Csi) -> None:
        self._csi = csi
        self._front_end, self._own_end = _pair()
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._started_at = 0.0
        self._pause = 0.0
        #: When it is to be started again, by the monotonic clock; None as long as it runs.
        self.due: float | None = None

    @property
    def for_front(self) -> socket.socket:
        return self._front_end

    @property
    def started(self) -> orders.PluginStarted:
        assert self._process is not None
        return orders.PluginStarted(self._process.pid, self._starts - 1)

    @property
    def is_due(self) -> bool:
        return self.due is not None and self.due <= time.monotonic()

    def start(self) -> None:
        """Raises OSError."""
        self.due = None
        self._starts += 1
        self._started_at = time.monotonic()
        endpoint, node_id, driver_name, kubelet_directory = self._csi
        arguments = [endpoint, node_id, driver_name, str(kubelet_directory)]
        self._process = _start("broker.csi.plugin", self._own_end.fileno(), arguments=arguments)

    def ended(self) -> int | None:
        """Return the status with which it has ended, once, and have it be due; None if it has not."""
        status = self._process.poll() if self._process and self.due is None else None
        if status is not None:
            now = time.monotonic()
            is_new = now - self._started_at > _LONGEST_PAUSE
            self._pause = _PAUSE if is_new or not self._pause else min(2 * self._pause, _LONGEST_PAUSE)
            self.due = now + self._pause
        return status

    def close(self) -> None:
        """Hang up, which ends it, and wait for that."""
        self._front_end.close()
        self._own_end.close()
        if self._process:
            _wait(self._process, _PATIENCE)


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _start(module: str, *descriptors: int, arguments: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a Python process of the broker's, which takes these descriptors and arguments. Raises OSError."""
    numbers = [str(each) for each in descriptors]
    return subprocess.Popen(
        [sys.executable, "-I", "-m", module, *numbers, *arguments],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until it has ended, and see to it that it does."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
