"""The commands of the pages, executed as an administrator types them in a checkout, with kubectl and helm."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from tests.e2e.documented import ROOT
from tests.kubernetes import programs
from tests.lab.commands import run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.cluster.node import ClusterNode

TIMEOUT = 240.0
"""Seconds that a block of commands may take; `kubectl rollout status` has no limit of its own."""


def execute(node: ClusterNode, text: str, directory: Path = ROOT, names: Mapping[str, str] | None = None) -> str:
    """Run shell commands in the directory, each of `names` replaced by its value. Return what they print.

    CommandFailed if one fails.
    """
    for name, value in (names or {}).items():
        text, found = re.subn(rf"\b{name}\b", value, text)
        assert found, f"{name} is not in the commands"
    path = [node.programs, *([programs.program("helm").parent] if "helm " in text else [])]
    settings = [f"PATH={':'.join(map(str, path))}:{os.environ['PATH']}", f"HELM_CACHE_HOME={node.directory}/helm"]
    shell = ["env", f"--chdir={directory}", *settings, "sh", "-euc", text]
    return run(node.administrator_command(*shell), timeout=TIMEOUT).stdout
