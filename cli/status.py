"""`backburner status`: lanes, limits and failures at a glance."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from backburner.models import EpochMs, JobStatus, Lane
from cli.deployment import Deployment, Profile, Region, StackName
from cli.desk import Desk, desk_of
from cli.durations import in_words
from cli.jobs import Listing, clients_of
from cli.lanes import QUEUES, pollers, processing, queue_counts
from cli.limits import gauges, numbers, state
from cli.screen import AsJson, console, notes, show, table

FAILURES_SECONDS = 3_600
FAILURES_MAX = 1_000
"""Jobs of each client that are looked at for failures, the newest: twenty requests."""
FAILURES_EVERY_SECONDS = 30
"""In the live view, which looks at everything else more often."""

type Failures = tuple[Counter[str], bool]
"""How many jobs have failed, by code; and whether that is all."""


@dataclass(frozen=True)
class LaneState:
    """A lane. oldest_seconds: how long its oldest queued job has waited, by its row."""

    lane: Lane
    waiting: int
    in_flight: int
    delayed: int
    oldest_seconds: float | None
    poller: str
    concurrency: int | None


def failures(desk: Desk, clients: Iterable[str], since: EpochMs) -> Failures:
    """How many jobs have failed since then, by code; and whether that is all, however many jobs a client has.

    There is no index of ends: an old job may have failed just now, when an operator had it run again.
    """
    found: Counter[str] = Counter()
    listings = [Listing(desk, client, FAILURES_MAX) for client in clients]
    for job in chain.from_iterable(listings):
        if job.status is JobStatus.FAILED and (job.finished_at or 0) > since:
            found[job.error.code if job.error else "unknown"] += 1
    return found, not any(listing.cut_off for listing in listings)


def look(at: Deployment, desk: Desk, failed: Failures) -> dict[str, Any]:
    """All that `status` shows, as of now; the failures as they were counted."""
    now, known = desk.lifecycle.clock.now(), pollers(at)
    working, all_seen = processing(at, desk)
    lanes = []
    for lane, output in QUEUES.items():
        since, poller = desk.lifecycle.store.oldest_waiting(lane), known.get(lane)
        oldest = None if since is None else (now - since) / 1000
        counts = queue_counts(at, output)
        lanes.append(
            LaneState(
                lane,
                **counts,
                oldest_seconds=oldest,
                poller=poller.state if poller else "missing",
                concurrency=poller.concurrency if poller else None,
            )
        )
    rows = gauges(at.client("dynamodb"), at.outputs["LimitsTableName"])
    return {
        "stack": at.name,
        "lanes": lanes,
        "processing": working,
        "processing_at_least": not all_seen,
        "dead_letters": queue_counts(at, "DeadLetterQueueUrl")["waiting"],
        "untold": queue_counts(at, "NotificationsDeadLetterQueueUrl")["waiting"],
        "failed_last_hour": dict(failed[0].most_common()),
        "failed_last_hour_at_least": not failed[1],
        "limits": {model: state(gauge, now) for model, gauge in rows.items()},
        "limit_numbers": {model: numbers(gauge, now) for model, gauge in rows.items()},
    }


def _drawn(seen: dict[str, Any]) -> Group:
    grid = table("lane", "#waiting", "#in flight", "#delayed", "#oldest", "poller", "#at once")
    for lane in seen["lanes"]:
        oldest = "" if lane.oldest_seconds is None else in_words(lane.oldest_seconds)
        cells = (lane.waiting, lane.in_flight, lane.delayed)
        at_once = str(lane.concurrency or "")
        grid.add_row(lane.lane, *(str(cell) for cell in cells), oldest, lane.poller.lower(), at_once)
    counts = ", ".join(f"{code} {count}" for code, count in seen["failed_last_hour"].items())
    if seen["failed_last_hour_at_least"]:
        counts = f"at least {counts}" if counts else f"none of each client's newest {FAILURES_MAX:,} jobs"
    unusual = [f"{model}: {said}" for model, said in seen["limits"].items() if said]
    dead = seen["dead_letters"]
    working = f"{'at least ' if seen['processing_at_least'] else ''}{seen['processing']} jobs being worked on"
    lines = [
        f"{seen['stack']}, {time.strftime('%H:%M:%S', time.gmtime())} UTC: {working}",
        f"dead jobs: {dead}" + ("; see `backburner dlq list`" if dead else ""),
        f"notices that no notifier could answer: {seen['untold']}",
        f"failed in the last hour: {counts or 'none'}",
        "limits: " + ("; ".join(unusual) or "nothing unusual"),
    ]
    return Group(Text(lines[0]), grid, *(Text(line) for line in lines[1:]))


def status(
    every: Annotated[float, typer.Option(min=1, help="Seconds between two looks.")] = 3,
    once: Annotated[bool, typer.Option("--once", help="Look once, as without a terminal.")] = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Show lanes, limits and failures, until you interrupt it. What SQS counts is approximate.

    Live, failures are counted every half minute.
    """
    at = Deployment.find(stack, profile, region)
    desk = desk_of(at)

    def failed() -> Failures:
        return failures(desk, clients_of(at), desk.lifecycle.clock.now() - 1000 * FAILURES_SECONDS)

    with nullcontext() if as_json else notes.status(f"Looking at {at.name}"):
        counted = failed()
        seen = look(at, desk, counted)
    if once or as_json or not console.is_terminal:
        show(seen, _drawn(seen), as_json=as_json)
        return
    with Live(_drawn(seen), console=console, screen=False) as live:
        waited = 0.0
        while True:
            time.sleep(every)
            waited += every
            if waited >= FAILURES_EVERY_SECONDS:
                counted, waited = failed(), 0.0
            live.update(_drawn(look(at, desk, counted)))
