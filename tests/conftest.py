"""Shared by all tests: the option ``--exhaustive``, the emulator's programs, and the order of files.

With ``ECE408_REQUIRE_GPU=1``, for machines with a GPU, a test marked ``gpu`` fails instead of being skipped, unless its
kernel does not take the layer, or it needs several GPUs.

With pytest-xdist's ``--dist loadfile`` the tests of a file share a process, and so do their module fixtures.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The workers of pytest-xdist share the cores, where waiting threads of NumPy's matrix products take time from others.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import ece408_op  # noqa: F401 - before MXNet, whose import fails on today's NumPy otherwise

# A loaded machine draws and computes its examples slowly.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

#: Reasons to skip a test on a machine with a GPU.
ACCEPTED = ("does not take the layer", "needs several GPUs")

#: The longest files start first, so that none is left when the other workers are done.
FIRST = ("test_grade_", "test_training.py", "test_kernels_cpu.py", "test_lab", "test_split_emulated", "test_docs.py")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the emulator's programs, which all processes of a run of the tests share."""
    from ece408_op import emulator

    if not emulator.can_emulate():
        pytest.skip("no g++ that knows 16-bit floats (12 or newer)")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ece408-op" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def emulates(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the package keep the emulator's programs in that folder, and not in the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(programs.parents[1]))


def pytest_configure(config: pytest.Config) -> None:
    # Many tests start Python. Where it is to leave no bytecode in the checkout, each would compile the package again:
    # what tests start shares a folder. Workers themselves read what the environment's packages have.
    if "PYTHONDONTWRITEBYTECODE" not in os.environ:
        return
    if "ECE408_TEST_BYTECODE" not in os.environ:
        os.environ["ECE408_TEST_BYTECODE"] = folder = tempfile.mkdtemp(prefix="ece408-bytecode-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))  # a process may still write there
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        del os.environ["PYTHONDONTWRITEBYTECODE"]
        os.environ["PYTHONPYCACHEPREFIX"] = os.environ["ECE408_TEST_BYTECODE"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the tests marked exhaustive as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    # Without pytest-xdist the order of the files does not matter, and with it only the workers collect.
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: next((i for i, name in enumerate(FIRST) if name in item.nodeid), len(FIRST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Hide MXNet and the tests, which live to the end, from the garbage collector: that costs 10 % of a run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # else the files with the most tests come first
    return LoadFileScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Leave no handler behind that the commands that tests call set for their process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    result = yield
    for number, handler in before.items():
        signal.signal(number, handler)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    required = item.get_closest_marker("gpu") and os.environ.get("ECE408_REQUIRE_GPU") == "1"
    if skipped and required and not any(reason in report.longrepr[2] for reason in ACCEPTED):
        report.outcome = "failed"
        report.longrepr = f"ECE408_REQUIRE_GPU=1, but {item.nodeid} was skipped: {report.longrepr[2]}"
    return report
