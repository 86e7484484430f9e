"""docs/performance.md: benchmark results as text, tables and a plot, all generated from stored numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import metafuse, page, plot, results
from benchmarks.__main__ import PAGE, PLOT, STORED, parse
from benchmarks.results import (
    GENUINE,
    PROXY,
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
    Transfer,
    Use,
    Waiting,
)

KIB, MIB, GIB = 1024, 1024**2, 1024**3
MACHINE = Machine("2026-01-31", "Linux 6.18.0", "A processor", 2, 8 * GIB, {"fusermount3": "3.14.0"}, [0.0, 2.4])
LATENCY = Latency(
    exec_to_descriptor={GENUINE: Timing(0.5, 1.0, 1000), PROXY: Timing(1.5, 2.5, 1000)},
    start_to_exit={"nothing": Timing(0.4, 0.5, 100), "proxy -V": Timing(1.6, 2.0, 100)},
    not_measured={"another proxy": "it can't be had"},
    exec_to_exit={GENUINE: Timing(0.6, 1.1, 1000, (0.5, 0.75)), PROXY: Timing(1.8, 3.3, 1000, (1.5, 2.0))},
)
CPU = {
    GENUINE: Cost(10, [Use(0.5, 60), Use(0.75, 62), Use(1.0, 64)], []),
    PROXY: Cost(10, [Use(1.0, 300)] * 3, [Use(1.5, 800), Use(2.0, 900), Use(2.5, 1000)]),
}
CALLERS = Concurrency(
    8,
    Calls([100.0, 120.0, 110.0], Timing(4.0, 10.0, 330), 0),
    Calls([50.0, 55.0, 60.0], Timing(8.0, 30.0, 165), 0),
)
MEMORY = Memory(1000, 30 * MIB, 32 * MIB, {GENUINE: Waiting(200 * KIB, 90 * KIB), PROXY: Waiting(300 * KIB, 120 * KIB)})


def job(*ratios: float) -> Job:
    """Return a job with one round per ratio, in which the proxy's side is faster by that ratio."""
    genuine = [Transfer(200e6, 100, 400) for _ in ratios]
    return Job("random read", "4k", 1, genuine, [Transfer(200e6 * ratio, 110, 420) for ratio in ratios])


NOISE = job(0.98, 1.01, 1.0, 1.02, 0.99, 1.0, 1.01, 0.97)
RESULTS = Results(MACHINE, False, LATENCY, [CALLERS], DataPath("bindfs 1.14", [NOISE]), MEMORY, CPU)


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_latency_is_shown_as_p50_and_p99_with_their_ratios() -> None:
    assert [PROXY, "1.50 ms", "2.50 ms", "3.00", "2.50", "1000"] in rows(page.latency(LATENCY))


def test_what_was_not_measured_is_in_the_table_with_the_reason() -> None:
    assert ["another proxy", "not measured: it can't be had", "", "", "", ""] in rows(page.latency(LATENCY))


def test_a_p50_is_shown_with_its_interval_and_the_ratio_with_that_from_the_ends_of_both() -> None:
    text = page.latency(LATENCY)
    assert [GENUINE, "0.60 ms (0.50 to 0.75)", "1.10 ms", "1.00", "1.00", "1000"] in rows(text)
    assert [PROXY, "1.80 ms (1.50 to 2.00)", "3.30 ms", "3.00 (2.00 to 4.00)", "3.00", "1000"] in rows(text)
    assert [row[1] for row in rows(text) if row[2] == "p99"] == ["p50", "p50 (95 % interval)", "p50"]


def test_callers_at_once_are_shown_with_intervals_if_they_have_them() -> None:
    timing = Timing(8.0, 30.0, 165, (7.5, 8.5))
    shown = rows(page.callers([replace(CALLERS, proxy=replace(CALLERS.proxy, mount=timing))]))
    assert shown[0][4] == "a mount: p50 (95 % interval)"
    assert shown[-1][4] == "8.0 ms (7.5 to 8.5)"
    assert rows(page.callers([CALLERS]))[0][4] == "a mount: p50"


def test_earlier_results_have_no_time_to_exit_and_no_intervals() -> None:
    text = page.latency(replace(LATENCY, exec_to_exit={}))
    assert "exec to exit" not in text
    assert "interval" not in text


@pytest.mark.parametrize(
    ("number", "interval"), [(5, None), (6, (1, 6)), (10, (2, 9)), (100, (40, 61)), (1000, (469, 532))]
)
def test_the_interval_of_a_median_has_the_ranks_of_published_tables(
    number: int, interval: tuple[float, float] | None
) -> None:
    assert results.median_interval(range(number, 0, -1)) == interval


def test_the_interval_of_a_median_misses_it_at_most_once_in_twenty() -> None:
    chance = random.Random(1)
    missed = 0
    for _ in range(1000):
        interval = results.median_interval([chance.expovariate(1) for _ in range(50)])
        assert interval
        missed += not interval[0] <= 0.6931 <= interval[1]  # ln 2
    assert missed <= 60


def test_a_timing_has_the_interval_of_its_p50() -> None:
    timing = Timing.of([float(each) for each in range(1, 101)])
    assert timing == Timing(50.5, 99.99, 100, (40.0, 61.0))
    assert Timing.of([1.0, 2.0]).p50_interval is None


def test_cpu_is_shown_of_helper_and_broker_and_of_both_together() -> None:
    text = page.cpu(CPU)
    assert "3 batches of 10 mounts" in text
    assert rows(text)[-2:] == [
        [GENUINE, "0.75 ms", "–", "0.75 ms (0.50 to 1.00)", "1.00", "62", "–"],  # noqa: RUF001
        [PROXY, "1.00 ms", "2.00 ms", "3.00 ms (2.50 to 3.50)", "4.00", "300", "900"],
    ]


