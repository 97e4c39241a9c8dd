"""The lanes: how full they are, and switching their pollers off and on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from backburner.models import Job, JobStatus, Lane
from cli.deployment import Deployment, Profile, StackName
from cli.desk import Desk, desk_of
from cli.durations import in_words, seconds_of
from cli.jobs import cancel_job
from cli.screen import AsJson, Refused, Yes, confirm, notes, show

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
DUE_MAX = 1_000
"""Unfinished rows that are looked at to find the oldest."""


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
    """Each lane's poller."""
    pages = at.client("lambda").get_paginator("list_event_source_mappings")
    found: dict[str, Poller] = {}
    for page in pages.paginate(FunctionName=at.outputs["WorkerFunctionName"]):
        for mapping in page["EventSourceMappings"]:
            concurrency = mapping.get("ScalingConfig", {}).get("MaximumConcurrency")
            name = mapping["EventSourceArn"].rpartition(":")[2]  # the ARN and the URL of a queue both end in its name
            found[name] = Poller(mapping["UUID"], mapping["State"], concurrency)
    urls = {lane: at.outputs[output] for lane, output in QUEUES.items()}
    return {lane: found[name] for lane, url in urls.items() if (name := url.rpartition("/")[2]) in found}


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


def unfinished(desk: Desk, limit: int = DUE_MAX) -> list[Job]:
    """The rows of unfinished jobs, those due longest first; at most so many are looked at."""
    store = desk.lifecycle.store
    rows = (store.get(job_id) for job_id in store.due(2**62, limit))
    return [row for row in rows if row is not None and not row.status.is_final]


# ── Commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────

LaneName = Annotated[Lane, typer.Argument(show_default=False)]


def pause(
    lane: LaneName, yes: Yes = False, stack: StackName = None, profile: Profile = None, as_json: AsJson = False
) -> None:
    """Stop a lane: its workers take no more jobs. Jobs are still accepted, and those under way go on."""
    at = Deployment.find(stack, profile)
    confirm(f"Pause the lane {lane} of {at.name}?", yes=yes)
    _switched(at, lane, on=False, as_json=as_json)


def resume(lane: LaneName, stack: StackName = None, profile: Profile = None, as_json: AsJson = False) -> None:
    """Let a paused lane go on."""
    _switched(Deployment.find(stack, profile), lane, on=True, as_json=as_json)


def _switched(at: Deployment, lane: Lane, *, on: bool, as_json: bool) -> None:
    state = switch(at, lane, on=on)
    show({"lane": lane, "state": state}, f"The lane {lane} is {state.lower()}.", as_json=as_json)
    if state != ("Enabled" if on else "Disabled"):
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
    as_json: AsJson = False,
) -> None:
    """Wait until a lane is empty: no job of it waits or is being worked on. Ends with 1 if it is not in time.

    Jobs are still accepted meanwhile, so let the callers stop first. With --cancel, waiting jobs are cancelled, and
    their clients told.
    """
    at = Deployment.find(stack, profile)
    desk = desk_of(at)
    if cancel:
        waiting = [job for job in unfinished(desk) if job.lane is lane and job.status is JobStatus.QUEUED]
        confirm(f"Cancel {len(waiting)} waiting jobs of the lane {lane} of {at.name}?", yes=yes)
    elif (poller := pollers(at).get(lane)) is not None and poller.state != "Enabled":
        raise Refused(f"The lane {lane} is {poller.state.lower()}: `backburner resume {lane}` first, or --cancel.")
    ends_at = time.monotonic() + wait
    with notes.status("") as line:
        while left := [job for job in unfinished(desk) if job.lane is lane]:
            if cancel:
                for job in left:
                    _cancel_waiting(desk, job)
            if time.monotonic() >= ends_at:
                break
            line.update(f"{len(left)} jobs left, the oldest {in_words(_age(desk, left))} old")
            time.sleep(POLL_SECONDS)
    result: Mapping[str, Any] = {"lane": lane, "left": len(left)}
    show(result, f"The lane {lane} is empty." if not left else f"{len(left)} jobs are left.", as_json=as_json)
    if left:
        raise typer.Exit(1)


def _cancel_waiting(desk: Desk, job: Job) -> None:
    if job.status is JobStatus.QUEUED:
        try:
            cancel_job(desk, job.job_id)
        except Refused:
            return  # it has ended meanwhile


def _age(desk: Desk, jobs: list[Job]) -> float:
    return (desk.lifecycle.clock.now() - min(job.created_at for job in jobs)) / 1000
