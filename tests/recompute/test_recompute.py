"""Units under ``recompute``: the same bits, made once, dropped in between; and what is refused, by name and reason."""

import gc
import logging
import weakref
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from deepspeed.utils import logger
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import ds_fgoffload
from ds_fgoffload.device.streams import SynchronousStreams
from ds_fgoffload.errors import OffloadStateError
from ds_fgoffload.host_memory import pool as pool_module
from ds_fgoffload.host_memory.pool import HostPool
from ds_fgoffload.recompute import call as recompute_call
from ds_fgoffload.recompute import cost as recompute_cost
from ds_fgoffload.saved.tensors import checksum

WIDTH = 16


class Pair(NamedTuple):
    one: torch.Tensor
    two: torch.Tensor


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(pool_module, "_POOL", HostPool())


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.WARNING, logger=logger.name)
    return lambda: [r.getMessage() for r in caplog.records if "fine_grained_offload" in r.getMessage()]


class RmsNorm(nn.Module):
    """As in Hugging Face's Llama: several tensors are saved in float32."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x, *, scale=1.0):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype) * scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RmsNorm()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm2 = nn.LayerNorm(WIDTH)
        self.fc1, self.act, self.drop, self.fc2 = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        h = self.norm(x)
        x = x + F.softmax(self.q(h) * self.k(h), -1) * self.v(h)
        return x + self.fc2(self.drop(self.act(self.fc1(self.norm2(x)))))


CHEAP = ["*.norm", "*.norm2", "*.act", "*.drop"]


def blocks(count=2):
    return nn.Sequential(*(Block() for _ in range(count)))


def data(step=0, size=(3, WIDTH)):
    return torch.randn(*size, generator=torch.Generator().manual_seed(step))


def train(model, steps=3, loss_of=lambda model, step: model(data(step)).square().sum()):
    found = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        found.append(loss.detach())
    return found


def grads_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        same = one is other if one is None or other is None else torch.equal(one.nan_to_num(), other.nan_to_num())
        assert same, f"result {number} differs"


def compare(model, run=train, recompute=CHEAP, **section):
    """What ``run`` returns, all gradients and the state of the random generator are the same on a copy not attached."""
    plain = deepcopy(model)
    torch.manual_seed(1)
    expected = [*run(plain), *grads_of(plain), torch.get_rng_state()]
    attachment = ds_fgoffload.attach(model, {"recompute": recompute, "min_tensor_bytes": 0, **section})
    torch.manual_seed(1)
    found = [*run(model), *grads_of(model), torch.get_rng_state()]
    assert_same(found, expected)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert attachment.stats().live_host_bytes == 0
    assert attachment._recomputer is None or not attachment._recomputer._outputs
    return attachment


def recomputations(attachment):
    return {name: unit.recomputations for name, unit in attachment.stats().units.items()}


def refused(attachment):
    return {name: unit.recompute_refused for name, unit in attachment.stats().units.items() if unit.recompute_refused}


class Around(nn.Module):
    """A unit between two linear layers: the second saves what the unit gives."""

    def __init__(self, unit, use=None):
        super().__init__()
        self.before, self.unit, self.after = nn.Linear(WIDTH, WIDTH), unit, nn.Linear(WIDTH, WIDTH)
        self.use = use or (lambda unit, after, x: after(unit(x)))

    def forward(self, x):
        return self.use(self.unit, self.after, self.before(x))


class Function(nn.Module):
    """A module whose forward is ``function(module, x)``."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


# --- exact, once, and gone in between


@pytest.mark.parametrize("section", [{}, {"modules": ["*"]}, {"modules": ["*.norm", "*.fc2"]}, {"modules": CHEAP}])
def test_blocks_are_exact_and_every_call_is_made_again_once(section):
    attachment = compare(blocks(), **section)
    assert refused(attachment) == {}
    counts = recomputations(attachment)
    assert {name: n for name, n in counts.items() if n} == {
        f"{block}.{unit}": 3 for block in range(2) for unit in ("norm", "norm2", "act", "drop")
    }
    assert attachment.stats().recompute_ms > 0


def test_a_norm_that_feeds_three_projections_runs_again_once_per_micro_batch(monkeypatch):
    runs = []
    forward, note = RmsNorm.forward, runs.append
    monkeypatch.setattr(RmsNorm, "forward", lambda self, x: note(0) or forward(self, x))
    model = blocks(1)
    ds_fgoffload.attach(model, {"recompute": ["*.norm"]})
    train(model, 1)
    assert len(runs) == 3  # forward, the trial, backward
    runs.clear()
    train(model, 4)
    assert len(runs) == 2 * 4


def weak(tensor):
    return StorageWeakRef(tensor.untyped_storage())


@pytest.mark.parametrize("recompute", [None, ["unit"]])
def test_what_was_saved_and_the_output_are_gone_after_forward_and_after_their_use(recompute):
    given, inside = [], []
    note_given, note_inside = given.append, inside.append

    def norm(_module, x):
        wide = x.exp()
        out = wide * wide.sin()
        note_given(weak(out))
        note_inside(weak(wide))
        return out

    model = Around(Function(norm), lambda unit, after, x: sum(after(part) for part in [unit(x)] * 3))
    if recompute:
        ds_fgoffload.attach(model, {"recompute": recompute})
    gc.disable()
    try:
        for step in range(3):
            loss = model(data(step)).sum()
            assert all(one.expired() == bool(recompute) for one in (given[-1], inside[-1])), step
            loss.backward()
            assert all(one.expired() for one in given + inside)
            del loss
    finally:
        gc.enable()


