"""The names of containers, from files as the engines write them, and from files that are something else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fusermount3_broker.cli.container_names import ContainerNames, RememberedNames

ID, OTHER = "9ea7f6a7f41c" + "0" * 52, "1" * 64
UID = "0d7e3a1c-1f2b-4c3d-9e8f-112233445566"
PODMAN = f"libpod-{ID}.scope"
STORAGE = "var/lib/containers/storage/overlay-containers"


def write(root: Path, path: str, content: object) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    file.chmod(0o600)
    return file


def storage(*names: str, of: str = ID) -> list[dict[str, object]]:
    return [{"id": OTHER, "names": ["other"]}, {"id": of, "names": [*names]}, {"id": "2" * 64}]


@pytest.mark.parametrize("file", ["containers.json", "volatile-containers.json"])
@pytest.mark.parametrize("cgroup", [PODMAN, f"libpod-{ID}", f"crio-{ID}.scope"])
def test_podman_and_cri_o_name_a_container_in_their_storage(tmp_path: Path, file: str, cgroup: str) -> None:
    write(tmp_path, f"{STORAGE}/{file}", storage("web", "alias"))
    assert ContainerNames(tmp_path).name(cgroup) == "web"


def test_the_storage_is_where_its_configuration_says(tmp_path: Path) -> None:
    write(tmp_path, "etc/containers/storage.conf", '[storage]\ngraphroot = "/data/c"\nrunroot = "/run/c"\n')
    write(tmp_path, "data/c/vfs-containers/containers.json", storage("web"))
    write(tmp_path, "run/c/vfs-containers/volatile-containers.json", storage("job", of="3" * 64))
    names = ContainerNames(tmp_path)
    assert [names.name(PODMAN), names.name("3" * 64)] == ["web", "job"]


@pytest.mark.parametrize("cgroup", [f"docker-{ID}.scope", ID])
def test_docker_names_a_container_in_its_data_directory(tmp_path: Path, cgroup: str) -> None:
    write(tmp_path, f"var/lib/docker/containers/{ID}/config.v2.json", {"ID": ID, "Name": "/web"})
    assert ContainerNames(tmp_path).name(cgroup) == "web"


def test_the_data_directory_is_where_dockers_configuration_says(tmp_path: Path) -> None:
    write(tmp_path, "etc/docker/daemon.json", {"data-root": "/srv/docker"})
    write(tmp_path, f"srv/docker/containers/{ID}/config.v2.json", {"Name": "/web"})
    assert ContainerNames(tmp_path).name(ID) == "web"


@pytest.mark.parametrize(
    "cgroup", [f"kubepods-besteffort-pod{UID.replace('-', '_')}.slice", f"pod{UID}", f"kubepods-pod{UID}.slice"]
)
def test_kubelet_names_a_pod_by_the_directory_of_its_logs(tmp_path: Path, cgroup: str) -> None:
    (tmp_path / f"var/log/pods/default_web-5d8c_{UID}").mkdir(parents=True)
    (tmp_path / "var/log/pods/junk").touch()
    assert ContainerNames(tmp_path).name(cgroup) == "default/web-5d8c"


def test_a_display_reads_files_again_only_for_a_new_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    file = write(tmp_path, f"{STORAGE}/containers.json", storage("web"))
    names = RememberedNames(tmp_path)
    assert [names.look().name(each) for each in (PODMAN, "3" * 64)] == ["web", ""]
    file.write_text(json.dumps([*storage("renamed"), {"id": "4" * 64, "names": ["new"]}]))
    opened: list[object] = []
    opening = os.open

    def counted(path: Path, flags: int) -> int:
        opened.append(path)
        return opening(path, flags)

    monkeypatch.setattr(os, "open", counted)
    assert [names.look().name(each) for each in (PODMAN, "3" * 64)] == ["web", ""]
    assert opened == []
    assert [names.look().name(each) for each in (PODMAN, "4" * 64)] == ["web", "new"]
    assert opened.count(file) == 1
    now += 60
    assert names.look().name(PODMAN) == "renamed"


@pytest.mark.parametrize("cgroup", ["", "session-2.scope", PODMAN, f"kubepods-pod{UID}.slice", "a/../b", "\udcff\0"])
def test_what_nobody_knows_has_no_name(tmp_path: Path, cgroup: str) -> None:
    assert ContainerNames(tmp_path).name(cgroup) == ""


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[" * 100_000, "null", "5", '"text"', "[1, null]", '[{"id": 5, "names": ["a"]}]'),
        *(f'[{{"id": "{ID}"}}]', f'[{{"id": "{ID}", "names": []}}]', f'[{{"id": "{ID}", "names": [7]}}]'),
        *(
            '[storage]\ngraphroot = "/\\u0000"',
            "a = " + "[" * 100_000,
            '{"Name": 5}',
            '{"Name": null}',
            '{"data-root": {}}',
            "\x00",
        ),
    ],
    ids=range(17),
)
def test_a_file_of_another_structure_names_nothing(tmp_path: Path, content: str) -> None:
    places = (f"{STORAGE}/containers.json", f"var/lib/docker/containers/{ID}/config.v2.json", "etc/docker/daemon.json")
    for place in (*places, "etc/containers/storage.conf"):
        write(tmp_path, place, content)
    assert ContainerNames(tmp_path).name(PODMAN) == ""


def test_a_file_that_others_may_write_names_nothing(tmp_path: Path) -> None:
    write(tmp_path, f"{STORAGE}/containers.json", storage("web")).chmod(0o666)
    assert ContainerNames(tmp_path).name(PODMAN) == ""


def test_a_link_a_fifo_and_a_directory_in_place_of_a_file_name_nothing(tmp_path: Path) -> None:
    """A FIFO would make the reader wait for ever."""
    file = write(tmp_path, f"{STORAGE}/containers.json", storage("web"))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    os.mkfifo(file.with_name("volatile-containers.json"), 0o600)
    (tmp_path / f"var/lib/docker/containers/{ID}/config.v2.json").mkdir(parents=True)
    assert ContainerNames(tmp_path).name(PODMAN) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_names_nothing(tmp_path: Path) -> None:
    os.chown(write(tmp_path, f"{STORAGE}/containers.json", storage("web")), 1000, 1000)
    assert ContainerNames(tmp_path).name(PODMAN) == ""


def test_a_file_that_is_too_long_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, f"{STORAGE}/containers.json", storage("web"))
    monkeypatch.setattr("fusermount3_broker.cli.container_names._LONGEST", 100)
    assert ContainerNames(tmp_path).name(PODMAN) == ""
