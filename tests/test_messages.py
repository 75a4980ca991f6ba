from __future__ import annotations

import pytest

from ds_fgoffload import messages


@pytest.mark.parametrize(("rank", "said"), [(None, ["hello"]), ("0", ["hello"]), ("3", [])])
def test_what_holds_for_every_rank_is_said_by_the_first(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, said: list[str]
) -> None:
    told: list[str] = []
    monkeypatch.setattr(messages.logger, "warning", told.append)
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    messages.warn("hello")
    assert told == said


def test_the_process_group_knows_better_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(messages.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(messages.torch.distributed, "get_rank", lambda: 5)
    assert messages.rank() == 5
