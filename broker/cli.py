"""``fusermount3-broker``: the commands an administrator types."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from broker import config, figures, injection, terminal
from fusermount3_proxy import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from broker.supervisor import Csi

#: Under which Kubernetes knows the driver, unless it takes another's place.
DRIVER_NAME = "csi.fusermount3-proxy.dev"

_CONFIG = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help=f"Configuration file; default {config.DEFAULT_PATH}, if it exists.",
)
_SOCKETS = click.option(
    "--socket",
    "socket_paths",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Listen here instead of where the configuration says; may be repeated.",
)
_PROXY = click.option(
    "--proxy",
    type=click.Path(path_type=Path),
    default=injection.DEFAULT_PROXY,
    show_default=True,
    help="The static executable on the host.",
)
_BROKER_SOCKET = click.option(
    "--socket",
    type=click.Path(path_type=Path),
    default=config.Socket.path,
    show_default=True,
    help="The broker's socket on the host; containers see the directory it is in.",
)
_DEVICE_NODE = click.option(
    "--device-node",
    is_flag=True,
    help="Give containers the real /dev/fuse, which clone_fd needs, and not a stand-in that can only be opened.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Mount FUSE filesystems for containers that may not."""
    # Read where gRPC is imported, here or in a plugin's process. What it notes is no record of the log.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


@main.command()
@_CONFIG
@_SOCKETS
def serve(config_path: Path | None, socket_paths: tuple[Path, ...]) -> None:
    """Run the broker, in the foreground."""
    _serve(config_path, socket_paths)


@main.command()
@click.option("--endpoint", required=True, metavar="unix://PATH", help="Where kubelet asks for volumes.")
@click.option("--node-id", required=True, metavar="NAME", help="The name of this node.")
@click.option("--driver-name", default=DRIVER_NAME, show_default=True, metavar="NAME", help="The name of the driver.")
@click.option(
    "--kubelet-dir",
    default=Path("/var/lib/kubelet"),
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where kubelet has the volumes of pods.",
)
@_CONFIG
@_SOCKETS
def csi(
    endpoint: str,
    node_id: str,
    driver_name: str,
    kubelet_dir: Path,
    config_path: Path | None,
    socket_paths: tuple[Path, ...],
) -> None:
    """Run the broker as `serve` does, and the CSI node plugin, by which kubelet has volumes published for its pods."""
    from broker import supervisor
    from broker.csi import settings

    try:
        settings.check(endpoint, node_id, driver_name, str(kubelet_dir))
    except settings.SettingsError as error:
        raise click.ClickException(str(error)) from None
    _serve(config_path, socket_paths, supervisor.Csi(endpoint, node_id, driver_name, kubelet_dir))


def _serve(config_path: Path | None, socket_paths: tuple[Path, ...], csi: "Csi | None" = None) -> None:
    from broker import supervisor

    try:
        supervisor.serve(config_path, socket_paths, csi)
    except (supervisor.StartError, config.ConfigurationError) as error:
        raise click.ClickException(str(error)) from None


@main.command("check-config")
@click.argument("file", type=click.Path(path_type=Path), default=config.DEFAULT_PATH)
def check_config(file: Path) -> None:
    """Say whether FILE is a configuration that `serve` would take."""
    _load(file)
    click.echo(f"{file}: good")


@main.command()
@_CONFIG
@_JSON
def status(config_path: Path | None, as_json: bool) -> None:
    """Say how the running broker is."""
    answer = _ask(config_path, "status")
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    click.echo(f"version        {answer['version']}")
    click.echo(f"configuration  {answer['configuration']}")
    click.echo(f"up             {terminal.duration(answer['uptime_seconds'])}")
    click.echo(f"mounts         {', '.join(f'{count} {state}' for state, count in answer['mount_states'].items())}")
    if "plugin" in answer:
        click.echo(f"volumes        {answer['volumes']} published")
    for name in ("supervisor", "front", "mounter", "plugin"):
        process = answer.get(name)
        if process is None:
            continue
        click.echo(f"{name:14} pid {process['pid']}, {terminal.mebibytes(process['rss_bytes'])}")
    click.echo(f"descriptors    {answer['front']['open_descriptors']} of the front")
    click.echo(f"restarts       {answer['mounter']['restarts']} of the mounter")
    if "plugin" in answer:
        click.echo(f"               {answer['plugin']['restarts']} of the plugin")
    for result, count in sorted(answer["requests"].items()):
        click.echo(f"{result + ':':24} {count}")
    for operation, histogram in sorted(answer["latency"].items()):
        p50, p99 = (terminal.latency(figures.quantile(histogram["buckets"], part)) for part in (0.5, 0.99))
        click.echo(f"{operation + ' takes:':24} p50 {p50}, p99 {p99}")
    for limit, count in sorted(answer["limits_hit"].items()):
        click.echo(f"{limit + ' hit:':24} {count}")


@main.command()
@_CONFIG
def health(config_path: Path | None) -> None:
    """Say whether the running broker could serve a caller now; end with status 1 if it could not."""
    problem = _ask(config_path, "health")["problem"]
    if problem:
        raise click.ClickException(problem)
    click.echo("ok")


