"""Each key of a TOML document is found on its line, however the document is written."""

from __future__ import annotations

from fusermount3_broker.service import toml_lines

DOCUMENT = '''# comment
a = 1
"b".c = """
a = 5
"""
list = [
  1,  # one
  {x = 2, y = [3]},
]
\u2028 = 1
[table]

a = 1
[[tables]]
[[tables]]
a = 1
[tables.inner]
b = 2
[[tables.more]]
c = 3
'''.replace("\u2028 = 1", "# \u2028 ends no line")


def test_keys_have_the_lines_on_which_they_begin() -> None:
    assert toml_lines.of_keys(DOCUMENT.replace("\n", "\r\n")) == toml_lines.of_keys(DOCUMENT)
    assert toml_lines.of_keys(DOCUMENT) == {
        ("a",): 2,
        ("b",): 3,
        ("b", "c"): 3,
        ("list",): 6,
        ("list", 0): 6,
        ("list", 1): 6,
        ("list", 1, "x"): 6,
        ("list", 1, "y"): 6,
        ("list", 1, "y", 0): 6,
        ("table",): 11,
        ("table", "a"): 13,
        ("tables", 0): 14,
        ("tables", 1): 15,
        ("tables", 1, "a"): 16,
        ("tables", 1, "inner"): 17,
        ("tables", 1, "inner", "b"): 18,
        ("tables", 1, "more", 0): 19,
        ("tables", 1, "more", 0, "c"): 20,
    }


def test_after_a_value_of_very_many_lines_no_lines_are_known() -> None:
    document = "a = 1\nb = [\n" + "1,\n" * 20_000 + "]\nc = 1"
    assert toml_lines.of_keys(document) == {("a",): 1}
