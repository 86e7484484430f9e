"""The plot of docs/performance.md, drawn with Matplotlib from the measurements of a run.

The same numbers give the same bytes: no date, no random ids. The picture names the numbers from which it was drawn, so
that a test can detect an outdated picture.
"""

import hashlib
import textwrap
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results import GENUINE, IN_CONTAINERS, PROXY, SAME_WITHIN, Concurrency, DataPath, Latency, Results

COLOURS = {GENUINE: "#7f8c9b", PROXY: "#1f77b4", **dict.fromkeys(IN_CONTAINERS, "#6baed6")}
OTHER = "#b08d57"
#: Characters in a line; a longer one leaves no room for the plot.
NAME_WIDTH = 22
STYLE = Path(__file__).with_suffix(".mplstyle")


def source(stored: Path) -> str:
    """Return the picture's name for the file of numbers from which it was drawn."""
    return f"drawn from {stored.name}, sha256 {hashlib.sha256(stored.read_bytes()).hexdigest()}"


def draw(results: Results, stored: Path, file: Path) -> None:
    """Draw a run with no part missing, stored in the file `stored`, as SVG."""
    assert results.latency, "latency was not measured"
    assert results.callers, "callers were not measured"
    assert results.datapath, "the data path was not measured"
    with mpl.rc_context():
        mpl.rc_file(STYLE)
        figure = Figure(figsize=(9, 6.4), layout="constrained")
        grid = figure.add_gridspec(2, 2)
        draw_latency(figure.add_subplot(grid[0, 0]), results.latency)
        draw_callers(figure.add_subplot(grid[0, 1]), results.callers)
        draw_datapath(figure.add_subplot(grid[1, :]), results.datapath)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Description": source(stored)})


def draw_latency(axes: Axes, latency: Latency) -> None:
    """Draw a bar from the p50 to the p99 of each helper."""
    names = [textwrap.fill(name, NAME_WIDTH) for name in latency.exec_to_descriptor]
    for place, (name, timing) in enumerate(latency.exec_to_descriptor.items()):
        colour = COLOURS.get(name, OTHER)
        axes.plot([timing.p50, timing.p99], [place, place], color=colour, linewidth=3, solid_capstyle="butt")
        axes.plot([timing.p50], [place], "o", color=colour, markersize=8)
        axes.plot([timing.p99], [place], "|", color=colour, markersize=14, markeredgewidth=3)
        axes.annotate(
            f"{timing.p50:.2f} ms, p99 {timing.p99:.2f} ms",
            (timing.p50, place),
            xytext=(0, 10),
            textcoords="offset points",
        )
    axes.set_title("exec to the /dev/fuse descriptor: p50 to p99")
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.7)
    axes.grid(axis="x", alpha=0.3)


def draw_callers(axes: Axes, concurrency: list[Concurrency]) -> None:
    """Draw two bars for each number of callers."""
    for side, (name, offset) in {"genuine": (GENUINE, -0.2), "proxy": (PROXY, 0.2)}.items():
        places = [number + offset for number in range(len(concurrency))]
        values = [median(getattr(each, side).mounts_per_second) for each in concurrency]
        bars = axes.bar(places, values, width=0.38, color=COLOURS[name], label=name)
        axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_title("mounts a second")
    axes.set_xticks(range(len(concurrency)), [f"{each.callers}" for each in concurrency])
    axes.set_xlabel("callers at once")
    axes.margins(y=0.25)
    axes.legend(frameon=False, loc="upper left", ncols=2)
    axes.grid(axis="y", alpha=0.3)


def draw_datapath(axes: Axes, datapath: DataPath) -> None:
    """Draw for each job a dot for the median of its rounds, and a line for the interval of that."""
    names = []
    drawn = [1 - SAME_WITHIN, 1 + SAME_WITHIN]
    for place, job in enumerate(datapath.jobs):
        middle = median(job.ratios())
        ends = job.interval() or (middle, middle)
        axes.plot(ends, [place, place], color=COLOURS[PROXY], linewidth=3, solid_capstyle="butt")
        axes.plot([middle], [place], "o", color=COLOURS[PROXY], markersize=8)
        drawn += ends
        names.append(job.title())
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.axvspan(1 - SAME_WITHIN, 1 + SAME_WITHIN, color="black", alpha=0.05, linewidth=0)
    axes.set_xlim(min(drawn) - 0.01, max(drawn) + 0.01)
    axes.set_title(f"throughput of {datapath.program}: mounted by the proxy / by genuine fusermount3, 95 % interval")
    axes.set_xlabel("ratio")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
