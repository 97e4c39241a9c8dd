"""What a provider adds to the import of its SDK alone, from the built layers, in CPU time.

    make bench-imports [ARGS="--runs 9"]

Medians over fresh interpreters that have the layers on their path and nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

LAYERS = Path(".local/layers")
NAMES = ("ProvidersLayer", "DependenciesLayer", "SharedLayer")


def cpu_ms(module: str) -> float:
    """CPU milliseconds of one cold import."""
    paths = [str((LAYERS / name / "python").resolve()) for name in NAMES]
    program = (
        f"import sys; sys.path[:0] = {paths!r}; import time; began = time.process_time(); import {module};"
        " print(1000 * (time.process_time() - began))"
    )
    return float(subprocess.check_output([sys.executable, "-I", "-S", "-c", program]))


def main() -> None:
    """Print both medians, their spread and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="of each (default %(default)s)")
    runs = parser.parse_args().runs
    table = Table(
        "SDK", "alone, ms", "with our provider, ms", "ratio", title="CPU time of a cold import, median (range)"
    )
    for name in ("openai", "anthropic"):
        pairs = [(cpu_ms(name), cpu_ms(f"backburner.providers.{name}")) for _ in range(runs)]  # alternating
        alone, ours = (sorted(column) for column in zip(*pairs, strict=True))
        medians = statistics.median(alone), statistics.median(ours)
        table.add_row(
            name,
            f"{medians[0]:.0f} ({alone[0]:.0f}-{alone[-1]:.0f})",
            f"{medians[1]:.0f} ({ours[0]:.0f}-{ours[-1]:.0f})",
            f"{medians[1] / medians[0]:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
