"""What the documents show is what the program takes."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from benchmarks import tables
from ds_fgoffload.config import SECTION, find_section, parse_config

ROOT = Path(__file__).parents[1]
PAGES = [page for folder in (".", "docs", "ds_configs", "examples/byte_lm") for page in (ROOT / folder).glob("*.md")]


def test_the_configuration_page_is_made_from_the_fields():
    specification = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs/make_configuration.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: python docs/make_configuration.py"


def sections():
    for page in PAGES:
        for number, text in enumerate(re.findall(r"```json\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            if SECTION in text:
                yield pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("text", list(sections()))
def test_every_json_snippet_is_a_valid_section(text):
    whole = text.strip()
    section = json.loads(whole if whole.startswith("{") else "{" + whole + "}")[SECTION]
    assert parse_config(section).enabled


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.name)
def test_every_configuration_file_has_a_valid_section(path):
    json.loads(path.read_text(encoding="utf-8"))  # as Accelerate reads it: no comments
    assert parse_config(find_section(path)).enabled


def links():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                yield pytest.param(page, target, id=f"{page.relative_to(ROOT)}-{target}")


@pytest.mark.parametrize(("page", "target"), list(links()))
def test_every_link_leads_somewhere(page, target):
    assert (page.parent / target).exists()


@pytest.mark.parametrize("page", sorted(tables.PAGES))
def test_tables_are_made_from_the_results(page):
    assert tables.between_markers(page) == tables.PAGES[page](), "run: python -m benchmarks.tables"
