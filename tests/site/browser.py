"""A browser that shows the site from its files: no server listens, and no other host is reached."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page, Route

CHROMIUM = "/usr/bin/chromium"
HOST = "https://site.invalid/"
#: The widths, in pixels, of a laptop's window and of a phone.
WIDE, NARROW = 1280, 390
_HEIGHTS = {WIDE: 800, NARROW: 844}


@dataclass
class Site:
    """The files of a site, and what a page has asked for in vain."""

    directory: Path
    browser: Browser
    missing: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of its pages."""
        return sorted(path.name for path in self.directory.glob("*.html"))

    @contextlib.contextmanager
    def page(self, address: str, width: int = WIDE, *, dark: bool = False, still: bool = False) -> Iterator[Page]:
        """Show a page, with a query if `address` has one, in a window of that width; `still`: without motion."""
        context = self.browser.new_context(
            viewport={"width": width, "height": _HEIGHTS[width]},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce" if still else "no-preference",
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.route("**/*", self._answer)
        try:
            page = context.new_page()
            page.goto(HOST + address)
            yield page
        finally:
            context.close()

    def _answer(self, route: Route) -> None:
        url = route.request.url
        file = self.directory / urlsplit(url).path.lstrip("/")
        if url.startswith(HOST) and file.is_file():
            route.fulfill(path=file)
        else:
            self.missing.append(url)
            route.abort()


@contextlib.contextmanager
def shown(directory: Path) -> Iterator[Site]:
    """Show the site in the directory until the block ends."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            yield Site(directory, browser)
        finally:
            browser.close()
