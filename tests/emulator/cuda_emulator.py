"""Runs a CUDA kernel's plan on the CPU: its sources become C++, blocks run one after another, threads are fibers.

``cuda_on_cpu.h`` has CUDA's built-in names, and ``instructions_on_cpu.h`` the functions of the split-precision kernels'
``instructions.cuh``. Indices, barriers, alignment and values are a GPU's; the order of threads and everything
asynchronous are not. With ``races=True`` accesses to shared memory that no barrier orders are counted
(``races_on_cpu.h``).
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from ece408_op.core.kernel import CudaKernel
from ece408_op.problem import ConvProblem
from ece408_op.runtime.launch import Argument, CopyToConstant, Launch, Plan, TensorMap

_HERE = Path(__file__).parent
#: Sources made of instructions, and what stands in their place.
_COUNTERPARTS = {
    "instructions.cuh": '#include "instructions_on_cpu.h"\n',
    "tma.cuh": '#include "tma_on_cpu.h"\n',
    "copy_async.cuh": '#include "copy_async_on_cpu.h"\n',
    "denormals.cuh": "#define MULTIPLY_ADD multiply_add\n",
}
_PRELUDE = """#include "cuda_on_cpu.h"
struct Buffer {
    void *p;
    template <typename T> operator T *() const { return static_cast<T *>(p); }
};
static Buffer buffers[16];
static long long first;
static int images;
#line 1 "defines"
"""


@cache
def can_emulate() -> bool:
    """Return whether there is a g++ that knows 16-bit floats (13 or newer)."""
    probe = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    text = "#include <ucontext.h>\n_Float16 half(float x) { return x; }"
    return shutil.which("g++") is not None and subprocess.run(probe, input=text, text=True, check=False).returncode == 0


def translate(text: str) -> str:
    """Return CUDA C++ as C++ for ``cuda_on_cpu.h``; raises ValueError for an instruction without a translation."""
    for name, counterpart in _COUNTERPARTS.items():
        line = f'#line 1 "{name}"\n'
        text = re.sub(rf'{re.escape(line)}.*?(?=#line 1 ")', line + counterpart, text, flags=re.S)
    text = re.sub(
        r"extern __shared__ __align__\(\d+\) ([\w ]+?) (\w+)\[\];", r"\1 *const \2 = (\1 *)shared_memory;", text
    )
    # wgmma: macros, whose instruction names the columns of B.
    text = re.sub(
        r"#define (\w+_OVERWRITE\(d, a, b\)).*?m64n(\d+)k16.*", r"#define \1 wgmma_overwrite(d, a, b, \2)", text
    )
    text = re.sub(r"#define (\w+\(d, a, b\)).*?m64n(\d+)k16.*", r"#define \1 emulated_wgmma(d, a, b, \2)", text)
    text = re.sub(r'^ *asm volatile\("" : "\+r".*\n', "", text, flags=re.M)
    found = re.search(r"^[^/\n]*\basm\b(?! volatile\(\"cp\.async).*", text, re.M)
    if found:
        raise ValueError(f"no translation of {found.group().strip()}")
    return _PRELUDE + text


class Emulated:
    """A plan compiled for the CPU, for ``batch`` images and arrays of these names.

    races       pairs of accesses to shared memory that no barrier ordered, with ``races=True``; else 0
    """

    def __init__(
        self, text: str, plan: Plan, names: Sequence[str], batch: int, folder: Path, races: bool = False
    ) -> None:
        self._names, self._batch, self._steps = list(names), batch, [*plan.setup, *plan.steps(batch)]
        own = Path(tempfile.mkdtemp(dir=folder))  # a library that was opened once is not opened again
        source, built, library = (own / f"block.{end}" for end in ("cpp", "o", "so"))
        source.write_text(translate(text) + self._run_function())
        # Functions' own static arrays would be one for all libraries of this process, whatever their sizes. What runs
        # for long under the race detector gains from -O2; all else is compiled for longer than it runs.
        flags = ["-O2", "-fsanitize=thread", "-DRACES"] if races else ["-O1"]
        flags += ["-std=c++17", "-w", "-fpermissive", "-fno-gnu-unique", "-fPIC", f"-I{_HERE}"]
        _gcc(*flags, "-c", str(source), "-o", str(built))
        _gcc(
            "-shared", str(built), "-o", str(library)
        )  # without the sanitizer's library: races_on_cpu.h has its functions
        self._library = ctypes.CDLL(str(library))

    @property
    def races(self) -> int:
        return int(self._library.races_found())

    def launch(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Run all launches; raises AssertionError where threads wait for ever, or leave a barrier used."""
        pointers = (ctypes.c_void_p * len(self._names))(*(arrays[name].ctypes.data for name in self._names))
        failed = self._library.run(pointers, self._batch)
        assert failed == 0, f"launch {failed}: threads wait for ever, or a barrier is not left as it was"

    def _argument(self, argument: Argument) -> str:
        if isinstance(argument, TensorMap):
            lower, upper, step = argument.im2col or ((), (), ())
            fields = (argument.sizes, argument.box, lower, upper, step)
            lists = (f"{{{', '.join(map(str, field))}}}" for field in fields)
            start = f"(const unsigned char *)buffers[{self._names.index(argument.buffer)}].p + {argument.offset}"
            return f"TensorMap{{{start}, {', '.join(lists)}}}"
        return f"buffers[{self._names.index(argument)}]" if argument in self._names else str(argument)

    def _run_function(self) -> str:
        lines = []
        for number, step in enumerate(self._steps, 1):
            if isinstance(step, CopyToConstant):
                lines.append(f"std::memcpy({step.symbol}, buffers[{self._names.index(step.source)}].p, {step.bytes});")
                continue
            assert isinstance(step, Launch)
            assert step.block[2] == 1 and step.shared <= 256 * 1024, step
            call = f"{step.entry}({', '.join(map(self._argument, step.args))});"
            # Blocks of two dimensions, whose threads never wait for one another, need no fibers.
            if step.block[1] > 1:
                body = f"for (int t = 0; t < {step.block[0] * step.block[1]}; t++) threadIdx.x = t % {step.block[0]}, "
                body += f"threadIdx.y = t / {step.block[0]}, {call}"
            else:
                body = f"if (run_block({step.block[0]}, [] {{ {call} }})) return {number};"
            lines.append(f"gridDim = {{{', '.join(map(str, step.grid))}}};")
            loops = (f"for (blockIdx.{a} = 0; blockIdx.{a} < gridDim.{a}; blockIdx.{a}++)" for a in "zyx")
            lines.append(f"{' '.join(loops)} {{ {body} }}")
        body = "\n    ".join(lines)
        return f"""
extern "C" int run(void **given, int batch) {{
    for (int i = 0; i < {len(self._names)}; i++) buffers[i].p = given[i];
    images = batch;
    {body}
    return 0;
}}
#ifndef RACES
extern "C" int races_found() {{ return 0; }}
#endif
"""


