"""The report's page and Markdown: every figure comes from a run, what was not run is listed, names are escaped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ece408_op.report import _document, _jobs, _published, _render, _runner, _speed
from ece408_op.report._jobs import MACHINE, Asked, Job
from ece408_op.report._runs import Runs

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

LAYER = "1 x 28 x 28, 50 of 5 x 5"
FACTS = {
    "identity": ["a CPU"],
    "date": "2026-11-21",
    "system": "Linux",
    "cpu": {"cpu": "<b>CPU</b>", "cores": 2, "threads": 2, "simd": "avx2"},
    "memory_bytes": 24e9,
    "gpu": {
        "name": "a GPU",
        "capability": "9.0",
        "multiprocessors": 132,
        "memory_bytes": 150e9,
        "driver": "580.1",
        "driver_cuda": "13.0",
        "nvrtc": "13.0",
        "ceilings": {"bytes_per_second": 4.5e12, "flops_per_second": 6.7e13},
    },
    "versions": {"numpy": "2.5"},
    "cannot": {},
}


TEAM_003 = "2017 fall, ece408-high: report 003_f908eb42489cd140"


def asked(**changed) -> Asked:
    given = {
        "networks": ["ece408-high"],
        "sizes": [10_000, 100],
        "milestones": ["m1", "m2", "m3", "m4"],
        "cpu_kernels": ["direct", "loops"],
        "gpu_kernels": ["naive", "register_blocked"],
    }
    return Asked(**{**given, **changed})


def keep(folder: Path, name: str, result) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    job = Job(name, (), shown=f"python {name}")
    _runner.write(folder / f"{name}.json", _runner.record(job, _runner.DONE, result=result))


def milestone(seconds: list[float], kernel: str = "direct", **more):
    calls = [{"seconds": value, "implementation": kernel} for value in seconds]
    time = {"user": 3.25, "system": 0.5, "real": 2.75}
    return {"accuracy": 0.9153, "source": "sample", "op_times": calls, "time": time, "profile": None, **more}


def row(kernel: str, seconds: float | None, precision: str = "float32", **more):
    launch = {"entry": kernel, "count": 2, "grid": [9, 1, 1], "block": [32, 8, 1], "registers": 40}
    launch |= {"static_shared": 1000, "dynamic_shared": 2000, "local": 0, "constant": 0, "occupancy": 0.75}
    made = {"kernel": kernel, "precision": precision, "right": True, "reason": "", "launches": [launch], **more}
    return made if seconds is None else {**made, "seconds": seconds}


def kernels_run(*rows):
    problem = {"batch": 10_000, "channels": 1, "height": 28, "width": 28, "filters": 50, "kernel": 5}
    sizes = {"flops": 14_400_000_000, "bytes": 1_183_365_000, "roofline_seconds": 2.63e-4}
    return {"layers": [{"layer": "new0", "method": "the median of 3", "problem": problem, **sizes, "rows": list(rows)}]}


def keep_some(runs: Path) -> Path:
    """Runs of one network, whose figures the tests know; some of what was asked for is missing."""
    keep(runs, MACHINE, FACTS)
    keep(runs, "m1-ece408-high-10000", milestone([]))
    keep(runs, "m2-ece408-high-10000-auto", milestone([0.0281]))
    keep(runs, "m2-ece408-high-10000-direct", milestone([0.0312]))
    keep(runs, "m2-ece408-high-10000-loops", milestone([0.414], "loops"))
    keep(runs, "m3-ece408-high-10000", milestone([0.0067], "naive"))
    keep(runs, "m4-ece408-high-10000", milestone([0.000384], "register_blocked"))
    rows = [
        row("register_blocked", 4e-4),
        row("naive", 0.0067),
        row("naive_global_sum", 0.041),
        row("half", 3e-4, "fp16"),
    ]
    rows += [
        row("odd", None, right=False, reason="worst element [0, 0, 0, 0]"),
        {"kernel": "sliding_window", "precision": "float32", "reason": "too large"},
    ]
    keep(runs, "kernels-1x28x28x50x5-10000", kernels_run(*rows))
    counted = {
        "kernel": "register_blocked",
        "launches": 2,
        "read": 31e6,
        "written": 1.1e9,
        "cache": 1.8e9,
        "occupancy": 0.5,
    }
    keep(runs, "counters-1x28x28x50x5-10000", {"rows": [counted]})
    return runs


@pytest.fixture
def kept(tmp_path) -> Path:
    return keep_some(tmp_path / "runs")


def tables(sections) -> dict[str, _document.Table]:
    found = {}
    for section in sections:
        found.update({block.caption: block for block in section.blocks if isinstance(block, _document.Table)})
        found.update(tables(section.sections))
    return found


def texts(section) -> list[str]:
    return [block.words for block in section.blocks if isinstance(block, _document.Text)]


def rows_of(sections, caption: str) -> list[list[str]]:
    (table,) = (table for title, table in tables(sections).items() if title.startswith(caption))
    return [list(row) for row in table.rows]


def test_figures_are_those_of_the_runs(kept) -> None:
    sections = _render.contents(_jobs.plan(asked()), asked(), kept)
    assert rows_of(sections, "Accuracy and Op Time") == [
        ["ece408-high", "0.9153", "28.1 ms", "28.1 ms, direct", "6.70 ms", "384 us"]
    ]
    assert rows_of(sections, "Accuracy and run time") == [
        ["ece408-high", "10000", "CPU", "0.9153", "3.25", "0.50", "2.75"]
    ]
    (against,) = rows_of(sections, "Op Times, CPU against GPU")
    expected = ["28.1 ms", "28.1 ms, direct", "6.70 ms", "384 us", "register_blocked", "4.19 x", "73.2 x", "17.4 x"]
    assert against[3:] == expected
    times = {name: cells for name, _, *cells in rows_of(sections, "Time of each kernel, 10000")}
    assert times == {
        "register_blocked": ["400 us (16.8 x)"],
        "naive": ["6.70 ms (1.00 x)"],
        "naive_global_sum": ["41.0 ms (0.163 x)"],
        "half": ["300 us (22.3 x)"],
        "odd": ["wrong"],
        "sliding_window": ["not supported"],
    }
    for template in ("page.html.j2", "report.md.j2"):
        assert "the generated sample set" in _render.page(sections, template)
        words = _render.page(sections, template)
        assert f"odd, {LAYER}: worst element [0, 0, 0, 0]" in words
        assert f"window, {LAYER}: too large" in words


def test_what_an_optimisation_changed(kept) -> None:
    sections = _render.contents(_jobs.plan(asked()), asked(), kept)
    changes = {name: cells for name, *cells in rows_of(sections, f"{LAYER}, 10000 images")}
    assert changes["register_blocked"] == [
        *["400 us", "2", "256", "40", "3.00 KB", "0 B", "75 %", "50 %"],
        *["31.0 MB", "1.10 GB", "1.80 GB"],
    ]
    assert changes["naive"][-4:] == [_document.NONE] * 4


def test_ladders_and_published_figures_are_ratios_on_one_machine_each(kept) -> None:
    sections = _render.contents(_jobs.plan(asked()), asked(), kept)
    ladder = {cells[0]: cells[1:] for cells in rows_of(sections, f"The ladder of {TEAM_003}")}
    assert ladder["from the first to the last kernel"] == [
        *["2.87 s", "76.8 ms", "37.3 x"],
        *["naive_global_sum to the fastest float32 kernel", "41.0 ms", "400 us", "102 x"],
    ]
    # No run of that kernel: no figure of ours.
    assert ladder["1024 threads in a row instead of 32 x 32"][-3:] == ["6.70 ms", _document.NONE, _document.NONE]
    theirs = {tuple(cells[:3]): cells[3:] for cells in rows_of(sections, "Op Times; ours are sums")}
    assert theirs[TEAM_003, "10000", "CPU"] == [
        *["12.2 s", "0.235 x", "414 ms", "loops", "0.0990 x"],
    ]
    # Nothing here is like that kernel, and 2018's networks were not asked for.
    assert not any(_published.TEAM_004 in report and what == "GPU" for report, _, what in theirs)
    assert not any("2018" in report for report, _, _ in theirs)


def test_the_ladders_kernels_are_in_the_list() -> None:
    from ece408_op.core import dispatch

    named = {
        name for ladder in _published.LADDERS for step in ladder.steps for name in (step.ours_before, step.ours_after)
    }
    named |= {entry.ours for entry in _published.OP_TIMES if entry.device == "gpu"}
    assert named - {_published.FASTEST} <= set(dispatch.names("gpu"))
    assert {entry.ours for entry in _published.OP_TIMES if entry.device == "cpu"} <= set(dispatch.names("cpu"))
    assert _speed.BASELINE in dispatch.names("gpu")


def test_without_runs_there_are_no_figures(tmp_path) -> None:
    plan = _jobs.plan(asked())
    sections = _render.contents(plan, asked(), tmp_path)
    assert list(tables(sections)) == ["Runs without a result"]
    ((reason, count, commands),) = rows_of(sections, "Runs without a result")
    assert "not run" in reason
    assert int(count) == len(plan)
    assert commands.split("; ") == [job.shown for job in plan]


def test_what_could_not_run_is_listed_with_its_reason(kept) -> None:
    job = next(job for job in _jobs.plan(asked()) if job.name == "m1-ece408-high-100-gpu")
    _runner.write(kept / f"{job.name}.json", _runner.record(job, _runner.CANNOT, "no\nGPU here"))
    listed = {reason: commands for reason, _, commands in rows_of(_contents(kept), "Runs without a result")}
    assert listed["no GPU here"] == "python m1.py ece408-high 100 --context gpu"


def _contents(kept: Path):
    return _render.contents(_jobs.plan(asked()), asked(), kept)


def test_page_and_markdown_have_the_same_and_need_nothing_else(kept, tmp_path) -> None:
    paths = _render.write(_jobs.plan(asked()), asked(), kept, tmp_path)
    assert [path.name for path in paths] == ["index.html", "report.md"]
    page, markdown = (path.read_text(encoding="utf-8") for path in paths)
    for table in tables(_contents(kept)).values():
        for cells in table.rows:
            assert "| " + " | ".join(map(_render.cell, cells)) + " |" in markdown
    assert "&lt;b&gt;CPU&lt;/b&gt;" in page
    assert "<b>CPU" not in page
    assert "<b>CPU" not in markdown
    # Addresses in the page are anchors, and the names of SVG's namespaces.
    assert set(re.findall(r'(?:src|href)="([^"#]*)"', page)) == {"data:,"}
    assert re.findall(r"url\((?!#)", page) == []
    assert set(re.findall(r'https?://[^"\s]+', page)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    for name in re.findall(r"\]\((figures/[^)]+)\)", markdown):
        assert (tmp_path / name).read_text(encoding="utf-8").startswith("<svg")
    assert page.count("<svg") == 3  # bars of the CPU's and of the GPU's kernels, and a roofline


def test_a_name_with_markup_stays_text(kept) -> None:
    run = json.loads((kept / "machine.json").read_text(encoding="utf-8"))
    run["result"]["versions"] = {"<script>alert(1)</script>": "1 | 2"}
    (kept / "machine.json").write_text(json.dumps(run))
    sections = _contents(kept)
    assert "<script>alert" not in _render.page(sections, "page.html.j2")
    assert "&lt;script>alert(1)&lt;/script> | 1 \\| 2 |" in _render.page(sections, "report.md.j2")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.5, "1.50 s"),
        (0.0999, "99.9 ms"),
        (99.96e-3, "100 ms"),
        (2.5e-5, "25.0 us"),
        (3e-9, "3.00 ns"),
        (123.4, "123 s"),
    ],
)
def test_times_have_three_digits(value, words) -> None:
    assert _document.seconds(value) == words


def test_figures_are_told_from_words() -> None:
    for cell in ("–", "12", "0.9153", "4.47 %", "25.2 ms + 64.4 ms", "384 us (17.5 x)", "1.13 GB", "not supported"):
        assert _document.is_figure(cell)
    for cell in ("naive", "m3", "1 x 28 x 28", "2026-11-21", "no naive kernel published", "avx512"):
        assert not _document.is_figure(cell)


def test_a_row_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="a table: expected 2 cells, got 1"):
        _document.Table("a table", ["a", "b"], [["1"]])


def test_runs_of_others_in_the_folder_are_not_looked_at(kept) -> None:
    runs = Runs(_jobs.plan(asked(sizes=[100])), kept)
    assert runs.result("m1-ece408-high-10000") is None


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch) -> None:
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(_render, "import_module", absent)
    with pytest.raises(_render.DeviceError, match=r"expected jinja2 .*pip install .*\[report\]'"):
        _render.check()


def test_the_fastest_cpu_kernel_is_found_by_its_times(kept) -> None:
    keep(kept, "m2-ece408-high-10000-loops", milestone([0.02], "loops"))
    (against,) = rows_of(_render.contents(_jobs.plan(asked()), asked(), kept), "Op Times, CPU against GPU")
    assert against[3:5] == ["28.1 ms", "20.0 ms, loops"]
    (short,) = rows_of(_contents(kept), "Accuracy and Op Time")
    assert short[2:4] == ["28.1 ms", "20.0 ms, loops"]


def test_the_first_cpu_kernel_of_the_list_stands_for_nothing(kept) -> None:
    keep(kept, "m2-ece408-high-10000-auto", milestone([0.0281], "loops"))
    keep(kept, "m2-ece408-high-10000-direct", milestone([0.214]))
    (short,) = rows_of(_contents(kept), "Accuracy and Op Time")
    assert short[2:4] == ["28.1 ms", "28.1 ms, loops"]
    kernels = {cells[2]: cells[3] for cells in rows_of(_contents(kept), "Op Times, and run time")}
    assert kernels == {"auto (loops)": "28.1 ms", "direct": "214 ms", "loops": "414 ms"}
    assert "214 ms" not in str(rows_of(_contents(kept), "Op Times, CPU against GPU"))


def test_two_layers_have_each_their_fastest_kernel(tmp_path) -> None:
    network = "ece408-2018sp"
    keep(tmp_path, f"m1-{network}-100", milestone([]))
    keep(tmp_path, f"m2-{network}-100-direct", milestone([0.001, 0.009]))
    keep(tmp_path, f"m2-{network}-100-loops", milestone([0.005, 0.002], "loops"))
    wanted = asked(networks=[network], sizes=[100])
    sections = _render.contents(_jobs.plan(wanted), wanted, tmp_path)
    # Nothing was measured of m2.py without --impl, m3 and m4: they have no column.
    assert rows_of(sections, "Accuracy and Op Time") == [[network, "0.9153", "1.00 ms, direct + 2.00 ms, loops"]]


def test_without_a_gpu_there_is_a_chart_and_no_table_without_a_figure(tmp_path) -> None:
    runs = tmp_path / "runs"
    keep(runs, MACHINE, {**FACTS, "gpu": None, "cannot": {"gpu": "no NVIDIA driver: use m2.py"}})
    keep(runs, "m2-ece408-high-10000-auto", milestone([0.0281]))
    keep(runs, "m2-ece408-high-10000-loops", milestone([0.414], "loops"))
    sections = _render.contents(_jobs.plan(asked()), asked(), runs)
    assert [figure.name for figure in _render.figures(sections)] == ["cpu-1-x-28-x-28-50-of-5-x-5"]
    (gpu,) = [section for section in sections if section.title.startswith("Milestones 3")]
    assert [block.words for block in gpu.blocks] == ["Milestones 3 and 4 were left out: no NVIDIA driver."]
    assert gpu.sections == []
    # The end lists reasons and commands; every other table has a figure in each column after the names.
    assert rows_of(sections, "Accuracy and Op Time") == [["ece408-high", "0.9153", "28.1 ms", "28.1 ms, direct"]]
    assert not any(table.rows == [] for table in tables(sections).values())
    (second,) = [section for section in sections if section.title.startswith("Milestone 2")]
    assert any("built-in Convolution" in words and "Left out" in words for words in texts(second))
    teams = [row[0] for row in rows_of(sections, "Op Times; ours are sums")]
    assert "2017 fall, ece408-high: report 003_f908eb42489cd140" in teams
    assert not any("GPU" in row[2] for row in rows_of(sections, "Op Times; ours are sums"))


def test_the_chart_has_mxnets_time_where_it_was_measured(kept) -> None:
    plain = {figure.name: figure for figure in _render.figures(_contents(kept))}["cpu-1-x-28-x-28-50-of-5-x-5"]
    assert "auto (direct)" in plain.svg
    assert "MXNet" not in plain.svg + plain.caption
    rows = [
        {"contestant": name, "call": call, "median": median}
        for name in ("MXNet Convolution", "New auto")
        for call, median in (("reused", 0.05), ("fresh", 0.09))
    ]
    keep(kept, "bench-1x28x28x50x5-10000", {"cases": [{"rows": rows}]})
    (row, _) = sorted(rows_of(_contents(kept), "The operator New and MXNet's"))
    assert row == [LAYER, "fresh", "auto", "90.0 ms", "90.0 ms", "1.00 x"]
    with_it = {figure.name: figure for figure in _render.figures(_contents(kept))}[plain.name]
    assert "MXNet Convolution" in with_it.svg
    assert "50.0 ms" in with_it.svg
    assert "MXNet's built-in Convolution" in with_it.caption


def test_published_figures_of_nothing_that_was_run_are_left_out(tmp_path) -> None:
    keep(tmp_path, "m2-ece408-high-100-auto", milestone([0.001]))
    wanted = asked(sizes=[100])
    sections = _render.contents(_jobs.plan(wanted), wanted, tmp_path)
    (section,) = [section for section in sections if section.title.startswith("Published")]
    assert len(texts(section)) == len(section.blocks) == 1
    assert texts(section)[0].startswith("The published figures were left out: ")


def test_a_gpu_that_cannot_be_used_is_said_in_whole(tmp_path) -> None:
    reason = "the GPU: expected cupy to import, got ImportError"
    keep(tmp_path, MACHINE, {**FACTS, "gpu": None, "cannot": {"gpu": reason}})
    sections = _render.contents(_jobs.plan(asked()), asked(), tmp_path)
    (gpu,) = [section for section in sections if section.title.startswith("Milestones 3")]
    assert texts(gpu) == [f"Milestones 3 and 4 were left out: {reason}."]


def test_every_section_says_what_its_numbers_mean(kept) -> None:
    for section in _contents(kept):
        assert texts(section), section.title


def test_teams_are_named_with_term_and_network(kept) -> None:
    assert (
        _published.team(_published.TEAM_001, _published.FALL) == "2018 fall, ece408-2018fa: report 001_82e85820b84ecd30"
    )
    words = _render.page(_contents(kept), "report.md.j2")
    for report in re.findall(r"00\d_[0-9a-f]{16}", words):
        assert f": report {report}" in words
        assert not re.search(rf"(?<!: report ){report}", words)
