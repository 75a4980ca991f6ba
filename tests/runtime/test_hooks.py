"""What the module hooks tell the offloader, and that they leave nothing on autograd's stack."""

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_fgoffload
from ds_fgoffload.runtime.hooks import ModuleHooks
from ds_fgoffload.saved.saved_tensors import KeptTensor


class Recorder:
    """An offloader that moves nothing."""

    def __init__(self):
        self.events = []
        self.unit_stats = {}
        self.plans = False

    def begin_micro_batch(self, size):
        self.events.append("begin")

    def watch_backward(self, output):
        self.events.append("end")

    def open_scope(self, unit, module):
        self.events.append(f"open {unit}")
        return unit

    def close_scope(self, scope):
        self.events.append(f"close {scope}")

    def pack(self, scope, tensor):
        self.events.append(f"pack {scope}")
        return KeptTensor(tensor)

    def unpack(self, packed):
        self.events.append("unpack")
        return packed.tensor()

    def take(self):
        """The events since the last call; equal ones in a row count once."""
        events, self.events = self.events, []
        return [event for n, event in enumerate(events) if not n or event != events[n - 1]]


class Tanh(nn.Module):
    def forward(self, x):
        return x.tanh()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Tanh()

    def forward(self, x):
        return self.inner(x.sin()).cos()


@pytest.fixture
def recorder():
    yield Recorder()
    assert top_hooks() is None


def top_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def hooked(recorder, *names, model=None):
    model = model or nn.Sequential(Outer(), Tanh())
    return model, ModuleHooks(model, {name: model.get_submodule(name) for name in names}, recorder)


def leaf():
    return torch.randn(3, requires_grad=True)


def fail(*_):
    raise ValueError


UP_TO_INNER = ["begin", "open 0", "pack 0", "open 0.inner"]
WHOLE_STEP = [*UP_TO_INNER, "pack 0.inner", "close 0.inner", "pack 0", "close 0", "open 1", "pack 1", "close 1", "end"]


def test_the_events_of_a_step(recorder):
    model, _ = hooked(recorder, "0", "0.inner", "1")
    loss = model(leaf()).sum()
    assert recorder.take() == WHOLE_STEP
    loss.backward()
    assert recorder.take() == ["unpack"]


def test_a_tensor_belongs_to_the_innermost_unit_and_to_none_outside(recorder):
    model, _ = hooked(recorder, "0.inner")
    model(leaf())
    assert recorder.take() == ["begin", "open 0.inner", "pack 0.inner", "close 0.inner", "end"]


def test_the_root_may_be_a_unit(recorder):
    model, _ = hooked(recorder, "")
    model(leaf())
    assert recorder.take() == ["begin", "open ", "pack ", "end", "close "]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_told_without_gradients(context, recorder):
    model, _ = hooked(recorder, "0", "0.inner")
    with context():
        model(torch.randn(3))
    assert recorder.take() == []