def test_callers_are_shown_with_the_median_of_the_rounds_and_where_they_went() -> None:
    assert ["8", PROXY, "55 (50 to 60)", "0.50", "8.0 ms", "30.0 ms", "2.00", "3.00", "165"] in rows(
        page.callers([CALLERS])
    )


def test_calls_that_failed_are_told_and_missed() -> None:
    failed = replace(CALLERS, proxy=replace(CALLERS.proxy, failed=3))
    assert "3 calls failed" in page.callers([failed])
    assert "failed" not in page.callers([CALLERS])
    assert replace(RESULTS, callers=[failed]).missed() == ["callers: 3 calls failed"]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((0.96, 1.04, 1.0, 0.97, 1.03, 1.0), "yes"),
        ((0.9, 0.92, 0.94, 0.9, 0.92, 0.94), "**no**"),
        ((1.06, 1.1, 1.07, 1.08, 1.1, 1.3), "**no**"),
        ((0.94, 1.0, 1.0, 1.0, 1.0, 1.0), "undecided"),
        ((1.0, 1.0, 1.0, 1.0, 1.0, 1.06), "undecided"),
        ((0.9, 0.9, 0.9, 0.9, 0.9), "undecided"),
    ],
)
def test_the_data_path_is_the_same_if_the_interval_of_the_ratio_is_within_the_bounds_and_not_if_outside(
    ratios: tuple[float, ...], verdict: str
) -> None:
    measured = DataPath("bindfs 1.14", [job(*ratios)])
    assert rows(page.datapath(measured))[-1][5] == verdict
    assert replace(RESULTS, datapath=measured).missed() == (
        ["datapath: random read, 4k, 1 job: the ratio is not 1.00"] if verdict == "**no**" else []
    )


@pytest.mark.parametrize(
    ("ratios", "precise"),
    [
        ((0.8, 0.82, 0.78, 0.81, 0.79, 0.8), True),
        ((0.95, 1.0, 1.0, 1.0, 1.0, 1.06), False),
        ((1.0, 1.0, 1.0, 1.0, 1.0), False),
    ],
)
def test_a_job_is_precise_if_its_interval_is_narrow_whichever_side_is_faster(
    ratios: tuple[float, ...], precise: bool
) -> None:
    assert job(*ratios).is_precise() is precise


def test_the_data_path_is_shown_with_rounds_throughput_and_the_interval_of_the_ratio() -> None:
    assert rows(page.datapath(DataPath("bindfs 1.14", [NOISE])))[-1] == [
        "random read, 4k, 1 job",
        "8",
        "200",
        "200",
        "1.000 (0.970 to 1.020)",
        "yes",
        "100, 110 µs",
        "400, 420 µs",
    ]


def test_memory_is_shown_with_what_a_mount_adds() -> None:
    shown = rows(page.memory(MEMORY))
    assert ["what a mount adds", "2.05 KiB"] in shown
    assert ["proxy that waits with auto_unmount, alone", "300 KiB"] in shown


def test_the_page_says_where_and_when() -> None:
    text = page.rendered(RESULTS)
    for said in (
        "2026-01-31",
        "Linux 6.18.0",
        "A processor",
        "2 processors",
        "8.0 GiB",
        "fusermount3 3.14.0",
        "0 to 2 %",
    ):
        assert said in text
    assert "quick" not in text
    assert "busy" not in text


def test_the_page_says_when_the_numbers_mean_little() -> None:
    assert "**A quick run**" in page.rendered(replace(RESULTS, quick=True))
    busy = replace(RESULTS, machine=replace(MACHINE, busy=[0.0, 60.0]))
    assert "**The machine was busy with other things**" in page.rendered(busy)


def test_parts_that_were_not_selected_are_not_shown() -> None:
    assert list(page.shown(Results(MACHINE, False, memory=MEMORY))) == [page.memory(MEMORY)]


def test_results_are_stored_and_loaded_as_they_were(tmp_path: Path) -> None:
    stored = tmp_path / "results.json"
    results.store(RESULTS, stored)
    assert results.load(stored) == RESULTS


def test_the_same_numbers_are_drawn_as_the_same_bytes(tmp_path: Path) -> None:
    stored = tmp_path / "results.json"
    results.store(RESULTS, stored)
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        plot.draw(RESULTS, stored, picture)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert plot.source(stored) in pictures[0].read_text()


def test_the_document_is_what_is_made_of_the_stored_numbers() -> None:
    assert PAGE.read() == page.rendered(results.load(STORED)), "make it anew: python -m benchmarks --render"


def test_the_plot_is_drawn_from_the_stored_numbers() -> None:
    assert plot.source(STORED) in PLOT.read_text(), "make it anew: python -m benchmarks --render"


def test_only_a_run_of_all_that_is_compared_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--write", "latency", "cpu", "callers", "datapath", "memory"]).write
    with pytest.raises(SystemExit):
        parse(["--write", "latency", "memory"])
    assert "--write needs also: callers, cpu, datapath" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stdout", "stderr"),
    [
        ('{"Error": "module a: reading https://proxy.example/a/@v/list: 403 Forbidden\\n\\tnot here"}', ""),
        ("", "module a: reading https://proxy.example/a/@v/list: 403 Forbidden\n\tnot here\n"),
    ],
)
def test_a_module_that_cannot_be_had_is_a_reason_without_addresses(stdout: str, stderr: str) -> None:
    assert metafuse.reason(stdout, stderr) == "module a: reading 403 Forbidden not here"
