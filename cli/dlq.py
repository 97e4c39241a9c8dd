"""`backburner dlq`: dead jobs, by their letters in the dead-letter queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from backburner.models import DEAD_LETTER, EpochMs, Job, JobStatus, Lane, NoticeStatus
from backburner.ports import Conflict
from backburner.redrive import Dead
from cli.deployment import Deployment, Profile, Region, StackName
from cli.desk import Desk, desk_of
from cli.durations import in_words, seconds_of
from cli.jobs import Content, find_job, show_job
from cli.retries import DEFAULT_RATE, Edit, EditFrom, changes_wanted, retry_all, told
from cli.screen import AsJson, Refused, Yes, confirm, progress, show, table

app = typer.Typer(
    no_args_is_help=True,
    help="""Dead jobs: those that failed for a reason that is an operator's business.

    A usual night: `dlq list` shows the causes; mend one; `dlq retry --cause CODE` sends a canary and, if that
    completes, the others. What is not worth it: `dlq discard`. Until then nothing is lost: letters wait for 14 days.
    """,
)


@dataclass(frozen=True)
class Filter:
    """Which dead jobs. Nothing given: all."""

    job_ids: frozenset[str] = frozenset()
    cause: str | None = None
    match: str | None = None
    client: str | None = None
    lane: Lane | None = None
    older_than: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it lets everything through."""
        return self == Filter()

    def takes(self, dead: Dead, now: EpochMs) -> bool:
        """Whether it is one of those."""
        letter, hint = dead.letter, dead.letter.hint
        wanted = (
            (not self.job_ids or (hint is not None and hint.job_id in self.job_ids))
            and (self.cause is None or letter.reason == self.cause)
            and (self.match is None or self.match.lower() in letter.detail.lower())
            and (self.client is None or letter.client_id == self.client)
            and (self.lane is None or letter.lane is self.lane)
        )
        return wanted and (self.older_than is None or letter.sent_at <= now - 1000 * self.older_than)


JOB_IDS_MAX = 100
"""Of each group; a cause may have killed thousands."""


@dataclass
class Group:
    """Dead jobs of one cause. oldest_seconds, newest_seconds: how long they have lain there.

    job_ids: the first of them, in no order; job_ids_left_out: how many more there are.
    """

    cause: str
    detail: str
    count: int = 0
    oldest_seconds: float = 0.0
    newest_seconds: float = 0.0
    lanes: dict[str, int] = field(default_factory=dict)
    clients: dict[str, int] = field(default_factory=dict)
    example: str = ""
    job_ids: list[str] = field(default_factory=list)
    job_ids_left_out: int = 0


def groups(dead: Sequence[Dead], now: EpochMs) -> list[Group]:
    """By cause, the largest first."""
    by_cause: dict[tuple[str, str], Group] = {}
    for each in dead:
        age = max(0.0, (now - each.letter.sent_at) / 1000)
        group = by_cause.setdefault(each.cause, Group(*each.cause, newest_seconds=age))
        group.count += 1
        group.oldest_seconds, group.newest_seconds = max(group.oldest_seconds, age), min(group.newest_seconds, age)
        for counts, name in ((group.lanes, each.letter.lane), (group.clients, each.letter.client_id)):
            counts[name or "?"] = counts.get(name or "?", 0) + 1
        if each.letter.hint is not None and len(group.job_ids) < JOB_IDS_MAX:
            group.job_ids.append(each.letter.hint.job_id)
        elif each.letter.hint is not None:
            group.job_ids_left_out += 1
        group.example = group.example or next(iter(group.job_ids), "")
    return sorted(by_cause.values(), key=lambda group: (-group.count, group.cause, group.detail))


