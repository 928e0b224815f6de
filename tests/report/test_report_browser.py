"""The report's page in headless Chromium, as wide as a phone and as a desk, light and dark, and printed."""

import pytest
from browser import chromium, contrast, opened
from test_report_page import asked, keep, keep_some, milestone

from ece408_op.report._commands import all_commands
from ece408_op.report._page import as_page
from ece408_op.report._runs import Runs

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

PHONE, DESK = 360, 1280


browser = pytest.fixture(scope="module")(chromium)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    kept = keep_some(folder / "runs")
    name = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(cutlass_80_simt_sgemm_256x128::Params)"
    keep(kept, "m4-ece408-high-10000-profile", milestone("m4", []), f" 95.00% {name}")
    (folder / "index.html").write_text(as_page(asked(), Runs(all_commands(asked()), kept)), encoding="utf-8")
    return folder / "index.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_nothing_overflows_or_is_fetched_and_charts_can_be_read(browser, page, width, scheme):
    with opened(browser, page, width, scheme) as view:
        view.evaluate("document.querySelectorAll('details').forEach(element => element.open = true)")
        if width == PHONE:
            boxes = "[...document.querySelectorAll('.wide')].filter(box => box.scrollWidth > box.clientWidth).length"
            assert view.evaluate(boxes) > 0
        charts = view.evaluate(
            """[...document.querySelectorAll('figure svg')].map(svg => {
                const box = svg.getBoundingClientRect(), words = [...svg.querySelectorAll('text')];
                return [box.width, Math.min(...words.map(word => word.getBoundingClientRect().height)),
                        words.filter(word => word.getBoundingClientRect().right > box.right + 2).length];
            })"""
        )
    assert len(charts) == 3  # the CPU, the GPU, and the roofline
    for shown, least, cut in charts:
        assert 300 <= shown <= width
        assert least >= 7
        assert cut == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_and_charts_stand_out_from_the_page(browser, page, scheme):
    """The contrast of WCAG 2, of text, links and the charts' text."""
    with opened(browser, page, DESK, scheme) as view:
        colours = view.evaluate(
            """['p', 'a', 'td', 'th', 'svg text'].map(name => {
                const element = document.querySelector('main ' + name) || document.querySelector(name);
                const style = getComputedStyle(element), page = getComputedStyle(document.documentElement);
                return [name, name == 'svg text' ? style.fill : style.color,
                        name == 'th' ? style.backgroundColor : page.backgroundColor];
            })"""
        )
    for name, ink, back in colours:
        assert contrast(ink, back) >= 4.5, (name, ink, back)


def test_printed_the_folded_tables_are_there_and_nothing_is_cut(browser, page):
    with opened(browser, page, 700, "dark") as view:
        shown = "document.querySelector('details pre').checkVisibility()"
        for media in ("print", "screen", "print"):
            view.emulate_media(media=media)
            assert view.evaluate(shown) == (media == "print")
        assert view.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
