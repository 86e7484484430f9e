"""``fusermount3-broker serve`` and ``csi``: the process that starts the others, and restarts them if they end.

The supervisor makes the sockets, starts the mounter and the front, with ``csi`` also the plugin, and from then on only
waits for signals: SIGHUP reloads the configuration; SIGTERM and SIGINT end the broker when running operations have
finished; SIGCHLD reports that a process has ended, which the supervisor then tries to restart until it succeeds. It
reads only input from the administrator; it passes on the files that assign uids to users without parsing them. It keeps
the descriptors open that must outlive the other processes: callers wait in the listening sockets while there is no
front, and operations wait in the sockets to the mounter while there is no mounter. Mounts outlive all processes.
"""

import errno
import os
import resource
import signal
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from systemd import daemon

from fusermount3_broker.kernel import error_texts, features
from fusermount3_broker.messages import supervisor as orders
from fusermount3_broker.messages.csi_settings import Csi
from fusermount3_broker.service import configuration_file, listening_sockets, log, sandbox, state_directory
from fusermount3_broker.service.configuration import Configuration, Socket
from fusermount3_broker.service.configuration_file import ConfigurationError
from fusermount3_broker.supervisor import orphans, privilege
from fusermount3_broker.supervisor.processes import Front, LaunchedFront, Mounter, Plugin
from fusermount3_broker.supervisor.restarts import Backoff, NotBegun

