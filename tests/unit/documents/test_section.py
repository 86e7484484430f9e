"""The sections of documents that programs write (benchmarks/section.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.section import Section

BEGIN, END = "<!-- written by make it -->\n", "<!-- end of what make it writes -->\n"


@pytest.fixture
def section(tmp_path: Path) -> Section:
    return Section(tmp_path / "page.md", "make it")


def test_what_stands_between_the_marks_is_replaced_and_the_rest_stays(section: Section) -> None:
    section.file.write_text(f"# Page\n\n{BEGIN}old\n{END}\nAfterwards.\n")
    section.write("new\n")
    assert section.file.read_text() == f"# Page\n\n{BEGIN}new\n{END}\nAfterwards.\n"
    assert section.read() == "new\n"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="no marks"),
        pytest.param(BEGIN, id="no end"),
        pytest.param(END, id="no begin"),
        pytest.param(END + BEGIN, id="the end before the begin"),
        pytest.param(BEGIN + END + BEGIN + END, id="two sections"),
        pytest.param("<!-- written by make other -->\n<!-- end of what make other writes -->\n", id="another's"),
    ],
)
def test_a_page_without_just_one_section_is_refused_and_stays(section: Section, text: str) -> None:
    section.file.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md"):
        section.write("new\n")
    assert section.file.read_text() == text
