"""Fixtures for the GPU, one of each style, go through nvcc as the harness calls it; texture<> and surface<> cannot."""

import shutil
from pathlib import Path

import pytest
from sandbox import needs_sandbox

from ece408_op.submission import EndedError, build
from ece408_op.submission.sandbox import LimitsSpec

#: One of each style that a header or an option of the harness is for.
NAMES = ("cub", "headers_of_old", "mxnet_headers", "names_of_its_own", "old_intrinsics", "thrust")
#: What takes the compiler seconds.
SLOW = ("cub", "headers_of_old", "names_of_its_own", "old_intrinsics", "thrust")
GONE = ("launched_by_calls", "surface", "texture")
FILES = [Path(__file__).parents[1] / "submissions" / "gpu" / f"{name}.cuh" for name in (*NAMES, *GONE)]

pytestmark = [needs_sandbox, pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")]


@pytest.fixture(scope="module")
def tools():
    return build.tools()


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.exhaustive if path.stem in SLOW else ()) for path in FILES],
    ids=lambda path: path.stem,
)
def test_it_compiles(path, tools, tmp_path):
    try:
        built = build.build(path, "gpu", tmp_path, tools, LimitsSpec(), "sm_90")
    except EndedError as ended:
        outcome = f"{ended.status}: {ended.reason}"
    else:
        outcome = "built" if built.notes and all("Z" not in one.name for one in built.notes) else "empty"
    if path.stem in ("surface", "texture"):
        assert outcome.startswith(f"unsupported: it uses {path.stem}<>")
    elif path.stem == "launched_by_calls":
        assert outcome == "unsupported: it uses cudaConfigureCall, which today's CUDA no longer has"
    else:
        assert outcome == "built"
