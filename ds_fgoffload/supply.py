"""Takes slabs from the system within the budget, and gives them back: the host pool's only way to memory."""

from __future__ import annotations

import time

from deepspeed.utils import logger

from ds_fgoffload.arena import rounded_up, slab_sizes
from ds_fgoffload.budget import Budget, HostPoolSettings, Refusal, mib
from ds_fgoffload.host_limit import pin_remedy
from ds_fgoffload.pinning import allocate_pinned, unpin_unused_host
from ds_fgoffload.region import HUGE_PAGE_BYTES, PAGE_BYTES, Region, Slab

MOST_ADDRESS_SPACE_BYTES = 4 << 40
PATIENCE_S = 1.0
"""So long the system is not asked again for what it refused: asking takes time, also in a step."""


class Supply:
    """The slabs of one pool. Not thread-safe, but its figures may be read at any time.

    ``slab_bytes`` is the least that is asked for at once, a multiple of the page size.
    """

    def __init__(self, settings: HostPoolSettings, budget: Budget, slab_bytes: int) -> None:
        self.settings = settings
        self.budget = budget
        self.regions: dict[int, Region] = {}
        """By base; the last is the one that grows."""
        self.held_bytes = self.pageable_bytes = 0
        self.allocations = self.refused_allocations = 0
        self.pinning_s = 0.0
        self.last_refusal: str | None = None
        """Why the latest slab was refused, and the remedy."""
        self._slab_bytes = slab_bytes
        self._next_base = 0
        self._pageable: set[int] = set()  # starts of slabs that should have been page-locked
        self._accelerator_allocates = False
        self._told_pin_failure = False
        self._quiet_until_s, self._refused_bytes, self._refusal = 0.0, 0, budget.full

    @property
    def top(self) -> int:
        """Where the next slab will begin if the region has room for it; ``-1`` before the first."""
        return next(reversed(self.regions.values())).top if self.regions else -1

    def grow(self, size_bytes: int, free_below_top_bytes: int) -> tuple[int, Slab] | None:
        """One slab more, so that ``size_bytes`` in a row are free; its region, and the slab.

        ``free_below_top_bytes`` are free right below :attr:`top`. ``None`` if it is refused (:attr:`last_refusal`).
        """
        missing = size_bytes - free_below_top_bytes
        region = next(reversed(self.regions.values()), None)
        if region is None or not region.is_mapped or region.end - region.top < missing:
            region, missing = None, size_bytes
        attempts = [(slab_bytes, self.settings.pin_memory) for slab_bytes in self._sizes(missing)]
        refusal = self.budget.full
        if attempts and attempts[-1][0] >= self._refused_bytes and time.monotonic() < self._quiet_until_s:
            attempts, refusal = [], self._refusal
        while attempts:
            slab_bytes, pin = attempts.pop(0)
            held_back = self.budget.claim(self.held_bytes, slab_bytes)
            if held_back is not None:
                refusal = held_back
                continue
            begin = time.perf_counter()
            try:
                return self._take(region, slab_bytes, pin=pin)
            except (RuntimeError, MemoryError) as error:
                self.refused_allocations += 1
                self.budget.holds(self.held_bytes)
                refusal = self._refused_by_system(slab_bytes, error, pin=pin)
                if not attempts:
                    if pin and self.settings.on_pin_failure == "pageable":
                        attempts.append((slab_bytes, False))
                    else:
                        self._quiet_until_s = time.monotonic() + PATIENCE_S
                        self._refused_bytes, self._refusal = slab_bytes, refusal
            finally:
                self.pinning_s += time.perf_counter() - begin
        self.last_refusal = (
            f"{refusal.cause}: {mib(size_bytes)} asked for, no free range holds them, and {mib(self.held_bytes)} are "
            f"held of {mib(self.budget.limit_bytes)} allowed; {refusal.remedy}"
        )
        return None

    def release(self, slabs: list[Slab]) -> None:
        """Gives back slabs that nobody uses any more, neither here nor on the device."""
        unpin = False
        for slab in slabs:
            region = next(region for region in self.regions.values() if region.base <= slab.start < region.end)
            region.release(slab)
            self.held_bytes -= slab.size_bytes
            if slab.start in self._pageable:
                self._pageable.remove(slab.start)
                self.pageable_bytes -= slab.size_bytes
            if not region.slabs:
                del self.regions[region.base]
                unpin |= not region.is_mapped
        if unpin:
            del region
            unpin_unused_host()
        if slabs:
            self._quiet_until_s = 0.0
            self.budget.holds(self.held_bytes)

    def _sizes(self, missing: int) -> list[int]:
        huge = self._slab_bytes % HUGE_PAGE_BYTES == 0
        held, limit = self.held_bytes, self.budget.limit_bytes
        page = HUGE_PAGE_BYTES if huge else PAGE_BYTES
        sizes = slab_sizes(missing, least=self._slab_bytes, page=page, held=held, limit=limit)
        return sizes or slab_sizes(missing, least=PAGE_BYTES, page=PAGE_BYTES, held=held, limit=limit)

    def _take(self, region: Region | None, slab_bytes: int, *, pin: bool) -> tuple[int, Slab]:
        if pin and self._accelerator_allocates:
            region = self._allocated(slab_bytes)
        else:
            region = region or self._reserve(slab_bytes)
            try:
                extended = region.extend(min(slab_bytes, region.end - region.top), pin=pin)
            finally:
                if not region.slabs:
                    del self.regions[region.base]
            if not extended:
                self._accelerator_allocates = True
                region = self._allocated(slab_bytes)
        slab = region.slabs[-1]
        if self.settings.pin_memory and not pin:
            self._pageable.add(slab.start)
            self.pageable_bytes += slab.size_bytes
        self.held_bytes += slab.size_bytes
        self.allocations += 1
        return region.base, slab

    def _allocated(self, slab_bytes: int) -> Region:
        return self._add(Region.of(self._next_base, allocate_pinned(slab_bytes)))

    def _reserve(self, slab_bytes: int) -> Region:
        """Address space for all that may be taken yet."""
        most = min(self.budget.limit_bytes - self.held_bytes, MOST_ADDRESS_SPACE_BYTES)
        size_bytes = rounded_up(max(most, slab_bytes), HUGE_PAGE_BYTES)
        return self._add(Region.reserve(self._next_base, size_bytes, slab_bytes))

    def _add(self, region: Region) -> Region:
        self.regions[region.base] = region
        self._next_base = region.end + PAGE_BYTES  # the gap: nothing is joined across regions
        return region

    def _refused_by_system(self, slab_bytes: int, error: Exception, *, pin: bool) -> Refusal:
        pin_failed = pin and not isinstance(error, MemoryError)
        verb = "page-lock" if pin_failed else "give"
        remedy = "free host memory or lower host_pool.max_bytes"
        if pin_failed:
            remedy = f"{pin_remedy()}, or set host_pool.pin_memory to false"
        cause = f"the system refused to {verb} {mib(slab_bytes)} of host memory ({type(error).__name__}: {error})"
        if pin_failed and not self._told_pin_failure:
            self._told_pin_failure = True
            instead = "is pageable, and slow to copy" if self.settings.on_pin_failure == "pageable" else "is not used"
            logger.warning(f"{cause}; memory that cannot be page-locked {instead}. To mend it: {remedy}")
        return Refusal(cause, remedy)
