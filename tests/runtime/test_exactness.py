"""Training with offloading gives the same bits as without, in every situation that autograd allows."""

import gc
import io
import random
import threading
import weakref
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_fgoffload
from ds_fgoffload.device.streams import SynchronousStreams
from ds_fgoffload.host_memory import pool as pool_module
from ds_fgoffload.host_memory.pool import HostPool
from ds_fgoffload.runtime import offloader as offloader_module

WIDTH = 16


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(pool_module, "_POOL", HostPool())


@pytest.fixture(params=["packed", "alone", "alone, held back"])
def section(request, monkeypatch):
    """How small storages travel, and how long they stay."""
    if request.param != "packed":
        monkeypatch.setattr(offloader_module, "ALONE_BYTES", 0)
    windows = (
        {} if request.param != "alone, held back" else {"release_window_bytes": 700, "prefetch_window_bytes": 1000}
    )
    return {"modules": ["*"], "min_tensor_bytes": 0, **windows}


def attached(model, section, **changes):
    return ds_fgoffload.attach(model, {**section, **changes})


def grads_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one is other if one is None or other is None else torch.equal(one, other), f"result {number} differs"


def assert_nothing_is_left(attachment):
    gc.collect()
    assert attachment.stats().live_host_bytes == 0
    assert ds_fgoffload.host_pool().stats().leased_bytes == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def compare(model, run, section, **changes):
    """``run(model)`` returns tensors; they and the gradients must be the same on a copy that is not attached."""
    plain = deepcopy(model)
    torch.manual_seed(1)
    expected = [*run(plain), *grads_of(plain), *plain.buffers()]
    attachment = attached(model, section, **changes)
    torch.manual_seed(1)
    found = [*run(model), *grads_of(model), *model.buffers()]
    assert_same(found, expected)
    stats = attachment.stats()
    attachment.detach()
    assert_nothing_is_left(attachment)
    return stats


def train(*inputs, steps=2, loss_of=lambda output: output.square().mean()):
    """Some steps of gradient descent; returns the losses."""

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model(*inputs))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return run


# Models.


class Attention(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Calls(nn.Module):
    """A module out of a function, with parts."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def mlp(*middle):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def rows(n=5, *more):
    return torch.randn(n, *more, WIDTH)


class SavesAll(torch.autograd.Function):
    """Saves an input, nothing, an intermediate, an output, a mask and an index, and reads them twice."""

    @staticmethod
    def forward(ctx, x, weight):
        inner = x.sin()
        out = inner * weight
        mask, order = (x > 0).to(torch.uint8), torch.arange(x.numel()).view(x.shape).flip(0)
        ctx.save_for_backward(x, None, weight, inner, out, mask, order)
        return out, mask

    @staticmethod
    def backward(ctx, grad, _):
        x, nothing, weight, inner, _, _, _ = ctx.saved_tensors
        assert nothing is None
        *_, out, mask, order = ctx.saved_tensors
        assert order.dtype is torch.int64
        return grad * x.cos() * weight * (1 + mask) + out.sign() + order, (grad * inner).sum(0)


class TurnsItsSavedTensor(torch.autograd.Function):
    """Changes in backward what it saved: once is fine."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(y)
        return y.sin()

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y.cos_() * 2


# Situations: a model and what is done with it.


def on_weight(function):
    def forward(self, x):
        return function(self, self.first(x))

    return Calls(forward, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH))


def custom(self, x):
    out, mask = SavesAll.apply(x, self.second.bias)
    return out * mask


def in_place(self, x):
    x = x.add_(1).relu_()
    y = self.second(x)
    y[:2] *= 3
    return y.mul_(2).tanh_()


def unused_branch(self, x):
    unused = self.second(x).exp().sin()
    return (self.second(x) * (unused > 0)).tanh()


def views(self, x):
    a, b = self.second(x).split([5, WIDTH - 5], dim=-1)
    turned = x.t()[3:9] * x.t()[3:9].expand(2, 6, -1)
    return a.sum() * b.sin() + turned.sum() + x.unfold(1, 3, 1).square().mean() + (x[:, ::3] * x[:, 0:1]).mean()


