"""The report's page: every figure comes from a result, what was not run is listed, names are escaped."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ece408_op.bench import results
from ece408_op.bench.layers import BUILT_IN
from ece408_op.core import dispatch
from ece408_op.core.roofline import Ceilings
from ece408_op.problem import ConvProblem
from ece408_op.report import _tables
from ece408_op.report.__main__ import as_page
from ece408_op.report._commands import Asked, Command, all_commands
from ece408_op.report._format import Table, seconds, table
from ece408_op.report._runs import CANNOT, DONE, Runs, write

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

WORD, LAYER = "1x28x28x50x5", "1 x 28 x 28, 50 of 5 x 5"
PROBLEM = ConvProblem(10_000, 1, 28, 28, 50, 5)
CEILINGS = Ceilings(4.5e12, 6.7e13, 9.9e14)
GPU = results.Gpu("a GPU", (9, 0), 132, "13.0", "13.0", "13.0", 150_000_000_000)
MACHINE = results.Machine("<b>CPU</b>", 2, 2, "avx2", GPU, {"numpy": "2.5"})
TEAM_003 = "2017 fall, ece408-high: report 003_f908eb42489cd140"


def asked(**changed) -> Asked:
    given = {
        "networks": ["ece408-high"],
        "sizes": [10_000, 100],
        "milestones": ["m1", "m2", "m3", "m4"],
        "impls": ["direct", "loops", "naive", "register_blocked"],
    }
    return Asked(**{**given, **changed})


def facts(machine=MACHINE, gpu_problem=None, **changed):
    cannot = {"gpu": gpu_problem, "counters": gpu_problem}
    given = {"date": "2026-11-21", "system": "Linux", "memory_bytes": 24e9, "cannot": cannot}
    return {**given, "machine": asdict(machine), "ceilings": asdict(CEILINGS), **changed}


def without_gpu(problem: str):
    return facts(replace(MACHINE, gpu=None), problem, ceilings=None)


def keep(folder: Path, name: str, result, status: str = DONE, reason: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, Command(name, (name,)), {"status": status, "reason": reason, "result": result})


def milestone(times: list[float], kernel: str = "direct", **more):
    calls = [{"seconds": value, "implementation": kernel} for value in times]
    time = {"user": 3.25, "system": 0.5, "real": 2.75}
    given = {"accuracy": 0.9153, "source": "sample", "op_times": calls, "time": time, "profile": None}
    return {**given, "context": "cpu(0)", **more}


def row(impl: str, time: float | None, precision: str = "float32", **more) -> results.Row:
    launch = {"entry": impl, "count": 2, "grid": [9, 1, 1], "block": [32, 8, 1], "registers": 40}
    launch |= {"static_shared": 1000, "dynamic_shared": 2000, "local": 0, "constant": 0, "occupancy": 0.75}
    given = {"impl": impl, "kernel": impl, "precision": precision, "roofline_seconds": 2.63e-4}
    given["details"] = {"launches": [launch]}
    return results.Row(impl, results.KERNEL, () if time is None else (time,), **{**given, **more})


def on_cpu(built_in: float | None = None, **times: float) -> list[results.Row]:
    """Rows of implementations, fresh outputs taking twice as long as reused ones; auto takes direct."""
    rows = [
        results.Row(f"New {impl}", call, (factor * time,), impl=impl, kernel=impl.replace("auto", "direct"))
        for impl, time in times.items()
        for call, factor in ((results.FRESH, 2), (results.REUSED, 1))
    ]
    return [*rows, results.Row(BUILT_IN, results.REUSED, (built_in,))] if built_in else rows


def measured(*rows: results.Row):
    case = results.Case(WORD, PROBLEM.batch, rows, PROBLEM, 2.63e-4)
    return json.loads(results.as_text(results.Results("layers", MACHINE, {}, (case,), asdict(CEILINGS))))


def keep_some(runs: Path) -> Path:
    """Results of one network with known figures; some of what was asked for is missing."""
    keep(runs, "machine", facts())
    keep(runs, "m1-ece408-high-10000", milestone([]))
    keep(runs, "m2-ece408-high-10000", milestone([0.0281]))
    keep(runs, f"layers-cpu-{WORD}-10000", measured(*on_cpu(auto=0.0281, direct=0.0312, loops=0.414)))
    keep(runs, "m3-ece408-high-10000", milestone([0.0067], "naive"))
    keep(runs, "m4-ece408-high-10000", milestone([0.000384], "register_blocked"))
    wrong = {"status": results.FAILED, "reason": "worst element [0, 0, 0, 0]"}
    rows = [
        row("register_blocked", 4e-4),
        row("naive", 0.0067),
        row("naive_global_sum", 0.041),
        row("half", 3e-4, "fp16"),
        row("fp16x3_warpgroup", 5e-4, roofline_seconds=1e-4),
        row("streams", None, **wrong),
        results.Row(
            "sliding_window", results.KERNEL, status=results.SKIPPED, reason="too large", impl="sliding_window"
        ),
    ]
    keep(runs, f"layers-gpu-{WORD}-10000", measured(*rows))
    counted = {"read": 31e6, "written": 1.1e9, "l2": 1.8e9, "occupancy": 0.5}
    keep(runs, f"counters-{WORD}-10000", {"register_blocked": counted})
    return runs


@pytest.fixture
def kept(tmp_path) -> Path:
    return keep_some(tmp_path / "runs")


class Page:
    """A page: its tables by caption, each with its head, and its sections' text by title."""

    def __init__(self, page: str) -> None:
        self.html = page
        tables = re.findall(r'aria-label="([^"]*)" tabindex="0"><table>(.*?)</table>', page, re.DOTALL)
        self.tables = {text(caption): [self._cells(row) for row in rows.split("<tr>")[1:]] for caption, rows in tables}
        sections = re.findall(r"<section [^>]*>\s*<h(\d)>(.*?)</h\1>(.*?)</section>", page, re.DOTALL)
        self.sections = {text(title): text(body) for _, title, body in sections}
        self.captions = list(map(text, re.findall("<figcaption>(.*?)</figcaption>", page)))

    def _cells(self, row: str) -> list[str]:
        return list(map(html.unescape, re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row)))

    def rows(self, caption: str) -> list[list[str]]:
        """The rows, without the head, of the table with a caption that begins so."""
        ((_, *rows),) = [rows for title, rows in self.tables.items() if title.startswith(caption)]
        return rows

    def section(self, title: str) -> str:
        (words,) = [words for name, words in self.sections.items() if name.startswith(title)]
        return words


