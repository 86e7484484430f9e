"""Test that the images build reproducibly, that their bills of materials match their contents, and that they work."""

from __future__ import annotations

import json
import platform
import re
import secrets
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from fusermount3_proxy import __version__
from release.build import source_url
from tests.e2e.conftest import wait_until
from tests.e2e.documented import block
from tests.e2e.sshfs import use_sshfs
from tests.kubernetes.daemonset import broker_of, publish_and_unpublish
from tests.kubernetes.objects import PACKAGING, containers, objects, the
from tests.lab import debian
from tests.lab.cache import sha256
from tests.lab.commands import CommandFailed, run
from tests.lab.images import REPOSITORY, SSHFS, image_tag
from tests.lab.node import Node
from tests.lab.podman import FUSE_STAND_IN, LIMITS, PREFIX, RUNTIME, Container, Options, Volume, mountinfo, remove
from tests.lab.programs import whoamifs

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Images contain packages of the release that runs here.
RELEASE = platform.freedesktop_os_release()["VERSION_CODENAME"]

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.parametrize("suite", [RELEASE], indirect=True)]

SOURCES = Path(__file__).parents[2]
BROKER, PROXY = "fusermount3-broker", "fusermount3-proxy"
COMMANDS = {
    name: block("containers.md", f"podman load --input build/images/{name}.tar").commands for name in (BROKER, PROXY)
}


def build(sources: Path, packages: Path, output: Path, *environment: str) -> None:
    """Build the images with the scripts in `sources`, like `make images`."""
    scripts = sources / "packaging/container"
    shell = ["sh", "-c", 'umask "$1"; shift; exec "$@"', "sh"]
    umask, *settings = environment or ("022",)
    run([*shell, umask, "env", *settings, scripts / "build", packages, output, REPOSITORY], timeout=600)
    run([sys.executable, scripts / "sbom.py", *sorted(output.glob("*.tar"))])


@pytest.fixture(scope="session")
def images(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the archives of both images and their bills of materials."""
    output = tmp_path_factory.mktemp("images")
    build(SOURCES, packages, output)
    return output


@dataclass(frozen=True)
class Loaded:
    """Podman's names of the images."""

    broker: str
    proxy: str


@pytest.fixture(scope="session")
def loaded(images: Path) -> Iterator[Loaded]:
    """Both images, loaded from their archives."""
    names = Loaded(*(f"{REPOSITORY}/{name}:{__version__}" for name in (BROKER, PROXY)))
    for load, *_ in COMMANDS.values():
        run(shlex.split(load.replace("build/images", str(images))), timeout=300)
    yield names
    run(["podman", "image", "rm", "--force", names.broker, names.proxy])


def bill(images: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((images / f"{name}.cdx.json").read_text())
    return found


def inspect(image: str) -> dict[str, Any]:
    (found,) = json.loads(run(["podman", "image", "inspect", image]).stdout)
    assert isinstance(found, dict)
    return found


# Contents


def test_built_elsewhere_they_are_the_same(packages: Path, images: Path, tmp_path: Path) -> None:
    run([SOURCES / "packaging/export", tmp_path / "elsewhere"])
    shutil.copytree(packages, tmp_path / "debs")
    build(tmp_path / "elsewhere", tmp_path / "debs", tmp_path / "output", "077", "TZ=Asia/Kathmandu", "LC_ALL=C")
    names = sorted(path.name for path in images.iterdir())
    assert names == sorted(f"{image}.{kind}" for image in (BROKER, PROXY) for kind in ("cdx.json", "tar"))
    assert {name: sha256(tmp_path / "output" / name) for name in names} == {
        name: sha256(images / name) for name in names
    }


def test_the_image_of_the_proxy_holds_it_and_licences(packages: Path, loaded: Loaded, tmp_path: Path) -> None:
    files = tmp_path / "files.tar"
    container = run(["podman", "create", loaded.proxy]).stdout.strip()
    try:
        run(["podman", "export", "--output", files, container])
    finally:
        remove(container)
    run(["tar", "--extract", "--file", files, "--directory", tmp_path])
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} - {files.name}
    assert found == {
        "fusermount3-proxy",
        *(f"licenses/{path.name}" for path in (SOURCES / "packaging/static/licenses").iterdir()),
        "licenses/LICENSE",
        "usr/share/doc/fusermount3-proxy/copyright",
        "var/lib/dpkg/status.d/fusermount3-proxy",
    }
    run(["dpkg-deb", "--extract", debian.debs(packages)[PROXY], tmp_path / "deb"])
    assert sha256(tmp_path / "fusermount3-proxy") == sha256(tmp_path / "deb/usr/bin/fusermount3-proxy")
    assert run([tmp_path / PROXY, "--version"]).stdout.startswith(f"fusermount3-proxy version: {__version__}\n")


@pytest.mark.parametrize("name", [BROKER, PROXY])
def test_labels_and_command(loaded: Loaded, name: str) -> None:
    found = inspect(loaded.broker if name == BROKER else loaded.proxy)
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in found["Labels"].items()}
    assert (labels["title"], labels["version"]) == (name, __version__)
    assert labels["licenses"].split(" AND ")[0] == "Apache-2.0"
    assert (labels["source"], labels.get("revision")) == (source_url(SOURCES), None)
    assert found["Config"]["Entrypoint"] == [BROKER if name == BROKER else "/fusermount3-proxy"]
    assert len(found["RootFS"]["Layers"]) == 1


