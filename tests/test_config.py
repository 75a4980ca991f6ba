"""The section as users write it: what is taken, what is refused, and in which words."""

from __future__ import annotations

import base64
import copy
import json
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_fgoffload import config as config_module
from ds_fgoffload.config import (
    SECTION,
    FineGrainedOffloadConfig,
    HostPoolConfig,
    find_section,
    parse_config,
)
from ds_fgoffload.errors import OffloadConfigError
from ds_fgoffload.text.sizes import parse_size

SIZE = 'a whole number of bytes >= 0, or text such as "64MiB" (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)'
KEYS = (
    '"enabled", "modules", "exclude", "recompute", "policy", "max_overhead", "target_saved_bytes", "min_tensor_bytes", '
    '"plan_file", "release_window_bytes", "prefetch_window_bytes", "release_pipeline_buffers", "report_after_steps", '
    '"host_pool"'
)


def refusal(section: Any) -> list[str]:
    with pytest.raises(OffloadConfigError) as caught:
        parse_config(section)
    return str(caught.value).split("\n")


def test_defaults() -> None:
    assert parse_config({"modules": ["a"]}).model_dump() == {
        "enabled": True,
        "modules": ["a"],
        "exclude": [],
        "recompute": [],
        "policy": "auto",
        "max_overhead": None,
        "target_saved_bytes": None,
        "min_tensor_bytes": 1048576,
        "plan_file": None,
        "release_window_bytes": None,
        "prefetch_window_bytes": None,
        "release_pipeline_buffers": False,
        "report_after_steps": 10,
        "host_pool": {
            "max_bytes": None,
            "node_max_bytes": None,
            "quota_bytes": None,
            "preallocate_bytes": 0,
            "pin_memory": True,
            "on_pin_failure": "pageable",
            "idle_trim_s": 120.0,
            "on_full": "keep",
        },
    }


def test_every_key_is_taken() -> None:
    section = {
        "enabled": False,
        "modules": ["a", "re:b", "class:C"],
        "exclude": ["lm_head"],
        "recompute": [],
        "policy": "all",
        "max_overhead": 0.01,
        "target_saved_bytes": "2GB",
        "min_tensor_bytes": 0,
        "plan_file": "plans/{rank}.json",
        "release_window_bytes": "64MiB",
        "prefetch_window_bytes": 5e8,
        "release_pipeline_buffers": True,
        "report_after_steps": 0,
        "host_pool": {
            "max_bytes": "1.5GiB",
            "node_max_bytes": "8GiB",
            "quota_bytes": "1GiB",
            "preallocate_bytes": 0,
            "pin_memory": False,
            "on_pin_failure": "keep",
            "idle_trim_s": None,
            "on_full": "error",
        },
    }
    assert parse_config(section).model_dump() == section | {
        "target_saved_bytes": 2_000_000_000,
        "release_window_bytes": 67108864,
        "prefetch_window_bytes": 500_000_000,
        "release_pipeline_buffers": True,
        "report_after_steps": 0,
        "host_pool": {
            **section["host_pool"],
            "max_bytes": 1610612736,
            "node_max_bytes": 8 << 30,
            "quota_bytes": 1 << 30,
        },
    }


def test_no_section_is_disabled() -> None:
    assert parse_config(None).enabled is False


def test_a_config_object_is_returned_as_it_is() -> None:
    config = FineGrainedOffloadConfig(modules=["a"])
    assert parse_config(config) is config


@pytest.mark.parametrize("kind", [OrderedDict, MappingProxyType])
def test_any_mapping_will_do(kind: Any) -> None:
    section = kind({"modules": ["a"], "host_pool": kind({"on_full": "error"})})
    assert parse_config(section).host_pool.on_full == "error"


def test_null_means_unset() -> None:
    section = {"modules": ["a"], "release_window_bytes": None, "max_overhead": None, "host_pool": {"max_bytes": None}}
    assert parse_config(section) == parse_config({"modules": ["a"]})


def test_the_users_dictionary_is_not_touched() -> None:
    section: dict[str, Any] = {"modules": ["a"], "policy": "auto", "host_pool": {"max_bytes": "1MiB"}}
    before = copy.deepcopy(section)
    parse_config(section).modules.append("b")
    assert section == before


