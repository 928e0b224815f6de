"""A submission's limits of time, as its workers keep them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from submissions import HERE as SUBMISSIONS

from ece408_op.problem import ConvProblem
from ece408_op.submission import EndedError, runner


def test_a_spent_limit_is_the_files_fault_not_the_harnesss() -> None:
    """A later worker of the file still begins, which is not the file's time, and then has none left to load it."""
    file = runner.compile_file(SUBMISSIONS / "cpu" / "counts_its_calls.h")
    file = replace(file, program=replace(file.program, used=[4.0], most=4.0))
    session = runner.Session(file, [ConvProblem(2, 1, 8, 8, 2, 3)])
    with pytest.raises(EndedError, match="all its calls took longer than their limit of 4 s"), session:
        pytest.fail("the file was loaded")
    assert file.program.used == [4.0]
