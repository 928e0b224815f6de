"""What the emulator finds in files that misuse streams, with the files' own lines."""

from pathlib import Path

from one_body import run

CREATE = "cudaStream_t s; cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);"


def test_a_kernel_that_waits_for_a_stream_is_named_with_its_line(programs: Path) -> None:
    launch = f"{CREATE} run<<<2, 64, 0, s>>>(y.dptr_, x.dptr_, w.dptr_);"
    (finding,) = run("y[i + 64 * b] = 0;\ncudaDeviceSynchronize();", programs, launch).findings
    assert (finding.kind, finding.line) == ("unsupported", 6)