@pytest.mark.parametrize(
    ("section", "lines"),
    [
        (
            {"modules": ["a"], "host_pool": {"on_full": "drop"}},
            ['fine_grained_offload.host_pool.on_full: got "drop", allowed: "keep", "error"'],
        ),
        (
            {"modules": ["a"], "host_pool": {"preallocate_bytes": "900TiB", "max_bytes": "1GiB"}},
            [
                'fine_grained_offload.host_pool.preallocate_bytes: got "900TiB", allowed: at most '
                "host_pool.max_bytes, which is 1073741824 bytes"
            ],
        ),
        (
            {"modules": ["a"], "host_pool": {"preallocate_bytes": 2, "node_max_bytes": 1}},
            [
                "fine_grained_offload.host_pool.preallocate_bytes: got 2, allowed: at most "
                "host_pool.node_max_bytes, which is 1 bytes"
            ],
        ),
        (
            {"modules": ["a"], "modlues": ["b"]},
            [f'fine_grained_offload.modlues: unknown key (nearest: "modules"); allowed: {KEYS}'],
        ),
        ({"modules": ["a"], "strict": True}, [f"fine_grained_offload.strict: unknown key; allowed: {KEYS}"]),
        ({"modules": ["a"], "xyz": "auto"}, [f"fine_grained_offload.xyz: unknown key; allowed: {KEYS}"]),
        ({"modules": ["a"], 7: 1}, [f"fine_grained_offload.7: unknown key; allowed: {KEYS}"]),
        (
            {"modules": ["a"], "host_pool": {"max_byte": 1}},
            [
                'fine_grained_offload.host_pool.max_byte: unknown key (nearest: "max_bytes"); '
                'allowed: "max_bytes", "node_max_bytes", "quota_bytes", "preallocate_bytes", "pin_memory", '
                '"on_pin_failure", "idle_trim_s", "on_full"'
            ],
        ),
        (
            {"modules": ["a"], "enabled": "yes please"},
            ['fine_grained_offload.enabled: got "yes please", allowed: true, false'],
        ),
        ({"modules": ["a"], "enabled": 1}, ["fine_grained_offload.enabled: got 1, allowed: true, false"]),
        (
            {"modules": "a string"},
            ['fine_grained_offload.modules: got "a string", allowed: a list of patterns, such as ["encoder.*"]'],
        ),
        (
            {"modules": None},
            ['fine_grained_offload.modules: got null, allowed: a list of patterns, such as ["encoder.*"]'],
        ),
        ({"modules": ["a", 3]}, ["fine_grained_offload.modules.1: got 3, allowed: text"]),
        ({"modules": ["a", " "]}, ['fine_grained_offload.modules.1: got " ", allowed: a pattern that is not empty']),
        (
            {},
            [
                "fine_grained_offload.modules: got [], allowed: at least one pattern, "
                'such as "model.layers.*.mlp" (or set "enabled": false)'
            ],
        ),
        ({"recompute": [3]}, ["fine_grained_offload.recompute.0: got 3, allowed: text"]),
        ({"recompute": ["a", ""]}, ['fine_grained_offload.recompute.1: got "", allowed: a pattern that is not empty']),
        ({"modules": ["a"], "policy": "none"}, ['fine_grained_offload.policy: got "none", allowed: "auto", "all"']),
        ({"modules": ["a"], "host_pool": 3}, ["fine_grained_offload.host_pool: got 3, allowed: an object"]),
        ({"modules": ["a"], "max_overhead": -1}, ["fine_grained_offload.max_overhead: got -1, allowed: a number >= 0"]),
        (
            {"modules": ["a"], "max_overhead": True},
            ["fine_grained_offload.max_overhead: got true, allowed: a number >= 0"],
        ),
        (
            {"modules": ["a"], "max_overhead": float("nan")},
            ["fine_grained_offload.max_overhead: got NaN, allowed: a number >= 0"],
        ),
        *(
            (
                {"modules": ["a"], "plan_file": value},
                [
                    f'fine_grained_offload.plan_file: got "{value}", allowed: the path of a file, such as '
                    '"plans/run.json"' + ("; leave the key out for the default" if value else "")
                ],
            )
            for value in ("", "auto")
        ),
        (
            {"modules": ["a"], "min_tensor_bytes": None},
            [f"fine_grained_offload.min_tensor_bytes: got null, allowed: {SIZE}"],
        ),
        (
            {"modules": ["a"], "host_pool": {"max_bytes": "lots"}},
            [f'fine_grained_offload.host_pool.max_bytes: got "lots", allowed: {SIZE}'],
        ),
        (
            {"modules": "auto", "min_tensor_bytes": "auto", "host_pool": {"pin_memory": "auto"}},
            [
                'fine_grained_offload.modules: got "auto", allowed: a list of patterns, such as ["encoder.*"]; '
                "leave the key out for the default",
                f'fine_grained_offload.min_tensor_bytes: got "auto", allowed: {SIZE}; '
                "leave the key out for the default",
                'fine_grained_offload.host_pool.pin_memory: got "auto", allowed: true, false; '
                "leave the key out for the default",
            ],
        ),
        (True, ['fine_grained_offload: got true, allowed: an object such as {"modules": ["model.layers.*.mlp"]}']),
        (
            ["a" * 100],
            [
                f'fine_grained_offload: got ["{"a" * 75}..., allowed: an object such as '
                '{"modules": ["model.layers.*.mlp"]}'
            ],
        ),
    ],
)
def test_refusals(section: Any, lines: list[str]) -> None:
    assert refusal(section) == lines


def test_auto_is_a_policy_and_is_not_dropped() -> None:
    assert parse_config({"modules": ["a"], "policy": "auto"}).model_fields_set == {"modules", "policy"}


