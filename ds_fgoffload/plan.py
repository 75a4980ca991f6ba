"""What is to happen to each site, and how many bytes may lie on the device meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Site(NamedTuple):
    """A place where a storage is saved, the same in every micro-batch: unit, nth call, nth save in that call."""

    unit: str
    call: int
    save: int


class Action(Enum):
    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    """Neither kept nor copied, but made again in backward. It is for whole units (:attr:`Plan.units`); for a single
    site of a unit that is not recomputed it means the same as ``KEEP``."""


@dataclass(frozen=True)
class Plan:
    """Advice to the schedule. Any plan gives the same gradients; it decides memory and time."""

    sites: Mapping[Site, Action] = field(default_factory=dict)
    """Sites that are treated otherwise than ``default``."""
    default: Action = Action.OFFLOAD
    units: Mapping[str, Action] = field(default_factory=dict)
    """Units that are treated as a whole: those that are recomputed."""
    release_window_bytes: int | None = None
    """Copied bytes that may still lie on the device in forward; None: from what the step saves (see the schedule)."""
    prefetch_window_bytes: int | None = None
    """Bytes that reloads ahead of need may bring the device to in backward; None: from what the step saves."""

    def action(self, site: Site) -> Action:
        return self.sites.get(site, self.default)

    def recomputes(self, unit: str) -> bool:
        """Whether the calls of ``unit`` are made again in backward."""
        return self.units.get(unit) is Action.RECOMPUTE
