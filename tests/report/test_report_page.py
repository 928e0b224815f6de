"""The report's page: every figure comes from a result, what was not run is listed, names are escaped."""

from __future__ import annotations

import html
import json
import re
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ece408_op.bench import results
from ece408_op.core.roofline import Ceilings
from ece408_op.problem import ConvProblem
from ece408_op.report._commands import Command, all_commands
from ece408_op.report._page import as_page
from ece408_op.report._runs import CANNOT, DONE, Runs, write

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

WORD = "1x28x28x50x5"
PROBLEM = ConvProblem(10_000, 1, 28, 28, 50, 5)
CEILINGS = Ceilings(4.5e12, 6.7e13, 9.9e14)
GPU = results.Gpu("a GPU", (9, 0), 132, "13.0", "13.0", "13.0", 150_000_000_000)
MACHINE = results.Machine("<b>CPU</b>", 2, 2, "avx2", GPU, {"numpy": "2.5"})


def asked() -> Namespace:
    given = {"networks": ["ece408-high"], "sizes": [10_000, 100], "milestones": ["m1", "m2", "m3", "m4"]}
    return Namespace(**given, impl=["direct", "loops", "naive", "register_blocked"], data=None)


def facts(machine=MACHINE, gpu_problem=None):
    cannot = {"gpu": gpu_problem, "counters": gpu_problem}
    given = {"date": "2026-11-21", "system": "Linux", "memory_bytes": 24e9, "cannot": cannot}
    return {**given, "machine": asdict(machine)}


def keep(folder: Path, name: str, result, printed: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, Command(name, (name,)), {"status": DONE, "reason": "", "result": result, "printed": printed})


def milestone(script: str, times: list[float], kernel: str = "direct"):
    calls = [{"seconds": value, "implementation": kernel} for value in times]
    time = {"user": 3.25, "system": 0.5, "real": 2.75}
    given = {"accuracy": 0.9153, "source": "sample", "op_times": calls, "time": time, "context": "cpu(0)"}
    return {**given, "milestone": script, "model": "ece408-high", "size": 10_000}


def row(impl: str, call: str, time: float, **more) -> results.Row:
    return results.Row(
        impl, call, (time,), impl=impl, kernel=impl, precision="float32", roofline_seconds=2.6e-4, **more
    )


def measured(*rows: results.Row):
    case = results.Case(WORD, PROBLEM.batch, rows, PROBLEM, 2.63e-4)
    return json.loads(results.as_text(results.Results("layers", MACHINE, {}, (case,), asdict(CEILINGS))))


def keep_some(runs: Path) -> Path:
    """Results of one network with known figures; some of what was asked for is missing."""
    keep(runs, "machine", facts())
    keep(runs, "m1-ece408-high-10000", milestone("m1", []))
    for script in ("m1", "m3"):
        on_gpu = {**milestone(script, []), "context": "gpu_network"}
        keep(runs, f"{script}-ece408-high-10000{'-gpu' * (script == 'm1')}", on_gpu)
    keep(runs, "m2-ece408-high-10000", milestone("m2", [0.0281, 0.002]))
    keep(runs, "m3-ece408-high-10000-profile", milestone("m3", [0.0068], "naive"), "New Inference\n 95.00% <naive>\n")
    launch = {"entry": "convolution", "count": 2, "grid": [9, 1, 1], "block": [32, 8, 1], "registers": 40}
    launch |= {"static_shared": 1000, "dynamic_shared": 2000, "local": 16, "constant": 0, "occupancy": 0.75}
    gpu = [
        row("register_blocked", results.KERNEL, 4e-4, details={"launches": [launch]}),
        row("naive", "kernel", 6.7e-3),
        results.Row("streams", results.KERNEL, status=results.FAILED, reason="worst <i>element</i>", impl="streams"),
    ]
    keep(runs, f"layers-cpu-{WORD}-10000", measured(row("direct", results.REUSED, 0.0312)))
    keep(runs, f"layers-gpu-{WORD}-10000", measured(*gpu))
    keep(runs, f"counters-{WORD}-10000", {"register_blocked": {"read": 31e6, "occupancy": 0.5}})
    return runs


@pytest.fixture
def kept(tmp_path):
    return keep_some(tmp_path / "runs")


class Page:
    """A page: the rows of its tables and its sections' words by title, and what is below its pictures."""

    def __init__(self, page: str) -> None:
        self.html = page
        sections = re.findall(r"<section [^>]*>\s*<h2>(.*?)</h2>(.*?)</section>", page, re.DOTALL)
        self.sections = {text(title): text(body) for title, body in sections}
        self.rows = {text(title): list(map(_cells, body.split("<tr>")[1:])) for title, body in sections}
        self.captions = list(map(text, re.findall("<figcaption>(.*?)</figcaption>", page)))


