"""The CSI plugin with the Python, gRPC and protobuf that distributions have: its own tests, run in their containers.

Debian 12 and 13 have gRPC 1.51 and protobuf 3.21, which are older than what pip gets; 13 has a newer Python, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.images import DebianRecipe, image_tag
from tests.lab.podman import Container, Options, Volume

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]

PACKAGES = (
    "passwd",
    "python3-grpcio",
    "python3-protobuf",
    "python3-pyxattr",
    "python3-seccomp",
    "python3-systemd",
    # of the tests
    "python3-hypothesis",
    "python3-pytest",
)


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_the_plugin_works_with_what_debian_has(suite: str) -> None:
    image = image_tag(DebianRecipe(f"grpc-{suite}", PACKAGES, suite))
    parts = ("broker", "docs", "fusermount3_proxy", "tests", "setup.cfg")
    volumes = [Volume(ROOT / name, f"/source/{name}") for name in parts]
    with Container(image, options=Options(volumes=volumes)) as container:
        version = "import google.protobuf as protobuf, grpc; print(grpc.__version__, protobuf.__version__)"
        assert container.exec(["python3", "-c", version]).stdout == "1.51.1 4.21.12\n"
        # So that the process finds its modules, which takes nothing from its environment.
        container.exec(["sh", "-c", "echo /source > /usr/lib/python3/dist-packages/source.pth"])
        tests = ["tests/unit/test_csi_plugin.py", "tests/unit/test_csi_volume.py", "tests/unit/test_csi_settings.py"]
        said = container.exec(
            ["python3", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
            workdir="/source",
            timeout=600,
        ).stdout
    assert " passed" in said and "skipped" not in said
