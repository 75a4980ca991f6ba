"""DeepSpeed's pipeline engines: a rank holds the layers of its stage, named by their global index."""

from __future__ import annotations

from ds_fgoffload.adapters.zero import ZeroAdapter


class PipelineAdapter(ZeroAdapter):
    """A pattern that matches nothing on this stage may match on another."""

    ranks_hold_same_modules = False
