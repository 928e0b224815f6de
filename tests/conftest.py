"""ECE408_REQUIRE_GPU=1 makes a test marked ``gpu`` that skips a failure: for machines that have the GPU.

Under pytest-xdist's ``--dist loadfile`` the tests of a file share a process, and so what it set up for them. The
grader's files share one among them all: two harnesses at once would run their submissions as the same user.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "grade" if "test_grade_" in file else file

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and item.get_closest_marker("gpu") and os.environ.get("ECE408_REQUIRE_GPU") == "1":
        report.outcome = "failed"
        report.longrepr = f"ECE408_REQUIRE_GPU=1, but {item.nodeid} was skipped: {report.longrepr[2]}"
    return report
