"""Fine-grained activation offloading for DeepSpeed: what named submodules save for backward travels to the host.

Start reading at :mod:`ds_fgoffload.runtime.hooks`; docs/architecture.md follows one tensor through the files.
"""

from ds_fgoffload.api import Attachment, attach, get, initialize
from ds_fgoffload.errors import HostPoolError, OffloadConfigError, OffloadStateError
from ds_fgoffload.host_memory.pool import HostPool, HostPoolStats, host_pool
from ds_fgoffload.stats import OffloadStats, UnitStats

__all__ = [
    "Attachment",
    "HostPool",
    "HostPoolError",
    "HostPoolStats",
    "OffloadConfigError",
    "OffloadStateError",
    "OffloadStats",
    "UnitStats",
    "attach",
    "get",
    "host_pool",
    "initialize",
]
__version__ = "0.1.0"
