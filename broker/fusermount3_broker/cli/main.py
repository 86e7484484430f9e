"""``fusermount3-broker``: the commands an administrator types.

A running broker's answers may come from an attacker who controls its front, or quote callers. They are printed by
`_say`, `_Failure`, or as cells that are `visible`, and in no other way.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusermount3_broker.cli import completion, control_client, formatting, options, rates, request_ids
from fusermount3_broker.injection.cdi import DEFAULT_PROXY
from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_broker.service import configuration, configuration_file
from fusermount3_proxy import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from fusermount3_broker.messages.csi_settings import Csi

#: The driver's name in Kubernetes, unless it takes another's place.
DRIVER_NAME = "csi.fusermount3-proxy.dev"

_PROXY = click.option(
    "--proxy",
    type=click.Path(path_type=Path),
    default=DEFAULT_PROXY,
    show_default=True,
    help="The static executable on the host.",
)


class _Failure(click.ClickException):
    """The command fails, with a line for each message; they may quote untrusted text."""

    def __init__(self, *messages: str) -> None:
        super().__init__("; ".join(messages))
        self._messages = messages

    def format_message(self) -> str:
        return "\n".join(map(visible, self._messages))


class _Unavailable(_Failure):
    """The service is not restarted for this status (sysexits.h)."""

    exit_code = os.EX_UNAVAILABLE


def _say(text: str) -> None:
    """Print a line, which may quote untrusted text."""
    click.echo(visible(text))


def _say_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))  # in ASCII, with all other characters escaped


@contextmanager
def _understanding() -> Iterator[None]:
    """Fail if the broker's answer does not have the expected structure."""
    try:
        yield
    except control_client.MALFORMED:
        raise _Failure("the broker's answer is malformed") from None


class _Group(click.Group):
    """Commands, each summarized by the first sentence of its help; click would cut that to the rest of a line."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        if cmd.help and not cmd.short_help:
            cmd.short_help = re.split(r"(?<=\.)\s", re.sub(r"\s+", " ", cmd.help.strip()))[0]
        super().add_command(cmd, name)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Mount FUSE filesystems for containers that must not mount by themselves."""
    # gRPC reads this when it is imported, here or in a plugin's process. Its messages are not records of the log.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


@main.command()
@options.CONFIG
@options.SOCKETS
@options.LOG_FORMAT
def serve(config_path: Path | None, socket_paths: tuple[Path, ...], log_format: str | None) -> None:
    """Run the broker, in the foreground."""
    _serve(config_path, socket_paths, log_format)


@main.command()
@click.option("--endpoint", required=True, metavar="unix://PATH", help="The socket on which kubelet calls the plugin.")
@click.option("--node-id", required=True, metavar="NAME", help="The name of this node.")
@click.option("--driver-name", default=DRIVER_NAME, show_default=True, metavar="NAME", help="The name of the driver.")
@click.option(
    "--kubelet-dir",
    default=Path("/var/lib/kubelet"),
    show_default=True,
    type=click.Path(path_type=Path),
    help="kubelet's directory with the volumes of pods.",
)
@click.option(
    "--mount-namespaces",
    default="fuse-mounts",
    show_default=True,
    metavar="NAMES",
    help="The namespaces whose pods may offer their filesystems to all pods, separated by commas.",
)
@options.CONFIG
@options.SOCKETS
@options.LOG_FORMAT
def csi(
    endpoint: str,
    node_id: str,
    driver_name: str,
    kubelet_dir: Path,
    mount_namespaces: str,
    config_path: Path | None,
    socket_paths: tuple[Path, ...],
    log_format: str | None,
) -> None:
    """Run the broker as `serve` does, and the CSI node plugin, which publishes volumes for kubelet."""
    from fusermount3_broker.messages import csi_settings

    try:
        csi_settings.check(endpoint, node_id, driver_name, str(kubelet_dir))
        csi_settings.check_mount_namespaces(mount_namespaces)
    except csi_settings.SettingsError as error:
        raise _Failure(str(error)) from None
    settings = csi_settings.Csi(endpoint, node_id, driver_name, kubelet_dir, mount_namespaces)
    _serve(config_path, socket_paths, log_format, settings)


