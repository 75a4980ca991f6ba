"""What backward will need next: learned from the last round, and before that, what was saved last.

A *round* goes from a moment when every micro-batch has begun backward or is gone to the next such moment: one
micro-batch under gradient accumulation, one ``train_batch`` on an early pipeline stage. Its micro-batches are numbered
anew (ordinals), so that (ordinal, site) names the same place in every round. Nothing relies on the order being right.
"""

from __future__ import annotations

from ds_fgoffload.schedule.plan import Place, Site

LONGEST_ROUND = 1024
"""A micro-batch that has not begun backward after so many others is not waited for: someone keeps its graph."""


class NeedOrder:
    """Keeps the order in which this round needs its places, predicts by the order of the last."""

    def __init__(self) -> None:
        self._ordinals: dict[int, int] = {}  # micro-batch of this round -> its number there
        self._newest = 0  # the highest of them
        self._alive: dict[int, int] = {}  # micro-batch -> what it has saved that has not died
        self._in_backward: set[int] = set()
        self._learned: list[Place] = []
        self._positions: dict[Place, int] = {}
        self._recorded: list[Place] = []
        self._ahead = 0  # position in the learned order from which to look for what comes next
        self._on_host: dict[Place, int] = {}  # -> key
        self._stacks: dict[int, list[Place]] = {}  # micro-batch -> places, last saved last; stale ones are passed over

    def begins_round(self, micro_batch: int) -> bool:
        """Whether the forward of ``micro_batch`` begins a new round: every earlier one is in backward or gone."""
        overdue = micro_batch - LONGEST_ROUND
        return all(earlier in self._in_backward or earlier <= overdue for earlier in self._alive)

    def micro_batch_began(self, micro_batch: int) -> bool:
        """A forward begins. True if a new round does."""
        new_round = self.begins_round(micro_batch)
        if new_round:
            if self._recorded:
                self._learned, self._recorded = self._recorded, []
                self._positions = {place: position for position, place in enumerate(self._learned)}
            self._ahead = 0
            self._ordinals.clear()
            self._newest = 0
        else:
            self._newest += 1
        self._ordinals[micro_batch] = self._newest
        return new_round

    def ordinal(self, micro_batch: int) -> int | None:
        """Its number in the round; None for what is left over from an earlier one."""
        return self._ordinals.get(micro_batch)

    def saved(self, micro_batch: int, site: Site) -> Place:
        """Something was saved; returns its place, of which the last round's is the same object."""
        self._alive[micro_batch] = self._alive.get(micro_batch, 0) + 1
        place = Place(self._ordinals.setdefault(micro_batch, 0), site)
        position = self._positions.get(place)
        return place if position is None else self._learned[position]

    def left(self, key: int, micro_batch: int, place: Place) -> None:
        """It is on the host now and will have to come back. Also: it was saved again, later."""
        self._on_host[place] = key
        position = self._positions.get(place)
        if position is not None and position < self._ahead:
            self._ahead = position  # it had been passed over, being on the device
        self._stacks.setdefault(micro_batch, []).append(place)

    def came_back(self, key: int, place: Place) -> None:
        # A graph that outlives its round, as one kept for an auxiliary loss, has places that the next round has too.
        if self._on_host.get(place) == key:
            del self._on_host[place]

    def backward_began(self, micro_batch: int) -> None:
        if micro_batch in self._alive:
            self._in_backward.add(micro_batch)

    def needed(self, micro_batch: int, place: Place, *, late: bool) -> None:
        """Backward needs it for the first time."""
        self._in_backward.add(micro_batch)
        if micro_batch not in self._ordinals:  # left over from an earlier round, and perhaps not there in the next
            return
        self._recorded.append(place)
        position = self._positions.get(place)
        if late and position is not None:
            self._ahead = position + 1  # not what was foreseen: go on from where backward really is

    def died(self, key: int, micro_batch: int, place: Place) -> None:
        self.came_back(key, place)
        self._alive[micro_batch] -= 1
        if not self._alive[micro_batch]:
            del self._alive[micro_batch]
            self._in_backward.discard(micro_batch)
            self._stacks.pop(micro_batch, None)

    def next_is_on_host(self) -> bool:
        """True if it was learned that something comes next which is on the host."""
        return self._ahead < len(self._learned) and self._learned[self._ahead] in self._on_host

    def next_key(self, micro_batch: int) -> int | None:
        """What is on the host and will be needed next, while ``micro_batch`` is in backward; None: nothing is known."""
        while self._ahead < len(self._learned):
            place = self._learned[self._ahead]
            if place in self._on_host:
                return self._on_host[place]
            if place.ordinal > self._newest:  # its forward is still to come
                break
            self._ahead += 1
        stack = self._stacks.get(micro_batch, [])
        while stack and stack[-1] not in self._on_host:
            stack.pop()
        return self._on_host[stack[-1]] if stack else None
