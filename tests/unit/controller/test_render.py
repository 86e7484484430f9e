"""`fusermount3-controller render`: what is printed for objects in files, and what is said about mistakes in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result

from fusermount3_controller import cli, manifests
from fusermount3_controller.faults import Invalid
from fusermount3_proxy import __version__
from tests.unit.controller.samples import Manifest, claim, claimed, inline, pod, pod_of, shared, template, volume
from tests.unit.controller.volumes import dynamic, run

ROOT = Path(__file__).parents[3]


def render(*arguments: str, given: str = "") -> Result:
    result = CliRunner().invoke(cli.commands, ["render", *arguments], input=given)
    assert result.exception is None or isinstance(result.exception, SystemExit), "no traceback"
    return result


def rendered(*given: Manifest, options: tuple[str, ...] = ()) -> list[Manifest]:
    result = render("-", *options, given=yaml.safe_dump_all(given))
    assert result.exit_code == 0, result.output
    found = list(yaml.safe_load_all(result.output))
    for each in found:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    return found


def said(*given: Any, options: tuple[str, ...] = ()) -> str:
    texts = [each if isinstance(each, str) else yaml.safe_dump(each) for each in given]
    result = render("-", *options, given="\n---\n".join(texts))
    assert result.exit_code != 0
    return result.output


def test_a_template_alone_is_shown_in_a_pod_that_is_made_up() -> None:
    (made_up,) = rendered(template(), options=("--set", "bucket=photos"))
    assert [each["name"] for each in made_up["spec"]["initContainers"]] == ["fuse-data"]
    assert made_up["spec"]["initContainers"][0]["args"] == ["s3fs", "photos", "/mnt"]


def test_a_template_for_devices_is_shown_with_one() -> None:
    """In the namespace of its own, and without a probe that would wait for a filesystem."""
    manifest = shared(volumeValidation={"volumeModes": ["Block"]})
    manifest["spec"]["volumeStaging"]["namespace"] = "fuse-devices"
    user, mount_pod = rendered(manifest, options=("--set", "bucket=photos"))
    (container,) = user["spec"]["containers"]
    assert container["volumeDevices"] == [{"name": "data", "devicePath": "/dev/data"}]
    assert "volumeMounts" not in container
    assert mount_pod["metadata"]["namespace"] == "fuse-devices"
    assert "startupProbe" not in mount_pod["spec"]["containers"][0]


def test_a_pod_is_shown_with_its_sidecars() -> None:
    (injected,) = rendered(template(), pod(inline()))
    assert injected["metadata"]["name"] == "app"
    assert [each["name"] for each in injected["spec"]["initContainers"]] == ["fuse-data"]


def test_a_shared_volume_is_shown_as_its_pod_after_the_pod_that_stays_as_it_is() -> None:
    manifest = shared()
    pod_of(manifest)["serviceAccountName"] = "s3"
    manifest["spec"]["volumeStaging"]["podTemplate"]["metadata"] = {"labels": {"a": "b"}, "annotations": {"c": "d"}}
    user = pod(inline(), securityContext={"fsGroup": 2000})
    same, mount_pod = rendered(manifest, user)
    assert same == user
    assert mount_pod["metadata"] == {
        "generateName": "mp-",
        "namespace": "fuse-mounts",
        "labels": {"a": "b", "fusermount3-proxy.dev/template": "s3"},
        "annotations": {"cluster-autoscaler.kubernetes.io/daemonset-pod": "true", "c": "d"},
    }
    spec = mount_pod["spec"]
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("s3", True)
    assert spec["securityContext"]["fsGroup"] == 2000
    assert spec["terminationGracePeriodSeconds"] == 600
    (container,) = spec["containers"]
    assert container["name"] == "fuse"
    used = {each["name"] for each in container["volumeMounts"]}
    assert used == {each["name"] for each in spec["volumes"]}, "kubelet sets up only what a container has"


def test_a_shared_volume_is_not_for_a_user_namespace() -> None:
    assert "Pod app: spec.hostUsers: a shared volume" in said(shared(), pod(inline(), hostUsers=False))
    rendered(template(), pod(inline(), hostUsers=False))


def test_a_shared_volume_is_for_the_namespaces_of_the_template() -> None:
    manifest = shared(allowedNamespaces={"matchLabels": {"team": "a"}})
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team", "labels": {"team": "a"}}}
    assert len(rendered(manifest, pod(inline()), namespace)) == 2
    assert "the template 's3' is not for the namespace 'team'" in said(manifest, pod(inline()))
    assert (
        len(rendered(shared(allowedNamespaces={"matchLabels": {"kubernetes.io/metadata.name": "team"}}), pod(inline())))
        == 2
    )


def test_a_template_of_shared_volumes_is_shown_in_two_pods_whomever_it_is_for() -> None:
    manifest = shared(allowInline=False, allowedNamespaces={"matchLabels": {"team": "a"}})
    user, mount_pod = rendered(manifest, options=("--set", "bucket=photos"))
    assert user["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": "s3"}
    assert mount_pod["spec"]["containers"][0]["args"] == ["s3fs", "photos", "/mnt"]


def test_a_template_is_shown_with_the_pods_that_run_once_on_no_node_in_particular() -> None:
    unstaging = run("sync", "{{ handle }}", "{{ node.metadata.name }}", "--claim={{ pvc.metadata.name }}")
    _, _, _, unstages, deletes = rendered(dynamic(volumeUnstaging=unstaging), options=("--set", "bucket=photos"))
    assert unstages["metadata"]["name"].startswith("volumeunstaging-")
    assert unstages["spec"]["containers"][0]["args"] == [
        "sync",
        "pvc-00000000-0000-0000-0000-000000000000",
        "--claim=s3",
    ]
    assert "affinity" not in unstages["spec"]
    assert deletes["metadata"]["name"].startswith("volumedeletion-")


def test_a_persistent_volume_is_shown_in_the_pod_that_claims_it() -> None:
    (injected,) = rendered(template(), volume(), claim(volumeName="photos"), pod(claimed()))
    assert injected["spec"]["initContainers"][0]["args"] == ["s3fs", "photos", "/mnt"]


def test_a_persistent_volume_alone_is_shown_in_a_pod_that_is_made_up() -> None:
    (made_up,) = rendered(template(), volume())
    assert made_up["spec"]["volumes"][0] == {"name": "data", "persistentVolumeClaim": {"claimName": "photos"}}
    assert [each["name"] for each in made_up["spec"]["initContainers"]] == ["fuse-data"]


def test_a_list_is_the_objects_in_it() -> None:
    assert len(rendered({"apiVersion": "v1", "kind": "List", "items": [template(), pod(inline())]})) == 1


def test_files_are_read_together(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("template.yaml", "pod.yaml")]
    for file, manifest in zip(files, (template(), pod(inline())), strict=True):
        file.write_text(yaml.safe_dump(manifest))
    assert render(*map(str, files)).exit_code == 0
    assert render(str(tmp_path / "none")).output == f"Error: {tmp_path}/none: No such file or directory\n"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((), "there is no VolumeTemplate in these files"),
        ((pod(),), "there is no VolumeTemplate in these files"),
        ((template(image=""), pod(inline())), "-: VolumeTemplate s3: spec.volumeStaging.podTemplate.spec.cont"),
        ((template(), pod(inline(bukcet="x"))), "-: Pod app: spec.volumes[0].csi.volumeAttributes: the template"),
        ((template(), volume(bukcet="x")), "made up: Pod photos: PersistentVolume photos: spec.csi.v"),
        (("[",), "-: is not YAML: "),
        (("a: b: c",), "-: is not YAML: "),
        (("a: {{ b }}",), "-: an expression must be in quotes"),
        (("kind: a\nkind: b",), "the key 'kind' is there twice"),
        (("- a",), "must be objects of Kubernetes, not"),
        (("kind: !!python/object:os.system x",), "-: is not YAML: could not determine a constructor"),
        (("a: &a [*a]",), "an object of more than 20000 values"),
        (("a: " + "[" * 5000,), "-: is nested too deeply"),
        (("a: " + "[" * 60 + "]" * 60,), "-: is nested too deeply"),
        (({"kind": "Pod", "metadata": {}, "spec": []}, template()), "Pod without a name: spec: must be an object"),
        ((template(), pod(inline()) | {"metadata": {"annotations": {"a": 1}}}), "metadata.annotations: must be"),
        ((template(), pod(inline(), initContainers=["x"])), "spec.initContainers[0]: must be an object with a name"),
        ((template(), pod(inline(), initContainers={})), "spec.initContainers: must be a list"),
        ((template(), pod({"name": "x", "csi": "y"})), "spec.volumes[0].csi: must be an object"),
        ((template(), pod(inline(), terminationGracePeriodSeconds="x")), "must be a number of seconds"),
        ((template(), pod(inline(), securityContext=[1])), "spec.securityContext: must be an object"),
        ((template(), {"kind": "PersistentVolume", "spec": {"csi": ["x"]}}), "PersistentVolume without a name: spec"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_object_and_field(given: tuple[Any, ...], says: str) -> None:
    output = said(*given)
    assert says in output
    assert "Traceback" not in output


def test_all_mistakes_are_told_at_once() -> None:
    output = said(template(), pod(inline(bucket="x")), pod(inline(bukcet="x")))
    assert len(output.splitlines()) == 2


def test_aliases_do_not_multiply() -> None:
    pairs = zip("abcdefghijklmnopq", "bcdefghijklmnopqr", strict=True)
    bomb = "a: &a [x, x]\n" + "".join(f"{after}: &{after} [*{before}, *{before}]\n" for before, after in pairs)
    assert "more than 20000 values" in said(bomb)
    with pytest.raises(Invalid, match="more than 1048576 characters"):
        manifests.load("x" * (1 << 20) + "x")


def test_a_date_is_a_string_and_what_is_merged_is_taken() -> None:
    assert manifests.load("a: 2026-01-01\nb: &b {c: d}\ne: {<<: *b, f: g}") == [
        {"a": "2026-01-01", "b": {"c": "d"}, "e": {"c": "d", "f": "g"}}
    ]


@pytest.mark.parametrize("setting", ["bucket", "=x"])
def test_a_parameter_is_set_with_its_value(setting: str) -> None:
    assert "must be NAME=VALUE" in said(template(), options=("--set", setting))
    assert "volumes have their own attributes" in said(template(), pod(inline()), options=("--set", "bucket=photos"))


def test_what_a_manifest_says_moves_no_cursor() -> None:
    assert "\x1b" not in said(template() | {"kind": "Volume\x1b[2JTemplate"}, template() | {"\x1b[2J": 1})


# The program


def test_the_program_says_its_version() -> None:
    result = CliRunner().invoke(cli.commands, ["--version"])
    assert result.output == f"fusermount3-controller, version {__version__}\n"


def test_without_the_extra_it_says_what_to_install() -> None:
    program = (
        "import sys, importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name in ('jinja2', 're2') else find(name, *rest); "
        "from fusermount3_controller import cli; assert not {'jinja2', 're2', 'yaml'} & set(sys.modules); cli.main()"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "controller", capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "fusermount3-controller needs libraries that are not installed (jinja2, re2): "
        "pip install 'fusermount3-proxy[controller]'\n"
    )
