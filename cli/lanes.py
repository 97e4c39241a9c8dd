"""The lanes: how full they are, and switching their pollers off and on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import batched, islice
from typing import Annotated, Any

import typer

from backburner.adapters.aws import translated
from backburner.lifecycle import PATIENCE_MS
from backburner.models import EpochMs, JobStatus, Lane
from cli.deployment import Deployment, Profile, Region, StackName
from cli.desk import Desk, desk_of
from cli.durations import in_words, seconds_of
from cli.jobs import cancel_job
from cli.screen import AsJson, Refused, Yes, confirm, notes, progress, show

QUEUES = {
    Lane.INTERACTIVE: "InteractiveQueueUrl",
    Lane.STANDARD: "StandardQueueUrl",
    Lane.BULK: "BulkQueueUrl",
}
"""The outputs that name the lanes' queues."""
COUNTS = {
    "waiting": "ApproximateNumberOfMessages",
    "in_flight": "ApproximateNumberOfMessagesNotVisible",
    "delayed": "ApproximateNumberOfMessagesDelayed",
}
SWITCH_SECONDS = 180
POLL_SECONDS = 1.0
KEYS_MAX = 100
"""DynamoDB reads so many rows by key in one request."""
DUE_MAX = 1_000
"""Rows that a look every few seconds may read: ten requests."""
SKEW_MS = 5_000
"""By which clocks may differ."""
LEFT_MAX = 1_000
"""So many jobs of a lane are counted while it is waited for; that it is not empty is known from the first."""
EMPTY_LOOKS = 2
"""An index is a moment behind, and a row that moves within it may be missed by one look."""


def queue_counts(at: Deployment, output: str) -> dict[str, int]:
    """How many messages a queue holds, approximately: waiting, in flight, delayed."""
    reply = at.client("sqs").get_queue_attributes(QueueUrl=at.outputs[output], AttributeNames=list(COUNTS.values()))
    return {name: int(reply["Attributes"][attribute]) for name, attribute in COUNTS.items()}


@dataclass(frozen=True)
class Poller:
    """A lane's event source mapping. state: Lambda's word, such as `Enabled` or `Disabling`."""

    uuid: str
    state: str
    concurrency: int | None


def pollers(at: Deployment) -> dict[Lane, Poller]:
    """Each lane's poller: asked for by its queue, since the worker may be reached by an alias or without one."""
    pages = at.client("lambda").get_paginator("list_event_source_mappings")
    found: dict[Lane, Poller] = {}
    for lane, output in QUEUES.items():
        for page in pages.paginate(EventSourceArn=at.queue_arn(output)):
            for mapping in page["EventSourceMappings"]:
                concurrency = mapping.get("ScalingConfig", {}).get("MaximumConcurrency")
                found[lane] = Poller(mapping["UUID"], mapping["State"], concurrency)
    return found


def switch(at: Deployment, lane: Lane, *, on: bool, sleep: Callable[[float], None] = time.sleep) -> str:
    """Switch a lane's poller on or off, and wait until it is; its state then. Raises Refused if it has none."""
    poller = pollers(at).get(lane)
    if poller is None:
        raise Refused(f"The lane {lane} has no poller to be seen.")
    wanted = "Enabled" if on else "Disabled"
    if poller.state != wanted:
        at.client("lambda").update_event_source_mapping(UUID=poller.uuid, Enabled=on)
    waited, state = 0.0, poller.state
    while (state := pollers(at)[lane].state) != wanted and waited < SWITCH_SECONDS:
        sleep(POLL_SECONDS)
        waited += POLL_SECONDS
    return state


@dataclass(frozen=True)
class Row:
    """What an operator's look at many jobs needs of each."""

    job_id: str
    lane: Lane
    status: JobStatus
    created_at: EpochMs


def unfinished_of(at: Deployment, desk: Desk, job_ids: Iterable[str]) -> Iterator[Row]:
    """The rows of those of the jobs that wait or are being worked on."""
    now = desk.lifecycle.clock.now()
    for some in batched(job_ids, KEYS_MAX, strict=False):
        for item in _read(at, some):
            row = Row(
                item["job_id"]["S"],
                Lane(item["lane"]["S"]),
                JobStatus(item["status"]["S"]),
                int(item["created_at"]["N"]),
            )
            if not row.status.is_final and int(item["expires_at"]["N"]) > now // 1000:
                yield row


def _read(at: Deployment, job_ids: Sequence[str]) -> list[dict[str, Any]]:
    """The rows by their ids, as last written, without what was asked and answered."""
    table = at.outputs["JobsTableName"]
    names = {f"#{name}": name for name in ("job_id", "lane", "status", "created_at", "expires_at")}
    asked: Any = {"Keys": [{"job_id": {"S": job_id}} for job_id in job_ids], "ConsistentRead": True,
                  "ProjectionExpression": ", ".join(names), "ExpressionAttributeNames": names}  # fmt: skip
    found: list[dict[str, Any]] = []
    requests = {table: asked}
    while requests:
        with translated():
            reply = at.client("dynamodb").batch_get_item(RequestItems=requests)
        found += reply["Responses"].get(table, [])
        requests = reply.get("UnprocessedKeys", {})
    return found