def _serve(
    config_path: Path | None, socket_paths: tuple[Path, ...], log_format: str | None, csi: "Csi | None" = None
) -> None:
    from fusermount3_broker.supervisor import daemon

    try:
        daemon.serve(config_path, socket_paths, log_format, csi)
    except daemon.UnsupportedKernel as error:
        raise _Unavailable(str(error)) from None
    except configuration_file.ConfigurationError as error:
        raise _Failure(*error.args) from None
    except daemon.StartError as error:
        raise _Failure(str(error)) from None


@main.command("check-config")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--reload", "reloads", is_flag=True, help="Check only whether a running broker would load it.")
@click.option("--pid", type=int, help="Check the file that the broker with this process ID was started with.")
def check_config(file: Path | None, reloads: bool, pid: int | None) -> None:
    """Check whether `serve` could start with FILE, and report all mistakes with their lines.

    FILE is /etc/fusermount3-broker.toml if none is given.
    """
    if pid is not None:
        if file:
            raise click.UsageError("--pid says which file to check; it can't be combined with FILE")
        file = _file_of(pid)
    notes: Iterable[str] = ()
    if reloads:
        _load(file)
    else:
        from fusermount3_broker.service import start_checks

        notes = start_checks.notes(_load(file, start_checks.mistakes))
    file = file or configuration_file.DEFAULT_PATH
    _say(f"{file}: good" if os.path.exists(file) else f"{file} does not exist: the defaults apply")
    for note in notes:
        _say(f"{file}: note: {note}")


def _file_of(pid: int) -> Path | None:
    """Return the configuration file that the command line of a running broker names; None if it names none."""
    from fusermount3_broker.cli import running_broker

    try:
        return running_broker.option(pid, {"serve": serve, "csi": csi}, "config_path")
    except running_broker.NoBroker as error:
        raise _Failure(str(error)) from None


@main.command()
@options.CONFIG
@options.JSON
def status(config_path: Path | None, as_json: bool) -> None:
    """Show the state of the running broker."""
    answer = _ask(config_path, "status")
    with _understanding():
        _say_json(answer) if as_json else _print_status(answer)


def _print_status(answer: dict[str, Any]) -> None:
    _say(f"version        {answer['version']}")
    _say(f"configuration  {answer['configuration']}")
    _say(f"kernel         {answer['kernel']['release']}")
    for each in answer["kernel"]["lacks"]:
        _say(f"lacks          {each['name']} (Linux {each['since']}): {each['otherwise']}")
    _say(f"up             {formatting.duration(answer['uptime_seconds'])}")
    _say(f"mounts         {', '.join(f'{count} {state}' for state, count in answer['mount_states'].items())}")
    if "plugin" in answer:
        sources, borrowers = answer.get("sources", 0), answer.get("borrowers", 0)
        of_all = f"volumes        {answer['volumes']} published"
        _say(f"{of_all}, {sources} of mount pods, {borrowers} by mount pods" if sources or borrowers else of_all)
    for whose, addresses in answer.get("sockets", {}).items():
        for address in addresses:
            _say(f"socket         {address}, for {whose}")
    for state in answer.get("tables", {}).values():
        if state != "ok":
            _say(f"table          {state}")
    for name in ("supervisor", "front", "mounter", "plugin"):
        process = answer.get(name)
        if process is None:
            continue
        _say(f"{name:14} pid {process['pid']}, {formatting.mebibytes(process['rss_bytes'])}")
    _say(f"descriptors    {answer['front']['open_descriptors']} of the front")
    _say(f"restarts       {answer['mounter']['restarts']} of the mounter")
    if "plugin" in answer:
        _say(f"               {answer['plugin']['restarts']} of the plugin")
    _say(f"children       {', '.join(f'{count} {state}' for state, count in answer['children'].items())}")
    for result, count in sorted(answer["requests"].items()):
        _say(f"{result + ':':24} {count}")
    for operation, histogram in sorted(answer["latency"].items()):
        p50, p99 = (formatting.latency(rates.quantile(histogram["buckets"], part)) for part in (0.5, 0.99))
        _say(f"{operation + ' takes:':24} p50 {p50}, p99 {p99}")
    for limit, count in sorted(answer["limits_hit"].items()):
        _say(f"{limit + ' hit:':24} {count}")


