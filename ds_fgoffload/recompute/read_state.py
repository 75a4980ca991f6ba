"""What a unit's forward reads besides its arguments, so that running it again under other values is an error.

Three kinds are read at each call and compared before the forward runs again:

* tensors of the modules: which object each parameter and buffer is, its version, whether it requires a gradient;
* plain values of the modules: attributes (numbers, strings, containers, objects with attributes such as a config),
  class attributes, which submodules and hooks there are;
* globals and closure variables that the forward's own Python code, and Python functions which that calls, name. The
  code is looked through once, at the unit's first call.

Nothing here is kept but plain values, names and identities, and weak references to functions, classes and modules: a
graph that holds a state holds no object of the user.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import nn

from ds_fgoffload.compat.compiled import ModuleHook
from ds_fgoffload.compat.private import (
    BUFFERS,
    EXTERNAL_PARAMETERS,
    FORWARD_HOOKS,
    FORWARD_PRE_HOOKS,
    FULL_BACKWARD_HOOK,
    MODULES,
    PARAMETERS,
)
from ds_fgoffload.saved.tensors import version_of

State = tuple[object, ...]
"""Equal to another if nothing that the forward reads was seen to differ."""

OF_DEEPSPEED = ("ds_", "_ds_", "applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn", EXTERNAL_PARAMETERS)
"""Attributes that ZeRO-3 sets on modules as they run, for itself."""

_OF_TORCH = frozenset(nn.Module().__dict__) | {FULL_BACKWARD_HOOK, "_is_hf_initialized"}
"""Attributes of every module; those that matter are read by name. ``training`` is restored, not compared."""
_VALUES = frozenset({NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
                     torch.memory_format, torch.Size})  # fmt: skip
_DEPTH = 4
"""How deep containers and objects are looked into; what lies deeper is told apart by its identity."""
_OPAQUE = (nn.Module, ModuleType, FunctionType, MethodType, type)
_LIBRARIES = frozenset(sys.stdlib_module_names) - {"types", "argparse", "collections"} | {
    "builtins", "torch", "deepspeed", "numpy", "ds_fgoffload", "triton"}  # fmt: skip
"""Objects and functions of these are not looked into."""
_MISSING = "missing"


class ReadState:
    """Reads what the forward of ``modules``, a module and all below it, reads: the same ones at each call."""

    def __init__(self) -> None:
        self._reads: tuple[tuple[str, Callable[[], object]], ...] | None = None

    def now(self, modules: Sequence[nn.Module]) -> State:
        """The state at this moment. No device is asked."""
        return tuple(_Reading().of(modules, self._named(modules)))

    def difference(self, modules: Sequence[nn.Module], before: State) -> str:
        """What differs from ``before``, in words; empty if nothing does."""
        reading = _Reading(labels=[])
        now = reading.of(modules, self._named(modules))
        if tuple(now) == before:
            return ""
        assert reading.labels is not None
        for value, was, label in zip(now, before, reading.labels, strict=False):
            if value != was:
                return label
        return "the set of attributes of its modules"

    def _named(self, modules: Sequence[nn.Module]) -> tuple[tuple[str, Callable[[], object]], ...]:
        if self._reads is None:
            self._reads = tuple(_reads_of_code(modules))
        return self._reads


class _Reading:
    """One pass over everything, into a flat list; ``labels`` gets a name for each entry, for messages alone."""

    def __init__(self, labels: list[str] | None = None) -> None:
        self.labels = labels
        self._found: list[object] = []
        self._seen: set[int] = set()

    def of(self, modules: Sequence[nn.Module], named: Sequence[tuple[str, Callable[[], object]]]) -> list[object]:
        found = self._found
        found.extend(
            (
                torch.get_default_dtype(),
                torch.are_deterministic_algorithms_enabled(),
                torch.get_float32_matmul_precision(),
            )
        )
        self._name("a default of torch (dtype, deterministic algorithms, float32 matmul precision)")
        for number, module in enumerate(modules):
            self._module(module, is_unit=not number)
        for label, read in named:
            self.value(read(), label, _DEPTH)
        return found

    def value(self, value: Any, label: str, depth: int) -> None:  # noqa: C901, PLR0912 - one question after another
        """Puts ``value`` down, by what can be compared later without holding it."""
        found = self._found
        kind: Any = type(value)
        if kind in _VALUES:
            found.append(kind)  # 1, 1.0 and True are equal, and not the same to an operator
            found.append(value)
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif not depth or isinstance(value, _OPAQUE):
            found.append(id(value))
        elif isinstance(value, Enum | slice):
            found.append(repr(value))
        elif isinstance(value, list | tuple | set | frozenset | deque):
            found.append(len(value))
            for entry in value:
                kind = type(entry)
                if kind in _VALUES:
                    found.append(kind)
                    found.append(entry)
                else:
                    self.value(entry, label, depth - 1)
        elif isinstance(value, dict):
            self.value(tuple(value), label, depth)
            self.value(tuple(value.values()), label, depth)
        elif isinstance(value, partial):
            self.value((value.func, value.args, value.keywords), label, depth)
        elif _has_attributes(kind):
            found.append(kind.__qualname__)
            if id(value) not in self._seen:  # a config that many modules share is read once
                self._seen.add(id(value))
                slots = {name: getattr(value, name, _MISSING) for name in _slots(kind)}
                attributes = getattr(value, "__dict__", slots)
                for name, entry in ({**slots, **attributes} if slots else attributes).items():
                    kind = type(entry)
                    if kind in _VALUES and self.labels is None:  # nearly all, without a call for each
                        found.append(kind)
                        found.append(entry)
                    else:
                        self.value(entry, label if self.labels is None else f"{label}.{name}", depth - 1)
        else:
            found.append(id(value))
        self._name(label)

    def _module(self, module: nn.Module, *, is_unit: bool) -> None:  # noqa: C901 - one pass, for its cost
        found = self._found
        attributes = module.__dict__
        label = ""
        for name, value in attributes.items():
            if name in _OF_TORCH or (name[0] in "_dap" and name.startswith(OF_DEEPSPEED)):
                continue
            if self.labels is not None:
                label = f"the attribute {name} of a {type(module).__name__}"
            kind = type(value)
            if kind in _VALUES:
                found.append(kind)
                found.append(value)
                self._name(label)
            else:
                self.value(value, label, _DEPTH)
        # values(), because ZeRO-3's own dictionary gathers the parameters that are looked up by name
        for tensors in (attributes[PARAMETERS], attributes[BUFFERS]):
            for tensor in tensors.values():
                if tensor is not None:
                    self._tensor(tensor)
        for child in attributes[MODULES].values():
            found.append(id(child))
        self._name(f"a submodule of a {type(module).__name__}")
        if not is_unit:  # those on the unit itself are none of it, and ran in forward
            for hooks in (attributes[FORWARD_PRE_HOOKS], attributes[FORWARD_HOOKS]):
                if hooks:
                    found.extend(id(hook) for hook in hooks.values() if type(hook) is not ModuleHook)
            self._name(f"a forward hook of a {type(module).__name__}")

    def _tensor(self, tensor: torch.Tensor) -> None:
        found = self._found
        found.append(id(tensor))
        self._name(REPLACED)
        found.append(version_of(tensor))
        self._name(CHANGED)
        found.append(tensor.requires_grad)
        self._name("whether one of its tensors requires a gradient")

    def _name(self, label: str) -> None:
        if self.labels is not None:
            self.labels.extend([label] * (len(self._found) - len(self.labels)))


CHANGED = "a tensor changed in place"
REPLACED = "a tensor replaced by another"


@cache
def _has_attributes(kind: Any) -> bool:
    root = kind.__module__.partition(".")[0]
    return root not in _LIBRARIES and (kind.__dictoffset__ != 0 or bool(_slots(kind)))


@cache
def _slots(kind: Any) -> tuple[str, ...]:
    named = (vars(cls).get("__slots__", ()) for cls in kind.__mro__)
    names = [name for slots in named for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if name not in {"__dict__", "__weakref__"} and not name.startswith("__"))


def _reads_of_code(  # noqa: C901, PLR0912 - one walk over what code can name
    modules: Sequence[nn.Module],
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What the forwards of ``modules`` name outside of them: class attributes, globals, variables of closures."""
    waiting: list[tuple[Any, type | None]] = []
    for module in modules:
        forward = module.__dict__.get("forward", type(module).forward)
        waiting.append((getattr(forward, "__func__", forward), type(module)))
        waiting += [(value, None) for value in module.__dict__.values() if isinstance(value, FunctionType)]
    seen: set[tuple[CodeType, type | None]] = set()
    given: set[tuple[int, str]] = set()
    while waiting:
        function, owner = waiting.pop()
        wrapped = getattr(function, "__wrapped__", None)
        if isinstance(wrapped, FunctionType):
            waiting.append((wrapped, owner))
        if not isinstance(function, FunctionType) or (function.__code__, owner) in seen or _of_library(function):
            continue
        seen.add((function.__code__, owner))
        names = set(_names_in(function.__code__))
        held = weakref.ref(function)
        for number, (name, cell) in enumerate(zip(function.__code__.co_freevars, _cells(function), strict=True)):
            content = _enclosed(held, number)
            if isinstance(content, FunctionType):
                waiting.append((content, owner))
            if not isinstance(content, type) and (id(cell), name) not in given:  # __class__, for super()
                given.add((id(cell), name))
                yield f"the variable {name} that {function.__qualname__} encloses", partial(_enclosed, held, number)
        holders: list[tuple[str, Any, Callable[[], Any]]] = [
            ("the global", function.__globals__, partial(_globals_of, held))
        ]
        for name in sorted(names):
            content = function.__globals__.get(name)
            if isinstance(content, ModuleType) and content.__name__.partition(".")[0] not in _LIBRARIES:
                holders.append((f"{content.__name__}'s", vars(content), partial(_vars_of, weakref.ref(content))))
        if owner is not None:
            holders += [(f"the attribute of the class {cls.__name__},", vars(cls), partial(_vars_of, weakref.ref(cls)))
                        for cls in owner.__mro__
                        if cls.__module__.partition(".")[0] not in _LIBRARIES]  # fmt: skip
        for what, holder, find in holders:
            for name in sorted(names & holder.keys()):
                content = holder[name]
                content = getattr(content, "__func__", content)
                if isinstance(content, property):
                    content = content.fget
                if isinstance(content, FunctionType):
                    waiting.append((content, owner))
                if (id(holder), name) in given or isinstance(content, ModuleType | type):
                    continue
                given.add((id(holder), name))
                yield f"{what} {name}", partial(_entry, find, name)


def _cells(function: FunctionType) -> tuple[CellType, ...]:
    cells: tuple[CellType, ...] | None = function.__closure__
    return () if cells is None else cells


def _of_library(function: FunctionType) -> bool:
    return str(function.__module__).partition(".")[0] in _LIBRARIES


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names_in(constant)


def _enclosed(function: weakref.ref[FunctionType], number: int) -> object:
    found = function()
    try:
        return _MISSING if found is None else _cells(found)[number].cell_contents
    except ValueError:  # nothing was assigned yet
        return _MISSING


def _globals_of(function: weakref.ref[FunctionType]) -> Any:
    found = function()
    return {} if found is None else found.__globals__


def _vars_of(holder: weakref.ref[Any]) -> Any:
    found = holder()
    return {} if found is None else vars(found)


def _entry(find: Callable[[], Any], name: str) -> object:
    return find().get(name, _MISSING)