def dtypes(self, x):
    half, low = x.to(torch.bfloat16), x.to(torch.float16)
    wave = torch.view_as_real(torch.fft.fft(x) * torch.complex(x, x.cos()))
    picked = x.gather(1, x.argsort(dim=1)) * x.topk(3).values.sum()
    return (
        half.sin().float()
        + low.square().float()
        + wave.sum(-1)
        + picked
        + torch.where(x > 0, x.double() ** 3, x).float()
    )


def several_outputs(self, x):
    return {"a": x.sin(), "b": [self.second(x).cos(), 7]}


def dropped_inside(self, x):
    with torch.enable_grad():
        self.second(x).exp().sum()
    return self.second(x)


SITUATIONS = {
    "mlp": lambda: (mlp(), train(rows())),
    "input that requires grad": lambda: (mlp(), train(rows().requires_grad_())),
    "attention": lambda: (Block(), train(rows(2, 6))),
    "deep": lambda: (nn.Sequential(*(Block() for _ in range(3))), train(rows(2, 6))),
    "called several times": lambda: (Calls(lambda m, x: m.one(m.one(m.one(x)).tanh()), one=mlp()), train(rows())),
    "calls itself": lambda: (
        Calls(lambda m, x, depth=2: m.one(x) + (m(x.sin(), depth - 1) if depth else 0), one=mlp()), train(rows())),
    "custom function": lambda: (on_weight(custom), train(rows())),
    "custom function that changes what it saved": lambda: (
        on_weight(lambda m, x: TurnsItsSavedTensor.apply(m.second(x))), train(rows())),
    "in place": lambda: (on_weight(in_place), train(rows())),
    "unused branch": lambda: (on_weight(unused_branch), train(rows())),
    "views": lambda: (on_weight(views), train(rows())),
    "dtypes": lambda: (on_weight(dtypes), train(rows())),
    "graph dropped inside": lambda: (on_weight(dropped_inside), train(rows())),
    "several outputs": lambda: (
        on_weight(several_outputs), train(rows(), loss_of=lambda out: out["a"].sum() + out["b"][0].square().sum())),
    "dropout": lambda: (mlp(nn.Dropout(0.3)), train(rows())),
    "batch norm": lambda: (mlp(nn.BatchNorm1d(WIDTH)), train(rows())),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(11, WIDTH), Block()), train(torch.randint(0, 11, (2, 6)))),
    "cross entropy": lambda: (
        Calls(lambda m, x, y: F.cross_entropy(m.one(x), y), one=mlp()), train(rows(), torch.randint(0, WIDTH, (5,)))),
    "lstm": lambda: (
        nn.LSTM(WIDTH, WIDTH, num_layers=2), train(rows(4, 3), loss_of=lambda out: out[0].square().mean())),
    "gru": lambda: (
        nn.GRU(WIDTH, WIDTH, bidirectional=True), train(rows(4, 3), loss_of=lambda out: out[0].square().mean())),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        train(torch.randn(2, 3, 10, 10))),
    "vmap": lambda: (
        Calls(lambda m, x: torch.vmap(lambda row: m.one(row).sin().square())(x), one=mlp()), train(rows())),
    "forward-mode derivative": lambda: (
        Calls(lambda m, x: sum(torch.func.jvp(m.one, (x,), (x.cos(),))), one=mlp()), train(rows())),
    "frozen parameters": lambda: (nn.Sequential(mlp().requires_grad_(False), mlp()), train(rows())),
}  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_training(situation, section):
    stats = compare(*SITUATIONS[situation](), section)
    assert stats.offloaded_bytes > 0
    assert stats.reloaded_bytes + stats.held_bytes + stats.used_in_place_bytes > 0


