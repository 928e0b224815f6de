"""Fixtures for the GPU, one of each style, go through nvcc as the harness calls it; texture<> and surface<> cannot."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ece408_op.grade import build, jail
from ece408_op.grade.spec import LimitsSpec
from ece408_op.grade.worker import EndedError

#: One of each style that a header or an option of the harness is for.
NAMES = ("headers_of_old", "mxnet_headers", "names_of_its_own", "old_intrinsics")
GONE = ("launched_by_calls", "surface", "texture")
FILES = [Path(__file__).with_name("submissions") / "gpu" / f"{name}.cuh" for name in (*NAMES, *GONE)]

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None or shutil.which("g++") is None, reason="needs nvcc and g++"
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    tools = jail.build_tools(tmp_path_factory.mktemp("tools"))

    def compiled(path: Path) -> str:
        try:
            built = build.build(path, "gpu", tmp_path_factory.mktemp("build"), tools, LimitsSpec(), "sm_90")
        except EndedError as ended:
            return f"{ended.status}: {ended.reason}"
        return "built" if built.library.stat().st_size > 0 and "registers" in built.notes else "empty"

    with ThreadPoolExecutor(2) as pool:
        yield dict(zip([path.stem for path in FILES], pool.map(compiled, FILES)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_compiles(path: Path, outcomes: dict[str, str]) -> None:
    if path.stem in ("surface", "texture"):
        assert outcomes[path.stem].startswith(f"unsupported: it uses {path.stem}<>")
    elif path.stem == "launched_by_calls":
        assert outcomes[path.stem] == "unsupported: it uses cudaConfigureCall, which today's CUDA no longer has"
    else:
        assert outcomes[path.stem] == "built"
