"""The comparison's tables and charts for docs/benchmarks.md, from what `bench.peers --json` has kept.

    .local/venvs/bench/bin/python -m bench.peers.report

Runs in the bench's own environment, whose versions it names. Replaces what stands between the two marks in the page.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from bench.peers.rows import Row, by_setting

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
FOLDER = ROOT / "docs" / "benchmarks"
BEGIN, END = "<!-- begin: made by bench.peers.report -->", "<!-- end -->"
PACKAGES = ("celery", "dramatiq", "fastapi", "redis", "openai")
OURS = "Backburner"
COLOUR, OUR_COLOUR = "#9aa5b1", "#1f6feb"


def number(value: float | None, form: str) -> str:
    """As the tables show it; None: it never happened."""
    return "never" if value is None else format(value, form)


COLUMNS: dict[str, dict[str, Callable[[Row], str]]] = {
    "rate": {
        "limiter": lambda row: row["limit"],
        "utilisation": lambda row: number(row["utilisation"], ".1%"),
        "seconds": lambda row: number(row["seconds"], ".1f"),
        "429s": lambda row: number(row["refusals"], ".0f"),
        "completed": lambda row: f"{row['completed']:.0f} of {row['jobs']:.0f}",
    },
    "crash": {
        "calls": lambda row: row["limit"],
        "completed": lambda row: f"{row['completed']:.0f} of {row['jobs']:.0f}",
        "lost or stuck": lambda row: number(row["not_ended"], ".0f"),
        "calls cut off": lambda row: number(row["cut_off"], ".0f"),
        "calls paid for again": lambda row: number(row["extra_calls"], ".0f"),
        "all ended, s after the last kill": lambda row: number(row["recovery_seconds"], ".0f"),
    },
    "same-key": {
        "deduplicates by": lambda row: row["deduplicates"],
        "keys called for more than once": lambda row: f"{row['keys_called_twice']:.0f} of {row['keys']:.0f}",
        "calls": lambda row: number(row["calls"], ".0f"),
    },
    "burst": {
        "p50 s": lambda row: number(row["p50_seconds"], ".1f"),
        "p95 s": lambda row: number(row["p95_seconds"], ".1f"),
        "p99 s": lambda row: number(row["p99_seconds"], ".1f"),
        "most that waited": lambda row: number(row["deepest"], ".0f"),
        "lost": lambda row: number(row["not_ended"], ".0f"),
    },
    "cpu": {
        "CPU s per 1,000 jobs": lambda row: number(row["cpu_seconds_per_1000"], ".2f"),
        "range": lambda row: row["range"],
    },
}
TITLES = {
    "rate": "The provider's limit: 300 jobs, 600 requests and 60,000 tokens a minute, of which tokens bind",
    "crash": "Workers killed: 100 jobs of 2 s, eight at a time, ten kills 2 to 6 s apart",
    "same-key": "The same key: 20 keys, each submitted eight times at once",
    "burst": "A burst: room for 5 jobs a second, 7 a second for 30 s",
    "cpu": "CPU time: 1,000 jobs whose calls take no time; submitting and running",
}
CHARTS: dict[str, tuple[str, str, float]] = {
    "rate": ("utilisation", "utilisation of the provider's limit, %", 100.0),
    "crash": ("extra_calls", "calls paid for again", 1.0),
    "burst": ("p95_seconds", "p95 from submission to the answer, s", 1.0),
    "cpu": ("cpu_seconds_per_1000", "CPU seconds per 1,000 jobs", 1.0),
}
"""What is drawn of a scenario: a column, its name, and what it is multiplied by."""


def table(scenario: str, rows: Sequence[Row]) -> str:
    """A scenario's, in Markdown."""
    columns = COLUMNS[scenario]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row['peer']} | {' | '.join(show(row) for show in columns.values())} |" for row in rows]
    return "\n".join(lines)


def chart(scenario: str, rows: Sequence[Row]) -> None:
    """A scenario's bars, one for each row, into a file of its own."""
    column, label, factor = CHARTS[scenario]
    times = Counter(row["peer"] for row in rows)
    names = [f"{row['peer']}, {row['limit']}" if times[row["peer"]] > 1 else row["peer"] for row in rows]
    values = [factor * row[column] for row in rows]
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.34 * len(rows)))
    bars = axes.barh(names, values, color=[OUR_COLOUR if row["peer"] == OURS else COLOUR for row in rows])
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(label)
    figure.tight_layout()
    figure.savefig(FOLDER / f"{scenario}.svg", metadata={"Date": None})  # so that it changes with its figures only
    plt.close(figure)


def section(kept: Mapping[str, Sequence[Row]]) -> str:
    """Everything between the marks."""
    bullmq = json.loads((ROOT / "local/locks/bench-node/package.json").read_text())["dependencies"]["bullmq"]
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    dates = sorted({row["date"] for rows in kept.values() for row in rows})
    about = f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} on {os.cpu_count()} shared cores"
    parts = [f"{about}; Python {platform.python_version()}, {versions}, bullmq {bullmq}."]
    for scenario in COLUMNS:
        rows = sorted(by_setting(kept[scenario]), key=lambda row: row["peer"] != OURS)
        parts += [f"### {TITLES[scenario]}", table(scenario, rows)]
        if scenario in CHARTS:
            chart(scenario, rows)
            parts.append(f"![{CHARTS[scenario][1]}](benchmarks/{scenario}.svg)")
    return "\n\n".join(parts)


def main() -> None:
    """Draw the charts, and put the tables into the page."""
    plt.rcParams |= {"svg.hashsalt": "backburner", "svg.fonttype": "none"}  # the same ids each time; text as text
    kept = json.loads((FOLDER / "peers.json").read_text())
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{section(kept)}\n{END}{after}")


if __name__ == "__main__":
    main()
