"""The limiter with many workers and much work, on virtual time: what bench/limits.py measures, where that cannot reach.

    make bench-limits-simulated [ARGS="--scenario scale --jobs 10000"]

The core and its limiter are the real ones (tests/simulation/crowd.py); the network, the queues with SQS's documented
rule of fair queues, the workers' pollers and the provider are simulated. 600 requests and 60,000 tokens a minute,
refilled continuously, one second of burst, calls of about a second and 150 tokens. All scenarios take about 15 minutes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.table import Table

from backburner.models import JobStatus, Lane
from tests.simulation.crowd import Crowd, Provided, percentile, provided

REQUESTS, TOKENS = 600, 60_000
MODELS = ("m-1", "m-2", "m-3")
NEVER = 10.0**9
TOKENS_A_JOB = 150
"""In the mean."""
STREAM_PART, STREAM_CLIENTS = 0.9, 100
RUNS = 9
"""Of `fair`, each with a seed of its own."""


def limited(name: str, *, headers: bool = True, configured: float = 1.0, **more: tuple[float, float]) -> Provided:
    """A model as all scenarios have it."""
    return provided(name, requests=REQUESTS, tokens=TOKENS, headers=headers, configured=configured, **more)


def spread_over(crowd: Crowd, jobs: int) -> None:
    """So many jobs, a third for each model, all at once."""
    for number in range(jobs):
        crowd.enqueue(1, model=MODELS[number % len(MODELS)])


def row(crowd: Crowd, model: str) -> tuple[str, ...]:
    """What a model's provider saw."""
    told = crowd.told[model]
    late = sum(at >= 60 for at in told.refused_at)
    return (
        model,
        f"{told.calls}",
        f"{crowd.utilisation(model):.2%}",
        f"{len(told.refused_at)} ({late})",
        f"{len(told.failed_at)}",
    )


def show(console: Console, title: str, crowd: Crowd) -> None:
    """A run's table."""
    table = Table("model", "calls", "utilisation", "429 (after 60 s)", "5xx", title=title, title_justify="left")
    for model in crowd.models:
        table.add_row(*row(crowd, model))
    console.print(table)
    done = crowd.ends[JobStatus.COMPLETED]
    jobs = max(1, crowd.ends.total())
    others = f"other ends {crowd.ends.total() - done} {dict(crowd.codes) or ''}"
    writes = ", ".join(f"{kind} {count / jobs:.2f}" for kind, count in sorted(crowd.limits.writes.items()))
    console.print(
        f"completed {done}, {others}; limiter writes a job {crowd.limiter_writes:.2f} "
        f"({writes}); times parked a job {crowd.journal.counts['job_parked'] / jobs:.2f}; "
        f"seconds asleep in a worker a job {crowd.journal.slot_wait_ms / 1000 / jobs:.1f}"
    )


def scale(console: Console, jobs: int, workers: int, seed: int) -> None:
    """Many jobs of three models, from a cold start."""
    crowd = Crowd(*(limited(name) for name in MODELS), workers={Lane.STANDARD: workers}, seed=seed)
    spread_over(crowd, jobs)
    crowd.run(seconds_max=NEVER)
    show(console, f"scale: {jobs} jobs, {workers} workers of ten threads, three models", crowd)


def wrong(console: Console, jobs: int, workers: int, seed: int) -> None:
    """Limits configured twice too high, with and without headers that tell the true ones."""
    for headers in (True, False):
        models = (limited(name, configured=2.0, headers=headers) for name in MODELS)
        crowd = Crowd(*models, workers={Lane.STANDARD: workers}, seed=seed)
        spread_over(crowd, min(jobs, 6_000))
        crowd.run(seconds_max=NEVER)
        told = "replies tell the true ones" if headers else "no reply tells a limit"
        show(console, f"wrong: limits configured twice too high; {told}", crowd)


def outage(console: Console, jobs: int, workers: int, seed: int) -> None:
    """Two minutes of 529 from the first model's provider."""
    first, *others = MODELS
    models = (limited(first, outage=(60.0, 180.0)), *(limited(name) for name in others))
    crowd = Crowd(*models, workers={Lane.STANDARD: workers}, seed=seed)
    spread_over(crowd, min(jobs, 6_000))
    crowd.run(seconds_max=NEVER)
    show(console, "outage: the first model's provider answers 529 from 60 s to 180 s", crowd)
    failed = crowd.told[first].failed_at
    used = crowd.told[first].used
    back = next((s for s in range(180, 3_600) if sum(used[s + i] for i in range(10)) >= 0.95 * TOKENS / 6), None)
    console.print(f"529s in the first 10 s {sum(at < 70 for at in failed)}, later {sum(at >= 70 for at in failed)}; "
                  f"at full speed again {back} s after the start")  # fmt: skip


def urgent(console: Console, jobs: int, workers: int, seed: int) -> None:
    """Interactive jobs at random moments beside a backlog in bulk."""
    backlog, lanes = min(jobs, 5_000), {Lane.INTERACTIVE: 2, Lane.BULK: workers}
    crowd = Crowd(limited("m-1"), workers=lanes, seed=seed)
    crowd.enqueue(backlog, model="m-1", lane=Lane.BULK)
    dice = random.Random(seed)
    few: list[int] = []
    for _ in range(300):
        crowd.at(
            dice.uniform(10, backlog / 10), lambda: few.extend(crowd.enqueue(1, model="m-1", lane=Lane.INTERACTIVE))
        )
    crowd.run(seconds_max=NEVER)
    show(console, f"urgent: 300 interactive jobs beside {backlog} in bulk", crowd)
    waits = crowd.waits(few)
    console.print(f"wait of an interactive job: p50 {percentile(waits, 50):.2f} s, p95 {percentile(waits, 95):.2f} s")


