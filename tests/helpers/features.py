"""What an older DeepSpeed that is supported does not have: tests of it are skipped there, and say why."""

from __future__ import annotations

from importlib.util import find_spec

import deepspeed
import pytest
from deepspeed.accelerator import get_accelerator
from packaging.version import Version

HAS_DUALPIPEV = find_spec("deepspeed.runtime.pipe.dualpipev") is not None
HAS_OWN_CHECKPOINTS = Version(deepspeed.__version__) >= Version("0.19.8") or get_accelerator().Stream is not None
"""deepspeed.checkpointing makes a stream, and before 0.19.8 there was nothing to make on a CPU."""
NO_DUALPIPEV = f"DeepSpeed {deepspeed.__version__} has no DualPipeV"
NO_OWN_CHECKPOINTS = f"deepspeed.checkpointing of DeepSpeed {deepspeed.__version__} does not run on a CPU"

needs_own_checkpoints = pytest.mark.skipif(not HAS_OWN_CHECKPOINTS, reason=NO_OWN_CHECKPOINTS)
