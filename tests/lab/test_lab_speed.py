"""How fast a file is on a GPU: with fakes where there is none, and on a real one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ece408_op import emulator
from ece408_op.bench import layers as bench_layers
from ece408_op.bench.results import KERNEL, Row
from ece408_op.core import reference, roofline
from ece408_op.errors import DeviceError
from ece408_op.grade import runner
from ece408_op.lab import __main__ as lab
from ece408_op.lab import __path__ as folders
from ece408_op.lab import _speed
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Chip
from ece408_op.runtime.occupancy import DeviceLimits, KernelNotes

STARTER = Path(folders[0]) / "starters" / "my_kernel.cu"
LAYER = ("--layer", "3x12x12x8x3")
H200 = Chip("NVIDIA H200", (9, 0), 132, 227 << 10)
LIMITS = DeviceLimits("NVIDIA H200", (9, 0), 132, 64, 32, 65536, 228 << 10)


class Session:
    """A session whose file computes right, in as many milliseconds as the layer has images."""

    printed = cuda_error = ""

    def __init__(self, file: runner.File, problems: list[ConvProblem]) -> None:
        self.problems = problems

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, layer: int, x: np.ndarray, w: np.ndarray, fill: float = 0.0) -> float:
        self._y = reference.convolve(x, w).astype(np.float32)
        return self.problems[layer].batch / 1000

    def output(self, layer: int) -> np.ndarray:
        return self._y

    def wrote_outside(self, layer: int) -> bool:
        return False


@pytest.mark.skipif(not emulator.can_emulate(), reason="needs a g++ that knows 16-bit floats")
def test_a_right_file_is_compared_with_kernels_cudnn_and_rooflines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = (KernelNotes("convolve", registers=80),)
    file = SimpleNamespace(
        path=STARTER,
        device="gpu",
        text="",
        notes=notes,
    )
    asked: list[Any] = []

    def rows(problem: ConvProblem, x: Any, w: Any, settings: bench_layers.Settings) -> list[Row]:
        asked.append((problem.batch, list(settings.impls)))
        times = {"naive": 0.01, settings.impls[1]: 0.002}
        found = [Row(f"New {name}", KERNEL, (seconds,), impl=name) for name, seconds in times.items()]
        return [*found, Row("cuDNN float32 NCHW", KERNEL, (0.004,)), Row("cuDNN float32 NHWC", KERNEL, reason="none")]

    monkeypatch.setattr(cuda, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(cuda, "chip", lambda device=0: H200)
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(asarray=np.asarray))
    monkeypatch.setattr(roofline, "measure", lambda device=0: roofline.Ceilings(4e12, 6e13))
    monkeypatch.setattr(bench_layers, "gpu_rows", rows)
    monkeypatch.setattr(
        _speed, "device_limits", lambda: DeviceLimits("NVIDIA H200", (9, 0), 132, 64, 32, 65536, 228 << 10)
    )
    monkeypatch.setattr(runner, "compile_file", lambda path: file)
    monkeypatch.setattr(runner, "Session", Session)
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
    assert asked[0][0] == 20 and asked[0][1][0] == "naive"


@pytest.mark.gpu
def test_a_file_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        cuda.chip()
    except DeviceError as error:
        pytest.skip(str(error))
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    assert lab.main([str(STARTER), "--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "page")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["device"], len(result["layers"])) == ("gpu", 2)
    for layer in result["layers"]:
        seconds, roofs = layer["times"]["seconds"], layer["times"]["rooflines"]
        assert {"yours", "naive"} <= set(seconds) and len(seconds) >= 3
        assert min(roofs.values()) > 0 and seconds["yours"] > max(roofs.values())
    assert "registers" in result["compiler"][0]
    assert "on the GPU" in capsys.readouterr().out
    assert (tmp_path / "page" / "index.html").is_file()