_SIGNALS = {signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
#: Seconds between checks whether a user has been assigned uids.
_LOOK_AGAIN = 60.0
#: Seconds in which another broker with the same state directory has to end, and between looks whether it has.
_OTHER_ENDS_IN = 10.0
_LOOK_FOR_OTHER = 0.1
_NO_LOCKS = (
    "the host allows the broker no user namespace, so it can't lock nosuid and nodev: it serves no volumes, and a bind"
    " mount of another mount can clear these flags"
)


class StartError(Exception):
    """The broker can't start; the message says why."""


class UnsupportedKernel(StartError):
    """The broker can't start before this machine boots another kernel."""


def serve(
    path: Path | None, socket_paths: tuple[Path, ...], log_format: str | None = None, csi: Csi | None = None
) -> None:
    """Serve until a signal ends the broker. `path` is the configuration file; `socket_paths` replace the sockets in it,
    and `log_format` (`configuration.LOG_FORMATS`) replaces its key. With `csi`, also serve volumes.

    Raises StartError, UnsupportedKernel if it is the kernel, ConfigurationError.
    """
    if problem := features.too_old():
        raise UnsupportedKernel(problem)
    if problem := privilege.problem(front_has_account=sandbox.user() is not None):
        raise StartError(problem)
    path = path.absolute() if path else None  # callers see it, and have other working directories
    configuration = configuration_file.load(path)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    log_format = log_format or configuration.log_format
    write_log = log.open_log(log_format)
    try:
        with ExitStack() as held:
            if not _becomes_only_broker(configuration.state_directory, held, write_log):
                return
            orphans.adopt()
            _raise_descriptor_limit()
            kubelet = _open_directory(csi.kubelet_directory, held) if csi else None
            launched = LaunchedFront()
            held.callback(launched.close)
            mounter = Mounter(kubelet, configuration.max_requests)
            held.callback(mounter.close)
            if not _begins(mounter.start, mounter.pauses, write_log):
                return
            if not mounter.locks_flags:
                write_log(log.WARNING, _NO_LOCKS)
            plugin = Plugin(csi, log_format) if csi else None
            if plugin:
                held.callback(plugin.close)
            listening = _listen(configuration, socket_paths, held)
            control = held.enter_context(listening_sockets.listening_for_administrators(configuration.control_socket))
            _prepare_state(configuration.state_directory, write_log)
            begin = orders.Begin(
                state_directory=bytes(configuration.state_directory),
                log_format=log_format.encode(),
                metrics=listening.metrics is not None,
                volumes=csi is not None,
                keeps_fusectl=listening_sockets.systemd_keeps_descriptors(),
                mount_namespaces=csi.mount_namespaces.encode() if csi else b"",
            )
            metrics = [listening.metrics] if listening.metrics else []
            volumes = [plugin.for_front] if plugin else []
            front = Front(begin, [*mounter.for_front, control, *metrics, *volumes, *listening.callers], launched)
            held.callback(front.close)
            front.configure(path)
            if plugin:
                plugin.start()
            if not _begins(lambda: front.start(mounter, plugin), front.pauses, write_log):
                return
            daemon.notify("READY=1")
            if not listening.fusectl_is_kept:
                listening_sockets.keep_fusectl(mounter.fusectl)
            _supervise(path, mounter, front, plugin, write_log)
            daemon.notify("STOPPING=1")
    except (listening_sockets.SocketError, NotBegun, OSError) as error:
        raise StartError(error_texts.of(error)) from None


def _becomes_only_broker(directory: Path, held: ExitStack, write_log: log.Log) -> bool:
    """Lock the state directory, with `held`, and wait for another broker that has it; False if a signal ends this.

    Of two brokers, the older one could replace the sockets of volumes that the newer one already serves, and change the
    tables that the newer one has read. Their own sockets don't show each other where each container of the broker has a
    /run of its own. Raises StartError if the other one does not end, OSError if the directory can't be made.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    held.callback(os.close, descriptor)
    give_up = time.monotonic() + _OTHER_ENDS_IN
    waits = False
    while True:
        try:
            if state_directory.lock(descriptor):
                return True
        except OSError as error:
            write_log(log.WARNING, f"'{directory}' can't be locked, so do not start two brokers: {error.strerror}")
            return True
        if time.monotonic() > give_up:
            raise StartError(f"another broker uses '{directory}', and has not ended in {_OTHER_ENDS_IN:g} seconds")
        if not waits:
            write_log(log.WARNING, f"another broker uses '{directory}', this one waits until it has ended")
            waits = True
        if signal.sigtimedwait((signal.SIGTERM, signal.SIGINT), _LOOK_FOR_OTHER):
            return False


def _begins(start: Callable[[], None], pauses: Backoff, write_log: log.Log) -> bool:
    """Start a process at the broker's own start, and restart it if it is killed meanwhile; False if a signal ends this.

    Raises StartError if the process can't start.
    """
    while True:
        try:
            start()
            return True
        except NotBegun as error:
            if not error.killed:
                raise StartError(str(error)) from None
            write_log(log.ERROR, f"{error}, another is started")
        if signal.sigtimedwait((signal.SIGTERM, signal.SIGINT), pauses.seconds_left()):
            return False


def _supervise(path: Path | None, mounter: Mounter, front: Front, plugin: Plugin | None, write_log: log.Log) -> None:
    """Supervise the processes until a signal ends the broker."""
    all_pauses = [each.pauses for each in (mounter, front, plugin) if each]
    while (number := _next_signal(all_pauses)) in (None, signal.SIGHUP, signal.SIGCHLD):
        if number == signal.SIGHUP:
            _reload(path, front, write_log)
            continue
        with suppress(OSError):  # no memory, for example: the next round tries again
            front.renew_subordinate_ids()
        for part, name in ((plugin, "CSI plugin"), (mounter, "mounter"), (front, "front")):
            if part and (status := part.ended()) is not None:
                write_log(log.ERROR, f"the {name} has ended with status {status}, another is started")
        try:
            if plugin and plugin.pauses.are_over:
                plugin.start()
                front.tell(plugin.started)
            if mounter.pauses.are_over:
                mounter.restart(_pids(mounter, front, plugin))
                front.tell(mounter.started)
            if front.pauses.are_over:
                with suppress(OSError):  # the next front reports the reason
                    _prepare_state(front.state_directory, write_log)
                front.restart(mounter, plugin)
        except NotBegun as error:
            write_log(log.ERROR, f"{error}, another is started")
        orphans.reap(_pids(mounter, front, plugin))


def _pids(*started: Mounter | Front | Plugin | None) -> set[int]:
    """Return the pids of the processes that the supervisor has started itself."""
    return {each.pid for each in started if each}


def _raise_descriptor_limit() -> None:
    """Raise the descriptor limit to the maximum, also for the other processes: the mounter has some for each child."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _next_signal(all_pauses: Sequence[Backoff]) -> int | None:
    """Return the next signal; None if it is time to check for new uids, or to start a process, before one arrives."""
    left = [pauses.seconds_left() for pauses in all_pauses if pauses.due is not None]
    received = signal.sigtimedwait(_SIGNALS, min([_LOOK_AGAIN, *left]))
    return received.si_signo if received else None


def _open_directory(path: Path, held: ExitStack) -> int:
    """Return a descriptor of the directory, to be closed with `held`. Raises OSError."""
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    held.callback(os.close, descriptor)
    return descriptor


def _reload(path: Path | None, front: Front, write_log: log.Log) -> None:
    """Apply the configuration file; if it is invalid, keep the old configuration.

    Sockets, including the metrics socket, `max_requests` and the state directory stay as at the broker's start.
    """
    daemon.notify("RELOADING=1")
    try:
        front.configure(path)
    except (ConfigurationError, OSError) as error:
        write_log(log.ERROR, f"configuration not loaded, the old one stays in force: {error_texts.of(error)}")
    daemon.notify("READY=1")


def _listen(configuration: Configuration, paths: tuple[Path, ...], held: ExitStack) -> listening_sockets.Listening:
    """Return the listening sockets for callers and metrics: those passed by systemd, else the configured ones."""
    listening = listening_sockets.inherited()
    if not listening.callers:
        listeners = listening_sockets.Listeners(tuple(Socket(path=each) for each in paths) or configuration.socket)
        held.callback(listeners.close)
        listening.callers = listeners.sockets
    if not listening.metrics and configuration.metrics:
        listening.metrics = held.enter_context(listening_sockets.listening_for_metrics(configuration.metrics))
    return listening


def _prepare_state(directory: Path, write_log: log.Log) -> None:
    """Make the state directory if it is missing, and give it to the front, whose uid may have changed.

    Put aside files that the front could neither read nor put aside. Raises OSError.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = sandbox.user()
    for table in state_directory.TABLES:
        if problem := state_directory.put_aside_what_is_no_table(directory / state_directory.file_of(table)):
            write_log(log.ERROR, f"a file in place of a table was moved aside: {problem}")
    if own is None:
        return
    try:
        os.chown(directory, *own)
    except OSError as error:
        if error.errno != errno.EROFS:  # on EROFS it stays unchanged, and the front reports what it can't write
            raise
    for file in directory.iterdir():
        with suppress(OSError):  # of the files that the front may have put there, it gets back only regular ones
            _give(file, *own)


def _give(file: Path, uid: int, gid: int) -> None:
    """Change the owner of a file, if it is a regular file without other hard links. Raises OSError."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            os.fchown(descriptor, uid, gid)
    finally:
        os.close(descriptor)