def test_the_input_lies_on_the_host_if_the_unit_is_offloaded_too():
    seen = []
    model = Around(nn.GELU(), lambda unit, after, x: seen.append(weak(x)) or after(unit(x)))
    attachment = ds_fgoffload.attach(model, {"modules": ["unit"], "recompute": ["unit"], "min_tensor_bytes": 0})
    for step in range(3):
        loss = model(data(step)).sum()
        assert seen[-1].expired()
        assert attachment.stats().live_host_bytes == 3 * WIDTH * 4
        loss.backward()
        assert attachment.stats().live_host_bytes == 0
    stats = attachment.stats()
    assert stats.offloaded_bytes == stats.reloaded_bytes == 3 * 3 * WIDTH * 4
    assert recomputations(attachment) == {"unit": 3}


def test_recomputed_bytes_are_what_had_been_dropped():
    attachment = compare(Around(nn.Sequential(nn.Tanh(), nn.Sigmoid())), recompute=["unit"])
    # what tanh gives, which both save, and what sigmoid gives, which it and the layer after it save
    assert attachment.stats().recomputed_bytes == 3 * 2 * 3 * WIDTH * 4


# --- what a unit may be given, may give, and what may be done with it


def views(unit, after, x):
    y = unit(x)
    one, two = y.chunk(2, -1)
    return after(y.reshape(-1, WIDTH)) + after(y.flip(0)) * after(torch.cat([two, one], -1)).sum() + (one * two).sum()


def transposed(unit, after, x):
    y = unit(x)
    return after(y) + (y.t() @ y).sum() + (y[1:] * y[:-1]).sum() + (y.view(torch.int32) % 3 * y).sum()


@pytest.mark.parametrize("use", [views, transposed])
def test_views_of_the_output(use):
    attachment = compare(Around(nn.Tanh(), use), recompute=["unit"])
    assert recomputations(attachment) == {"unit": 3}


def use_pair(unit, after, x):
    pair = unit(Pair(x, x.sin()))
    return after(pair.one) * pair.two


def use_cat(unit, after, x):
    parts = unit(x)
    return after(torch.cat(parts, -1)) * parts[0].sum()


def use_halves(unit, after, x):
    return after(torch.cat([unit(x[:, :5]), unit(x[:, 5:])], -1))


def use_index(unit, after, x):
    y, index = unit(x)
    return after(y)[:, index]


STRUCTURES = {
    "keyword": (lambda _, x, *, scale: x.tanh() * scale, lambda unit, after, x: after(unit(x, scale=2.0))),
    "keyword tensor": (lambda _, x, *, y: (x * y).tanh(), lambda unit, after, x: after(unit(x, y=x.exp()))),
    "tuple": (lambda _, x: (x.tanh(), x.sigmoid()), lambda unit, after, x: after(unit(x)[1]) * unit(x)[0]),
    "one of several": (lambda _, x: (x.tanh(), x.sigmoid()), lambda unit, after, x: after(unit(x)[1])),
    "dict": (lambda _, x: {"a": x.tanh(), "n": 3, "none": None}, lambda unit, after, x: after(unit(x)["a"])),
    "named tuple": (lambda _, pair: Pair(pair.one.tanh(), pair.two.exp()), use_pair),
    "list of arguments": (lambda _, xs: xs[0].tanh() * xs[1], lambda unit, after, x: after(unit([x, x.sin()]))),
    "views of one": (lambda _, x: x.tanh().chunk(2, -1), use_cat),
    "an integer output": (lambda _, x: (x.tanh(), x.argmax(-1)), use_index),
    "a 0-dim tensor": (lambda _, x, y: x.tanh() * y, lambda unit, after, x: after(unit(x, x.sum()))),
    "nothing to differentiate": (lambda _, x: x.tanh(), lambda unit, after, x: after(unit(x.detach()))),
    "the same argument twice": (lambda _, x, y: x.tanh() * y, lambda unit, after, x: after(unit(x, x))),
    "a view as argument": (lambda _, x: x.tanh() * x, use_halves),
    "a parameter as argument": (lambda _, x, w: x.tanh() * w, lambda unit, after, x: after(unit(x, after.bias))),
    "an expanded output": (lambda _, x: x.tanh().sum().expand(3, WIDTH), lambda unit, after, x: after(unit(x))),
    "nan": (lambda _, x: (x - 100).sqrt(), lambda unit, after, x: after(unit(x)).nan_to_num()),
}


@pytest.mark.parametrize("section", [{}, {"modules": ["*"]}])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures(structure, section):
    function, use = STRUCTURES[structure]
    attachment = compare(Around(Function(function), use), recompute=["unit"], **section)
    assert refused(attachment) == {}
    assert recomputations(attachment)["unit"] >= 3


ALIASES = {
    "itself": (nn.Identity(), 0),
    "a view": (nn.Flatten(0), 0),
    "dropout that drops nothing": (nn.Dropout(0.0), 3),
    "a parameter": (Function(lambda module, x: x + module.weight), 0),
}


@pytest.mark.parametrize("what", ["itself", "a view"])
def test_an_output_that_is_the_argument_is_no_output(what):
    use = lambda unit, after, x: after(unit(x.sin()).view(-1, WIDTH))  # noqa: E731
    attachment = compare(Around(ALIASES[what][0], use), recompute=["unit"])
    assert recomputations(attachment) == {"unit": 0}


