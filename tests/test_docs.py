"""What the documents show is what the program takes."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

import ds_fgoffload
from benchmarks import tables
from ds_fgoffload.cli import main as cli
from ds_fgoffload.config import SECTION, find_section, parse_config

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for folder in (".", "docs", "ds_configs", "examples/byte_lm", "examples/hf_trainer")
    for page in (ROOT / folder).glob("*.md")
]


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


def test_the_page_of_aliases_is_made_from_the_table():
    specification = importlib.util.spec_from_file_location("make_aliases", ROOT / "docs/make_aliases.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: python docs/make_aliases.py"


def blocks(language):
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for number, block in enumerate(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)):
            yield pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("text", list(blocks("python")))
def test_every_python_snippet_calls_what_there_is(text):
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("ds_fgoffload"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"ds_fgoffload": ds_fgoffload, "offload": ds_fgoffload.Attachment}.get(node.value.id)
            assert owner is None or hasattr(owner, node.attr), ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ds_fgoffload.attach" and len(node.args) == 2:
            assert parse_config(ast.literal_eval(node.args[1])).enabled


def commands():
    for parameter in blocks("sh"):
        lines = parameter.values[0].replace("\\\n", " ").splitlines()
        for line in lines:
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield pytest.param(words, id=f"{parameter.id}-{' '.join(words)[:40]}")


@pytest.mark.parametrize("words", list(commands()))
def test_every_command_in_the_pages_is_one(words):
    if words[0] == "ds-fgoffload":
        command = typer.main.get_command(cli.app).commands[words[1]]
        context = command.make_context(words[1], words[2:])
        assert context.params
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif words[0] in {"deepspeed", "torchrun", "accelerate"}:
        assert {"-m", "--module"} & set(words)
        module = words[next(i for i, word in enumerate(words) if word in {"-m", "--module"}) + 1]
        assert importlib.util.find_spec(module)
    for word in words:
        if word.startswith(("examples/", "ds_configs/")):
            assert (ROOT / word).exists()


def references():
    for page in PAGES:
        for path, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", page.read_text(encoding="utf-8")):
            yield pytest.param(path, name.split("."), id=f"{page.name}-{path}:{name}")


def names_in(body):
    """What a module or class defines, with the bodies of what is nested in it."""
    found = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node.body
        for target in [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", []):
            if isinstance(target, ast.Name):
                found[target.id] = []
    return found


@pytest.mark.parametrize(("path", "names"), list(references()))
def test_every_function_that_is_named_is_there(path, names):
    file = next(file for file in (ROOT / "ds_fgoffload" / path, ROOT / path) if file.exists())
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for name in names:
        assert name in names_in(body), f"{path} has no {'.'.join(names)}"
        body = names_in(body)[name]


def paths():
    for page in PAGES:
        for path in re.findall(r"`([\w/]+/\w+\.py)(?=[`:])", page.read_text(encoding="utf-8")):
            yield pytest.param(path, id=f"{page.relative_to(ROOT)}-{path}")


@pytest.mark.parametrize("path", list(dict.fromkeys(paths())))
def test_every_file_that_is_named_is_there(path):
    assert (ROOT / "ds_fgoffload" / path).exists() or (ROOT / path).exists()


PACKAGES = [path for path in sorted(Path(ds_fgoffload.__file__).parent.iterdir()) if (path / "__init__.py").exists()]
EVERYWHERE = {"errors", "stats"}


@pytest.mark.parametrize("package", [path for path in PACKAGES if path.name != "cli"], ids=lambda path: path.name)
def test_a_package_says_what_it_imports(package):
    found = set()
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds_fgoffload."):
                found.add(node.module.split(".")[1])
    said = re.search(r"Imports: (.*?)\.\s+Start at", (package / "__init__.py").read_text(), re.DOTALL)
    assert said is not None
    assert set(re.findall(r"``(\w+)``", said[1])) == found - EVERYWHERE - {package.name}