def unfinished(at: Deployment, desk: Desk, lane: Lane) -> Iterator[Row]:
    """The jobs of a lane that wait or are being worked on: all of them, however many others are due before."""
    due = desk.lifecycle.store.due(2**62, sys.maxsize)
    return (row for row in unfinished_of(at, desk, due) if row.lane is lane)


def processing(at: Deployment, desk: Desk) -> tuple[int, bool]:
    """How many jobs are being worked on; and whether that is all of them, or those among the first that are due.

    The repairer is to look at each within its patience, so whatever is due later need not be looked at.
    """
    soon = desk.lifecycle.clock.now() + PATIENCE_MS + SKEW_MS
    due = list(desk.lifecycle.store.due(soon, DUE_MAX))
    count = sum(row.status is JobStatus.PROCESSING for row in unfinished_of(at, desk, due))
    return count, len(due) < DUE_MAX


# ── Commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────

LaneName = Annotated[Lane, typer.Argument(show_default=False)]


def pause(
    lane: LaneName,
    yes: Yes = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Stop a lane: its workers take no more jobs. Jobs are still accepted, and those under way go on."""
    at = Deployment.find(stack, profile, region)
    confirm(f"Pause the lane {lane} of {at.name}?", yes=yes)
    _switched(at, lane, on=False, as_json=as_json)


def resume(
    lane: LaneName, stack: StackName = None, profile: Profile = None, region: Region = None, as_json: AsJson = False
) -> None:
    """Let a paused lane go on."""
    _switched(Deployment.find(stack, profile, region), lane, on=True, as_json=as_json)


def _switched(at: Deployment, lane: Lane, *, on: bool, as_json: bool) -> None:
    wanted = "Enabled" if on else "Disabled"
    with nullcontext() if as_json else notes.status(f"Waiting for the lane {lane} to be {wanted.lower()}"):
        state = switch(at, lane, on=on)
    show({"lane": lane, "state": state}, f"The lane {lane} is {state.lower()}.", as_json=as_json)
    if state != wanted:
        raise typer.Exit(1)


def drain(
    lane: LaneName,
    wait: Annotated[
        float,
        typer.Option(
            "--for", parser=seconds_of, metavar="DURATION", help="How long to wait at most.", show_default="1h"
        ),
    ] = 3_600.0,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel what waits, instead of letting it run.")] = False,
    yes: Yes = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Wait until a lane is empty: no job of it waits or is being worked on. Ends with 1 if it is not in time.

    Jobs are still accepted meanwhile, so let the callers stop first. With --cancel, waiting jobs are cancelled, and
    their clients told.
    """
    at = Deployment.find(stack, profile, region)
    desk = desk_of(at)
    if cancel:
        count = sum(row.status is JobStatus.QUEUED for row in unfinished(at, desk, lane))
        confirm(f"Cancel {count} waiting jobs of the lane {lane} of {at.name}?", yes=yes)
    elif (poller := pollers(at).get(lane)) is not None and poller.state != "Enabled":
        raise Refused(f"The lane {lane} is {poller.state.lower()}: `backburner resume {lane}` first, or --cancel.")
    left = _drained(at, desk, lane, cancel=cancel, ends_at=time.monotonic() + wait)
    result: Mapping[str, Any] = {"lane": lane, "left": left}
    show(result, f"The lane {lane} is empty." if not left else f"{left} jobs are left.", as_json=as_json)
    if left:
        raise typer.Exit(1)


def _first_left(at: Deployment, desk: Desk, lane: Lane) -> list[Row]:
    return list(islice(unfinished(at, desk, lane), LEFT_MAX))


def _drained(at: Deployment, desk: Desk, lane: Lane, *, cancel: bool, ends_at: float) -> int:
    """Wait until nothing of the lane is left, but not beyond `ends_at`; how many jobs are left then."""
    done = empty_looks = 0
    # More than LEFT_MAX are not counted: the bar then stands at its beginning until it is the last so many that go.
    total = len(_first_left(at, desk, lane))
    what = f"Draining {lane}"
    with progress(what, total) as bar, bar.saying(what) as say:
        while True:
            if cancel:
                for row in unfinished(at, desk, lane):
                    if row.status is JobStatus.QUEUED:
                        say(f"Cancelling {row.job_id}")
                        _cancel_waiting(desk, row)
            left = _first_left(at, desk, lane)
            while done < total - len(left):  # not back, where more jobs come than go
                bar()
                done += 1
            empty_looks = 0 if left else empty_looks + 1
            if empty_looks == EMPTY_LOOKS:
                return 0
            if left and time.monotonic() >= ends_at:
                return sum(1 for _ in unfinished(at, desk, lane))
            if left:
                count = f"{len(left)}" if len(left) < LEFT_MAX else f"at least {LEFT_MAX:,}"
                say(f"{count} jobs left, the oldest seen {in_words(_age(desk, left))} old")
            time.sleep(POLL_SECONDS)


def _cancel_waiting(desk: Desk, row: Row) -> None:
    with suppress(Refused):  # it has ended meanwhile
        cancel_job(desk, row.job_id)


def _age(desk: Desk, rows: Iterable[Row]) -> float:
    return (desk.lifecycle.clock.now() - min(row.created_at for row in rows)) / 1000