def text(markup: str) -> str:
    return html.unescape(" ".join(re.sub("<[^>]*>", " ", markup).split()))


def opened(runs: Path, wanted: Asked | None = None) -> Page:
    wanted = wanted or asked()
    return Page(as_page(wanted, Runs(all_commands(wanted), runs)))


def test_figures_are_those_of_the_results(kept) -> None:
    page = opened(kept)
    assert page.rows("Accuracy and Op Time") == [
        ["ece408-high", "0.9153", "28.1 ms", "28.1 ms, direct", "6.70 ms", "384 us"]
    ]
    assert page.rows("m1 as whole programs") == [
        ["m1", "ece408-high", "10000", "cpu(0)", "0.9153", "3.25", "0.50", "2.75"]
    ]
    assert [cells[3:6] for cells in page.rows("m2 as whole programs")] == [["direct", "0.9153", "28.1 ms"]]
    on_the_cpu = [cells[1:] for cells in page.rows("The operator New and MXNet's") if cells[1] == "reused"]
    assert on_the_cpu == [
        *(["reused", "auto (direct)", "28.1 ms"], ["reused", "direct", "31.2 ms"], ["reused", "loops", "414 ms"])
    ]
    (against,) = page.rows("Op Times, CPU against GPU")
    expected = ["28.1 ms", "28.1 ms, direct", "6.70 ms", "384 us", "register_blocked", "4.19 x", "73.2 x", "17.4 x"]
    assert against[3:] == expected
    times = {name: cells for name, _, *cells in page.rows("Time of each kernel, 10000")}
    assert times == {
        "register_blocked": ["400 us (16.8 x)"],
        "naive": ["6.70 ms (1.00 x)"],
        "naive_global_sum": ["41.0 ms (0.163 x)"],
        "half": ["300 us (22.3 x)"],
        "fp16x3_warpgroup": ["500 us (13.4 x)"],
        "streams": ["wrong"],
        "sliding_window": ["not supported"],
    }
    assert "the generated sample set" in page.section("In short")
    for reason in ("streams, {}: worst element [0, 0, 0, 0]", "sliding_window, {}: too large"):
        assert reason.format(LAYER) in page.section("Each kernel")


def test_a_kernels_resources_counters_and_share_of_its_own_roofline(kept) -> None:
    page = opened(kept)
    changes = {name: cells for name, *cells in page.rows(f"{LAYER}, 10000 images")}
    assert changes["register_blocked"] == [
        *["400 us", "66 %", "2", "256", "40", "3.00 KB", "0 B", "75 %", "50 %"],
        *["31.0 MB", "1.10 GB", "1.80 GB"],
    ]
    assert changes["naive"][-4:] == ["–"] * 4
    assert changes["fp16x3_warpgroup"][:2] == ["500 us", "20 %"]
    # The roofline has a roof for each kind of unit that a kernel uses.
    assert {"fp32", "fp16x3"} <= set(re.findall(">([^<>]*)</text>", page.html))
    # Without counters there is no column of dashes.
    (kept / f"counters-{WORD}-10000.json").unlink()
    assert "through L2" not in opened(kept).tables[f"{LAYER}, 10000 images; at least 1.18 GB have to be moved"][0]


