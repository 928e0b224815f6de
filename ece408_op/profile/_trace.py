"""The timeline in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Rows are a GPU's streams, the host's threads with their CUDA calls, and the threads of MXNet's operators; an arrow
leads from a call to the kernel or copy that it started.
"""

from __future__ import annotations

from typing import Any

from ._activity import CALL, ON_GPU, OPERATOR, Activity, Profile

_CALLS, _OPERATORS = 1, 2
_FIRST_GPU = 10


def events(profile: Profile) -> dict[str, Any]:
    """The trace file's content. Times are microseconds since the first activity."""
    activities = profile.of(*ON_GPU, CALL, OPERATOR)
    origin = min((activity.start for activity in activities), default=0)
    rows: dict[tuple[int, str], int] = {}
    names: dict[int, str] = {}
    found: list[dict[str, Any]] = []
    calls = {activity.link: activity for activity in activities if activity.kind == CALL and activity.link}
    for activity in activities:
        process = _process(activity)
        names.setdefault(process, _title(activity, profile))
        row = rows.setdefault((process, activity.place), len(rows) + 1)
        found.append(
            {
                "name": activity.name,
                "cat": activity.kind,
                "ph": "X",
                "ts": (activity.start - origin) / 1000,
                "dur": activity.nanoseconds / 1000,
                "pid": process,
                "tid": row,
                "args": dict(activity.details),
            }
        )
        call = calls.get(activity.link)
        if activity.kind in ON_GPU and call is not None:
            source = rows.setdefault((_CALLS, call.place), len(rows) + 1)
            link = {"name": "starts", "cat": "starts", "id": activity.link}
            found.append({**link, "ph": "s", "ts": (call.start - origin) / 1000, "pid": _CALLS, "tid": source})
            here = {"ts": (activity.start - origin) / 1000, "pid": process, "tid": row}
            found.append({**link, "ph": "f", "bp": "e", **here})
    meta = [{"name": "process_name", "ph": "M", "pid": p, "args": {"name": name}} for p, name in names.items()]
    meta += [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": place}}
        for (process, place), row in rows.items()
    ]
    return {"traceEvents": meta + found, "displayTimeUnit": "ms"}


def _process(activity: Activity) -> int:
    if activity.kind in ON_GPU:
        return _FIRST_GPU + activity.device
    return _CALLS if activity.kind == CALL else _OPERATORS


def _title(activity: Activity, profile: Profile) -> str:
    if activity.kind in ON_GPU:
        limits = profile.devices.get(activity.device)
        return f"GPU {activity.device}" + (f": {limits.name}" if limits else "")
    return "host: CUDA API calls" if activity.kind == CALL else "host: MXNet operators"