class EmulatedPlan(Emulated):
    """A plan for one layer, compiled for the CPU.

    buffers     x, w, y and the scratch memory of the last run, by name
    """

    def __init__(self, text: str, plan: Plan, problem: ConvProblem, folder: Path, races: bool = False) -> None:
        super().__init__(text, plan, ["x", "w", "y", *plan.scratch], problem.batch, folder, races)
        self._problem, self._scratch = problem, plan.scratch
        self.buffers: dict[str, np.ndarray] = {}

    def run(self, a: np.ndarray, b: np.ndarray, aligned: int) -> np.ndarray:
        """Return what the kernel fills, from the two arrays that it reads: y from x and w, or a gradient.

        The three lie at multiples of ``aligned`` bytes, but not of twice as many. Raises AssertionError where threads
        wait for one another for ever, leave a barrier used, or write beyond the output.
        """
        scratch = {name: np.full(size, 0xFF, np.uint8) for name, size in self._scratch.items()}
        filled = np.full(self._problem.shapes[2], np.nan, np.float32)
        given = {**dict(zip(self._problem.operands, (a, b, filled))), **scratch}
        placed = {name: at(array, aligned if name in ("x", "w", "y") else 64) for name, array in given.items()}
        self.buffers = {name: inner for name, (_, inner) in placed.items()}
        self.launch(self.buffers)
        around, out = placed[self._problem.operands[2]]
        begin = out.ctypes.data - around.ctypes.data
        border = np.concatenate([around[:begin], around[begin + out.nbytes :]])
        assert (border == 0xFF).all(), f"the kernel wrote beyond {self._problem.operands[2]}"
        return out


def emulate(
    kernel: CudaKernel, problem: ConvProblem, plan: Plan, a: np.ndarray, b: np.ndarray, aligned: int, folder: Path
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the output, and all buffers by name, of one run of the kernel's plan on the CPU."""
    emulated = EmulatedPlan(kernel.text(plan), plan, problem, folder)
    return emulated.run(a, b, aligned), emulated.buffers


def _gcc(*arguments: str) -> None:
    done = subprocess.run(["g++", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]


def at(array: np.ndarray, aligned: int) -> tuple[np.ndarray, np.ndarray]:
    """Return memory full of 0xFF (NaN as floats), and in it a copy of the array, aligned as said and no more."""
    around = np.full(array.nbytes + 256, 0xFF, np.uint8)
    first = next(n for n in range(64, 192) if (around.ctypes.data + n) % (2 * aligned) == aligned)
    inner = around[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    inner[...] = array
    return around, inner