def test_the_teams_steps_and_published_figures_are_ratios_on_one_machine_each(kept) -> None:
    page = opened(kept)
    ladder = {cells[0]: cells[1:] for cells in page.rows(f"The ladder of {TEAM_003}")}
    assert ladder["from the first to the last kernel"] == [
        *["2.87 s", "76.8 ms", "37.3 x"],
        *["naive_global_sum to the fastest float32 kernel", "41.0 ms", "400 us", "102 x"],
    ]
    # That kernel was not run: there is no figure of ours.
    assert ladder["1024 threads in a row instead of 32 x 32"][-3:] == ["6.70 ms", "–", "–"]
    theirs = {tuple(cells[:3]): cells[3:] for cells in page.rows("Op Times; ours are sums")}
    assert theirs[TEAM_003, "10000", "CPU"] == ["12.2 s", "0.235 x", "414 ms", "loops", "0.0990 x"]
    # No kernel like that one was run, and the networks of 2018 were not asked for.
    assert not any("004_" in report and what == "GPU" for report, _, what in theirs)
    assert not any("2018" in report for report, _, _ in theirs)
    for report in re.findall(r"00\d_[0-9a-f]{16}", page.html):
        assert re.search(rf"201[78] (fall|spring), [a-z0-9-]+: report {report}", page.html)


def test_the_published_figures_name_kernels_of_the_list() -> None:
    given = _tables.published()
    gpu = {step[key] for ladder in given["ladders"] for step in ladder["steps"] for key in ("our_before", "our_after")}
    gpu |= {entry["ours"] for entry in given["op_times"] if entry["device"] == "gpu"}
    gpu |= {entry["our_naive"] for entry in given["op_times"] if "our_naive" in entry} | {_tables.BASELINE}
    assert gpu - {_tables.FASTEST} <= set(dispatch.names("gpu"))
    assert {entry["ours"] for entry in given["op_times"] if entry["device"] == "cpu"} <= set(dispatch.names("cpu"))


def test_without_results_there_are_no_figures_and_every_command_is_listed_with_its_reason(tmp_path) -> None:
    page = opened(tmp_path)
    assert list(page.tables) == ["Commands without a result"]
    ((reason, count, lines),) = page.rows("Commands without a result")
    commands = all_commands(asked())
    assert "not run" in reason
    assert (int(count), lines.split("; ")) == (len(commands), [command.line for command in commands])
    assert page.captions == []
    why = "Left out: none of them has a network and a number of images that were run here."
    assert page.section("Published") == why
    (command,) = [one for one in commands if one.name == "m1-ece408-high-100-gpu"]
    write(tmp_path, command, {"status": CANNOT, "reason": "no\nGPU here", "result": None})
    listed = {reason: lines for reason, _, lines in opened(tmp_path).rows("Commands without a result")}
    assert listed["no GPU here"] == "python -m ece408_op m1 ece408-high 100 --context gpu"


