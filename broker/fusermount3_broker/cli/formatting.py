"""Formatting of values for people at a terminal."""

import time


def columns(lines: list[list[str]]) -> str:
    """Return the lines as a table, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def latency(seconds: float | None) -> str:
    """Return milliseconds, with three significant digits; "-" for None."""
    return "-" if seconds is None else f"{1000 * seconds:.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f} ms"


def duration(seconds: int) -> str:
    """Return for example "3 d 04:05:06"."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days} d {clock}" if days else clock


def moment(seconds: float) -> str:
    """Return a time since the epoch as local date and time. Raises ValueError if it is out of range."""
    try:
        return time.strftime("%F %T", time.localtime(seconds))
    except (OSError, OverflowError):
        raise ValueError("no time") from None