def test_a_unit_that_hands_on_what_another_gave():
    model = Around(
        nn.Sequential(nn.Tanh(), nn.Identity(), nn.Flatten(0)), lambda u, after, x: after(u(x).view(-1, WIDTH))
    )
    attachment = compare(model, recompute=["unit.*"])
    assert recomputations(attachment) == {"unit.0": 3, "unit.1": 0, "unit.2": 0}


def test_units_in_a_row_are_made_again_in_a_row():
    attachment = compare(Around(nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.GELU())), recompute=["unit.*"])
    assert recomputations(attachment) == {"unit.0": 3, "unit.1": 3, "unit.2": 3}


def test_an_output_changed_before_it_is_saved_is_kept():
    attachment = compare(Around(nn.GELU(), lambda unit, after, x: after(unit(x).add_(1))), recompute=["unit"])
    assert attachment.stats().recomputed_bytes == 0


@pytest.mark.parametrize("unit", [nn.Tanh(), nn.GELU()])
@pytest.mark.parametrize("recompute", [[], ["unit"]])
def test_an_output_changed_after_it_was_saved_is_an_error_as_without(unit, recompute):
    def use(unit, after, x):
        y = unit(x)
        z = after(y)
        y.mul_(2)
        return z

    model = Around(unit, use)
    if recompute:
        ds_fgoffload.attach(model, {"recompute": recompute})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(data()).sum().backward()


@pytest.mark.parametrize("recompute", [[], ["unit"]])
def test_an_argument_changed_after_the_call_is_an_error_as_without(recompute):
    def use(unit, after, x):
        x = x.sin()
        y = after(unit(x))
        x.mul_(2)
        return y

    model = Around(nn.GELU(), use)
    if recompute:
        ds_fgoffload.attach(model, {"recompute": recompute})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(data()).sum().backward()


OVERWRITTEN = (
    "its output is overwritten afterwards by something that does not increase the version counter (a collective in "
    "place, a kernel that writes over its input)"
)


def _double_unseen(y):
    """As a collective or a kernel of Triton does that writes over its input: no version is counted up."""
    y.data.mul_(2)
    return y


class _ReducedInPlace(torch.autograd.Function):
    """A row-parallel layer's sum over ranks, as Megatron and DeepSpeed write it."""

    @staticmethod
    def forward(ctx, y):
        return _double_unseen(y)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize("unit", [nn.GELU(), nn.Linear(WIDTH, WIDTH)])
def test_an_output_overwritten_unseen_before_it_is_saved_is_kept(unit, warnings):
    attachment = compare(Around(unit, lambda unit, after, x: after(_ReducedInPlace.apply(unit(x)))), recompute=["unit"])
    assert refused(attachment) == {"unit": OVERWRITTEN}
    assert len(warnings()) == 1


def test_an_output_overwritten_unseen_between_two_units_is_kept():
    unit = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.GELU()])
    use = lambda unit, after, x: after(unit[1](_ReducedInPlace.apply(unit[0](x))))  # noqa: E731
    attachment = compare(Around(unit, use), recompute=["unit.*"])
    assert refused(attachment) == {"unit.0": OVERWRITTEN}
    assert recomputations(attachment)["unit.1"] == 3


def test_an_output_that_is_zero_at_first_is_watched_until_it_is_not():
    unit = nn.Linear(WIDTH, WIDTH)
    nn.init.zeros_(unit.weight)
    nn.init.zeros_(unit.bias)

    def step(model, number):
        with torch.no_grad():  # as an optimizer's step
            model.unit.weight.add_(number)
        return model(data(number)).square().sum()

    use = lambda unit, after, x: after(_ReducedInPlace.apply(unit(x)))  # noqa: E731
    attachment = compare(Around(unit, use), partial(train, loss_of=step), recompute=["unit"])
    assert refused(attachment) == {"unit": OVERWRITTEN}


def test_an_argument_overwritten_unseen_after_the_call_is_an_error():
    def use(unit, after, x):
        x = x.sin()
        y = after(unit(x))
        _double_unseen(x)
        return y

    model = Around(nn.ReLU(), use)  # which saves its output, and so does not mind
    ds_fgoffload.attach(model, {"recompute": ["unit"], "min_tensor_bytes": 0})
    with pytest.raises(OffloadStateError, match="unit cannot be recomputed in backward: an argument"):
        model(data()).sum().backward()


def test_outputs_are_watched_in_the_first_micro_batch_only(monkeypatch):
    sums = []
    monkeypatch.setattr(recompute_call, "checksum", lambda tensor: sums.append(tensor) or checksum(tensor))
    model = Around(nn.GELU())
    ds_fgoffload.attach(model, {"recompute": ["unit"]})
    train(model, 1)
    assert sums
    sums.clear()
    train(model, 2)
    assert not sums


def test_a_parameter_changed_before_backward_is_an_error():
    model = Around(RmsNorm())
    ds_fgoffload.attach(model, {"recompute": ["unit"]})
    train(model, 2)
    loss = model(data()).sum()
    with torch.no_grad():
        model.unit.weight.add_(1)
    with pytest.raises(RuntimeError, match="unit cannot be recomputed in backward: one of its parameters or buffers"):
        loss.backward()
    model.zero_grad()
    compare_after(model)


