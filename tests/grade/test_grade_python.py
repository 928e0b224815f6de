"""The grader on kernels in Python."""

from pathlib import Path

import pytest
from sandbox import needs_sandbox
from submissions import graded

HERE = Path(__file__).parents[1] / "submissions" / "python"
SPEC = """
images = [300]
runs = 1
network = [{ name = "small", layers = [[1, 12, 11, 3, 5], [3, 9, 8, 4, 3]] }]
"""
VERDICTS = {
    "einsum.py": ("passed", "right on small"),
    "prints_much.py": ("passed", "right on small"),
    "forgets_a_channel.py": ("wrong", "Your output equals the convolution of channel 0 alone"),
    "imports_nothing_there.py": ("compile_error", "imports_nothing_there.py:6: ModuleNotFoundError"),
    "raises.py": ("crashed", "raises.py:9: ZeroDivisionError"),
    "exits.py": ("crashed", "exits.py:12: Silent"),
    "hides_its_error.py": ("crashed", "cannot be described"),
    "two_kernels.py": ("compile_error", "2 kernels"),
    "writes_its_input.py": ("crashed", "read-only"),
    "writes_through_a_pointer.py": ("tampered", "wrote into its input x"),
    "takes_even_numbers_of_filters.py": ("unsupported", "even"),
    "starts_a_program.py": ("crashed", "starts_a_program.py"),
}

pytestmark = needs_sandbox


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("python")
    code, found = graded([HERE / name for name in VERDICTS], folder, SPEC, "--time-in-parallel")
    assert code == 1
    return {Path(record["path"]).name: record for record in found}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_strangers_file(name, records):
    status, said = VERDICTS[name]
    assert records[name]["status"] == status, records[name]["reason"]
    assert said in records[name]["reason"]


def test_a_strangers_file_is_not_run_in_the_parent(records):
    assert records["einsum.py"]["printed"] == "imported with the grader: False\n"


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with open(tmp_path / "kernel.py", "wb") as file:
        file.truncate(1 << 40)
    _, (record,) = graded([tmp_path / "kernel.py"], tmp_path, SPEC)
    reason = "kernel.py cannot be read: expected a file of at most 8 MB"
    assert (record["status"], record["reason"]) == ("unsupported", reason)
