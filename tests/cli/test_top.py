"""The live view shows what the pools of this node have written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_fgoffload.cli import main as cli
from ds_fgoffload.cli import top
from ds_fgoffload.host_memory import node_ledger as ledger

MIB = 1 << 20


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ledger.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cli, "_console", lambda: cli.Console(width=160))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["top", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.usefixtures("node")
def test_a_row_for_each_pool_and_the_sums() -> None:
    assert "no host pool of this user is alive" in run("--once")
    pools = [ledger.Ledger(program=f"train{n}.py") for n in range(2)]
    for n, pool in enumerate(pools):
        pool.describe(limit_bytes=512 * MIB, share_bytes=256 * MIB)
        pool.hold((n + 1) * 64 * MIB)
        pool.publish(32 * MIB)
    rows = [line.split() for line in run("--once").splitlines() if "MiB" in line]
    assert [row[1:2] + row[3:7] for row in rows[:2]] == [
        ["train0.py", "64.0", "MiB", "32.0", "MiB"],
        ["train1.py", "128.0", "MiB", "32.0", "MiB"],
    ]
    assert rows[0][7].count("█") == 2 * rows[1][7].count("█") == top._BAR // 2
    assert rows[2][:7] == ["2", "in", "all", "192.0", "MiB", "64.0", "MiB"]
    assert [pool["pinned_bytes"] for pool in json.loads(run("--json"))] == [64 * MIB, 128 * MIB]
    for pool in pools:
        pool.leave()
    assert "no host pool of this user is alive" in run("--once")
