"""`fusermount3-controller new-template`: five answers become a template that passes all checks, or are refused."""

from __future__ import annotations

import pytest
import yaml
from click.testing import CliRunner, Result

from fusermount3_controller import cli, offline
from fusermount3_controller.volume_templates import parse

COMMAND = "s3fs {{ params.bucket }}:/{{ params.directory }} {{ mountpoint }} -f -o 'umask=007,a b'"
OPTIONS = {
    "name": "photos",
    "image": "example/s3fs:1.0",
    "command": COMMAND,
    "secret": "s3",
    "placement": "Sidecar",
}


def new_template(given: str = "", **options: str) -> Result:
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    result = CliRunner().invoke(cli.commands, ["new-template", *words], input=given)
    assert result.exception is None or isinstance(result.exception, SystemExit), "no traceback"
    return result


def test_options_become_a_template() -> None:
    result = new_template(**OPTIONS)
    assert (result.exit_code, result.stderr) == (0, "")
    manifest = yaml.safe_load(result.stdout)
    template = parse(manifest)
    assert template.name == "photos"
    assert list(template.parameters) == ["bucket", "directory"]
    attributes = {"bucket": "b", "directory": "d"}
    (pod,), faults = offline.rendered([("template.yaml", manifest)], attributes)
    assert faults == []
    (container,) = pod["spec"]["initContainers"]
    assert container["command"] == ["s3fs", "b:/d", "/mnt", "-f", "-o", "umask=007,a b"]
    assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]


def test_what_no_option_says_is_asked() -> None:
    result = new_template("photos\nexample/sshfs:1.0\nsshfs -f server: {{ mountpoint }}\n\n\n")
    assert result.exit_code == 0
    spec = yaml.safe_load(result.stdout)["spec"]
    assert spec["placement"] == "Shared"
    assert "parameters" not in spec
    assert "envFrom" not in spec["volumeStaging"]["podTemplate"]["spec"]["containers"][0]
    assert len(result.stderr.splitlines()) == len(OPTIONS)


def test_without_an_answer_nothing_is_written() -> None:
    result = new_template("photos\n")
    assert (result.exit_code, result.stdout) == (1, "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "Photos"}, "metadata.name: must be of at most 63 lower-case letters"),
        ({"image": ""}, "containers[0].image: is missing"),
        ({"command": "s3fs -f"}, "the command: must have {{ mountpoint }}"),
        ({"command": "s3fs mountpoint"}, "the command: must have {{ mountpoint }}"),
        ({"command": "s3fs 'a {{ mountpoint }}"}, "the command: is no command line: No closing quotation"),
        ({"command": "s3fs {{ bucket }} {{ mountpoint }}"}, "there is no 'bucket'"),
        ({"command": "sh -c 'x {{ params.a }} {{ mountpoint }}'"}, "must end with `| tobash`"),
        ({"placement": "sidecar"}, "'sidecar' is not one of 'Shared', 'Sidecar'"),
    ],
)
def test_what_makes_no_template_is_told(change: dict[str, str], says: str) -> None:
    result = new_template(**(OPTIONS | change))
    assert result.exit_code != 0
    assert result.stdout == ""
    assert says in result.stderr
