"""waves.cuh: whatever the number of items and the chip, exactly one block computes each item."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ece408_op.kernels.cuda.float32.waves import blocks_in_waves

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

SOURCE = Path(__file__).parents[2] / "kernels" / "cuda" / "float32" / "waves.cuh"
#: Counts how often each item is computed.
COUNT = """
#define __device__
#define __forceinline__ inline
struct Config { static int resident_blocks, waves; };
int Config::resident_blocks, Config::waves;
%s
extern "C" void count(unsigned items, int resident_blocks, int waves, unsigned blocks, unsigned *taken) {
    Config::resident_blocks = resident_blocks, Config::waves = waves;
    for (unsigned block = 0; block < blocks; block++) {
        const WorkItems mine = work_items(items, block, blocks);
        for (unsigned item = mine.first; item < mine.end; item += mine.stride) taken[item]++;
    }
}
"""


@pytest.fixture(scope="module")
def count(tmp_path_factory):
    source = tmp_path_factory.mktemp("waves") / "waves.cpp"
    source.write_text(COUNT % SOURCE.read_text())
    library = source.with_suffix(".so")
    subprocess.run(["g++", "-O2", "-std=c++17", "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library)).count


@settings(max_examples=300, deadline=None)
@given(items=st.integers(1, 60_000), resident_blocks=st.integers(1, 2200), waves=st.sampled_from([5, 7]))
def test_every_item_is_computed_once(count, items, resident_blocks, waves):
    blocks = blocks_in_waves(items, resident_blocks, waves)
    taken = np.zeros(items, np.uint32)
    count(items, resident_blocks, waves, blocks, ctypes.c_void_p(taken.ctypes.data))
    assert (taken == 1).all()
    assert blocks <= resident_blocks or (blocks == waves * resident_blocks and items >= blocks)
