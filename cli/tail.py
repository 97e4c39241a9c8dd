"""`backburner tail`: what happens to a job, as it happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from backburner.models import EpochMs, Job, JobStatus
from cli.deployment import Deployment, Profile, Region, StackName
from cli.desk import Desk, desk_of
from cli.jobs import find_job
from cli.screen import AsJson, show

POLL_SECONDS = 0.5


def events(desk: Desk, job_id: str) -> Iterator[dict[str, Any]]:
    """What has happened to a job and what goes on happening, until it has ended and all are told or given up.

    Raises Refused if there is no such job.
    """
    lines, notices, state = 0, frozenset[tuple[str, str, int]](), ""
    while True:
        job = find_job(desk, job_id)
        for line in job.log[lines:]:
            yield {"at": line.ended_at, "event": "attempt", "attempt": line.number, "outcome": line.outcome,
                   "model": line.model, "seconds": (line.ended_at - line.began_at) / 1000}  # fmt: skip
        lines = len(job.log)
        if (now := f"{job.status} {job.claims}") != state:
            yield {"at": _since(job), "event": "status", "status": job.status, **_why(job)}
            state = now
        told = frozenset((notice.target, notice.status, notice.tries) for notice in job.outbox)
        for target, status, tries in sorted(told - notices):
            if tries or status != "pending":
                yield {"at": desk.lifecycle.clock.now(), "event": "told", "target": target, "status": status,
                       "tries": tries}  # fmt: skip
        notices = told
        if job.status.is_final and not job.pending:
            return
        desk.lifecycle.clock.sleep(POLL_SECONDS)


def _since(job: Job) -> EpochMs:
    if job.status.is_final:
        return job.finished_at or job.created_at
    return job.claimed_at or max(job.created_at, job.available_at)


def _why(job: Job) -> dict[str, Any]:
    return {} if job.error is None else {"code": job.error.code, "message": job.error.message}


def _in_words(event: dict[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.gmtime(event["at"] / 1000))
    match event["event"]:
        case "attempt":
            by = f" by {event['model']}" if event["model"] else ""
            said = f"attempt {event['attempt']}{by}: {event['outcome']} after {event['seconds']:.1f} s"
        case "told":
            said = f"{event['target']}: {event['status']}, {event['tries']} tries"
        case _:
            said = str(event["status"]) + (f": {event['code']}, {event['message']}" if "code" in event else "")
    return f"{at}  {said}"


def tail(
    job_id: Annotated[str, typer.Argument(metavar="JOB", show_default=False)],
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Follow a job to its end: each attempt, each change, and who was told (times are UTC). Prints no content.

    Ends with 1 if it did not complete.
    """
    desk = desk_of(Deployment.find(stack, profile, region))
    last = ""
    for event in events(desk, job_id):
        show(event, _in_words(event), as_json=as_json)
        last = event.get("status", last) if event["event"] == "status" else last
    if last != JobStatus.COMPLETED:
        raise typer.Exit(1)
