"""wgmma instructions as macros, because the number of registers that they name depends on the tile."""

from __future__ import annotations

from typing import Any

#: What a kernel with wgmma declares: the instruction exists on that one architecture.
WGMMA_KERNEL: dict[str, Any] = {
    "capability": (9, 0),
    "exact_capability": True,
    "compiler": (12, 0),
    "options": ("--gpu-architecture=sm_90a",),
}


def wgmma_macro(
    name: str, columns: int, shared: bool = False, overwrite: bool = False, transposed: bool = False
) -> dict[str, int | str]:
    """Return wgmma as a macro, which does nothing for 0 columns.

    The macro computes d += a b or, with ``overwrite``, d = a b. b is a descriptor; a is in
    registers or, with ``shared``, a descriptor. With ``transposed``, both are descriptors of matrices whose
    outer index in memory is the reduction index.
    """
    if not columns:
        return {f"{name}(d, a, b)": ""}
    sums = columns // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    factor = f"%{sums}" if shared else "{" + ", ".join(f"%{i}" for i in range(sums, sums + 4)) + "}"
    shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
    outputs = ", ".join(f'"{"=" if overwrite else "+"}f"((d)[{i}])' for i in range(sums))
    inputs = '"l"(a)' if shared else ", ".join(f'"r"((a)[{i}])' for i in range(4))
    flags = f"{0 if overwrite else 1}, 1, 1, {int(transposed)}{f', {int(transposed)}' if shared else ''}"
    text = f"{shape} {{{registers}}}, {factor}, %{sums + (1 if shared else 4)}, {flags};"
    return {f"{name}(d, a, b)": f'asm volatile("{text}" : {outputs} : {inputs}, "l"(b))'}
