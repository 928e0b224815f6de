"""Without a grader's file: a submission is graded on what it can do, and the record says what that is."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandbox import needs_sandbox

from ece408_op.grade._buffers import Buffers, Device
from ece408_op.grade._grading import for_cpu
from ece408_op.grade._reports import gradescope, student
from ece408_op.grade._spec import Spec
from ece408_op.grade._submission import Submission
from ece408_op.submission import build

HERE = Path(__file__).parents[1] / "submissions" / "cpu"

pytestmark = needs_sandbox


FOR_2018FA = "no_channels, for 2018fa.h"
FOR_2019FA = "tied to 2019fa.h"
ALONE = "right with one channel alone.h"
FOR_100 = "tied to 100 images, and wrong.h"
FEW = "right with few images alone.h"
MANY_THREADS = "512 threads at once.h"
#: On a busy machine, a thread per image means hundreds that live at the same time.
THREADS = """    std::mutex m;
    std::condition_variable all_there;
    int there = 0;
    std::vector<std::thread> threads;
    for (int n = 0; n < 512; n++)
        threads.emplace_back([&] {
            std::unique_lock<std::mutex> lock(m);
            there++;
            all_there.notify_all();
            all_there.wait(lock, [&] { return there == 512; });
        });
    for (std::thread &one : threads)
        one.join();
"""


def graded(path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The file's record, with a fraction of the images that the command tries."""
    patch.setattr(Device, "evict", lambda device: None)  # of times that are not compared
    grader = replace(for_cpu(build.tools(), Spec(runs=1), 1, in_parallel=True), images=3, timed_images=9)
    return grader.grade(Submission(path, path, "cpu"))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grade")
    textbook, begin = (HERE / "textbook.h").read_text(), "    const int B"
    tied = textbook.replace("y[b][m][h][w]", "y.dptr_[((b * M + m) * H_out + h) * W_out + w]")
    for shape, size in (("x.shape_[2]", "C == 1 ? 70 : 33"), ("x.shape_[3]", "H"), ("k.shape_[3]", "5")):
        tied = tied.replace(shape, size)
    every_other = (
        "static const int sizes[] = {784, 576}; static int calls = 0; if (C > 1 && calls++ % 2 == 0) return;\n"
    )
    texts = {
        FOR_2018FA: (HERE / "no_channels.h").read_text() + "static const int sizes[] = {72, 66, 33, 27};\n",
        FOR_2019FA: tied,
        FOR_100: textbook.replace("+=", "-=").replace(begin, f"    if (x.shape_[0] != 100) abort();\n{begin}", 1),
        ALONE: textbook.replace("    for (", f"{every_other}    for (", 1),
        FEW: textbook.replace(begin, f"    if (x.shape_[0] > 3) return;\n{begin}", 1),
        MANY_THREADS: textbook.replace(begin, f"{THREADS}{begin}", 1),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    paths = [HERE / "only_100_images.h", HERE / "macros.h", *(folder / name for name in texts)]
    with pytest.MonkeyPatch.context() as patch:
        return {path.name: graded(path, patch) for path in paths}


@pytest.mark.parametrize(
    ("name", "right", "said"),
    [
        ("only_100_images.h", {("2017", 100)}, r"out_of_bounds|wrong"),  # tied to a batch size and a network
        ("macros.h", {("2017", 3), ("2017", 9), ("2018sp", 3)}, ""),  # to a kernel's size
        (FOR_2019FA, {("2019fa", 3), ("2019fa", 9)}, ""),
        (MANY_THREADS, {("2017", 3), ("2017", 9), ("2018sp", 3), ("2018fa", 3)}, ""),
        (ALONE, {("2017", 3), ("2017", 9)}, r"2018sp \(unstable"),  # chance on a network that it is not for
    ],
)
def test_what_a_right_file_can_do(name, right, said, records):
    record = records[name]
    assert record["status"] == "passed" and re.search(said, record["reason"]), record["reason"]
    networks = record["networks"]
    assert {(one["network"], one["images"]) for one in networks if one["status"] == "passed"} == right


def test_the_times_are_those_of_the_larger_number_of_images(records):
    networks = [one for one in records["macros.h"]["networks"] if one["network"] == "2017"]
    assert [(one["images"], "seconds" in one) for one in networks] == [(3, False), (9, True)]
    assert records["macros.h"]["seconds"]["2017"] == networks[1]["seconds"]
    assert networks[1]["own_kernel_seconds"] > 0


def test_memory_that_the_grader_lacks_in_the_timed_run_is_no_fault_of_a_file(monkeypatch):
    original = Buffers.outcome

    def outcome(buffers: Buffers, *arguments: Any) -> Any:
        if buffers.problem.batch == 9:
            raise MemoryError("Out of memory")
        return original(buffers, *arguments)

    monkeypatch.setattr(Buffers, "outcome", outcome)
    record = graded(HERE / "macros.h", monkeypatch)
    assert record["status"] == "passed" and record["networks"][-1]["status"] == "crashed"


def test_accuracy_is_that_of_exact_convolutions(records):
    network = next(one for one in records["macros.h"]["networks"] if one["network"] == "2017")
    assert {one["model"] for one in network["accuracy"]} == {"ece408-high", "ece408-low"}
    assert all(one["agreement"] == 1 and one["images"] == network["images"] for one in network["accuracy"])


def test_a_file_that_is_wrong_on_the_network_that_it_is_for(records):
    assert records[FOR_2018FA]["status"] == "wrong" and records[FOR_2018FA]["reason"].startswith("2018fa")


def test_a_file_that_is_wrong_with_more_images_is_wrong(records):
    record = records[FEW]
    assert record["status"] == "wrong" and "(9 x 1 x 28 x 28" in record["reason"], record["reason"]
    tests = gradescope(record, student(record))["tests"]
    assert [one["name"] for one in tests if one["status"] == "failed"] == ["2017, 9 images"]


def test_a_network_without_weights(records):
    networks = records[FOR_2019FA]["networks"]
    assert networks[0]["accuracy"] == []
    # 2019's other network, to which nothing points, is not tried once one is right.
    assert "2019sp" not in {network["network"] for network in networks}


def test_wrong_with_the_many_images_that_it_asks_for_is_said_once(records):
    record = records[FOR_100]
    assert record["status"] in ("crashed", "wrong")
    assert [network["status"] for network in record["networks"] if network["images"] == 100] == ["wrong"]
