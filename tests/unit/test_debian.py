"""What debian/ has to say again, because Debian's tools read it there, is what the program says."""

from __future__ import annotations

import re
from pathlib import Path

from fusermount3_proxy import FUSERMOUNT_VERSION, __version__

DEBIAN = Path(__file__).parents[2] / "debian"


def test_the_changelog_begins_with_the_version() -> None:
    found = re.match(r"fusermount3-proxy \(([^)]+)\) ", (DEBIAN / "changelog").read_text())
    assert found
    assert found[1] == __version__


def test_the_proxy_provides_the_release_whose_behaviour_it_has() -> None:
    assert f"\n fuse3 (= {FUSERMOUNT_VERSION}),\n" in (DEBIAN / "control").read_text()