def look(desk: Desk, wanted: Filter) -> tuple[list[Dead], int]:
    """The letters that still ask for something and that the filter takes; and how many ask for nothing any more."""
    now = desk.lifecycle.clock.now()
    found: list[Dead] = []
    settled = 0
    with progress("Looking through the letters") as advance:
        for dead in desk.redrive.letters():
            advance()
            if dead.is_settled(now):
                settled += 1
            elif wanted.takes(dead, now):
                found.append(dead)
    return found, settled


def discard_all(desk: Desk, dead: Sequence[Dead], advance: Callable[[], None]) -> tuple[list[str], dict[str, str]]:
    """Discard the jobs and their letters; the ids of what is gone, and why what is left was left.

    A letter that is no hint, or whose job never was, is known by its own name.
    """
    gone: list[str] = []
    left: dict[str, str] = {}
    nameless: set[str] = set()
    for each in dead:
        if each.letter.reason is None:
            left[each.letter.name] = "the repairer has not looked at it yet; it does within a minute"
        elif each.job is None:
            nameless.add(each.letter.name)
            gone.append(each.letter.name)
        else:
            try:
                desk.lifecycle.discard(each.job)
                gone.append(each.job.job_id)
            except Conflict:
                left[each.job.job_id] = "it runs again, or has ended otherwise"
        advance()
    desk.redrive.sweep(nameless)
    return gone, left


# ── Commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────

JobIds = Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Only these.", show_default=False)]
OfCause = Annotated[str | None, typer.Option("--cause", help="A code that `dlq list` shows.", show_default=False)]
Match = Annotated[str | None, typer.Option(help="Only where the error's words hold this text.", show_default=False)]
OfClient = Annotated[str | None, typer.Option("--client", help="Only this client's.", show_default=False)]
OfLane = Annotated[Lane | None, typer.Option("--lane", help="Only this lane's.", show_default=False)]
OlderThan = Annotated[
    float | None, typer.Option(parser=seconds_of, metavar="DURATION", help="Such as 30m or 12h.", show_default=False)
]
All = Annotated[bool, typer.Option("--all", help="All dead jobs.")]


def _filter(
    job_ids: Sequence[str] | None,
    cause: str | None,
    match: str | None,
    client: str | None,
    lane: Lane | None,
    older_than: float | None,
) -> Filter:
    return Filter(frozenset(job_ids or ()), cause, match, client, lane, older_than)


