from __future__ import annotations

import pytest

from ds_fgoffload.text.names import abbreviated, families


def layers(part: str, *numbers: int) -> list[str]:
    return [f"model.layers.{n}.{part}" for n in numbers]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["lm_head"], "lm_head"),
        (layers("mlp", 3), "model.layers.3.mlp"),
        (layers("mlp", *range(32)), "model.layers.{0..31}.mlp"),
        (layers("mlp", 0, 1), "model.layers.{0,1}.mlp"),
        (layers("mlp", 11, 10, 9, 7, 2, 0, 1), "model.layers.{0..2,7,9..11}.mlp"),
        (
            [f"h.{n}.experts.{e}.w1" for n in range(4) for e in range(8)],
            "h.{0..3}.experts.{0..7}.w1",
        ),
        (["h.0.e.0", "h.0.e.1", "h.1.e.0"], "h.0.e.0, h.0.e.1, h.1.e.0"),
        (["h.0.e.0", "h.0.e.1", "h.1.e.0", "h.2.e.9"], "h.0.e.0, h.0.e.1, h.1.e.0 and 1 more"),
        ([*layers("mlp", 0, 1, 2), "lm_head"], "model.layers.{0..2}.mlp, lm_head"),
        (["fc1", "fc2"], "fc1, fc2"),  # digits inside a part are no number of a layer
    ],
)
def test_what_repeats_is_said_once(names: list[str], text: str) -> None:
    assert abbreviated(names) == text


def test_each_family_knows_its_members() -> None:
    assert families(["a.0.x", "b", "a.1.x"]) == {"a.{0,1}.x": ["a.0.x", "a.1.x"], "b": ["b"]}
