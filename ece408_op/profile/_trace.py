"""The timeline in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Its tracks are a GPU's streams, the host's threads with their CUDA calls, and the threads of MXNet's operators. Arrows
lead from calls to the kernels or copies that they started.
"""

from __future__ import annotations

from typing import Any

from ._tables import API_CALL, ON_GPU, Activity, Profile


def events(profile: Profile) -> dict[str, Any]:
    """Return the content of the trace file. Times are microseconds since the first activity."""
    activities = sorted(profile.activities, key=lambda a: (a.start, a.end))
    origin = activities[0].start if activities else 0
    processes: dict[str, int] = {}
    tracks: dict[tuple[int, str], int] = {}
    found: list[dict[str, Any]] = []
    calls = {call.correlation: call for call in profile.of(API_CALL) if call.correlation}

    def position(activity: Activity) -> dict[str, Any]:
        host = "host: CUDA API calls" if activity.kind == API_CALL else "host: MXNet operators"
        name = f"GPU {activity.device}" if activity.kind in ON_GPU else host
        process = processes.setdefault(name, len(processes) + 1)
        track = tracks.setdefault((process, activity.track), len(tracks) + 1)
        return {"ts": (activity.start - origin) / 1000, "pid": process, "tid": track}

    for activity in activities:
        span = {"name": activity.name, "cat": activity.kind, "ph": "X", "dur": activity.nanoseconds / 1000}
        found.append({**span, **position(activity), "args": dict(activity.details)})
        if activity.kind in ON_GPU and activity.correlation in calls:
            arrow = {"name": "starts", "cat": "starts", "id": activity.correlation}
            found.append({**arrow, "ph": "s", **position(calls[activity.correlation])})
            found.append({**arrow, "ph": "f", "bp": "e", **position(activity)})
    names = [{"name": "process_name", "ph": "M", "pid": p, "args": {"name": name}} for name, p in processes.items()]
    names += [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
        for (process, name), track in tracks.items()
    ]
    return {"traceEvents": names + found, "displayTimeUnit": "ms"}