def compare_after(model):
    """The next step is right."""
    plain = deepcopy(model)
    assert_same([*train(model, 1), *grads_of(model)], [*train(plain, 1), *grads_of(plain)])


@pytest.mark.parametrize("first", [True, False])
def test_a_tensor_changed_within_the_forward_is_an_error_in_backward_as_without(first):
    fails = []

    def forward(_module, x):
        y = x.exp()
        z = y.sin()
        if fails:
            y.mul_(2)
        return z

    model = Around(Function(forward))
    attachment = ds_fgoffload.attach(model, {"recompute": ["unit"]})
    if not first:
        train(model, 2)
    fails.append(True)
    loss = model(data()).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert refused(attachment) == {"unit": "its forward changes in place what it has saved"}


# --- the conditions of the forward


def test_dropout_draws_the_same_and_leaves_the_generator_as_it_was():
    attachment = compare(Around(nn.Sequential(nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.5))), recompute=["unit"])
    assert recomputations(attachment) == {"unit": 3}


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    def loss_of(model, step):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return model(data(step)).float().square().sum()

    def run(model):
        losses = []
        for step in range(3):
            loss = loss_of(model, step)
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside):  # the state of backward must not matter
                loss.backward()
            losses.append(loss.detach())
        return losses

    unit = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    assert refused(compare(Around(unit), run, ["unit"])) == {}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_evaluation_between_forward_and_backward(context):
    def run(model):
        found = []
        for step in range(3):
            loss = model(data(step)).square().sum()
            model.eval()
            with context():
                found.append(model(data(9)).detach().clone())
            loss.backward()
            model.train()
            found.append(loss.detach())
        return found

    attachment = compare(blocks(), run)
    assert recomputations(attachment)["0.drop"] == 3


def test_nothing_happens_without_gradients():
    model = blocks()
    attachment = ds_fgoffload.attach(model, {"recompute": CHEAP})
    with torch.no_grad():
        model(data())
    with torch.inference_mode():
        model(data())
    assert all(unit.calls == 0 for unit in attachment.stats().units.values())
    assert all(not unit._tried for unit in attachment._recomputer.units.values())


def test_training_and_evaluation_are_tried_each():
    class Late(nn.Module):
        def forward(self, x):
            if self.training:
                self.seen = x.shape[0] + getattr(self, "seen", 0)
            return x.tanh()

    model = Around(Late())
    attachment = ds_fgoffload.attach(model, {"recompute": ["unit"]})
    model.eval()
    train(model, 2)
    assert refused(attachment) == {}
    model.train()
    train(model, 1)
    assert refused(attachment) == {"unit": "its forward sets the attribute seen of Late"}


# --- around, inside, beside other things


class Checkpointed(nn.Module):
    def __init__(self, reentrant, around):
        super().__init__()
        self.blocks = blocks()
        self.reentrant = reentrant
        self.around = around

    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.around else block(x)
        return x


@pytest.mark.parametrize("section", [{}, {"modules": ["*"]}, {"modules": CHEAP}])
@pytest.mark.parametrize("reentrant", [True, False])
def test_units_inside_a_checkpoint_leave_it_to_the_checkpoint(reentrant, section):
    attachment = compare(Checkpointed(reentrant, around=True), **section)
    made_again = sum(recomputations(attachment).values())
    # Where a unit's own hooks for offloading are between it and a checkpoint that counts saves, it is its own affair.
    assert (made_again > 0) == (section == {"modules": CHEAP} and not reentrant)


@pytest.mark.parametrize("around", ["reentrant", "non-reentrant", "save_on_cpu"])
def test_somebody_elses_hooks_around_the_whole_model(around):
    def loss_of(model, step):
        x = data(step).requires_grad_()
        if around != "save_on_cpu":
            return checkpoint(model, x, use_reentrant=around == "reentrant").square().sum()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(0), t)[1], lambda t: t):
            return model(x).square().sum()

    def run(model):
        seen.clear()
        losses = train(model, loss_of=loss_of)
        counts.append(len(seen))
        return losses

    seen, counts = [], []
    attachment = compare(blocks(), run)
    assert set(recomputations(attachment).values()) == {0}
    assert counts[0] == counts[1], "they do not see all that they did"


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_a_unit(reentrant):
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return checkpoint(lambda x: self.fc(x).tanh().sin(), x.exp(), use_reentrant=reentrant).cos()

    attachment = compare(Around(Region()), recompute=["unit"])
    assert refused(attachment) == {}
    assert recomputations(attachment) == {"unit": 3}


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_input_of_a_checkpoint_is_promised(reentrant):
    seen = []

    def use(unit, after, x):
        y = unit(x)
        seen.append(weak(y))
        return checkpoint(lambda y: after(y).tanh(), y, use_reentrant=reentrant)

    model = Around(nn.GELU(), use)
    attachment = compare(model, recompute=["unit"])
    assert recomputations(attachment) == {"unit": 3}
    loss = model(data()).sum()
    assert seen[-1].expired()
    loss.backward()


def test_a_unit_inside_a_unit_is_part_of_it():
    attachment = compare(blocks(), recompute=["0", "*.norm", "*.act"])
    assert recomputations(attachment) == {"0": 3, "0.norm": 0, "0.act": 0, "1.norm": 3, "1.act": 3}