def _cells(row: str) -> list[str]:
    return list(map(html.unescape, re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row)))


def text(markup: str) -> str:
    return html.unescape(" ".join(re.sub("<[^>]*>", " ", markup).split()))


def opened(runs: Path) -> Page:
    return Page(as_page(asked(), Runs(all_commands(asked()), runs)))


def test_figures_are_those_of_the_results(kept):
    page = opened(kept)
    same, time = ["ece408-high", "10000", "sample"], ["3.25", "0.50", "2.75"]
    assert page.rows["In short"][1:] == [
        ["m1", *same, "cpu(0)", "", "0.9153", "", *time],
        ["m1", *same, "cuDNN in gpu_network", "", "0.9153", "", *time],
        ["m2", *same, "cpu(0)", "direct + direct", "0.9153", "0.028100 + 0.002000", *time],
        ["m3", *same, "gpu_network", "", "0.9153", "", *time],
    ]
    shares = ["case", "images", "contestant", "reused, ms", "quartiles", "x roofline", "GFLOP/s", "error, of bound"]
    figures = ["31.2", "31.2 to 31.2", "120.00", "461.5", ""]
    assert page.rows["Each CPU kernel"] == [shares, [WORD, "10000", "direct", *figures]]
    head, *rows = page.rows["Each GPU kernel"]
    assert head[3] == "kernel, ms"
    assert [row[2:4] for row in rows[:3]] == [["register_blocked", "0.4"], ["naive", "6.7"], ["streams", "failed"]]
    assert rows[4] == ["register_blocked", "convolution", "2", "256", "40", "3000", "16", "75 %"]
    assert f"{WORD}, streams: failed: worst <i>element</i>" in page.sections["Each GPU kernel"]
    assert page.rows["Hardware counters"] == [["kernel", "read", "occupancy"], ["register_blocked", "3.1e+07", "0.5"]]
    assert "m3 ece408-high 10000 --profile New Inference 95.00% <naive>" in page.sections["Profiles"]
    assert ["gpu name", "a GPU"] in page.rows["Machine"]
    # Bars of the CPU's and of the GPU's kernels, and a roofline.
    assert page.html.count("<svg") == len(page.captions) == 3
    assert {"0.4", "31.2", "fp32"} <= {word.strip() for word in re.findall(">([^<>]*)</text>", page.html)}


def test_without_results_there_are_no_figures_and_every_command_is_listed_with_its_reason(tmp_path):
    page = opened(tmp_path)
    ((reason, count, lines),) = page.rows.pop("What was not run")[1:]
    assert not any(page.rows.values())
    commands = all_commands(asked())
    assert "not run" in reason
    assert (int(count), lines.split("; ")) == (len(commands), [command.line for command in commands])
    assert page.captions == []
    assert page.sections["Each CPU kernel"] == "Left out: no run gave a figure for it."
    (command,) = [one for one in commands if one.name == "m1-ece408-high-100-gpu"]
    write(tmp_path, command, {"status": CANNOT, "reason": "no\nGPU here", "result": None, "printed": ""})
    listed = {reason: lines for reason, _, lines in opened(tmp_path).rows["What was not run"]}
    assert listed["no GPU here"] == "python -m ece408_op m1 ece408-high 100 --context gpu"


def test_the_page_needs_nothing_else_and_names_with_markup_stay_text(kept):
    keep(kept, "machine", facts(replace(MACHINE, versions={"<script>alert(1)</script>": "1"})))
    page = opened(kept)
    assert ["versions <script>alert(1)</script>", "1"] in page.rows["Machine"]
    assert not re.search("<script>alert|<b>CPU|<i>layer|<naive", page.html)
    # Addresses in the page are anchors, and the names of SVG's namespaces.
    assert set(re.findall(r'(?:src|href)="([^"#]*)"', page.html)) == {"data:,"}
    assert re.findall(r"url\((?!#)", page.html) == []
    addresses = set(re.findall(r'https?://[^"\s]+', page.html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    ids = re.findall(r'\bid="([^"]+)"', page.html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page.html)) <= set(ids)
    assert all(page.sections.values())


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        ("no NVIDIA driver: use m2.py", "Left out: no NVIDIA driver."),
        ("the GPU: expected cupy to import, got E", "Left out: the GPU: expected cupy to import, got E."),
    ],
)
def test_without_a_gpu_one_sentence_says_why(tmp_path, problem, sentence):
    keep(tmp_path, "machine", facts(replace(MACHINE, gpu=None), problem))
    page = opened(tmp_path)
    assert page.sections["Each GPU kernel"] == page.sections["Hardware counters"] == sentence
    assert ["cannot gpu", problem] in page.rows["Machine"]
