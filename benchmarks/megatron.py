"""Megatron-Core's fine-grained activation offloading around the modules of the benchmarks' stacks.

Its file is loaded alone (``pip install --no-deps megatron-core``); the package around it needs TransformerEngine. The
three names that it takes from there are replaced by what they amount to here: no CUDA graph is captured, no ranges are
marked for a profiler, and TransformerEngine's switch for its own layers has no layers to speak to.

The layers below call its interface where Megatron's ``TransformerLayer``, ``TEGroupedMLP`` and ``GPTModel`` do, with
the same groups, commits and tensors to be released by force: ``attn_norm`` and ``mlp_norm`` are committed after the
residual was added, ``expert_fc1`` after the product, ``moe_act`` after ``fc2``. For a dense MLP Megatron has no groups:
there the activation is committed like its ``core_attn``, and ``down_proj`` like its ``attn_proj``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.modes import Job, Run, replaced_forwards

FILE = "megatron/core/pipeline_parallel/fine_grained_activation_offload.py"


def load() -> ModuleType:
    """Megatron-Core's module. Raises ``ModuleNotFoundError`` if the package is not installed."""
    path = next((path for place in sys.path if (path := Path(place or ".") / FILE).is_file()), None)
    if path is None:
        raise ModuleNotFoundError("megatron-core is not installed: pip install --no-deps megatron-core")
    with _stand_ins():
        specification = importlib.util.spec_from_file_location("fine_grained_activation_offload", path)
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    return module


STAND_INS: Mapping[str, Mapping[str, Any]] = {
    "megatron": {},
    "megatron.core": {},
    "megatron.core.transformer": {},
    "megatron.core.transformer.cuda_graphs": {"is_graph_capturing": lambda: False},
    "megatron.core.utils": {"nvtx_range_push": lambda *_: None, "nvtx_range_pop": lambda *_: None},
    "megatron.core.extensions": {},
    "megatron.core.extensions.transformer_engine": {"cpu_offload": SimpleNamespace(CPUOffloadEnabled=False)},
}


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in STAND_INS}
    for name, contents in STAND_INS.items():
        module = ModuleType(name)
        module.__path__ = []  # a package, in which the others are found
        vars(module).update(contents)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@contextlib.contextmanager
def megatron(job: Job, *, fraction: float = 1.0, in_flight: int | None = None) -> Iterator[Run]:
    """A mode of the comparison.

    Args:
        job: what is trained.
        fraction: Megatron's ``activation_offload_fraction``, of groups.
        in_flight: its ``fine_grained_offloading_max_inflight_offloads``; None: no cap.
    """
    package = load()
    package.print_offload_summary_table = lambda _bytes_by_group: None  # it wants a process group, to print
    interface = package.FineGrainedActivationOffloadingInterface
    interface.reset_instance()
    for parameter in job.model.parameters():
        interface.mark_not_offload(parameter)

    run = Run(job.step)

    def step() -> torch.Tensor:
        interface.init_chunk_handler(
            pp_rank=0,
            vp_size=None,
            vp_stage=None,
            min_offloaded_tensor_size=1 if job.tiny else 1024 * 1024,
            delta_offload_bytes_across_pp_ranks=0,
            activation_offload_fraction=fraction,
            max_inflight_offloads=in_flight,
        )
        loss = job.step()
        interface.reset()
        run.facts["planned_gib"] = package.PipelineOffloadManager.get_instance().offload_summary_total_bytes / 2**30
        return loss

    run.step = step
    make = {"deepseek": deepseek_forwards, "llama8b": dense_forwards}[job.kind]
    try:
        # its methods import TransformerEngine's switch at each call
        with _stand_ins(), replaced_forwards(make(job.model, interface)):
            yield run
    finally:
        package.PipelineOffloadManager.OFFLOAD_MGR = None
        for parameter in job.model.parameters():
            vars(parameter).pop("_do_not_offload", None)
        gc.collect()  # its pool of pinned tensors


def deepseek_forwards(model: nn.Module, interface: Any) -> dict[nn.Module, Callable[..., torch.Tensor]]:
    """The forwards of the layers and of the routed experts."""
    forwards: dict[nn.Module, Callable[..., torch.Tensor]] = {}
    for layer in model.layers:
        norms = layer.input_layernorm, layer.post_attention_layernorm
        forwards[layer] = partial(layer_forward, interface, layer, *norms)
        forwards[layer.mlp.experts] = partial(experts_forward, interface, layer.mlp.experts)
    return forwards


def dense_forwards(model: nn.Module, interface: Any) -> dict[nn.Module, Callable[..., torch.Tensor]]:
    """The forwards of the layers and of their MLPs."""
    forwards: dict[nn.Module, Callable[..., torch.Tensor]] = {}
    for layer in model.layers:
        forwards[layer] = partial(layer_forward, interface, layer, layer.attn_norm, layer.mlp_norm)
        forwards[layer.mlp] = partial(dense_mlp_forward, interface, layer.mlp)
    return forwards


def layer_forward(
    interface: Any, layer: Any, attn_norm: nn.Module, mlp_norm: nn.Module, x: torch.Tensor, *tables: torch.Tensor
) -> torch.Tensor:
    group = interface(True, x, "attn_norm")  # noqa: FBT003 - its arguments, as Megatron gives them
    with group as residual:
        normed = attn_norm(residual)
    x = residual + layer.self_attn(normed, *tables)
    x = group.group_offload(x, forced_released_tensors=[residual])

    group = interface(True, x, "mlp_norm")  # noqa: FBT003
    with group as residual:
        normed = mlp_norm(residual)
    x = residual + layer.mlp(normed)
    out: torch.Tensor = group.group_offload(x, forced_released_tensors=[residual])
    return out


def experts_forward(interface: Any, experts: Any, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    group = interface(True, rows, "expert_fc1")  # noqa: FBT003
    with group as inputs:
        gate_up = experts.fc1(inputs, ends)
    gate_up = group.group_offload(gate_up, forced_released_tensors=[inputs])

    group = interface(True, gate_up, "moe_act")  # noqa: FBT003
    with group as inputs:
        activated = experts.act(inputs)
    out: torch.Tensor = group.group_offload(experts.fc2(activated, ends), forced_released_tensors=[inputs])
    return out


def dense_mlp_forward(interface: Any, mlp: Any, x: torch.Tensor) -> torch.Tensor:
    group = interface(True, mlp.gate_proj(x), "mlp_act")  # noqa: FBT003
    with group as gate:
        activated = mlp.act_fn(gate)
    activated = group.group_offload(activated * mlp.up_proj(x), forced_released_tensors=[gate])

    group = interface(True, activated, "mlp_down")  # noqa: FBT003
    with group as inputs:
        projected = _Product.apply(inputs, mlp.down_proj.weight)
    out: torch.Tensor = group.group_offload(projected, forced_released_tensors=[inputs])
    return out


class _Product(torch.autograd.Function):
    """A linear layer that saves its weight as it is: of the transposed view that torch's saves, Megatron makes a copy.

    (Its manager knows weights by their type and a mark on them, and TransformerEngine's layers save them so.)
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)