@pytest.mark.parametrize("modules", [["*.fc2"], ["*.fc2", "*.norm2"], ["0"]])
def test_what_is_offloaded_inside_a_recomputed_unit_is_offloaded(modules):
    attachment = compare(blocks(), recompute=["0", "1"], modules=modules)
    assert recomputations(attachment)["0"] == 3
    stats = attachment.stats()
    offloading = [unit for unit in stats.units.values() if unit.saved_bytes]
    assert offloading
    assert all(unit.calls == 3 for unit in offloading), "it was offloaded in the trial too"


def test_excluded_modules_keep_what_they_save():
    attachment = compare(blocks(), modules=["*"], exclude=["0.norm", "*.act"])
    assert set(attachment._recomputer.units) == {"1.norm", "0.norm2", "1.norm2", "0.drop", "1.drop"}


def test_the_whole_model():
    assert recomputations(compare(blocks(), recompute=["*"])) == {"": 3}


def test_a_module_that_is_called_twice_and_has_two_names():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = RmsNorm()
            self.fc = nn.Linear(WIDTH, WIDTH)
            self.two = self.one

        def forward(self, x):
            return self.fc(self.two(self.fc(self.one(x))))

    assert recomputations(compare(Model(), recompute=["two"])) == {"one": 6}


def test_weights_tied_to_others():
    model = Around(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))
    model.after.weight = model.unit[0].weight
    assert recomputations(compare(model, recompute=["unit"])) == {"unit": 3}


def test_hooks_of_others_run_once_and_what_they_change_counts():
    def run_with(register_late):
        calls = []

        def run(model):
            def add():
                model.unit.register_forward_pre_hook(lambda _m, args: (calls.append("before"), (args[0] * 2,))[1])
                model.unit.register_forward_hook(
                    lambda _m, _args, out: (calls.append("after"), out.sin())[1], prepend=True
                )
                model.unit.register_full_backward_hook(lambda *_: calls.append("backward"))

            found = [] if register_late else add()
            found = train(model, 1)
            if register_late:
                add()
            return found + train(model, 3)

        attachment = compare(Around(RmsNorm()), run, ["unit"])
        assert refused(attachment) == {}
        assert recomputations(attachment) == {"unit": 4}
        count = 2 * (3 if register_late else 4)  # the plain copy's as well
        assert [calls.count(what) for what in ("before", "after", "backward")] == [count] * 3

    run_with(register_late=False)
    run_with(register_late=True)


def test_hooks_that_were_there_before():
    model = Around(RmsNorm())
    model.unit.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
    model.unit.register_forward_hook(lambda _m, _args, out: out.sin())
    assert recomputations(compare(model, recompute=["unit"])) == {"unit": 3}


# --- what may become of a graph


def test_a_graph_that_is_used_twice():
    def run(model):
        loss = model(data()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach()]

    assert recomputations(compare(blocks(1), run, ["*.norm"])) == {"0.norm": 1}


