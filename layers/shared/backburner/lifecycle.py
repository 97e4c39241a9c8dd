"""The life of a job: every write to a row after its acceptance, each with the guard that makes it safe.

    queued ──claim──▶ processing ──finish──▶ completed | failed
      ▲  └──────────────────────── cancel ──▶ cancelled
      └──put back────────┘         expire ──▶ expired
    failed (dead) ──revive──▶ processing           only on a redrive
    failed ──requeue──▶ queued                     by an operator, who may mend the request

`claims` is the fencing token. A worker's writes ask that it is unchanged, so whoever was taken over writes nothing
more; but a late answer is stored, even after its lease lapsed, as long as nobody else has claimed the job: it is paid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from backburner.budgets import day_of
from backburner.errors import (
    Busy,
    DeadlinePassed,
    JobFailed,
    OutcomeUnknown,
    PortUnavailable,
    Undeliverable,
    Unreachable,
    WorkerLost,
)
from backburner.models import (
    BUDGET,
    DEAD_LETTER,
    Attempt,
    Charge,
    EpochMs,
    Failure,
    Hint,
    Job,
    JobStatus,
    Notice,
    NoticeStatus,
    Payload,
    SlackOrigin,
    Slot,
    Telling,
)
from backburner.ports import (
    Chance,
    Clock,
    Conflict,
    DeadLetterQueue,
    Guard,
    HintQueue,
    JobStore,
    Journal,
    Moved,
    NoticeQueue,
    Patch,
    Tallies,
)

LEASE_MS = 30_000
"""A killed worker's job is free after this; with the repairer's minute that stays below 90 s."""
RENEW_MS = 10_000
"""A third of the lease: one renewal may fail and clocks may differ by seconds before the lease lapses unnoticed."""
PATIENCE_MS = 60_000
"""A queued job whose hint has not arrived after this gets another; well above the accept path's own time limits."""
PATIENCE_MS_MAX = 3_600_000
NOTICE_GRACE_MS = 30_000
"""A target whose telling or wait was to end so long ago is looked at: its message is lost, or its notifier."""
DELAY_SECONDS_MAX = 900
"""SQS delays a message by no more."""
RELEASE_MS = 15_000
RELEASE_MS_MAX = 300_000
"""A job that could not even be tried waits about so long: storage or the secret is out of reach."""
BACKOFF_SECONDS = 2.0
BACKOFF_SECONDS_MAX = 300.0
DEAD_SECONDS = 14 * 86_400
"""SQS keeps a dead letter for at most so long; its row must be there for the redrive."""
FINISH_PAUSES_SECONDS = (0.2, 1.0, 3.0)
"""Between tries to store an answer that is already paid for."""
SETTLE_TRIES_MAX = 5
SETTLE_PAUSE_SECONDS = 0.2
"""Jobs of one client end at the same moment; what is not settled then, the repairer settles."""

_UNFINISHED = frozenset({JobStatus.QUEUED, JobStatus.PROCESSING})
_FINAL = frozenset(status for status in JobStatus if status.is_final)
_QUEUED = frozenset({JobStatus.QUEUED})
_PROCESSING = frozenset({JobStatus.PROCESSING})
_FAILED = frozenset({JobStatus.FAILED})


def patience(job: Job, now: EpochMs) -> int:
    """Milliseconds until an unanswered hint is sent again: as long as the job has waited, so that it doubles.

    A backlog of an hour then costs each job six extra hints, not sixty.
    """
    waited = now - max(job.created_at, job.available_at)
    return min(max(waited, PATIENCE_MS), PATIENCE_MS_MAX)


def lapses_at(job: Job) -> EpochMs:
    """When the lease of a job in processing ends.

    Versions from before `lease_until` keep it in `due_at`, and leave an older claim's `lease_until` as it is.
    """
    if job.lease_until is not None and job.lease_until >= (job.claimed_at or 0) + LEASE_MS:
        return job.lease_until
    return job.due_at or 0


def _lapsed(job: Job, now: EpochMs) -> Guard:
    """In processing, by the claim that was read, and its lease is over."""
    ours = Guard(_PROCESSING, claims=job.claims)
    return replace(ours, lease_by=now) if lapses_at(job) == job.lease_until else replace(ours, due_by=now)


