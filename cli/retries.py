"""Retrying failed jobs, many at a time: at a steady rate, a canary of each cause first, mended where that helps."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from backburner.errors import BackburnerError, InvalidRequest
from backburner.intake import parse_object
from backburner.models import Job, JobStatus
from backburner.ports import Conflict
from cli.desk import Desk
from cli.screen import Refused, notes

POLL_SECONDS = 0.5
DEFAULT_RATE = 10.0

Edit = Annotated[bool, typer.Option("--edit", help="Mend each request in $EDITOR before it is sent again.")]
EditFrom = Annotated[
    Path | None,
    typer.Option(
        "--edit-from",
        help="A JSON file of fields to set in each request, or to take away where null; - is stdin.",
        show_default=False,
        allow_dash=True,
    ),
]

type Cause = tuple[str, str]
type Changes = Mapping[str, Any]


@dataclass
class Outcome:
    """What became of a retry. left: the jobs not touched, with the reason. canaries: how those of each cause fared."""

    retried: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    canaries: dict[str, str] = field(default_factory=dict)


def retry_all(
    desk: Desk,
    jobs: Sequence[tuple[Job, Cause]],
    *,
    rate: float,
    canary_seconds: float | None,
    changes: Callable[[Job], Changes | None] = lambda _: None,
    advance: Callable[[], None] = lambda: None,
) -> Outcome:
    """Retry failed jobs, at most `rate` a second; calls `advance` after each.

    The first of each cause is its canary: if it has not completed within canary_seconds, the others of that cause are
    left alone. None: no canaries.
    """
    outcome, clock = Outcome(), desk.lifecycle.clock
    verdicts: dict[Cause, str | None] = {}
    for job, cause in jobs:
        stop = verdicts.get(cause)
        if stop is not None:
            outcome.left[job.job_id] = stop
        elif (why := _retry(desk, job, changes)) is not None:
            outcome.left[job.job_id] = why
        else:
            outcome.retried.append(job.job_id)
            if canary_seconds is not None and cause not in verdicts:
                verdicts[cause] = _verdict(desk, job, canary_seconds)
                outcome.canaries[job.job_id] = verdicts[cause] or "completed"
            else:
                clock.sleep(1 / rate)
        advance()
    return outcome


def _retry(desk: Desk, job: Job, changes: Callable[[Job], Changes | None]) -> str | None:
    """Queue one job again; why not, if it could not be."""
    try:
        desk.redrive.retry(job, changes(job))
    except Conflict:
        return "somebody else has dealt with it"
    except InvalidRequest as error:
        fields = error.fields or ((error.field or "", error.message),)
        return "; ".join(f"{name}: {message}" for name, message in fields)
    except BackburnerError as error:
        return error.message
    return None


def _verdict(desk: Desk, job: Job, seconds: float) -> str | None:
    """None if the job completes in time; else what its siblings are left alone for."""
    clock = desk.lifecycle.clock
    ends_at = clock.now() + round(1000 * seconds)
    while True:
        row = desk.lifecycle.store.get(job.job_id)
        if row is None:
            return f"the canary {job.job_id} is gone"
        if row.status is JobStatus.COMPLETED:
            return None
        if row.status.is_final:
            code = row.error.code if row.error is not None else row.status
            return f"the canary {job.job_id} came to the same or another bad end: {code}"
        if clock.now() >= ends_at:
            return f"the canary {job.job_id} has not ended after {seconds:g} s; see `backburner tail {job.job_id}`"
        clock.sleep(POLL_SECONDS)


def changes_wanted(desk: Desk, *, edit: bool, edit_from: Path | None) -> Callable[[Job], Changes | None]:
    """What to change in each request, by file, by hand, or not at all. Raises Refused for a file that is none."""
    if edit and edit_from is not None:
        raise Refused("Give --edit or --edit-from, not both.")
    if edit_from is not None:
        text = sys.stdin.read() if str(edit_from) == "-" else _read(edit_from)
        fields = parse_object(text, "file")
        return lambda _: fields
    return (lambda job: _edited(desk, job)) if edit else lambda _: None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error


def _edited(desk: Desk, job: Job) -> Changes:
    """What the operator has changed in $EDITOR; asked again while it is not JSON."""
    before = desk.redrive.request_of(job)
    text: str | None = json.dumps(before, indent=2, ensure_ascii=False) + "\n"
    while True:
        text = click.edit(text, extension=".json")
        if text is None:  # left without saving
            return {}
        try:
            after = parse_object(text, "request")
        except InvalidRequest as error:
            notes.print(f"{job.job_id}: {error.message}", style="red", markup=False)
            if not typer.confirm("Edit it again?", err=True):
                raise typer.Abort from error
            continue
        removed: dict[str, Any] = dict.fromkeys(name for name in before if name not in after)
        return {name: value for name, value in after.items() if value != before.get(name)} | removed


def told(outcome: Outcome) -> list[str]:
    """What became of a retry, for people."""
    reasons = Counter(outcome.left.values())
    return [f"{len(outcome.retried)} retried.", *(f"{count} left: {why}" for why, count in reasons.most_common())]
