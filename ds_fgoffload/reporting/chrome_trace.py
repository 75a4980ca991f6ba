"""A recorded step as a Chrome trace, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from typing import Any

from ds_fgoffload.profiling.recording import StepRecording

_LANES = ("compute", "stalls", "d2h", "h2d")


def chrome_trace(recording: StepRecording) -> str:
    """Lanes for compute, stalls and both copies, and a counter of the saved storages' device bytes."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in enumerate(_LANES)
    ]
    for call in recording.calls:
        name = f"{call.unit} ({'backward' if call.backward else 'forward'})"
        events.append(_span("compute", name, call.start_ms, call.end_ms))
    events += [
        _span("stalls", f"{stall.unit} ({stall.cause})", stall.start_ms, stall.end_ms) for stall in recording.stalls
    ]
    for storage in recording.storages:
        for lane, span in (("d2h", storage.d2h), ("h2d", storage.h2d)):
            if span is not None:
                late = storage.late and lane == "h2d"
                events.append(_span(lane, storage.unit, *span, bytes=storage.bytes, late=late))
    for name, offloaded in (("saved, with offloading", True), ("saved, without", False)):
        events += [
            {"ph": "C", "pid": 0, "name": name, "ts": ms * 1e3, "args": {"bytes": size}}
            for ms, size in recording.saved_bytes(offloaded=offloaded)
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _span(lane: str, name: str, start_ms: float, end_ms: float, **arguments: object) -> dict[str, Any]:
    place = {"ph": "X", "pid": 0, "tid": _LANES.index(lane)}
    return {**place, "name": name, "ts": start_ms * 1e3, "dur": (end_ms - start_ms) * 1e3, "args": arguments}
