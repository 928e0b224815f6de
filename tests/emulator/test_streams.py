"""What the emulator finds in files that use streams wrongly, with the files' own lines."""

from pathlib import Path

import pytest
from one_body import SOURCE, W, X, run

from ece408_op import emulator

#: Three lines that come before the kernel's launch in the default stream.
CREATE = """cudaStream_t s; cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
float *own; cudaMalloc(&own, 3136);
cudaEvent_t event; cudaEventCreate(&event);
"""
LAUNCH = "run<<<2, 64, 1024, s>>>(y.dptr_, x.dptr_, w.dptr_);"
DESTROYED = "cudaStreamDestroy(s);\n"
COPY = "cudaMemcpyAsync(own, x.dptr_, 3136, cudaMemcpyDefault, s);"

#: What the host's code does from line 12, and the findings.
HOST = {
    "a launch in a destroyed stream": (DESTROYED + LAUNCH, {("call", 13)}),
    "a launch in a stream without a value": ("s = (cudaStream_t)64;\n" + LAUNCH, {("call", 13)}),
    "calls with a destroyed stream": (
        f"{DESTROYED}{COPY}\ncudaEventRecord(event, s); cudaEventSynchronize(event);\n"
        "cudaStreamSynchronize(s);\ncudaStreamWaitEvent(s, event);\n"
        "if (cudaStreamDestroy(s) == cudaErrorInvalidResourceHandle) return;",
        {("call", line) for line in range(13, 18)},
    ),
    "calls that fail at once": (
        "if (cudaMemcpyAsync(own, x.dptr_, 3140, cudaMemcpyDefault, s) != cudaErrorInvalidValue) return;\n"
        "if (cudaMemsetAsync(own, 0, 3140) != cudaErrorInvalidValue) return;\n"
        "if (cudaFreeAsync(own + 1, s) != cudaErrorInvalidValue) return;\n"
        "cudaFree(own + 1);",
        {("call", line) for line in range(12, 16)},
    ),
    "work that is left where a stream is destroyed": (
        f"{COPY} cudaEventRecord(event, s); {DESTROYED} cudaStreamCreate(&s); cudaEventSynchronize(event);"
        "run<<<2, 64, 1024, s>>>(y.dptr_, own, w.dptr_);",
        set(),
    ),
    "a stream that is destroyed before its work is done": (
        f"{COPY} {DESTROYED} run<<<2, 64, 1024>>>(y.dptr_, own, w.dptr_);",
        {("uninitialised", 5)},
    ),
}


@pytest.mark.parametrize("name", HOST)
def test_what_the_host_does_with_streams_is_found_with_its_lines(name: str, programs: Path) -> None:
    host, expected = HOST[name]
    found = run("y[i + 64 * b] = x[i];", programs, CREATE + host).findings
    assert {(one.kind, one.line) for one in found} == expected


def test_a_kernel_that_waits_for_a_stream_is_named_with_its_line(programs: Path) -> None:
    (finding,) = run("y[i + 64 * b] = 0;\ncudaDeviceSynchronize();", programs, CREATE + LAUNCH).findings
    assert (finding.kind, finding.line) == ("unsupported", 6)


def test_work_that_an_error_leaves_in_a_stream_is_done_in_its_call(programs: Path) -> None:
    host = f"{CREATE}static int calls; if (calls++) return;\n{LAUNCH} CHECK_EQ(0, 1);"
    path = programs / "error.cuh"
    path.write_text(SOURCE.format(body="y[i + 64 * b] = x[i];", host=host, threads=64))
    reports = emulator.run_layers(emulator.compile(path, folder=programs), [(X, W)] * 2)
    assert [[one.kind for one in report.findings] for report in reports] == [["error"], []]
    assert (reports[0].y.reshape(-1)[:64] == X.reshape(-1)[:64]).all()
