"""Course submissions in the emulator: values, findings with their lines, counters and hints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ece408_op import emulator

SUBMISSIONS = Path(__file__).parents[1] / "submissions" / "gpu"
X = np.random.default_rng(0).uniform(-1, 1, (1, 1, 28, 28)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((6, 1, 5, 5)).astype(np.float32)
Y = np.einsum("bchwpq,mcpq->bmhw", np.lib.stride_tricks.sliding_window_view(X, (5, 5), (2, 3)), W)


def report(source: str, programs: Path, name: str = "new-forward.cuh") -> emulator.Report:
    path = programs / name
    path.write_text(source)
    return emulator.run(emulator.compile(path, folder=programs), X, W)


#: Submissions that use different parts of CUDA, and the error that their precision allows.
RIGHT = {
    "unroll_gemm": 1e-5,
    "half2": 0.03,
    "wmma": 0.03,
    "template_K": 1e-5,
    "unified_memory": 1e-5,
    "shared": 1e-5,
    "names_of_its_own": 1e-5,
    "many_parts": 1e-5,
    "old_intrinsics": 1e-5,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_submission_is_right(name: str, programs: Path) -> None:
    found = emulator.run(emulator.compile(SUBMISSIONS / f"{name}.cuh", folder=programs), X, W)
    np.testing.assert_allclose(found.y, Y, atol=RIGHT[name])
    assert found.findings == ()
    assert found.totals.global_loads > 0


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [("cub", 12, "cub"), ("graph", 42, "CUDA graphs"), ("texture_object", 23, "tex1Dfetch")],
)
def test_what_the_emulator_lacks_is_named_with_its_line(name: str, line: int, message: str, programs: Path) -> None:
    with pytest.raises(emulator.UnsupportedCodeError, match=message) as caught:
        emulator.compile(SUBMISSIONS / f"{name}.cuh", folder=programs)
    assert caught.value.lines[0][0] == line


def test_an_unknown_name_of_cuda_is_named_with_its_line(programs: Path) -> None:
    source = (SUBMISSIONS / "naive.cuh").read_text().replace("sum +=", "__activemask();\nsum +=", 1)
    with pytest.raises(emulator.UnsupportedCodeError, match="the emulator does not know __activemask"):
        report(source, programs)


def test_a_launch_from_a_kernel_is_named_with_its_line(programs: Path) -> None:
    found = emulator.run(emulator.compile(SUBMISSIONS / "dynamic_parallelism.cuh", folder=programs), X, W)
    assert [(one.kind, one.line) for one in found.findings] == [("unsupported", 33)]
