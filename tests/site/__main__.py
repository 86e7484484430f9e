"""Take a picture of the main pages at both widths: ``python -m tests.site DIRECTORY``, of the site in build/site."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.lab.sphinx import ROOT
from tests.site.browser import NARROW, WIDE, shown
from tests.site.test_in_a_browser import MAIN


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    with shown(ROOT / "build/site") as site:
        for name in MAIN:
            for width in (WIDE, NARROW):
                with site.page(f"{name}.html", width) as page:
                    page.screenshot(path=directory / f"{name}-{width}.png")


if __name__ == "__main__":
    main()
