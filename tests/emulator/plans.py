"""Run the package's own kernels on the CPU by their plans, several per program: compiling takes longer than running.

Functions of the kernels' headers that are made of instructions have counterparts in the emulator's ``cuda/plans.h``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ece408_op.emulator import Report, _build, _report, _rewrite, _run
from ece408_op.runtime.launch import Argument, CopyToConstant, Launch, Plan, TensorMap

_SECONDS = 300.0  # of a plan
#: Sources made of instructions, and the namespace with their functions.
_COUNTERPARTS = {"instructions.cuh": "instructions", "tma.cuh": "tma"}


@dataclass(frozen=True)
class Case:
    """Kernels' source with a plan.

    Attributes:
        name: unique among the cases of a program.
        text: the source, with its constants.
        plan: the launches.
        buffers: the names of all arrays that the plan names.
        batch: the number of images.
    """

    name: str
    text: str
    plan: Plan
    buffers: tuple[str, ...]
    batch: int = 1


class Plans:
    """Cases compiled into one program.

    Without races and counters, the kernels run several times as fast, and only deadlocks and writes outside a buffer
    are found. With either, every access is checked.

    Raises:
        CompileError: a source does not compile, or has an instruction without a counterpart.
        DeviceError: there is no g++.
    """

    def __init__(
        self,
        cases: Iterable[Case],
        folder: Path | None = None,
        races: bool = False,
        counters: bool = False,
    ) -> None:
        self.cases = {case.name: case for case in cases}
        checks = "counters" if counters else "races" if races else "plain"
        sources: dict[str, dict[int, Case]] = {}
        for number, case in enumerate(self.cases.values()):
            sources.setdefault(case.text, {})[number] = case
        texts = [_namespace(source, same, counters) for source, same in sources.items()]
        text = "".join(texts) + _entry(list(sources.values()), races, counters)
        self._program = _build.link(text, "plans", folder, checks=checks, course=False)

    def run(
        self,
        name: str,
        arrays: Mapping[str, np.ndarray],
        aligned: Mapping[str, int] | None = None,
    ) -> Report:
        """Run a case on arrays, by the names of its buffers; they stay as they are.

        The buffers are at odd multiples of 64 bytes, those of ``aligned`` at odd multiples of that, or at multiples of
        256.
        """
        case = self.cases[name]
        buffers = [_run.Buffer(key, arrays[key], (aligned or {}).get(key, 64), True) for key in case.buffers]
        call = _run.Call(buffers, [list(self.cases).index(name)])
        (outcome,) = _run.execute(self._program.executable, [call], _SECONDS)
        return _report.make(self._program, outcome)


def translate(text: str, unroll: bool = False) -> str:
    """Return a kernel's text as C++ for ``plans.h``; raises UnsupportedCodeError for an unknown instruction."""
    for name, namespace in _COUNTERPARTS.items():
        line = f'#line 1 "{name}"\n'
        text = re.sub(
            rf'{re.escape(line)}.*?(?=#line 1 ")', f"{line}using namespace ::emulator::{namespace};\n", text, flags=re.S
        )
    # wgmma: macros. The instruction names the columns of B, and whether to transpose A and B alike.
    wgmma = r"#define (\w+\(d, a, b, overwrite\)).*?m64n(\d+)k16.*?%\d+, [01], 1, 1, ([01])(?:, \3)?;.*"
    text = re.sub(wgmma, r"#define \1 wgmma(d, a, b, \2, !(overwrite), \3)", text)
    return _rewrite.rewrite(text, unroll=unroll).replace('extern "C" __global__', "__global__")


def _namespace(source: str, cases: Mapping[int, Case], unroll: bool) -> str:
    """The source, which is compiled once, and a function for the plan of each of its cases, by number."""
    text = f'#line 1 "defines"\n{translate(source, unroll)}'
    macros = dict.fromkeys(re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", text, re.MULTILINE))
    undefined = "".join(f"#undef {name}\n" for name in macros)
    functions = "".join(_run_function(number, case) for number, case in cases.items())
    return f"namespace case_{min(cases)} {{\n{text}\n{undefined}{functions}}}\n"


def _run_function(number: int, case: Case) -> str:
    """The C++ that makes a plan's copies and launches, range by range."""
    lines, plan, batch = [], case.plan, case.batch
    steps = [(step, 0, batch) for step in plan.setup]
    for first, images in plan.launch_ranges(batch):
        steps += [(step, first, images) for step in plan.steps(images)]
    for step, first, images in steps:
        if isinstance(step, CopyToConstant):
            source = f"b[{case.buffers.index(step.source)}]"
            lines.append(f"cudaMemcpyToSymbol({step.symbol}, {source}.p, {step.bytes});")
            continue
        assert isinstance(step, Launch)
        grid, block = (", ".join(map(str, size)) for size in (step.grid, step.block))
        kernel = _rewrite.as_kernel(step.entry)
        arguments = [_argument(case, argument, first, images) for argument in step.args]
        lines.append(f"::emulator::launch({{{grid}}}, {{{block}}}, {step.shared})({', '.join([kernel, *arguments])});")
    body = "\n    ".join(lines)
    return f"inline void run_plan_{number}(const Ece408Buffer *b) {{\n    {body}\n}}\n"


def _argument(case: Case, argument: Argument, first: int, images: int) -> str:
    if isinstance(argument, TensorMap):
        lower, upper, step = argument.im2col or ((), (), ())
        fields = (argument.sizes, argument.box, lower, upper, step)
        lists = (f"{{{', '.join(map(str, field))}}}" for field in fields)
        start = f"(const unsigned char *)b[{case.buffers.index(argument.buffer)}].p + {argument.offset}"
        return f"TensorMap{{{start}, {', '.join(lists)}}}"
    if argument == "first":
        return f"{first}ll"
    if argument == "images":
        return str(images)
    return f"b[{case.buffers.index(argument)}]" if isinstance(argument, str) else str(argument)


def _entry(sources: list[dict[int, Case]], races: bool, counters: bool) -> str:
    namespaces = {number: f"case_{min(same)}" for same in sources for number in same}
    calls = "\n".join(f"        case {n}: return {name}::run_plan_{n}(b);" for n, name in namespaces.items())
    watches = f'extern "C" const int ece408_counting = {int(counters)}, ece408_racing = {int(races)};\n'
    return f"""#line 1 "plans"
{watches}extern "C" void ece408_run(void **buffers, const long long *parameters) {{
    Ece408Buffer b[32];
    for (int i = 0; i < 32 && buffers[i]; i++) b[i].p = buffers[i];
    ece408_allow_shared(227 * 1024);
    switch (parameters[0]) {{
{calls}
    }}
}}
"""
