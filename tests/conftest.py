"""ECE408_REQUIRE_GPU=1 makes a test marked ``gpu`` that skips a failure: for machines that have the GPU."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and item.get_closest_marker("gpu") and os.environ.get("ECE408_REQUIRE_GPU") == "1":
        report.outcome = "failed"
        report.longrepr = f"ECE408_REQUIRE_GPU=1, but {item.nodeid} was skipped: {report.longrepr[2]}"
    return report
