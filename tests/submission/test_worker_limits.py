"""A submission's limits of time, as its workers keep them, and a worker that does not begin."""

import re
import resource
import sys
from dataclasses import replace

import numpy as np
import pytest
from submissions import HERE as SUBMISSIONS

from ece408_op.problem import ConvProblem
from ece408_op.submission import EndedError, HarnessError, runner


def test_a_spent_limit_is_the_files_fault_not_the_harnesss():
    """A later worker of the file still begins, which is not the file's time, and then has none left to load it."""
    file = runner.compile_file(SUBMISSIONS / "cpu" / "counts_its_calls.h")
    file = replace(file, program=replace(file.program, used=[4.0], most=4.0))
    session = runner.Session(file, [ConvProblem(2, 1, 8, 8, 2, 3)])
    with pytest.raises(EndedError, match="all its calls took longer than their limit of 4 s"), session:
        pytest.fail("the file was loaded")
    assert file.program.used == [4.0]


def test_a_program_that_is_not_there_is_named(monkeypatch):
    file = runner.compile_file(SUBMISSIONS / "python" / "einsum.py")
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    session = runner.Session(file, [ConvProblem(2, 1, 8, 8, 2, 3)])
    with pytest.raises(HarnessError, match="/nowhere/python3: No such file or directory"), session:
        pytest.fail("it began")


def test_the_stack_is_no_larger_where_the_harness_has_no_limit_of_its_own(tmp_path):
    text = (SUBMISSIONS / "cpu" / "textbook.h").read_text(encoding="utf-8")
    large = "volatile float unrolled[15000000];\n  unrolled[B] = unrolled[0];\n"
    (tmp_path / "new-forward.h").write_text(re.sub(r"(const int B = .*\n)", rf"\1  {large}", text, count=1))
    file = runner.compile_file(tmp_path / "new-forward.h")
    problem, before = ConvProblem(2, 1, 8, 8, 2, 3), resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (before[1], before[1]))
    try:
        with pytest.raises(EndedError, match="its stack was too small"), runner.Session(file, [problem]) as session:
            session.call(0, np.ones(problem.x_shape, np.float32), np.ones(problem.w_shape, np.float32))
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, before)
