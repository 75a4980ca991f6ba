"""``ds-fgoffload draw --sample``: a recording made by hand, for a picture where there is no device to record.

Four layers, what they save copied out and back, one wait, one late reload.
"""

from __future__ import annotations

from ds_fgoffload.profiling.recording import Call, Stall, StepRecording, StorageTimes

MIB = 1 << 20
LAYERS = 4
LAYER_MS = 10.0


def recording() -> StepRecording:
    """The step."""
    storages, calls = [], []
    step_ms = 3 * LAYERS * LAYER_MS
    for layer in range(LAYERS):
        begin, back = layer * LAYER_MS, step_ms - 2 * (layer + 1) * LAYER_MS
        for part, start, size_mib in (("self_attn", 1.0, 192), ("mlp", 5.0, 256)):
            unit = f"model.layers.{layer}.{part}"
            calls.append(Call(unit, begin + start, begin + start + 3.5))
            use_ms = back + (12.0 if part == "self_attn" else 3.0)
            calls.append(Call(unit, use_ms, use_ms + 6, backward=True))
            copy_ms = size_mib * MIB / 55e6
            saved_ms = begin + start + 3.0
            last = layer == LAYERS - 1
            late = layer == 0 and part == "mlp"
            h2d_ms = use_ms if late else use_ms - copy_ms - (0.2 if part == "self_attn" else 4)
            storages.append(
                StorageTimes(
                    unit,
                    size_mib * MIB,
                    saved_ms,
                    use_ms + 5.5,
                    d2h=None if last else (saved_ms + 0.2, saved_ms + 0.2 + copy_ms),
                    released_ms=None if last else saved_ms + copy_ms + 1,
                    h2d=None if last else (h2d_ms, h2d_ms + copy_ms),
                    late=late,
                )
            )
    late_storage = next(s for s in storages if s.late)
    assert late_storage.h2d is not None
    stalls = (Stall(late_storage.unit, *late_storage.h2d, "reload"), Stall("model.layers.1.mlp", 19.0, 19.6, "release"))
    facts = {"device": "made by hand", "policy": "all"}
    return StepRecording("One step of a small decoder", step_ms, tuple(storages), tuple(calls), stalls, facts=facts)