@main.command()
@options.CONFIG
def health(config_path: Path | None) -> None:
    """Check whether the running broker can serve a caller now; exit with status 1 if not."""
    answer = _ask(config_path, "health")
    with _understanding():
        problem, warning = str(answer["problem"]), str(answer.get("warning", ""))
    if problem:
        raise _Failure(problem)
    _say(f"ok, but {warning}" if warning else "ok")


@main.command()
@options.CONFIG
@click.option("--once", is_flag=True, help="Print one sample and exit, as if the output is not a terminal.")
def top(config_path: Path | None, once: bool) -> None:
    """Show the running broker's mounts, rates and latencies each second, until q is pressed."""
    from fusermount3_broker.cli import mounts as of_mounts
    from fusermount3_broker.cli import top as display
    from fusermount3_broker.cli.container_names import RememberedNames

    at = _load(config_path).control_socket
    console, names = _console(), RememberedNames()

    def ask() -> display.Sample:
        return display.Sample(control_client.ask(at, "status"), of_mounts.ask(at, names))

    try:
        with _understanding():
            (display.once if once or not console.is_terminal else display.live)(ask, console)
    except control_client.NotRunning as error:
        raise _Failure(str(error)) from None


@main.command()
@options.CONFIG
@options.JSON
@click.option("--dead", is_flag=True, help="List only dead mounts; with --hung, these and hung ones.")
@click.option("--hung", is_flag=True, help="List only hung mounts; with --dead, these and dead ones.")
@click.option(
    "--container",
    default="",
    metavar="NAME|ID",
    shell_complete=completion.containers,
    help="List only mounts of the container or pod with this name, or with an ID or UID that begins so.",
)
@click.option("--watch", is_flag=True, help="Show the table each second, until q is pressed.")
def mounts(config_path: Path | None, as_json: bool, dead: bool, hung: bool, container: str, watch: bool) -> None:
    """List the filesystems mounted through the running broker.

    STATE is live; dead, when no process serves the filesystem any more; or hung, when requests wait for its program and
    their number has not moved for some time, see hung_seconds in the configuration. PID and COMMAND are those of the
    FUSE program, once the broker has seen it serve: usually after a second. CONTAINER is its name if Podman, Docker or
    kubelet has one for it on this host, else the beginning of its ID. PODS, shown where pods share the filesystem of a
    mount pod, are those that have it.
    """
    from fusermount3_broker.cli import live_display, mounts_table
    from fusermount3_broker.cli import mounts as of_mounts
    from fusermount3_broker.cli.container_names import RememberedNames

    at = _load(config_path).control_socket
    states = {state for state, is_wanted in (("dead", dead), ("hung", hung)) if is_wanted}
    console, names = _console(), RememberedNames()
    if watch and as_json:
        raise click.UsageError("--watch shows a table; it can't be combined with --json")
    if watch and not console.is_terminal:
        raise click.UsageError("--watch needs a terminal")

    def ask() -> list[dict[str, Any]]:
        return of_mounts.wanted(of_mounts.ask(at, names), states, container)

    try:
        with _understanding():
            if watch:
                live_display.show(
                    ask, lambda now, _, height: mounts_table.MountsTable(now, max(1, height - 2)), console
                )
                return
            found = ask()
            if as_json:
                _say_json(found)
            elif console.is_terminal:
                console.print(mounts_table.MountsTable(found))
            else:
                click.echo("\n".join(mounts_table.lines(found)))
    except control_client.NotRunning as error:
        raise _Failure(str(error)) from None


@main.command()
@options.CONFIG
@click.argument("ids", metavar="ID...", nargs=-1, required=True, shell_complete=completion.request_ids)
def abort(config_path: Path | None, ids: tuple[str, ...]) -> None:
    """Abort the FUSE connections of the mounts with these request IDs, which `mounts` shows.

    The beginning of an ID is enough if it has at least 4 digits and no other ID begins so. If one of the IDs is unknown
    or ambiguous, nothing is aborted.

    Processes that wait for their FUSE programs get an error, and data that was not written back is lost. Then the
    mounts are dead, and the broker removes them like all dead mounts.
    """
    try:
        request_ids.check(ids)
        with _understanding():
            known = {each for mount in _ask(config_path, "mounts") if request_ids.is_id(each := mount["request_id"])}
        found = request_ids.resolve(ids, known)
    except request_ids.InvalidIds as error:
        raise _Failure(*error.args) from None
    failed = False
    for id in found:
        answer = _ask(config_path, f"abort {id}")
        with _understanding():
            if "error" in answer:
                _Failure(str(answer["error"])).show()
                failed = True
            else:
                _say(f"aborted {answer['request_id']}: {answer['mountpoint'] or answer['volume']}, {answer['type']}")
    if failed:
        raise click.exceptions.Exit(1)


