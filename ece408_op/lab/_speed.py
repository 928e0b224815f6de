"""How fast is a right file? Its time for more images, next to the package's kernels, cuDNN and the rooflines."""

from __future__ import annotations

import hashlib
import json
import statistics
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.bench import layers as bench_layers
from ece408_op.core import dispatch, roofline, timer
from ece408_op.core.explain import explain
from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cached_folders, cuda
from ece408_op.runtime.thread_pool import thread_count
from ece408_op.submission import runner

from ._check import KEPT, Checked, Request, for_more, inputs, layer_entry, update_verdict

#: Images to time without --images: on a CPU the larger number where the smaller one takes less than the seconds.
_CPU_IMAGES, _GPU_IMAGES, _SHORT_SECONDS = (100, 1000), 10_000, 0.05
#: Timed calls.
_CALLS = 3
_LATER = f"right in its first call, and wrong in a later one on other numbers: {KEPT}"
#: The slow kernel to compare with, by device.
_NAIVE = {"cpu": "loops", "gpu": "naive"}
YOURS = "yours"


def measure(request: Request, checked: Checked) -> None:
    """Add the times to each layer of a right result; a layer that is wrong for more images makes the result wrong.

    Raises EndedError where the file's process ends.
    """
    result, file, problems = checked.result, checked.file, checked.problems
    if file is None:
        return
    for images in (request.images,) if request.images else (_GPU_IMAGES,) if file.device == "gpu" else _CPU_IMAGES:
        large = [problem.with_batch(images) for problem in problems]
        arrays = [inputs(problem) for problem in large]
        seconds = _own_seconds(file, large, arrays, result)
        if not checked.right:
            return
        if sum(seconds) > _SHORT_SECONDS:
            break
    for problem, (x, w), entry, own in zip(large, arrays, result["layers"], seconds):
        peers = _gpu_peers(problem, x, w) if file.device == "gpu" else {"seconds": _cpu_peers(problem, x, w)}
        seconds_of = {YOURS: own, **peers["seconds"]}
        entry["times"] = {"images": images, "seconds": seconds_of, "rooflines": peers.get("rooflines", {})}


def _own_seconds(
    file: runner.File,
    problems: list[ConvProblem],
    arrays: list[tuple[np.ndarray, np.ndarray]],
    result: dict[str, Any],
) -> list[float]:
    """Return the median seconds of each layer's calls, and check some images of the first and of the last output."""
    seconds: list[list[float]] = [[] for _ in problems]
    with runner.Session(file, problems) as session:
        # All layers in turn, as in the course: a file may count its calls. The last call has other inputs.
        for turn in range(2 + _CALLS):
            last = turn > _CALLS
            for number, (problem, (pixels, filters)) in enumerate(zip(problems, arrays)):
                x, w = (pixels[::-1] / 2, -filters) if last else (pixels, filters)
                seconds[number].append(session.call(number, x, w))
                if turn == 0 or last:
                    some = sorted({0, 1 % problem.batch, problem.batch - 1})
                    part = explain(x[some], w, session.output(number, some), 0.0, result["source"])
                    entry = layer_entry(problem.with_batch(len(some)), part, cuda_error=session.cuda_error)
                    text = _LATER if last else for_more(result, problem.batch)
                    update_verdict(result, number, entry, f"{text}; images {some} are shown")
    return [statistics.median(one[1:-1]) for one in seconds]


def _cpu_peers(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> dict[str, float]:
    y, threads, found = np.empty(problem.y_shape, np.float32), thread_count(problem.flops), {}
    for name in dict.fromkeys((_NAIVE["cpu"], dispatch.select(problem, "cpu").name)):
        found[name] = timer.kernel_seconds(dispatch.find(name), problem, x, w, y, threads, repeats=_CALLS)
    return found


def _gpu_peers(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the seconds of the package's kernels and cuDNN, and the rooflines: measured once per layer and GPU."""
    chip = cuda.chip()
    kernels = [dispatch.find(_NAIVE["gpu"]), dispatch.select(problem, "gpu", chip=chip)]
    names = list(dict.fromkeys(kernel.name for kernel in kernels))
    texts = [one.text(one.plan(problem, chip, 16)) for one in kernels if isinstance(one, CudaKernel) and one.sources]
    torch = find_spec("torch") and metadata.version("torch")

    def measured(folder: Path) -> None:
        cupy = cuda.cupy()
        rows = bench_layers.gpu_rows(problem, cupy.asarray(x), cupy.asarray(w), bench_layers.Settings(names, _CALLS))
        medians = {row.impl or row.contestant: row.median for row in rows if row.median}
        slower = sorted((name for name in medians if name not in names), key=lambda name: medians[name])[1:]
        ceilings = roofline.measure()
        roofs = {"memory": ceilings.memory_seconds(problem), "FP32": ceilings.arithmetic_seconds(problem)}
        kept = {"seconds": {name: own for name, own in medians.items() if name not in slower}, "rooflines": roofs}
        (folder / "peers.json").write_text(json.dumps(kept), encoding="utf-8")

    words = (chip, cuda.driver_version(), problem, names, texts, torch)
    key = hashlib.sha256(repr(words).encode()).hexdigest()[:32]
    folder = cached_folders.folder(cached_folders.base(), "peers", key, measured)
    found: dict[str, dict[str, float]] = json.loads((folder / "peers.json").read_text(encoding="utf-8"))
    return found