def _as_read(job: Job) -> Guard:
    """An ended job of which nothing was told since it was read."""
    return Guard(_FINAL, claims=job.claims, outbox=job.outbox)


def _noted(job: Job, notice: Notice, now: EpochMs) -> Patch:
    """The notice in its place in the outbox; when none is pending any more, nobody need look at the row again."""
    outbox = tuple(notice if other.target == notice.target else other for other in job.outbox)
    pending = [other for other in outbox if other.status is NoticeStatus.PENDING]
    patience = job.due_at or now + PATIENCE_MS
    due = [other.lease_until + NOTICE_GRACE_MS if other.lease_until else patience for other in pending]
    return {"outbox": outbox, "due_at": min(due, default=None)}


@dataclass(frozen=True)
class Lifecycle:
    """The verbs, over the ports they need. `attempts_max` is the most provider calls of one run of a job."""

    store: JobStore
    hints: HintQueue
    dead_letters: DeadLetterQueue
    notices: NoticeQueue
    clock: Clock
    chance: Chance
    journal: Journal
    tallies: Tallies
    told_here: Mapping[str, Callable[[Job, Notice], None]] = field(default_factory=dict)
    """Targets that whoever ends a job here tells himself, without a message; and what tells them. Such a function notes
    what became of it, or sends the message after all. Raises PortUnavailable, and then the repairer acts."""
    attempts_max: int = 3
    retention_seconds: int = 14 * 86_400
    retry_unknown: bool = True
    """Whether a call whose worker was lost is made again though it may have been paid for, or its job failed."""

    # ── Taking a job ──────────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, job_id: str, owner: str) -> Job:
        """Take a queued job. The one write of the hot path. Raises Conflict with the row if it is not to be had.

        `due_at` stays if it lies beyond the lease, as versions ask that have no `lease_until`, and within the minute
        that the repairer looks ahead, so that a lost worker is noticed at its next run. A job that has waited for half
        a minute takes a second write.
        """
        now = self.clock.now()
        startable = Guard(_QUEUED, available_by=now, deadline_after=now, unexpired_at=now)
        taken: Patch = {
            "status": JobStatus.PROCESSING,
            "owner": owner,
            "claimed_at": now,
            "waiting_since": None,
            "lease_until": now + LEASE_MS,
            "add_claims": 1,
            "add_attempts": 1,
        }
        lapse, soon = now + LEASE_MS, now + PATIENCE_MS
        try:
            return self.store.update(job_id, replace(startable, due_after=lapse, due_by=soon), **taken)
        except Conflict as conflict:
            row = conflict.current
            if row is None or row.status is not JobStatus.QUEUED or lapse <= (row.due_at or 0) <= soon:
                return self._ours(conflict, owner)
            if row.available_at > now or row.deadline_at <= now:
                raise
        taken["due_at"] = soon
        try:
            return self.store.update(job_id, startable, **taken)
        except Conflict as conflict:
            return self._ours(conflict, owner)

    @staticmethod
    def _ours(conflict: Conflict, owner: str) -> Job:
        """The row if this claim has taken it: only the reply to an earlier try was lost. Else raises the conflict."""
        row = conflict.current
        if row is not None and row.owner == owner and row.status is JobStatus.PROCESSING:
            return row
        raise conflict

    def take_over(self, job: Job, owner: str) -> Job:
        """Take a job whose lease has lapsed from the worker that lost it. Raises Conflict."""
        now = self.clock.now()
        return self.store.update(
            job.job_id,
            replace(_lapsed(job, now), deadline_after=now, unexpired_at=now),
            owner=owner,
            claimed_at=now,
            lease_until=now + LEASE_MS,
            due_at=now + PATIENCE_MS,
            parked_since=None,
            add_claims=1,
            add_attempts=1,
            append_log=(self._lost(job, now),),
        )

    def revive(self, job: Job, owner: str) -> Job:
        """Start a new run of a dead job: attempts from one, a new deadline of the old length. Raises Conflict."""
        now = self.clock.now()
        patch: Patch = {
            **self._new_run(job, now),
            "status": JobStatus.PROCESSING,
            "owner": owner,
            "claimed_at": now,
            "lease_until": now + LEASE_MS,
            "due_at": now + PATIENCE_MS,
            "attempts": 1,
        }
        return self.store.update(job.job_id, self._may_run_again(job, now), **patch)

    def requeue(self, job: Job, *, request: Payload | None = None) -> Job:
        """Queue a failed job for a new run, with another request if one is given, and hint at it.

        Raises the fencing token: whatever letter or hint of its old death is still about means nothing any more.
        Raises Conflict when it has not failed any more, has failed anew, or was discarded.
        """
        now = self.clock.now()
        patch: Patch = {
            **self._new_run(job, now),
            "status": JobStatus.QUEUED,
            "available_at": now,
            "due_at": now + min(PATIENCE_MS, job.deadline_seconds * 1000),
            "waiting_since": now,
            "attempts": 0,
        }
        if request is not None:
            patch["request"] = request
        row = self.store.update(job.job_id, self._may_run_again(job, now), **patch)
        lost_a_worker = job.error is not None and job.error.code == WorkerLost.code
        self._hint_or_leave_due(row, alone=lost_a_worker)
        self.journal.note("job_requeued", job_id=job.job_id, mended=request is not None)
        return row

    def discard(self, job: Job) -> Job:
        """Give up a failed job for good: nothing revives it, whatever letter or hint of its death is still about.

        Its outcome stays, and so does the telling of it; the operator need not be told any more. Discarding twice is no
        error. Raises Conflict when it has not failed any more, or has failed anew.
        """
        now = self.clock.now()
        current = job
        while current.discarded_at is None:
            patch: Patch = {"discarded_at": now}
            guard = Guard(_FAILED, claims=job.claims)
            letter = next((notice for notice in current.pending if notice.target == DEAD_LETTER), None)
            if letter is not None:
                told = replace(letter, status=NoticeStatus.DELIVERED, told_at=now)
                patch = {**patch, **_noted(current, told, now)}
                guard = replace(guard, outbox=current.outbox)
            try:
                current = self.store.update(job.job_id, guard, **patch)
            except Conflict as conflict:
                row = conflict.current
                if row is None or (row.status, row.claims) != (JobStatus.FAILED, job.claims):
                    raise
                current = row
        self.journal.note("job_discarded", job_id=job.job_id)
        return current

    @staticmethod
    def _may_run_again(job: Job, now: EpochMs) -> Guard:
        """A failed job of which nobody has begun a new run, nor given it up."""
        return Guard(_FAILED, claims=job.claims, unexpired_at=now, undiscarded=True)

    def _new_run(self, job: Job, now: EpochMs) -> Patch:
        """A failed job as if it had just been accepted: a new deadline of the old length, and nothing of its end."""
        deadline_at = now + job.deadline_seconds * 1000
        return {
            "claimed_at": None,
            "deadline_at": deadline_at,
            "expires_at": max(job.expires_at, deadline_at // 1000 + self.retention_seconds),
            "finished_at": None,
            "error": None,
            "outbox": (),
            "attempts_limit": None,
            "model_index": 0,
            "handle": None,
            "slot": None,
            "place": None,
            "parked_since": None,
            "charge": self._charge_of_new_run(job, now),
            "add_claims": 1,
        }

    def renew(self, job: Job, due_at: EpochMs | None) -> Job:
        """Extend the lease of a job being worked on; its row. Raises Conflict when it is ours no more.

        due_at: the row's, as last seen. It moves on once the lease would outlive it.
        """
        now = self.clock.now()
        patch: Patch = {"lease_until": now + LEASE_MS}
        if due_at is None or due_at < now + LEASE_MS:
            patch["due_at"] = now + PATIENCE_MS
        return self.store.update(job.job_id, Guard(_PROCESSING, claims=job.claims), **patch)

    def remember(self, job: Job, handle: str) -> None:
        """Note the provider's name for the call, before waiting for it. Raises Conflict when it is ours no more."""
        self.store.update(job.job_id, Guard(_PROCESSING, claims=job.claims), handle=handle)

    def shown_in(self, job: Job, slack: SlackOrigin) -> None:
        """Note which messages in Slack show the answer while it is written. Raises Conflict when it is ours no more."""
        self.store.update(job.job_id, Guard(_PROCESSING, claims=job.claims), slack=slack)

    def may_try_again(self, job: Job) -> bool:
        """Whether the run has attempts left, and time to begin one."""
        return job.attempts < (job.attempts_limit or self.attempts_max) and self.clock.now() < job.deadline_at

    def is_lost_for_good(self, job: Job) -> bool:
        """Whether a job whose worker was lost has to end, rather than be taken by another."""
        return not self.may_try_again(job) or (job.handle is None and not self.retry_unknown)

    # ── Ending an attempt ─────────────────────────────────────────────────────────────────────────────────────────

    def complete(self, job: Job, result: Payload, attempt: Attempt) -> Job | None:
        """Store the answer; the row. None if the job had ended otherwise; then its usage alone is recorded."""
        return self._end(
            job,
            Guard(_UNFINISHED, claims=job.claims),
            JobStatus.COMPLETED,
            result=result,
            attempt=attempt,
        )

    def fail(self, job: Job, error: JobFailed, attempt: Attempt | None) -> Job | None:
        """End the job without an answer; the row, or None. A dead one also goes to the dead-letter queue."""
        return self._end(
            job,
            Guard(_UNFINISHED, claims=job.claims),
            JobStatus.FAILED,
            dead=error.dead,
            error=error.failure(),
            attempt=attempt,
        )

    def put_back(self, job: Job, error: JobFailed, attempt: Attempt, *, handle: str | None = None) -> bool:
        """Queue the job for another attempt, after a backoff that is never shorter than the provider asked for.

        handle: the provider's name for a call that goes on; the next attempt attaches to it.
        False if no other attempt can be made (attempts used up, or the deadline comes first); then nothing is written.
        Raises Conflict when the job is ours no more.
        """
        now = self.clock.now()
        wait_ms = round(1000 * self.backoff_seconds(job.attempts, error.retry_after_seconds))
        available_at = now + wait_ms
        if not error.retryable or not self.may_try_again(job) or available_at >= job.deadline_at:
            return False
        self._queue_again(job, available_at, error.failure(), {"handle": handle, "append_log": (attempt,)})
        self.journal.note("job_put_back", job_id=job.job_id, code=error.code, wait_ms=wait_ms, attempt=job.attempts)
        return True

    def fall_back(self, job: Job, model_index: int, error: JobFailed, attempt: Attempt) -> None:
        """Queue the job for another model, which gets attempts of its own. Raises Conflict when it is ours no more."""
        more: Patch = {
            "model_index": model_index,
            "attempts_limit": job.attempts + self.attempts_max,
            "handle": None,
            "append_log": (attempt,),
        }
        self._queue_again(job, self.clock.now(), error.failure(), more)
        self.journal.note("job_fell_back", job_id=job.job_id, code=error.code, model_index=model_index)

    def release(self, job: Job, cause: PortUnavailable) -> None:
        """Queue the job again since nothing could be asked of the provider just now. Waiting costs no attempt.

        The pause grows with the job's wait. If it lasts until the deadline, the job fails with what stood in its way.
        Raises Conflict when the job is ours no more.
        """
        now = self.clock.now()
        pause_ms = min(max(now - job.created_at, RELEASE_MS), RELEASE_MS_MAX)
        available_at = now + pause_ms + round(self.chance.uniform(0, RELEASE_MS))
        cannot = Unreachable(f"The stored request or the provider's key could not be read: {cause.message}.")
        self._queue_again(job, available_at, cannot.failure(), {"add_attempts": -1})
        self.journal.note("job_released", job_id=job.job_id, cause=cause.message)

    def park(self, job: Job, until: EpochMs, *, slot: Slot | None = None, place: EpochMs | None = None) -> None:
        """Queue the job again until it is worth another look: its model has no slot for it yet, or a later one.

        It holds no concurrency meanwhile, and waiting costs no attempt. Raises Conflict when the job is ours no more.
        """
        now = self.clock.now()
        available_at = min(max(until, now + 1_000), job.deadline_at - 1)
        since = job.parked_since or job.claimed_at
        more: Patch = {"add_attempts": -1, "slot": slot, "place": place, "parked_since": since}
        self._queue_again(job, available_at, job.error, more)
        self.journal.note("job_parked", job_id=job.job_id, wait_ms=available_at - now, slot=slot is not None)

    def backoff_seconds(self, attempts: int, retry_after_seconds: float | None) -> float:
        """Exponential backoff with full jitter, on top of what the provider asked for.

        Source: "Exponential Backoff And Jitter", AWS Architecture Blog.
        """
        ceiling = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS * 2 ** (attempts - 1))
        return (retry_after_seconds or 0.0) + self.chance.uniform(0.0, ceiling)

    def insist[T](self, write: Callable[[], T]) -> T:
        """Make a write that must not be given up lightly: an answer that is paid for hangs on it."""
        for pause in FINISH_PAUSES_SECONDS:
            try:
                return write()
            except PortUnavailable:
                self.clock.sleep(pause)
        return write()

    def record_discarded(self, job: Job, attempt: Attempt) -> None:
        """Keep the usage of an answer that came too late to count."""
        try:
            if job.charge is None:
                self.store.update(job.job_id, Guard(_FINAL | _UNFINISHED), append_log=(attempt,))
            else:
                self._charge_discarded(job, attempt)
        except (Conflict, PortUnavailable):
            self.journal.note("usage_unrecorded", job_id=job.job_id)

    # ── Ends that no worker decides ───────────────────────────────────────────────────────────────────────────────

    def cancel(self, job: Job) -> bool:
        """Withdraw a job, whether it waits or is being worked on; its worker learns it at the next renewal."""
        # The caller is waiting.
        return self._end(job, Guard(_UNFINISHED), JobStatus.CANCELLED, patient=False) is not None

    def expire(self, job: Job) -> bool:
        """End a queued job whose deadline has passed: expired if it never started, else failed as it last did."""
        now = self.clock.now()
        if job.deadline_at > now:
            return False
        started = job.error is not None
        ended = self._end(
            job,
            Guard(_QUEUED, claims=job.claims),
            JobStatus.FAILED if started else JobStatus.EXPIRED,
            dead=started,
            error=job.error if started else DeadlinePassed().failure(),
        )
        return ended is not None

    def lose(self, job: Job) -> None:
        """Deal with a job whose worker was lost: another attempt, or the end when there is none left."""
        now = self.clock.now()
        lost = self._lost(job, now)
        if not self.is_lost_for_good(job):
            more: Patch = {"append_log": (lost,)}
            self._queue_again(job, now, WorkerLost().failure(), more, lapsed_by=now)
            self.journal.note("job_recovered", job_id=job.job_id, attempt=job.attempts)
            return
        self._end(
            job,
            _lapsed(job, now),
            JobStatus.FAILED,
            dead=True,
            error=(WorkerLost() if self.retry_unknown or job.handle else OutcomeUnknown()).failure(),
            attempt=lost,
        )

    def undelivered(self, job: Job) -> None:
        """A hint of this queued job was received three times and never answered, so the queue gave it up.

        A lack of capacity looks the same as code that cannot start, and waiting is not failing: the job gets another
        hint, as many as it has attempts, and fails only when none was ever answered. Raises Conflict.
        """
        now = self.clock.now()
        gone = Attempt(job.attempts, Undeliverable.code, began_at=job.created_at, ended_at=now)
        died = sum(line.outcome == Undeliverable.code for line in job.log)
        if died + 1 >= self.attempts_max:
            self.fail(job, Undeliverable(), gone)
            return
        row = self.store.update(
            job.job_id,
            Guard(_QUEUED, claims=job.claims, due_at=job.due_at),
            due_at=min(max(now, job.available_at) + PATIENCE_MS, job.deadline_at),
            append_log=(gone,),
        )
        self._hint_or_leave_due(row, alone=False)

    def _queue_again(
        self, job: Job, available_at: EpochMs, why: Failure | None, more: Patch, *, lapsed_by: EpochMs | None = None
    ) -> None:
        """Queue a job in processing again, and hint at it: by its worker, or (`lapsed_by`) after its lease has lapsed.

        A job that has lost its worker is run by itself from then on. Raises Conflict.
        """
        patch: Patch = {
            "status": JobStatus.QUEUED,
            "available_at": available_at,
            "waiting_since": job.began_at,
            "due_at": min(available_at + PATIENCE_MS, job.deadline_at),
            "claimed_at": None,
            "lease_until": None,
            "error": why,
            "slot": None,
            "place": None,
            "parked_since": None,
        }
        patch.update(more)
        ours = Guard(_PROCESSING, claims=job.claims) if lapsed_by is None else _lapsed(job, lapsed_by)
        row = self.store.update(job.job_id, ours, **patch)
        self._hint_or_leave_due(row, alone=lapsed_by is not None)

    # ── Hints ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def hint(self, job: Job, *, alone: bool = False) -> None:
        """Queue the hint of a queued job. If that fails, the row is made due, for a replay or the repairer to send it.

        Raises PortUnavailable when the hint could not be sent.
        """
        try:
            self.remind(job, alone=alone)
        except PortUnavailable:
            try:
                guard = Guard(_QUEUED, claims=job.claims, due_at=job.due_at)
                self.store.update(job.job_id, guard, due_at=self.clock.now())
            except (Conflict, PortUnavailable):
                self.journal.note("hint_missing", job_id=job.job_id)  # it becomes due by itself, PATIENCE_MS later
            raise

    def resend(self, job: Job) -> None:
        """Send the hint of an overdue queued job again, once among all who try. Raises Conflict for the others."""
        now = self.clock.now()
        row = self.store.update(
            job.job_id,
            Guard(_QUEUED, claims=job.claims, due_at=job.due_at, due_by=now),
            due_at=min(max(now, job.available_at) + patience(job, now), job.deadline_at),
            waiting_since=job.began_at,
        )
        self.hint(row)

    def remind(self, job: Job, *, alone: bool = False) -> None:
        """Send a hint that appears when the job can be taken: at its availability, or just after its lease lapses.

        A wait beyond DELAY_SECONDS_MAX is a chain of such hints.
        """
        ready_at = lapses_at(job) if job.status is JobStatus.PROCESSING else job.available_at
        wait_ms = max(0, ready_at - self.clock.now())
        delay_seconds = min(-(-wait_ms // 1000), DELAY_SECONDS_MAX)  # rounded up: early hints are of no use
        died = job.claims if job.status is JobStatus.FAILED else None
        self.hints.send(
            Hint(job.job_id, died=died, alone=alone),
            client_id=job.client_id,
            lane=job.lane,
            delay_seconds=delay_seconds,
            trace=job.trail.trace if job.trail else None,
        )

    def _hint_or_leave_due(self, job: Job, *, alone: bool) -> None:
        try:
            self.hint(job, alone=alone)
        except PortUnavailable:
            self.journal.note("hint_delayed", job_id=job.job_id)  # the row is due; the repairer sends it

    # ── Telling ───────────────────────────────────────────────────────────────────────────────────────────────────

    def announce(self, job: Job) -> None:
        """Set the telling of every pending target going. What is missed here, the repairer does."""
        now = self.clock.now()
        mine: list[Notice] = []
        for notice in job.pending:
            if notice.target == DEAD_LETTER:
                self._bury(job)
            elif notice.target == BUDGET:
                self._settle_charge(job)
            elif notice.target in self.told_here:
                mine.append(notice)
            elif notice.lease_until <= now:
                self.remind_of(job, notice)
        for notice in mine:  # last: it may take a moment
            self.told_here[notice.target](job, notice)

    def reannounce(self, job: Job) -> None:
        """Announce again what is overdue of a final job's targets, once among all who try. Raises Conflict."""
        now = self.clock.now()
        patience_ms = min(max(now - (job.finished_at or now), PATIENCE_MS), PATIENCE_MS_MAX)
        waiting = [notice.lease_until + NOTICE_GRACE_MS for notice in job.pending if notice.lease_until > now]
        row = self.store.update(
            job.job_id,
            Guard(_FINAL, claims=job.claims, due_at=job.due_at, due_by=now),
            due_at=min([now + patience_ms, *waiting]),
        )
        self.announce(row)

    def retell(self, job: Job, target: str) -> Job:
        """Tell a final job's target again from the first try, whatever became of it. Raises Conflict."""
        (notice,) = (notice for notice in job.outbox if notice.target == target)
        row = self.settle(job, Notice(target, last_error=notice.last_error))
        self.announce(row)
        return row

    def remind_of(self, job: Job, notice: Notice) -> None:
        """Send the message for a target's next try, to appear when that is due; a long wait is a chain of them."""
        wait_ms = max(0, notice.lease_until - self.clock.now())
        is_only = job.outbox == (notice,) == (Notice(notice.target),)
        self.notices.send(
            Telling(job.job_id, notice.target, notice.tries, job.claims if is_only else None),
            client_id=job.client_id,
            delay_seconds=min(-(-wait_ms // 1000), DELAY_SECONDS_MAX),
            trace=job.trail.trace if job.trail else None,
        )

    def settle(self, job: Job, notice: Notice) -> Job:
        """Write what became of a notice; when none is pending any more, nobody need look at the row again.

        Raises Conflict when the outbox has changed since it was read.
        """
        return self.store.update(job.job_id, _as_read(job), **_noted(job, notice, self.clock.now()))

    def settle_unread(self, job_id: str, claims: int, notice: Notice) -> Job:
        """Write that the only notice of an outbox, untold so far, is being told. Raises Conflict.

        When the row is due stays as the finish write has it, LEASE_MS to PATIENCE_MS after the end: that is about when
        this try ends, and a row that is looked at too soon is put off. To move it would be two write units more.
        """
        untold = Guard(_FINAL, claims=claims, unexpired_at=self.clock.now(), outbox=(Notice(notice.target),))
        return self.store.update(job_id, untold, outbox=(notice,))

    def bury(self, job: Job) -> None:
        """Send a dead job's letter."""
        error = job.error or WorkerLost().failure()
        self.dead_letters.bury(
            Hint(job.job_id, died=job.claims),
            reason=error.code,
            detail=error.message,
            lane=job.lane,
            client_id=job.client_id,
        )

    def _bury(self, job: Job) -> None:
        self.bury(job)
        now = self.clock.now()
        current: Job | None = job
        while current is not None:
            told = next((n for n in current.pending if n.target == DEAD_LETTER), None)
            if told is None or current.claims != job.claims:
                return
            try:
                self.settle(current, replace(told, status=NoticeStatus.DELIVERED, told_at=now, tries=told.tries + 1))
                return
            except Conflict as conflict:
                current = conflict.current

    def tell_also(self, job: Job, target: str) -> Job:
        """Have another target told of the job's end; return the row, which is final if that has come already."""
        row = job
        while not row.status.is_final and target not in row.targets:
            try:
                row = self.store.update(
                    row.job_id, Guard(_UNFINISHED, targets=row.targets), targets=(*row.targets, target)
                )
            except Conflict as conflict:
                if conflict.current is None:
                    raise
                row = conflict.current
        return row

    def erase(self, job: Job) -> None:
        """Empty an ended job's row and have it count as expired from now on. Raises Conflict if it has changed.

        Who was still to be told is told no more.
        """
        self.store.update(
            job.job_id,
            _as_read(job),
            expires_at=self.clock.now() // 1000,
            request=Payload(""),
            result=None,
            metadata=None,
            webhook=None,
            targets=(),
            outbox=(),
            due_at=None,
        )

    # ── Budgets ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _settle_charge(self, job: Job) -> None:
        """Put what the job cost in the place of what it was charged with, once: row and tally change in one step.

        The tally of another day is no longer kept; then there is nothing to settle.
        """
        current: Job | None = job
        kept, tries = True, 0
        while current is not None and current.claims == job.claims:
            notice = next((notice for notice in current.pending if notice.target == BUDGET), None)
            if notice is None:
                return
            charge, spent = current.charge, current.spent
            now = self.clock.now()
            patch = _noted(current, replace(notice, status=NoticeStatus.DELIVERED, told_at=now), now)
            try:
                if kept and charge is not None and spent is not None:
                    change = Charge(charge.day, spent.tokens - charge.tokens, spent.micro_usd - charge.micro_usd)
                    self.tallies.settle(current, _as_read(current), {**patch, "charge": spent}, change)
                else:
                    self.store.update(current.job_id, _as_read(current), **patch)
                return
            except Conflict as conflict:
                current = conflict.current
            except Moved:
                kept = False
            except Busy:
                tries += 1
                if tries == SETTLE_TRIES_MAX:
                    raise
                self.clock.sleep(self.chance.uniform(0.0, SETTLE_PAUSE_SECONDS))

    def _charge_discarded(self, job: Job, attempt: Attempt) -> None:
        """Keep the usage in the receipt, which is what is settled; where it was settled already, it is due once more.

        Raises Conflict, PortUnavailable.
        """
        current: Job | None = job
        while current is not None:
            try:
                if not current.status.is_final:
                    self.store.update(job.job_id, Guard(_UNFINISHED), append_log=(attempt,))
                    return
                # The raised count of tries turns away whoever is settling now, by the receipt without this line.
                due = tuple(
                    replace(notice, status=NoticeStatus.PENDING, tries=notice.tries + 1)
                    if notice.target == BUDGET
                    else notice
                    for notice in current.outbox
                )
                self.store.update(
                    job.job_id, _as_read(current), outbox=due, due_at=self.clock.now(), append_log=(attempt,)
                )
                return
            except Conflict as conflict:
                current = conflict.current

    def _charge_of_new_run(self, job: Job, now: EpochMs) -> Charge | None:
        """What the tally holds for a redriven job: on the same day, what it held before, settled or not.

        On a later day nothing, and the first run counts no more. What the new run costs is added at its end.
        """
        if job.charge is None or job.charge.day >= day_of(now):
            return job.charge
        return Charge(day_of(now), 0, 0, since=len(job.log))

    # ── The end itself ────────────────────────────────────────────────────────────────────────────────────────────

    def _end(
        self,
        job: Job,
        guard: Guard,
        status: JobStatus,
        *,
        dead: bool = False,
        patient: bool = True,
        result: Payload | None = None,
        error: Failure | None = None,
        attempt: Attempt | None = None,
    ) -> Job | None:
        """The one write of a final status; the row. None, and nothing changed, if somebody else ended or took it."""
        now = self.clock.now()
        targets = ((DEAD_LETTER,) if dead else ()) + job.targets + ((BUDGET,) if job.charge is not None else ())
        outbox = tuple(Notice(target) for target in targets)
        patch: Patch = {
            "status": status,
            "claimed_at": None,
            "lease_until": None,
            "waiting_since": None,
            "handle": None,
            "slot": None,
            "place": None,
            "parked_since": None,
            "result": result,
            "error": error,
            "finished_at": now,
            "outbox": outbox,
            "expires_at": max(job.expires_at, now // 1000 + DEAD_SECONDS) if dead else job.expires_at,
            "append_log": (attempt,) if attempt is not None else (),
        }
        # It stays as at the claim if that is about when to look whether all were told; to move it is two writes more.
        is_about_then = now + LEASE_MS <= (job.due_at or 0) <= now + PATIENCE_MS
        # Without the claim in the guard, the row may be another by then.
        if not (outbox and job.status is JobStatus.PROCESSING and guard.claims is not None and is_about_then):
            patch["due_at"] = now + PATIENCE_MS if outbox else None

        def write() -> Job:
            # A target that came meanwhile must not be forgotten.
            return self.store.update(job.job_id, replace(guard, targets=job.targets), **patch)

        try:
            row = self.insist(write) if patient else write()
        except Conflict as conflict:
            standing = conflict.current
            if standing is not None and standing.targets != job.targets:
                job = replace(job, targets=standing.targets)
                return self._end(
                    job, guard, status, dead=dead, patient=patient, result=result, error=error, attempt=attempt
                )
            if standing is None or (standing.status, standing.finished_at, standing.error) != (status, now, error):
                return None
            if guard.claims not in (None, standing.claims):
                return None
            row = standing  # ours: only the reply to an earlier try was lost
        try:
            self.announce(row)
        except PortUnavailable:
            self.journal.note("announcement_delayed", job_id=job.job_id)  # the row is due; the repairer tells
        self.journal.note(
            "job_ended",
            job_id=job.job_id,
            client_id=job.client_id,
            lane=job.lane,
            status=status,
            code=error.code if error else None,
            model=attempt.model if attempt else None,
            dead=dead or None,
            attempts=job.attempts,
            total_ms=now - job.began_at,
        )
        return row

    @staticmethod
    def _lost(job: Job, now: EpochMs) -> Attempt:
        # A call of which the provider told no name may have been answered and paid for, or never have begun.
        outcome = OutcomeUnknown.code if job.handle is None else WorkerLost.code
        return Attempt(job.attempts, outcome, began_at=job.claimed_at or job.created_at, ended_at=now)
