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


def wgmma_macros(name: str, columns: int, shared: bool = False, transposed: bool = False) -> dict[str, int | str]:
    """Return wgmma as two macros, d += a b and, with _OVERWRITE after the name, d = a b; they do nothing for 0 columns.

    b is a descriptor; a is in registers or, with ``shared``, a descriptor. With ``transposed``, both are descriptors of
    matrices whose outer index in memory is the reduction index.
    """
    sums = columns // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    factor = f"%{sums}" if shared else "{" + ", ".join(f"%{i}" for i in range(sums, sums + 4)) + "}"
    shape = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
    inputs = '"l"(a)' if shared else ", ".join(f'"r"((a)[{i}])' for i in range(4))
    flags = f"1, 1, {int(transposed)}{f', {int(transposed)}' if shared else ''}"
    macros: dict[str, int | str] = {}
    for suffix, access, adds in (("", "+", 1), ("_OVERWRITE", "=", 0)):
        outputs = ", ".join(f'"{access}f"((d)[{i}])' for i in range(sums))
        text = f"{shape} {{{registers}}}, {factor}, %{sums + (1 if shared else 4)}, {adds}, {flags};"
        macros[f"{name}{suffix}(d, a, b)"] = f'asm volatile("{text}" : {outputs} : {inputs}, "l"(b))' if columns else ""
    return macros
