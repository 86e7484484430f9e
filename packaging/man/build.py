"""Builds the manual pages: those beside this file, completed from the programs' own descriptions.

    PYTHONPATH=.:broker python3 packaging/man/build.py --date 2026-01-31 --output build/man

fusermount3-broker(8) lists the commands as their `--help` describes them, fusermount3-broker.toml(5) the keys as
packaging/fusermount3-broker.toml describes them. In the pages, `@DATE@`, `@COMMANDS@` and the like stand on lines of
their own or in `.TH`. The roff is the subset that both groff and mandoc know (groff_man(7), mandoc's man(7)).
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from fusermount3_broker.cli import main as cli

HERE = Path(__file__).resolve().parent
CONFIGURATION = HERE.parent / "fusermount3-broker.toml"
PROGRAM = "fusermount3-broker"


class Entry(NamedTuple):
    """A section of the configuration file: prose, followed by a table's header, or by keys with their defaults."""

    prose: list[str]
    toml: list[str]


def text(prose: str) -> str:
    """Return prose as roff; text in backticks becomes bold."""
    parts = re.sub(r"\s+", " ", prose.strip()).split("`")
    return "".join(bold(part) if index % 2 else escaped(part) for index, part in enumerate(parts))


def bold(literal: str) -> str:
    """Return literal text in bold, with the hyphens of a keyboard."""
    hyphens = escaped(literal).replace("-", r"\-")
    return rf"\fB{hyphens}\fP" if literal else ""


def escaped(plain: str) -> str:
    """Return text in which roff sees no request and no escape."""
    plain = plain.replace("\\", r"\e").replace("~", r"\(ti").replace("^", r"\(ha")
    return rf"\&{plain}" if plain.startswith((".", "'")) else plain


def paragraphs(prose: str) -> Iterator[str]:
    yield from (paragraph for paragraph in prose.split("\n\n") if paragraph.strip())


def commands(group: click.Group, name: str) -> Iterator[str]:
    """Yield the roff of all commands of a group; the commands of a nested group follow its name."""
    for word, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {word}")
        elif not command.hidden:
            yield from describe(command, f"{name} {word}")


def describe(command: click.Command, name: str) -> Iterator[str]:
    """Yield the roff of one command: usage, description, options."""
    context = click.Context(command, info_name=name)
    synopsis = " ".join([bold(name.removeprefix(f"{PROGRAM} ")), *map(escaped, command.collect_usage_pieces(context))])
    yield f".SS {synopsis}"
    for index, paragraph in enumerate(paragraphs((command.help or "").partition("\f")[0])):
        yield from ([".PP"] if index else [])
        yield text(paragraph)
    for parameter in command.get_params(context):
        name, says = parameter.get_help_record(context) or ("", "")
        if says and "--help" not in parameter.opts:
            yield from (".TP", bold(name), text(says))


def entries(lines: list[str]) -> Iterator[Entry]:
    """Split the example into entries. Prose begins with "# " and a word; everything else after a "#" is TOML."""
    prose: list[str] = []
    toml: list[str] = []
    for line in lines:
        line = line.removeprefix("#") if line.startswith("#[") else line  # the header of a table
        is_prose = re.match(r"# \S", line) is not None
        if toml and (is_prose or not line or line.startswith("[")):
            yield Entry(prose, toml)
            prose, toml = [], []
        if is_prose:
            prose.append(line[2:])
        elif line.startswith("["):
            yield Entry(prose, [line])
            prose = []
        elif line.strip("#"):
            toml.append(line.removeprefix("#"))
        elif prose:
            yield Entry(prose, [])
            prose = []
    if prose or toml:
        yield Entry(prose, toml)


def keys(configuration: str) -> Iterator[str]:
    """Yield the roff of the configuration file: its introduction, then its tables and keys."""
    for entry in entries(configuration.splitlines()):
        prose = text(" ".join(entry.prose))
        if not entry.toml:
            yield from (".PP", prose)
        elif entry.toml[0].startswith("["):
            yield from (f".SS {bold(entry.toml[0])}", prose)
        else:
            yield ".TP"
            yield bold(entry.toml[0] if len(entry.toml) == 1 else entry.toml[0].partition(" ")[0])
            yield prose
            if len(entry.toml) > 1:
                yield from (".IP", ".EX", *(escaped(line) for line in entry.toml), ".EE")


def pages(date: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each page."""
    parts = {
        "@COMMANDS@": "\n".join(commands(cli.main, PROGRAM)),
        "@KEYS@": "\n".join(keys(CONFIGURATION.read_text())),
        "@DATE@": date,
    }
    for source in sorted(HERE.glob("*.[1-9]")):
        page = source.read_text()
        for name, part in parts.items():
            page = page.replace(name, part)
        yield source.name, page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--date", required=True, help="what the pages say they are from, YYYY-MM-DD")
    parser.add_argument("--output", type=Path, required=True, help="the directory to write them into")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, page in pages(arguments.date):
        (arguments.output / name).write_text(page)


if __name__ == "__main__":
    main()
