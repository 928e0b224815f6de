"""The emulator: it computes what a GPU would, and finds deadlocks, races, and writes beyond the output."""

from pathlib import Path

import numpy as np
import pytest
from plan_runs import races as races_of
from plans import Case, Plans, translate

from ece408_op.emulator import Report, UnsupportedCodeError
from ece408_op.runtime.launch import Launch, Plan

INSTRUCTIONS = Path(__file__).parents[2] / "kernels/cuda/split_precision/instructions.cuh"


def _run(body: str, folder: Path, races: bool = False, threads: int = 128) -> Report:
    """Return the report on a block that executes the body; x is 0 to 255, and y starts as NaN."""
    text = f"""#line 1 "instructions.cuh"
{INSTRUCTIONS.read_text()}#line 1 "kernel.cu"
extern "C" __global__ void kernel(const float *__restrict__ x, float *__restrict__ y) {{
    extern __shared__ __align__(16) float shared[];
    const int i = threadIdx.x, lane = i % 32;
    {body}
}}"""
    launch = Launch("kernel", (1, 1, 1), (threads, 1, 1), ("x", "y"), 4096)
    arrays = {"x": np.arange(256, dtype=np.float32), "y": np.full(256, np.nan, np.float32)}
    case = Case("kernel", text, Plan({}, 1, lambda images: (launch,)), tuple(arrays))
    return Plans([case], folder, races).run("kernel", arrays)


REVERSE = "shared[i] = x[i]; %s y[i] = shared[127 - i];"


@pytest.mark.parametrize(
    ("synchronise", "races"),
    [
        ("__syncthreads();", 0),
        ("named_barrier(3, 128);", 0),
        ('asm volatile("bar.sync %0, %1;" :: "r"(3), "r"(128) : "memory");', 0),
        ('asm volatile("bar.sync 0;"); if (i < 0) __syncthreads();', 0),
        ('if (i < 64) asm("barrier.cta.arrive.aligned 1, 128;"); else asm("barrier.sync 1, 128;");', 1),
        ("", 1),
        ("__syncwarp();", 1),
        ("__shfl_sync(~0u, i, 0); named_barrier(1 + i / 64, 64);", 1),  # too few threads
    ],
    ids=["block", "named", "asm", "asm-block", "asm-arrive", "none", "warp", "half"],
)
def test_accesses_that_no_barrier_orders_are_races(synchronise, races, programs):
    report = _run(REVERSE % synchronise, programs, races=True)
    assert min(races_of(report), 1) == races
    if not races:
        np.testing.assert_array_equal(report.buffers["y"][:128], np.arange(127, -1, -1))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (i < 64) __syncthreads();", "64 of the block's 128 threads reach this __syncthreads()"),
        ("if (i < 64) named_barrier(1, 128);", "64 of the block's 128 threads wait for ever"),
        ("if (i < 64) named_barrier(1, 64); else named_barrier(1, 96);", "threads wait for ever"),
        ('asm("bar.sync 1, %0;" :: "r"(48));', "a number of threads that is no multiple of 32"),
        ('asm("bar.sync 16, 128;");', "the number of a barrier that is not 0 to 15"),
        ('asm("bar.sync 1, %0;" :: "r"(i < 64 ? 128 : 96));', "to one barrier with different numbers of threads"),
        ("if (i == 0) y[256] = 1;", "a write beyond y"),
        ("if (i == 0) y[-1] = 1;", "a write beyond y"),
    ],
)
def test_a_deadlock_and_a_write_beyond_the_output_are_found(body, message, programs):
    (finding,) = _run(body, programs).findings
    assert message in finding.message


@pytest.mark.parametrize("instruction", ["bar.sync 0, 32, 1", "cp.async.wait_group 1, 2"])
def test_an_instruction_without_a_translation_is_named(instruction):
    with pytest.raises(UnsupportedCodeError, match=f"line 2: .*the PTX instruction {instruction}"):
        translate(f'void f() {{\n    asm volatile("{instruction};");\n}}')


def test_constants_in_an_instruction_are_arguments(programs):
    body = """
    asm("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(shared_address(shared + 4 * i)), "l"(x + 4 * i));
    asm("cp.async.commit_group; " :: : "memory");
    asm("cp.async.wait_group 0;" ::);
    __syncthreads();
    y[i] = shared[127 - i];"""
    y = _run(body, programs, threads=64).buffers["y"]
    np.testing.assert_array_equal(y[:64], np.arange(127, 63, -1))


def test_a_warps_product_with_another_accumulator_is_a_matrix_product(programs):
    # A (16 x 16) and B (16 x 8) by the fragments of the PTX ISA; integers, so that all sums are exact.
    body = """
    const int g = lane / 4, t = lane % 4;
    const auto a = [&](int row, int k) { return to_fp16x2(row - k, row - (k + 1)); };
    const auto b = [&](int k, int n) { return to_fp16x2(k * n, (k + 1) * n); };
    float c[4] = {1, 1, 1, 1}, d[4];
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a(g, 2 * t)), "r"(a(g + 8, 2 * t)), "r"(a(g, 2 * t + 8)), "r"(a(g + 8, 2 * t + 8)),
          "r"(b(2 * t, g)), "r"(b(2 * t + 8, g)), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    for (int v = 0; v < 4; v++) y[(g + v / 2 * 8) * 8 + 2 * t + v % 2] = d[v];"""
    y = _run(body, programs, threads=32).buffers["y"]
    row, k, n = np.ogrid[:16, :16, :8]
    np.testing.assert_array_equal(y[:128].reshape(16, 8), 1 + ((row - k) * (k * n)).sum(axis=1))


@pytest.mark.parametrize("columns", ["", ".trans"])
def test_matrices_of_halves_are_loaded_by_rows_and_by_columns(columns, programs):
    body = """
    unsigned *const words = reinterpret_cast<unsigned *>(shared);
    for (int n = lane; n < 128; n += 32) words[n] = to_fp16x2(2 * n, 2 * n + 1);  // row r has halves 8 r to 8 r + 7
    __syncwarp();
    unsigned d[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4COLUMNS.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(shared_address(shared) + 16 * lane));
    for (int n = 0; n < 8; n++) y[32 * n + lane] = float(reinterpret_cast<_Float16 *>(d)[n]);"""
    y = _run(body.replace("COLUMNS", columns), programs, threads=32).buffers["y"][:256].reshape(4, 2, 8, 4)
    matrix, half, own, pair = np.ogrid[:4, :2, :8, :4]
    other = 2 * pair + half
    np.testing.assert_array_equal(y, 64 * matrix + (8 * other + own if columns else 8 * own + other))


def test_a_tensor_core_truncates_towards_zero(programs):
    # 2^24 + 1.5: one more bit than float32 has. Rounding would give 2^24 + 2.
    body = """
    float d[4] = {0x1p24f, -0x1p24f, 0x1p24f, -0x1p24f};
    const unsigned one = lane % 4 == 0 ? to_fp16x2(1, 0) : 0, ones[] = {one, one, 0, 0};
    mma(d, ones, to_fp16x2(lane / 4 % 2 ? -1.5f : 1.5f, 0), 0);
    if (lane == 0) y[0] = d[0], y[1] = d[1];"""
    y = _run(body, programs, threads=32).buffers["y"]
    np.testing.assert_array_equal(y[:2], [2.0**24, -(2.0**24)])
