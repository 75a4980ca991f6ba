"""Makes the pictures in docs/images: what the commands print, and the page of a step in a real browser.

Needs transformers for `inspect`, and Chromium on PATH for the page; without it the page's pictures stay as they are.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTH = 150
sys.path.insert(0, str(ROOT / "tests"))


def commands() -> None:
    from ds_fgoffload.cli import doctor, inspect, inspect_view, random_model

    shape = {
        "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    model = random_model.RandomModel("qwen3", shape, tokens=1024, batch=1, dtype="float32", checkpointing=False)
    inspection = inspect.inspect_transformers(model, 2)
    picture(
        "inspect",
        "ds-fgoffload inspect --transformers qwen3 ...",
        inspect_view.show(inspection, [], inspection.least(1 << 18), None),
    )
    picture("doctor", "ds-fgoffload doctor", doctor.table(doctor.examine(measure=True)))


def pools() -> None:
    from ds_fgoffload.cli import top
    from ds_fgoffload.host_memory import node_ledger as ledger

    gib = 1 << 30
    with tempfile.TemporaryDirectory() as folder:
        rows = [ledger.Ledger(Path(folder) / "node", program="train.py") for _ in range(4)]
        for number, row in enumerate(rows):
            row.describe(limit_bytes=96 * gib, share_bytes=24 * gib)
            row.hold((20 - 4 * number) * gib)
            row.publish((16 - 5 * number) * gib)
        picture("top", "ds-fgoffload top", top.view(ledger.read_node(Path(folder) / "node")))


def picture(name: str, title: str, shown: object) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(shown)
    (IMAGES / f"{name}.svg").write_text(console.export_svg(title=title), encoding="utf-8")


def page_of_a_step() -> None:
    from step_recording import recording  # tests/helpers/step_recording.py, made by hand

    from ds_fgoffload.reporting.page import page

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium on PATH: the page's pictures stay as they are")
        return
    options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "step.html"
        source.write_text(page(recording()), encoding="utf-8")
        for theme in ("light", "dark"):
            to = f"--screenshot={IMAGES / f'step_{theme}.png'}"
            profile = f"--user-data-dir={folder}/{theme}"
            command = [browser, *options.split(), profile, "--window-size=1280,920", to, f"{source.as_uri()}#{theme}"]
            subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    commands()
    pools()
    page_of_a_step()
