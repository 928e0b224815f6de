"""The import of MXNet: its shims, who else sees them, and the message where it cannot be imported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from process import printed, python

import ece408_op
from ece408_op.plugin import mxnet_import

#: The package without its __init__, which joins it to a real MXNet.
BARE = """
import importlib.util, sys, types
package = types.ModuleType("ece408_op")
package.__path__ = importlib.util.find_spec("ece408_op").submodule_search_locations
sys.modules["ece408_op"] = package
from ece408_op.plugin import mxnet_import
"""
HAS_MXNET = ece408_op.plugin.mxnet_import.Finder().find_spec("mxnet", None) is not None
needs_mxnet = pytest.mark.skipif(not HAS_MXNET, reason="MXNet is not installed")

#: A library that every Linux Python has loaded, to stand for one of CUDA's.
SOME_LIBRARY = next(
    Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("libm.so.6")
)


def output(code: str, *folders: Path, flags: tuple[str, ...] = ()) -> str:
    return printed(*flags, "-c", code, first=folders).strip()


def fake_mxnet(site: Path, code: str, *distributions: str) -> Path:
    (site / "mxnet").mkdir(parents=True)
    (site / "mxnet" / "__init__.py").write_text(code)
    for name in distributions:
        (site / f"{name}-1.9.1.dist-info").mkdir()
    return site


@needs_mxnet
def test_other_packages_see_numpy_and_python_unchanged_and_nothing_warns() -> None:
    code = """
import builtins, sys
import numpy, numpy.testing
had_distutils = "distutils" in sys.modules
before, import_before, builtins_before = dict(vars(numpy)), builtins.__import__, dict(vars(builtins))
import ece408_op
assert "mxnet" not in sys.modules
import mxnet, mxnet.test_utils
mxnet.np.ones(2, dtype=bool)
mxnet.nd.array([1]).asnumpy()
after = {name: value for name, value in vars(numpy).items() if type(value) is not type(sys)}  # submodules load late
assert {name: before.get(name, "new") for name in after} == after
assert builtins.__import__ is import_before and sys.modules["numpy"] is numpy
assert all(vars(builtins)[name] is value for name, value in builtins_before.items() if name != "_")
assert had_distutils or "distutils" not in sys.modules
for name in ("bool", "int"):
    assert (name in vars(numpy)) == (name in before)
print("unchanged")
"""
    assert output(code, flags=("-W", "error")) == "unchanged"


def test_an_mxnet_that_is_loaded_is_left_alone_and_the_callback_runs_at_once() -> None:
    code = f"""{BARE}
sys.modules["mxnet"] = loaded = types.ModuleType("mxnet")
before, calls = list(sys.meta_path), []
mxnet_import.install(after=lambda: calls.append(1))
assert calls == [1] and sys.meta_path == before and mxnet_import.load() is loaded
print("left alone")
"""
    assert output(code) == "left alone"


@needs_mxnet
def test_an_import_after_a_failed_one_works() -> None:
    code = """
try:
    import mxnet
    print("imports without help")
except Exception:
    import ece408_op
    import mxnet
    from mxnet.gluon.contrib.estimator import event_handler
    print(mxnet.nd.ones(2).asnumpy(), event_handler.np.Inf)
"""
    text = output(code)
    if text == "imports without help":
        pytest.skip("this NumPy needs no help")
    assert text == "[1. 1.] inf"


@needs_mxnet
def test_a_reload_registers_and_patches_nothing_again() -> None:
    code = """
import importlib
import ece408_op
import mxnet as mx
def patched():
    return mx.nd.Custom, mx.nd.CachedOp, mx.executor.Executor.forward, mx.operator._registry.counter
before = patched()
for module in (ece408_op, mx):
    importlib.reload(module)
    assert patched() == before, module
"""
    assert output(code) == ""


@needs_mxnet
def test_a_subprocess_starts_while_mxnets_threads_need_pythons_lock() -> None:
    """Python 3.9 forks for it, and MXNet stops its threads before a fork."""
    code = """
import subprocess
import ece408_op, mxnet as mx
x, w = mx.nd.ones((4, 3, 10, 10)), mx.nd.ones((8, 3, 3, 3))
w.attach_grad()
for _ in range(20):
    with mx.autograd.record():
        y = ece408_op.New(x, w, kernel=(3, 3), num_filter=8)
    y.backward()
    w.grad.wait_to_read()
    subprocess.run(["true"])
"""
    assert output(code) == ""


def test_without_mxnet_one_sentence_says_what_to_install() -> None:
    code = """
import importlib.machinery, importlib.util
PathFinder = importlib.machinery.PathFinder
find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name == "mxnet" else find_spec(name, *rest)
import ece408_op
assert importlib.util.find_spec("mxnet") is None  # those who ask before they import get their answer
try:
    import mxnet
