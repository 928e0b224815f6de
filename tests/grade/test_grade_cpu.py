"""Every attack, honest file and odd folder through the command, each with the verdict that is right for it."""

import re
from pathlib import Path

import pytest
import submissions
from sandbox import needs_sandbox

from ece408_op.grade._buffers import Device

CASES = {case.name: case for case in submissions.attacks() + submissions.honest() if case.usual}
DOCS = Path(__file__).parents[2] / "docs" / "grading.md"

pytestmark = needs_sandbox


@pytest.fixture(scope="module")
def records():
    with submissions.scratch_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "evict", lambda device: None)  # of times that are not compared
        submissions.write(list(CASES.values()), folder / "class")
        submissions.write_layouts(folder / "class")
        # Times are not compared: no call waits for others, and while one submission waits for its limit, others run.
        options = ("--context", "cpu", "--jobs", "4", "--time-in-parallel")
        code, found = submissions.graded([folder / "class"], folder, submissions.SPEC, *options)
    assert code == 1
    yield {submissions.name_of(record): record for record in found}


@pytest.mark.parametrize("name", CASES)
def test_verdict(name, records):
    record = records[name]
    assert submissions.is_right(record, CASES[name].expected), f"{submissions.verdict(record)}: {record['reason']}"
    assert record["reason"]
    assert (record["precision"] is not None) == (record["status"] == "passed")


@pytest.mark.parametrize("name", submissions.LAYOUTS)
def test_odd_folders(name, records):
    assert records[name]["status"] in submissions.LAYOUTS[name][1], records[name]["reason"]
    assert "a neighbour's work" not in records[name]["reason"] and "root:" not in records[name]["reason"]


def test_every_record_has_every_key(records):
    assert {frozenset(record) for record in records.values()} == {frozenset(records["textbook"])}
    said = DOCS.read_text().rpartition("## The record")[2]
    assert not [key for key in records["textbook"] if f"`{key}`" not in said]


def test_no_attack_is_expected_to_pass():
    assert len(submissions.attacks()) >= 60 and len(submissions.honest()) >= 40
    assert not any("passed" in verdict for case in submissions.attacks() for verdict in case.expected)


def test_compiler_errors_name_the_students_file_and_line(records):
    text = CASES["does_not_compile"].text
    line = next(i for i, text in enumerate(text.splitlines(), 1) if "undeclared_name" in text)
    assert f"new-forward.h:{line}:" in records["does_not_compile"]["reason"]


def test_a_file_that_frees_nothing_is_restarted(records):
    record = records["never_frees"]
    assert record["networks"][0]["leaks"] == ("does not free its memory" in record["reason"])


def test_the_worst_element_is_named(records):
    record = records["misses_the_last_row"]
    last = [layer["layer"][1] - layer["layer"][4] for layer in record["networks"][0]["layers"]]
    assert record["worst"]["index"][2] in last  # the worst of either layer is in its last row
    assert record["worst"]["got"] == 0


def test_every_timed_run_is_in_the_record(records):
    for layer in records["textbook"]["networks"][0]["layers"]:
        timed = [run for run in layer["runs"] if run["purpose"] == "timed"]
        assert len(timed) == layer["seconds"]["count"] == 3
        assert all(run["seconds"] > 0 and run["verdict"] == "float32" for run in layer["runs"])


def test_the_worker_uses_its_own_clock(records):
    for layer in records["functions_named_as_the_systems"]["networks"][0]["layers"]:
        assert all(0 < run["worker_seconds"] < run["seconds"] for run in layer["runs"])


def test_the_time_of_empty_calls_is_not_the_submissions_to_say(records):
    for layer in records["slow_empty_calls"]["networks"][0]["layers"]:
        assert layer["overhead_seconds"] < 0.02 < layer["seconds"]["median"]  # it sleeps for so long in each


@pytest.mark.parametrize(
    ("name", "key", "there", "not_there"),
    [
        ("skeleton", "reason", "Missing an ECE408 CPU implementation!", ()),
        ("an_array_of_60_megabytes_on_the_stack", "reason", "its stack was too small", ()),
        ("unmaps_its_output", "reason", "it unmapped the output y, at element 0", ("const",)),
        ("a_null_pointer", "reason", "", ("stack",)),
        ("forged_lines", "printed", '"status": "passed"', ()),  # kept, and not parsed
        ("prints_much", "printed", "Op Time: 0.000001", ()),
        # Neither the grader's files, its memory nor other processes are in reach.
        ("reads_the_grader_in_the_constructor", "printed", "", ("spec.toml", "seen /work", "seen /home")),
        ("looks_for_the_reference", "printed", "", ("opened /proc",)),
        ("cuts_off_the_buffers", "printed", "written: -1", ("truncated: 0",)),
        # Calls that no submission may make.
        ("memory_without_a_name", "printed", "memfd: -1, keyring: -1, userfaultfd: -1", ()),
        ("continues_itself", "printed", "continue: -1, -1, -1", ()),
        ("shared_memory_that_is_unmapped", "printed", "mapped: 0", ()),
        ("locks_of_files", "printed", "locked: -1 -1 -1", ()),
        ("sends_signals_by_a_socket", "printed", "owner: -1", ()),
        ("sockets_full_of_memory", "printed", "less than a gigabyte", ()),
        ("closed_connections_full_of_memory", "printed", "less than a gigabyte", ()),
        ("reserves_the_graders_disk", "printed", "reserved: -1, -1", ()),
        ("opens_a_connection", "printed", "inet: -1, netlink: -1", ()),
        ("calls_of_an_administrator", "printed", "allowed: 0", ()),
    ],
)
def test_words_of_a_record(name, key, there, not_there, records):
    assert there in records[name][key]
    assert not [word for word in not_there if word in records[name][key]]


def test_files_in_tmp_are_limited(records):
    made = re.search(r"files: (\d+) of", records["many_files"]["printed"])
    assert made is not None and 0 < int(made[1]) < 20_000
