"""On a GPU: every fixture for it, each with the verdict written in its first line; the GPU is well afterwards.

One process grades all of them: pytest-xdist needs ``--dist loadfile``. Half of the first minute, CuPy compiles.
"""

import shutil
from pathlib import Path

import pytest
import submissions
from gpu_case import require_gpu
from sandbox import needs_sandbox

from ece408_op.runtime import cuda

HERE = Path(__file__).parents[1] / "submissions"
FILES = sorted(HERE.glob("gpu/*.cuh"))
CASES = {case.name: case for case in submissions.for_a_gpu()}
#: The course's 10,000 images for one of each kind, fewer for all others.
LARGE = frozenset(("naive", "half", "unroll_gemm"))
SPEC = """
networks = {networks}
runs = {runs}
images = [{images}]
accuracy = {accuracy}
[limits]
run_seconds = 3
memory_bytes = 3000000000
"""
#: The fixture that one network and number of images alone is for.
TIED = "tied_to_10000"
HALVES = frozenset(("half", "half2", "half_kept", "wmma"))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"), needs_sandbox]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    require_gpu()
    folder = tmp_path_factory.mktemp("grade")
    both, last = '["2017", "2018fa"]', '["2018fa"]'
    groups = {
        "large": SPEC.format(networks=both, runs=5, images=10000, accuracy="true"),
        "small": SPEC.format(networks=last, runs=3, images=300, accuracy="false"),
    }
    groups[TIED] = 'networks = ["2017"]\n'
    found = {}
    for name, spec in groups.items():
        paths = [path for path in FILES if group(path.stem) == name]
        if name == "small":
            for case in CASES.values():
                paths.append(folder / f"{case.name}.cuh")
                paths[-1].write_text(case.text)
        _, graded = submissions.graded(paths, folder, spec, "--context", "gpu")
        found.update({Path(record["path"]).stem: record for record in graded})
    return found


def group(stem: str) -> str:
    return stem if stem == TIED else "large" if stem in LARGE else "small"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_verdict(path, records):
    record = records[path.stem]
    expected = path.read_text(encoding="utf-8-sig").splitlines()[0].removeprefix("// expected: ").split(" or ")
    assert record["status"] in expected, record["reason"]
    precisions = ("half", "half sums") if path.stem in HALVES else ("float32",)
    assert record["precision"] in (precisions if record["status"] == "passed" else (None,))


@pytest.mark.parametrize("name", CASES)
def test_verdict_of_a_case(name, records):
    record = records[name]
    assert submissions.is_right(record, CASES[name].expected), f"{submissions.verdict(record)}: {record['reason']}"


def test_kernels_in_python(tmp_path):
    require_gpu()
    spec = SPEC.format(networks='["2018fa"]', runs=2, images=100, accuracy="false")
    code, records = submissions.graded([HERE / "python" / "on_the_gpu.py"], tmp_path, spec, "--context", "gpu")
    assert code == 0, records


def test_a_file_that_frees_nothing_is_told_of(records):
    record = records["leaks"]
    assert any(network["leaks"] for network in record["networks"])
    assert "does not free" in record["reason"]


def test_an_error_that_nobody_looked_at_is_told(records):
    record = records["too_many_threads"]
    assert "cudaErrorInvalidValue" in record["reason"] or "cudaErrorInvalidConfiguration" in record["reason"]


def test_the_gpu_is_well_afterwards(records):
    assert records
    cupy = cuda.cupy()
    assert int(cupy.arange(1000).sum()) == 499500


def test_times_are_of_the_order_that_the_worker_has(records):
    for layer in records["naive"]["networks"][0]["layers"]:
        for run in layer["runs"]:
            assert run["seconds"] >= run["worker_seconds"]
        # The worker's clock runs within the parent's; what lies between is the way there and back.
        assert layer["seconds"]["median"] < 1.2 * sorted(run["worker_seconds"] for run in layer["runs"])[-1]
        assert layer["seconds"]["median"] > layer["roofline_seconds"] > 0


def test_accuracy_is_the_networks_own(records):
    for network in records["naive"]["networks"]:
        for labels in network["accuracy"]:
            assert labels["agreement"] > 0.999
            assert labels["accuracy"] > (0.6 if labels["model"] == "ece408-low" else 0.85)
