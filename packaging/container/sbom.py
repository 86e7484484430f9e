"""Writes the contents of an image or a wheel beside it: a software bill of materials, CycloneDX in JSON.

    .venv/bin/python packaging/container/sbom.py build/images/fusermount3-broker.tar
    .venv/bin/python packaging/container/sbom.py --built-using 'glibc (= 2.36-9), …' build/dist/….whl

writes build/images/fusermount3-broker.cdx.json, or ….cdx.json. The image is an archive of `podman save --format
docker-archive` with one layer. Its packages come from its dpkg table; the libraries linked statically into a package,
from the package's Built-Using; the licences, from the copyright files. Packages of Python that are no package of
Debian's come, with their licences, from their metadata. Of a wheel, the bill lists what is linked into its executable,
and what it requires. The same archive gives the same bytes.
"""

import argparse
import email
import hashlib
import importlib.metadata
import json
import logging
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NamedTuple, cast
from uuid import NAMESPACE_OID, uuid5

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.contact import OrganizationalEntity
from cyclonedx.model.license import DisjunctiveLicense, License, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.spdx import fixup_id
from debian.copyright import Copyright, NotMachineReadableError
from debian.copyright import License as DebianLicense
from debian.deb822 import Packages
from packageurl import PackageURL

#: Where the controller's image has its packages of Python.
PYTHON_PACKAGES = "usr/lib/fusermount3-controller"
#: The files of an image that are read: dpkg's table, licences, the release, and metadata of packages of Python.
WANTED = ("var/lib/dpkg/status", "usr/share/doc/", "usr/lib/os-release", f"{PYTHON_PACKAGES}/")
OURS = "fusermount3-proxy"

#: Licences of libraries whose copyright files are not machine-readable, by the name of their source without a version.
LIBRARIES = {
    "gcc": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "glibc": "LGPL-2.1-or-later",
    # Where Debian has them for other architectures to link.
    "cross-toolchain-base": "LGPL-2.1-or-later",
    "gcc-12-cross": "GPL-3.0-or-later WITH GCC-exception-3.1",
    "python": "PSF-2.0",
}

#: SPDX's names of licences that have another name in Debian's copyright files, and that are not a name with a version.
SPDX_NAMES = {"Artistic": "Artistic-1.0-Perl", "Expat": "MIT", "expat": "MIT", "PSF-2": "PSF-2.0", "Python": "PSF-2.0"}


class Image(NamedTuple):
    """An image: its labels, the digest of its configuration, its creation time, and the wanted files."""

    name: str
    version: str
    licences: str
    digest: str
    created: datetime
    files: Path


def unpack(archive: Path, directory: Path) -> Image:
    """Extract the wanted files of the image into the directory, and return the image's description."""
    with tarfile.open(archive) as image:
        (manifest,) = json.load(_file(image, "manifest.json"))
        configuration = json.load(_file(image, manifest["Config"]))
        (layer,) = manifest["Layers"]
        with tarfile.open(fileobj=_file(image, layer)) as files:
            files.extractall(directory, [each for each in files if each.name.startswith(WANTED)])
    labels = configuration["config"]["Labels"]
    return Image(
        name=labels["org.opencontainers.image.title"],
        version=labels["org.opencontainers.image.version"],
        licences=labels["org.opencontainers.image.licenses"],
        digest=Path(manifest["Config"]).stem,
        created=datetime.fromisoformat(configuration["created"]),
        files=directory,
    )