except ModuleNotFoundError as error:
    assert error.name == "mxnet"
for use in (ece408_op.plugin.mxnet_import.load, lambda: ece408_op.New, lambda: ece408_op.load_checkpoint):
    try:
        use()
    except ImportError as error:
        print(type(error).__name__, error)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("[cpu]'") == 1  # said at the import of ece408_op already
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("MXNetImportError expected MXNet, found none")
        assert re.search(r"pip install -e '.*\[cpu\]'", line)


NEEDS, GONE = "ece408_op.errors.MXNetImportError: MXNet needs the library ", "cannot open shared object file"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (f"libgomp.so.1: {GONE}: No such file", NEEDS + "libgomp.so.1: .*apt-get install libgomp1"),
        (f"libcudart.so.11.0: {GONE}", NEEDS + r"libcudart.so.11.0: .*\[cu117\]"),
        (f"libcuda.so.1: {GONE}", NEEDS + "libcuda.so.1: .*NVIDIA's driver"),
        ("the disk is full", "OSError: the disk is full$"),
    ],
)
def test_a_missing_library_is_named_with_what_brings_it(tmp_path: Path, error: str, words: str) -> None:
    done = python("-c", "import ece408_op, mxnet", first=[fake_mxnet(tmp_path, f'raise OSError("{error}")')])
    assert re.match(words, done.stderr.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OMP_NUM_THREADS", "2,4", "OMP_NUM_THREADS: expected one whole number below 2**31, got '2,4'"),
        ("OMP_NUM_THREADS", "2147483648", "OMP_NUM_THREADS: expected one whole number below 2**31, got '2147483648'"),
        ("OMP_NUM_THREADS", "9" * 11, f"OMP_NUM_THREADS: expected one whole number below 2**31, got '{'9' * 11}'"),
        ("PYTHONOPTIMIZE", "2", "MXNet needs its docstrings: run Python without -OO, and without PYTHONOPTIMIZE=2"),
    ],
)
def test_what_mxnet_cannot_be_imported_with_is_one_error(variable: str, value: str, words: str) -> None:
    done = python("-c", "import ece408_op, mxnet", **{variable: value})
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"ece408_op.errors.MXNetImportError: {words}"


def test_two_builds_in_one_folder_are_refused(tmp_path: Path) -> None:
    site = fake_mxnet(tmp_path, "", "mxnet", "mxnet_cu117", "mxnet_board")
    done = python("-c", "import ece408_op, mxnet", first=[site])
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ece408_op.errors.MXNetImportError: expected one build of MXNet, found mxnet and mxnet-cu117"
    )
    assert "pip uninstall mxnet mxnet-cu117" in last


@pytest.mark.parametrize(("distribution", "loaded"), [("mxnet_cu117", True), ("mxnet", False)])
def test_only_a_cuda_build_gets_the_libraries_of_the_nvidia_wheels(
    tmp_path: Path, distribution: str, loaded: bool
) -> None:
    code = "print('libcudart.so.11.0' in open('/proc/self/maps').read())"
    site = fake_mxnet(tmp_path, code, distribution)
    folder = site / "nvidia" / "cuda_runtime" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.11.0").write_bytes(SOME_LIBRARY.read_bytes())
    (folder / "libcublas.so.11").write_text("no library")  # left to the system's loader
    assert output(f"{BARE}mxnet_import.load()", site) == str(loaded)


@pytest.mark.parametrize(
    ("asked", "spins"),
    [({}, mxnet_import.SPIN_COUNT), ({"GOMP_SPINCOUNT": "5"}, 5), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["default", "count", "policy"],
)
def test_openmp_threads_spin_briefly_unless_the_user_asks_for_something_else(tmp_path, monkeypatch, asked, spins):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    site = fake_mxnet(tmp_path, "import os; print(os.environ.get('GOMP_SPINCOUNT'))", "mxnet")
    assert output(f"{BARE}mxnet_import.load()", site) == str(spins)


@needs_mxnet
def test_a_loaded_module_has_its_own_loader_and_source() -> None:
    import importlib.machinery
    import inspect
    import pickle

    import mxnet as mx

    assert isinstance(mx.__spec__.loader, importlib.machinery.SourceFileLoader)
    assert mx.__loader__ is mx.__spec__.loader
    assert "class NDArray" in inspect.getsource(mx.nd.NDArray)
    assert importlib.reload(mx.lr_scheduler) is mx.lr_scheduler  # which nobody else holds names of
    assert pickle.loads(pickle.dumps(mx.nd.array([1, 2]))).asnumpy().tolist() == [1, 2]
