"""The page of --html in headless Chromium: on a phone and on a desk, light and dark."""

import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from browser import chromium, contrast, opened

from ece408_op.core.explain import explain
from ece408_op.emulator import LineCounters, Report
from ece408_op.lab import __main__ as lab
from ece408_op.lab import _check, _page
from ece408_op.problem import ConvProblem

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
PHONE, DESK = 390, 1280
SOURCE = "".join(
    f"float line_{number} = {number};  // {'wide ' * 30 if number == 7 else '<b>'}\n" for number in range(30)
)


def result() -> dict[str, Any]:
    """A result with all parts: a layer that was emulated, and timed on a GPU."""
    problem = ConvProblem(2, 3, 20, 17, 5, 3)
    x, w = _check.inputs(problem)
    counters = {"global_loads": 40, "least_sectors": 160, "branches": 8, "divergent": 2}
    counters.update(shared_requests=9, wavefronts=20, least_wavefronts=9)
    lines = [LineCounters(line=n, file="own.cu", sectors=320 * n, **counters) for n in (3, 7, 8)]
    finding = {"kind": "race", "line": 3, "other_line": 7, "message": "two threads", "times": 4}
    found_wrong = replace(explain(x, w, np.zeros(problem.y_shape, np.float32), 0.0, SOURCE), pattern="enough blocks?")
    layer = _check.layer_entry(problem, found_wrong, [finding])
    layer.update(_check.counted(Report({"y": x}, (), tuple(lines)), "own.cu", problem))
    times = {"images": 100, "seconds": {"yours": 0.02, "naive": 0.01, "cuDNN float32": 0.001}}
    layer["times"] = {**times, "rooflines": {"memory": 0.0004, "FP32": 0.0001}}
    found: dict[str, Any] = {"version": 1, "file": "own.cu", "path": "own.cu", "source": SOURCE}
    found.update(device="gpu", term="2017 fall", images=2, status="wrong", layers=[layer], compiler=["32 registers"])
    return {**found, "reason": "", "hint": "", "ncu": "", "printed": "called <once>\n"}


def test_the_page_has_all_parts_and_escapes_them():
    page = _page.as_page(result())
    assert HTMLParser().feed(page) is None
    parts = ["does not write any element", "race: two threads", "Roofline", "Hints", "32 registers"]
    parts += ["called &lt;once&gt;", "Emulated on the CPU, one image:", "enough blocks?</p>"]
    assert [part for part in parts if part not in page] == []
    assert "<b>" not in page and 'id="line-30"' in page
    assert "7.69 FLOP per byte of x, w and y" in page
    heats = [float(heat) for heat in re.findall(r"--heat: ([0-9.]+)", page)]
    assert heats.index(max(heats)) == 7 and sum(heat > 0 for heat in heats) == 3


def test_a_layer_that_no_gpu_has_timed_has_no_dot_in_a_roofline():
    emulated = result()
    emulated["layers"][0]["times"] = None
    page = _page.as_page({**emulated, "device": "emulator"})
    assert "<thead>" in page and "Roofline" not in page


def test_a_source_without_counters_has_no_columns_for_them():
    plain = result()
    plain["layers"][0].update(counters=None, lines=[], hints=[], times=None)
    page = _page.as_page({**plain, "device": "cpu"})
    assert "<thead>" not in page and "Roofline" not in page and "<svg" in page


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_page_needs_matplotlib_only_for_a_roofline(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page, options = tmp_path / "page", ["--layer", "2x9x9x3x3", "--images", "1", "--html", str(tmp_path / "page")]
    for name in ("new-forward.h", "my_kernel.cu"):
        assert lab.main(["new", str(tmp_path / name)]) == 0
    right = [str(tmp_path / "new-forward.h"), *options]
    assert lab.main(right) == 0
    assert "Roofline" not in (page / "index.html").read_text(encoding="utf-8")
    (page / "index.html").unlink()
    capsys.readouterr()
    # It is missed before any work.
    monkeypatch.setattr("ece408_op.runtime.cuda.driver_version", lambda: 12080)
    assert lab.main([str(tmp_path / "my_kernel.cu"), *options]) == 3
    printed = capsys.readouterr()
    assert printed.out == "" and "expected matplotlib to import" in printed.err
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert lab.main(right) == 3
    printed = capsys.readouterr()
    assert printed.out == "" and "expected Jinja2" in printed.err
    assert not any(page.iterdir())


browser = pytest.fixture(scope="module")(chromium)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_it_is_readable_at_both_widths(browser, tmp_path, width, scheme):
    with opened(browser, _page.write(result(), tmp_path), width, scheme) as view:
        heights = "[...document.querySelectorAll('svg text')].map(word => word.getBoundingClientRect().height)"
        assert min(view.evaluate(heights)) >= 7
        # The text on the hottest line's number, over the page.
        ink, heat, back = view.evaluate(
            """(() => { const hot = getComputedStyle(document.querySelector('[style*="--heat: 1.0"]')),
                              page = getComputedStyle(document.documentElement);
                return [hot.color, hot.backgroundColor, page.backgroundColor]; })()"""
        )
    channels = [float(word) for word in re.findall(r"[0-9.]+", heat.replace("srgb", ""))]
    if heat.startswith("color("):
        channels = [255 * channel for channel in channels[:3]] + channels[3:]
    share = channels[3] if len(channels) > 3 else 1.0
    under = [float(word) for word in re.findall(r"[0-9.]+", back)]
    mixed = ", ".join(str(round(share * own + (1 - share) * other)) for own, other in zip(channels, under))
    assert contrast(ink, f"rgb({mixed})") >= 4.5
