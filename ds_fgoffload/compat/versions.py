"""Which versions of torch and DeepSpeed are supported, and what is said where others are installed.

README.md, pyproject.toml, ``make matrix``, ``attach`` and ``ds-fgoffload doctor`` say what is written here. A version
is supported if the whole suite is green with it (CONTRIBUTING.md, "Versions").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Supported:
    """From ``oldest`` to ``newest``, which may be the same; "2.15" stands for all of 2.15."""

    name: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.name} {self.oldest}" + (f" to {self.newest}" if self.newest != self.oldest else "")

    def is_older(self, found: str) -> bool:
        """``found`` comes before all that is supported. A build's suffix, such as ``+cpu``, does not matter."""
        return found != UNKNOWN and _cut(found, self.oldest) < Version(self.oldest).release

    def is_newer(self, found: str) -> bool:
        """``found`` comes after all that is supported."""
        return found != UNKNOWN and _cut(found, self.newest) > Version(self.newest).release


class Pair(NamedTuple):
    """Versions of torch and DeepSpeed that are installed together."""

    torch: str
    deepspeed: str

    def __str__(self) -> str:
        return f"torch {self.torch}, DeepSpeed {self.deepspeed}"


SUPPORTED: Mapping[str, Supported] = {
    "torch": Supported("torch", "2.11", "2.15"),
    "deepspeed": Supported("DeepSpeed", "0.19.8", "0.19.8"),
}
PAIRS = (Pair("2.11.0", "0.19.8"), Pair("2.13.0", "0.19.8"), Pair("2.15.0", "0.19.8"))
"""The oldest, a middle and the newest pair: those that ``make matrix`` runs the suite with."""
UNKNOWN = "unknown"
SENTENCE = ", ".join(map(str, SUPPORTED.values()))
REMEDY = f"pip install torch=={PAIRS[1].torch} deepspeed=={PAIRS[1].deepspeed}"


def installed() -> Pair:
    """What is installed here, a build's suffix left out; :data:`UNKNOWN` where nothing tells."""
    return Pair(_installed("torch"), _installed("deepspeed"))


def too_old(pair: Pair) -> str | None:
    """Why ``pair`` is refused; None if it is not."""
    return _complaint(pair, [one for one in SUPPORTED if SUPPORTED[one].is_older(getattr(pair, one))], "older")


def too_new(pair: Pair) -> str | None:
    """What is to be said of a ``pair`` that nobody has tested; None if it was."""
    return _complaint(pair, [one for one in SUPPORTED if SUPPORTED[one].is_newer(getattr(pair, one))], "newer")


def _complaint(pair: Pair, outside: list[str], how: str) -> str | None:
    if not outside:
        return None
    names = " and ".join(f"{SUPPORTED[one].name} {getattr(pair, one)}" for one in outside)
    return f"{names} installed, {how} than what ds_fgoffload is tested with ({SENTENCE}): {REMEDY}"


def _installed(package: str) -> str:
    try:
        return Version(version(package)).public
    except (PackageNotFoundError, InvalidVersion):  # a checkout that was never installed, or a build with a name
        return UNKNOWN


def _cut(found: str, bound: str) -> tuple[int, ...]:
    """The release numbers of ``found``, as many as ``bound`` has."""
    length = len(Version(bound).release)
    return (*Version(found).release, *(0,) * length)[:length]