def test_the_page_needs_nothing_else_and_has_every_section_explained(kept) -> None:
    page = opened(kept)
    # Addresses in the page are anchors, and the names of SVG's namespaces.
    assert set(re.findall(r'(?:src|href)="([^"#]*)"', page.html)) == {"data:,"}
    assert re.findall(r"url\((?!#)", page.html) == []
    addresses = set(re.findall(r'https?://[^"\s]+', page.html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    ids = re.findall(r'\bid="([^"]+)"', page.html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page.html)) <= set(ids)
    assert all(page.sections.values())
    # Bars of the CPU's and of the GPU's kernels, and a roofline.
    assert page.html.count("<svg") == len(page.captions) == 3


def test_a_name_with_markup_stays_text(kept) -> None:
    keep(kept, "machine", facts(replace(MACHINE, versions={"<script>alert(1)</script>": "1"})))
    page = opened(kept)
    assert ["<script>alert(1)</script>", "1"] in page.rows("The machine")
    assert "<script>alert" not in page.html
    assert "<b>CPU" not in page.html


def test_figures_have_three_digits_and_empty_columns_are_left_out() -> None:
    times = [1.5, 0.0999, 99.96e-3, 2.5e-5, 3e-9, 123.4, None]
    assert list(map(seconds, times)) == ["1.50 s", "99.9 ms", "100 ms", "25.0 us", "3.00 ns", "123 s", "–"]
    figures = ["–", "12", "0.9153", "4.47 %", "25.2 ms + 64.4 ms", "384 us (17.5 x)", "1.13 GB", "not supported"]
    words = ["naive", "m3", "1 x 28 x 28", "2026-11-21", "no naive kernel published", "avx512"]
    assert Table("", [], [figures]).numeric == [True] * len(figures)
    assert Table("", [], [words]).numeric == [False] * len(words)
    assert table("", ["a", "b"], [["–", "1"], ["– + –", "2"]]).head == ["b"]


def test_the_fastest_cpu_kernel_is_found_by_its_times(kept) -> None:
    keep(kept, f"layers-cpu-{WORD}-10000", measured(*on_cpu(auto=0.0281, direct=0.0312, loops=0.02)))
    page = opened(kept)
    assert page.rows("Accuracy and Op Time")[0][2:4] == ["28.1 ms", "20.0 ms, loops"]
    assert page.rows("Op Times, CPU against GPU")[0][3:5] == ["28.1 ms", "20.0 ms, loops"]


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        ("no NVIDIA driver: use m2.py", "Left out: no NVIDIA driver."),
        ("the GPU: expected cupy to import, got E", "Left out: the GPU: expected cupy to import, got E."),
    ],
)
def test_without_a_gpu_there_is_a_chart_and_no_table_without_a_figure(tmp_path, problem, sentence) -> None:
    keep(tmp_path, "machine", without_gpu(problem))
    keep(tmp_path, "m2-ece408-high-10000", milestone([0.0281]))
    keep(tmp_path, f"layers-cpu-{WORD}-10000", measured(*on_cpu(auto=0.0281, loops=0.414)))
    page = opened(tmp_path)
    (caption,) = page.captions
    assert caption.startswith(f"Time of each CPU kernel, {LAYER}")
    assert page.section("Milestones 3 and 4: the operator") == sentence
    assert ["GPU", f"none: {problem}"] in page.rows("The machine")
    assert page.rows("Accuracy and Op Time") == [["ece408-high", "0.9153", "28.1 ms", "28.1 ms, direct"]]
    assert all(len(rows) > 1 for rows in page.tables.values())
    theirs = page.rows("Op Times; ours are sums")
    assert TEAM_003 in [cells[0] for cells in theirs]
    assert not any("GPU" in cells[2] for cells in theirs)


def test_mxnets_time_is_in_table_and_chart_where_it_was_measured(kept) -> None:
    assert "MXNet Convolution" not in opened(kept).html
    keep(kept, f"layers-cpu-{WORD}-10000", measured(*on_cpu(built_in=0.18, auto=0.09)))
    page = opened(kept)
    assert page.rows("The operator New and MXNet's")[1] == [
        *(LAYER, "reused", "auto (direct)", "90.0 ms", "180 ms", "2.00 x")
    ]
    assert ">MXNet Convolution<" in page.html.replace("\n", "")


def test_profiles_have_the_list_over_90_percent_and_folded_tables(kept) -> None:
    entry = {"name": "naive", "percent": 95.0, "total": 3e6, "calls": 7, "average": 4e5, "least": 2e5, "most": 9e5}
    other = {**entry, "name": "hold", "percent": 5.0}
    shape = {"name": "naive", "launches": 7, "grid": [9, 1, 1], "block": [32, 8, 1], "registers": 40}
    shape |= {"static_shared": 1000, "dynamic_shared": 24, "local": 0, "occupancy": 0.5}
    profile = {"tables": {"gpu": [entry, other], "calls": [], "operators": []}, "most": {"gpu": ["naive"]}}
    profile["most"] |= {"calls": [], "operators": []}
    keep(kept, "m3-ece408-high-10000-profile", milestone([0.0068], "naive", profile={**profile, "shapes": [shape]}))
    page = opened(kept)
    title = "m3, ece408-high, 10000 images"
    assert page.rows("What together takes more than 90 %") == [[title, "GPU activities", "naive 95.0"]]
    assert page.rows(f"{title}: GPU activities")[0] == [
        *["95.00 %", "3.0000ms", "7", "400.00us", "200.00us", "900.00us", "naive"]
    ]
    assert page.rows(f"{title}: kernel launches") == [["naive", "7", "9 x 1 x 1", "32 x 8 x 1", "40", "1024", "50 %"]]
    assert page.html.count("<details>") == 2
    # Only the kinds that occur are explained.
    assert "is work on the GPU" in page.section("Milestones 3 and 4: profiles")
    assert "is work on the host" not in page.html
    (m3, _) = page.rows("m3 and m4 as whole programs")
    assert m3[-2:] == ["2.75", "6.80 ms"]
