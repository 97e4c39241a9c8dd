"""What a scenario gives: rows, of which several runs of one setting are shown as one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def by_setting(rows: Sequence[Row]) -> list[Row]:
    """One row for each queue and setting, in their order: the median of each number."""
    named = dict.fromkeys((row["peer"], row.get("limit")) for row in rows)
    return [_middle([row for row in rows if (row["peer"], row.get("limit")) == name]) for name in named]


def _middle(rows: Sequence[Row]) -> Row:
    """Medians, and the range of the CPU time, which is measured several times."""
    row = {name: _median([each.get(name) for each in rows]) for name in rows[-1]}
    spent = [each["cpu_seconds_per_1000"] for each in rows if "cpu_seconds_per_1000" in each]
    return row | ({"range": f"{min(spent):.2f}-{max(spent):.2f} ({len(spent)} runs)"} if spent else {})


def _median(values: Sequence[Any]) -> Any:
    if any(value is None or isinstance(value, str | list) for value in values):
        return values[-1]
    return statistics.median(values)