def test_a_part_without_gradients_is_passed_over(recorder):
    model, _ = hooked(recorder, "0", "0.inner", "1")
    frozen = model[0]
    frozen.register_forward_pre_hook(lambda *_: torch.set_grad_enabled(False) and None, prepend=True)
    frozen.register_forward_hook(lambda *_: torch.set_grad_enabled(True) and None)
    model(leaf())
    assert recorder.take() == ["begin", "open 1", "close 1", "end"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_that_runs_again_in_backward_saves_nothing(reentrant, recorder):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.unit = Outer()

        def forward(self, x):
            return checkpoint(self.unit, x, use_reentrant=reentrant)

    model, _ = hooked(recorder, "unit", "unit.inner", model=Model())
    loss = model(leaf()).sum()
    recorder.take()
    loss.backward()
    assert set(recorder.take()) <= {"unpack", "recompute"}


def test_a_backward_inside_a_unit_packs_for_itself(recorder):
    class Slope(nn.Module):
        def forward(self, x):
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(y.sin().sum(), y, create_graph=True)
            return x * slope.detach()

    model, _ = hooked(recorder, "0", model=nn.Sequential(Slope()))
    model(leaf())
    assert [event for event in recorder.events if event == "pack 0"] == ["pack 0"] * 2  # y, and the slope


FROM = pytest.mark.parametrize("name", ["0", "0.inner"])


@FROM
@pytest.mark.parametrize("ours_first", [False, True])
@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
def test_a_hook_of_someone_else_fails(name, ours_first, register, recorder):
    model = nn.Sequential(Outer(), Tanh())
    theirs = None if ours_first else getattr(model.get_submodule(name), register)(fail)
    hooked(recorder, "0", "0.inner", "1", model=model)
    theirs = theirs or getattr(model.get_submodule(name), register)(fail)
    with pytest.raises(ValueError):
        model(leaf())
    assert top_hooks() is None
    opened = [event.removeprefix("open ") for event in recorder.events if event.startswith("open")]
    closed = [event.removeprefix("close ") for event in recorder.events if event.startswith("close")]
    assert closed == opened[::-1]
    theirs.remove()
    recorder.take()
    model(leaf())
    assert recorder.take() == WHOLE_STEP


class Catching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Tanh()

    def forward(self, x):
        try:
            x = self.inner(x)
        except (ValueError, KeyboardInterrupt):
            x = x.sin()
        return x.cos()


@pytest.mark.parametrize("problem", ["fail", "interrupt"])
@pytest.mark.parametrize("ours_first", [False, True])
def test_a_unit_stays_open_when_it_catches_what_a_unit_inside_it_raises(problem, ours_first, recorder):
    model = nn.Sequential(Catching(), Tanh())
    hook = {"fail": fail, "interrupt": interrupt}[problem]
    if not ours_first:
        model[0].inner.register_forward_pre_hook(hook)
    hooked(recorder, "0", "0.inner", "1", model=model)
    if ours_first:
        model[0].inner.register_forward_pre_hook(hook)
    model(leaf())
    events = recorder.take()
    assert [event for event in events if event.startswith("pack") and event != "pack 1"] in (
        ["pack 0"],
        ["pack 0.inner"],  # the interrupted call is still open, and its scope gets what its unit saves
    )
    assert events[-3:] == ["pack 1", "close 1", "end"]
    assert events.count("close 0") == 1


def test_an_interrupt_leaves_calls_open_until_the_next_forward(recorder):
    model, _ = hooked(recorder, "0", "0.inner", "1")
    handle = model[0].inner.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(leaf())
    assert top_hooks() is not None
    handle.remove()
    assert recorder.take() == UP_TO_INNER
    model(leaf())
    assert recorder.take() == ["close 0.inner", "close 0", *WHOLE_STEP]


def interrupt(*_):
    raise KeyboardInterrupt


def test_remove_leaves_nothing_behind(recorder):
    model, hooks = hooked(recorder, "0", "0.inner", "1")
    loss = model(leaf()).sum()
    handle = model[0].inner.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(leaf())
    handle.remove()
    hooks.remove()
    recorder.take()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    loss.backward()
    assert recorder.take() == ["unpack"]
    model(leaf())
    assert recorder.take() == []


def test_hooks_of_the_user_stay_where_they_were(recorder):
    theirs = []
    said = []
    model, hooks = hooked(recorder, "0")
    hooks.warn = said.append
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: theirs.append(t.detach()) or t.detach(), lambda t: t):
            model(leaf())
            leaf().exp()
        assert recorder.take() == ["begin", "end"]
    assert len(theirs) == 2 * 5  # the unit's, tanh of the module that is no unit, and exp
    assert len(said) == 1
    assert "saved_tensors_hooks of your own are around it" in said[0]


def test_mutation_of_saved_tensors_may_be_allowed_around_a_unit():
    def run(model):
        x = torch.ones(4, 4)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = model(x)
            x.mul_(2)
            y.sum().backward()
        return model[0].weight.grad

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    plain = run(deepcopy(model))
    attachment = ds_fgoffload.attach(model, {"modules": ["0", "1"], "min_tensor_bytes": 0})
    assert torch.equal(run(model), plain)
    attachment.detach()


@pytest.mark.parametrize(
    "copy", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_no_working_hooks(copy, recorder):
    model, _ = hooked(recorder, "0", "0.inner")
    copy(model)(leaf())
    assert recorder.take() == []


def test_modules_that_are_compiled_as_a_whole_are_left_alone(recorder, monkeypatch):
    model, _ = hooked(recorder, "0", "0.inner")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    model(leaf())
    assert recorder.take() == []
