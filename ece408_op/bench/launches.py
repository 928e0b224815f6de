"""The launches of a GPU kernel, with the registers and memory that the compiler reports, and their occupancy."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime import cuda
from ece408_op.runtime.launch import Launch, Plan
from ece408_op.runtime.occupancy import device_limits


def launches(kernel: CudaKernel, problem: ConvProblem, x: Any, w: Any, out: Any) -> list[dict[str, Any]]:
    """Return each distinct launch of a call: its count, its function's registers and bytes, its occupancy (0 to 1)."""
    plan = kernel.plan(problem, cuda.chip(), cuda.alignment(x.data.ptr, w.data.ptr, out.data.ptr))
    if not kernel.sources:
        return []  # a library's launches are not known
    binary = cuda.compiled(cuda.Program(kernel.name, kernel.text(plan), kernel.options, plan), 0)
    limits, found = device_limits(), []
    for (entry, grid, block, shared), times in count(plan, problem.batch).items():
        facts = binary.function(entry, shared).attributes
        found.append(
            {
                "entry": entry,
                "count": times,
                "grid": grid,
                "block": block,
                "registers": facts["num_regs"],
                "static_shared": facts["shared_size_bytes"],
                "dynamic_shared": shared,
                "local": facts["local_size_bytes"],
                "constant": facts["const_size_bytes"],
                "occupancy": limits.occupancy(block, facts["num_regs"], facts["shared_size_bytes"] + shared),
            }
        )
    return found


def count(plan: Plan, batch: int) -> Counter[tuple]:
    """Count a call's launches by entry, grid, block and dynamic shared memory."""
    found: Counter[tuple] = Counter()
    sizes = Counter(images for _, images in plan.launch_ranges(batch))
    for steps, times in [(plan.setup, 1), *((plan.steps(images), n) for images, n in sizes.items())]:
        for step in steps:
            if isinstance(step, Launch):
                found[step.entry, step.grid, step.block, step.shared] += times
    return found
