"""What tells that a module must not run twice."""

import pytest
import torch
from torch import nn

from ds_fgoffload.recompute.read_state import ReadState
from ds_fgoffload.recompute.side_effects import SideEffects, objection_to
from ds_fgoffload.saved.tensors import is_plain, same_bits


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, -0.0, torch.nan]),
        torch.tensor([1.0, 0.0, torch.nan], dtype=torch.float64),
        torch.tensor([[1.0, 0.0, torch.nan]]),
        torch.tensor([1.0, 5.0, 0.0, 5.0, torch.nan])[::2],
        torch.tensor([1.0, 0.0, torch.nan]).view(torch.int32).add(torch.tensor([0, 0, 1])).view(torch.float32),
    ],
)
def test_every_bit_counts(other):
    one = torch.tensor([1.0, 0.0, torch.nan])
    assert same_bits(one, one.clone())
    assert not same_bits(one, other)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [(), (0,), (3, 2)])
def test_any_dtype_and_size(dtype, size):
    one = torch.ones(size).to(dtype)
    assert same_bits(one, one.clone())
    assert same_bits(one, torch.zeros(size).to(dtype)) == (one.numel() == 0)


def test_what_is_expanded_is_compared_where_it_lies():
    one, other = torch.zeros(2, 1).expand(2, 1 << 40), torch.zeros(2, 1).expand(2, 1 << 40)
    assert same_bits(one, other)


def test_traces_are_told_by_name():
    module = nn.Sequential(nn.BatchNorm1d(2))
    module[0].note = 1.5
    modules = tuple(module.modules())

    def after(change):
        traces = SideEffects(modules)
        change()
        return traces.found()

    assert after(lambda: None) is None
    assert after(lambda: module[0].running_var.mul_(2)) == "its forward changes the buffer running_var"
    assert after(lambda: setattr(module[0], "note", 1.5)) is None
    assert after(lambda: setattr(module[0], "note", 2.5)) == "its forward sets the attribute note of BatchNorm1d"
    assert after(lambda: setattr(module, "new", [])) == "its forward sets the attribute new of Sequential"
    assert after(lambda: delattr(module, "new")) == "its forward sets the attribute new of Sequential"
    assert after(lambda: setattr(module, "ds_note", [])) is None


def test_the_state_is_that_of_parameters_buffers_and_attributes():
    module = nn.Sequential(nn.BatchNorm1d(2))
    module.table = torch.zeros(2)
    modules = tuple(module.modules())
    reader = ReadState()
    states = [reader.now(modules)]
    for tensor in (module[0].weight, module[0].num_batches_tracked, module.table):
        tensor.data.add_(1)
        assert reader.now(modules) == states[-1]
        with torch.no_grad():
            tensor.add_(1)
        states.append(reader.now(modules))
    assert len(set(states)) == 4


def test_what_cannot_be_held():
    assert (
        objection_to([torch.zeros(1), None, 1, "a", torch.float32, slice(1), nn.Parameter(torch.zeros(1))], "got")
        is None
    )
    assert objection_to([torch.zeros(1).to_sparse()], "got") == "got a Tensor that is not a plain strided tensor"
    assert objection_to([[]], "got") == "got a list, of which it cannot be told whether it changes"
    assert not is_plain(torch.zeros(1, dtype=torch.complex64).conj())
