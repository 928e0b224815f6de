"""Run every CUDA kernel once on a few small layers, for compute-sanitizer.

    for tool in memcheck racecheck initcheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/kernels/sanitize.py || echo $tool found something
    done

Arguments are kernel names, and "network" for layers with split activations; none means all. Exit codes: 0 all right,
1 a kernel was wrong or not checked, 3 no GPU.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "network"))

import numpy_operators
from cpu_kernels import assert_right
from cuda_layers import PROBLEMS

from ece408_op.core.kernel import CudaKernel
from ece408_op.errors import DeviceError
from ece408_op.kernels import KERNELS
from ece408_op.network import engine
from ece408_op.network._inference import Inference
from ece408_op.network._network import parse
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda

#: Complete tiles, and tiles that reach over each edge; more filters than a group; several images; a pointwise layer.
LAYERS = (
    ConvProblem(3, 1, 28, 28, 50, 5),
    ConvProblem(2, 12, 33, 33, 24, 7),
    ConvProblem(2, 5, 7, 45, 70, 3),
    ConvProblem(5, 2, 4, 5, 3, 2),
    ConvProblem(5, 131, 23, 19, 70, 1),
)
#: Several work items per block for the persistent kernels: a block reuses what its previous item left in memory.
PERSISTENT = [
    ConvProblem(450, 6, 30, 30, 16, 5),
    ConvProblem(300, 1, 72, 72, 12, 7),
    ConvProblem(500, 12, 33, 33, 24, 7),
    ConvProblem(300, 6, 30, 30, 16, 5).data_gradient,
    ConvProblem(300, 6, 30, 30, 16, 5).weight_gradient,
]
#: The name of the network below, whose layers all have split activations.
NETWORK = "network"
_PREFIXES = ("fp16x", "register_blocked", "sliding_window")


def main(names: list[str]) -> int:
    """Run the kernels of those names, or all; returns the exit code."""
    try:
        chip = cuda.chip()
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 3
    cupy = cuda.cupy()
    # No pool: every array is an allocation of its own, so that the tools see accesses beyond an array.
    cupy.cuda.set_allocator(None)
    wrong, checked = 0, Counter[str]()
    rng = np.random.default_rng(408)
    kernels = [k for k in KERNELS if isinstance(k, CudaKernel) and k.runs_on(chip) and (not names or k.name in names)]
    for kernel in kernels:
        for problem in [*LAYERS, *PROBLEMS, *(PERSISTENT if kernel.name.startswith(_PREFIXES) else [])]:
            pooled = [] if problem.needs else [problem.pooled(full=problem.batch > 2)]
            for each in (each for each in (problem, *pooled) if not kernel.not_supported_reasons(each, chip)):
                checked[kernel.name] += 1
                wrong += not _is_right(kernel, each, rng)
    if chip.capability == (9, 0) and (not names or NETWORK in names):
        checked[NETWORK] += 1
        wrong += not network_is_right(rng)
    unchecked = [kernel.name for kernel in kernels if not checked[kernel.name]]
    print(f"{sum(checked.values())} cases of {len(checked)} kernels; not checked: {', '.join(unchecked) or 'none'}")
    return 1 if wrong or unchecked or not checked else 0


def _is_right(kernel: CudaKernel, problem: ConvProblem, rng: np.random.Generator) -> bool:
    cupy = cuda.cupy()
    x, w = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in problem.shapes[:2])
    out = cupy.asarray(np.full(problem.shapes[2], np.nan, np.float32))
    kernel.run(problem, cupy.asarray(x), cupy.asarray(w), out)
    cuda.wait(kernel.name, cupy.cuda.get_current_stream())
    try:
        assert_right(kernel, problem, x, w, out.get())
    except AssertionError as error:
        print(f"{kernel.name}: WRONG: {error}")
        return False
    print(f"{kernel.name}, {problem}: right")
    return True


def network_text() -> tuple[str, tuple[int, ...]]:
    """Return the graph of a network with every layer that computes split activations, and the shape of its images."""
    nodes: list[dict[str, object]] = []

    def add(op: str, *inputs: int, shape: tuple[int, ...] = (), **attrs: object) -> int:
        texts = {key: str(value) for key, value in attrs.items()}
        texts |= {"__shape__": str(shape)} if shape else {}
        nodes.append({"op": op, "name": f"n{len(nodes)}", "attrs": texts, "inputs": [[each, 0, 0] for each in inputs]})
        return len(nodes) - 1

    def convolution(x: int, channels: int, filters: int, kernel: int, stride: int = 1, groups: int = 1) -> int:
        w = add("null", shape=(filters, channels // groups, kernel, kernel))
        pad, pair = kernel // 2, (kernel, kernel)
        sizes = {"kernel": pair, "num_filter": filters, "stride": (stride, stride), "pad": (pad, pad)}
        return add("Convolution", x, w, add("null", shape=(filters,)), num_group=groups, **sizes)

    first = add("Activation", convolution(add("null"), 3, 32, 3, 2), act_type="relu")
    depthwise = add("clip", convolution(first, 32, 32, 3, 1, 32), a_min=0, a_max=6)
    wide = add("elemwise_add", convolution(depthwise, 32, 32, 1), first)
    joined = add("Concat", wide, convolution(wide, 32, 40, 3), dim=1, num_args=2)
    normed = add("BatchNorm", joined, *(add("null", shape=(72,)) for _ in range(4)), fix_gamma=False)
    pooled = add("Pooling", normed, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max")
    w, bias = add("null", shape=(10, 72 * 5 * 5)), add("null", shape=(10,))
    head = add("FullyConnected", pooled, w, bias, num_hidden=10)
    variables = [number for number, node in enumerate(nodes) if node["op"] == "null"]
    return json.dumps({"nodes": nodes, "arg_nodes": variables, "heads": [[head, 0, 0]]}), (3, 3, 18, 18)


def network_is_right(rng: np.random.Generator) -> bool:
    """Compare the network with the same computed by NumPy; an image has a NaN."""
    text, shape = network_text()
    found = parse(text)
    x = rng.uniform(-1, 1, shape).astype(np.float32)
    x[1, 0, 3, 3] = np.nan
    parameters = [rng.uniform(0.1, 0.5, found.shape(number)).astype(np.float32) for number in found.parameters]
    values = dict(zip(found.parameters, parameters)) | dict(zip(found.data, [x]))
    shapes = found.infer([shape])
    for number, node in found.operators:
        values[number] = np.empty(shapes[number], np.float32)
        numpy_operators.compute(node.operator, [values[entry.node] for entry in node.inputs], values[number])
    (expected,), got = (values[number] for number in found.outputs), np.empty(shapes[found.outputs[0]], np.float32)
    addresses = [array.ctypes.data for array in parameters]
    inference = Inference([engine.engine(text, "auto", "float32", 0)])
    for _ in range(3):  # launches one by one, then as a CUDA graph
        inference.run([x], lambda: addresses, lambda: [got])
    right = np.allclose(got, expected, rtol=1e-4, equal_nan=True) and np.isnan(got[1]).any()
    print(f"{NETWORK}: {'right' if right else 'WRONG'}, of largest {np.nanmax(np.abs(expected)):.3g} off by at most "
          f"{np.nanmax(np.abs(got - expected)):.3g}")  # fmt: skip
    return bool(right)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
