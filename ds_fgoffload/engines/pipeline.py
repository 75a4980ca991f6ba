"""DeepSpeed's pipeline engines: a rank holds the layers of its stage, named by their global index.

An engine calls its module once per micro-batch (twice under DualPipeV, once per chunk), so that nothing has to be known
of its schedule: the order in which micro-batches go backward is learned (:mod:`ds_fgoffload.schedule.order`).
"""

from __future__ import annotations

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_fgoffload.compat.private import INSTRUCTIONS
from ds_fgoffload.engines.zero import ZeroAdapter

try:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
except ImportError:  # DeepSpeed before 0.19.8 has no such engine
    DualPipeVEngine = None


class PipelineAdapter(ZeroAdapter):
    """A pattern that matches nothing on this stage may match on another."""

    ranks_hold_same_modules = False

    def __init__(self, engine: PipelineEngine) -> None:
        super().__init__(engine)
        self._pipeline = engine

    def release_engine_buffers(self) -> None:
        """From now on the engine lets go of what it no longer reads once a micro-batch has gone backward.

        DeepSpeed keeps the last stage's outputs and labels, and the first stage's inputs, until their buffer is used
        again. DualPipeV frees its own.
        """
        if DualPipeVEngine is not None and isinstance(self._pipeline, DualPipeVEngine):
            return
        instructions = getattr(self._pipeline, INSTRUCTIONS)
        backward = instructions[schedule.BackwardPass]

        def backward_and_release(engine: PipelineEngine, buffer_id: int) -> None:
            backward(engine, buffer_id)
            buffers = engine.pipe_buffers
            if engine.is_last_stage():
                buffers["outputs"][buffer_id] = None
                buffers["labels"][buffer_id] = None
            if engine.is_first_stage():
                buffers["inputs"][buffer_id] = None

        # The engine looks its instructions up on itself, so the map of this instance can differ from the class's.
        setattr(self._pipeline, INSTRUCTIONS, {**instructions, schedule.BackwardPass: backward_and_release})

    def release(self) -> None:
        super().release()
        self._pipeline.__dict__.pop(INSTRUCTIONS, None)
