"""How values are written for people at a terminal."""

import time


def visible(text: str) -> str:
    """Return `text` without the power to move the terminal's cursor: a caller chose it."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def latency(seconds: float | None) -> str:
    """Milliseconds, with three digits that count; "-" for None."""
    return "-" if seconds is None else f"{1000 * seconds:.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f} ms"


def duration(seconds: int) -> str:
    """Return for example "3 d 04:05:06"."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days} d {clock}" if days else clock


def moment(seconds: float) -> str:
    """Return a time since the epoch as the clock on the wall has it."""
    return time.strftime("%F %T", time.localtime(seconds))
