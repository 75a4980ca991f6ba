"""Watches what a model saves for backward and moves nothing: the eyes of ``ds-fgoffload inspect``.

Beside :mod:`ds_fgoffload.runtime.hooks` the only one that knows autograd's saved-tensor hooks. Both on one module at a
time would see only half: the innermost hooks win.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ds_fgoffload.compat.private import (
    SCHEMA,
    TorchDispatchMode,
    graph_task_id,
    storage_address,
    storage_users,
    tree_leaves,
)
from ds_fgoffload.device.streams import Streams
from ds_fgoffload.inspection.inventory import Inventory, StorageRecord
from ds_fgoffload.saved.eligibility import Eligibility
from ds_fgoffload.saved.saved_tensors import KeptTensor
from ds_fgoffload.saved.tensors import WeakStorage, storage_identity


class Watcher:
    """Records each micro-batch of ``root`` anew; :attr:`inventory` is the latest that has ended its forward.

    Args:
        root: its forward is that of a micro-batch.
        streams: of the device it runs on. Its device is waited for at each save and use, so that times are true.
        begins: called where a micro-batch with gradients begins, before anything is recorded; it may raise.
    """

    def __init__(self, root: nn.Module, streams: Streams, begins: Callable[[], None] = lambda: None) -> None:
        self.inventory = Inventory()
        self._next = self.inventory
        self._root = root
        self._streams = streams
        self._begins = begins
        self._eligibility = Eligibility(root, 0, streams.device)
        self._open = ExitStack()
        self._watching = False
        self._stack: list[tuple[str, nn.Module]] = []
        self._seen: dict[int, _Seen] = {}
        self._began_s = 0.0
        self._producers = _Producers()
        self._handles = [
            root.register_forward_pre_hook(self._begin, prepend=True),
            root.register_forward_hook(self._end),
            root.register_forward_hook(self._after, always_call=True),
        ]
        for name, module in root.named_modules():
            if module is not root:
                self._handles += [
                    module.register_forward_pre_hook(partial(self._enter, name), prepend=True),
                    module.register_forward_hook(self._leave, always_call=True),
                ]

    @property
    def latest(self) -> Inventory:
        """:attr:`inventory`, or where no forward has ended, what was saved in the one that raised."""
        return self._next if self.inventory.forward_ms is None else self.inventory

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._close()

    def _begin(self, root: nn.Module, _arguments: object) -> None:
        self._close()
        if not torch.is_grad_enabled() or graph_task_id() != -1:
            return
        self._begins()
        self._next = Inventory()
        self._seen = {}
        self._eligibility.refresh()
        self._began_s = self._now_s()
        self._watching = True
        self._producers.clear()
        self._open.enter_context(self._producers)
        self._open.enter_context(saved_tensors_hooks(partial(self._pack, self._next), _unpack))
        self._enter("", root, ())

    def _end(self, root: nn.Module, _arguments: object, _output: object) -> None:
        if self._watching:
            self._leave(root, (), None)
            self._next.forward_ms = self._ms()
            for seen in self._seen.values():
                seen.look_who_holds_it()
            self.inventory = self._next

    def _after(self, _root: nn.Module, _arguments: object, _output: object) -> None:
        """Also of a forward that raised, which is none to tell about."""
        self._close()

    def _close(self) -> None:
        self._open.close()
        self._watching = False
        self._stack.clear()

    def _enter(self, name: str, module: nn.Module, _arguments: object) -> None:
        if self._watching and graph_task_id() == -1:
            self._stack.append((name, module))
            self._next.classes[name] = type(module).__name__
            self._next.calls[name] = self._next.calls.get(name, 0) + 1

    def _leave(self, module: nn.Module, _arguments: object, _output: object) -> None:
        while any(entry[1] is module for entry in self._stack):
            if self._stack.pop()[1] is module:
                return

    def _pack(self, inventory: Inventory, tensor: torch.Tensor) -> KeptTensor:
        if graph_task_id() != -1 or not self._stack:
            return KeptTensor(tensor)
        kept = _Recorded(tensor)
        module = self._stack[-1][1]
        skip = self._eligibility.skip_reason(tensor, module)
        if skip in _NO_ACTIVATION:
            return kept
        key = storage_identity(tensor)
        seen = self._seen.get(key)
        if seen is None or not seen.alive():
            record = StorageRecord(
                size_bytes=tensor.untyped_storage().nbytes(),
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                producer=self._producers.of(tensor),
                skip=skip,
                saved_in=[],
                saved_at_ms=self._ms(),
            )
            seen = self._seen[key] = _Seen(tensor, record)
            inventory.records.append(record)
        seen.record.saved_in.append(tuple(name for name, _ in self._stack))
        seen.kept.append(weakref.ref(kept))
        kept.used = partial(self._note_use, seen.record)
        return kept

    def _note_use(self, record: StorageRecord) -> None:
        if record.used_at_ms is None:
            record.used_at_ms = self._ms()

    def _now_s(self) -> float:
        self._streams.synchronize(self._streams.fence(self._streams.compute()))
        return time.perf_counter()

    def _ms(self) -> float:
        return (self._now_s() - self._began_s) * 1e3


class _Recorded(KeptTensor):
    """A tensor held for autograd, which tells of its first use."""

    __slots__ = ("__weakref__", "used")

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.used: Callable[[], None] | None = None


class _Seen:
    """A storage in the micro-batch that is running."""

    def __init__(self, tensor: torch.Tensor, record: StorageRecord) -> None:
        self._storage = WeakStorage(tensor)
        self.record = record
        self.kept: list[weakref.ref[_Recorded]] = []

    def alive(self) -> bool:
        return not self._storage.is_gone()

    def look_who_holds_it(self) -> None:
        ours = [kept for ref in self.kept if (kept := ref()) is not None]
        if ours:
            # Each of ours is a tensor of its own; what is beyond them belongs to someone else.
            self.record.held = _holders(ours[0].tensor()) > len(ours)


def _holders(tensor: torch.Tensor) -> int:
    """Tensors that hold the storage of ``tensor``."""
    storage = tensor.untyped_storage()
    return int(storage_users(storage_address(storage))) - _COUNTED_BY_LOOKING


def _counted_by_looking() -> int:
    alone = torch.empty(1).untyped_storage()
    return int(storage_users(storage_address(alone)))


_COUNTED_BY_LOOKING = _counted_by_looking()
_NO_ACTIVATION = frozenset({"parameter", "buffer", "empty"})


def _unpack(kept: KeptTensor) -> torch.Tensor:
    if type(kept) is _Recorded and kept.used is not None:
        kept.used()
    return kept.tensor()


class _Producers(TorchDispatchMode):  # type: ignore[misc]
    """Remembers, for each storage, the last operation that wrote it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._by_storage: dict[int, str] = {}

    def clear(self) -> None:
        self._by_storage.clear()

    def of(self, tensor: torch.Tensor) -> str:
        name = self._by_storage.get(storage_identity(tensor), "input")
        if name.startswith(("empty", "new_empty", "input")) and tensor.grad_fn is not None:
            return type(tensor.grad_fn).__name__.removesuffix("Backward0")  # a kernel of someone's own wrote it
        return name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if _has_storage(leaf)]
        if made:
            schema = getattr(func, SCHEMA, None)
            given = {storage_identity(leaf) for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
            writes = schema is not None and schema.is_mutable
            name = getattr(func, "overloadpacket", func).__name__
            for tensor in made:
                key = storage_identity(tensor)
                if writes or key not in given:
                    self._by_storage[key] = name
        return out


def _has_storage(leaf: Any) -> bool:
    return type(leaf) in {torch.Tensor, nn.Parameter} and leaf.layout is torch.strided
