"""Waves of blocks: whatever the items and the chip, every item is one block's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ece408_op.runtime.launch import blocks_in_waves, waves_defines

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

SOURCE = Path(__file__).parents[2] / "kernels" / "cuda" / "waves.cuh"
#: Adds one to every item that a block does.
COUNT = """
#define __device__
#define __forceinline__ inline
static unsigned HELD;
%s
extern "C" void count(unsigned items, unsigned held, unsigned blocks, unsigned *taken) {
    HELD = held;
    for (unsigned block = 0; block < blocks; block++) {
        const Turn turn = turn_of(items, block, blocks);
        for (unsigned item = turn.item; item < turn.end; item += turn.step) taken[item]++;
    }
}
"""


@pytest.fixture(scope="module", params=[5, 7])
def waves(request):
    return request.param


@pytest.fixture(scope="module")
def count(tmp_path_factory, waves):
    folder = tmp_path_factory.mktemp(f"waves{waves}")
    source, library = folder / "waves.cpp", folder / "waves.so"
    text = (COUNT % SOURCE.read_text()).replace(
        "unsigned HELD", f"unsigned HELD, WAVES = {waves_defines(1, waves)['WAVES']}"
    )
    source.write_text(text)
    subprocess.run(["g++", "-O2", "-std=c++17", "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library)).count


@settings(max_examples=300, deadline=None)
@given(items=st.integers(1, 60_000), held=st.integers(1, 2200))
def test_every_item_is_done_once(count, waves, items, held):
    blocks = blocks_in_waves(items, held, waves)
    taken = np.zeros(items, np.uint32)
    count(items, held, blocks, ctypes.c_void_p(taken.ctypes.data))
    assert (taken == 1).all()
    assert blocks <= held or (blocks % held == 0 and items >= blocks)
