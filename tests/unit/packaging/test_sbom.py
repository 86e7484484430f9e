"""The bill of materials of a small image made by the test, drawn from the image and the files in it."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).parents[3]


def load_sbom() -> ModuleType:
    """Load sbom.py, a script beside the image build files, in no package."""
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "packaging/container/sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sbom = load_sbom()

STATUS = """\
Package: fusermount3-proxy
Architecture: amd64
Version: 0.1.0
Maintainer: us <us@example>
Built-Using: glibc (= 2.36-9), gcc-12 (= 12.2.0-14), python3.11 (= 3.11.2-6),

Package: tar
Architecture: amd64
Version: 1.34
Maintainer: somebody <somebody@example>
Source: tar-source (1.33)
"""
HEADER = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\n"
FILES = {
    "var/lib/dpkg/status": STATUS,
    "usr/lib/os-release": 'NAME="Debian"\nVERSION_ID="12"\nID=debian\n',
    "usr/share/doc/fusermount3-proxy/copyright": f"{HEADER}Files: *\nCopyright: us\nLicense: Apache-2.0\n",
    "usr/share/doc/tar/copyright": "The text is in /usr/share/common-licenses/GPL-3.\n",
    "etc/passwd": "root",
}


def tarball(files: dict[str, str | bytes]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return output.getvalue()


def archive(path: Path, files: dict[str, str]) -> str:
    """Write an image as Podman saves it; return its digest."""
    says = {"title": "image", "version": "0.1.0", "licenses": "Apache-2.0 AND PSF-2.0"}
    labels = {f"org.opencontainers.image.{name}": value for name, value in says.items()}
    configuration = json.dumps({"created": "2026-11-20T12:00:00Z", "config": {"Labels": labels}})
    digest = hashlib.sha256(configuration.encode()).hexdigest()
    manifest = json.dumps([{"Config": f"{digest}.json", "Layers": ["layer.tar"]}])
    layer = tarball(dict(files))
    path.write_bytes(tarball({"layer.tar": layer, f"{digest}.json": configuration, "manifest.json": manifest}))
    return digest


@pytest.fixture
def bill(tmp_path: Path) -> dict[str, Any]:
    archive(tmp_path / "image.tar", FILES)
    found: dict[str, Any] = json.loads(sbom.write(tmp_path / "image.tar").read_text())
    return found


def test_it_is_valid(tmp_path: Path) -> None:
    archive(tmp_path / "image.tar", FILES)
    output = sbom.write(tmp_path / "image.tar")
    assert output == tmp_path / "image.cdx.json"
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(output.read_text()) is None


def test_it_says_of_which_image_it_is(tmp_path: Path) -> None:
    digest = archive(tmp_path / "image.tar", FILES)
    metadata = json.loads(sbom.write(tmp_path / "image.tar").read_text())["metadata"]
    assert (metadata["component"]["name"], metadata["component"]["version"]) == ("image", "0.1.0")
    assert metadata["component"]["licenses"] == [{"expression": "Apache-2.0 AND PSF-2.0"}]
    assert metadata["component"]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert metadata["timestamp"] == "2026-11-20T12:00:00+00:00"


def test_each_package_has_version_licence_and_a_url_by_which_scanners_know_it(bill: dict[str, Any]) -> None:
    ours, tar = bill["components"]
    assert (tar["name"], tar["version"], tar["purl"]) == (
        "tar",
        "1.34",
        "pkg:deb/debian/tar@1.34?arch=amd64&distro=debian-12",
    )
    assert tar["licenses"] == [{"license": {"name": "GPL-3"}}]
    assert (ours["name"], ours["licenses"]) == ("fusermount3-proxy", [{"license": {"id": "Apache-2.0"}}])
    assert ours["purl"].startswith("pkg:generic/fusermount3-proxy@0.1.0?"), "it is none of Debian's"


def test_what_is_linked_statically_is_in_the_package_that_has_it(bill: dict[str, Any]) -> None:
    ours, _ = bill["components"]
    assert {each["name"]: (each["version"], each["licenses"][0]["expression"]) for each in ours["components"]} == {
        "gcc-12": ("12.2.0-14", "GPL-3.0-or-later WITH GCC-exception-3.1"),
        "glibc": ("2.36-9", "LGPL-2.1-or-later"),
        "python3.11": ("3.11.2-6", "PSF-2.0"),
    }


def test_everything_is_in_the_graph(bill: dict[str, Any]) -> None:
    graph = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    assert graph["image"] == ["fusermount3-proxy@0.1.0", "tar@1.34"]
    assert len(graph["fusermount3-proxy@0.1.0"]) == 3


def test_an_image_without_dpkg_has_records_in_its_place(tmp_path: Path) -> None:
    record, _ = STATUS.split("\n\n")
    copyright_file = "usr/share/doc/fusermount3-proxy/copyright"
    files = {"var/lib/dpkg/status.d/fusermount3-proxy": record, copyright_file: FILES[copyright_file]}
    archive(tmp_path / "image.tar", files)
    (component,) = json.loads(sbom.write(tmp_path / "image.tar").read_text())["components"]
    assert (component["name"], len(component["components"])) == ("fusermount3-proxy", 3)


def test_the_same_image_has_the_same_bill(tmp_path: Path) -> None:
    archive(tmp_path / "image.tar", FILES)
    first = sbom.write(tmp_path / "image.tar").read_bytes()
    assert sbom.write(tmp_path / "image.tar").read_bytes() == first


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GPL-2+", "GPL-2.0-or-later"),
        ("GPL-3", "GPL-3.0-only"),
        ("LGPL-2.1+", "LGPL-2.1-or-later"),
        ("BSD-3-clause", "BSD-3-Clause"),
        ("Expat", "MIT"),
        ("public-domain", None),
        ("GPL-3+ with Bison exception", None),
    ],
)
def test_debians_name_of_a_licence_is_spdxs(name: str, expected: str | None) -> None:
    assert sbom.spdx_id(name) == expected


@pytest.mark.parametrize(
    ("synopsis", "names"),
    [
        ("MIT", ["MIT"]),
        ("GPL-2+ or Artistic", ["GPL-2+", "Artistic"]),
        ("GPL-2+, and Expat", ["GPL-2+", "Expat"]),
        ("BSD-2-clause and/or ISC", ["BSD-2-clause", "ISC"]),
    ],
)
def test_a_synopsis_may_name_several_licences(synopsis: str, names: list[str]) -> None:
    assert sbom.split(synopsis) == names


def test_a_copyright_file_without_any_name_is_referred_to(tmp_path: Path) -> None:
    (tmp_path / "copyright").write_text("Do what you like.\n")
    (licence,) = sbom.licences("x", tmp_path / "copyright")
    assert licence.name == "see its copyright file"


def test_packages_of_python_are_in_it_with_the_licences_that_they_name(tmp_path: Path) -> None:
    says = {
        "Zope": "License-Expression: Apache-2.0 OR MIT",
        "older": "License: MIT",
        "oldest": "Classifier: License :: OSI Approved :: BSD License",
        "silent": "Summary: nothing",
    }
    directory = "usr/lib/fusermount3-controller"
    files = {
        f"{directory}/{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{line}\n"
        for name, line in says.items()
    }
    archive(tmp_path / "image.tar", {**FILES, **files})
    text = sbom.write(tmp_path / "image.tar").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found = {each["purl"]: each["licenses"] for each in json.loads(text)["components"] if "pypi" in each["purl"]}
    assert found == {
        "pkg:pypi/older@1.0": [{"license": {"id": "MIT"}}],
        "pkg:pypi/oldest@1.0": [{"license": {"name": "BSD License"}}],
        "pkg:pypi/silent@1.0": [{"license": {"name": "see its metadata"}}],
        "pkg:pypi/zope@1.0": [{"expression": "Apache-2.0 OR MIT"}],
    }


def test_the_bill_of_a_wheel_names_what_is_linked_and_what_is_required(tmp_path: Path) -> None:
    wheel = tmp_path / "fusermount3_proxy-1.2.3-py3-none-manylinux_2_17_x86_64.whl"
    metadata = (
        "Metadata-Version: 2.4\nName: fusermount3-proxy\nVersion: 1.2.3\nLicense: Apache-2.0\n"
        'Requires-Dist: click>=8.1\nRequires-Dist: Jinja2>=3.1.6; extra == "controller"\n'
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fusermount3_proxy-1.2.3.dist-info/METADATA", metadata)
    text = sbom.write_of_wheel(wheel, "glibc (= 2.36-9+deb12u13), gcc-12-cross (= 14)").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found = json.loads(text)
    assert found["metadata"]["component"]["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    linked = {each["name"]: each for each in found["components"]}
    assert linked["glibc"]["version"] == "2.36-9+deb12u13"
    assert linked["glibc"]["licenses"] == [{"expression": "LGPL-2.1-or-later"}]
    assert linked["gcc-12-cross"]["licenses"] == [{"expression": "GPL-3.0-or-later WITH GCC-exception-3.1"}]
    assert linked["click"]["scope"] == "required"
    assert linked["Jinja2"]["scope"] == "optional"
