"""Formatting of values for people at a terminal."""

#: Seconds of a hundred thousand years: what is older than that was not mounted here.
_LONGEST_AGE = 10**12


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


def age(seconds: float) -> str:
    """Return for example "45s", "12m30s", "3h5m" or "12d"; for a time that has not come, "0s".

    Raises ValueError, OverflowError if it is no number of seconds.
    """
    whole = max(0, int(seconds))
    if whole > _LONGEST_AGE:
        raise ValueError("no time")
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            most, rest = divmod(whole, size)
            return f"{most}{unit}" + (f"{rest // part}{smaller}" if rest // part and most < 10 else "")
    return f"{whole}s"
