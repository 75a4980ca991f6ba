"""What torch's own sharding (FSDP) asks of the modules it shards: which of them cannot run again in backward."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ds_fgoffload.config import SECTION
from ds_fgoffload.errors import OffloadConfigError
from ds_fgoffload.text.names import abbreviated


def refuse_sharded(recomputed: Mapping[str, nn.Module]) -> None:
    """Checks the units under ``recompute``.

    FSDP gathers the parameters of a module when it is called and before its backward. A unit that it shards may have to
    run again before that, for those that saved its output, and one that contains such modules would call them, and have
    them gather and free their parameters, in the middle of a backward that counts on them.

    Raises:
        OffloadConfigError: one of them is sharded, or contains a module that is.
    """
    sharded = [
        name
        for name, unit in recomputed.items()
        if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in unit.modules())
    ]
    if sharded:
        raise OffloadConfigError(
            f"{SECTION}.recompute: {abbreviated(name or 'the root' for name in sharded)}: sharded by FSDP, or with a "
            "module in it that is, and its parameters may not be there when it has to run again in backward; name "
            'modules inside what is sharded (norms, activation functions), put it into "modules", or use '
            "torch.utils.checkpoint for it"
        )
