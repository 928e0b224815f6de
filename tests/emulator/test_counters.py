"""What the emulator counts per line of a kernel, and its hints."""

from one_body import run


def test_counters_are_those_of_a_gpu(programs):
    body = """__shared__ float s[32][32];
s[i % 32][i / 32] = x[i];
__syncthreads();
y[i + 64 * b] = s[i % 32][i / 32] + x[(i % 32) * 24];
atomicAdd(y + i, 0.f);
if (i % 2) y[i] = 3;"""
    by_line = {one.line: one for one in run(body, programs).lines}
    # Two blocks of two warps: each request of line 6 has 4 sectors; its stores go to one bank.
    assert (by_line[6].global_loads, by_line[6].sectors, by_line[6].least_sectors) == (4, 16, 16)
    assert (by_line[6].shared_requests, by_line[6].wavefronts, by_line[6].least_wavefronts) == (4, 128, 4)
    # On line 8, the lanes load from 96 bytes apart, 32 sectors, and store to 4.
    assert (by_line[8].global_requests, by_line[8].sectors) == (8, 128 + 16)
    assert (by_line[8].shared_requests, by_line[8].wavefronts) == (4, 128)
    assert by_line[9].atomics == 4
    assert {line: one.divergent for line, one in by_line.items() if one.divergent} == {10: 4}


def test_copies_are_counted_in_both_spaces_by_the_lanes_of_an_iteration(programs):
    body = """__shared__ float s[128];
for (int n = 0; n < 2; n++) if (n || i % 2)
__pipeline_memcpy_async(s + i + 64 * n, x + i + 64 * n, 4);
__pipeline_commit(); __pipeline_wait_prior(0); __syncthreads();
y[i] = s[i | 1];"""
    by_line = {one.line: one for one in run(body, programs).lines}
    # Two blocks of two warps; each has its odd lanes in one request and all in another, of 4 sectors each.
    assert (by_line[7].global_loads, by_line[7].sectors, by_line[7].least_sectors) == (8, 32, 4 * (2 + 4))
    assert (by_line[7].shared_requests, by_line[7].wavefronts) == (8, 8)


def test_a_vector_that_all_lanes_read_and_four_neighbours_are_no_bank_conflict(programs):
    body = """__shared__ __align__(16) float s[256];
for (int n = i; n < 256; n += 64) s[n] = x[n];
__syncthreads();
const float4 one = ((const float4 *)s)[b];
float sum = one.x + one.w;
sum += s[4 * i] + s[4 * i + 1] + s[4 * i + 2] + s[4 * i + 3];
y[i + 64 * b] = sum;"""
    by_line = {one.line: one for one in run(body, programs).lines}
    # Each half of a warp takes 16 bytes per lane in a wavefront of its own, although all lanes read the same.
    assert (by_line[8].shared_requests, by_line[8].wavefronts, by_line[8].least_wavefronts) == (4, 8, 8)
    # A compiler joins the four into one instruction, whose 512 bytes per warp take four wavefronts.
    assert (by_line[10].shared_requests, by_line[10].wavefronts, by_line[10].least_wavefronts) == (4, 16, 16)


def test_lanes_that_leave_an_iteration_early_meet_again_in_the_next(programs):
    """As in the machine code of nvcc for sm_90, where BSSY and BSYNC are inside the loop."""
    body = """float sum = 0;
for (int n = 0; n < 8; n++) { int h = i / 8 + n - 2; if (h < 0 || h > 7) continue;
for (int j = 0; j < 3; j++) { int v = i % 8 + j - 1; if (v < 0 || v > 7) continue;
sum += x[h * 8 + v]; } }
y[i] = sum;"""
    by_line = {one.line: one for one in run(body, programs).lines}
    # In two blocks, the first warp has rows 0 to 3, in the image for all n; the second 4 to 7, for n up to 5.
    assert by_line[8].global_loads == 2 * 3 * (8 + 6)


def test_hints_name_the_costliest_lines(programs):
    body = """__shared__ float s[32][32];
for (int n = 0; n < 20; n++) s[i % 32][n] = 1;
__syncthreads();
float sum = 0;
for (int n = 0; n < 20; n++) sum += x[(i % 32) * 24 + n];
y[i] = sum + s[i % 32][0];"""
    hints = run(body, programs).hints("wrong.cuh")
    assert [hint.line for hint in hints[:2]] == [6, 9]
    assert hints[0].section.endswith("#bank-conflicts") and "by one element (four for float4)" in hints[0].text
    assert hints[1].section.endswith("#coalescing")
    assert "32.0 different sectors" in hints[1].text


def test_hints_on_products_that_are_added_one_by_one_and_on_warps_that_share_a_sum(programs):
    hints = run("for (int n = 0; n < 20; n++)\natomicAdd(y + i, x[n * 24 + i] * w[n]);", programs).hints("wrong.cuh")
    assert hints[0].line == 6
    assert "80 atomic operations, and the kernel 160 loads from global memory and accesses to shared" in hints[0].text
    body = "__shared__ float s[64];\ns[i] = x[i];\n__syncthreads();\nfloat sum = 0;\n"
    body += "for (int n = 0; n < 20; n++) sum += s[i / 2 + n];\natomicAdd(y + i, sum);"
    assert not any("atomic" in hint.text for hint in run(body, programs).hints("wrong.cuh"))
    body = "float sum = 0;\nfor (int n = 0; n < 8; n++) sum += x[n * 64 + i] * w[n * 3 % 32 + i % 32];\n"
    body += "sum = __reduce_add_sync(~0u, int(sum));\nif (i % 32 == 0) y[i + 64 * b] = sum;"
    assert (6, "docs/lab.md#reuse") in {(hint.line, hint.section) for hint in run(body, programs).hints("wrong.cuh")}


def test_hints_on_a_narrow_block_whose_filters_are_in_global_memory(programs):
    body = """__shared__ float s[200];
s[i / 16 * 20 + i % 16] = x[i];
__syncthreads();
float sum = 0;
for (int n = 0; n < 30; n++) sum += s[i / 16 * 20 + i % 16 + n] * w[n];
y[i] = sum;"""
    hints = {hint.section.partition("#")[2]: hint for hint in run(body, programs).hints("wrong.cuh") if hint.line == 9}
    assert set(hints) == {"bank-conflicts", "reuse"}
    text = hints["bank-conflicts"].text
    assert "2.0 times as many cycles; a block 32 threads wide" in text and "pad" not in text
