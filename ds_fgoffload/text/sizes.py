"""Sizes as users write them: bytes, or text such as ``"64MiB"``."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from pydantic import BeforeValidator

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_SIZE_ALLOWED = 'a whole number of bytes >= 0, or text such as "64MiB" (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)'


def parse_size(value: object) -> int:
    """``value`` in bytes: a whole number, or text such as ``"64MiB"``. Raises ``ValueError`` saying what is allowed."""
    number: Fraction | None = None
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip())
        if found and found[2].lower() in _UNITS:
            number = Fraction(found[1]) * _UNITS[found[2].lower()]
    elif isinstance(value, float):
        if value.is_integer():  # JSON's 5e8, as DeepSpeed's own bucket sizes are written
            number = Fraction(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        number = Fraction(value)
    if number is None or number < 0 or number.denominator != 1:
        raise ValueError(_SIZE_ALLOWED)
    return int(number)


def human(size_bytes: int) -> str:
    """``size_bytes`` in the unit that keeps it short."""
    size = float(size_bytes)
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or suffix == "GiB":
            return f"{size:.0f} {suffix}" if suffix == "B" else f"{size:.1f} {suffix}"
        size /= 1024
    raise AssertionError


ByteSize = Annotated[int, BeforeValidator(parse_size)]
