"""Test that groff and mandoc render the manual pages without warnings, and that they cover all commands and options."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click
import pytest

from fusermount3_broker.cli import main
from fusermount3_proxy import commandline
from tests.unit.service.test_configuration_example import EXAMPLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.packaging.machines import Machine

pytestmark = pytest.mark.e2e

PAGES = ("fusermount3-proxy.1", "fusermount3-broker.8", "fusermount3-broker.toml.5")


def path_of(page: str) -> str:
    return f"/usr/share/man/man{page[-1]}/{page}.gz"


def read(machine: Machine, page: str) -> str:
    """Return the page as a terminal shows it, joined to one line: line breaks are not content."""
    return re.sub(r"\s+", " ", machine.run("man", "--no-hyphenation", page[:-2], env={"MANWIDTH": "10000"}).stdout)


@pytest.mark.parametrize("page", PAGES)
def test_no_renderer_stumbles_over_a_page(installed: Machine, page: str) -> None:
    render = ["man", "--warnings", "--encoding=UTF-8", "--local-file", "--troff-device=utf8", "--ditroff"]
    groff = installed.run(*render, path_of(page))
    assert groff.stdout.startswith("x T utf8")
    assert groff.stderr == ""
    mandoc = installed.run("mandoc", "-T", "lint", "-W", "warning", path_of(page), check=False)
    assert (mandoc.stdout, mandoc.returncode) == ("", 0)


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_found_by_its_name(installed: Machine, page: str) -> None:
    assert installed.run("man", "--where", page[:-2]).stdout.strip() == path_of(page)
    assert f'"{page[:-2]} - ' in installed.run("lexgrog", path_of(page)).stdout


@pytest.mark.parametrize("name", ["fusermount3", "fusermount"])
def test_where_the_proxy_is_fusermount3_so_is_its_page(installed: Machine, name: str) -> None:
    assert installed.run("man", "--where", name).stdout.strip() == path_of("fusermount3-proxy.1")


def test_the_proxys_page_has_every_option(installed: Machine) -> None:
    page = read(installed, "fusermount3-proxy.1")
    for option in commandline.OPTIONS:
        assert f"--{option.name.decode()}" in page
        assert not option.letter or f" -{option.letter.decode()}" in page


def test_the_brokers_page_has_every_command_and_option(installed: Machine) -> None:
    page = read(installed, "fusermount3-broker.8")
    options = 0
    for name, command in commands_of(main.main):
        assert f" {name} [OPTIONS]" in page
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                options += 1
                assert parameter.opts[-1] in page
    assert options > 5


def test_the_page_of_the_configuration_says_what_the_example_says(installed: Machine) -> None:
    page = read(installed, "fusermount3-broker.toml.5").replace(" ", "")
    lines = [line.removeprefix("# ").removeprefix("#") for line in EXAMPLE.read_text().splitlines()]
    assert len(lines) > 50
    for line in lines:
        assert re.sub(r"[`\s]", "", line) in page


def commands_of(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command
