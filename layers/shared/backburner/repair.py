"""The one loop that repairs everything: it takes the rows that are due and moves each one step on.

Small, idempotent, and safe to run twice at once: every step is a conditional write that one of the two loses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from backburner.errors import PortUnavailable
from backburner.lifecycle import Lifecycle, lapses_at
from backburner.models import DeadLetter, EpochMs, Hint, Job, JobStatus, Lane
from backburner.ports import Clock, Conflict, DeadLetterQueue, JobStore, Journal

LOOK_AHEAD_MS = 60_000
"""The pause between two runs: a lease that lapses before the next run is reminded of now, by a delayed hint."""
ROWS_MAX = 1_000
"""Of a longer backlog, the longest overdue are moved on; the others in the next runs."""
LOOKS_MAX = 8_000
"""Among so many of its latest are the jobs in hand, which do not wait behind it: their workers may be dead."""
LETTERS_MAX = 100


@dataclass(frozen=True)
class Repair:
    """The repairer's use case."""

    store: JobStore
    lifecycle: Lifecycle
    dead_letters: DeadLetterQueue
    clock: Clock
    journal: Journal

    def run_once(self) -> int:
        """Move every due row one step on; return how many rows and unexplained letters there were."""
        before = self.clock.now() + LOOK_AHEAD_MS
        due = list(self.store.due(before, ROWS_MAX))
        if len(due) == ROWS_MAX:
            due = list(dict.fromkeys((*self._in_hand(before), *due)))
        for job_id in due:
            self._try(job_id)
        seen = len(due)
        letters = self.dead_letters.look(LETTERS_MAX)
        for letter in letters:
            if letter.reason is not None:
                continue
            seen += 1
            try:
                if letter.hint is None:
                    self.dead_letters.bury(
                        letter.body, reason="malformed_hint", detail="not a hint", lane=Lane.STANDARD, client_id=None
                    )
                else:
                    self._explain(letter.hint)
                self.dead_letters.remove(letter)
            except PortUnavailable:
                self.journal.note("letter_left", job_id=letter.hint.job_id if letter.hint else None)
        self._note_age(letters)
        self._look_at_lanes()
        self.journal.note("repair_ran", seen=seen)
        return seen

    def _in_hand(self, before: EpochMs) -> Collection[str]:
        try:
            return self.store.in_hand(before, LOOKS_MAX)
        except PortUnavailable:
            self.journal.note("jobs_in_hand_unseen")
            return ()

    def _note_age(self, letters: Sequence[DeadLetter]) -> None:
        """How long the oldest letter has lain there: to the queue, one that was received three times has no age."""
        now = self.clock.now()
        oldest = min((letter.sent_at for letter in letters), default=now)
        self.journal.note("letters_seen", oldest_seconds=max(0, now - oldest) / 1000)

    def _look_at_lanes(self) -> None:
        """Note how long each lane's oldest job has waited: its hint, sent again, looks young to the queue."""
        for lane in Lane:
            try:
                since = self.store.oldest_waiting(lane)
            except PortUnavailable:
                self.journal.note("lane_unseen", lane=lane)
                continue
            waited_ms = 0 if since is None else max(0, self.clock.now() - since)
            self.journal.note("lane_seen", lane=lane, oldest_seconds=waited_ms / 1000)

    def _try(self, job_id: str) -> None:
        try:
            job = self.store.get(job_id)
            if job is not None and job.due_at is not None and not job.has_expired(self.clock.now()):
                with self.journal.about(**job.about):
                    self._step(job)
        except Conflict:
            pass  # somebody else moved it on
        except PortUnavailable:
            self.journal.note("repair_failed", job_id=job_id)  # one row's trouble is not the others'; it stays due

    def _step(self, job: Job) -> None:
        now = self.clock.now()
        if job.status is JobStatus.PROCESSING:
            lapsed = lapses_at(job) <= now
            self.lifecycle.lose(job) if lapsed else self.lifecycle.remind(job, alone=True)
            kind = "worker_lost" if lapsed else None  # a reminder repairs nothing yet
        elif job.due_at is None or job.due_at > now:
            return
        elif job.status is JobStatus.QUEUED:
            if job.deadline_at <= now:
                self.lifecycle.expire(job)
                kind = "deadline_passed"
            else:
                self.lifecycle.resend(job)
                kind = "hint_resent"
        else:
            self.lifecycle.reannounce(job)
            kind = "told_again"
        if kind is not None:
            self.journal.note("job_repaired", kind=kind, lane=job.lane)

    def _explain(self, hint: Hint) -> None:
        """A hint died in the queue. Its job, if it still waits, has to be dealt with.

        A job being worked on has its lease to guard it; one that has ended has been told of, unless the hint was to
        revive it: then it is as dead as before, and its letter is sent again.
        """
        job = self.store.get(hint.job_id)
        if job is None or job.has_expired(self.clock.now()):
            return
        if job.status is JobStatus.QUEUED:
            with suppress(Conflict):  # somebody else moved it on
                self.lifecycle.undelivered(job)
                self.journal.note("job_repaired", job_id=job.job_id, kind="letter_explained")
        elif job.status is JobStatus.FAILED and hint.died == job.claims and job.discarded_at is None:
            self.lifecycle.bury(job)
