"""Worker processes killed at random while jobs run: nothing lost, nothing stuck, and what was paid for twice.

    make chaos [ARGS="--jobs 100 --kills 10"]

Bounded: it ends when every job has ended, or after `--minutes`. Exit status 1 if a job was lost or is stuck.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.fakes.emulated import worker_processes

CALL_SECONDS = 2.0
PAUSE_SECONDS = (1.0, 3.0)
PARALLEL = 8
"""Jobs under way at any time, so that the run lasts as long as the kills."""
TRIES_MAX = 100


def main() -> int:
    """Submit, kill, wait, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100, help="how many (default %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="how many, 1 to 3 s apart (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=10, help="give up after (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the kills (default %(default)s)")
    chosen = parser.parse_args()
    stack = json.loads(Path(os.environ["BACKBURNER_STACK_FILE"]).read_text())
    provider = os.environ["BACKBURNER_FAKE_PROVIDER"]
    http = httpx2.Client(
        base_url=stack["api_url"],
        headers={"Authorization": f"Bearer {stack['api_key']}"},
        timeout=60,
        trust_env=False,
    )
    httpx2.put(
        f"{provider}/_control/config", json={"latency_seconds": CALL_SECONDS}, trust_env=False
    ).raise_for_status()

    def submit(number: int) -> str:
        asked, key = {"prompt": f"job {number:04d}."}, {"Idempotency-Key": f"chaos-{number}"}
        for _ in range(TRIES_MAX):
            reply = http.post("/jobs", json=asked, headers=key)
            if reply.status_code == 202:
                return str(reply.json()["job_id"])
            time.sleep(0.5)
        raise SystemExit(f"job {number} was not accepted")

    console = Console()
    dice = random.Random(chosen.seed)
    ids: list[str] = []
    jobs: dict[str, dict[str, Any]] = {}
    killed = 0
    began = time.monotonic()
    next_kill = began + dice.uniform(*PAUSE_SECONDS)
    with Progress(console=console) as progress:
        kills = progress.add_task("workers killed", total=chosen.kills)
        ended = progress.add_task("jobs ended", total=chosen.jobs)
        while len(jobs) < chosen.jobs and time.monotonic() - began < 60 * chosen.minutes:
            while len(ids) < chosen.jobs and len(ids) - len(jobs) < PARALLEL:
                ids.append(submit(len(ids)))
            if killed < chosen.kills and time.monotonic() >= next_kill:
                alive = worker_processes(stack["outputs"]["WorkerFunctionName"], stack["outputs"]["StandardQueueUrl"])
                if alive:
                    os.kill(dice.choice(alive), signal.SIGKILL)
                    killed += 1
                    progress.advance(kills)
                next_kill = time.monotonic() + dice.uniform(*PAUSE_SECONDS)
            for job_id in [job_id for job_id in ids if job_id not in jobs]:
                job = http.get(f"/jobs/{job_id}").json()
                if job["status"] not in ("queued", "processing"):
                    jobs[job_id] = job
                    progress.advance(ended)
            time.sleep(0.1)
    report(console, ids, jobs, httpx2.get(f"{provider}/_control/ledger", trust_env=False).json(), killed)
    return 0 if len(jobs) == len(ids) else 1


def report(
    console: Console, ids: list[str], jobs: dict[str, dict[str, Any]], ledger: list[dict[str, Any]], killed: int
) -> None:
    """Print what came of it."""
    outcomes = Counter(job["status"] for job in jobs.values())
    receipts = [line["outcome"] for job in jobs.values() for line in job.get("receipt", [])]
    lost_workers = receipts.count("outcome_unknown")
    billed = Counter(call["prompt"] for call in ledger if call["billed"] or call["outcome"] == "client_gone")
    hit = [job for job in jobs.values() if any(line["outcome"] == "outcome_unknown" for line in job.get("receipt", []))]
    waits = sorted(
        line["began_at"] - before["began_at"]
        for job in hit
        for before, line in zip(job["receipt"], job["receipt"][1:], strict=False)
        if before["outcome"] == "outcome_unknown"
    )
    table = Table("what", "how many", title=f"{len(ids)} jobs of {CALL_SECONDS:g} s, {killed} workers killed")
    table.add_row("completed", str(outcomes["completed"]))
    table.add_row("failed, with an honest code", str(outcomes["failed"]))
    table.add_row("lost or stuck", str(len(ids) - len(jobs)))
    table.add_row("attempts cut off by a kill", str(lost_workers))
    table.add_row("calls begun", str(len(ledger)))
    table.add_row("calls billed more than once", str(sum(count - 1 for count in billed.values())))
    if waits:
        median = statistics.median(waits)
        table.add_row("from a lost attempt's start to the next, s", f"median {median:g}, longest {waits[-1]}")
    console.print(table)
    console.print(
        "A call in flight at a kill is billed and its answer lost; the job is asked again. Nothing else is paid twice.",
        style="dim",
    )


if __name__ == "__main__":
    sys.exit(main())
