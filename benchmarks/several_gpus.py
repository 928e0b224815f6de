"""Time training steps of ResNet-50 and inference of two networks on one GPU and on several of this host.

python benchmarks/several_gpus.py --out several-gpus.txt

Images are in pageable memory. A step is that of ``ece408-bench networks --training``, with gpusgd and gradients="gpu";
several GPUs normalize their shares by themselves, so that their losses are others. Inference ends with the scores in
NumPy's memory; the predictions of several GPUs have to be those of one.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

REPEATS = 11
TRAINED, TRAINING_IMAGES = "resnet50_v1", (128, 256, 512)
INFERRED = (("resnet50_v1", 256), ("ece408-2018fa", 10_000))


def main() -> int:
    """The command; returns its exit code: 1 if a prediction of several GPUs is not that of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="how many GPUs (default: 2)")
    parser.add_argument("--out", type=Path, help="a file for the output")
    arguments = parser.parse_args()
    from ece408_op.plugin import mxnet_import

    mxnet_import.load()
    from ece408_op.bench import results

    machine = results.this_machine(gpu=True)
    assert machine.gpu, "this_machine raises without one"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    cpu = f"{machine.cores} cores of an {machine.cpu}"
    text = [f"python benchmarks/several_gpus.py --gpus {arguments.gpus}"]
    text += [f"{machine.gpu.name}, CUDA {machine.gpu.runtime}, {cpu}, {versions}", "milliseconds: median, all", ""]
    right = True
    for lines, agrees in chain(_training_steps(arguments.gpus), _inference(arguments.gpus)):
        print("\n".join(lines), flush=True)
        text += [*lines, ""]
        right &= agrees
    if arguments.out:
        arguments.out.write_text("\n".join(text[:-1]) + "\n", encoding="utf-8")
    return 0 if right else 1


def _training_steps(gpus: int) -> Any:
    """Yield the lines of each batch size, and that nothing disagrees."""
    from ece408_op.bench import _training

    network, pixels, labels = _training._given(TRAINED, max(TRAINING_IMAGES), 0)
    alone: dict[int, float] = {}
    for images in TRAINING_IMAGES:
        lines, medians = [f"{TRAINED}, training step, {images} images"], []
        for count in (1, gpus):
            step = _training._gpu_network(network, pixels[:images], labels[:images], "gpusgd", "gpu", count)
            losses = ", ".join(f"{float(step()):.4f}" for _ in range(3))
            median, samples = _timed(step)
            medians.append(median)
            lines.append(f"  {count} GPU{'s' * (count > 1)}   {samples}   losses {losses}")
            # The next network gets this one's memory.
            del step
            gc.collect()
        lines += [f"  ratio {medians[0] / medians[1]:.2f}"]
        alone[images] = medians[0]
        share = images // gpus
        if share in alone:
            rate = gpus * alone[share] / medians[1]
            lines[-1] += f"; {rate:.2f} times the images per second of 1 GPU with {share} images"
        yield lines, True


def _inference(gpus: int) -> Any:
    """Yield the lines of each network, and whether the predictions agree."""
    import numpy as np

    from ece408_op.bench import _networks
    from ece408_op.data import load_test
    from ece408_op.models import files, inference, shapes

    for name, images in INFERRED:
        if name in files.list_names():
            network = inference.built_in(files.find(name))
            pixels, _, _ = load_test(shapes.info(files.find(name)).image[1], images)
        else:
            network, image = _networks.gluons(name, 0)
            pixels = np.random.RandomState(0).uniform(-1, 1, (images, *image)).astype(np.float32)
        calls = [_networks._executed(inference.on_gpu(network, "auto", device_ids=range(n)), pixels) for n in (1, gpus)]
        agreeing = int((calls[0]().argmax(1) == calls[1]().argmax(1)).sum())
        found = [_timed(call) for call in calls]
        lines = [f"{name}, inference, {images} images"]
        lines += [f"  {n} GPU{'s' * (n > 1)}   {samples}" for n, (_, samples) in zip((1, gpus), found)]
        lines += [f"  ratio {found[0][0] / found[1][0]:.2f}, {agreeing} of {images} predictions agree"]
        yield lines, agreeing == images


def _timed(call: Callable[[], Any]) -> tuple[float, str]:
    """Return the median in milliseconds, and that and all times as text."""
    times = []
    for number in range(2 + REPEATS):
        start = time.perf_counter()
        call()
        times += [1e3 * (time.perf_counter() - start)] if number > 1 else []
    median = statistics.median(times)
    return median, f"{median:6.1f}   {' '.join(f'{each:.1f}' for each in times)}"


if __name__ == "__main__":
    sys.exit(main())