@pytest.mark.parametrize("field", [*FineGrainedOffloadConfig.model_fields, *HostPoolConfig.model_fields])
def test_the_constructors_drop_no_auto_either(field: str) -> None:
    model = FineGrainedOffloadConfig if field in FineGrainedOffloadConfig.model_fields else HostPoolConfig
    if field == "policy":
        assert "policy" in model(modules=["a"], policy="auto").model_fields_set
    else:
        with pytest.raises(ValueError, match=field):
            model(**{"enabled": False, field: "auto"} if model is FineGrainedOffloadConfig else {field: "auto"})


@pytest.mark.parametrize("model", [FineGrainedOffloadConfig, HostPoolConfig])
def test_every_field_has_its_docstring(model: Any) -> None:
    for name, field in model.model_fields.items():
        assert field.description, name
    assert HostPoolConfig.model_fields["pin_memory"].description is not None
    assert HostPoolConfig.model_fields["pin_memory"].description.startswith("Page-lock the host memory.")


@pytest.mark.parametrize(
    ("more", "why"),
    [({"policy": "all"}, 'policy is "all"'), ({"prefetch_window_bytes": 0}, "prefetch_window_bytes is set")],
)
def test_what_has_no_effect_is_said_once(more: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(config_module, "warn", said.append)
    config_module._warn_once.cache_clear()
    section = {"modules": ["a"], "max_overhead": 0, "target_saved_bytes": "1GiB"}
    for text in ({**section, **more}, {**section, **more}, section, {"modules": ["a"], **more}):
        parse_config(text)
    assert said == [
        f"fine_grained_offload.max_overhead has no effect: {why}, and nothing is chosen then",
        f"fine_grained_offload.target_saved_bytes has no effect: {why}, and nothing is chosen then",
    ]


def test_an_overhead_that_was_meant_in_per_cent_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(config_module, "warn", said.append)
    config_module._warn_once.cache_clear()
    for overhead in (5, 5, 1, 0.05):
        parse_config({"modules": ["a"], "max_overhead": overhead})
    assert said == [
        "fine_grained_offload.max_overhead is a fraction: 5.0 lets compute wait for 500% of the time that a step "
        "takes; five per cent is 0.05"
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (7, 7),
        (5e8, 500_000_000),
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("64MiB", 67108864),
        (" 64 mib ", 67108864),
        ("64MB", 64_000_000),
        ("1.5KiB", 1536),
        ("3TiB", 3298534883328),
        ("2tb", 2_000_000_000_000),
        (10**30, 10**30),
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "value",
    [True, False, None, [], -1, -1.0, 0.5, float("inf"), float("nan")],
)
def test_sizes_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="a whole number of bytes"):
        parse_size(value)


@pytest.mark.parametrize(
    "value", ["", "MiB", "-1MiB", "64M", "64Mb/s", "1e9", "0.3B", "1,000", "\u0661", "1\u212aB", "auto"]
)
def test_texts_refused_as_sizes(value: str) -> None:
    with pytest.raises(ValueError, match="a whole number of bytes"):
        parse_size(value)


@given(st.integers(min_value=0, max_value=10**15), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_sizes_are_exact(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count << {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[unit]


@given(st.one_of(st.booleans(), st.integers(max_value=-1), st.floats(max_value=-1e-9), st.text(), st.binary()))
def test_a_size_is_a_natural_number_or_refused(value: Any) -> None:
    try:
        size = parse_size(value)
    except ValueError:
        return
    assert isinstance(value, str)
    assert type(size) is int
    assert size >= 0


def test_find_section_in_a_dictionary() -> None:
    section = {"modules": ["a"]}
    assert find_section({"train_batch_size": 1, SECTION: section}) is section
    assert find_section({"train_batch_size": 1}) is None
    assert find_section({SECTION: None}) is None
    assert find_section(None) is None


def test_find_section_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text('{\n  # a comment, as HJSON allows\n  "fine_grained_offload": {"modules": ["a"]}\n}')
    assert find_section(file) == {"modules": ["a"]}
    assert find_section(str(file)) == {"modules": ["a"]}


def test_find_section_in_base64() -> None:
    text = base64.urlsafe_b64encode(json.dumps({SECTION: {"modules": ["a"]}}).encode()).decode()
    assert find_section(text) == {"modules": ["a"]}


@pytest.mark.parametrize(
    ("content", "said"),
    [('{"a": 1', "cannot be read as JSON"), ('{"a": 1, "a": 2}', "Duplicate keys"), ("[1]", r"got \[1\], allowed")],
)
def test_find_section_refuses_a_bad_file(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(content)
    with pytest.raises(OffloadConfigError, match=said):
        find_section(file)


@pytest.mark.parametrize(
    ("ds_config", "said"),
    [
        ("nowhere.json", "ds_config nowhere.json: no such file"),
        ({SECTION: True}, "fine_grained_offload: got true, allowed: an object"),
        ([1], r"ds_config: got \[1\], allowed: a dictionary"),
    ],
)
def test_find_section_refuses(ds_config: Any, said: str) -> None:
    with pytest.raises(OffloadConfigError, match=said):
        find_section(ds_config)