@pytest.mark.parametrize(
    "modules",
    [
        ["0"],
        ["*.attn", "*.mlp"],
        ["*", "*.attn", "*.attn.qkv"],
        ["class:Linear"],
        ["class:GELU", "class:LayerNorm"],
        ["1.*"],
    ],
    ids=str,
)
@pytest.mark.parametrize("exclude", [[], ["*.out", "*.mlp.1", "*.mlp_norm"]], ids=["nothing excluded", "excluded"])
def test_units_of_all_sizes_and_inside_each_other(modules, exclude, section):
    model = nn.Sequential(Block(), Block())
    exclude = [] if exclude and "class" in modules[0] else exclude
    assert compare(model, train(rows(2, 6)), section, modules=modules, exclude=exclude).offloaded_bytes > 0


def backward_in(order):
    """Four micro-batches, all forward before the first backward."""

    def run(model):
        inputs = [rows(n + 2) for n in range(4)]
        losses = [model(x).square().mean() for x in inputs]
        for number in order:
            losses[number].backward()
        return [loss.detach() for loss in losses]

    return run


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_micro_batches_in_flight(order, section):
    compare(nn.Sequential(mlp(), mlp()), backward_in(order), section)


def one_forward_one_backward(model):
    waiting, losses = [], []
    for number in range(8):
        if number < 6:
            waiting.append(model(rows(number + 1)).square().mean())
            losses.append(waiting[-1].detach())
        if number >= 2:
            waiting.pop(0).backward()
    return losses


def micro_batches_that_share_an_input(model):
    x = rows()
    losses = [model(x).square().mean() for _ in range(3)]
    for loss in losses:
        loss.backward()
    return []


def backward_twice(model):
    loss = model(rows()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach()]


def gradient_penalty(model):
    x = rows().requires_grad_()
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    return [loss.detach(), slope.detach(), x.grad]


def third_derivative(model):
    x = rows().requires_grad_()
    value = model(x).sin().sum()
    for _ in range(3):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        value = slope.square().sum()
    value.backward()
    return [value.detach(), x.grad]


def in_any_order(model):
    outputs = model(rows()).unbind()
    pieces = list(range(len(outputs)))
    random.Random(0).shuffle(pieces)
    return [
        grad
        for piece in pieces
        for grad in torch.autograd.grad(outputs[piece].sum(), list(model.parameters()), retain_graph=True)
    ]


def some_dropped(model):
    results = []
    for number in range(4):
        loss = model(rows(number + 1)).square().mean()
        if number % 2:
            loss.backward()
        results.append(loss.detach())
    return results


def only_part_of_the_graph(model):
    loss = model(rows()).square().mean()
    return list(torch.autograd.grad(loss, list(model[1].parameters())))


WAYS_TO_RUN = [
    one_forward_one_backward, micro_batches_that_share_an_input, backward_twice, gradient_penalty, third_derivative,
    in_any_order, some_dropped, only_part_of_the_graph,
]  # fmt: skip


@pytest.mark.parametrize("run", WAYS_TO_RUN, ids=lambda run: run.__name__)
def test_ways_to_run_backward(run, section):
    assert compare(nn.Sequential(mlp(), mlp()), run, section).offloaded_bytes > 0


def test_autocast(section):
    def run(model):
        loss = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(rows(2, 6)).float().square().mean()
        loss.backward()
        return [loss.detach()]

    compare(Block(), run, section)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("modules", [["inner"], ["*"], ["inner.0", "inner.3"], ["last"], ["class:Linear"]], ids=str)
def test_checkpoints_around_and_inside_units(modules, reentrant, section):
    def forward(self, x):
        x = checkpoint(self.inner, x, use_reentrant=reentrant)
        return self.last(x) + checkpoint(lambda y: self.last(y.sin()).cos(), x, use_reentrant=reentrant)

    model = Calls(forward, inner=mlp(nn.Dropout(0.3)), last=mlp())
    compare(model, train(rows().requires_grad_()), section, modules=modules)


