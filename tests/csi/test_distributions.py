"""Test the CSI plugin with the Python, gRPC and protobuf of distributions: run its own tests in their containers.

Debian 12 and 13 have gRPC 1.51 and protobuf 3.21, which are older than pip's; 13 also has a newer Python.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.images import DebianRecipe, image_tag
from tests.lab.podman import Container, Options, Volume

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ROOT = Path(__file__).parents[2]

PACKAGES = (
    "passwd",
    "python3-grpcio",
    "python3-protobuf",
    "python3-pyxattr",
    "python3-seccomp",
    "python3-systemd",
    # for the tests
    "python3-hypothesis",
    "python3-pytest",
)


SUITES = ("bookworm", "trixie")


def recipe(suite: str) -> DebianRecipe:
    return DebianRecipe(f"grpc-{suite}", PACKAGES, suite)


@pytest.mark.parametrize("suite", SUITES)
def test_the_plugin_works_with_what_debian_has(suite: str) -> None:
    image = image_tag(recipe(suite))
    parts = ("broker", "docs", "fusermount3_proxy", "tests", "setup.cfg")
    volumes = [Volume(ROOT / name, f"/source/{name}") for name in parts]
    with Container(image, options=Options(volumes=volumes)) as container:
        version = "import google.protobuf as protobuf, grpc; print(grpc.__version__, protobuf.__version__)"
        assert container.exec(["python3", "-c", version]).stdout == "1.51.1 4.21.12\n"
        # Lets the process find its modules: it takes nothing from its environment.
        container.exec(["sh", "-c", "printf '/source\\n/source/broker\\n' > /usr/lib/python3/dist-packages/source.pth"])
        tests = [
            f"tests/unit/{name}.py"
            for name in ("csi/test_plugin", "csi/test_volume_requests", "messages/test_csi_settings")
        ]
        said = container.exec(
            ["python3", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
            workdir="/source",
            timeout=600,
        ).stdout
    assert " passed" in said and "skipped" not in said