def test_gradients_of_gradients():
    def run(model):
        x = data().requires_grad_()
        found = []
        for _ in range(2):
            (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            gradient.square().sum().backward()
            found.append(gradient.detach())
        return found

    attachment = compare(blocks(1), run)
    assert refused(attachment) == {}


def test_a_backward_inside_the_forward_of_a_unit():
    def penalised(_module, x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(inner.tanh().square().sum(), inner, create_graph=True)
        return x.sin() * gradient.detach().cos() + x.tanh()

    attachment = compare(Around(Function(penalised)), recompute=["unit"])
    assert refused(attachment) == {}
    assert recomputations(attachment) == {"unit": 3}


class Penalised(nn.Module):
    """Runs a backward in its forward: of a penalty to its argument, and ``to_weights``, to its weights as well."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, to_weights=True):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            penalty = self.linear(inner.tanh()).square().sum()
        if to_weights:
            penalty.backward()
        else:
            torch.autograd.grad(penalty, inner)
        return self.linear(x.sin())


GIVES_GRADIENTS = "its forward runs a backward, which gives gradients to its parameters"


def test_a_unit_whose_forward_gives_gradients_to_its_parameters_runs_once(warnings):
    attachment = compare(Around(Penalised()), recompute=["unit"])
    assert refused(attachment) == {"unit": GIVES_GRADIENTS}
    assert len(warnings()) == 1


@pytest.mark.parametrize("before", [True, False])
def test_a_unit_whose_forward_does_so_in_some_calls_only(before):
    """Neither its first call nor, where that runs no backward at all, its flags tell."""

    class Sometimes(Penalised):
        def forward(self, x, call=0):
            if before or call:
                return super().forward(x, to_weights=call == 2)
            return self.linear(x.sin())

    def run(model):
        for call in (0, *([1] if before else []), 2, 0):
            model.use = partial(_with_number, call)
            model(data(call)).square().sum().backward()
        return []

    attachment = compare(Around(Sometimes()), run, ["unit"])
    reason = GIVES_GRADIENTS if before else "its forward runs a backward, which it did not when it was tried"
    assert refused(attachment) == {"unit": reason}


def _with_number(call, unit, after, x):
    return after(unit(x, call))


def test_tiled_modules_of_deepspeed():
    """One computes its loss and its gradients tile by tile in its forward; the other, from its input, in backward."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

    class TiledLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = x[None]
            args = x.detach().argmax(-1), None, 3, [self.head.weight], "sum"
            return TiledFusedLogitsLoss.apply(_tile_of_loss, self, x, *args)

    class Tiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return TiledMLP.apply(_tile, self, x, 3, [*self.parameters()])

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Tiled(), TiledLoss())
    attachment = compare(model, partial(train, loss_of=lambda model, step: model(data(step))), ["1", "2"])
    assert refused(attachment) == {"2": GIVES_GRADIENTS}


def _tile(module, x):
    return module.down(module.up(x).sin())


def _tile_of_loss(module, x, y):
    return nn.functional.cross_entropy(module.head(x), y)


def test_several_micro_batches_at_once_backward_in_any_order():
    def run(model):
        found = []
        for order in ([0, 1, 2], [2, 0, 1]):
            losses = [model(data(step)).square().sum() for step in range(3)]
            for n in order:
                losses[n].backward()
            found += [loss.detach() for loss in losses]
        return found

    assert recomputations(compare(blocks(1), run, ["*.norm"])) == {"0.norm": 6}


def test_a_branch_that_backward_does_not_take():
    def run(model):
        found = []
        for step in range(3):
            one, two = model(data(step))
            one.sum().backward()
            found.append(two.detach())
        return found

    attachment = compare(
        Around(RmsNorm(), lambda unit, after, x: (after(unit(x)).sin(), unit(x.sin()).cos())), run, ["unit"]
    )
    assert recomputations(attachment) == {"unit": 3}


def test_arguments_are_let_go_of_when_nobody_can_need_them_again():
    """A unit that saves nothing, whose output nobody saved either."""
    given, gone = [], []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.unit, self.after = Function(lambda _m, x: x * 2), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.after(x)
            for _ in range(4):
                x = x + 1
                given.append(weak(x))
                x = self.unit(x) + 1
                gone.append([one.expired() for one in given])
            return x

    model = Model()
    ds_fgoffload.attach(model, {"recompute": ["unit"]})
    train(model, 1)
    gone.clear()
    given.clear()
    train(model, 1)
    assert gone[-1] == [True, True, True, False]


def test_tensors_made_in_inference_mode():
    model = Around(nn.GELU(), lambda unit, after, _: after(unit(made)))
    with torch.inference_mode():
        made = data()
    attachment = compare(model, recompute=["unit"])
    assert recomputations(attachment) == {"unit": 0}
    assert refused(attachment) == {}


def test_an_interrupt_that_the_model_survives(monkeypatch):
    class Interrupted(nn.Module):
        def forward(self, x):
            y = x.exp()
            if interrupts:
                raise KeyboardInterrupt
            return y.sin()

    def use(unit, after, x):
        try:
            return after(unit(x))
        except KeyboardInterrupt:
            return after(x)

    interrupts = []
    model = Around(Interrupted(), use)
    attachment = ds_fgoffload.attach(model, {"recompute": ["unit"]})
    train(model, 1)
    calls = weakref.WeakSet()
    watch_calls(monkeypatch, attachment, calls.add)
    interrupts.append(True)
    gc.disable()
    try:
        train(model, 1)
        assert not calls
    finally:
        gc.enable()
    interrupts.clear()
    model.zero_grad()
    compare_after(model)


def test_a_graph_that_is_dropped(monkeypatch):
    model = blocks(1)
    attachment = ds_fgoffload.attach(model, {"recompute": CHEAP})
    calls = weakref.WeakSet()
    watch_calls(monkeypatch, attachment, calls.add)
    gc.disable()
    try:
        model(data())
        assert not calls
        model(data()).sum().backward()
        assert not calls
    finally:
        gc.enable()
    assert recomputations(attachment)["0.norm"] == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["first", "later", "again"])
def test_after_a_failure_the_next_step_is_right(error, when):
    fails = []
    count, take = fails.__len__, fails.pop  # what a forward changes that it reads would be refused

    class Fails(nn.Module):
        def forward(self, x):
            x = x.exp()
            if count() and take() == "now":
                raise error
            return x.sin()

    model = Around(nn.Sequential(RmsNorm(), Fails()))
    attachment = ds_fgoffload.attach(model, {"recompute": ["unit"]})
    if when != "first":
        train(model, 1)
    gc.disable()
    try:
        fails[:] = ["now", "not yet"] if when == "again" else ["now"]
        with pytest.raises(error):
            train(model, 1)
        assert not fails
        model.zero_grad()
        compare_after(model)
    finally:
        gc.enable()
    assert recomputations(attachment)["unit"] == (1 if when == "first" else 2)


def test_detached_and_copied():
    model = blocks(1)
    attachment = ds_fgoffload.attach(model, {"recompute": CHEAP})
    loss = model(data()).square().sum()
    attachment.detach()
    loss.backward()
    assert recomputations(attachment)["0.norm"] == 1
    train(model)
    assert recomputations(attachment)["0.norm"] == 1
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


# --- what is refused


