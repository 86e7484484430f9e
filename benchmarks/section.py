"""Generated sections of documents: the text between two marks is replaced, everything around them stays.

Benchmarks put their reports into docs/ this way, so that no number is typed by hand.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Section:
    """A section of the file, between two lines that are comments in Markdown and name its writer."""

    file: Path
    writer: str

    @property
    def begin(self) -> str:
        return f"<!-- written by {self.writer} -->\n"

    @property
    def end(self) -> str:
        return f"<!-- end of what {self.writer} writes -->\n"

    def read(self) -> str:
        """Return the section's text. ValueError if one of the marks is missing or appears twice."""
        return self._split()[1]

    def write(self, text: str) -> None:
        """Replace the section's text. ValueError as in `read`; then nothing is written."""
        before, _, after = self._split()
        self.file.write_text(f"{before}{self.begin}{text}{self.end}{after}")

    def _split(self) -> tuple[str, str, str]:
        text = self.file.read_text()
        for mark in (self.begin, self.end):
            if text.count(mark) != 1:
                raise ValueError(f"{self.file}: {mark.strip()!r} is there {text.count(mark)} times, not once")
        before, _, rest = text.partition(self.begin)
        section, mark, after = rest.partition(self.end)
        if not mark:
            raise ValueError(f"{self.file}: {self.end.strip()!r} stands before {self.begin.strip()!r}")
        return before, section, after
