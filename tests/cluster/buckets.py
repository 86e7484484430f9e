"""Programs that mount buckets, in an image for the node, and the object stores that have the buckets.

goofys, gcsfuse and fake-gcs-server are built from their Go modules, Mountpoint for Amazon S3 from its library and a
command line of ours, for no registry of packages has AWS's; s3fs and rclone are Debian's, the S3 server is moto. No
registry has ros3fs: its stand-in takes the same arguments.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.callers import s3
from tests.callers.build import GO_BUILD, compilers, copy_out, downloading, image_tag, recipe_of
from tests.cluster import configuration, images
from tests.lab import programs
from tests.lab.cache import Cache, recipe_hash
from tests.lab.images import DebianRecipe
from tests.lab.programs import SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.node import ClusterNode

SOURCE = SOURCES / "buckets"

DEBIANS = DebianRecipe("buckets", ("passwd", "s3fs", "rclone", "libfuse2t64", "ca-certificates"), suite="trixie")
"""The real programs of Debian, and what Mountpoint needs: a library, and certificates also for an http:// endpoint."""
RUST_COMPILERS = DebianRecipe(
    "rust-and-c-compilers",
    (
        "passwd",
        "cargo",
        "gcc",
        "g++",
        "libc6-dev",
        "cmake",
        "make",
        "libclang-dev",
        "ca-certificates",
        "pkgconf",
        "libfuse-dev",
    ),
    suite="trixie",
)
"""For Mountpoint, most of which is in C: libclang reads its headers."""

REAL, STAND_INS = ("s3fs", "rclone", "goofys", "gcsfuse", "mountpoint-s3"), ("ros3fs",)
"""The examples with these programs."""

BUCKET, S3_HOST = s3.BUCKET, "s3.example"
KEYS = [f"--from-literal={name}=anything" for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
"""The options of `kubectl create secret` for the Secret `s3` of the examples and templates."""
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

# One on libfuse 3 that takes a descriptor, too.
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


def mount_s3() -> Path:
    """Return Mountpoint for Amazon S3, linked with libfuse 2. Raises build.NotReachable."""
    source = SOURCE / "mount-s3"
    script = """cargo build --offline --locked --target-dir /build &&
        mkdir /out && strip -o /out/mount-s3 /build/debug/mount-s3"""

    def build(directory: Path) -> None:
        with compilers(source, RUST_COMPILERS) as container:
            with downloading("Rust crates of Mountpoint"):
                container.exec(["cargo", "fetch", "--quiet", "--locked"], workdir="/source", timeout=TIMEOUT)
            container.exec(["sh", "-c", script], workdir="/source", timeout=TIMEOUT)
            copy_out(container, "/out", directory)

    return Cache().entry("mount-s3", recipe_hash(recipe_of(source, RUST_COMPILERS), script), build) / "mount-s3"


def load(node: ClusterNode) -> None:
    """Give the node one image with all programs, under the names in the examples. Raises build.NotReachable."""
    with tempfile.TemporaryDirectory() as temporary:
        ros3fs = Path(temporary) / "ros3fs"
        ros3fs.write_text(_ROS3FS)
        ros3fs.chmod(0o755)
        executables = {
            "goofys": built("goofys") / "goofys",
            "gcsfuse": built("gcsfuse") / "gcsfuse",
            "mount-s3": mount_s3(),
            "hello_ll": programs.hello_ll(),
            "ros3fs": ros3fs,
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


def stored(node: ClusterNode, example: str, name: str) -> str:
    """Return the content of an object in the bucket of an example."""
    url = f"{GCS}/storage/v1/b/{BUCKET}/o/{name}?alt=media" if example == "gcsfuse" else f"{s3.URL}/{BUCKET}/{name}"
    return s3.get(node, url)
