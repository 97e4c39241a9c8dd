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
from cli.durations import in_words
from cli.screen import Bar, Refused, notes

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
type Mending = Callable[[Job, Bar], Changes | None]
"""What to change in a job's request; the bar is hidden while the operator is asked."""


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
    changes: Mending,
    bar: Bar,
) -> Outcome:
    """Retry failed jobs, at most `rate` a second; each is a step of the bar.

    The first of each cause is its canary: if it has not completed within canary_seconds, the others of that cause are
    left alone. None: no canaries.
    """
    outcome, clock = Outcome(), desk.lifecycle.clock
    verdicts: dict[Cause, str | None] = {}
    for job, cause in jobs:
        stop = verdicts.get(cause)
        if stop is not None:
            outcome.left[job.job_id] = stop
        elif (why := _retry(desk, job, changes, bar)) is not None:
            outcome.left[job.job_id] = why
        else:
            outcome.retried.append(job.job_id)
            if canary_seconds is not None and cause not in verdicts:
                verdicts[cause] = _verdict(desk, job, cause[0], canary_seconds, bar)
                outcome.canaries[job.job_id] = verdicts[cause] or "completed"
            else:
                clock.sleep(1 / rate)
        bar()
    return outcome


def _retry(desk: Desk, job: Job, changes: Mending, bar: Bar) -> str | None:
    """Queue one job again; why not, if it could not be."""
    try:
        desk.redrive.retry(job, changes(job, bar))
    except Conflict:
        return "somebody else has dealt with it"
    except InvalidRequest as error:
        fields = error.fields or ((error.field or "", error.message),)
        return "; ".join(f"{name}: {message}" for name, message in fields)
    except BackburnerError as error:
        return error.message
    return None


def _verdict(desk: Desk, job: Job, code: str, seconds: float, bar: Bar) -> str | None:
    """None if the job completes in time; else what its siblings are left alone for. Says what is waited for."""
    clock = desk.lifecycle.clock
    began_at = clock.now()
    what = f"canary {job.job_id} ({code})"
    notes.print(f"Waiting for the {what}, for {in_words(seconds)} at most.", markup=False, soft_wrap=True)
    with bar.saying(what) as say:
        while True:
            row = desk.lifecycle.store.get(job.job_id)
            if row is None:
                return f"the canary {job.job_id} is gone"
            if row.status is JobStatus.COMPLETED:
                return None
            if row.status.is_final:
                code = row.error.code if row.error is not None else row.status
                return f"the canary {job.job_id} came to the same or another bad end: {code}"
            waited = (clock.now() - began_at) / 1000
            if waited >= seconds:
                return f"the canary {job.job_id} has not ended after {seconds:g} s; see `backburner tail {job.job_id}`"
            say(f"{what} is {row.status}, {waited:.0f} s of {seconds:g} s")
            clock.sleep(POLL_SECONDS)


def changes_wanted(desk: Desk, *, edit: bool, edit_from: Path | None) -> Mending:
    """What to change in each request, by file, by hand, or not at all. Raises Refused for a file that is none."""
    if edit and edit_from is not None:
        raise Refused("Give --edit or --edit-from, not both.")
    if edit_from is not None:
        text = sys.stdin.read() if str(edit_from) == "-" else _read(edit_from)
        fields = parse_object(text, "file")
        return lambda _job, _bar: fields
    return (lambda job, bar: _edited(desk, job, bar)) if edit else lambda _job, _bar: None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error


def _edited(desk: Desk, job: Job, bar: Bar) -> Changes:
    """What the operator has changed in $EDITOR; asked again while it is not JSON."""
    before = desk.redrive.request_of(job)
    with bar.hidden():
        after = _written(job, json.dumps(before, indent=2, ensure_ascii=False) + "\n")
    if after is None:
        return {}
    removed: dict[str, Any] = dict.fromkeys(name for name in before if name not in after)
    return {name: value for name, value in after.items() if value != before.get(name)} | removed


def _written(job: Job, text: str) -> Changes | None:
    """What the editor was left with; None if it was left without saving."""
    while True:
        edited = click.edit(text, extension=".json")
        if edited is None:
            return None
        try:
            return parse_object(edited, "request")
        except InvalidRequest as error:
            notes.print(f"{job.job_id}: {error.message}", style="red", markup=False)
            if not typer.confirm("Edit it again?", err=True):
                raise typer.Abort from error
            text = edited


def told(outcome: Outcome) -> list[str]:
    """What became of a retry, for people."""
    reasons = Counter(outcome.left.values())
    return [f"{len(outcome.retried)} retried.", *(f"{count} left: {why}" for why, count in reasons.most_common())]
