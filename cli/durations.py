"""Durations as people write and read them: 90s, 30m, 12h, 2d."""

from __future__ import annotations

import re

import typer

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds_of(text: str | float) -> float:
    """Seconds. A bare number is seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(text).strip())
    if match is None:
        raise typer.BadParameter("a duration is a number and s, m, h or d, such as 90s or 12h")
    return float(match[1]) * UNITS[match[2] or "s"]


def in_words(seconds: float) -> str:
    """With one unit, rounded down, such as `5 min`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"
