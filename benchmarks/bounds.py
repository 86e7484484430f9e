"""The numbers that a benchmark prints beside their bounds, and the settings of the brokers that it measures."""

from dataclasses import dataclass, field

#: The shipped settings that tests switch off: the search for dead mounts, and the limits.
SHIPPED = "dead_mounts_seconds = 2\n[limits]"
#: The limits by which one caller may have as many mounts and requests as are measured here.
NO_LIMITS = "mounts = 0\nrequests_per_second = 0\nconcurrent = 0"
UNLIMITED = f"mount_max = -1\n{SHIPPED}\n{NO_LIMITS}"
KIB, MIB = 1024, 1024 * 1024


@dataclass
class Report:
    """Prints numbers, and where there is a bound, the bound and whether it holds."""

    missed: list[str] = field(default_factory=list)

    def title(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def say(self, what: str, value: str) -> None:
        print(f"  {what:58} {value:>12}", flush=True)

    def no_errors(self, texts: list[str]) -> None:
        self.at_most("calls that failed", len(texts), 0, "")
        for text in sorted(set(texts))[:5]:
            print(f"    {text}", flush=True)

    def at_most(self, what: str, value: float, most: float, unit: str) -> None:
        held = value <= most
        if not held:
            self.missed.append(what)
        verdict = "" if held else "  MISSED"
        print(f"  {what:58} {value:>9.2f} {unit:2}  (at most {most:.2f} {unit}){verdict}", flush=True)
