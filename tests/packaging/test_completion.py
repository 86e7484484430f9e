"""Test the completion of both programs in each shell, as the packages install it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fusermount3_broker.cli import main
from fusermount3_proxy import commandline

if TYPE_CHECKING:
    from tests.packaging.machines import Machine

pytestmark = pytest.mark.e2e

#: Typed text, and a completion that the shell must offer for it.
TYPED = [
    ("fusermount3-broker sta", "status"),
    ("fusermount3-broker mounts --", "--json"),
    ("fusermount3-broker mounts --w", "--watch"),
    ("fusermount3-proxy --un", "--unmount"),
    ("fusermount3 --un", "--unmount"),
    ("fusermount3 -o allow_o", "allow_other"),
    ("fusermount3 /us", "/usr"),
]

#: Completes the last argument, as bash-completion does when TAB is pressed. `compopt` works only in real completion.
BASH = """
source /usr/share/bash-completion/bash_completion
compopt() { :; }
read -r -a COMP_WORDS <<< "$1"
[[ $1 != *" " ]] || COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$1 COMP_POINT=${#1}
_completion_loader "${COMP_WORDS[0]}"
[[ $? = 124 ]] || exit 1
function=$(complete -p "${COMP_WORDS[0]}" | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
"$function" "${COMP_WORDS[0]}" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""

#: Types into an interactive zsh, presses TAB, and waits until the expected text is on the line or listed below it. The
#: terminal also echoes the input: because of the quotes, the echo doesn't look like an answer.
ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1= TERM=dumb; unsetopt beep; autoload -U compinit; compinit -u -D; print rea""dy'
zpty -r -m shell output '*ready*'
zpty -w -n shell "$1"$'\t'
zpty -r -m shell output "*$2*"
"""


@pytest.mark.parametrize(("typed", "offered"), TYPED)
def test_bash(installed: Machine, typed: str, offered: str) -> None:
    said = installed.run("bash", "-c", BASH, "bash", typed)
    assert offered in said.stdout.splitlines()
    assert said.stderr == ""


@pytest.mark.parametrize(("typed", "offered"), TYPED)
def test_fish(installed: Machine, typed: str, offered: str) -> None:
    said = installed.run("fish", "--command", "complete --do-complete $argv[1]", typed)
    assert offered in [line.partition("\t")[0].rstrip("/") for line in said.stdout.splitlines()]
    assert said.stderr == ""


def test_fish_shows_the_whole_summary_of_a_command(installed: Machine) -> None:
    said = installed.run("fish", "--command", "complete --do-complete $argv[1]", "fusermount3-broker cs")
    assert said.stdout == f"csi\t{main.csi.short_help}\n"
    assert "," in said.stdout


@pytest.mark.parametrize(("typed", "offered"), TYPED)
def test_zsh(installed: Machine, typed: str, offered: str) -> None:
    installed.run("timeout", "60", "zsh", "-f", "-c", ZSH, "zsh", typed, offered)


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_every_option_of_the_proxy_is_offered(installed: Machine, shell: str) -> None:
    places = {
        "bash": "/usr/share/bash-completion/completions/fusermount3",
        "fish": "/usr/share/fish/vendor_completions.d/fusermount3-proxy.fish",
        "zsh": "/usr/share/zsh/vendor-completions/_fusermount3-proxy",
    }
    script = installed.run("cat", places[shell]).stdout
    for option in commandline.OPTIONS:
        assert option.name.decode() in script
