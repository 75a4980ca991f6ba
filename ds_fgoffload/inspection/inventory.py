"""What one micro-batch saved for backward, and what a selection of modules would move of it: facts, without tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StorageRecord:
    """One device storage that was saved for backward."""

    size_bytes: int
    dtype: str
    shape: tuple[int, ...]
    """Of the first tensor that was saved over it."""
    producer: str
    """The operation that wrote it, or ``input``."""
    skip: str | None
    """Why it may not be offloaded, whatever its size; None if it may."""
    saved_in: list[tuple[str, ...]]
    """For each save the names of the modules that were being called, outermost first."""
    saved_at_ms: float
    """Since the micro-batch began, as are the other times; the device had caught up each time."""
    used_at_ms: float | None = None
    """When backward first needed it."""
    held: bool = False
    """Something besides autograd held it when forward had ended, so that copying it would free nothing."""

    @property
    def module(self) -> str:
        """The innermost module that was being called when it was first saved."""
        return self.saved_in[0][-1]

    @property
    def shared(self) -> bool:
        """Whether several modules saved it."""
        return len({stack[-1] for stack in self.saved_in}) > 1

    @property
    def lifetime_ms(self) -> float | None:
        """From the save to the first use."""
        return None if self.used_at_ms is None else self.used_at_ms - self.saved_at_ms

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "module": self.module,
            "bytes": self.size_bytes,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "producer": self.producer,
            "stays_because": self.skip,
            "saves": len(self.saved_in),
            "saved_by": list(dict.fromkeys(stack[-1] for stack in self.saved_in)),
            "held_by_others": self.held,
            "saved_at_ms": self.saved_at_ms,
            "used_at_ms": self.used_at_ms,
        }


@dataclass(frozen=True)
class Moves:
    """What offloading a selection does in one micro-batch."""

    storages: int = 0
    moved_bytes: int = 0
    """Bytes that are copied to the host."""
    freed_bytes: int = 0
    """Of these, bytes that leave the device: nothing else holds them, and no module outside saved them too."""


@dataclass
class Inventory:
    """All that one micro-batch saved."""

    classes: dict[str, str] = field(default_factory=dict)
    """Module name to class name, of the modules that were called; the root is ``""``."""
    calls: dict[str, int] = field(default_factory=dict)
    records: list[StorageRecord] = field(default_factory=list)
    forward_ms: float | None = None
    """None if the forward has not ended, so that more would have been saved."""

    @property
    def eligible_bytes(self) -> int:
        """Bytes that may be offloaded, whatever the size of a storage."""
        return sum(record.size_bytes for record in self.records if record.skip is None)

    def moves(self, units: Collection[str], excluded: Collection[str] = (), min_tensor_bytes: int = 0) -> Moves:
        """What offloading ``units`` does; a save belongs to the innermost of ``units`` and ``excluded`` around it."""
        count = moved = freed = 0
        for record in self.records:
            if record.skip is not None or record.size_bytes < min_tensor_bytes:
                continue
            inside = [_innermost(stack, units, excluded) in units for stack in record.saved_in]
            if any(inside):
                count += 1
                moved += record.size_bytes
                freed += record.size_bytes if all(inside) and not record.held else 0
        return Moves(count, moved, freed)

    def by_module(self) -> Mapping[str, list[StorageRecord]]:
        """The records under the module that saved them first."""
        found: dict[str, list[StorageRecord]] = {}
        for record in self.records:
            found.setdefault(record.module, []).append(record)
        return found


def producers(records: Iterable[StorageRecord]) -> dict[str, int]:
    """Bytes by the operation that wrote them, the most first."""
    sizes: dict[str, int] = {}
    for record in records:
        sizes[record.producer] = sizes.get(record.producer, 0) + record.size_bytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _innermost(stack: tuple[str, ...], units: Collection[str], excluded: Collection[str]) -> str | None:
    for name in reversed(stack):
        if name in units or name in excluded:
            return name
    return None
