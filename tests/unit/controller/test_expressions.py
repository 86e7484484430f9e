"""Expressions of templates: what they yield, what is refused, and that none of them takes long."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_controller import expressions
from fusermount3_controller.expressions import ExpressionError, Names, check, render

NAMES = Names({"mountpoint", "readOnly", "fsGroup"}, {"bucket", "prefix", "items"}, {"pvc"})
PVC = {"metadata": {"name": "data", "items": "i", "labels": {"a/b": "c"}}, "spec": {"accessModes": ["RWO", "RWX"]}}
VARIABLES: dict[str, expressions.Variable] = {"mountpoint": "/mnt", "readOnly": True, "fsGroup": 1000, "pvc": PVC}
PARAMETERS = {"bucket": "photos", "prefix": "", "items": "4"}


def yielded(text: str, **parameters: str) -> expressions.Value:
    check(text, NAMES)
    return render(text, VARIABLES, PARAMETERS | parameters)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("plain", "plain"),
        ("ends with a line\n", "ends with a line\n"),
        ("{{ params.bucket }}", "photos"),
        ("s3://{{ params.bucket }}/x", "s3://photos/x"),
        ("{{ fsGroup }}", 1000),
        ("{{ fsGroup + 1 }}", 1001),
        ("{{ readOnly }}", True),
        ("ro={{ readOnly }}", "ro=true"),
        ("{{ 'ro' if readOnly else 'rw' }}", "ro"),
        ("{{ '--prefix=' ~ params.prefix if params.prefix }}", None),
        ("{{ params.prefix or '/' }}", "/"),
        ("{{ params.items | int }}", 4),
        ("{{ '1152921504606846976' | int }}", 2**60),
        ("{{ params.bucket | upper | tojson }}", '"PHOTOS"'),
        ("echo {{ params.bucket | tobash }}", "echo photos"),
        ("{{ params.bucket }}{{ params.items }}", "photos4"),
        ("{# nothing #}x", "x"),
        ("{{- params.bucket -}}", "photos"),
        ("{{ '}}' ~ '{{' }}", "}}{{"),
        ("{{ pvc.metadata.name }}", "data"),
        ("{{ pvc.metadata.items }}", "i"),
        ("{{ pvc.metadata.labels['a/b'] }}", "c"),
        ("{{ pvc['spec'].accessModes[1] }}", "RWX"),
        ("{{ pvc.spec.accessModes[2] }}", None),
        ("{{ pvc.metadata.keys }}", None),
        ("{{ pvc.metadata.name.format }}", None),
        ("{{ pvc.nothing.__class__.x or 'none' }}", "none"),
        ("{{ 'yes' if 'RWX' in pvc.spec.accessModes else 'no' }}", "yes"),
        ("{{ pvc.metadata.labels | tojson }}", '{"a/b": "c"}'),
    ],
)
def test_an_expression_yields_its_value(text: str, result: expressions.Value) -> None:
    assert yielded(text) == result
    assert type(yielded(text)) is type(result)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ params.bukcet }}", "params.bukcet is not in spec.parameters"),
        ("{{ secret }}", "there is no 'secret'; an expression can use fsGroup, mountpoint, params.NAME, pvc, readOnly"),
        ("{{ params }}", "there is no 'params'"),
        ("{{ ''.__class__ }}", "'.__class__' is not allowed"),
        ("{{ params.bucket.__class__ }}", "'.__class__' is not allowed"),
        ("{{ params['bucket'] }}", "'[…]' is not allowed: only params and pvc have fields"),
        ("{{ mountpoint[0] }}", "'[…]' is not allowed"),
        ("{{ pvc[mountpoint] }}", "what stands in […] must be written out"),
        ("{{ (pvc or 1).metadata }}", "'.metadata' is not allowed"),
        ("{{ pvc.metadata() }}", "a call is not allowed"),
        ("{{ mountpoint.format() }}", "a call is not allowed"),
        ("{% for i in mountpoint %}x{% endfor %}", "a statement is not allowed"),
        ("{% set x = 1 %}", "a statement is not allowed"),
        ("{{ 'x' * 1000000000 }}", "* is not allowed"),
        ("{{ 10 ** 1000000000 }}", "** is not allowed"),
        ("{{ '%1000000000s' % mountpoint }}", "% is not allowed"),
        ("{{ mountpoint is defined }}", "a test (`is`) is not allowed"),
        (
            "{{ mountpoint | replace('a', 'b') }}",
            "there is no filter 'replace'; there are int, lower, tobash, tojson, trim, upper",
        ),
        ("{{ mountpoint | tojson(indent=4) }}", "the filter 'tojson' takes no arguments"),
        ("{{ 1.5 }}", "has a float, not a string"),
        ("x{{ 1e999 }}", "has a float, not a string"),
        ("{{ " + "9" * 20 + " }}", "a number has at most 19 digits"),
        ("{{ " + "9" * 5000 + " }}", "not a valid expression: Exceeds the limit"),
        ("{{ 1" + " + 1" * 2000 + " }}", "nested too deeply"),
        ("{{ a b }}", "not a valid expression: expected token"),
        ("{{ mountpoint", "not a valid expression: unexpected end of template"),
        ("{{ " + "(" * 4000 + " }}", "nested too deeply"),
        ("{{ " + "not " * 30 + "readOnly }}", "nested too deeply"),
        ("{{ mountpoint" + " | tojson" * 30 + " }}", "nested too deeply"),
        ("{{ mountpoint }}" + "x" * 8192, "at most 8192 characters"),
    ],
)
def test_what_is_not_allowed_is_refused(text: str, says: str) -> None:
    started = time.thread_time()
    with pytest.raises(ExpressionError) as caught:
        check(text, NAMES)
    assert says in str(caught.value)
    assert time.thread_time() - started < 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a{{ 'b' if not readOnly }}", "a part of the string yields nothing"),
        ("{{ params.bucket | int }}", "'photos' is not a whole number"),
        ("{{ params.bucket + 1 }}", "can only concatenate str"),
        ("{{ mountpoint < 1 }}", "not supported between instances"),
        ("{{ pvc.metadata }}", "has a dict, not a string"),
        ("x{{ pvc.spec.accessModes }}", "has a list, not a string"),
        ("{{ pvc.metadata | tobash }}", "has a dict, not a string"),
    ],
)
def test_what_yields_nothing_usable_is_refused_when_it_is_rendered(text: str, says: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        yielded(text)
    assert says in str(caught.value)


def test_no_result_grows_beyond_its_limit() -> None:
    for text in ("{{ " + "params.bucket ~ " * 400 + "'' }}", "{{ params.bucket" + " | tojson" * 15 + " }}"):
        started = time.thread_time()
        with pytest.raises(ExpressionError, match="more than 16384 characters"):
            yielded(text, bucket='"' * 1024)
        assert time.thread_time() - started < 1


@given(st.text())
def test_a_parameter_is_never_an_expression_and_one_word_for_a_shell(value: str) -> None:
    assert yielded("{{ params.bucket }}", bucket=value) == value
    assert yielded("x{{ params.bucket }}", bucket=value) == f"x{value}"


@given(st.text(alphabet="{}%#~|.()'\"-+ paramsbucketintif0"))
def test_a_string_is_rendered_or_refused_and_nothing_else(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        yielded(text)


def test_an_object_has_a_limit() -> None:
    expressions.check_size("pvc", PVC)
    with pytest.raises(ExpressionError, match="pvc has more than 16384 characters of JSON"):
        expressions.check_size("pvc", {"metadata": {"annotations": {"a": "x" * 16384}}})


def test_a_template_is_about_these() -> None:
    text = "{{ params.bucket or pvc.metadata['name'] | lower }} {{ mountpoint }}"
    assert expressions.paths_in(text) == {"params.bucket", "pvc.metadata.name", "mountpoint"}


def test_a_script_has_its_expressions_quoted() -> None:
    assert expressions.are_quoted_for_shell("exec s3fs {{ params.bucket | tobash }} {{ mountpoint | tobash }}")
    assert not expressions.are_quoted_for_shell("exec s3fs {{ params.bucket | tobash }} {{ mountpoint }}")
    assert not expressions.are_quoted_for_shell("{{ 1" + " + 1" * 2000 + " }}")
    assert not expressions.are_quoted_for_shell("{{ params.bucket | tobash ~ params.prefix }}")


def test_all_of_a_manifest_is_rendered_but_its_keys() -> None:
    manifest = {"{{ key }}": ["{{ mountpoint }}", "{{ 'x' if not readOnly }}", None, 3], "gone": "{{ 'x' if false }}"}
    assert expressions.render_all(manifest, VARIABLES, PARAMETERS) == {"{{ key }}": ["/mnt", None, 3]}
    with pytest.raises(ExpressionError, match=r"^spec\.args\[1\]: 'photos' is not a whole number$"):
        expressions.render_all({"spec": {"args": ["a", "{{ params.bucket | int }}"]}}, VARIABLES, PARAMETERS)


def test_a_field_is_named_as_the_api_server_names_it() -> None:
    manifest = {"spec": {"containers": [{"args": ["a", 1]}], "x": "b"}}
    assert list(expressions.strings(manifest)) == [("spec.containers[0].args[0]", "a"), ("spec.x", "b")]
