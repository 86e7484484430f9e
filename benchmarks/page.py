"""The generated part of docs/performance.md: text and tables from the measurements of a run. Pure functions."""

from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.results import (
    GENUINE,
    PROXY,
    SAME_WITHIN,
    Calls,
    Concurrency,
    Cost,
    DataPath,
    Job,
    Latency,
    Machine,
    Memory,
    Results,
    Timing,
    Use,
)

GIB, MIB, KIB = 1024**3, 1024**2, 1024
#: Percent of the processors that other processes may use before the numbers lose their meaning.
QUIET = 10.0
#: Characters; a longer cell doesn't widen its column.
WIDEST = 60


def rendered(results: Results) -> str:
    """Return the whole part, for a run with no part missing. The plot is beside the page."""
    parts = "\n".join(shown(results))
    plot = "![Latency, mounts a second and data path, drawn from the numbers below](performance.svg)\n"
    return f"{introduction(results)}\n{plot}\n{parts}"


def shown(results: Results) -> Iterable[str]:
    """Yield the tables of each measured part."""
    if results.latency:
        yield latency(results.latency)
    if results.cpu:
        yield cpu(results.cpu)
    if results.callers:
        yield callers(results.callers)
    if results.datapath:
        yield datapath(results.datapath)
    if results.memory:
        yield memory(results.memory)


def introduction(results: Results) -> str:
    """Return machine and time of the run, and whether its numbers can mean anything."""
    text = f"{machine(results.machine)}\n"
    if results.quick:
        text += "\n**A quick run**: too few calls and rounds for the numbers to mean anything.\n"
    if max(results.machine.busy, default=0) > QUIET:
        text += "\n**The machine was busy with other things**, so the numbers mean little.\n"
    return text


