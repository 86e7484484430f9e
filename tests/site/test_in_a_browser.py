"""What readers do on the site: look at it on a laptop and on a phone, search, copy a command, watch the recording.

axe looks for what keeps people with disabilities from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.lab import sphinx
from tests.lab.sphinx import ROOT
from tests.site.browser import NARROW, WIDE, Site, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

PAGES = sorted(["search.html", *(f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md"))])
#: The pages that most readers come to.
MAIN = ("index", "kubernetes", "containers", "install-systemd", "ci", "troubleshooting")

_WIDER_THAN_THE_WINDOW = """
() => [...document.querySelectorAll("article *")]
    .filter(each => each.getBoundingClientRect().right > innerWidth)
    .filter(each => !each.closest("pre, .table-wrapper, p:has(img)"))
    .map(each => each.outerHTML.slice(0, 80))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    sphinx.build(directory)
    with shown(directory / "site") as site:
        yield site
    assert site.missing == []


def violations(page: Page) -> list[str]:
    """Return what axe finds wrong with the page: each rule, and the elements that break it."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']} ({each['impact']}): {[node['html'][:100] for node in each['nodes'][:3]]}" for each in found]


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_scrolls_in_one_direction_and_everybody_can_use_it(site: Site, name: str, width: int) -> None:
    with site.page(name, width) as page:
        assert page.evaluate("document.scrollingElement.scrollWidth") == width
        assert page.evaluate(_WIDER_THAN_THE_WINDOW) == []
        assert violations(page) == []


@pytest.mark.parametrize("name", MAIN)
def test_a_page_can_be_read_in_the_dark(site: Site, name: str) -> None:
    with site.page(f"{name}.html", dark=True) as page:
        assert violations(page) == []


def test_a_wide_table_scrolls_in_itself_by_keyboard(site: Site) -> None:
    with site.page("compatibility.html", NARROW) as page:
        table = page.locator(".table-wrapper").first
        assert table.evaluate("each => each.scrollWidth > each.clientWidth")
        table.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("document.activeElement.scrollLeft > 0")


def test_the_first_screen_says_what_it_is_for_whom_and_how_to_start(site: Site) -> None:
    with site.page("index.html") as page:
        for text in ("FUSE filesystems in unprivileged containers", "Yes, if", "Kubernetes", "Docker and Podman"):
            box = page.locator("article").get_by_text(text).first.bounding_box()
            assert box
            assert box["y"] + box["height"] < 800, text
        drawing = page.locator("article pre").first
        assert not drawing.evaluate("each => each.scrollWidth > each.clientWidth")


def test_a_command_is_copied_as_it_is_typed(site: Site) -> None:
    with site.page("index.html") as page:
        block = page.locator("div.highlight", has_text="make demo").first
        block.hover()
        block.locator("button.copybtn").click()
        page.wait_for_function("document.querySelector('button.copybtn.success')")
        assert page.evaluate("navigator.clipboard.readText()").strip() == "make demo"
        assert page.locator(".highlight-text button.copybtn").count() == 0


def test_what_is_typed_on_a_console_is_copied_without_what_it_answers(site: Site) -> None:
    with site.page("troubleshooting.html") as page:
        block = page.locator("div.highlight-console").first
        block.hover()
        block.locator("button.copybtn").click()
        page.wait_for_function("document.querySelector('button.copybtn.success')")
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == block.locator("pre").inner_text().splitlines()[0].removeprefix("$ ")


def test_a_word_is_found(site: Site) -> None:
    with site.page("search.html?q=mergerfs") as page:
        page.wait_for_selector("ul.search li a")
        page.wait_for_function("document.querySelector('ul.search').innerText.includes('FUSE programs in containers')")


def test_the_recording_ends_at_once_for_who_wants_no_motion(site: Site) -> None:
    with site.page("_images/demo.svg", still=True) as page:
        assert page.locator(".told").first.evaluate("each => getComputedStyle(each).animationName") == "none"
        last = page.locator("text").last.bounding_box()
        assert last
        assert last["y"] < 508
    with site.page("_images/demo.svg") as page:
        assert page.locator(".told").first.evaluate("each => getComputedStyle(each).animationName") == "appear"
