"""The profile's arithmetic, on activities made by hand: tables, lists, trace, MXNet's trace."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ece408_op.profile import _mxnet_operators, _tables, _trace
from ece408_op.profile._tables import API_CALL, KERNEL, MEMCPY, OPERATOR, Activity, Profile


def kernel(name: str, start: int, end: int, **details) -> Activity:
    shape = {"grid": [10, 1, 1], "block": [256, 1, 1], "registers": 32, "static_shared": 0, "dynamic_shared": 0}
    return Activity(KERNEL, name, start, end, "stream 7", correlation=start, details={**shape, "local": 0, **details})


def call(name: str, start: int, end: int, thread: int = 1, correlation: int = 0) -> Activity:
    return Activity(API_CALL, name, start, end, f"thread {thread}", correlation=correlation)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 10**9), st.integers(0, 10**9)), max_size=20))
@example([("a", 0, 90), ("b", 0, 6), ("c", 0, 4)])  # over 90 % is more than 90 %
def test_rows_are_sorted_by_time_and_have_count_mean_and_extremes(spans):
    table = _tables.rows([kernel(name, start, start + length) for name, start, length in spans])
    assert sorted(row.name for row in table) == sorted({name for name, *_ in spans})
    assert [row.total for row in table] == sorted((row.total for row in table), reverse=True)
    for row in table:
        own = [length for name, _, length in spans if name == row.name]
        assert (row.total, row.calls, row.least, row.most) == (sum(own), len(own), min(own), max(own))
        assert row.average == pytest.approx(row.total / row.calls)
    whole = sum(row.total for row in table)
    if whole:
        assert [row.percent for row in table] == pytest.approx([100 * row.total / whole for row in table])
        most = _tables.most(table)
        assert sum(row.percent for row in most) > 90
        assert sum(row.percent for row in most[:-1]) <= 90


def test_a_call_within_a_call_of_the_same_thread_counts_once():
    calls = [
        call("cudaMemcpy", 0, 100),
        call("cuMemcpy", 10, 90),
        call("cuInner", 20, 30),
        call("cudaFree", 20, 60, thread=2),
        call("cudaMalloc", 100, 120),
    ]
    assert [row.name for row in _tables.tables(Profile(calls))["calls"]] == ["cudaMemcpy", "cudaFree", "cudaMalloc"]


def test_text_has_both_lists_and_explains_their_entries():
    copy = Activity(MEMCPY, "[CUDA memcpy HtoD]", 0, 5_000, "stream 7")
    profile = Profile([kernel("f", 0, 2_000_000_000), copy, call("cudaFree", 0, 700)], 2.5, 0.1, ("A note.",))
    words = _tables.as_text(profile)
    assert "100.00%    2.0000s       1    2.0000s    2.0000s    2.0000s  f\n" in words
    assert "5.0000us       1   5.0000us   5.0000us   5.0000us  [CUDA memcpy HtoD]" in words
    for key, line in (("gpu", "kernels and copies: f (100.0 %)"), ("calls", "CUDA API calls: cudaFree (100.0 %)")):
        assert f"Over 90 % of the time, {line}\n{_tables.EXPLANATIONS[key][-1]}" in words
    assert "A note." in words
    assert "MXNet operators" not in words


def test_trace_has_tracks_by_stream_and_thread_and_arrows_from_calls_to_kernels():
    activities = [
        kernel("f", 5_000, 9_000),
        call("cuLaunchKernel", 1_000, 3_000, correlation=5_000),
        Activity(OPERATOR, "New", 500, 10_000, "thread 3"),
    ]
    content = _trace.events(Profile(activities))
    assert json.loads(json.dumps(content)) == content
    events = content["traceEvents"]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (spans["New"]["ts"], spans["New"]["dur"]) == (0.0, 9.5)
    assert (spans["f"]["ts"], spans["f"]["dur"], spans["f"]["args"]["registers"]) == (4.5, 4.0, 32)
    assert len({event["pid"] for event in spans.values()}) == 3
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"GPU 0", "host: CUDA API calls", "host: MXNet operators", "stream 7", "thread 1"} <= names
    start, end = (next(event for event in events if event["ph"] == phase) for phase in "sf")
    assert start["id"] == end["id"]
    assert (start["pid"], start["tid"]) == (spans["cuLaunchKernel"]["pid"], spans["cuLaunchKernel"]["tid"])
    assert (end["pid"], end["tid"]) == (spans["f"]["pid"], spans["f"]["tid"])


def test_mxnets_trace_is_read_once_per_operator_and_new_has_its_own_name():
    def event(name, category, phase, ts, tid):
        return {"name": name, "cat": category, "ph": phase, "ts": ts, "tid": tid, "pid": 0}

    events = [
        {"ph": "M", "args": {"name": "cpu/0"}, "pid": 0, "name": "process_name"},
        event("Pooling", "operator", "B", 10, 1),
        event("Pooling", "operator", "B", 12, 2),
        event("Pooling", "operator", "E", 15, 2),
        event("Pooling", "operator", "E", 20, 1),
        event("Pooling", "operator", "b", 10, 1),
        event("Pooling", "operator", "e", 20, 1),
        event("New::pure_python", "Custom Operator", "b", 20, 3),
        event("New::pure_python", "Custom Operator", "e", 50, 3),
        event("Mine::pure_python", "Custom Operator", "b", 50, 3),
        event("Mine::pure_python", "Custom Operator", "e", 51, 3),
        event("Cut", "operator", "E", 60, 1),
    ]
    found = _mxnet_operators.activities(events)
    assert [(a.name, a.nanoseconds) for a in found] == [
        ("Pooling", 3000),
        ("Pooling", 10_000),
        ("New", 30_000),
        ("Mine::pure_python", 1000),
    ]
    assert found[2].details == {"mxnet_name": "New::pure_python"}
