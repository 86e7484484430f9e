"""The lab keeps its promises: a damaged cache entry is made again, a container is gone when its block ends."""

from __future__ import annotations

import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from tests import prefetch
from tests.callers import images as callers
from tests.e2e.conftest import wait_until
from tests.lab import cache, images, podman, programs
from tests.lab.cache import Cache, DownloadFailed, recipe_hash
from tests.lab.podman import FUSE_STAND_IN, Container, Mount, Options
from tests.lab.sshd import sshd_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lab.commands import Argument


class Builder:
    """Builds an entry with one file, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, directory: Path) -> None:
        self.calls += 1
        (directory / "file").write_text("content")


@pytest.fixture
def build() -> Builder:
    return Builder()


def test_an_entry_is_built_once(tmp_path: Path, build: Builder) -> None:
    first = Cache(tmp_path).entry("name", "recipe", build)
    assert Cache(tmp_path).entry("name", "recipe", build) == first
    assert (first / "file").read_text() == "content"
    assert build.calls == 1


@pytest.mark.parametrize("damage", ["changed", "missing", "surplus", "no manifest"])
def test_a_damaged_entry_is_built_again(tmp_path: Path, build: Builder, damage: str) -> None:
    entry = Cache(tmp_path).entry("name", "recipe", build)
    match damage:
        case "changed":
            (entry / "file").write_text("CONTENT")
        case "missing":
            (entry / "file").unlink()
        case "surplus":
            (entry / "other").touch()
        case "no manifest":
            (entry / "SHA256SUMS").unlink()
    entry = Cache(tmp_path).entry("name", "recipe", build)
    assert sorted(path.name for path in entry.iterdir()) == ["SHA256SUMS", "file"]
    assert (entry / "file").read_text() == "content"
    assert build.calls == 2


def test_a_failed_build_leaves_no_entry(tmp_path: Path, build: Builder) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").touch()
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        Cache(tmp_path).entry("name", "recipe", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["locks"]
    Cache(tmp_path).entry("name", "recipe", build)


def test_a_download_that_fails_is_tried_again_a_few_times(
    tmp_path: Path, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "PAUSE", 0.0)
    left = cache.ATTEMPTS - 1

    def fail(directory: Path) -> None:
        nonlocal left
        build(directory)
        if left:
            left -= 1
            raise DownloadFailed("no route")

    assert (Cache(tmp_path).entry("name", "recipe", fail) / "file").read_text() == "content"
    left = cache.ATTEMPTS
    with pytest.raises(DownloadFailed, match="no route"):
        Cache(tmp_path).entry("name", "other", fail)
    assert build.calls == 2 * cache.ATTEMPTS


def test_two_runs_build_an_entry_once(tmp_path: Path, build: Builder) -> None:
    # flock belongs to the open file, so two threads exclude each other as two processes do.
    runs = [threading.Thread(target=lambda: Cache(tmp_path).entry("name", "recipe", build)) for _ in range(8)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert build.calls == 1


def test_recipes_differ_when_a_part_moves_over() -> None:
    assert recipe_hash("ab", "c") != recipe_hash("a", "bc")


def test_mountinfo_is_parsed_with_and_without_optional_fields() -> None:
    shared = r"36 35 98:0 /a\040b /mnt\134x rw,noatime shared:1 master:2 - fuse.x a\011b rw,user_id=0"
    mount = Mount.parse(shared)
    assert (mount.root, mount.mountpoint, mount.source) == ("/a b", "/mnt\\x", "a\tb")
    assert mount.options == {"rw", "noatime"} and mount.super_options == {"rw", "user_id=0"}
    assert mount.is_fuse
    assert Mount.parse("36 35 98:0 / /mnt rw - fusectl fusectl rw").is_fuse is False


def exists(container: Container) -> bool:
    return subprocess.run(["podman", "container", "exists", container.name]).returncode == 0


def test_a_container_is_gone_when_its_block_raises() -> None:
    container = Container(images.image_tag(images.BUSYBOX))
    with pytest.raises(RuntimeError), container:
        background = container.start(["sleep", "1000"])
        assert exists(container)
        raise RuntimeError
    assert not exists(container)
    assert background.returncode is not None


def test_a_container_that_cannot_start_is_gone_too() -> None:
    container = Container(images.image_tag(images.BUSYBOX), ["/no/such/program"])
    with pytest.raises(podman.CommandFailed, match="no such file"), container:
        pass
    assert not exists(container)


@pytest.mark.parametrize("user_namespace", [False, True])
@pytest.mark.parametrize("user", ["0:0", "1000:1000", "12345:12345"])
def test_a_container_has_no_privilege(user: str, user_namespace: bool) -> None:
    options = Options(user=user, user_namespace=user_namespace)
    with Container(images.image_tag(images.BUSYBOX), options=options) as container:
        assert container.exec(["sh", "-c", "id -u && id -g"]).stdout.split() == user.split(":")
        assert container.exec(["test", "-e", "/dev/fuse"], check=False).returncode == 1
        capabilities = int(container.exec(["grep", "CapEff", "/proc/self/status"]).stdout.split()[1], 16)
        cap_sys_admin = 21
        assert not capabilities & 1 << cap_sys_admin
        assert "12345" not in container.exec(["cat", "/etc/passwd"]).stdout


def test_the_probe_in_a_scratch_image_says_why_it_cannot_mount() -> None:
    tag = images.scratch_tag({"/whoamifs": (programs.whoamifs(), 0o755)})
    options = Options(volumes=[FUSE_STAND_IN])
    with Container(tag, ["/whoamifs", "--pause"], options) as container:
        result = container.exec(["/whoamifs", "--probe", "/mnt"], check=False)
        assert result.returncode == 1
        assert "failed to exec fusermount3" in result.stderr
        assert "mounted=no\n" in result.stdout
        wait_until(lambda: container.processes() == [container.pid])


@pytest.mark.parametrize("variant", programs.Variant)
def test_the_probe_is_content_with_the_genuine_helper(variant: programs.Variant, tmp_path: Path) -> None:
    argv: list[Argument] = ["unshare", "--mount", programs.whoamifs(variant), "--probe", tmp_path]
    result = subprocess.run(argv, capture_output=True, text=True)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "ok=yes"), result.stdout


def test_an_sshd_is_reached_from_a_container_without_network() -> None:
    with Container(images.image_tag(images.SSHFS)) as container, sshd_for(container) as sshd:
        sshd.authorize(container)
        (sshd.export / "file").touch()
        command = ["sftp", "-b", "-", "-F", "/tmp/lab-ssh/config", "lab"]
        assert "file" in container.exec(command, input=f"ls {sshd.export}\n").stdout
    assert sshd.process.returncode is not None
    assert not sshd.directory.exists()


def test_all_images_that_have_a_name_are_prefetched() -> None:
    named = [each for module in (images, callers) for each in vars(module).values()]
    recipes = {each for each in named if isinstance(each, images.DebianRecipe)}
    assert len(recipes) > 5
    assert recipes <= set(prefetch.recipes())
