"""Every CUDA kernel compiles, without a GPU, for every architecture that it declares, and spills nothing.

By default each kernel but fp16x1 is compiled for sm_90, and one layer of it for its oldest architecture, whose
instructions are the fewest; the filters are 5 x 5, since the longer loops of 7 x 7 ones compile for seconds.
``--exhaustive`` adds the other architectures and more layers.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Union

import nvrtc
import pytest
from cuda_layers import ARCHITECTURES, COURSE, CUDA_KERNELS, ODD, POOLED, PROBLEMS, chip_of

from ece408_op.core.kernel import CudaKernel
from ece408_op.kernels.cuda.float32 import register_blocked
from ece408_op.kernels.cuda.split_precision import split_precision, wide_weight_gradient
from ece408_op.problem import DATA_GRADIENT, ConvProblem
from ece408_op.runtime.launch import REGISTERS, Launch

pytestmark = nvrtc.needs_nvrtc

#: The architecture that layers of every kind are compiled for, if the kernel takes it; the others get one layer each.
MAIN = 80
#: More than 2**31 elements in one image: indices of 64 bits.
WIDE = ConvProblem(1, 3, 23000, 23000, 5, 3)


#: The kernels that are compiled by default: fp16x1 kernels are fp16x3 kernels with a third of the products.
CHOSEN = [kernel for kernel in CUDA_KERNELS if not kernel.name.startswith("fp16x1")]

#: Those that more layers are compiled for: two fp16x1 kernels have tiles of their own.
SEVERAL = [*CHOSEN, *(kernel for kernel in CUDA_KERNELS if kernel.name in ("fp16x1_general", "fp16x1_pointwise"))]

#: A kernel's name, architecture and layer; what the compiler is given for it; what it says: reports, or an error.
Case = tuple[str, int, ConvProblem]
Job = tuple[str, int, tuple[str, ...]]
Result = Union[dict[str, nvrtc.Report], str]


def _declared(kernel: CudaKernel, every: bool) -> list[int]:
    """The architectures to compile for: all that the kernel declares, or the oldest of them and sm_90."""
    declared = [a for a in ARCHITECTURES if kernel.runs_on(chip_of(a))]
    return declared if every else sorted({declared[0], 90})


@cache
def _jobs(every: bool) -> dict[Case, Job]:
    jobs = {}
    for kernel in CUDA_KERNELS if every else CHOSEN:
        declared = _declared(kernel, every)
        main = MAIN if MAIN in declared else declared[0]
        first = COURSE[2]
        layers = [first, *(problem for problem in COURSE if problem != first), *ODD, WIDE]
        for architecture in declared:
            chip = chip_of(architecture)
            fitting = [p for p in layers if not kernel.not_supported_reasons(p, chip)]
            pooled = [p for p in [*POOLED, WIDE.pooled(True)] if not kernel.not_supported_reasons(p, chip)]
            gradients = [first.data_gradient] if DATA_GRADIENT in kernel.features else []
            general = [p for p in [*gradients, *PROBLEMS] if not kernel.not_supported_reasons(p, chip)]
            several = every and kernel in SEVERAL
            if several and architecture == main:
                chosen = [*_spread(fitting, 5), *_spread(pooled, 2), *_spread(general, 5)]
            elif architecture == 90:
                chosen = [*fitting[:1], *pooled[:1], *general[:1]]
            else:
                chosen = [*fitting, *general][:1]
            for problem in chosen:
                plan = kernel.plan(problem, chip, _aligned(problem))
                jobs[kernel.name, architecture, problem] = (kernel.text(plan), architecture, kernel.options)
    return jobs


def _spread(problems: list[ConvProblem], most: int) -> list[ConvProblem]:
    """At most that many of the layers, evenly spread, with the last one: each compilation takes a third of a second."""
    return problems[:: -max(1, -(-len(problems) // most))]


def _aligned(problem: ConvProblem) -> int:
    return 4 if problem in [*ODD, *POOLED[len(COURSE) :]] else 16


def _compile(job: Job) -> Result:
    try:
        return nvrtc.compile_text(*job)
    except ValueError as error:
        return str(error)


@pytest.fixture(scope="module", params=["some", pytest.param("every", marks=pytest.mark.exhaustive)])
def every(request):
    """Whether to compile all architectures and layers."""
    return request.param == "every"


@pytest.fixture(scope="module")
def compiled(every):
    """The results, without those of the default jobs for ``--exhaustive``, which runs them as well."""
    jobs, default = _jobs(every), set(_jobs(False).values()) if every else set()
    jobs = {case: job for case, job in jobs.items() if job not in default}
    different = list(dict.fromkeys(jobs.values()))  # some kernels differ in their launches only
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # NVRTC compiles without Python's lock
        results = dict(zip(different, pool.map(_compile, different)))
    return {case: results[job] for case, job in jobs.items()}


@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)
def test_it_compiles_and_keeps_its_values_in_registers(kernel, compiled, every):
    if not every and kernel not in CHOSEN:
        pytest.skip("one of the exhaustive tests")
    cases = [case for case in _jobs(every) if case[0] == kernel.name]
    declared = _declared(kernel, every)
    assert {architecture for _, architecture, _ in cases} == set(declared)
    if every and kernel in SEVERAL:
        assert len(cases) >= len(declared) + 3, "expected several layers for the main architecture"
    mine = {key: result for key, result in compiled.items() if key[0] == kernel.name}
    for (_, architecture, problem), result in mine.items():
        where = f"{kernel.name} for sm_{architecture}, {problem}"
        assert not isinstance(result, str), f"{where}: {result}"
        plan = kernel.plan(problem, chip_of(architecture), _aligned(problem))
        launches = [step for step in (*plan.setup, *plan.steps(1)) if isinstance(step, Launch)]
        for launch in launches:
            report = result[launch.entry]
            assert report.spill_bytes == 0, f"{where}: {launch.entry} spills {report}"
            assert report.stack_bytes == 0, f"{where}: {launch.entry} has an array in local memory: {report}"
            assert not report.serialized, f"{where}: {launch.entry}'s products wait for one another"
            threads = launch.block[0] * launch.block[1] * launch.block[2]
            assert report.registers * threads <= REGISTERS, (
                f"{where}: {threads} threads of {report.registers} registers"
            )


def test_the_compiler_check_sees_an_error_a_warning_and_a_spill():
    with pytest.raises(ValueError, match="undefined"):
        nvrtc.compile_text('extern "C" __global__ void f(float *y) { y[0] = z; }', 80)
    with pytest.raises(ValueError, match="warning"):
        nvrtc.compile_text('extern "C" __global__ void f(float *y) { int unused = 1; y[0] = 2; }', 80)
    local = 'extern "C" __global__ void f(int *y) { int a[64]; for (int i = 0; i < 64; i++) a[y[i] & 63] = y[i + 64];'
    report = nvrtc.compile_text(local + " y[0] = a[y[1] & 63]; }", 80)["f"]
    assert report.stack_bytes >= 4 * 64


def test_the_compiler_check_sees_products_that_wait_for_one_another():
    text = split_precision.WARPGROUP.text(split_precision.WARPGROUP.plan(COURSE[2], chip_of(90), 16))
    # A sum that is used while products add to it.
    used = text.replace(
        "        wgmma_commit();\n    }", "        wgmma_commit();\n        with_x_high[0][0] += 1.0f;\n    }"
    )
    assert used != text
    assert nvrtc.compile_text(used, 90, split_precision.WARPGROUP.options)["split_precision_convolution"].serialized


def test_warpgroups_keep_their_addresses_in_registers_where_a_filter_row_takes_many_steps():
    plan = split_precision.WARPGROUP.plan(ConvProblem(1000, 24, 43, 37, 24, 6), chip_of(90), 16)
    report = nvrtc.compile_text(split_precision.WARPGROUP.text(plan), 90, split_precision.WARPGROUP.options)[
        "split_precision_convolution"
    ]
    assert (report.stack_bytes, report.spill_bytes, report.serialized) == (0, 0, False)


def test_what_computes_special_weights_takes_no_more_registers_than_their_sums():
    kernel = wide_weight_gradient.KERNEL
    plan = kernel.plan(ConvProblem(3, 1, 21, 19, 41, 4).weight_gradient, chip_of(90), 4)
    report = nvrtc.compile_text(kernel.text(plan), 90, kernel.options)["sum_tiles"]
    assert (report.stack_bytes, report.spill_bytes) == (0, 0)
    assert report.registers <= 40


@pytest.mark.parametrize("units", [1, 2, 3])
def test_a_weight_gradient_compiles_with_any_number_of_consumers(units):
    kernel = wide_weight_gradient.KERNEL
    plan = kernel.plan(ConvProblem(3, 64 * units, 9, 7, 64, 1).weight_gradient, chip_of(90), 4)
    assert plan.config["consumers"] == units
    report = nvrtc.compile_text(kernel.text(plan), 90, kernel.options)["weight_gradient_tiles"]
    assert (report.stack_bytes, report.spill_bytes, report.serialized) == (0, 0, False)


def test_a_compiler_older_than_the_chip_is_given_what_it_knows():
    chip, problem = replace(chip_of(90), compiler=(11, 8)), ConvProblem(10_000, 6, 30, 30, 16, 5)
    reason = "NVRTC: at least 12.0, got 11.8; install a CuPy for a newer CUDA"
    assert split_precision.WARPGROUP.not_supported_reasons(problem, chip) == [reason]
    for kernel in (split_precision.MMA_SYNC, register_blocked.UNIFORM):
        assert not kernel.not_supported_reasons(problem, chip)
        assert nvrtc.compile_text(kernel.text(kernel.plan(problem, chip, 16)), 90, kernel.options, "11.8")