def _file(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    assert file is not None, f"{name} is no file"
    return file


def packages(files: Path) -> Iterator[Packages]:
    """Yield dpkg's records of the packages in the image; for an image without dpkg, the substitute for its table."""
    table = files / "var/lib/dpkg/status"
    for each in [table, *sorted(table.with_name("status.d").glob("*"))]:
        if each.is_file():
            with each.open(encoding="utf-8") as content:
                yield from Packages.iter_paragraphs(content, use_apt_pkg=False)


def release(files: Path) -> str:
    """Return the release's name in package URLs: debian-12; "" if it is not one of Debian's (os-release(5))."""
    file = files / "usr/lib/os-release"
    found = re.search(r'^VERSION_ID="(.+)"$', file.read_text() if file.is_file() else "", flags=re.MULTILINE)
    return f"debian-{found[1]}" if found else ""


def component(package: Packages, files: Path) -> Component:
    """Return a binary package, with the libraries linked into it."""
    name, version = package["Package"], package["Version"]
    qualifiers = {"arch": package["Architecture"], "distro": release(files)}
    kind = "generic" if _source(package) == OURS else "deb"
    return Component(
        type=ComponentType.APPLICATION if name == OURS else ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=f"{name}@{version}",
        supplier=OrganizationalEntity(name=package["Maintainer"]),
        licenses=licences(_source(package), files / "usr/share/doc" / name / "copyright"),
        purl=PackageURL(kind, None if kind == "generic" else "debian", name, version, qualifiers),
        components=[linked(name, *source) for source in built_using(package)],
    )


def python_components(files: Path) -> Iterator[Component]:
    """Yield the packages of Python that are in the image beside Debian's, by name."""
    found = importlib.metadata.distributions(path=[str(files / PYTHON_PACKAGES)])
    for each in sorted(found, key=lambda each: each.name.lower()):
        yield Component(
            type=ComponentType.LIBRARY,
            name=each.name,
            version=each.version,
            bom_ref=f"pypi/{each.name}@{each.version}",
            licenses=[_python_licence(each.metadata)],
            purl=PackageURL("pypi", None, each.name.lower().replace("_", "-"), each.version),
        )


def _python_licence(metadata: importlib.metadata.PackageMetadata) -> License:
    """Return what the core metadata say: an expression of SPDX's, or, in older ones, a text or a classifier."""
    fields = metadata.json
    if expression := fields.get("license_expression"):
        return LicenseExpression(str(expression))
    classifiers = [each for each in fields.get("classifier", []) if each.startswith("License :: ")]
    text = str(fields.get("license") or (classifiers or ["see its metadata"])[0].rpartition(" :: ")[2])
    return _licence(text.partition("\n")[0])


def _source(package: Packages) -> str:
    """Return the name of the source package (deb-control(5))."""
    return str(package.get("Source", package["Package"])).partition(" ")[0]


def built_using(package: Packages) -> list[tuple[str, str]]:
    """Return name and version of each source of which the package contains parts, from its Built-Using."""
    return re.findall(r"(\S+) \(= ([^)]+)\)", package.get("Built-Using", ""))


def linked(package: str, source: str, version: str) -> Component:
    """Return the part of a source package that is in a binary package of another source."""
    return Component(
        type=ComponentType.LIBRARY,
        name=source,
        version=version,
        bom_ref=f"{package}/{source}@{version}",
        licenses=[LicenseExpression(LIBRARIES[name])] if (name := family(source)) in LIBRARIES else [],
        purl=PackageURL("deb", "debian", source, version, {"arch": "source"}),
    )


def family(source: str) -> str:
    """Return the name of a source without its version: python of python3.11."""
    return re.sub("[-.0-9]+$", "", source)


def licences(source: str, copyright_file: Path) -> list[License]:
    """Return the licences of a package, by its source's name and from its copyright file.

    A file that is not machine-readable (Debian's copyright-format/1.0) may name some licences whose text Debian keeps
    in one place for all packages, but does not say whether a later version would do; or else people have to read it.
    """
    if family(source) in LIBRARIES:
        return [LicenseExpression(LIBRARIES[family(source)])]
    try:
        with copyright_file.open(encoding="utf-8") as content:
            paragraphs = Copyright(content, strict=False).all_files_paragraphs()
            synopses = [cast("DebianLicense", each.license).synopsis for each in paragraphs if each.license]
    except (NotMachineReadableError, ValueError):
        found = re.findall(r"/usr/share/common-licenses/([A-Za-z0-9.-]*[A-Za-z0-9])", copyright_file.read_text("utf-8"))
        return [DisjunctiveLicense(name=name) for name in sorted(set(found)) or ["see its copyright file"]]
    names = sorted({name for synopsis in synopses for name in split(synopsis)})
    return [_licence(name) for name in names]


def _licence(name: str) -> License:
    known = spdx_id(name)
    return DisjunctiveLicense(id=known) if known else DisjunctiveLicense(name=name)


def split(synopsis: str) -> list[str]:
    """Return the names in a synopsis: "GPL-2+ or Artistic" has two."""
    return [name for name in re.split(r",? (?:and/or|and|or) |, ", synopsis.strip()) if name]


def spdx_id(name: str) -> str | None:
    """Return SPDX's name of a licence with this name in Debian; None if SPDX doesn't know it."""
    versioned = re.fullmatch(r"(A?GPL|LGPL|GFDL)-(\d)(?:\.(\d))?(\+?)", name)
    if versioned:
        family, major, minor, later = versioned.groups()
        return fixup_id(f"{family}-{major}.{minor or 0}-{'or-later' if later else 'only'}")
    return fixup_id(SPDX_NAMES.get(name, name))


def bill(image: Image, components: Iterable[Component]) -> Bom:
    """Return the bill of materials of an image, which depends on the image only."""
    subject = Component(
        type=ComponentType.CONTAINER,
        name=image.name,
        version=image.version,
        bom_ref=image.name,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=image.digest)],
        licenses=[LicenseExpression(image.licences)],
        purl=PackageURL("oci", None, image.name, f"sha256:{image.digest}"),
    )
    bom = Bom(components=components, serial_number=uuid5(NAMESPACE_OID, image.digest))
    bom.metadata.timestamp = image.created
    bom.metadata.component = subject
    bom.register_dependency(subject, bom.components)
    for each in bom.components:
        bom.register_dependency(each, each.components)
    return bom


