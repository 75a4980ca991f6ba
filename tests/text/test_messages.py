from __future__ import annotations

import errno
import io
import sys

import pytest

from ds_fgoffload.text import messages


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


TABLE = "┏━━┳━━┓\n┃ é┃ b┃\n┡━━╇━━┩\n│ 1│ 2│\n├──┼──┤\n└──┴──┘"
IN_ASCII = "+==+==+\n| \\xe9| b|\n+==+==+\n| 1| 2|\n+--+--+\n+--+--+"


@pytest.mark.parametrize(
    ("encoding", "shown"), [("utf-8", TABLE), ("ascii", IN_ASCII), ("latin-1", IN_ASCII), ("cp1252", IN_ASCII)]
)
def test_a_report_is_printed_as_far_as_the_output_can(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str
) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))
    assert messages.printable(TABLE) == shown
    messages.show(TABLE)
    assert output.getvalue().decode(encoding) == f"{shown}\n"


class Output(io.StringIO):
    """Takes ASCII alone, whatever it says; or nothing."""

    def __init__(self, encoding: str | None, error: OSError | None = None) -> None:
        super().__init__()
        self._encoding, self._error = encoding, error

    @property
    def encoding(self) -> str | None:
        return self._encoding

    def write(self, text: str) -> int:
        if self._error is not None:
            raise self._error
        return super().write(text.encode("ascii").decode())


@pytest.mark.parametrize("encoding", ["utf-8", "no such encoding", None])
def test_an_output_that_takes_less_than_it_says_gets_ascii(
    monkeypatch: pytest.MonkeyPatch, encoding: str | None
) -> None:
    output = Output(encoding)
    monkeypatch.setattr(sys, "stdout", output)
    messages.show(TABLE)
    assert output.getvalue() == f"{IN_ASCII}\n"


def test_an_output_that_takes_nothing_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for output in (
        None,
        closed,
        Output("utf-8", OSError(errno.ENOSPC, "no space")),
        Output("utf-8", BrokenPipeError()),
    ):
        monkeypatch.setattr(sys, "stdout", output)
        messages.show(TABLE)
