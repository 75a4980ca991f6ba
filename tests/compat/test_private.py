"""Private names of torch and DeepSpeed are taken in one module, which says what is missing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

import ds_fgoffload
from ds_fgoffload.compat.versions import SENTENCE, installed

PACKAGE = Path(ds_fgoffload.__file__).parent
PRIVATE = PACKAGE / "compat" / "private.py"
FOREIGN = (
    torch.Tensor,
    torch.UntypedStorage,
    nn.Module(),
    torch.ops.aten.add.Tensor,
    PipelineEngine,
    torch,
    torch.autograd,
)
"""Objects whose private names look like ours where ours are called the same."""
NOT_TORCHS = {"_asdict", "_replace", "_getframe", "_inheriting", "_is_hf_initialized", "_ds_", "_dap"}
"""Of the standard library, or marks that transformers and DeepSpeed put on modules, which are only left out."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_" and not name.startswith("_ds_fgoffload")


def defined_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                yield from (each.value for each in ast.walk(value) if isinstance(each, ast.Constant))


def foreign_names(source: str, ours: set[str]) -> Iterator[str]:
    """The private names in ``source`` that are not of the package, each with its line."""
    ours = ours | NOT_TORCHS
    for node in ast.walk(ast.parse(source)):
        found: list[str] = []
        match node:
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls")):
                found = [] if name in ours else [name]
            case ast.Attribute(attr=name):
                found = [] if name in ours and not any(hasattr(each, name) for each in FOREIGN) else [name]
            case ast.Constant(value=str(name)) if name.isidentifier():
                found = [] if name in ours else [name]
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("ds_fgoffload"):
                found = [*module.split("."), *(alias.name for alias in names)]
                found = [name for name in found if name != "__future__"]
            case ast.Import(names=names):
                found = [part for alias in names for part in alias.name.split(".")]
        yield from (f"{node.lineno}: {name}" for name in found if is_private(name))


SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
OURS = {name for path, source in SOURCES.items() if path != PRIVATE for name in defined_in(ast.parse(source))}


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path != PRIVATE], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_no_other_module_uses_one(path: Path) -> None:
    assert list(foreign_names(SOURCES[path], OURS)) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch._C.f()", ["1: _C"]),
        ("tensor._version", ["1: _version"]),
        ("self._version", []),
        ("self._config.x", ["1: _config"]),
        ("getattr(x, '_schema')", ["1: _schema"]),
        ("from torch.utils._pytree import tree_leaves", ["1: _pytree"]),
        ("import torch._dynamo", ["1: _dynamo"]),
        ("engine._take_model_step()", ["1: _take_model_step"]),
    ],
)
def test_what_is_found(source: str, found: list[str]) -> None:
    assert list(foreign_names(source, {"_version"})) == found


@pytest.mark.parametrize(
    ("remove", "named"),
    [
        ("import torch; del torch._C._current_graph_task_id", "torch._C._current_graph_task_id"),
        ("import torch; del torch._foreach_copy_, torch._C._is_tracing", "torch._C._is_tracing, torch._foreach_copy_"),
        (
            "from torch import nn; del nn.Module._compiled_call_impl",
            "torch.nn.modules.module.Module._compiled_call_impl",
        ),
        (
            "from deepspeed.runtime.pipe.engine import PipelineEngine as E; del E._INSTRUCTION_MAP",
            "deepspeed.runtime.pipe.engine.PipelineEngine._INSTRUCTION_MAP",
        ),
        (
            "from deepspeed.runtime.zero import parameter_offload as p; del p.FWD_MODULE_STACK",
            "deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK",
        ),
    ],
)
def test_what_is_missing_is_said_at_import(remove: str, named: str) -> None:
    code = f"import deepspeed\n{remove}\nimport ds_fgoffload"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert said == (
        f"ImportError: ds_fgoffload uses names that are not there: {named} (found: {installed()}; supported: "
        f"{SENTENCE}): pip install torch==2.13.0 deepspeed==0.19.8, or a release of ds_fgoffload for these versions"
    )
