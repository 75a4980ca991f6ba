"""The figures of the host pool at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_fgoffload.lease import Account


@dataclass(frozen=True)
class HostPoolStats:
    """The pool at one moment. ``pinned`` is all that is held from the system, also where ``pin_memory`` is false."""

    pinned_bytes: int
    leased_bytes: int
    peak_leased_bytes: int
    requested_bytes: int
    """Leased bytes before they were rounded up to the alignment."""
    limit_bytes: int
    allocations: int
    refused_allocations: int
    """Slabs taken from the system, and those it refused; cumulative."""
    hits: int
    """Leases that needed no new slab, cumulative."""
    share_bytes: int = 0
    """What this rank may have without borrowing from others of the node."""
    pageable_bytes: int = 0
    """Of the pinned bytes, those that the system refused to page-lock."""
    pinning_ms: float = 0.0
    """Time in the system for new slabs, mostly in the background; cumulative."""
    waited_ms: float = 0.0
    """Time that leases waited for new slabs; cumulative."""
    engines: dict[str, Account] = field(default_factory=dict)
    """By the name of each engine or module that uses the pool."""
