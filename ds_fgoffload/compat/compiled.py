"""What has to be known of ``torch.compile``: compiled code calls no hooks of the modules in it.

The hooks of the very module that was compiled run outside the graph, and autograd's hooks see all that the graph saves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ds_fgoffload.compat.private import compiled_call, eval_frame_callback, is_tracing, skip_code
from ds_fgoffload.errors import OffloadStateError

_T = TypeVar("_T")


class Uncompiled(Generic[_T]):
    """``call``, which compiled code and what Dynamo gave up on leave as it is, with all that it calls.

    While Dynamo looks on, it goes through ``torch.compiler.disable``. Else that would be a third of the host's time per
    saved tensor: any DeepSpeed engine may have compiled something (0.19.8 does where it imports its optimizers).
    """

    __slots__ = ("_call", "_disabled")

    def __init__(self, call: Callable[..., _T]) -> None:
        self._call = call
        self._disabled: Callable[..., _T] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> _T:
        return (self._call if eval_frame_callback() is None else self._disabled)(*args)


class ModuleHook:
    """A hook that is not copied with its module: a deep copy or a pickle of the module is not attached."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = Uncompiled(call)

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():  # what Dynamo sees of a hook that lies in a graph
            if is_tracing() and torch.is_grad_enabled():
                raise OffloadStateError(_NOT_WITH_JIT.format("torch.jit.trace"))
            self._call(*args)

    @property
    def __name__(self) -> str:
        # torch.jit.script asks for it first; others, which may ask too, take it for a hook without a name
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.jit"):  # noqa: SLF001
            raise OffloadStateError(_NOT_WITH_JIT.format("torch.jit.script"))
        raise AttributeError("__name__")

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_do_nothing,)


_NOT_WITH_JIT = (
    "{} of a model with offloading attached: what it makes cannot call the hooks; call "
    "ds_fgoffload.get(model).detach() before, and attach again after"
)


def _do_nothing(*_: Any) -> None:
    pass


def leave_hooks_uncompiled() -> None:
    """Keeps Dynamo from compiling a hook by itself; inside a graph it still sees one, and sees it do nothing.

    Dynamo does not compile ``nn.Module.__call__``, but goes on with what is called from there: hooks, then ``forward``.
    ``torch.compiler.disable`` would not do: a hook so marked breaks the graphs that it lies in.
    """
    if skip_code is not None:
        skip_code(ModuleHook.__call__.__code__)
        skip_code(Uncompiled.__call__.__code__)


def modules_above(name: str, root: nn.Module) -> tuple[nn.Module, ...]:
    """What the module lies in, outermost first."""
    parts = name.split(".")
    return tuple(root.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))) if name else ()


def is_compiled_away(above: Sequence[nn.Module]) -> bool:
    """Whether a module in ``above`` was compiled: by its ``compile()``, or by ``torch.compile``, which wraps it."""
    return any(compiled_call(module) is not None for module in above) or any(
        type(module).__name__ == "OptimizedModule" for module in above[:-1]
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether this very module was compiled."""
    return compiled_call(module) is not None or type(module).__name__ == "OptimizedModule"