def test_the_broker_has_no_package_manager_and_nothing_of_the_machine_that_built_it(loaded: Loaded) -> None:
    look = "cat /etc/apt/sources.list.d/*; ls -A /var/log; command -v apt-get; find / -xdev -name '*.deb'"
    with Container(loaded.broker, ("sleep", "infinity"), Options(extra=["--entrypoint="])) as container:
        assert container.exec(["sh", "-c", look], check=False).stdout.split() == []


def test_the_date_of_the_brokers_account_is_that_of_the_release_and_not_of_the_build(loaded: Loaded) -> None:
    released = int(run(["dpkg-parsechangelog", "--file", SOURCES / "debian/changelog", "-S", "Timestamp"]).stdout)
    with Container(loaded.broker, ("sleep", "infinity"), Options(extra=["--entrypoint="])) as container:
        shadow = container.exec(["cat", "/etc/shadow"]).stdout
    assert {line.split(":")[2] for line in shadow.splitlines()} == {str(released // 86400)}


# Bills of materials


@pytest.mark.parametrize("name", [BROKER, PROXY])
def test_a_bill_is_valid_and_of_this_image(images: Path, loaded: Loaded, name: str) -> None:
    text = (images / f"{name}.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    image = inspect(loaded.broker if name == BROKER else loaded.proxy)
    assert bill(images, name)["metadata"]["component"]["hashes"][0]["content"] == image["Id"]


def test_the_brokers_has_each_package_of_the_image_with_a_licence(images: Path, loaded: Loaded) -> None:
    query = ["dpkg-query", "--show", "--showformat=${Package} ${Version}\\n"]
    with Container(loaded.broker, ("sleep", "infinity"), Options(extra=["--entrypoint="])) as container:
        installed = dict(line.split() for line in container.exec(query).stdout.splitlines())
    components = bill(images, BROKER)["components"]
    assert {each["name"]: each["version"] for each in components} == installed
    assert {"python3.11-minimal", "python3-grpcio", BROKER, PROXY} <= installed.keys()
    assert [each["name"] for each in components if not each.get("licenses")] == []


@pytest.mark.parametrize("name", [BROKER, PROXY])
def test_each_has_what_the_linker_puts_into_the_executable(images: Path, tmp_path: Path, name: str) -> None:
    compiler = f"CC=cc -Wl,-Map={tmp_path}/map"
    script = SOURCES / "packaging/static/build.py"
    run(["env", compiler, "/usr/bin/python3", script, "--output", tmp_path / "proxy"], timeout=300)
    members = (tmp_path / "map").read_text().partition("Archive member included")[2].partition("\n\n\n")[0]
    archives = {Path(each).resolve() for each in re.findall(r"^(/\S+\.a)\(", members, flags=re.MULTILINE)}
    owners = {run(["dpkg", "--search", each]).stdout.partition(":")[0] for each in archives}
    linked = {run(["dpkg-query", "--show", "--showformat=${source:Package}", each]).stdout for each in owners}
    (proxy,) = [each for each in bill(images, name)["components"] if each["name"] == PROXY]
    assert len(linked) == 3
    assert {each["name"] for each in proxy["components"]} == linked


# Use


def substituted(words: list[str], places: dict[str, Path], names: dict[str, str]) -> list[str]:
    """Return the words of a documented command, with the documented directories and names replaced by the test's."""
    found = [names.get(word, word) for word in words]
    split = [word.partition(":") for word in found]
    return [str(places.get(source, source)) + colon + target for source, colon, target in split]


class ContainerOfBroker:
    """The broker, run as in docs/containers.md, but without the option `without`."""

    def __init__(self, image: str, directory: Path, without: str = "") -> None:
        self.name = f"{PREFIX}{secrets.token_hex(4)}"
        self.sockets, state = directory / "sockets", directory / "state"
        for each in (self.sockets, state):
            each.mkdir(exist_ok=True)
        places = {"/run/fusermount3-proxy": self.sockets, "/var/lib/fusermount3-broker": state}
        names = {f"localhost/{BROKER}:{__version__}": image, BROKER: self.name}
        words = substituted(shlex.split(COMMANDS[BROKER][-1]), places, names)
        assert (words[:3], words[-1]) == (["podman", "run", "--detach"], image)
        kept = [each for each in words[2:] if not without or not each.startswith(without)]
        assert len(kept) == len(words[2:]) - bool(without)
        self.command = [*words[:2], *RUNTIME, *LIMITS, *kept]

    def __enter__(self) -> ContainerOfBroker:
        try:
            run(self.command)
            wait_until(lambda: "serving on" in self.logs(), 60)
        except BaseException:
            print(self.logs())
            remove(self.name)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        remove(self.name)

    def logs(self) -> str:
        result = run(["podman", "logs", self.name], check=False)
        return result.stdout + result.stderr

    def ask(self, *words: str) -> str:
        return run(["podman", *RUNTIME, "exec", self.name, BROKER, *words]).stdout

    def is_healthy(self) -> bool:
        """Run the image's own health check, and return its result."""
        return run(["podman", *RUNTIME, "healthcheck", "run", self.name], check=False).returncode == 0

    def stop(self) -> None:
        """End it like `podman stop`, and check that it exits with status 0."""
        run(["podman", *RUNTIME, "stop", "--time", "60", self.name], timeout=90)
        assert run(["podman", "inspect", "--format={{.State.ExitCode}}", self.name]).stdout == "0\n"


@pytest.fixture
def with_the_proxy(loaded: Loaded, tmp_path: Path) -> Iterator[str]:
    """The name of an image with sshfs and our proxy, built with the documented lines."""
    lines = block("containers.md", "COPY --from").text.replace(f"localhost/{PROXY}:{__version__}", loaded.proxy)
    (tmp_path / "Containerfile").write_text(f"FROM {image_tag(SSHFS)}\n{lines}")
    tag = f"{REPOSITORY}/built:{secrets.token_hex(8)}"
    offline = ["--network=none", "--pull=never"]
    run(["podman", *RUNTIME, "build", *LIMITS, *offline, "--tag", tag, tmp_path], timeout=300)
    yield tag
    run(["podman", "image", "rm", "--force", tag])


@pytest.mark.parametrize(("user", "mountpoint"), [("0:0", "/mnt"), ("1000:1000", "/home/user/mnt")])
def test_sshfs_mounts_with_both(
    loaded: Loaded, with_the_proxy: str, tmp_path: Path, user: str, mountpoint: str
) -> None:
    before = [mount for mount in mountinfo() if mount.is_fuse]
    with ContainerOfBroker(loaded.broker, tmp_path) as broker:
        options = Options(user=user, volumes=[FUSE_STAND_IN, Volume(broker.sockets, "/run/fusermount3-proxy")])
        with Container(with_the_proxy, options=options) as container:
            use_sshfs(container, mountpoint)
        assert json.loads(broker.ask("mounts", "--json")) == []
        broker.stop()
    assert [mount for mount in mountinfo() if mount.is_fuse] == before


def test_a_mount_outlives_the_container_and_the_next_one_knows_it(
    loaded: Loaded, with_the_proxy: str, tmp_path: Path
) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    volumes = [FUSE_STAND_IN, Volume(sockets, "/run/fusermount3-proxy"), Volume(whoamifs(), "/usr/bin/whoamifs")]
    with Container(with_the_proxy, options=Options(user="1000:1000", volumes=volumes)) as container:
        with ContainerOfBroker(loaded.broker, tmp_path) as broker:
            container.exec(["whoamifs", "/home/user/mnt"])
            broker.stop()
        assert container.exec(["cat", "/home/user/mnt/whoami"]).stdout.startswith("uid=1000 gid=1000 pid=")
        with ContainerOfBroker(loaded.broker, tmp_path) as broker:
            (mount,) = json.loads(broker.ask("mounts", "--json"))
            assert (mount["mountpoint"], mount["state"]) == ("/home/user/mnt", "live")
            container.exec(["fusermount3", "-u", "/home/user/mnt"])
            assert json.loads(broker.ask("mounts", "--json")) == []
        assert container.fuse_mounts() == []


def test_no_process_has_more_than_the_documented_capabilities_and_the_front_none(
    loaded: Loaded, tmp_path: Path
) -> None:
    with ContainerOfBroker(loaded.broker, tmp_path) as broker:
        front = json.loads(broker.ask("status", "--json"))["front"]["pid"]
        status = Path(f"/proc/{front}/status").read_text()
        assert re.search(r"^CapEff:\s0+$", status, flags=re.MULTILINE)
        assert re.search(r"^Uid:\s(\d+)", status, flags=re.MULTILINE)[1] != "0"  # type: ignore[index]  # else it raises
        assert "is incomplete; missing" not in broker.logs()


def test_it_is_healthy_as_long_as_its_mounter_answers(loaded: Loaded, tmp_path: Path) -> None:
    with ContainerOfBroker(loaded.broker, tmp_path) as broker:
        wait_until(broker.is_healthy)
        mounter = psutil.Process(json.loads(broker.ask("status", "--json"))["mounter"]["pid"])
        mounter.suspend()
        stopped = [mounter, *mounter.children()]
        for child in stopped[1:]:
            child.suspend()
        wait_until(lambda: not broker.is_healthy())  # the mounter's last answer is valid for a second
        for process in stopped:
            process.resume()
        wait_until(broker.is_healthy)


def test_it_is_not_healthy_without_the_device(loaded: Loaded, tmp_path: Path) -> None:
    with ContainerOfBroker(loaded.broker, tmp_path, without="--device") as broker:
        assert not broker.is_healthy()

        def problem() -> str:
            with pytest.raises(CommandFailed) as caught:
                broker.ask("health")
            return str(caught.value)

        # A busy machine may take longer than the second in which the mounter has to answer.
        wait_until(lambda: "the mounter can't open /dev/fuse" in problem())


def test_the_daemonset_runs_this_image(loaded: Loaded) -> None:
    with Node() as node:
        node.seen(node.kubelet / "pods").mkdir()
        with broker_of(node, [loaded.broker], BROKER) as plugin:
            publish_and_unpublish(node, plugin)


def test_the_device_plugins_first_container_finds_the_proxy_in_it(loaded: Loaded, tmp_path: Path) -> None:
    daemonset = the("DaemonSet", objects((PACKAGING / "device-plugin/device-plugin.yaml").read_text()))
    first, *_ = containers(daemonset["spec"]["template"])
    assert first["image"] == BROKER
    shell, *words = first["command"]
    options = ["--rm", "--read-only", "--cap-drop=all", "--network=none", f"--entrypoint={shell}"]
    run(["podman", *RUNTIME, "run", *LIMITS, *options, "--volume", f"{tmp_path}:/proxy", loaded.broker, *words])
    assert run([tmp_path / PROXY, "--version"]).stdout.startswith(f"fusermount3-proxy version: {__version__}\n")


def added_by(kustomization: str) -> Any:
    """Return the container that this kustomization or component adds to a DaemonSet."""
    patches = yaml.safe_load((PACKAGING / kustomization / "kustomization.yaml").read_text())["patches"]
    operations = [each for patch in patches for each in yaml.safe_load(patch["patch"])]
    (container,) = [each["value"] for each in operations if each["path"].endswith("ontainers/-")]
    assert container["image"] == BROKER
    return container


def test_the_container_that_passes_on_metrics_finds_its_program_in_it(loaded: Loaded) -> None:
    added = added_by("metrics")
    entrypoint, *words = added["command"]
    user = f"{added['securityContext']['runAsUser']}:{added['securityContext']['runAsGroup']}"
    extra = ["--cap-drop=all", "--security-opt=no-new-privileges", f"--entrypoint={entrypoint}"]
    options = Options(user=user, read_only=True, extra=extra)
    with Container(loaded.broker, [*words, *added["args"]], options) as container:
        connect = ["socat", "-u", "OPEN:/dev/null", f"TCP:127.0.0.1:{added['ports'][0]['containerPort']}"]
        wait_until(lambda: container.exec(connect, check=False).returncode == 0)
        assert container.stop(20) != 137


def test_the_container_that_writes_the_cdi_file_finds_its_program_in_it(loaded: Loaded, tmp_path: Path) -> None:
    added = added_by("device-plugin-cdi")
    places = [mount["mountPath"] for mount in added["volumeMounts"]]
    assert places == ["/etc/cdi", "/opt/fusermount3-proxy"]
    volumes = []
    for place in places:
        directory = tmp_path / Path(place).name
        directory.mkdir()
        volumes += ["--volume", f"{directory}:{place}"]
    (tmp_path / "fusermount3-proxy/fusermount3-proxy").touch()
    entrypoint, *words = added["command"]
    options = ["--rm", "--read-only", "--cap-drop=all", "--network=none", f"--entrypoint={entrypoint}"]
    command = ["podman", *RUNTIME, "run", *LIMITS, *options, *volumes, loaded.broker]
    assert "Warning" not in run([*command, *words, *added["args"]]).stderr
    (written,) = (tmp_path / "cdi").iterdir()
    assert json.loads(written.read_text())["kind"] == "fusermount3-proxy.dev/fuse"
