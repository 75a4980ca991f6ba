"""The supported versions: the same wherever they are written, and what is said of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

import ds_fgoffload
from ds_fgoffload import OffloadStateError, api
from ds_fgoffload.cli import doctor
from ds_fgoffload.cli.doctor import Finding, Verdict
from ds_fgoffload.compat.versions import PAIRS, REMEDY, SENTENCE, SUPPORTED, UNKNOWN, Pair, installed, too_new, too_old

ROOT = Path(__file__).parents[2]
OLDEST, NEWEST = PAIRS[0], PAIRS[-1]


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/limits.md"])
def test_documents_say_the_same_versions(name: str) -> None:
    assert SENTENCE in text_of(name)


def test_no_document_says_other_versions() -> None:
    names = "|".join(one.name for one in SUPPORTED.values())
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        said = re.findall(rf"\b(?:{names}) [\d.]+ to [\d.]+\d", path.read_text())
        assert set(said) <= set(map(str, SUPPORTED.values())), path.name


def test_pyproject_asks_for_the_oldest() -> None:
    asked = dict(re.findall(r'^ *"(torch|deepspeed)>=([\d.]+)",$', text_of("pyproject.toml"), re.MULTILINE))
    assert asked == {package: one.oldest for package, one in SUPPORTED.items()}


def test_make_installs_the_middle_pair() -> None:
    assert re.findall(r"(?:torch|deepspeed)==([\d.]+)", text_of("Makefile"))[:2] == list(PAIRS[1])


def test_the_matrix_begins_and_ends_with_what_is_supported() -> None:
    for package, one in SUPPORTED.items():
        assert getattr(OLDEST, package).startswith(one.oldest)
        assert getattr(NEWEST, package).startswith(one.newest)


@pytest.mark.parametrize(
    "pair", [*PAIRS, Pair("2.15.9", "0.19.8"), Pair("2.15.0.dev1", "0.19.8"), Pair(UNKNOWN, UNKNOWN)]
)
def test_nothing_is_said_of_what_is_tested(pair: Pair) -> None:
    assert too_old(pair) is None
    assert too_new(pair) is None


@pytest.mark.parametrize("version", ["2.10.1", "2.6.0", "1.13"])
def test_an_older_torch_is_refused(version: str) -> None:
    assert too_old(Pair(version, NEWEST.deepspeed)) == (
        f"torch {version} installed, older than what ds_fgoffload is tested with ({SENTENCE}): {REMEDY}"
    )


def test_both_are_named() -> None:
    said = too_new(Pair("3.0", "1.0"))
    assert said is not None
    assert said.startswith("torch 3.0 and DeepSpeed 1.0 installed, newer than")


def test_a_builds_suffix_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_fgoffload.compat.versions.version", lambda package: "2.15.1+cu132")
    assert installed().torch == "2.15.1"


def test_a_version_that_is_none_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_fgoffload.compat.versions.version", lambda package: "my build")
    assert installed() == Pair(UNKNOWN, UNKNOWN)


def test_attach_refuses_what_is_older(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "installed", lambda: Pair("2.10.0", NEWEST.deepspeed))
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(
        OffloadStateError, match=r"torch 2\.10\.0 installed, older than what ds_fgoffload is tested with"
    ):
        ds_fgoffload.attach(model, {"modules": ["0"]})
    assert ds_fgoffload.get(model) is None


def test_attach_says_once_that_nobody_tested_what_is_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(api, "warn", said.append)
    monkeypatch.setattr(api, "installed", lambda: Pair("2.16.0", NEWEST.deepspeed))
    for _ in range(2):
        ds_fgoffload.attach(nn.Sequential(nn.Linear(2, 2)), {"modules": ["0"]}).detach()
    (only,) = said
    assert only.startswith(
        f"torch 2.16.0 installed, newer than what ds_fgoffload is tested with ({SENTENCE}): {REMEDY}"
    )


def test_the_doctor_notes_what_is_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch, "__version__", "2.16.0+cpu")
    found = next(finding for finding in doctor._versions() if finding.name == "torch")
    assert found == Finding(
        "torch", Verdict.NOTE, "2.16.0+cpu", f"newer than what is tested ({SUPPORTED['torch']}): {REMEDY}"
    )


def test_the_doctor_takes_a_local_build_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch, "__version__", f"{NEWEST.torch}+cu999")
    found = next(finding for finding in doctor._versions() if finding.name == "torch")
    assert found == Finding("torch", Verdict.OK, f"{NEWEST.torch}+cu999")
