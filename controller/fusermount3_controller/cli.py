"""``fusermount3-controller``: the commands of an administrator.

The libraries of the extra `[controller]` are imported by a command only after `main` has found that they are there.
"""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from fusermount3_broker.messages.untrusted_text import visible
from fusermount3_proxy import __version__

#: The modules of the extra.
_LIBRARIES = ("aiohttp", "cryptography", "jinja2", "jsonpatch", "lightkube", "re2", "yaml")
_NAME = "fusermount3-controller"
_MOUNTS = "fuse-mounts"
_PORT = click.IntRange(1, 65535)


def _failure(messages: Iterable[str]) -> click.ClickException:
    """Return the failure of a command, with a line for each message; they may quote a manifest."""
    return click.ClickException("\n".join(map(visible, messages)))


def main() -> None:
    """Run the command; without the extra, only say what to install."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"fusermount3-controller needs libraries that are not installed ({', '.join(missing)}): "
            "pip install 'fusermount3-proxy[controller]'"
        )
    commands()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fusermount3-controller")
def commands() -> None:
    """Write templates of volumes, show what they become, and have pods get it."""


@commands.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of the template, or an attribute of the driver, for a volume that is made up; may be repeated.",
)
def render(files: tuple[Path, ...], settings: tuple[str, ...]) -> None:
    """Show the pods that come out of the objects in FILEs, without a cluster.

    FILEs have VolumeTemplates, and pods whose volumes name them, with their PersistentVolumes, claims and
    StorageClasses. A pod is shown with its sidecars, and after it the pods that serve its shared volumes. If there is
    no pod, one is made up for each PersistentVolume that names a template, or else for each template, with the pods
    that create, expand and delete its volume, if it has such. "-" is standard input.
    """
    from fusermount3_controller import manifests
    from fusermount3_controller.faults import Invalid
    from fusermount3_controller.offline import rendered

    given: list[tuple[str, Any]] = []
    for file in files:
        try:
            given += [(str(file), each) for each in manifests.load(_text(file))]
        except Invalid as error:
            raise _failure(f"{file}: {fault}" for fault in error.faults) from None
    attributes = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"must be NAME=VALUE, not {setting!r}", param_hint="--set")
        attributes[name] = value
    result, faults = rendered(given, attributes)
    if faults:
        raise _failure(faults)
    click.echo(manifests.dump(result), nl=False)


#: What `new-template` asks for what no option says.
_QUESTIONS = {
    "name": "Name of the template, such as photos",
    "image": "Image with the FUSE program and fusermount3-proxy",
    "command": "Command that mounts on {{ mountpoint }} in the foreground; {{ params.NAME }} is what users say",
    "secret": "Secret with the program's environment variables; empty for none",
    "placement": "One program for all pods of a node (Shared), or one in each pod (Sidecar)",
}


@commands.command()
@click.option("--name", metavar="NAME", help="Of the template, which users write.")
@click.option("--image", metavar="IMAGE", help="Has the FUSE program, and fusermount3-proxy in place of fusermount3.")
@click.option("--command", metavar="COMMAND", help="Mounts on {{ mountpoint }}, in the foreground.")
@click.option("--secret", metavar="NAME", help="With environment variables for the program; '' for none.")
@click.option("--placement", type=click.Choice(["Shared", "Sidecar"]), help="Where the program runs.")
def new_template(**given: str | None) -> None:
    """Write a VolumeTemplate to begin with, and check it.

    What no option says is asked. In the command, {{ params.bucket }} makes a parameter `bucket`, which each volume must
    have. The template goes to standard output, all else to standard error.
    """
    from fusermount3_controller import manifests
    from fusermount3_controller.faults import Invalid
    from fusermount3_controller.new_template import Answers, made
    from fusermount3_controller.volume_templates import Placement

    said = {name: _asked(name) if (answer := given[name]) is None else answer for name in _QUESTIONS}
    placement = Placement(said.pop("placement"))
    try:
        template = made(Answers(**said, placement=placement))
    except Invalid as error:
        raise _failure(map(str, error.faults)) from None
    click.echo(manifests.dump([template]), nl=False)


def _asked(name: str) -> str:
    kind = click.Choice(["Shared", "Sidecar"]) if name == "placement" else str
    default = {"secret": "", "placement": "Shared"}.get(name)
    answer: str = click.prompt(_QUESTIONS[name], type=kind, default=default, show_default=bool(default), err=True)
    return answer


@commands.command()
@click.option("--address", metavar="ADDRESS", help="Where to listen; by default, on all addresses.")
@click.option("--port", default=8443, show_default=True, type=_PORT, help="For the API server, by HTTPS.")
@click.option("--health-port", default=8080, show_default=True, type=_PORT, help="For /healthz, /readyz and /metrics.")
@click.option("--namespace", metavar="NAME", default="", help="Of Service and Secret; by default, that of the pod.")
@click.option("--service", metavar="NAME", default=_NAME, show_default=True, help="By which the API server asks.")
@click.option("--secret", metavar="NAME", default=f"{_NAME}-tls", show_default=True, help="Gets the certificates.")
@click.option(
    "--configuration", metavar="NAME", default=_NAME, show_default=True, help="Of the two webhook configurations."
)
@click.option("--lease", metavar="NAME", default=_NAME, show_default=True, help="In that namespace; its holder leads.")
@click.option("--mount-namespace", metavar="NAME", default=_MOUNTS, show_default=True, help="Of mount pods.")
@click.option("--provisioning", is_flag=True, help="Also create and delete volumes for claims, in that namespace.")
def webhook(**settings: Any) -> None:
    """Give pods their sidecars when they are created, and run pods for the volumes that they share.

    An admission webhook: the API server asks it about pods that have volumes of the driver, and about VolumeTemplates.
    Beside it, mount pods are created and deleted as shared volumes are used; and volumes, as claims ask for them. Of
    several replicas, all answer, and one at a time, which holds the Lease, does the rest.
    The cluster is that of the pod in which it runs, or that of KUBECONFIG. It ends on SIGTERM, after the requests in
    flight.
    """
    from fusermount3_controller.daemon import Settings, serve

    serve(Settings(**settings))


def _text(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except OSError as error:
        raise _failure([f"{file}: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise _failure([f"{file}: is not text in UTF-8"]) from None
