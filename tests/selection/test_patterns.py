"""Patterns to units: each rule of ``selection`` with literal names, and globs against an oracle."""

from __future__ import annotations

import fnmatch
import pickle
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_fgoffload.errors import OffloadConfigError
from ds_fgoffload.selection.families import MEANINGS
from ds_fgoffload.selection.patterns import check, match, select
from ds_fgoffload.text.names import nearest

ALIASES = ", ".join(f"@{word}" for word in MEANINGS)


class Node(nn.Module):
    """A module with the given children."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Any) -> Any:
        return x


class Mlp(Node):
    pass


def layer() -> Node:
    return Node(attn=Node(q=nn.Linear(1, 1)), mlp=Mlp(fc1=nn.Linear(1, 1), act_fn=nn.GELU(), fc2=nn.Linear(1, 1)))


def model(layers: int = 2) -> Node:
    """``model.layers.<i>.{attn.q,mlp.{fc1,act_fn,fc2}}`` and ``lm_head``."""
    return Node(
        model=Node(embed=nn.Embedding(1, 1), layers=nn.ModuleList(layer() for _ in range(layers))),
        lm_head=nn.Linear(1, 1),
    )


def units(modules: list[str], exclude: list[str] | None = None, root: nn.Module | None = None) -> list[str]:
    root = root or model()
    selection = select(root, modules, exclude or [])
    for name, module in {**selection.units, **selection.excluded}.items():
        assert root.get_submodule(name) is module
    return list(selection.units)


def refusal(modules: list[str], exclude: list[str] | None = None, root: nn.Module | None = None) -> list[str]:
    with pytest.raises(OffloadConfigError) as caught:
        select(root or model(), modules, exclude or [])
    return str(caught.value).split("\n")


LAYERS = ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model.layers.*.mlp", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("model.layers.1.mlp", ["model.layers.1.mlp"]),
        ("model.layers.[1-9].mlp", ["model.layers.1.mlp"]),
        ("*.fc?", [f"model.layers.{i}.mlp.fc{k}" for i in range(2) for k in (1, 2)]),
        ("model.layers.*", LAYERS),
        ("model.layers*", LAYERS),
        ("model.layers", LAYERS),
        ("class:ModuleList", LAYERS),
        ("*layers*", LAYERS),
        ("*", [""]),
        ("?*", ["model", "lm_head"]),
        ("re:.*", [""]),
        (r"re:model\.layers\.\d\.attn", ["model.layers.0.attn", "model.layers.1.attn"]),
        (r"re:model\.layers\.\d", LAYERS),
        ("class:Mlp", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("class:M*p", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("class:torch.nn.modules.activation.GELU", ["model.layers.0.mlp.act_fn", "model.layers.1.mlp.act_fn"]),
        ("class:torch.nn.*.Embedding", ["model.embed"]),
        ("class:Node", [""]),
    ],
)
def test_the_outermost_match_of_a_pattern_is_the_unit(pattern: str, expected: list[str]) -> None:
    assert units([pattern]) == expected


def test_different_patterns_may_nest() -> None:
    assert units(["*.fc1", "model.layers.0", "*.mlp"]) == [
        "model.layers.0",
        "model.layers.0.mlp",
        "model.layers.0.mlp.fc1",
        "model.layers.1.mlp",
        "model.layers.1.mlp.fc1",
    ]


@pytest.mark.parametrize(
    ("modules", "exclude", "expected", "excluded"),
    [
        (["model.layers.*"], ["lm_head"], LAYERS, []),
        (["model.layers.*"], ["model.layers.0"], ["model.layers.1"], []),
        (["*.mlp"], ["model.layers.0"], ["model.layers.1.mlp"], []),
        (["*.fc1"], ["model.layers.0"], ["model.layers.1.mlp.fc1"], []),
        (["model.layers.0"], ["*.mlp*"], ["model.layers.0"], ["model.layers.0.mlp"]),
        (["model.layers.0"], ["*.fc1", "*.mlp"], ["model.layers.0"], ["model.layers.0.mlp"]),
        (["model.layers.0", "*.fc1"], ["*.act_fn"], None, ["model.layers.0.mlp.act_fn"]),
        (["model"], ["model.layers"], ["model"], LAYERS),
        (["*"], ["class:ModuleList", "lm_head"], [""], [*LAYERS, "lm_head"]),
    ],
)
def test_exclude_wins(modules: list[str], exclude: list[str], expected: list[str] | None, excluded: list[str]) -> None:
    selection = select(model(), modules, exclude)
    assert expected is None or list(selection.units) == expected
    assert list(selection.excluded) == excluded


def tied() -> Node:
    shared = Mlp(fc1=nn.Linear(1, 1))
    return Node(a=Node(x=shared), b=Node(y=shared, z=nn.Linear(1, 1)))


@pytest.mark.parametrize(
    ("modules", "exclude", "expected", "excluded"),
    [
        (["b.y"], [], ["a.x"], []),
        (["a.x", "b.y"], [], ["a.x"], []),
        (["*.fc1"], [], ["a.x.fc1"], []),
        (["b.y.fc1"], [], ["a.x.fc1"], []),
        (["a.x", "b.z"], ["b.y"], ["b.z"], []),
        (["a.x.fc1", "a"], ["b"], ["a"], []),
        (["a"], ["b.y"], ["a"], ["a.x"]),
        (["a*"], [], ["a"], []),
    ],
)
def test_a_tied_module_is_one_unit(modules: list[str], exclude: list[str], expected: Any, excluded: Any) -> None:
    selection = select(tied(), modules, exclude)
    assert list(selection.units) == expected
    assert list(selection.excluded) == excluded


P = "fine_grained_offload."


@pytest.mark.parametrize(
    ("modules", "exclude", "lines"),
    [
        (
            ["model.layers.*.mlpp"],
            [],
            [
                'modules: pattern "model.layers.*.mlpp" matches no module (nearest: "model.layers.0.mlp", '
                '"model.layers.0.mlp.fc1", "model.layers.0.mlp.act_fn")'
            ],
        ),
        (
            ["act_fn"],
            [],
            [
                'modules: pattern "act_fn" matches no module (nearest: "model.layers.0.mlp.act_fn"); '
                'to match at any depth write "*.act_fn"'
            ],
        ),
        (
            ["class:MLP2"],
            [],
            [
                'modules: pattern "class:MLP2" matches no module (no name is near; there are "class:Node", '
                '"class:Embedding", "class:ModuleList", "class:Linear", "class:Mlp", ...)'
            ],
        ),
        (["class:Embeding"], [], ['modules: pattern "class:Embeding" matches no module (nearest: "class:Embedding")']),
        (
            ["*"],
            ["lmhead"],
            ['exclude: pattern "lmhead" matches no module (nearest: "lm_head")'],
        ),
        (
            ["re:(", "@atn_norm", "", "zzz"],
            ["re:", "class:"],
            [
                'modules: pattern "re:(" is not a regular expression: missing ), unterminated subpattern at position 0',
                f'modules: pattern "@atn_norm": no such alias (nearest: "@attn_norm"); allowed: {ALIASES}',
                'modules: pattern "" is empty; write a name, a glob, "re:..." or "class:Name"',
                'exclude: pattern "re:" is empty; write a name, a glob, "re:..." or "class:Name"',
                'exclude: pattern "class:" is empty; write a name, a glob, "re:..." or "class:Name"',
                'modules: pattern "zzz" matches no module (no name is near; there are "model", "model.embed", '
                '"model.layers", "model.layers.0", "model.layers.0.attn", ...)',
            ],
        ),
        (
            ["*.mlp", "*.attn"],
            ["model"],
            ['exclude: excludes every module that "modules" selects; narrow one or the other'],
        ),
    ],
)
def test_faults_are_told_in_one_error(modules: list[str], exclude: list[str], lines: list[str]) -> None:
    assert refusal(modules, exclude) == [P + line for line in lines]


@pytest.mark.parametrize(
    ("modules", "recompute", "who"),
    [([], ["*.mlp"], '"recompute" selects'), (["*.mlp"], ["*.attn"], '"modules" and "recompute" select')],
)
def test_what_is_all_excluded_is_named_by_its_key(modules: list[str], recompute: list[str], who: str) -> None:
    with pytest.raises(OffloadConfigError) as caught:
        select(model(), modules, ["model"], recompute)
    assert str(caught.value) == f"{P}exclude: excludes every module that {who}; narrow one or the other"


def test_a_container_that_holds_nothing_is_named() -> None:
    assert refusal(["blocks"], root=Node(blocks=nn.ModuleList(), fc=nn.Linear(1, 1))) == [
        'fine_grained_offload.modules: pattern "blocks" matches no module (nearest: "blocks"); '
        '"blocks" is a ModuleList, which is never called, and holds no module that is'
    ]


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("layers.*.mlpp", ["model.layers.0.mlp"]),
        (r"re:model\.layers\.\d+\.mpl", ["model.layers.0.mlp"]),
        ("model.layers.[0-3].mlpp", ["model.layers.0.mlp"]),
        ("*.embeds", ["model.embed"]),
        ("model.layers.0.mlp.fc22", ["model.layers.0.mlp.fc2"]),
    ],
)
def test_the_nearest_comes_first(pattern: str, near: list[str]) -> None:
    names = [name for name, _ in model().named_modules()]
    assert nearest(pattern, names, [])[: len(near)] == near


def test_the_nearest_names_differ_in_shape() -> None:
    names = [f"h{i}.{part}" for i in range(20) for part in ("mlp", "mlp.up", "attn")]
    assert nearest("h3.mlpx", names, []) == ["h3.mlp", "h3.mlp.up"]


def stage(*numbers: int) -> Node:
    return Node(**{str(number): layer() for number in numbers})


def test_a_pattern_may_match_on_another_rank_only() -> None:
    stages = [stage(0, 1), stage(2, 3)]
    results = [match(root, ["0.mlp", "3.mlp"], ["2.attn"]) for root in stages]
    assert [list(selection.units) for selection, _ in results] == [["0.mlp"], ["3.mlp"]]
    findings = pickle.loads(pickle.dumps([finding for _, finding in results]))
    check(findings)
    for finding in findings:
        with pytest.raises(OffloadConfigError):
            check([finding])


def test_a_pattern_that_matches_on_no_rank_is_told_with_the_names_of_all() -> None:
    first, second = stage(0, 1), Node(**{"2": layer(), "final_norm": nn.LayerNorm(1)})
    findings = [match(root, ["*.mlp", "finalnorm", "mlp"])[1] for root in (first, second)]
    with pytest.raises(OffloadConfigError) as caught:
        check(findings)
    assert str(caught.value).split("\n") == [
        'fine_grained_offload.modules: pattern "finalnorm" matches no module (nearest: "final_norm")',
        'fine_grained_offload.modules: pattern "mlp" matches no module (nearest: "0.mlp"); '
        'to match at any depth write "*.mlp"',
    ]


def test_a_stage_whose_units_are_all_excluded_is_no_fault() -> None:
    results = [match(root, ["*.mlp"], ["2", "3"]) for root in (stage(0, 1), stage(2, 3))]
    assert [list(selection.units) for selection, _ in results] == [["0.mlp", "1.mlp"], []]
    check([finding for _, finding in results])


def test_findings_stay_small() -> None:
    _, findings = match(model(100), ["model.layers.*.mlp"])
    assert findings.names == findings.classes == ()
    _, findings = match(model(100), ["nothing"])
    assert findings.names == (
        *("model", "model.embed", "model.layers", "model.layers.0", "model.layers.0.attn", "model.layers.0.attn.q"),
        *("model.layers.0.mlp", "model.layers.0.mlp.fc1", "model.layers.0.mlp.act_fn", "model.layers.0.mlp.fc2"),
        "lm_head",
    )
    assert findings.classes == ("Node", "Embedding", "ModuleList", "Linear", "Mlp", "GELU")


def test_fifty_thousand_modules() -> None:
    root = model(7000)
    start = time.perf_counter()
    selection = select(root, ["model.layers.*.mlp", "*.attn", "class:Linear", r"re:.*\.fc1"], ["*.act_fn"])
    assert time.perf_counter() - start < 10  # about 0.5 s; compiling a glob per name, or comparing pairs, takes minutes
    assert len(selection.units) == 7000 * 5 + 1
    assert len(selection.excluded) == 7000


TREES = st.recursive(
    st.just({}), lambda below: st.dictionaries(st.sampled_from(["a", "b", "ab", "0"]), below, max_size=3), max_leaves=12
)
GLOBS = st.lists(st.sampled_from(["a", "b", "0", ".", "*", "?", "[a0]", "[!b]"]), min_size=1, max_size=5).map("".join)


def build(tree: dict[str, Any]) -> Node:
    return Node(**{name: build(below) for name, below in tree.items()})


def above(name: str) -> list[str]:
    """All ancestors of ``name``, outermost first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts))]


@settings(max_examples=300, deadline=None)
@given(TREES, st.lists(GLOBS, min_size=1, max_size=3), st.lists(GLOBS, max_size=2))
def test_globs_against_an_oracle(tree: dict[str, Any], modules: list[str], exclude: list[str]) -> None:
    root = build(tree)
    names = [name for name, _ in root.named_modules()]
    barred = {n for n in names if any(fnmatch.fnmatchcase(n, p) for p in exclude)}
    picked: set[str] = set()
    for pattern in modules:
        hits = {n for n in names if fnmatch.fnmatchcase(n, pattern)}
        picked |= {n for n in hits if not hits & set(above(n))}
    expected = [n for n in names if n in picked and not barred & {n, *above(n)}]
    inside = [n for n in names if n in barred and not barred & set(above(n)) and set(expected) & set(above(n))]

    selection, findings = match(root, modules, exclude)
    assert list(selection.units) == expected
    assert list(selection.excluded) == inside
    assert {u.pattern for u in findings.unmatched if u.key == "modules"} == {
        p for p in modules if not any(fnmatch.fnmatchcase(n, p) for n in names)
    }
    assert (findings.selected, findings.units) == (len(picked), len(expected))
