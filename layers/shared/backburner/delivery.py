"""Telling a target that a job has ended: at least once, and only once unless a crash falls before the noting of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from backburner.errors import JobFailed
from backburner.lifecycle import BACKOFF_SECONDS_MAX, DELAY_SECONDS_MAX, Lifecycle
from backburner.models import Job, Notice, NoticeStatus
from backburner.ports import Channel, Clock, Conflict, JobStore, Journal, NoticeQueue

TELLING_MS = 60_000
"""One telling takes no longer; a second message for the same target meanwhile is dropped."""
TRIES_MAX = 8


@dataclass(frozen=True)
class Delivery:
    """The notifier's use case."""

    store: JobStore
    lifecycle: Lifecycle
    notices: NoticeQueue
    channels: Callable[[str], Channel]
    clock: Clock
    journal: Journal

    def deliver(self, job_id: str, target: str) -> None:
        """Tell the target, if it is still to be told."""
        leased = self._lease(job_id, target)
        if leased is None:
            return
        job, notice = leased
        try:
            self.channels(target).tell(job)
        except JobFailed as error:
            again = error.retryable and notice.tries < TRIES_MAX
            wait_seconds = self.lifecycle.backoff_seconds(notice.tries, error.retry_after_seconds)
            self._write(
                job,
                replace(
                    notice,
                    status=NoticeStatus.PENDING if again else NoticeStatus.GIVEN_UP,
                    lease_until=self.clock.now() + round(1000 * wait_seconds) if again else 0,
                    last_error=error.code,
                ),
            )
            self.journal.note("target_untold", job_id=job_id, target=target, code=error.code, again=again)
            if again:
                delay = min(wait_seconds + 1, DELAY_SECONDS_MAX, BACKOFF_SECONDS_MAX + 1)
                self.notices.send(job_id, target, delay_seconds=round(delay))
        else:
            told = replace(notice, status=NoticeStatus.DELIVERED, told_at=self.clock.now(), lease_until=0)
            self._write(job, replace(told, last_error=None))
            self.journal.note("target_told", job_id=job_id, target=target, tries=notice.tries)

    def _lease(self, job_id: str, target: str) -> tuple[Job, Notice] | None:
        """Make this telling ours, or None if there is nothing to tell or somebody is telling it."""
        job = self.store.get(job_id)
        while job is not None:
            now = self.clock.now()
            notice = next((notice for notice in job.pending if notice.target == target), None)
            if notice is None or job.has_expired(now) or notice.lease_until > now:
                return None
            ours = replace(notice, lease_until=now + TELLING_MS, tries=notice.tries + 1)
            try:
                return self.lifecycle.settle(job, ours), ours
            except Conflict as conflict:
                job = conflict.current
        return None

    def _write(self, job: Job, notice: Notice) -> None:
        """Note what became of it, whatever became of the other targets meanwhile; unless the job was run again."""
        current: Job | None = job
        while current is not None and current.claims == job.claims:
            try:
                self.lifecycle.settle(current, notice)
                return
            except Conflict as conflict:
                current = conflict.current
