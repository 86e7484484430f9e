"""Builds the completion of fusermount3-broker for bash, zsh and fish, as click generates it.

    PYTHONPATH=.:broker python3 packaging/completion/build.py --output build/completion

The files have the names by which the shells find them. Those of fusermount3-proxy are beside this script.
"""

import argparse
from pathlib import Path

from click.shell_completion import get_completion_class

from fusermount3_broker.cli import main as cli

PROGRAM = "fusermount3-broker"
FILES = {"bash": PROGRAM, "zsh": f"_{PROGRAM}", "fish": f"{PROGRAM}.fish"}
FUNCTION = "_fusermount3_broker_completion"
#: On the first completion, zsh runs the file as the function itself. Not every release of click takes that into
#: account.
COMPLETE_AT_ONCE = f"""
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    {FUNCTION} "$@"
fi
"""
#: For fish, a completion is "KIND,WORD<TAB>HELP", and help has commas, too. Releases of click cut it at each of them.
CUT_AT_COMMAS, CUT_AT_FIRST_COMMA = 'string split "," $completion', 'string split --max 1 "," $completion'


def script(shell: str) -> str:
    """Return the completion script for the shell."""
    kind = get_completion_class(shell)
    assert kind is not None, f"click knows no {shell}"
    source = kind(cli.main, {}, PROGRAM, "_FUSERMOUNT3_BROKER_COMPLETE").source()
    source = source.replace(CUT_AT_COMMAS, CUT_AT_FIRST_COMMA)
    if shell == "zsh" and "loadautofunc" not in source:
        source += COMPLETE_AT_ONCE
    return source


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="the directory to write them into")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for shell, name in FILES.items():
        (arguments.output / name).write_text(script(shell))


if __name__ == "__main__":
    main()
