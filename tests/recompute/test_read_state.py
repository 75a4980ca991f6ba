"""What a forward reads besides its arguments has changed by backward: the gradients are right, or an error says so."""

from collections import deque
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

import ds_fgoffload
from ds_fgoffload.errors import OffloadStateError
from ds_fgoffload.host_memory import pool as pool_module
from ds_fgoffload.host_memory.pool import HostPool
from ds_fgoffload.recompute.read_state import ReadState

SCALE = 1.0
SETTINGS = {"nested": [SimpleNamespace(scale=1.0)]}


def by_a_helper(x):
    return x * SCALE


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Unit(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.lin, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = 1.0
        self.config = SimpleNamespace(sizes={"scale": 1.0}, inner=SimpleNamespace(scale=1.0))
        self.queue, self.slotted, self.choice = deque([1.0]), Slotted(), "tanh"
        box = [1.0]
        self.box, self.enclosing = box, lambda x: x * box[0]

    @property
    def doubled(self):
        return self.scale * 2

    def forward(self, x):
        x = self.lin(x) * self.doubled * self.factor * self.config.sizes["scale"] * self.config.inner.scale
        x = self.enclosing(by_a_helper(x)) * self.queue[0] * self.slotted.scale * SETTINGS["nested"][0].scale
        return torch.tanh(x) if self.choice == "tanh" else torch.sigmoid(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.unit, self.out = Unit(), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.unit(x)).sum()


def set_global(name, value):
    globals()[name] = value


CHANGES = {
    "the attribute scale of a Unit": lambda unit: setattr(unit, "scale", 3.0),
    "the attribute choice of a Unit": lambda unit: setattr(unit, "choice", "sigmoid"),
    "the attribute config of a Unit.sizes": lambda unit: unit.config.sizes.update(scale=3.0),
    "the attribute config of a Unit.inner.scale": lambda unit: setattr(unit.config.inner, "scale", 3.0),
    "the attribute queue of a Unit": lambda unit: unit.queue.__setitem__(0, 3.0),
    "the attribute slotted of a Unit.scale": lambda unit: setattr(unit.slotted, "scale", 3.0),
    "the attribute box of a Unit": lambda unit: unit.box.__setitem__(0, 3.0),
    "the attribute of the class Unit, factor": lambda _unit: setattr(Unit, "factor", 3.0),
    "the global SCALE": lambda _unit: set_global("SCALE", 3.0),
    "the global SETTINGS.scale": lambda _unit: setattr(SETTINGS["nested"][0], "scale", 3.0),
    "the attribute forward of a Unit": lambda unit: setattr(unit, "forward", lambda x: unit.lin(x).sin()),
    "a submodule of a Unit": lambda unit: unit._modules.update(lin=unit.other, other=unit.lin),
    "a module in it, has been deleted or replaced": lambda unit: setattr(unit, "lin", unit.other),
    "a forward hook of a Linear": lambda unit: unit.lin.register_forward_hook(lambda _m, _a, out: out * 2),
    "one of its tensors requires a gradient": lambda unit: unit.lin.weight.requires_grad_(False),
    "is another tensor now": lambda unit: setattr(unit.lin, "weight", nn.Parameter(torch.ones(8, 8))),
    "load_state_dict\\(assign=True\\)": lambda unit: unit.load_state_dict(deepcopy(unit.state_dict()), assign=True),
    "default of torch": lambda _unit: torch.set_default_dtype(torch.float64),
}


@pytest.fixture(autouse=True)
def _own_pool(monkeypatch):
    monkeypatch.setattr(pool_module, "_POOL", HostPool())


@pytest.fixture(autouse=True)
def _as_before():
    yield
    Unit.factor = SETTINGS["nested"][0].scale = 1.0
    set_global("SCALE", 1.0)
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_before_backward_is_named(net, what):
    ds_fgoffload.attach(net, {"recompute": ["unit"], "min_tensor_bytes": 0})
    x = torch.randn(4, 8)
    net(x).backward()
    loss = net(x)
    CHANGES[what](net.unit)
    with pytest.raises(OffloadStateError, match=what):
        loss.backward()


def test_a_variable_of_a_closure_is_named(net):
    scale = 1.0

    def forward(x):
        return torch.tanh(net.unit.lin(x) * scale)

    net.unit.forward = forward
    ds_fgoffload.attach(net, {"recompute": ["unit"], "min_tensor_bytes": 0})
    loss = net(torch.randn(4, 8))
    scale = 3.0
    with pytest.raises(OffloadStateError, match=r"the variable scale that .*forward encloses"):
        loss.backward()


def test_changes_between_steps_and_changes_undone_are_no_errors(net):
    plain = deepcopy(net)
    attachment = ds_fgoffload.attach(net, {"recompute": ["unit"], "min_tensor_bytes": 0})
    for step in range(3):
        for one in (plain, net):
            one.unit.scale = float(step)
            loss = one(torch.ones(4, 8) * step)
            one.unit.scale = 7.0
            one.unit.scale = float(step)
            loss.backward()
    for expected, found in zip(plain.parameters(), net.parameters(), strict=True):
        assert expected.grad is found.grad is None or torch.equal(expected.grad, found.grad)
    assert attachment.stats().units["unit"].recomputations == 3


def test_functional_call_says_so(net):
    ds_fgoffload.attach(net, {"recompute": ["unit"], "min_tensor_bytes": 0})
    weights = {name: torch.randn_like(one).requires_grad_() for name, one in net.named_parameters()}
    with pytest.raises(OffloadStateError, match="functional_call"):
        functional_call(net, weights, (torch.randn(4, 8),)).backward()


def test_a_torch_function_mode_is_refused_by_name(net):
    class Doubles(TorchFunctionMode):
        def __torch_function__(self, function, _types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return result * 2 if function is torch.tanh else result

    plain = deepcopy(net)
    attachment = ds_fgoffload.attach(net, {"recompute": ["unit"], "min_tensor_bytes": 0})
    for one in (plain, net):
        with Doubles():
            loss = one(torch.ones(4, 8))
        loss.backward()
    assert torch.equal(plain.unit.lin.weight.grad, net.unit.lin.weight.grad)
    assert "torch-function mode" in attachment.stats().units["unit"].recompute_refused


def test_nothing_of_the_user_is_held(net):
    state = ReadState().now(tuple(net.modules()))
    assert {type(value) for value in state} <= {
        type, int, float, str, bool, type(None), torch.dtype, tuple, torch.Size, torch.device}  # fmt: skip
