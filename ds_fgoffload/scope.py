"""One call of a unit in one micro-batch: whose saved tensors these are, and the site each of them is saved at."""

from __future__ import annotations

from torch import nn

from ds_fgoffload.plan import Site
from ds_fgoffload.saved import SavedStorage
from ds_fgoffload.stats import UnitStats


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

    __slots__ = ("_next_save", "call", "excluded", "micro_batch", "module", "saved_bytes", "stats", "unit", "waiting",
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
        self._next_save = 0

    def next_site(self) -> Site:
        """The site of the next eligible save, whether its storage is new or shared."""
        site = Site(self.unit, self.call, self._next_save)
        self._next_save += 1
        return site