class Stateful(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.state = {"calls": 0}
        self.calls = iter(range(1, 1000))  # what cannot be compared
        self.generator = torch.Generator().manual_seed(0)
        self._run = forward

    def forward(self, x, *rest):
        return self._run(self, x, *rest)


def _count(m, x):
    m.count += 1
    return x.tanh()


def _remember(m, x):
    m.last = x
    return x.tanh()


def _differ(m, x):
    return x * next(m.calls)


def _fewer(m, x):
    return (x.tanh() if next(m.calls) % 2 else x.sigmoid().tanh()) * 0 + x.sin()


def _fail(m, x):
    if next(m.calls) == 2:
        raise ValueError("once")
    return x.tanh()


def _draw(m, x):
    return x * torch.rand(x.shape, generator=m.generator)


def _times_conjugate(z):
    return (z * z.conj()).real.clone()


def _change_weight(m, x):
    with torch.no_grad():
        m.weight.mul_(1)
    return x.tanh()


def _count_in_a_dict(m, x):
    m.state["calls"] += 1
    return x.tanh()


REFUSED = {
    "its forward changes what it reads: the attribute state of a Stateful": _count_in_a_dict,
    "its forward changes the buffer count": _count,
    "its forward sets the attribute last of Stateful": _remember,
    "its forward changes an argument in place": lambda m, x: x.relu_().sin(),
    "its forward changes a parameter or buffer in place": _change_weight,
    "it does not give the same output when it is run again with the same arguments": _differ,
    "it does not save the same tensors when it is run again with the same arguments": _fewer,
    "it fails when it is run again: ValueError: once": _fail,
    "it does not save the same tensors when it is run again with the same arguments ": _draw,
    "it returns a object, of which it cannot be told whether it changes": lambda m, x: (x.tanh(), object()),
    "it saves a Tensor that is not a plain strided tensor": lambda m, x: _times_conjugate(torch.fft.fft(x)),
    "it saves a Tensor that is not a plain strided tensor ": lambda m, x: torch.sparse.mm(
        torch.eye(len(x)).to_sparse(), x
    ),
    "it returns a Tensor that is not a plain strided tensor": lambda m, x: (x.tanh(), x.detach().to_sparse()),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_by_name_and_reason(reason, warnings):
    def use(unit, after, x):
        y = unit(x.sin())
        return after(y[0] if isinstance(y, tuple) else y)

    model = Around(Stateful(REFUSED[reason]), use)
    attachment = ds_fgoffload.attach(model, {"recompute": ["unit"], "modules": ["after"]})
    train(model, 3)
    assert refused(attachment) == {"unit": reason.strip()}
    assert warnings() == [
        f"fine_grained_offload.recompute: unit (Stateful): not recomputed, because {reason.strip()}; what is saved "
        'there is kept. Take it out of "recompute", or use activation checkpointing'
    ]
    assert recomputations(attachment)["unit"] == 0
    assert reason.strip() in attachment.report()


VISIBLE = [reason for reason in REFUSED if "when it is run again" not in reason]


@pytest.mark.parametrize("reason", VISIBLE)
def test_what_can_be_seen_is_refused_before_it_runs_twice(reason):
    def use(unit, after, x):
        y = unit(x.sin())
        return after(y[0] if isinstance(y, tuple) else y)

    runs = []
    run = REFUSED[reason]
    model = Around(Stateful(lambda m, x: (runs.append(0), run(m, x))[1]), use)
    plain = deepcopy(model)
    plain.unit._run = run
    ds_fgoffload.attach(model, {"recompute": ["unit"]})
    assert_same(
        [*train(model), *grads_of(model), *model.buffers()], [*train(plain), *grads_of(plain), *plain.buffers()]
    )
    assert len(runs) == 3


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)])
def test_batch_norm_in_training(norm, warnings):
    model = Around(norm)
    plain = deepcopy(model)
    attachment = ds_fgoffload.attach(model, {"recompute": ["unit"]})
    assert_same(
        [*train(model), *grads_of(model), *model.buffers()], [*train(plain), *grads_of(plain), *plain.buffers()]
    )
    assert refused(attachment) == {"unit": "its forward changes the buffer running_mean"}
    assert len(warnings()) == 1


def test_batch_norm_in_evaluation_is_recomputed():
    assert recomputations(compare(Around(nn.BatchNorm1d(WIDTH)).eval(), recompute=["unit"])) == {"unit": 3}


def test_an_argument_that_may_change(warnings):
    model = Around(Stateful(lambda m, x, cache: x.tanh()), lambda unit, after, x: after(unit(x, object())))
    attachment = ds_fgoffload.attach(model, {"recompute": ["unit"]})
    train(model, 2)
    assert refused(attachment) == {"unit": "it is given a object, of which it cannot be told whether it changes"}


@pytest.mark.parametrize("inner", [False, True])
def test_compiled_units(inner, warnings):
    model = Around(nn.Sequential(RmsNorm(), nn.GELU()))
    (model.unit[0] if inner else model.unit).compile(backend="eager")
    plain = deepcopy(model)
    attachment = ds_fgoffload.attach(model, {"recompute": ["unit"]})
    assert_same([*train(model, 2), *grads_of(model)], [*train(plain, 2), *grads_of(plain)])
    assert refused(attachment) == {"unit": "torch.compile has compiled it, or a module in it"}


def test_a_unit_inside_compiled_code_is_named(warnings):
    model = Around(nn.Sequential(RmsNorm(), nn.GELU()))
    model.unit.compile(backend="eager")
    attachment = compare(model, recompute=["unit.0"])
    assert recomputations(attachment) == {"unit.0": 0}
    assert "unit.0: torch.compile has compiled what they lie in" in warnings()[0]


def test_compiled_users_of_an_output():
    model = Around(RmsNorm(), lambda unit, after, x: after(unit(x)))
    model.after.compile(backend="aot_eager")
    assert recomputations(compare(model, recompute=["unit"])) == {"unit": 3}


