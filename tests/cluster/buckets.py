"""Programs that mount buckets, in an image for the node, and the object stores that have the buckets.

goofys, gcsfuse and fake-gcs-server are built from their Go modules; s3fs and rclone are Debian's, the S3 server is
moto. No registry of packages has Mountpoint for Amazon S3, or ros3fs: their stand-ins take the same arguments.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.callers import s3
from tests.callers.build import GO_BUILD, compilers, copy_out, downloading, image_tag, recipe_of, rust_programs
from tests.cluster import configuration, images
from tests.lab import programs
from tests.lab.cache import Cache, recipe_hash
from tests.lab.commands import run
from tests.lab.images import DebianRecipe
from tests.lab.programs import SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.node import ClusterNode

SOURCE = SOURCES / "buckets"

DEBIANS = DebianRecipe("buckets", ("passwd", "s3fs", "rclone", "libfuse2t64"), suite="trixie")
"""The real programs of Debian, and the library of one stand-in."""

REAL, STAND_INS = ("s3fs", "rclone", "goofys", "gcsfuse"), ("mountpoint-s3", "ros3fs")
"""The examples with these programs."""

BUCKET, S3_HOST = s3.BUCKET, "s3.example"
GCS_PORT = 4443
GCS = f"http://{configuration.ADDRESS}:{GCS_PORT}"
TIMEOUT = 1800
"""Seconds that a build may take: minutes on two processors that have nothing else to do."""

# What goofys is built with by its author, a fork of this library, can't be had, and differs in the name of a field.
_GOOFYS = f"""
cd /build && sed -i 's/fuseops\\.OpMetadata/fuseops.OpContext/; s/\\<op\\.Metadata\\>/op.OpContext/' \
    vendor/github.com/kahing/goofys/internal/*.go
{GO_BUILD} -ldflags='-s -w' -mod=vendor -o /out/ github.com/kahing/goofys
"""
_GCSFUSE = f"""
cd /build
{GO_BUILD} -ldflags='-s -w' -mod=vendor -o /out/ github.com/googlecloudplatform/gcsfuse/v3 \
    github.com/fsouza/fake-gcs-server
"""
MODULES = {"goofys": _GOOFYS, "gcsfuse": _GCSFUSE}
"""What builds the modules below `SOURCE`, once these are copied into /build with all that they need."""

# One program of the FUSE library that mount-s3 is built with, and one on libfuse 3 that takes a descriptor, too.
_MOUNT_S3 = """#!/bin/sh
case "$*" in *--allow-other*) allow_other=--allow-other ;; esac
exec mountpoint_s3_fuser $allow_other "$2"
"""
_ROS3FS = '#!/bin/sh\nexec hello_ll -f "$1"\n'


def built(name: str) -> Path:
    """Return the directory with the static executables of tests/programs/buckets/NAME. Raises build.NotReachable."""
    source = SOURCE / name
    # Debian's compiler downloads the newer one that go.mod may name, also through the module proxy.
    settings = "set -eu; export GOTOOLCHAIN=auto; "

    def build(directory: Path) -> None:
        with compilers(source) as container:
            with downloading(f"Go modules of {name}"):
                container.exec(
                    ["sh", "-c", f"{settings} cp -r /source /build; cd /build; go mod vendor"], timeout=TIMEOUT
                )
            container.exec(["sh", "-c", f"{settings} mkdir /out; {MODULES[name]}"], timeout=TIMEOUT)
            copy_out(container, "/out", directory)

    return Cache().entry(name, recipe_hash(recipe_of(source), settings, MODULES[name]), build)


def load(node: ClusterNode) -> None:
    """Give the node one image with all programs, under the names in the examples. Raises build.NotReachable."""
    with tempfile.TemporaryDirectory() as temporary:
        scripts = {"mount-s3": _MOUNT_S3, "ros3fs": _ROS3FS}
        for name, script in scripts.items():
            (Path(temporary) / name).write_text(script)
            (Path(temporary) / name).chmod(0o755)
        executables = {
            "goofys": built("goofys") / "goofys",
            "gcsfuse": built("gcsfuse") / "gcsfuse",
            "mountpoint_s3_fuser": rust_programs() / "mountpoint_s3_fuser",
            "hello_ll": programs.hello_ll(),
            **{name: Path(temporary) / name for name in scripts},
        }
        tag = images.with_proxy(image_tag(DEBIANS), executables)
    first, *others = (f"docker.io/example/{name}:1.0" for name in (*REAL, *STAND_INS))
    images.load_one(node, first, tag)
    for name in others:
        images.name_also(node, first, name)


@contextlib.contextmanager
def fake_gcs(node: ClusterNode) -> Iterator[None]:
    """Run fake-gcs-server in the node's network, with a file `hello` in the bucket."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        (directory / "data" / BUCKET).mkdir(parents=True)
        (directory / "data" / BUCKET / "hello").write_text("hello\n")
        options = ["-scheme=http", f"-port={GCS_PORT}", "-backend=memory", f"-data={directory}/data"]
        options += [f"-external-url={GCS}", f"-public-host={GCS.partition('//')[2]}"]
        with (directory / "log").open("wb") as log:
            server = subprocess.Popen(
                [*s3.in_network_of(node), built("gcsfuse") / "fake-gcs-server", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
            )
        try:
            s3.wait_until_serving(node, server, directory / "log", port=GCS_PORT)
            yield
        finally:
            server.terminate()
            server.wait(timeout=60)


@contextlib.contextmanager
def moto(node: ClusterNode) -> Iterator[None]:
    """Run an S3 server in the node's network, with a file `hello` in the bucket, whose objects are public."""
    # goofys takes moto's answer about the bucket to mean that it needs no credentials.
    statement = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": f"arn:aws:s3:::{BUCKET}/*"}
    with s3.s3_for(node):
        s3.put(node, f"{BUCKET}?policy", json.dumps({"Version": "2012-10-17", "Statement": [statement]}))
        yield


_GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode(), end='')"


def stored(node: ClusterNode, example: str, name: str) -> str:
    """Return the content of an object in the bucket of an example."""
    url = f"{GCS}/storage/v1/b/{BUCKET}/o/{name}?alt=media" if example == "gcsfuse" else f"{s3.URL}/{BUCKET}/{name}"
    return run([*s3.in_network_of(node), sys.executable, "-c", _GET, url]).stdout