def write_of_wheel(wheel: Path, linked_sources: str) -> Path:
    """Write the bill of materials of a wheel, with what is linked into its executable, as in Built-Using."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with zipfile.ZipFile(wheel) as content:
        name = next(each for each in content.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(content.read(name))
        created = datetime(*content.getinfo(name).date_time, tzinfo=UTC)
    subject = Component(
        type=ComponentType.APPLICATION,
        name=metadata["Name"],
        version=metadata["Version"],
        bom_ref=wheel.name,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        licenses=[LicenseExpression(metadata["License"])],
        purl=PackageURL("pypi", None, metadata["Name"], metadata["Version"], {"file_name": wheel.name}),
    )
    parts = [linked(OURS, *source) for source in re.findall(r"(\S+) \(= ([^)]+)\)", linked_sources)]
    bom = Bom(components=[*parts, *map(_requirement, metadata.get_all("Requires-Dist") or [])])
    bom.serial_number = uuid5(NAMESPACE_OID, digest)
    bom.metadata.timestamp = created
    bom.metadata.component = subject
    bom.register_dependency(subject, bom.components)
    return _write(bom, wheel.with_suffix(".cdx.json"))


def _requirement(line: str) -> Component:
    """Return a package that pip installs beside a wheel, from a line of its Requires-Dist."""
    found = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?([^;]*)", line)
    assert found is not None, line
    return Component(
        type=ComponentType.LIBRARY,
        name=found[1],
        bom_ref=f"requires {line}",
        scope=ComponentScope.OPTIONAL if "extra ==" in line else ComponentScope.REQUIRED,
        description=f"any version {found[2].strip()}" if found[2].strip() else "any version",
        purl=PackageURL("pypi", None, found[1].lower()),
    )


def write(archive: Path) -> Path:
    """Write the bill of materials of an image, and return its path."""
    with tempfile.TemporaryDirectory() as temporary:
        image = unpack(archive, Path(temporary))
        of_debian = [component(each, image.files) for each in packages(image.files)]
        bom = bill(image, [*of_debian, *python_components(image.files)])
    return _write(bom, archive.with_suffix(".cdx.json"))


def _write(bom: Bom, output: Path) -> Path:
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    output.write_text(f"{text}\n", encoding="utf-8")
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--built-using", default="", help="what is linked into the executable of a wheel")
    parser.add_argument("archive", type=Path, nargs="+", help="an image, as podman saves it, or a wheel")
    logging.getLogger("debian").setLevel(logging.ERROR)  # it warns about copyright files of an older format
    arguments = parser.parse_args()
    for archive in arguments.archive:
        if archive.suffix == ".whl":
            write_of_wheel(archive, arguments.built_using)
        else:
            write(archive)


if __name__ == "__main__":
    main()
