"""Every private name of torch and DeepSpeed that this package uses, under a name of its own, checked at import.

No other module may use one (``tests/compat/test_private.py``). What is missing is named all at once, with the versions
that have it. Names that are looked up on an object when it is there (``getattr``) are constants in capitals.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pkgutil import resolve_name
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_fgoffload.compat.versions import REMEDY, SENTENCE, installed

_missing: list[str] = []


def _optional(path: str) -> Any:
    """What is called ``path``, None if nothing is."""
    try:
        return resolve_name(path)
    except (AttributeError, ImportError):
        return None


def _needed(path: str) -> Any:
    found = _optional(path)
    if found is None:
        _missing.append(path)
    return found


def _getter(path: str) -> Any:
    """The function that reads the attribute ``path`` of an instance: as fast as to read it, and there or not now."""
    return getattr(_needed(path), "__get__", None)


def _name_in(holder: object, name: str) -> str:
    if not hasattr(holder, name):
        kind = holder if isinstance(holder, type) else type(holder)
        _missing.append(f"{kind.__module__}.{kind.__qualname__}.{name}")
    return name


# Autograd, in this thread
graph_task_id: Callable[[], int] = _needed("torch._C._current_graph_task_id")
"""The number of the backward that runs, -1 if none does."""
saved_tensors_hooks_are_allowed: Callable[[], bool] = _needed("torch._C._autograd._saved_tensors_hooks_is_enabled")
top_saved_tensors_hooks: Callable[[bool], Any] = _needed("torch._C._autograd._top_saved_tensors_default_hooks")
torch_function_depth: Callable[[], int] = _needed("torch._C._len_torch_function_stack")
is_tracing: Callable[[], bool] = _needed("torch._C._is_tracing")

# Tensors
version_counter: Callable[[torch.Tensor], int] = _getter("torch.Tensor._version")
base_of: Callable[[torch.Tensor], torch.Tensor | None] = _getter("torch.Tensor._base")
is_zerotensor: Callable[[torch.Tensor], bool] = _needed("torch.Tensor._is_zerotensor")
is_functorch_wrapped: Callable[[torch.Tensor], bool] = _needed("torch._C._functorch.is_functorch_wrapped_tensor")
increment_version: Callable[[tuple[torch.Tensor, ...]], None] = _needed("torch._C._increment_version")
preserve_version: Callable[[torch.Tensor], AbstractContextManager[Any]] = _needed(
    "torch.autograd._unsafe_preserve_version_counter"
)
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = _needed("torch._foreach_copy_")

# Storages
storage_address: Callable[[torch.UntypedStorage], int] = _getter("torch.UntypedStorage._cdata")
storage_users: Callable[[int], int] = _needed("torch._C._storage_Use_Count")
weak_storage: Callable[[torch.UntypedStorage], int] = _needed("torch.UntypedStorage._weak_ref")
storage_of_weak: Callable[[int], torch.UntypedStorage | None] = _needed("torch.UntypedStorage._new_with_weak_ptr")
weak_is_gone: Callable[[int], bool] = _needed("torch.UntypedStorage._expired")
free_weak: Callable[[int], None] = _needed("torch.UntypedStorage._free_weak_ref")

# Trees and dispatch
TreeSpec: Any = _needed("torch.utils._pytree.TreeSpec")
tree_flatten: Callable[..., tuple[list[Any], Any]] = _needed("torch.utils._pytree.tree_flatten")
tree_unflatten: Callable[..., Any] = _needed("torch.utils._pytree.tree_unflatten")
tree_leaves: Callable[..., list[Any]] = _needed("torch.utils._pytree.tree_leaves")
TorchDispatchMode: Any = _needed("torch.utils._python_dispatch.TorchDispatchMode")
SCHEMA = _name_in(torch.ops.aten.add.Tensor, "_schema")

# Modules
PARAMETERS = _name_in(nn.Module(), "_parameters")
BUFFERS = _name_in(nn.Module(), "_buffers")
MODULES = _name_in(nn.Module(), "_modules")
FORWARD_PRE_HOOKS = _name_in(nn.Module(), "_forward_pre_hooks")
FORWARD_HOOKS = _name_in(nn.Module(), "_forward_hooks")
FULL_BACKWARD_HOOK = _name_in(nn.Module(), "_is_full_backward_hook")
COMPILED_CALL = _name_in(nn.Module, "_compiled_call_impl")

# torch.compile. Where one of these is missing results are the same, and Dynamo may try to compile hooks.
eval_frame_callback: Callable[[], Any] = _optional("torch._C._dynamo.eval_frame.get_eval_frame_callback") or (
    lambda: True
)
"""None where Dynamo does not look at the frames of this thread: outside of compiled calls, nearly always."""
skip_code: Callable[[Any], None] | None = _optional("torch._dynamo.eval_frame.skip_code")

# CUDA. Absent in other builds, and then the public, slower way is taken.
CudaEventBase: Any = _optional("torch._C._CudaEventBase")
current_raw_stream: Callable[[int], int] | None = _optional("torch._C._cuda_getCurrentRawStream")
empty_host_cache: Callable[[], None] | None = _optional("torch.accelerator.empty_host_cache") or _optional(
    "torch._C._host_emptyCache"
)
"""Public since torch 2.12."""

# Processes
default_store: Callable[[], Any] = _needed("torch.distributed.distributed_c10d._get_default_store")

# DeepSpeed
MODEL_STEP = _name_in(DeepSpeedEngine, "_take_model_step")
INSTRUCTIONS = _name_in(PipelineEngine, "_INSTRUCTION_MAP")
EXTERNAL_PARAMETERS = "_external_params"
"""Set by ZeRO-3 on a module that returns a parameter or uses one of another."""
iter_params: Callable[..., Any] = _needed("deepspeed.runtime.zero.parameter_offload.iter_params")
z3_leaf_module: Callable[..., bool] = _needed("deepspeed.runtime.zero.parameter_offload.z3_leaf_module")
forward_modules: list[Any] = _needed("deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK")
"""The modules whose forward runs under ZeRO-3, which a recomputed one is taken off again."""


def compiled_call(module: nn.Module) -> Any:
    """What ``module.compile()`` has made; None if it was not called."""
    return getattr(module, COMPILED_CALL)


def missing_names(missing: list[str]) -> str:
    """What is said where ``missing`` are not there."""
    return (
        f"ds_fgoffload uses names that are not there: {', '.join(missing)} (found: {installed()}; supported: "
        f"{SENTENCE}): {REMEDY}, or a release of ds_fgoffload for these versions"
    )


if _missing:
    raise ImportError(missing_names(_missing))
