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


def wgmma_macro(name: str, columns: int, shared: bool = False, transposed: bool = False) -> dict[str, int | str]:
    """Return wgmma as a macro of d, a, b and ``overwrite``, which does nothing for 0 columns.

    The macro computes d += a b or, if ``overwrite``, d = a b. b is a descriptor; a is in registers or, with ``shared``,
    a descriptor. With ``transposed``, both are descriptors of matrices whose outer index in memory is the reduction
    index.
    """
    sums = columns // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    factor = f"%{sums}" if shared else "{" + ", ".join(f"%{i}" for i in range(sums, sums + 4)) + "}"
    shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
    inputs = '"l"(a)' if shared else ", ".join(f'"r"((a)[{i}])' for i in range(4))
    flags = f"1, 1, {int(transposed)}{f', {int(transposed)}' if shared else ''}"

    def product(access: str, adds: int) -> str:
        outputs = ", ".join(f'"{access}f"((d)[{i}])' for i in range(sums))
        text = f"{shape} {{{registers}}}, {factor}, %{sums + (1 if shared else 4)}, {adds}, {flags};"
        return f'asm volatile("{text}" : {outputs} : {inputs}, "l"(b))'

    either = f"if (overwrite) {product('=', 0)}; else {product('+', 1)}"
    return {f"{name}(d, a, b, overwrite)": either if columns else ""}
