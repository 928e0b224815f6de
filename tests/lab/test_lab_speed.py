"""How fast a file is on a GPU: with fakes where there is none, and on a real one."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_layers import H200
from gpu_case import require_gpu
from process import on_path

from ece408_op.bench import layers as bench_layers
from ece408_op.bench.results import KERNEL, Row
from ece408_op.core import reference, roofline
from ece408_op.lab import __main__ as lab
from ece408_op.lab import __path__ as folders
from ece408_op.lab import _findings, _ncu, _speed
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cached_folders, cuda
from ece408_op.runtime.occupancy import DeviceLimits, KernelNotes
from ece408_op.submission import EndedError, runner

STARTER = Path(folders[0]) / "starters" / "my_kernel.cu"
LAYER = ("--layer", "3x12x12x8x3")

needs_emulator = pytest.mark.usefixtures("emulates")


class Session:
    """A session whose file computes right, in as many milliseconds as the layer has images."""

    printed = cuda_error = ""
    error, ends = 0, False

    def __init__(self, file: runner.File, problems: list[ConvProblem]) -> None:
        self.problems = problems

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, layer: int, x: np.ndarray, w: np.ndarray, fill: float = 0.0) -> float:
        if self.ends:
            raise EndedError("crashed", "the GPU reported cudaErrorIllegalAddress")
        self._y = reference.convolve(x, w).astype(np.float32) + self.error
        return self.problems[layer].batch / 1000

    def output(self, layer: int, images: Sequence[int] | None = None) -> np.ndarray:
        return self._y[slice(None) if images is None else list(images)]

    def wrote_outside(self, layer: int) -> bool:
        return False


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """Stand-ins for a GPU with files that are right; returns the problems whose peers are timed, with their names."""
    asked: list[Any] = []

    def rows(problem: ConvProblem, x: Any, w: Any, settings: bench_layers.Settings) -> list[Row]:
        asked.append((problem, list(settings.impls)))
        times = {"naive": 0.01, settings.impls[1]: 0.002}
        found = [Row(f"New {name}", KERNEL, (seconds,), impl=name) for name, seconds in times.items()]
        peers = {"cuDNN float32 NCHW": 0.004, "cuDNN float32 NHWC": 0.005}
        return [*found, *(Row(name, KERNEL, (seconds,)) for name, seconds in peers.items())]

    def compile_file(path: Path) -> Any:
        notes = (KernelNotes("convolve", registers=80),)
        return SimpleNamespace(path=path, device="gpu", program=SimpleNamespace(what="own.so", notes=notes))

    limits = DeviceLimits("NVIDIA H200", (9, 0), 132, 64, 32, 65536, 228 << 10)
    monkeypatch.setattr(cuda, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(cuda, "chip", lambda device=0: H200)
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(asarray=np.asarray))
    monkeypatch.setattr(roofline, "measure", lambda device=0: roofline.Ceilings(4e12, 6e13))
    monkeypatch.setattr(bench_layers, "gpu_rows", rows)
    monkeypatch.setattr(_findings, "device_limits", lambda: limits)
    monkeypatch.setattr(runner, "compile_file", compile_file)
    monkeypatch.setattr(runner, "Session", Session)
    peers = SimpleNamespace(base=lambda: tmp_path / "peers", folder=cached_folders.folder)
    monkeypatch.setattr(_speed, "cached_folders", peers)
    return asked


@needs_emulator
def test_a_right_file_is_compared_with_kernels_cudnn_and_rooflines(gpu, capsys):
    for _ in range(2):
        assert lab.main([str(STARTER), *LAYER, "--images", "20"]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("my_kernel.cu, on the GPU, 20 images: right\n")
        bars = {line[2:26].strip(): line.split()[-1] for line in printed.splitlines() if line.endswith(("#", "-"))}
        assert list(bars)[:2] == ["yours", "naive"] and len(bars) == 6
        assert [len(bars[name]) for name in ("yours", "naive", "cuDNN float32 NCHW")] == [40, 20, 8]
        assert set(bars["memory roofline"] + bars["FP32 roofline"]) == {"-"}
        assert "convolve: 80 registers per thread, 0 bytes of static shared memory" in printed
        blocks = "blocks of 16 x 16 threads: occupancy 38 %: its registers limit a multiprocessor to 3 blocks"
        assert blocks in printed and "line 24: the 32 lanes" in printed
    ((problem, names),) = gpu  # the second time from the cache
    assert problem.batch == 20 and names[0] == "naive"


@needs_emulator
@pytest.mark.parametrize(
    ("name", "value", "status"), [("error", 0, "right"), ("error", 1, "wrong"), ("ends", True, "crashed")]
)
def test_the_emulator_finds_the_lines_of_what_a_gpu_does_not_tell(
    name, value, status, gpu, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "own.cu"
    right = Path(__file__).parents[1] / "submissions" / "gpu" / "shared.cuh"
    path.write_text(right.read_text(encoding="utf-8").replace("        __syncthreads();\n    }", "    }"))
    monkeypatch.setattr(Session, name, value)
    code = lab.main([str(path), *LAYER, "--images", "3", "--json", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["status"], code) == (status, status != "right")
    assert {one["kind"] for one in result["layers"][0]["findings"]} == {"race"}
    printed = capsys.readouterr().out
    assert re.search(r"^emulated on the CPU, 3 x 12 x 12, .*, 1 image:\nlines (28|31) and 35: race: ", printed, re.M)


@needs_emulator
def test_a_file_that_the_emulator_lacks_parts_for_is_timed(gpu, tmp_path, capsys):
    path = tmp_path / "own.cu"
    path.write_text(STARTER.read_text(encoding="utf-8").replace("  const int B =", "  cublasCreate(0); const int B ="))
    assert lab.main([str(path), *LAYER, "--images", "20"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "without counters, since the emulator cannot run it: line 30: the emulator does not have cublasCreate"
        in printed
    )
    assert "yours" in printed


@needs_emulator
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("", "7.50 sectors per request, 100 bank conflicts; of the peak: multiprocessors 25 %"),
        ("sys.exit('ERR_NVGPUCTRPERM')", "without Nsight Compute's counters: ncu: ERR_NVGPUCTRPERM"),
        ("import time; time.sleep(60)", "without Nsight Compute's counters: ncu: it took longer than 1 s"),
    ],
    ids=["counts", "may not", "slow"],
)
def test_nsight_compute_counts_too(code, words, gpu, tmp_path, monkeypatch, capsys):
    metrics = ["gpu__time_duration.sum", *_ncu.SHARES.values(), *(one for some in _ncu.SUMS.values() for one in some)]
    known = {"time": "1000", "sectors": "30", "requests": "4"}
    values = [next((value for word, value in known.items() if f"_{word}_" in each), "25") for each in metrics]
    lines = [["ID", "Kernel Name", *metrics], ["0", "next_is_layer_0", *values], *[["1", "convolve", *values]] * 2]
    text = "".join(",".join(f'"{word}"' for word in line) + "\n" for line in lines)
    log = "open(sys.argv[sys.argv.index('--log-file') + 1], 'w')"
    on_path(monkeypatch, tmp_path, "ncu", f"{code}\n{log}.write({text!r})")
    if "sleep" in code:
        monkeypatch.setattr(_ncu, "SECONDS", 1.0)
    assert lab.main([str(STARTER), *LAYER, "--images", "20", "--ncu", "--html", str(tmp_path / "page")]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert words in printed and words in html.unescape(page)
    assert "yours" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("used", ["", "std::set<int> unused;"], ids=["few headers", "one more header"])
def test_a_file_on_a_gpu(used, tmp_path, capsys):
    require_gpu()
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    path, text = tmp_path / "own.cu", STARTER.read_text(encoding="utf-8")
    path.write_text(text.replace("  const int B =", f"  {used} const int B ="), encoding="utf-8")
    assert lab.main([str(path), "--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "page")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["device"], len(result["layers"])) == ("gpu", 2)
    for layer in result["layers"]:
        seconds, roofs = layer["times"]["seconds"], layer["times"]["rooflines"]
        assert {"yours", "naive"} <= set(seconds) and len(seconds) >= 3
        assert min(roofs.values()) > 0 and seconds["yours"] > max(roofs.values())
    assert "registers" in result["compiler"][0]
    assert "on the GPU" in capsys.readouterr().out
    assert (tmp_path / "page" / "index.html").is_file()
