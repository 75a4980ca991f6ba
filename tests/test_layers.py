"""Imports point down only, and what is said to be done in one place is done nowhere else."""

import ast
import sys
from pathlib import Path

import pytest

import ds_fgoffload

PACKAGE = Path(ds_fgoffload.__file__).parent
NAME = PACKAGE.name

LAYERS = {
    9: "__main__",
    8: "cli",
    7: "api run auto script integrations integrations.transformers suggest "
    "commands commands.inspect commands.inspect_view commands.doctor commands.random_model "
    "commands.output commands.sample commands.script_failure commands.top",
    6: "report tally step_log step_file page chrome_trace checkpoints "
    "adapters adapters.plain adapters.zero adapters.pipeline",
    5: "hooks watcher",
    4: "offloader open_calls packing recompute",
    3: "scope",
    2: "saved parcel remade recomputed_unit",
    1: "selection eligibility transfer recorder step_times tuner told recompute_cost conditions arguments "
    "pool pool_user pool_stats stock books lease supply budget ledger region pinning",
    0: "compiled purity schedule order plan planner simulation merged reads round_times config sizes layout stats "
    "streams cuda_reads weak_storage errors arena host_limit ledger_file keeper names messages families aliases "
    "inventory recording garbage",
}
BESIDE = {
    "run": {"api", "script"},
    "auto": {"api"},
    "integrations.transformers": {"api"},
    "commands.inspect": {"api", "commands.random_model", "commands.script_failure", "script"},
    "commands.inspect_view": {"commands.inspect", "suggest"},
    "adapters": {"adapters.plain", "adapters.zero", "adapters.pipeline"},
    "adapters.pipeline": {"adapters.zero"},
    "saved": {"parcel"},
    "transfer": {"pool", "recorder"},
    "tuner": {"recorder", "told"},
    "recorder": {"lease", "step_times"},
    "round_times": {"plan", "recording", "stats", "streams"},
    "packing": {"offloader", "open_calls", "recompute"},
    "open_calls": {"offloader", "recompute"},
    "remade": {"parcel", "saved"},
    "recomputed_unit": {"remade", "saved"},
    "planner": {"plan", "simulation"},
    "simulation": {"plan"},
    "merged": {"simulation"},
    "reads": {"plan", "stats"},
    "pool": {"budget", "keeper", "lease", "ledger", "pool_stats", "pool_user", "region", "stock", "supply"},
    "pool_user": {"budget", "lease", "pool_stats"},
    "pool_stats": {"lease"},
    "stock": {"books", "lease", "region", "supply"},
    "books": {"lease", "region"},
    "budget": {"ledger"},
    "region": {"pinning"},
    "supply": {"budget", "pinning", "region"},
    "streams": {"cuda_reads"},
    "schedule": {"order", "plan"},
    "order": {"plan"},
    "aliases": {"families"},
    "step_log": {"report"},
    "tally": {"report"},
    "config": {"errors", "messages", "sizes"},
}
"""What a module may import of its own layer."""

LAYER_OF = {module: layer for layer, modules in LAYERS.items() for module in modules.split()}
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py"
}
MODULES = pytest.mark.parametrize("module", sorted(FILES))


def imported_by(module):
    """Dotted names; ``from a import b`` counts as ``a.b``, which may be a module or something in it."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def siblings_imported_by(module):
    for name in imported_by(module):
        inside = name.removeprefix(f"{NAME}.")
        if inside != name:
            yield inside if inside in FILES else inside.rpartition(".")[0]


def dotted_names_in(module):
    return {
        ast.unparse(n)
        for n in ast.walk(ast.parse(FILES[module].read_text()))
        if isinstance(n, ast.Attribute | ast.Name)
    }


def modules_that_mention(*names):
    """Modules that import one of ``names`` or use it by its dotted name."""
    return {
        module
        for module in FILES
        for found in {*imported_by(module), *dotted_names_in(module)}
        if any(f"{found}.".startswith(f"{name}.") or found.endswith(f".{name}") for name in names)
    }


def test_every_module_has_a_layer():
    assert set(FILES) == set(LAYER_OF)


@MODULES
def test_imports_point_down(module):
    for other in siblings_imported_by(module):
        below = LAYER_OF[other] < LAYER_OF[module]
        assert below or other in BESIDE.get(module, ()), f"{module} imports {other}"


def test_what_may_be_imported_beside_is_imported():
    assert {module: others - set(siblings_imported_by(module)) for module, others in BESIDE.items()} == {
        m: set() for m in BESIDE
    }


@pytest.mark.parametrize("module", ["schedule", "order", "plan"])
def test_the_schedule_is_pure_python(module):
    roots = {name.partition(".")[0] for name in imported_by(module)}
    assert roots <= {NAME} | set(sys.stdlib_module_names)
    assert set(siblings_imported_by(module)) <= {"order", "plan"}


def test_only_the_hooks_know_saved_tensor_hooks():
    assert modules_that_mention("torch.autograd.graph", "saved_tensors_hooks") == {"hooks", "watcher"}


def test_only_streams_knows_the_accelerator():
    assert modules_that_mention("get_accelerator", "deepspeed.accelerator", "torch.accelerator") == {
        "streams",
        "pinning",
    }
    assert modules_that_mention("torch.cuda", "torch.xpu", "torch.npu") <= {"streams", "pinning", "cuda_reads"}


def test_only_adapters_api_and_run_know_engines():
    engines = modules_that_mention("deepspeed.runtime.engine", "deepspeed.runtime.pipe", "deepspeed.initialize")
    assert engines <= {"adapters", "adapters.zero", "adapters.plain", "adapters.pipeline", "api", "auto", "script"}


@MODULES
def test_a_module_can_be_read_in_one_sitting(module):
    assert len(FILES[module].read_text().splitlines()) <= 300