def machine(measured: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    return (
        f"Measured on {measured.date}: {measured.kernel}; {measured.processor}; {measured.processors} processors; "
        f"{measured.memory / GIB:.1f} GiB of memory; {versions}. "
        f"Before the parts, others used {span(measured.busy, '.0f')} % of the processors."
    )


def latency(measured: Latency) -> str:
    """Return the tables of all timings. Results of earlier runs have none from exec to exit."""
    not_measured = [[name, f"not measured: {reason}", *[""] * 4] for name, reason in measured.not_measured.items()]
    tables = [
        ("From exec to the /dev/fuse descriptor", "helper", measured.exec_to_descriptor, not_measured),
        ("From exec to exit, with a mount", "helper", measured.exec_to_exit, not_measured),
        ("From start to exit", "program", measured.start_to_exit, []),
    ]
    return "\n".join(
        f"### {title}\n\n{table([column, *timing_header(timings)], compared(timings) + more)}"
        for title, column, timings, more in tables
        if timings
    )


def timing_header(timings: dict[str, Timing]) -> list[str]:
    return [p50_header(timings.values()), "p99", "p50, ratio", "p99, ratio", "calls"]


def p50_header(timings: Iterable[Timing]) -> str:
    return "p50 (95 % interval)" if any(each.p50_interval for each in timings) else "p50"


def compared(timings: dict[str, Timing]) -> list[list[str]]:
    """Return a row for each timing, with its ratio to the first."""
    first = next(iter(timings.values()))
    return [
        [
            name,
            p50(each, ".2f"),
            f"{each.p99:.2f} ms",
            p50_ratio(each, first),
            f"{each.p99 / first.p99:.2f}",
            f"{each.calls}",
        ]
        for name, each in timings.items()
    ]


def p50(timing: Timing, form: str) -> str:
    """Return the p50 with its confidence interval, if that is known."""
    return f"{timing.p50:{form}} ms" + (f" ({span(timing.p50_interval, form)})" if timing.p50_interval else "")


def p50_ratio(timing: Timing, first: Timing) -> str:
    """Return the ratio of the p50, from where to where it goes for the ends of both confidence intervals."""
    ratio = f"{timing.p50 / first.p50:.2f}"
    if timing is first or not timing.p50_interval or not first.p50_interval:
        return ratio
    (low, high), (first_low, first_high) = timing.p50_interval, first.p50_interval
    return f"{ratio} ({low / first_high:.2f} to {high / first_low:.2f})"


def cpu(measured: dict[str, Cost]) -> str:
    header = [
        "a mount by",
        "CPU: helper",
        "broker",
        "together (batches)",
        "ratio",
        "minor page faults: helper",
        "broker",
    ]
    first = next(iter(measured.values()))
    batches = f"The median of {len(first.helper)} batches of {first.mounts} mounts, and from where to where they went."
    return f"### CPU\n\n{batches}\n\n{table(header, [cpu_row(name, each, first) for name, each in measured.items()])}"


def cpu_row(name: str, measured: Cost, first: Cost) -> list[str]:
    def middle(uses: list[Use], value: str, form: str, unit: str = "") -> str:
        return f"{median(getattr(use, value) for use in uses):{form}}{unit}" if uses else "–"  # noqa: RUF001

    together = measured.cpu_milliseconds()
    return [
        name,
        middle(measured.helper, "cpu_milliseconds", ".2f", " ms"),
        middle(measured.broker, "cpu_milliseconds", ".2f", " ms"),
        f"{median(together):.2f} ms ({span(together, '.2f')})",
        f"{median(together) / median(first.cpu_milliseconds()):.2f}",
        middle(measured.helper, "minor_faults", ".0f"),
        middle(measured.broker, "minor_faults", ".0f"),
    ]


def callers(measured: list[Concurrency]) -> str:
    header = [
        "callers",
        "helper",
        "mounts a second (rounds)",
        "ratio",
        f"a mount: {p50_header(each.proxy.mount for each in measured)}",
        "p99",
        "p50, ratio",
        "p99, ratio",
    ]
    rows = [row for each in measured for row in rows_of(each)]
    failed = sum(each.failed() for each in measured)
    note = f"\n{failed} calls failed; they are not counted.\n" if failed else ""
    return f"### Callers at once\n\n{table([*header, 'calls'], rows)}{note}"


def rows_of(measured: Concurrency) -> list[list[str]]:
    def row(name: str, calls: Calls) -> list[str]:
        return [
            f"{measured.callers}",
            name,
            middle_and_span(calls.mounts_per_second, ".0f"),
            f"{median(calls.mounts_per_second) / median(measured.genuine.mounts_per_second):.2f}",
            p50(calls.mount, ".1f"),
            f"{calls.mount.p99:.1f} ms",
            p50_ratio(calls.mount, measured.genuine.mount),
            f"{calls.mount.p99 / measured.genuine.mount.p99:.2f}",
            f"{calls.mount.calls}",
        ]

    return [row(GENUINE, measured.genuine), row(PROXY, measured.proxy)]


def datapath(measured: DataPath) -> str:
    header = [
        "fio",
        "rounds",
        "genuine, MB/s",
        "proxy, MB/s",
        "ratio (95 % interval)",
        "the same",
        "latency, p50: genuine, proxy",
        "p99",
    ]
    return (
        "### The data path\n\n"
        f"fio through {measured.program}, in turn on a filesystem mounted by the genuine helper and on one mounted by "
        f"the proxy: the medians of the rounds. The data path is the same where the whole interval of the ratio is "
        f"within {1 - SAME_WITHIN:.2f} and {1 + SAME_WITHIN:.2f}, and not the same where it is outside.\n\n"
        f"{table(header, [job_row(job) for job in measured.jobs])}"
    )


def job_row(job: Job) -> list[str]:
    def megabytes(side: str) -> str:
        return f"{median(each.bytes_per_second / 1e6 for each in getattr(job, side)):.0f}"

    def microseconds(percentile: str) -> str:
        both = (median(getattr(each, percentile) for each in side) for side in (job.genuine, job.proxy))
        return ", ".join(f"{value:.0f}" for value in both) + " µs"

    interval = job.interval()
    return [
        job.title(),
        f"{len(job.genuine)}",
        megabytes("genuine"),
        megabytes("proxy"),
        f"{median(job.ratios()):.3f}" + (f" ({span(interval, '.3f')})" if interval else ""),
        {True: "yes", False: "**no**", None: "undecided"}[job.is_same()],
        microseconds("p50_microseconds"),
        microseconds("p99_microseconds"),
    ]


def memory(measured: Memory) -> str:
    each = (measured.broker_with_mounts - measured.broker_idle) / measured.mounts
    rows = [
        ["broker, all its processes, no mounts", f"{measured.broker_idle / MIB:.1f} MiB"],
        [f"broker with {measured.mounts} mounts", f"{measured.broker_with_mounts / MIB:.1f} MiB"],
        ["what a mount adds", f"{each / KIB:.2f} KiB"],
    ]
    for name, waiting in measured.waiting.items():
        called = {PROXY: "proxy"}.get(name, name)
        rows += [
            [f"{called} that waits with auto_unmount, alone", f"{waiting.alone / KIB:.0f} KiB"],
            [f"{called} that waits, each of ten", f"{waiting.each_of_ten / KIB:.0f} KiB"],
        ]
    return f"### Memory\n\n{table(['of', 'PSS'], rows)}"


def middle_and_span(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({span(values, form)})"


def span(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table that is also readable as plain text."""
    columns = zip(header, *rows, strict=True)
    widths = [max(len(cell) for cell in column if len(cell) <= WIDEST) for column in columns]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |\n"

    return line(header) + line(["-" * width for width in widths]) + "".join(map(line, rows))
