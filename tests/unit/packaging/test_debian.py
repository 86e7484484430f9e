"""The values that debian/ must repeat, because Debian's tools read them there, match the program."""

from __future__ import annotations

from pathlib import Path

from fusermount3_proxy import FUSERMOUNT_VERSION

DEBIAN = Path(__file__).parents[3] / "debian"


def test_the_proxy_provides_the_release_whose_behaviour_it_has() -> None:
    assert f"\n fuse3 (= {FUSERMOUNT_VERSION}),\n" in (DEBIAN / "control").read_text()
