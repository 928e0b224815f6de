"""The tables of recorded activities: m4.py ece408-2018sp 100 on one H200, and what its driver reports on launches."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from ece408_op.profile import _tables, _trace, text
from ece408_op.profile._activity import API_CALL, KERNEL, ON_GPU, OPERATOR, Activity, DeviceLimits, Profile

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture(scope="module")
def profile() -> Profile:
    data = json.loads((RECORDED / "profile-m4-2018sp-100.json").read_text())
    limits = data["devices"]["0"]
    data["devices"] = {0: DeviceLimits(**{**limits, "capability": tuple(limits["capability"])})}
    return Profile(**{**data, "activities": [Activity(**activity) for activity in data["activities"]]})


def test_the_gpus_table_is_that_of_the_raw_record(profile) -> None:
    """Summed up again from the file itself."""
    raw = json.loads((RECORDED / "profile-m4-2018sp-100.json").read_text())["activities"]
    sums: dict[str, list[int]] = defaultdict(list)
    for activity in raw:
        if activity["kind"] in ON_GPU:
            sums[activity["name"]].append(activity["end"] - activity["start"])
    found = {row.name: (row.total, row.calls, row.least, row.most) for row in _tables.tables(profile)["gpu"]}
    assert found == {name: (sum(t), len(t), min(t), max(t)) for name, t in sums.items()}
    assert found["strip"][1] == 4  # two layers, each once unmeasured and once measured
    assert {"hold", "[CUDA memcpy HtoD]", "[CUDA memcpy DtoH]", "[CUDA memset]"} < set(found)


def test_no_call_counts_twice(profile) -> None:
    """The calls of a thread in the table do not overlap, so their sum is at most the thread's time."""
    calls = _tables.outermost(profile.of(API_CALL))
    threads = defaultdict(list)
    for call in calls:
        threads[call.track].append(call)
    assert len(threads) > 1
    for own in threads.values():
        for before, after in zip(own, own[1:]):
            assert before.end <= after.start
    counted = sum(row.calls for row in _tables.tables(profile)["calls"])
    assert counted == len(calls) <= len(profile.of(API_CALL))


def test_the_clocks_of_gpu_host_and_mxnet_agree(profile) -> None:
    """Every kernel lies within a forward of New, and begins after the call that started it."""
    forwards = [activity for activity in profile.of(OPERATOR) if activity.name == "New"]
    calls = {call.correlation: call for call in profile.of(API_CALL)}
    kernels = profile.of(KERNEL)
    assert len(forwards) == 2
    assert kernels
    for kernel in kernels:
        assert any(forward.start <= kernel.start <= kernel.end <= forward.end for forward in forwards)
        assert calls[kernel.correlation].name == "cuLaunchKernel"
        assert calls[kernel.correlation].start <= kernel.start


def test_launch_shapes_are_those_of_the_plan(profile) -> None:
    shapes = {(shape.name, shape.block): shape for shape in _tables.shapes(profile)}
    assert shapes["hold", (1, 1, 1)].launches == 4
    strips = [shape for shape in shapes.values() if shape.name == "strip"]
    assert [(shape.launches, shape.dynamic_shared, shape.registers) for shape in strips] == [
        (2, 27840, 168),
        (2, 60928, 157),
    ]


def test_occupancy_is_what_the_driver_reported(profile) -> None:
    """Of each kernel's launches on the course's layers, by cuOccupancyMaxActiveBlocksPerMultiprocessor."""
    launches = json.loads((RECORDED / "occupancy-h200.json").read_text())
    assert len(launches) > 40
    for block, registers, shared, share in launches:
        assert profile.devices[0].occupancy(tuple(block), registers, shared) == pytest.approx(share)


def test_the_text_and_the_trace_have_all_activities(profile) -> None:
    words = text.as_text(profile)
    for title in ("GPU activities:", "CUDA API calls:", "Kernel launches:", "MXNet operators:"):
        assert title in words
    assert text.HOLD_SENTENCE in words
    events = _trace.events(profile)["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == len(profile.activities)
    arrows = [event for event in events if event["ph"] == "f"]
    assert len(arrows) == len(profile.of(*ON_GPU))