@main.command("device-plugin")
@click.option(
    "--kubelet-dir",
    type=click.Path(path_type=Path),
    default=Path("/var/lib/kubelet"),
    show_default=True,
    help="kubelet's directory, with device-plugins/ in it.",
)
@click.option("--resource", default="fusermount3-proxy.dev/fuse", show_default=True, help="What pods ask for.")
@click.option(
    "--count",
    type=click.IntRange(min=1, max=100_000),
    default=1000,
    show_default=True,
    help="How many containers of the node may have it at the same time.",
)
@click.option("--cdi", "by_cdi", is_flag=True, help="Tell kubelet (1.29 or later) only the name of the CDI device.")
@_PROXY
@options.BROKER_SOCKET
@options.DEVICE_NODE
@click.option(
    "--log-format",
    type=click.Choice(configuration.LOG_FORMATS),
    default="auto",
    show_default=True,
    help="Write the log as lines of text for people, or of JSON; auto: text on a terminal, else JSON.",
)
def device_plugin(
    kubelet_dir: Path,
    resource: str,
    count: int,
    by_cdi: bool,
    proxy: Path,
    socket: Path,
    device_node: bool,
    log_format: str,
) -> None:
    """Run kubelet's device plugin, in the foreground: it gives the proxy and the socket to containers that ask for it.

    A container asks by `resources: {limits: {fusermount3-proxy.dev/fuse: 1}}`. The paths are those of the node. With
    --cdi, the node's container runtime must know the device, see `cdi generate`.
    """
    from fusermount3_broker.injection import device_plugin as plugin
    from fusermount3_broker.service import grpc_server

    try:
        settings = plugin.settings(
            kubelet_dir / "device-plugins", resource, count, proxy, socket, device_node=device_node, by_cdi=by_cdi
        )
    except plugin.PluginError as error:
        raise _Failure(str(error)) from None

    def serve() -> int:
        try:
            plugin.serve(settings, log_format)
        except plugin.PluginError as error:
            _Failure(str(error)).show()
            return 1
        return 0

    grpc_server.run(serve)


@main.group(cls=_Group)
def cdi() -> None:
    """Have container engines give containers the proxy and the socket (Container Device Interface)."""


@cdi.command()
@click.option("--output", type=click.Path(path_type=Path), help="Write the file, for example /etc/cdi/NAME.json.")
@_PROXY
@options.BROKER_SOCKET
@options.DEVICE_NODE
def generate(output: Path | None, proxy: Path, socket: Path, device_node: bool) -> None:
    """Print the specification of the device fusermount3-proxy.dev/fuse=on.

    With such a file in /etc/cdi, `podman run --device fusermount3-proxy.dev/fuse=on IMAGE` lets FUSE programs of any
    image mount through the broker.
    """
    from fusermount3_broker.cli import specification_file
    from fusermount3_broker.injection import cdi
    from fusermount3_broker.kernel import error_texts

    try:
        text = cdi.specification_for(proxy, socket, device_node=device_node)
        if output is None:
            click.echo(text, nl=False)
        else:
            specification_file.write(output, text)
    except (cdi.InjectionError, OSError) as error:
        raise _Failure(error_texts.of(error)) from None
    if specification_file.is_missing(proxy):
        warning = f"there is no {proxy} on this host, so no container can be started with the device: "
        hint = "install the package fusermount3-proxy-static, or give the path with --proxy"
        click.echo(visible(f"Warning: {warning}{hint}"), err=True)


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 100_000  # a program reads lines, not a screen
    return console


def _load(path: Path | None, check: configuration_file.Check | None = None) -> configuration.Configuration:
    try:
        return configuration_file.load(path, check)
    except configuration_file.ConfigurationError as error:
        raise _Failure(*error.args) from None


def _ask(config_path: Path | None, command: str) -> Any:
    try:
        return control_client.ask(_load(config_path).control_socket, command)
    except control_client.NotRunning as error:
        raise _Failure(str(error)) from None