@main.command()
@_CONFIG
@click.option("--once", is_flag=True, help="Print one look and end; so it is where the output is no terminal.")
def top(config_path: Path | None, once: bool) -> None:
    """Show mounts, rates and latencies of the running broker each second, until q is pressed."""
    from broker import control
    from broker import top as display

    at = _load(config_path).control_socket
    console = _console()

    def ask() -> display.Look:
        return display.Look(control.ask(at, "status"), control.ask(at, "mounts"))

    try:
        (display.once if once or not console.is_terminal else display.live)(ask, console)
    except control.NotRunning as error:
        raise click.ClickException(str(error)) from None


@main.command()
@_CONFIG
@_JSON
def mounts(config_path: Path | None, as_json: bool) -> None:
    """List the filesystems that are mounted through the running broker.

    STATE is live; dead, when no process serves the filesystem any more; or hung, when requests wait for its program and
    their number has not moved for some time, see hung_seconds in the configuration.
    """
    answer = _ask(config_path, "mounts")
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    _print_table(answer)


@main.command()
@_CONFIG
@click.argument("id")
def abort(config_path: Path | None, id: str) -> None:  # what it is called in the help
    """End the filesystem of the mount ID, as REQUEST in `mounts` shows it; its beginning will do.

    Its FUSE program is cut off: whoever waits for an answer gets an error, and what was not written back is lost. The
    mount is dead then, and removed as all dead mounts are.
    """
    answer = _ask(config_path, f"abort {id}")
    if "error" in answer:
        raise click.ClickException(answer["error"])
    click.echo(terminal.visible(f"aborted {answer['request']}: {answer['mountpoint']}, {answer['type']}"))


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
@click.option("--cdi", "by_cdi", is_flag=True, help="Tell kubelet (1.28 or later) only the name of the CDI device.")
@_PROXY
@_BROKER_SOCKET
@_DEVICE_NODE
def device_plugin(
    kubelet_dir: Path, resource: str, count: int, by_cdi: bool, proxy: Path, socket: Path, device_node: bool
) -> None:
    """Have kubelet give what it needs to every container that asks for it, in the foreground.

    A container asks by `resources: {limits: {fusermount3-proxy.dev/fuse: 1}}`. The paths are those of the node. With
    --cdi, the node's container runtime must know the device, see `cdi generate`.
    """
    from broker import rpc
    from broker.deviceplugin import plugin
    from broker.deviceplugin.devices import Devices

    try:
        devices = Devices(count, injection.injection(proxy, socket, device_node=device_node), by_cdi)
    except injection.InjectionError as error:
        raise click.ClickException(str(error)) from None

    def serve() -> int:
        try:
            plugin.serve(plugin.Settings(kubelet_dir / "device-plugins", resource, devices, socket))
        except plugin.PluginError as error:
            click.ClickException(str(error)).show()
            return 1
        return 0

    rpc.run(serve)


@main.group()
def cdi() -> None:
    """Have container engines give any container what it needs (Container Device Interface)."""


@cdi.command()
@click.option("--output", type=click.Path(path_type=Path), help="Write the file, for example /etc/cdi/NAME.json.")
@_PROXY
@_BROKER_SOCKET
@_DEVICE_NODE
def generate(output: Path | None, proxy: Path, socket: Path, device_node: bool) -> None:
    """Print the specification of the device fusermount3-proxy.dev/fuse=on.

    With such a file in /etc/cdi, `podman run --device fusermount3-proxy.dev/fuse=on IMAGE` lets FUSE programs of any
    image mount through the broker.
    """
    from broker import cdi

    try:
        text = cdi.specification(injection.injection(proxy, socket, device_node=device_node))
        if output is None:
            click.echo(text, nl=False)
            return
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = output.with_name(f"{output.name}.new")  # engines read what ends in .json or .yaml
        unfinished.write_text(text)
        unfinished.replace(output)
    except (injection.InjectionError, OSError) as error:
        raise click.ClickException(str(error)) from None


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("REQUEST", "STATE", "MOUNTPOINT", "TYPE", "SOURCE", "UID", "PID", "COMMAND", "CONTAINER", "SINCE"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        since = terminal.moment(row["mounted_at"])
        cells = [row["request"], row["state"], row["mountpoint"] or row["volume"], row["type"], row["source"]]
        cells += [str(row["uid"]), str(row["pid"]), row["command"], row["container"][:24], since]
        table.add_row(*map(terminal.visible, cells))
    _console().print(table)


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 100_000  # a program reads lines, not a screen
    return console


def _load(path: Path | None) -> config.Configuration:
    try:
        return config.load(path)
    except config.ConfigurationError as error:
        raise click.ClickException(str(error)) from None


def _ask(config_path: Path | None, command: str) -> Any:
    from broker import control

    try:
        return control.ask(_load(config_path).control_socket, command)
    except control.NotRunning as error:
        raise click.ClickException(str(error)) from None