@app.command("list")
def list_(
    cause: OfCause = None,
    match: Match = None,
    client: OfClient = None,
    lane: OfLane = None,
    older_than: OlderThan = None,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Show the dead jobs, grouped by what they died of. The letters stay where they are."""
    desk = desk_of(Deployment.find(stack, profile, region))
    dead, settled = look(desk, _filter(None, cause, match, client, lane, older_than))
    found = groups(dead, desk.lifecycle.clock.now())
    grid = table("!cause", "", "#jobs", "#oldest", "#newest", "lanes", "clients", "for example")
    for group in found:
        grid.add_row(
            group.cause,
            group.detail,
            str(group.count),
            in_words(group.oldest_seconds),
            in_words(group.newest_seconds),
            _counted(group.lanes),
            _counted(group.clients),
            group.example,
        )
    said = [f"{len(dead)} dead jobs."] if dead else ["No dead jobs."]
    if settled:
        said.append(f"{settled} letters ask for nothing any more; the next retry or discard sweeps them up.")
    shown = [grid, *said] if found else said
    show({"total": len(dead), "settled": settled, "groups": found}, *shown, as_json=as_json)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in Counter(counts).most_common(3)) + (", …" if len(counts) > 3 else "")


@app.command("show")
def show_(
    job_id: Annotated[str, typer.Argument(help="A job that has failed.")],
    content: Content = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Show a failed job: what it died of, every attempt, and whether it is in the dead-letter queue."""
    desk = desk_of(Deployment.find(stack, profile, region))
    job = find_job(desk, job_id)
    if job.status is not JobStatus.FAILED:
        raise Refused(f"{job_id} is {job.status}; see `backburner jobs show {job_id}`")
    show_job(desk, job, content=content, as_json=as_json, letter=_letter_of(job))


def _letter_of(job: Job) -> str:
    """What became of a failed job's letter, by its row."""
    letter = next((notice for notice in job.outbox if notice.target == DEAD_LETTER), None)
    if job.discarded_at is not None:
        return "discarded"
    if letter is None:
        return "none: it failed for a reason that is its caller's business; `backburner jobs retry` runs it again"
    return "sent" if letter.status is NoticeStatus.DELIVERED else "on its way"


@app.command("retry")
def retry(
    job_ids: JobIds = None,
    cause: OfCause = None,
    match: Match = None,
    client: OfClient = None,
    lane: OfLane = None,
    older_than: OlderThan = None,
    all_: All = False,
    edit: Edit = False,
    edit_from: EditFrom = None,
    rate: Annotated[float, typer.Option(min=0.01, help="Jobs a second.")] = DEFAULT_RATE,
    canary: Annotated[bool, typer.Option(help="Retry one of each cause first, and the others if it completes.")] = True,
    canary_for: Annotated[
        float,
        typer.Option(parser=seconds_of, metavar="DURATION", help="How long to wait for a canary.", show_default="5m"),
    ] = 300.0,
    yes: Yes = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Run dead jobs again, as they are or mended. Each runs once, however often it is retried.

    Ends with 1 if any was left alone. May be interrupted and begun again.
    """
    wanted = _filter(job_ids, cause, match, client, lane, older_than)
    if wanted.is_empty and not all_:
        raise Refused("Say which: job ids, --cause, --match, --client, --lane, --older-than, or --all.")
    at = Deployment.find(stack, profile, region)
    desk = desk_of(at)
    jobs = [(dead.job, dead.cause) for dead in look(desk, wanted)[0] if dead.job is not None and dead.letter.reason]
    if not jobs and wanted.job_ids:
        raise Refused("No dead job has such an id; see `backburner dlq list`, or `backburner jobs retry`.")
    changes = changes_wanted(desk, edit=edit, edit_from=edit_from)
    causes = len({cause for _, cause in jobs})
    confirm(f"Retry {len(jobs)} dead jobs of {causes} causes on {at.name}?", yes=yes or not jobs)
    seconds = canary_for if canary and len(jobs) > 1 else None
    try:
        with progress("Retrying", len(jobs)) as bar:
            outcome = retry_all(desk, jobs, rate=rate, canary_seconds=seconds, changes=changes, bar=bar)
    finally:
        desk.redrive.sweep()
    show(outcome, *told(outcome), as_json=as_json)
    if outcome.left:
        raise typer.Exit(1)


@app.command("discard")
def discard(
    job_ids: JobIds = None,
    cause: OfCause = None,
    match: Match = None,
    client: OfClient = None,
    lane: OfLane = None,
    older_than: OlderThan = None,
    all_: All = False,
    yes: Yes = False,
    stack: StackName = None,
    profile: Profile = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Give up dead jobs for good: they stay failed, as their clients were told, and nothing runs them again."""
    wanted = _filter(job_ids, cause, match, client, lane, older_than)
    if wanted.is_empty and not all_:
        raise Refused("Say which: job ids, --cause, --match, --client, --lane, --older-than, or --all.")
    at = Deployment.find(stack, profile, region)
    desk = desk_of(at)
    dead, _ = look(desk, wanted)
    if not dead and wanted.job_ids:
        raise Refused("No dead job has such an id; see `backburner dlq list`.")
    confirm(f"Discard {len(dead)} dead jobs on {at.name}? They can not be retried afterwards.", yes=yes or not dead)
    with progress("Discarding", len(dead)) as advance:
        gone, left = discard_all(desk, dead, advance)
    said = [f"{len(gone)} discarded.", *(f"{name} left: {why}" for name, why in left.items())]
    show({"discarded": gone, "left": left}, *said, as_json=as_json)
    if left:
        raise typer.Exit(1)
