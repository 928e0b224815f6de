"""What ptxas reports on kernels, understood and put in words."""

from dataclasses import asdict

import pytest

from ece408_op.runtime import ptxas
from ece408_op.runtime.occupancy import DeviceLimits, LaunchShape

#: As nvcc 13.0 prints it.
PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN5mxnet2op14forward_kernelEPfPKfS3_iiiiii' for 'sm_90'
ptxas info    : Function properties for _ZN5mxnet2op14forward_kernelEPfPKfS3_iiiiii
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 0 barriers
ptxas info    : Compile time = 9.622 ms
ptxas info    : Compiling entry function 'tiled' for 'sm_90'
ptxas info    : Function properties for tiled
    64 bytes stack frame, 48 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 2048 bytes smem
"""


def test_ptxas_is_understood():
    first, second = ptxas.kernels(PTXAS)
    assert first.name in ("forward_kernel", "_ZN5mxnet2op14forward_kernelEPfPKfS3_iiiiii")
    assert (first.registers, first.spill_store_bytes, first.shared_bytes) == (31, 0, 0)
    assert asdict(second) == {
        **{"name": "tiled", "registers": 128, "spill_store_bytes": 48, "spill_load_bytes": 52},
        **{"stack_bytes": 64, "shared_bytes": 2048, "constant_bytes": 0},
    }


def test_ptxas_names_what_is_in_the_way():
    text = "\n".join(ptxas.lines(ptxas.kernels(PTXAS)))
    assert "48 bytes are spilled" in text
    assert "limit a multiprocessor to 512 of 2048 threads" in text  # 65536 / 128
    assert "31 registers" in text


@pytest.mark.parametrize(
    ("block", "shared", "words"),
    [
        ((32, 8, 1), 0, "blocks of 32 x 8 threads: occupancy 25 %: its registers limit a multiprocessor to 2 blocks"),
        ((64, 1, 1), 100 << 10, "100 << 10 bytes of dynamic shared memory: occupancy 6 %: its shared memory limits a"),
        ((32, 1, 1), 0, "blocks of 32 threads: occupancy 25 %: its registers limit a multiprocessor to 16 blocks"),
    ],
)
def test_occupancy_is_told_by_launch(block, shared, words):
    notes = ptxas.kernels(PTXAS)
    launch = LaunchShape("tiled", (1, 1, 1), block, 2048, shared)
    told = ptxas.lines(notes, [launch], DeviceLimits("H200", (9, 0), 132, 64, 32, 65536, 228 << 10))
    assert words.replace("100 << 10", "102400") in told[-1]
