"""The documentation site: it builds without warnings, loads nothing from other hosts, and has no broken links.

Only the form of external links is checked: tests have no network access except for packages.
"""

from __future__ import annotations

import itertools
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.lab import sphinx

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

#: Attributes that make a browser load something or reveal the reader.
LOADING = {
    ("link", "href"),
    *((tag, "src") for tag in ("script", "img", "iframe", "source", "audio", "video", "embed")),
}
LOADING |= {("object", "data"), ("img", "srcset"), ("source", "srcset"), ("video", "poster"), ("form", "action")}


class Page(HTMLParser):
    """A page of the site: its links, the resources that it loads, its ids, and its styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.style = ""
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        for name, value in attributes:
            if tag == "a" and name == "href":
                self.links.append(value or "")
            elif name == "id":
                self.ids.add(value or "")
            elif (tag, name) in LOADING:
                self.loaded.append(value or "")
            elif name == "style":
                self.style += value or ""

    def handle_data(self, data: str) -> None:
        self.style += data if self._in_style else ""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as in the Makefile."""
    directory = tmp_path_factory.mktemp("site")
    built = sphinx.build(directory)
    assert (built.stdout, built.stderr) == ("", "")
    return directory / "site"


def pages_of(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_a_warning_fails_the_build() -> None:
    assert "--fail-on-warning" in (ROOT / "Makefile").read_text()


def test_every_page_is_in_the_site_and_reached_from_the_first(site: Path) -> None:
    names = {page.with_suffix(".html").name for page in (ROOT / "docs").glob("*.md")}
    assert {path.name for path in site.glob("*.html")} == names | {"search.html"}
    assert names - {link.partition("#")[0] for link in Page((site / "index.html").read_text()).links} <= {"index.html"}


def test_a_page_that_comes_later_is_in_the_table_of_contents_too() -> None:
    contents = runpy.run_path(str(ROOT / "docs/conf.py"))["contents"]
    assert ":caption: Operate\n\nperformance\n" in contents({"index", "performance"})
    assert contents({"index", "unheard-of"}).endswith(":caption: More\n\nunheard-of\n```\n")


def test_what_is_to_be_typed_is_as_it_was_written(site: Path) -> None:
    assert "<h2>--wait-mounted<" in (site / "programs.html").read_text()


def test_links_are_called_by_what_they_lead_to_and_not_by_files() -> None:
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md"):
        texts = re.findall(r"\[([^\]]+)\]\(", page.read_text())
        assert [text for text in texts if re.fullmatch(r"`?[\w./-]+\.(md|toml|json|yaml|py)`?", text)] == [], page


def test_the_first_page_leads_in_four_ways() -> None:
    ways = re.findall(r"^- \*\*\[(.+?)\]", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    assert ways == ["Kubernetes", "Docker and Podman", "systemd", "CI"]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path, page in pages_of(site).items():
        assert page.loaded
        assert [
            each for each in page.loaded if urlsplit(each).netloc or urlsplit(each).scheme not in ("", "data")
        ] == [], path
        assert foreign(page.style) == []
    for sheet in site.rglob("*.css"):
        assert foreign(sheet.read_text()) == [], sheet
    for script in site.rglob("*.js"):
        without_comments = re.sub(r"/\*.*?\*/|^\s*//.*$", "", script.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert hosts(without_comments) - {"www.w3.org"} == set(), script  # in the name of SVG's namespace


def foreign(style: str) -> list[str]:
    """Return the URLs outside the site that a style sheet loads."""
    loaded = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", style)
    return [a or b for a, b in loaded if not (a or b).startswith("data:") and re.match(r"[a-z]+:|//", a or b)]


def hosts(text: str) -> set[str]:
    return set(re.findall(r"(?:https?:)?//([A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+)", text))


def test_what_is_foreign_is_found() -> None:
    assert foreign("a{background:url(https://a.example/x)}@import 'https://b.example/y';b{background:url(x.png)}") == [
        "https://a.example/x",
        "https://b.example/y",
    ]
    assert hosts("fetch('https://cdn.example/x'); load('//other.example')") == {"cdn.example", "other.example"}


def test_links_in_the_site_lead_somewhere(site: Path) -> None:
    pages = pages_of(site)
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / parts.path).resolve() if parts.path else path
            assert target.is_file(), f"{path.name}: {link}"
            if parts.fragment:
                assert parts.fragment in pages[target].ids, f"{path.name}: {link}"


def test_external_links_are_well_formed(site: Path) -> None:
    for path, page in pages_of(site).items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                assert parts.scheme == "https" and re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), (
                    f"{path.name}: {link}"
                )
                assert not re.search(r"\s", link), link


# The same files, as the repository shows them -------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_the_repository_lead_somewhere(page: Path) -> None:
    """The site's builder also accepts its own anchors, which a repository host doesn't have."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if urlsplit(link).scheme:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_each_column_of_a_table_has_a_name(page: Path) -> None:
    """Without one, a screen reader says nothing of its cells."""
    lines = page.read_text().splitlines()
    headers = [above for above, below in itertools.pairwise(lines) if re.fullmatch(r"\|(?: *:?-+:? *\|)+", below)]
    assert [each for each in headers if not all(cell.strip() for cell in each.strip("|").split("|"))] == []