def fair(console: Console, jobs: int, workers: int, seed: int) -> None:
    """Twenty jobs of one client, alone and beside another's backlog, by the number of workers."""
    backlog = min(jobs, 5_000)
    table = Table("workers", "moment", "alone, p95 s", "beside, p95 s", "ratio", title_justify="left",
                  title=f"fair: 20 jobs of a client beside {backlog} of another; median (worst) of {RUNS}")  # fmt: skip
    dice = random.Random(seed)
    for count in sorted({2, 5, 10, 20, workers}):
        for name, earliest, latest in (("at once", 0, 0), ("1 s later", 1, 1), ("10 s to 5 min later", 10, 300)):
            moments = [dice.uniform(earliest, latest) for _ in range(RUNS)]
            alone = [_wait(0, count, moment, seed + run) for run, moment in enumerate(moments)]
            beside = [_wait(backlog, count, moment, seed + run) for run, moment in enumerate(moments)]
            ratios = [b / a for a, b in zip(alone, beside, strict=True)]
            table.add_row(str(count), name, _spread(alone), _spread(beside), _spread(ratios))
    console.print(table)


def stream(console: Console, jobs: int, workers: int, seed: int) -> None:
    """Jobs that come one by one, at nine tenths of what the provider allows; what each further decade of them costs."""
    crowd = Crowd(*(limited(name) for name in MODELS), workers={Lane.STANDARD: workers}, seed=seed)
    dice = random.Random(seed)
    pace = STREAM_PART * len(MODELS) * min(REQUESTS / 60, TOKENS / 60 / TOKENS_A_JOB)

    def come(second: float, number: int) -> None:
        crowd.enqueue(1, model=MODELS[number % len(MODELS)], client=f"client-{dice.randrange(STREAM_CLIENTS)}")
        if number + 1 < jobs:
            following = second + dice.expovariate(pace)
            crowd.at(following, lambda: come(following, number + 1))

    table = Table("jobs", "row writes a job", "limiter writes", "hints", "times parked", "p95 s", "429s", "CPU ms",
                  title=f"stream: {pace:.1f} jobs a second, {STREAM_CLIENTS} clients, {workers} workers of ten threads",
                  title_justify="left")  # fmt: skip
    crowd.at(0.0, lambda: come(0.0, 0))
    before, seen, started = _counts(crowd), 0, time.process_time()
    for upto in sorted({1_000, 10_000, 100_000, jobs}):
        if upto > jobs:
            break
        crowd.run(seconds_max=NEVER, until=partial(_have_ended, crowd, upto))
        after, more = _counts(crowd), upto - seen
        each = [f"{(now - then) / more:.2f}" for now, then in zip(after[:4], before[:4], strict=True)]
        waits = crowd.waits(number for number in range(seen, upto) if number in crowd.provider.started)
        cpu = 1000 * (time.process_time() - started) / more
        table.add_row(f"{upto:,}", *each, f"{percentile(waits, 95):.2f}", str(after[4] - before[4]), f"{cpu:.2f}")
        before, seen, started = _counts(crowd), upto, time.process_time()
    console.print(table)


def _have_ended(crowd: Crowd, jobs: int) -> bool:
    return crowd.ends.total() >= jobs


def _counts(crowd: Crowd) -> tuple[int, ...]:
    """Row writes, limiter writes, hints, jobs parked, refusals; so far."""
    refused = sum(len(told.refused_at) for told in crowd.told.values())
    parked = crowd.journal.counts["job_parked"]
    return crowd.store.writes, crowd.limits.writes.total(), crowd.lanes.sent, parked, refused


def _wait(backlog: int, workers: int, later: float, seed: int) -> float:
    crowd = Crowd(limited("m-1"), workers={Lane.STANDARD: workers}, seed=seed)
    crowd.enqueue(60, model="m-1", client="first")  # the model is known by then
    few: list[int] = []
    crowd.at(90, lambda: crowd.enqueue(backlog, model="m-1", client="alice"))
    crowd.at(90 + later, lambda: few.extend(crowd.enqueue(20, model="m-1", client="bob")))
    crowd.run(seconds_max=NEVER, until=lambda: bool(few) and all(number in crowd.provider.started for number in few))
    return percentile(crowd.waits(few), 95)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({max(values):.2f})"


SCENARIOS: dict[str, Callable[[Console, int, int, int], None]] = {
    "scale": scale, "wrong": wrong, "outage": outage, "urgent": urgent, "fair": fair, "stream": stream,
}  # fmt: skip


def main() -> None:
    """Run the scenarios and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--jobs", type=int, default=100_000, help="of `scale` and `stream`; the others have fewer (%(default)s)"
    )
    parser.add_argument("--workers", type=int, default=50, help="invocations at once, of ten threads (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all chance (%(default)s)")
    parser.add_argument("--scenario", nargs="*", choices=list(SCENARIOS), default=list(SCENARIOS), help="(all)")
    chosen = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name in chosen.scenario:
        began = time.monotonic()
        SCENARIOS[name](console, chosen.jobs, chosen.workers, chosen.seed)
        console.print(f"({time.monotonic() - began:.0f} s)", style="dim")


if __name__ == "__main__":
    main()
