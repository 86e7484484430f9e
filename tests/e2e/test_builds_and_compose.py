"""The places in docs/ci.md and docs/where-it-runs.md that can be had here: a build of an image by Podman, a file for
Compose.

Podman runs the service of that file: the volumes are what counts, and those are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from tests.e2e.documented import blocks, documented, with_paths_of
from tests.e2e.sshfs import use_sshfs
from tests.lab.commands import CommandFailed, run
from tests.lab.images import BUSYBOX, SSHFS, image_tag
from tests.lab.podman import LIMITS, RUNTIME, Container, Options
from tests.lab.programs import whoamifs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.lab.broker import Broker

pytestmark = pytest.mark.e2e

PAGE = "where-it-runs.md"
CI = "ci.md"


def build(options: Sequence[str], context: Path) -> str:
    """Build an image whose step mounts and reads, and keep nothing of it; return what the step has said."""
    (context / "Containerfile").write_text(f"FROM {image_tag(BUSYBOX)}\nRUN whoamifs --probe /mnt\n")
    offline = ["--network=none", "--pull=never", "--layers=false"]
    program = ["-v", f"{whoamifs()}:/usr/bin/whoamifs:ro"]
    built = context / "id"
    argv = ["podman", *RUNTIME, "build", *LIMITS, *offline, *program, *options, f"--iidfile={built}", str(context)]
    said = run(argv).stdout
    run(["podman", "image", "rm", "--force", built.read_text()])
    return said


def test_a_step_of_a_build_mounts_with_the_documented_options(broker: Broker, tmp_path: Path) -> None:
    words = documented("podman build", CI)
    options = with_paths_of(broker, words[2 : words.index("CONTEXT")])
    assert "ok=yes" in build(options, tmp_path).splitlines()


def test_without_them_it_does_not(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed):
        build([], tmp_path)


def test_a_service_mounts_with_the_volumes_of_the_compose_file(broker: Broker) -> None:
    (text,) = [each.text for each in blocks() if each.page == PAGE and each.text.startswith("# compose.yaml")]
    (service,) = yaml.safe_load(text)["services"].values()
    volumes = [word for volume in with_paths_of(broker, service["volumes"]) for word in ("-v", volume)]
    with Container(image_tag(SSHFS), options=Options(extra=volumes)) as container:
        use_sshfs(container, "/mnt")