def test_what_is_computed_without_gradients_is_not_counted(section):
    model = nn.Sequential(mlp(nn.Dropout(0.3), nn.BatchNorm1d(WIDTH)), mlp())
    plain = deepcopy(model)
    attachment = attached(model, section)

    def step(net):
        torch.manual_seed(2)
        return [*train(rows(), steps=1)(net), *grads_of(net)]

    assert_same(step(model), step(plain))
    counts = attachment.stats()
    for context in (torch.no_grad, torch.inference_mode):
        for net in (model, plain):
            net.eval()
            torch.manual_seed(3)
            with context():
                net(rows())
            net.train()
            with context():
                net(rows())
    assert attachment.stats() == counts
    assert_same(step(model), step(plain))
    assert_same(list(model.buffers()), list(plain.buffers()))


def test_a_storage_that_many_operations_save_is_copied_once(section):
    def forward(self, x):
        y = self.first(x)
        a = y.sin() + y.cos() + y[1:].square().sum() + self.second(y) + self.third(y.t().t())
        return a.sum()

    model = Calls(forward, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH), third=mlp())
    stats = compare(model, train(rows(), steps=1, loss_of=lambda loss: loss), section, modules=["*", "second", "third"])
    distinct = 3 * rows().nbytes  # the input, y, and the tanh inside third
    assert stats.saved_bytes == stats.offloaded_bytes == distinct


class _Detached(torch.autograd.Function):
    """Hands its input on as another tensor over the same storage, as ZeRO-3 does before each module."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_detached_tensors_over_one_storage_share_one_copy(section):
    def forward(self, x):
        y = self.first(x)
        return _Detached.apply(y).sin() + _Detached.apply(y).cos()

    model = Calls(forward, first=nn.Linear(WIDTH, WIDTH))
    stats = compare(model, train(rows(), steps=1), section, modules=["*"])
    assert stats.saved_bytes == 2 * rows().nbytes  # the input, and y


class TwoSlots(nn.Module):
    """What it receives lies in two parts of one buffer, as in ring attention: no collective counts a version up."""

    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        buffer = torch.zeros(2, *x.shape)
        buffer.data[0].copy_(x)
        first = self.weight * buffer[0]
        buffer.data[1].copy_(3 * x)
        return self.out(first + self.weight * buffer[1])


class SummedInPlace(nn.Module):
    """Saves the output of ReLU, which is then summed over ranks, and saved again."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.inner(x).relu()
        y.data.mul_(2)
        return self.out(y)


@pytest.mark.parametrize("model", [TwoSlots, SummedInPlace])
def test_what_is_overwritten_without_a_word_between_two_saves_is_copied_twice(model, section):
    compare(nn.Sequential(nn.Linear(WIDTH, WIDTH), model()), train(torch.randn(4, WIDTH)), section)


def test_bytes_that_went_out_are_all_accounted_for(section):
    stats = compare(nn.Sequential(Block(), Block()), train(rows(2, 6)), section)
    assert stats.saved_bytes == stats.offloaded_bytes + stats.kept_bytes
    assert stats.offloaded_bytes == stats.reloaded_bytes + stats.held_bytes + stats.used_in_place_bytes


def test_activations_die_with_their_graph_without_a_collector(section):
    seen = []

    def forward(self, x):
        y = self.first(x)
        z = y.sin()
        seen.extend(map(weakref.ref, (y, z, y.untyped_storage())))
        return self.second(z).tanh()

    model = Calls(forward, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH))
    attachment = attached(model, section)
    gc.collect()
    gc.disable()
    try:
        for ends in ("backward", "drop"):
            loss = model(rows()).square().mean()
            if ends == "backward":
                loss.backward()
            del loss
            assert [ref() for ref in seen] == [None] * len(seen)
            assert attachment.stats().live_host_bytes == 0
            assert ds_fgoffload.host_pool().stats().leased_bytes == 0
            seen.clear()
    finally:
        gc.enable()


# What autograd refuses is refused.


def refusal(model, run):
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
        run(model)
    return str(error.value).partition(" is at version ")[2].partition(" instead")[0]