def test_a_forward_that_does_otherwise_later_is_an_error():
    hidden = []
    count = hidden.__len__  # a method of C, which cannot be looked into
    module = Stateful(lambda _m, x: x.sigmoid().tanh() if count() else x.tanh())
    model = Around(module)
    ds_fgoffload.attach(model, {"recompute": ["unit"]})
    train(model, 1)
    loss = model(data()).sum()
    hidden.append(1)
    with pytest.raises(OffloadStateError, match="unit did not do the same when it was recomputed in backward"):
        loss.backward()


def test_a_tensor_from_elsewhere_that_is_saved_is_kept_with_its_version():
    table = torch.randn(WIDTH)
    model = Around(Function(lambda _m, x: x * table))
    attachment = ds_fgoffload.attach(model, {"recompute": ["unit"]})
    train(model, 2)
    assert refused(attachment) == {}
    loss = model(data()).sum()
    table.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_costly_unit_is_named(warnings, monkeypatch):
    model = Around(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(20))))
    ds_fgoffload.attach(model, {"recompute": ["unit"]})
    train(model, recompute_cost.WARM_UP_MICRO_BATCHES + recompute_cost.COUNTED_MICRO_BATCHES)
    assert warnings() == []
    train(model, 2 * recompute_cost.COUNTED_MICRO_BATCHES)
    (warning,) = warnings()
    assert "of the step, more than 5% (most: unit " in warning


def test_functions_under_torch_func_are_left_alone():
    model = Around(RmsNorm())
    plain = deepcopy(model)
    attachment = ds_fgoffload.attach(model, {"recompute": ["unit"]})
    found, expected = (torch.func.grad(lambda x, m=m: m(x).sum())(data()) for m in (model, plain))
    assert torch.equal(found, expected)
    assert recomputations(attachment) == {"unit": 0}


def test_layers_in_a_row_keep_what_lies_between_them():
    """Else backward of the last would make all of them at once."""
    alive = []
    note = alive.append

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.fc(x).exp()
            note(weak(y))
            return y.sin()

    model = nn.Sequential(*(Layer() for _ in range(6)))
    most = []
    for layer in model:
        layer.register_full_backward_hook(lambda *_: most.append(sum(not one.expired() for one in alive)))
    attachment = ds_fgoffload.attach(model, {"recompute": ["re:[0-9]"]})
    train(model, 3, lambda model, step: model(data(step).requires_grad_()).sum())
    assert recomputations(attachment) == {str(n): 3 for n in range(6)}
    assert len(most) == 6 * 3
    assert max(most) <= 2


def test_a_long_row_of_cheap_units(monkeypatch):
    depths = []
    model = Around(nn.Sequential(*(nn.Tanh() for _ in range(9))))
    attachment = ds_fgoffload.attach(model, {"recompute": ["unit.*"]})
    watch_calls(monkeypatch, attachment, lambda call: depths.append(call.depth))
    train(model, 1)
    assert depths == [0, 1, 2] * 3


def watch_calls(monkeypatch, attachment, tell):
    recomputer = attachment._recomputer
    opened = recomputer.open

    def open_and_tell(*arguments):
        made = opened(*arguments)
        tell(made.call)
        return made

    monkeypatch.setattr(recomputer, "open", open_and_tell)


class TwoStreams(SynchronousStreams):
    """Notes who waits for whom."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.now = "forward"
        self.events = []

    def compute(self):
        return self.now

    @contextmanager
    def on(self, stream):
        before, self.now = self.now, stream
        self.events.append(f"on {stream}")
        yield
        self.events.append("back")
        self.now = before

    def fence(self, stream):
        return stream

    def wait(self, stream, fence):
        self.events.append(f"{stream} waits for {fence}")


def test_a_backward_on_another_stream():
    """What is made again is made on the stream of the forward, and its memory goes back there after the last use."""
    model = Around(nn.Tanh())
    attachment = ds_fgoffload.attach(model, {"recompute": ["unit"]})
    train(model, 1)
    attachment._recomputer.units["unit"].streams = streams = TwoStreams()
    loss = model(data()).sum()
    loss.backward(retain_graph=True)
    assert streams.events == ["on forward", "back"]
    loss = model(data()).sum()
    streams.events.clear()
    streams.now = "other"
    loss.backward()
    used, dropped = "other waits for forward", "forward waits for other"
    assert streams.events[:4] == ["on forward", "forward waits for other", "back", used]
    assert sorted(streams.events[4:]) == sorted([used, dropped, dropped])
    assert streams.events.index(dropped, 4) > 3
    assert streams.events[-1] == dropped


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("section", [{}, {"modules": ["*"]}])
def test_on_a_device_without_waiting_for_it(section):
    """The generator of the device, too; and after the trial nothing blocks the host."""
    model = blocks().cuda()
    plain = deepcopy(model)
    attachment = ds_fgoffload.attach(model, {"recompute": CHEAP, "min_tensor_bytes": 0, **section})
    for step in range(4):
        losses = []
        for one in (plain, model):
            x = data(step, (64, WIDTH)).cuda()
            torch.cuda.manual_seed(step)
            torch.cuda.set_sync_debug_mode("error" if step and one is model else "default")
            loss = one(x).square().sum()
            loss.backward()
            torch.cuda.set_sync_debug_mode("default")
            losses.append(loss.detach())
        assert_same(losses[:1] + grads_of(plain), losses[1:] + grads_of(model))
    assert refused(attachment) == {}
    assert set(recomputations(attachment).values()) - {0} == {4}
    assert attachment.stats().recompute_ms > 0
