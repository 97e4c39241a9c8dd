"""`backburner jobs`: jobs by their rows, whosever they are."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import typer

from backburner.documents import job_document
from backburner.errors import BackburnerError, JobIsFinal
from backburner.models import INTERNAL_TARGETS, SLACK, Client, Job, JobStatus, Lane, NoticeStatus
from backburner.ports import Conflict
from cli.clients import list_clients
from cli.deployment import Deployment, Profile, Region, StackName
from cli.desk import Desk, desk_of
from cli.durations import in_words
from cli.retries import DEFAULT_RATE, Edit, EditFrom, changes_wanted, retry_all, told
from cli.screen import AsJson, Refused, Yes, confirm, notes, progress, show, table

app = typer.Typer(no_args_is_help=True, help="Jobs, whosever they are.")

PAGE = 99
"""The store reads one row more than asked for, to see whether a page follows, and DynamoDB 100 rows by key at once."""
LOOKED_AT_MAX = 10_000
"""Jobs of each client that a listing looks at for a rare state or lane: some 200 requests."""

Content = Annotated[bool, typer.Option("--content", help="Also what was asked, and what was answered.")]
JobIds = Annotated[list[str], typer.Argument(metavar="JOB...", show_default=False)]


def find_job(desk: Desk, job_id: str) -> Job:
    """The job. Raises Refused if there is none."""
    job = desk.lifecycle.store.get(job_id)
    if job is None or job.has_expired(desk.lifecycle.clock.now()):
        raise Refused(f"there is no job {job_id!r}")
    return job


@dataclass
class Listing:
    """A client's jobs, the newest first, of which at most so many are looked at.

    cut_off: whether it came to its end there, with older ones unseen.
    """

    desk: Desk
    client: str
    most: int
    cut_off: bool = False

    def __iter__(self) -> Iterator[Job]:
        """Page by page, as they are asked for."""
        cursor, looked_at = None, 0
        while True:
            page, cursor = self.desk.lifecycle.store.list_by_client(self.client, None, cursor, PAGE)
            yield from page
            looked_at += len(page)
            if cursor is None:
                return
            if looked_at >= self.most:
                self.cut_off = True
                return


def newest(
    desk: Desk, clients: Iterable[str], limit: int, *, status: JobStatus | None = None, lane: Lane | None = None
) -> tuple[list[Job], bool]:
    """The newest jobs of these clients in that state and lane, at most so many.

    And whether that is all there are, but for the limit: a client may have so many that its older ones were not seen.
    """
    now = desk.lifecycle.clock.now()
    listings = [Listing(desk, client, LOOKED_AT_MAX) for client in clients]
    jobs = heapq.merge(*listings, key=lambda job: job.created_at, reverse=True)
    wanted = (
        job for job in jobs if status in (None, job.status) and lane in (None, job.lane) and not job.has_expired(now)
    )
    found = list(islice(wanted, limit))
    return found, not any(listing.cut_off for listing in listings)


def clients_of(at: Deployment) -> list[str]:
    """The ids of all clients, that of Slack's people among them, which needs no row."""
    return sorted({SLACK, *(client.client_id for client in list_clients(at.table("ClientsTableName")))})


