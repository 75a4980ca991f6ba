"""One call of a unit in one micro-batch: whose saved tensors these are, and the site each of them is saved at."""

from __future__ import annotations

from torch import nn

from ds_fgoffload.plan import Site
from ds_fgoffload.saved import SavedStorage
from ds_fgoffload.stats import UnitStats

ALONE_BYTES = 1 << 20
"""A storage of this size or more travels alone: copies of 1 MiB already run at nine tenths of the link's rate."""
PARCEL_BYTES = 16 << 20
"""A parcel of smaller ones is sent off at the latest when it has this size."""


class Scope:
    """Open from the unit's call until it returns or raises.

    Args:
        unit: the unit's name.
        module: the unit.
        stats: the unit's counts.
        micro_batch: number of the micro-batch on this attachment.
        call: how many times the unit had been called in this micro-batch before.
        excluded: the tensors saved here stay on the device.
    """

    __slots__ = ("call", "excluded", "micro_batch", "module", "saved_bytes", "saves", "stats", "unit", "waiting",
                 "waiting_bytes", "waiting_site")  # fmt: skip

    def __init__(
        self, unit: str, module: nn.Module, stats: UnitStats, micro_batch: int, call: int, *, excluded: bool
    ) -> None:
        self.unit = unit
        self.module = module
        self.stats = stats
        self.micro_batch = micro_batch
        self.call = call
        self.excluded = excluded
        self.saved_bytes = 0
        self.waiting: list[SavedStorage] = []
        """Small storages that will be packed into the next parcel."""
        self.waiting_bytes = 0
        self.waiting_site: Site | None = None
        """The site of the first that waits; it stands for the parcel."""
        self.saves = 0
        """Eligible saves so far, whether their storages were new or shared."""

    def site(self) -> Site:
        """The site of the latest eligible save."""
        return Site(self.unit, self.call, self.saves - 1)
