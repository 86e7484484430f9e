"""Options that several commands have."""

from pathlib import Path

import click

from fusermount3_broker.service import configuration, configuration_file

CONFIG = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help=f"Configuration file; default {configuration_file.DEFAULT_PATH}, if it exists.",
)
SOCKETS = click.option(
    "--socket",
    "socket_paths",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Listen here instead of where the configuration says; may be repeated.",
)
LOG_FORMAT = click.option(
    "--log-format",
    type=click.Choice(configuration.LOG_FORMATS),
    help="Write the log as lines of text for people, or of JSON, whatever `log_format` in the configuration says. auto:"
    " to the journal if stderr is connected to it, text on a terminal, else JSON.",
)
BROKER_SOCKET = click.option(
    "--socket",
    type=click.Path(path_type=Path),
    default=configuration.Socket.path,
    show_default=True,
    help="The broker's socket on the host; containers see the directory it is in.",
)
DEVICE_NODE = click.option(
    "--device-node",
    is_flag=True,
    help="Give containers the real /dev/fuse, which clone_fd needs, and not a stand-in that can only be opened.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