def document(desk: Desk, job: Job, *, content: bool) -> dict[str, Any]:
    """A job as its operator sees it: as its client does, and what only the row says."""
    without = () if content else ("result", "metadata")
    text = job_document(job, desk.submission.payloads, fits=lambda _: True, without=without, fetch=content)
    shown: dict[str, Any] = json.loads(text)
    if not content:
        for name in ("result", "result_url", "result_note"):
            shown.pop(name, None)
    shown |= {
        "client_id": job.client_id,
        "claims": job.claims,
        "due_at": None if job.due_at is None else job.due_at // 1000,
        "deliveries": [{"target": n.target, "status": n.status, "tries": n.tries, "last_error": n.last_error}
                       for n in job.outbox],
    }  # fmt: skip
    instants = {
        "available_at": job.available_at if job.status is JobStatus.QUEUED else None,
        "parked_since": job.parked_since,
        "turn_at": job.place,
        "slot_at": job.slot.start_at if job.slot else None,
        "lease_until": job.lease_until,
        "discarded_at": job.discarded_at,
    }
    shown |= {name: instant // 1000 for name, instant in instants.items() if instant is not None}
    if content:
        shown["request"] = desk.redrive.request_of(job)
    return shown


def show_job(desk: Desk, job: Job, *, content: bool, as_json: bool, **more: str) -> None:
    """Print a job, and what more is to be said of it."""
    shown = document(desk, job, content=content) | more
    show(shown, json.dumps(shown, indent=2, ensure_ascii=False), as_json=as_json)


def cancel_job(desk: Desk, job_id: str) -> None:
    """Cancel a job. Raises Refused if it has ended."""
    job = find_job(desk, job_id)
    try:
        desk.submission.cancel(Client(job.client_id, ""), job_id)
    except JobIsFinal as error:
        raise Refused(f"{job_id}: {error.message}") from error


def tell_again(desk: Desk, job: Job, targets: Iterable[str]) -> None:
    """Tell a job's end anew to these targets, whatever became of them. Raises Refused while one is being told."""
    try:
        for target in targets:
            job = desk.lifecycle.retell(job, target)
    except Conflict as error:
        raise Refused(f"{job.job_id} is being told this very moment; try again.") from error


def tell_lost(desk: Desk, job_id: str) -> list[str]:
    """Tell a job's end anew to the targets that were given up; their names. Raises Refused if there is none."""
    job = find_job(desk, job_id)
    lost = [n.target for n in job.outbox if n.status is NoticeStatus.GIVEN_UP and n.target not in INTERNAL_TARGETS]
    if not lost:
        raise Refused(f"{job_id}: nobody was given up; see `backburner jobs show {job_id}`")
    tell_again(desk, job, lost)
    return lost


# ── Commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command("list")
def list_(
    client: Annotated[str | None, typer.Option(help="Only this client's.", show_default=False)] = None,
    status: Annotated[JobStatus | None, typer.Option(help="Only those in this state.", show_default=False)] = None,
    lane: Annotated[Lane | None, typer.Option(help="Only this lane's.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="The most to show.")] = 50,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """List the newest jobs."""
    at = Deployment.find(stack, profile, region)
    desk = desk_of(at)
    jobs, all_seen = newest(desk, [client] if client else clients_of(at), limit, status=status, lane=lane)
    now = desk.lifecycle.clock.now()
    grid = table("!job", "client", "lane", "status", "#attempts", "#age", "error")
    for job in jobs:
        error = job.error.code if job.error is not None else ""
        age = in_words((now - job.created_at) / 1000)
        grid.add_row(job.job_id, job.client_id, job.lane, job.status, str(job.attempts), age, error)
    rows = [
        {"job_id": job.job_id, "client_id": job.client_id, "lane": job.lane, "status": job.status,
         "attempts": job.attempts, "created_at": job.created_at // 1000, "error": job.error and job.error.code}
        for job in jobs
    ]  # fmt: skip
    show({"jobs": rows, "all_seen": all_seen}, grid, as_json=as_json)
    if not all_seen:
        notes.print(f"Of clients with more, only the newest {LOOKED_AT_MAX:,} jobs were looked at.", markup=False)


@app.command("show")
def show_(
    job_id: Annotated[str, typer.Argument()],
    content: Content = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Show a job: its state, every attempt, and who was told."""
    desk = desk_of(Deployment.find(stack, profile, region))
    show_job(desk, find_job(desk, job_id), content=content, as_json=as_json)


@app.command("tell")
def tell(
    job_id: Annotated[str, typer.Argument(help="A job that has ended.")],
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Tell a job's end again to whoever was given up: its webhook, its thread in Slack, its listeners."""
    targets = tell_lost(desk_of(Deployment.find(stack, profile, region)), job_id)
    show(
        {"job_id": job_id, "told_again": targets},
        f"{job_id}: {', '.join(targets)} will be told. `backburner jobs show {job_id}` tells what becomes of it.",
        as_json=as_json,
    )


@app.command("retry")
def retry(
    job_ids: JobIds,
    edit: Edit = False,
    edit_from: EditFrom = None,
    yes: Yes = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Run failed jobs again, as they are or mended; also those that are in no dead-letter queue.

    Ends with 1 if any was left alone. Many at once, by cause: `backburner dlq retry`.
    """
    at = Deployment.find(stack, profile, region)
    desk = desk_of(at)
    jobs = [find_job(desk, job_id) for job_id in job_ids]
    for job in jobs:
        if job.status is not JobStatus.FAILED or job.discarded_at is not None:
            state = "discarded" if job.discarded_at is not None else job.status
            raise Refused(f"{job.job_id} is {state}; only failed jobs are retried")
    changes = changes_wanted(desk, edit=edit, edit_from=edit_from)
    confirm(f"Retry {len(jobs)} jobs on {at.name}?", yes=yes)
    chosen = [(job, ("", "")) for job in jobs]
    with progress("Retrying", len(jobs)) as bar:
        outcome = retry_all(desk, chosen, rate=DEFAULT_RATE, canary_seconds=None, changes=changes, bar=bar)
    desk.redrive.sweep()
    show(outcome, *told(outcome), as_json=as_json)
    if outcome.left:
        raise typer.Exit(1)


@app.command("cancel")
def cancel(
    job_ids: JobIds,
    yes: Yes = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Cancel jobs, whether they wait or are being worked on. Their clients are told.

    Ends with 1 if any could not be, such as one that has ended; the others are cancelled all the same.
    """
    at = Deployment.find(stack, profile, region)
    desk = desk_of(at)
    confirm(f"Cancel {len(job_ids)} jobs on {at.name}?", yes=yes)
    outcomes: dict[str, str | None] = {}
    with progress("Cancelling", len(job_ids)) as advance:
        for job_id in job_ids:
            outcomes[job_id] = _why_not_cancelled(desk, job_id)
            advance()
    cancelled = [job_id for job_id, why in outcomes.items() if why is None]
    left = {job_id: why for job_id, why in outcomes.items() if why is not None}
    said = [f"{job_id}: {why or 'cancelled'}" for job_id, why in outcomes.items()]
    show({"cancelled": cancelled, "left": left}, *said, as_json=as_json)
    if left:
        raise typer.Exit(1)


def _why_not_cancelled(desk: Desk, job_id: str) -> str | None:
    """Cancel a job; None if it is, else why it could not be."""
    try:
        cancel_job(desk, job_id)
    except Refused as error:
        return str(error).removeprefix(f"{job_id}: ")
    except BackburnerError as error:
        return error.message
    return None
