"""The commands and files in the documentation, for the tests that execute them.

`EXECUTED` and `NOT_EXECUTED` list all of them; `tests/unit/documents/test_documented_commands.py` checks that. A block
without a language holds shell commands; `Containerfile` is another executable kind. Blocks in other languages, such as
text and manifests, are only to be read.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.lab.broker import PROGRAM, PROXY
from tests.lab.cache import Cache
from tests.lab.commands import run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.lab.broker import Broker

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    path.name: path for path in (*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), ROOT / "packaging/pypi.md")
}

CDI_DIRECTORY = Path("/etc/cdi")
"""Podman 4.3 reads this directory and /var/run/cdi, and has no setting for another one."""
CDI_FILE = "fusermount3-proxy-lab.json"

_SOURCE = "test_installed_from_source.py"

#: The test that reads a block here and executes it, by page and beginning of the block.
EXECUTED = {
    ("CONTRIBUTING.md", ".venv/bin/python"): "test_contributing.py",
    ("README.md", "podman run"): "test_any_image.py",
    ("ci.md", "podman build"): "test_builds_and_compose.py",
    ("containers.md", "fusermount3-broker cdi generate"): "test_any_image.py",
    ("containers.md", "docker run"): "test_any_image.py",
    ("containers.md", "RUN for each"): "test_built_images.py",
    ("containers.md", "COPY fusermount3-proxy /usr/bin/\n"): "test_built_images.py",
    ("containers.md", "COPY fusermount3-proxy /usr/bin/fusermount3\n"): "test_built_images.py",
    ("containers.md", "podman run"): "test_built_images.py",
    ("containers.md", "podman load --input build/images/fusermount3-proxy.tar"): "test_images.py",
    ("containers.md", "COPY --from"): "test_images.py",
    ("containers.md", "kubectl apply"): "test_device_plugin_on_a_node.py",
    ("containers.md", "kubectl delete"): "test_device_plugin_on_a_node.py",
    ("containers.md", "podman load --input build/images/fusermount3-broker.tar"): "test_images.py",
    ("fuse-programs.md", "podman run --rm -it"): "test_on_a_host.py",
    ("index.md", "make demo"): "test_demo.py",
    ("install-systemd.md", "make static"): _SOURCE,
    ("install-systemd.md", "apt-get install gcc"): _SOURCE,
    ("install-systemd.md", "python3 -m venv"): _SOURCE,
    ("install-systemd.md", "fusermount3-broker check-config"): _SOURCE,
    ("install-systemd.md", "$EDITOR"): _SOURCE,
    ("kubernetes.md", "FROM debian:12"): "test_built_images.py",
    ("kubernetes.md", "kubectl apply --kustomize"): "driver.py",
    ("kubernetes.md", "kubectl create namespace"): "test_installations.py",
    ("kubernetes.md", "ctr "): "test_pages.py",
    ("kubernetes.md", "kubectl delete --kustomize"): "driver.py",
    ("kubernetes.md", "helm uninstall"): "test_installations.py",
    ("kubernetes.md", "kubectl create secret"): "server.py",
    ("kubernetes.md", "kubectl apply --filename"): "first_pod.py",
    ("kubernetes.md", "kubectl describe pod"): "test_pages.py",
    ("kubernetes.md", "kubectl --namespace mfcp-system"): "test_installations.py",
    ("messages.md", "journalctl"): _SOURCE,
    ("operations.md", "systemctl enable"): _SOURCE,
    ("operations.md", "curl"): _SOURCE,
    ("operations.md", "helm upgrade"): "test_installations.py",
    ("programs.md", "FUSERMOUNT3PROXY_"): "test_other_names.py",
    ("templates.md", "fusermount3-controller render"): "test_templates.py",
    ("templates.md", "fusermount3-controller new-template"): "test_templates.py",
    ("templates.md", "kubectl apply --kustomize"): "installed_controller.py",
    ("troubleshooting.md", "jq "): "payload.py",
    ("troubleshooting.md", "ln -s"): "engines.py",
    ("troubleshooting.md", "mkdir -p"): "labels.py",
    ("troubleshooting.md", "kubectl delete pods"): "test_device_plugin_on_a_node.py",
    ("where-it-runs.md", "docker compose up"): "test_on_a_host.py",
    ("where-it-runs.md", "podman run"): "test_rootless_podman.py",
    ("pypi.md", "apt-get install"): "test_pip.py",
    ("pypi.md", "python3 -m venv"): "test_pip.py",
    ("pypi.md", "cd /opt"): "test_pip.py",
    ("pypi.md", "podman run"): "test_pip.py",
    ("pypi.md", "fusermount3-broker cdi generate"): "test_pip.py",
}

#: The reason why no test executes a block, and the test that replaces it, by page and beginning of the block.
NOT_EXECUTED = {
    ("CONTRIBUTING.md", "make venv static lab-packages"): "`make test` does so before any test",
    ("CONTRIBUTING.md", "make cluster"): "tests/cluster/test_developers_node.py does so in a directory of its own",
    ("README.md", "make demo"): "its second line is what runs all this; the first is executed from index.md",
    ("README.md", "make venv static"): "`make test` does so before any test; each broker of the tests is started so, "
    "but with a directory of its own, and not as that of the host",
    ("README.md", ".venv/bin/fusermount3-broker cdi"): "executed from containers.md, with other paths",
    ("containers.md", "fusermount3-broker device-plugin"): "a kubelet that is a fake has a directory of its own, see "
    "tests/e2e/test_device_plugin_with_a_fake_kubelet.py",
    (
        "install-systemd.md",
        "make deb",
    ): "tests/packaging builds in clean trees of both releases, and installs by apt-get",
    ("install-systemd.md", "dnf install"): "Fedora is in no registry that the tests reach; tests/packaging/test_rpm.py "
    "does so on Debian, by rpmbuild and rpm",
    ("kubernetes.md", "podman load"): "executed from containers.md",
    ("templates.md", "kubectl create rolebinding"): "tests/unit/documents/test_templates.py compares it with the "
    "manifests; what is bound is tested in tests/unit/controller/test_mount_pod_keeper.py",
    (
        "programs.md",
        "fuse-starter -- sshfs",
    ): "tests/e2e/csi/test_fuse_starter.py does so with programs without a server",
    ("releases.md", "sha256sum"): "tests/unit/release/test_statements.py does so with files of its own",
    ("releases.md", "git checkout"): "`make release-check` builds twice and compares",
    ("releases.md", "jq "): "tests/unit/release/test_statements.py finds the commit in the same place",
    ("troubleshooting.md", "fusermount3-broker status"): "both are executed, from other pages",
    ("programs.md", "fuse-starter --fd-passing"): "the same",
}


class Block(NamedTuple):
    """A fenced block of a page: its language, empty if there is none, and its lines."""

    page: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of the block, one per line; a backslash continues a line."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def blocks() -> list[Block]:
    """Return the fenced blocks of all pages, in order."""
    return [
        Block(page, language, textwrap.dedent(text))
        for page, path in PAGES.items()
        for language, text in re.findall(r"^ *```(\S*)\n(.*?)^ *```$", path.read_text(), re.MULTILINE | re.DOTALL)
    ]


def block(page: str, beginning: str) -> Block:
    """Return the block of the page with this beginning; it must be in `EXECUTED`."""
    assert (page, beginning) in EXECUTED
    (found,) = [each for each in blocks() if each.page == page and each.text.startswith(beginning)]
    return found


def documented(command: str, page: str = "containers.md") -> list[str]:
    """Return the words of the one command of the page that begins with `command`."""
    found = [line for each in blocks() if each.page == page for line in each.commands if line.startswith(f"{command} ")]
    (line,) = found
    return shlex.split(line)


def options_of(command: str, page: str = "containers.md") -> list[str]:
    """Return the options of the one command of the page that begins with `command`, which runs a container."""
    words = documented(command, page)
    return words[2 : words.index("IMAGE")]


def with_paths_of(broker: Broker, options: Iterable[str], proxy: Path = PROXY) -> list[str]:
    """Return the options with each path of an installed host before a colon replaced by the path on this host."""
    proxies = ("/usr/bin/fusermount3-proxy", "$PWD/build/static/fusermount3-proxy")
    here = {"/run/fusermount3-proxy": str(broker.socket.parent), **dict.fromkeys(proxies, str(proxy))}
    split = [option.partition(":") for option in options]
    return [here.get(source, source) + colon + target for source, colon, target in split]


@contextlib.contextmanager
def known_to_engines(broker: Broker) -> Iterator[None]:
    """Register the device, backed by this broker, with the container engines of this host until the block ends.

    A file left by a killed test run is overwritten. Concurrent test runs wait for each other.
    """
    command = documented("fusermount3-broker cdi generate")
    command[0] = str(PROGRAM)
    command[command.index("--output") + 1] = str(CDI_DIRECTORY / CDI_FILE)
    with Cache().locked("etc-cdi"):
        missing = not CDI_DIRECTORY.exists()
        try:
            run([*command, "--proxy", PROXY, "--socket", broker.socket])
            yield
        finally:
            (CDI_DIRECTORY / CDI_FILE).unlink(missing_ok=True)
            if missing:
                CDI_DIRECTORY.rmdir()


def containerfiles(page: str = "containers.md") -> list[str]:
    """Return the parts of Containerfiles in the page, in order."""
    return [each.text for each in blocks() if each.page == page and each.language == "Containerfile"]
