"""Run the engine on a target and return the result."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.targets import Target

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
#: The engine's findings: inputs that reached new code, with which the next run begins; and inputs that failed.
FOUND = ROOT / "build" / "fuzz"

#: Inputs that a target tries in its minute, at least, on any machine: with fewer, the engine did not work.
LEAST = 10_000
#: Timeout for one input, in seconds. An input takes microseconds, but the engine may have to wait for a processor.
_LONGEST = 600


class Result(NamedTuple):
    """`inputs`: number of inputs tried; `reached`: number of code places reached; `failure`: text for people."""

    inputs: int
    reached: int
    failure: str


def fuzz(module: str, limit: str, found: Path) -> Result:
    """Fuzz the target `module` until `limit`, a libFuzzer flag; the engine stores its findings in `found`."""
    target: Target = importlib.import_module(module)
    inputs = found / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        seeds = Path(temporary, "seeds")
        seeds.mkdir()
        for number, seed in enumerate(target.SEEDS):
            (seeds / str(number)).write_bytes(seed)
        words = Path(temporary, "words")
        words.write_text("".join(f'"{_quoted(word)}"\n' for word in target.WORDS))
        flags = [limit, f"-dict={words}", f"-timeout={_LONGEST}", f"-artifact_prefix={found}/", "-print_final_stats=1"]
        directories = [each for each in (inputs, CORPUS / module.rpartition(".")[2], seeds) if each.exists()]
        command = [sys.executable, "-m", "tests.fuzz.engine", module, *flags, *map(str, directories)]
        ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    said = ran.stdout.decode(errors="backslashreplace")
    return Result(
        inputs=_last_number(r"number_of_executed_units: (\d+)", said),
        reached=_last_number(r" cov: (\d+)", said),
        failure=_failure(module, ran.returncode, said) if ran.returncode else "",
    )


def _quoted(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def _last_number(pattern: str, said: str) -> int:
    return int((["0", *re.findall(pattern, said)])[-1])


def _failure(module: str, status: int, said: str) -> str:
    """Return the output needed to reproduce and fix the failure; earlier engine output is about inputs that passed."""
    lines = [line for line in said.splitlines() if not re.match(r"#\d+\s|\s+#\d+ ", line)]
    again = [
        f"{module} failed, with status {status}. To see it again, decode the Base64 above into a file below "
        f"{CORPUS.relative_to(ROOT)}, which `pytest tests/fuzz` replays."
    ]
    return "\n".join(lines[-60:] + again)
