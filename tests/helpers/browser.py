"""Headless Chromium for the tests of pages, and what they measure there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: JavaScript: the elements that end beyond the window's right edge and are in no box that scrolls.
_BEYOND = """[...document.body.querySelectorAll('*')]
    .filter(element => !element.closest('.wide') && element.getBoundingClientRect().right > innerWidth + 1)
    .map(element => element.outerHTML.slice(0, 80))"""


def chromium() -> Iterator[Any]:
    """A fixture's function: a started browser; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with playwright.sync_playwright() as player:
        if found is None and not Path(player.chromium.executable_path).exists():
            pytest.skip("needs Chromium on PATH or Playwright's own: playwright install chromium")
        # Chromium's sandbox does not start as root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = player.chromium.launch(executable_path=found, args=arguments)
        yield started
        started.close()


@contextmanager
def opened(browser: Any, page: Path, width: int, scheme: str) -> Iterator[Any]:
    """Open a page in a window of that width, light or dark; at the end, it fits the window, and has asked for no other.

    A table that is wider than the page scrolls in a box of its own.
    """
    view = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    requests: list[str] = []
    view.on("request", lambda request: requests.append(request.url))
    view.goto(page.as_uri())
    yield view
    assert requests == [page.as_uri()]
    assert view.evaluate("document.documentElement.scrollWidth") == width
    assert view.evaluate(_BEYOND) == []
    view.close()


def contrast(one: str, other: str) -> float:
    """The contrast of WCAG 2 between two colours in the form rgb(r, g, b)."""
    lights = sorted((_luminance(one), _luminance(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(word) / 255 for word in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