def changes_an_activation(model):
    kept = []
    handle = model[1].register_forward_hook(lambda module, args, out: kept.append(out))
    loss = model(rows()).square().mean()
    handle.remove()
    kept[0].detach().mul_(2)
    loss.backward()


def changes_a_parameter(model):
    torch.manual_seed(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(rows()).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def changes_what_backward_gets(model):
    loss = TurnsItsSavedTensor.apply(model(rows())).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("run", [changes_an_activation, changes_a_parameter], ids=lambda run: run.__name__)
def test_a_change_in_place_is_refused_as_autograd_refuses_it(run, section):
    plain = deepcopy(mlp())
    model = deepcopy(plain)
    attachment = attached(model, section)
    assert refusal(model, run) == refusal(plain, run)
    compare_steps_after(model, plain, attachment)


def test_a_second_backward_over_what_the_first_changed_is_refused(section):
    model = Calls(lambda m, x: TurnsItsSavedTensor.apply(m.one(x)), one=mlp())
    plain = deepcopy(model)
    attachment = attached(model, section)

    def run(net):
        loss = net(rows()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    assert refusal(model, run) == refusal(plain, run)
    compare_steps_after(model, plain, attachment)


def compare_steps_after(model, plain, attachment):
    """Whatever went wrong before: the next steps are right, and nothing of the failed one remains."""
    results = []
    for net in (plain, model):
        net.zero_grad()
        torch.manual_seed(5)
        results.append([*train(rows())(net), *grads_of(net), *net.buffers()])
    assert_same(*results)
    assert_nothing_is_left(attachment)


# Steps that fail.


class Mishap(Exception):
    pass


class Trap(nn.Module):
    """Fails when it is sprung, somewhere amid a forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.sprung = None

    def forward(self, x):
        x = self.linear(x).sin()
        if self.sprung is not None:
            raise self.sprung
        return x.cos()


def trapped():
    return nn.Sequential(mlp(), nn.Sequential(mlp(), Trap(), mlp()), mlp())


UNITS = pytest.mark.parametrize("modules", [["*"], ["*", "1", "1.*"], ["1.1"], ["0", "1.0"]], ids=str)


@UNITS
@pytest.mark.parametrize("error", [Mishap, KeyboardInterrupt])
def test_a_forward_that_fails(error, modules, section):
    model = trapped()
    plain = deepcopy(model)
    attachment = attached(model, section, modules=modules)
    for _ in range(2):
        model[1][1].sprung = error
        with pytest.raises(error):
            model(rows())
        model[1][1].sprung = None
        compare_steps_after(model, plain, attachment)


def fail(*_):
    raise Mishap


@pytest.mark.parametrize("modules", [["*", "1", "1.*"], ["1.1"]], ids=str)
@pytest.mark.parametrize("where", ["1.1", "1"])
@pytest.mark.parametrize("when", ["before ours", "after ours", "hook before ours", "hook after ours"])
def test_hooks_of_others_that_fail(where, when, modules, section):
    model = trapped()
    plain = deepcopy(model)
    module = model.get_submodule(where)
    if when == "before ours":
        handle = module.register_forward_pre_hook(fail)
    elif when == "hook before ours":
        handle = module.register_forward_hook(fail)
    attachment = attached(model, section, modules=modules)
    if when == "after ours":
        handle = module.register_forward_pre_hook(fail)
    elif when == "hook after ours":
        handle = module.register_forward_hook(fail)
    for _ in range(2):
        with pytest.raises(Mishap):
            model(rows())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    handle.remove()
    compare_steps_after(model, plain, attachment)


def test_a_failed_forward_that_the_model_itself_catches(section):
    def forward(self, x):
        try:
            return self.first(x)
        except Mishap:
            return self.second(x)

    first = nn.Sequential(mlp(), Trap())
    first[1].sprung = Mishap
    model = Calls(forward, first=first, second=mlp())
    compare(model, train(rows()), section, modules=["*", "first", "first.*", "second"])


def test_a_backward_that_fails(section):
    model = nn.Sequential(mlp(), mlp(), mlp())
    plain = deepcopy(model)
    attachment = attached(model, section)
    kept = []
    handle = model[1].register_forward_hook(lambda module, args, out: kept.append(out.register_hook(fail)))
    loss = model(rows()).square().mean()
    with pytest.raises(Mishap):
        loss.backward()
    handle.remove()
    del loss
    compare_steps_after(model, plain, attachment)


def test_functional_gradients_inside_a_unit_are_refused_by_torch_and_fine_beside_one(section):
    def forward(self, x):
        x = self.before(x)
        return x + torch.func.grad(lambda y: self.inner(y).sum())(x.detach())

    model = Calls(forward, before=mlp(), inner=mlp())
    plain = deepcopy(model)
    attachment = attached(model, section)
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        model(rows())
    attachment.detach()
    attachment = attached(model, section, modules=["before", "inner"])
    compare_steps_after(model, plain, attachment)


def test_functional_gradients_of_the_whole_model_are_left_alone(section):
    model = nn.Sequential(mlp(), nn.LayerNorm(WIDTH), mlp())
    plain, x = deepcopy(model), rows()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def gradients():
        run = torch.func.functional_call
        return list(torch.func.grad(lambda values: run(model, values, (x,)).sum())(parameters).values())

    expected = gradients()
    attachment = attached(model, section, recompute=["1"])
    assert_same(gradients(), expected)
    assert attachment.stats().offloaded_bytes == 0
    compare_steps_after(model, plain, attachment)


# Where the bytes go.


def test_a_full_pool_keeps_on_the_device(section):
    model = nn.Sequential(Block(), Block())
    full = {"max_bytes": 4096, "on_full": "keep"}
    stats = compare(model, train(rows(2, 6)), section, host_pool=full)
    assert stats.skipped["host_full"] > 0
    assert stats.kept_bytes > 0
    assert stats.saved_bytes == stats.offloaded_bytes + stats.kept_bytes


def test_a_full_pool_ends_the_step_if_that_was_asked_for(section):
    model = nn.Sequential(Block(), Block())
    plain = deepcopy(model)
    ds_fgoffload.host_pool().trim()
    attachment = attached(model, section, host_pool={"max_bytes": 4096, "on_full": "error"})
    for _ in range(2):
        with pytest.raises(ds_fgoffload.HostPoolError, match="the host pool is full"):
            model(rows(2, 6))
    gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert attachment.stats().live_host_bytes == 0
    attachment.detach()
    attachment = attached(model, section)
    results = [[*train(rows_of_seed(2, 6))(net), *grads_of(net)] for net in (plain, model)]
    assert_same(*results)
    assert_nothing_is_left(attachment)


def rows_of_seed(*size):
    torch.manual_seed(6)
    return rows(*size)


@contextmanager
def out_of_memory_at(monkeypatch, number):
    """The ``number``th allocation of device memory fails, counted from 0; yields how many there were."""
    allocate = SynchronousStreams.allocate
    count = [0]

    def failing(self, stream, size_bytes):
        count[0] += 1
        if count[0] == number + 1:
            raise torch.OutOfMemoryError("CUDA out of memory, or so")
        return allocate(self, stream, size_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(SynchronousStreams, "allocate", failing)
        yield count


def test_device_memory_that_runs_out_anywhere(section, monkeypatch):
    model = nn.Sequential(mlp(), mlp())
    plain = deepcopy(model)
    attachment = attached(model, section)
    number, failures = 0, 0
    while True:
        with out_of_memory_at(monkeypatch, number) as count:
            net_results = []
            for net in (plain, model):
                net.zero_grad()
                torch.manual_seed(number)
                loss = net(rows()).square().mean()
                try:
                    loss.backward()
                except torch.OutOfMemoryError:
                    failures += 1
                    net_results = []
                    break
                net_results.append([loss.detach(), *grads_of(net)])
            if net_results:
                assert_same(*net_results)
        del loss
        compare_steps_after(model, plain, attachment)
        if count[0] <= number:
            break
        number += 1
    assert number >= 2
    assert failures < number, "what fails ahead of need is tried again when needed"


# More than one.


def test_two_attachments_in_turn_share_the_pool(section):
    actor, critic = mlp(), mlp(nn.ReLU())
    plain = deepcopy((actor, critic))
    attachments = [attached(actor, section), attached(critic, section)]

    def step(actor, critic):
        x = rows()
        value = critic(x)
        action = actor(x)
        judged = critic(action)
        value.square().mean().backward()
        judged.mean().backward()
        return [*grads_of(actor), *grads_of(critic)]

    for seed in range(3):
        torch.manual_seed(seed)
        expected = step(*plain)
        torch.manual_seed(seed)
        assert_same(step(actor, critic), expected)
    assert all(attachment.stats().offloaded_bytes for attachment in attachments)
    attachments[0].detach()
    attachments[1].detach()
    assert_nothing_is_left(attachments[0])


def test_threads_that_train_at_the_same_time(section):
    models = [nn.Sequential(mlp(), mlp()) for _ in range(2)]
    plain = deepcopy(models)
    shared = nn.Sequential(mlp(), mlp())
    attachments = [*(attached(model, section) for model in models), attached(shared, section)]
    inputs = [rows(n + 3) for n in range(2)]
    expected = [[*train(x, steps=12)(net), *grads_of(net)] for net, x in zip(plain, inputs, strict=True)]
    shared_expected = [
        torch.autograd.grad(deepcopy(shared)(x).sum(), x)[0] for x in [i.clone().requires_grad_() for i in inputs]
    ]
    found, errors = [None, None], []

    def work(number):
        try:
            found[number] = [*train(inputs[number], steps=12)(models[number]), *grads_of(models[number])]
            for _ in range(6):
                x = inputs[number].clone().requires_grad_()
                assert torch.equal(torch.autograd.grad(shared(x).sum(), x)[0], shared_expected[number])
        except BaseException as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    for attachment in attachments:
        assert_nothing_is_left(attachment)


def test_a_copy_of_an_attached_module_is_not_attached(section):
    model = nn.Sequential(mlp(), mlp())
    attachment = attached(model, section)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [deepcopy(model), torch.load(file, weights_only=False)]
    results = []
    for net in (model, *copies):
        counts = attachment.stats()
        results.append([*train(rows_of_seed(4))(net), *grads_of(net)])
        if net is not model:
            assert ds_fgoffload.get(net) is None
            assert attachment.stats() == counts
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
    attached(copies[0], section)
    assert_same(*[[*train(rows_of_seed(4))(net), *grads_of(net)] for net in copies])


@pytest.mark.parametrize("when", ["after forward", "inside forward"])
def test_detach_while_graphs_are_alive(when, section):
    model = nn.Sequential(mlp(), Calls(lambda m, x: m.one(x), one=mlp()), mlp())
    plain = deepcopy(model)
    attachment = attached(model, section, modules=["*", "1", "1.one"])
    if when == "inside forward":
        model[1].one[1].register_forward_hook(lambda *_: attachment.detach())
    x = rows()
    losses = [net(x).square().mean() for net in (model, plain)]
    attachment.detach()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert attachment.stats().live_host_bytes == ds_fgoffload.host_pool().stats().requested_bytes > 0
    for loss in losses:
        loss.backward()
    del loss, losses
    assert_same(grads_of(model), grads_of(plain))
    assert_nothing_is_left(attachment)
    counts = attachment.stats()
    compare_steps_after(model, plain, attachment)
    assert attachment.stats() == counts


def test_detach_takes_off_what_an_interrupted_forward_left_behind(section):
    model = trapped()
    attachment = attached(model, section)
    model[1][1].sprung = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        model(rows())
    attachment.detach()
    assert_nothing_is_left(attachment)
