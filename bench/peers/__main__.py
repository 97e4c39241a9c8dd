"""What users would pick instead of Backburner, side by side: Celery, Dramatiq, BullMQ, and FastAPI with a Redis list.

    make bench-peers [ARGS="--scenario crash cpu --peer bullmq --runs 1 --json peers.json"]

Each is set up as its own documentation says for long tasks that must not be lost (the pages are named in
bench/peers/queues), runs in an environment of its own, and calls the fake provider with the official OpenAI SDK of its
language, whose own retries are off: the queue retries. Redis keeps nothing on disk. Everything is on loopback.

    crash     100 jobs of 2 s, eight at a time; ten worker processes are killed (SIGKILL) and started again at once
    rate      300 jobs under 600 requests and 60,000 tokens a minute, the queue's own limiter set by hand
    burst     twice the peak for 30 s: how long jobs take from submission, and how many wait
    cpu       CPU seconds of submitter and workers for 1,000 jobs whose calls take no time
    same-key  20 keys, each submitted eight times at once: how many were called for more than once

Calls, and those that were paid for, are counted in the provider's own ledger. In `crash` all jobs are there from the
start, so that the last kills may find nothing to do: `cut off` is how many calls the kills ended. In `cpu` Redis and
the provider are not counted, and neither are start and imports; of FastAPI the API's process is, and its HTTP client
is not. Backburner is the shipped template on a local stack, with one of the poller's concurrent invocations for each
worker process, of which there are two at least, and a batch for its threads; its CPU time is that of the functions that
accept jobs and run them. Everything takes about 45 minutes. `--share 0.1` makes each scenario a tenth as large, to see
that it works: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.peers.rows import Row, by_setting
from bench.peers.scenarios import SCENARIOS, Say
from bench.peers.stage import OURS, PEERS
from local.install import VENVS

FORMS = {"utilisation": ".1%", "seconds": ".1f", "cpu_seconds_per_1000": ".2f"}
NOT_SHOWN = ("jobs", "kills", "keys", "run", "date")


def main() -> None:
    """Run what was chosen, print a table for each scenario, and keep the rows."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", nargs="*", choices=list(SCENARIOS), default=list(SCENARIOS), help="default all")
    parser.add_argument(
        "--peer", nargs="*", choices=[*PEERS, OURS.name], default=list(PEERS), help="default all but Backburner"
    )
    parser.add_argument("--runs", type=int, default=1, help="of each; medians are shown (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first run's kills (default %(default)s)")
    parser.add_argument("--share", type=float, default=1.0, help="of each scenario's size (default %(default)s)")
    parser.add_argument("--json", type=Path, help="keep every run's rows in this file; rows of others in it stay")
    chosen = parser.parse_args()
    if OURS.name in chosen.peer and "BACKBURNER_STACK_FILE" not in os.environ:
        parser.error("Backburner needs a stack: make bench-peers")
    if not all((VENVS / name / ".stamp").is_file() for name in ("bench", "bench-node")):
        parser.error("not set up: python3 -m local.install --also bench")
    peers = {**PEERS, OURS.name: OURS}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    console = Console()
    kept: dict[str, list[Row]] = {}
    if chosen.json and chosen.json.is_file():
        kept = json.loads(chosen.json.read_text())
    for scenario in chosen.scenario:
        titles = [peers[name].title for name in chosen.peer]
        kept[scenario] = [row for row in kept.get(scenario, []) if row["peer"] not in titles]
        for name in chosen.peer:
            for run in range(chosen.runs):
                label = f"{scenario}, {peers[name].title}, run {run + 1} of {chosen.runs}"
                measured = partial(SCENARIOS[scenario], peers[name], seed=chosen.seed + run, share=chosen.share)
                rows = _watched(console, label, measured)
                kept[scenario] += [{**row, "run": run + 1, "date": time.strftime("%Y-%m-%d")} for row in rows]
                if chosen.json:
                    chosen.json.write_text(json.dumps(kept, indent=1) + "\n")
        console.print(table(scenario, kept[scenario]))


def _watched(console: Console, label: str, scenario: Callable[[Say], list[Row]]) -> list[Row]:
    """Run one, with a line that says where it stands."""
    console.print(f"{label} ...", style="dim")
    with console.status(label) as status:
        return scenario(lambda said: status.update(f"{label}: {said}"))


def table(scenario: str, rows: list[Row]) -> Table:
    """One scenario's, with the medians of its runs."""
    shown = by_setting(rows)
    names = [name for name in shown[0] if name not in NOT_SHOWN]
    about = (SCENARIOS[scenario].__doc__ or "").strip()
    made = Table(*(name.replace("_", " ") for name in names), title=f"{scenario}: {about}", title_justify="left")
    for row in shown:
        made.add_row(*(_shown(name, row[name]) for name in names))
    return made


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "never"
    if isinstance(value, float):
        return format(value, FORMS.get(name, ".1f" if name.endswith("seconds") else "g"))
    return str(value)


if __name__ == "__main__":
    main()
