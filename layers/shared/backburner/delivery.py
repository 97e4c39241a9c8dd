"""Telling a target that a job has ended: at least once, and only once unless a crash falls before the noting of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from backburner.errors import PortUnavailable, Untold
from backburner.lifecycle import Lifecycle
from backburner.models import Job, Notice, NoticeStatus, Telling
from backburner.ports import Chance, Channel, Clock, Conflict, JobStore, Journal

TELLING_MS = 60_000
"""One telling takes no longer; the notifier's own timeout sees to it."""
WAITS_SECONDS = (2, 10, 60, 300, 1_800, 3_600, 7_200, 14_400, 28_800)
"""Between the tries: a receiver that is down for a night is told in the morning, ten tries over some 15 hours."""
JITTER = 0.2
"""A wait is up to so much longer: receivers that came back are not told everything at one moment."""
RETRY_AFTER_SECONDS_MAX = 14_400
REASON_CHARACTERS_MAX = 100
TOLD_HERE_SECONDS_MAX = 2.0
"""A worker waits no longer for a target that it tells itself: the notifier tells whoever is left."""
CONFLICTS_MAX = 50
"""A write lost so often was lost to no other target: each writes three times at most a try."""


@dataclass(frozen=True)
class Delivery:
    """The notifier's use case. `channels` gives a channel by its target's name, and raises LookupError."""

    store: JobStore
    lifecycle: Lifecycle
    channels: Callable[[str], Channel]
    clock: Clock
    chance: Chance
    journal: Journal

    def run_batch(self, tellings: Mapping[str, Telling], _time_left: Callable[[], float]) -> list[str]:
        """Do the tellings, by message id, at once; return the ids of the messages that must come back."""
        with ThreadPoolExecutor(max_workers=max(1, len(tellings)), thread_name_prefix="telling") as pool:
            runs = {name: pool.submit(self.deliver, telling) for name, telling in tellings.items()}
        failed = {name: error for name, run in runs.items() if (error := run.exception()) is not None}
        for name, error in failed.items():
            self.journal.note("message_returned", message_id=name, error=type(error).__name__)
        return list(failed)

    def deliver(self, telling: Telling) -> None:
        """Make the try that the message stands for, if it is still to be made.

        Raises PortUnavailable when nothing could be noted.
        """
        leased = self._lease(telling)
        if leased is None:
            self.journal.note("telling_dropped", job_id=telling.job_id, target=telling.target, tries=telling.tries)
            return
        job, notice = leased
        with self.journal.about(**job.about):
            self._tell(job, notice, read=notice)

    def tell_at_once(self, job: Job, notice: Notice) -> None:
        """Make the next try where the row was just written, with neither message nor lease.

        The try after it has a message, and so has this one, from the repairer, if it is cut off. Raises PortUnavailable
        when nothing could be noted.
        """
        with self.journal.about(**job.about):
            self._tell(job, replace(notice, tries=notice.tries + 1), read=notice)

    def _tell(self, job: Job, notice: Notice, *, read: Notice) -> None:
        waits: Sequence[float] = WAITS_SECONDS
        try:
            channel = self._channel(notice.target)
            waits = channel.waits_seconds
            if notice.tries > len(waits) + 1:  # the last try took its notifier with it
                raise Untold("interrupted", again=False)
            channel.tell(job)
        except Untold as error:
            self._untold(job, notice, error, waits, read=read)
        except PortUnavailable:
            self._untold(job, notice, Untold("unavailable", again=True), waits, read=read)
        except Exception as error:  # noqa: BLE001  a fault of ours, which another try may or may not meet
            self.journal.note("telling_faulted", job_id=job.job_id, target=notice.target, error=type(error).__name__)
            self._untold(job, notice, Untold("internal_error", again=True), waits, read=read)
        else:
            told = replace(notice, status=NoticeStatus.DELIVERED, told_at=self.clock.now(), lease_until=0)
            self._write(job, told, read=read)
            self.journal.note(
                "target_told",
                job_id=job.job_id,
                target=notice.target,
                tries=notice.tries,
                told_ms=self.clock.now() - (job.finished_at or 0),
            )

    def _channel(self, target: str) -> Channel:
        try:
            return self.channels(target)
        except LookupError as error:  # of another version of the program, which may be deployed again
            raise Untold("no_such_channel", again=True) from error

    def _lease(self, telling: Telling) -> tuple[Job, Notice] | None:
        """Make this try ours, or None if it is made already, or is not due."""
        job: Job | None
        if telling.claims is None:
            job = self.store.get(telling.job_id)
        else:
            only = Notice(telling.target, lease_until=self.clock.now() + TELLING_MS, tries=1)
            try:
                return self.lifecycle.settle_unread(telling.job_id, telling.claims, only), only
            except Conflict as conflict:
                job = conflict.current
        for _ in range(CONFLICTS_MAX):
            if job is None:
                return None
            now = self.clock.now()
            wanted = (telling.target, telling.tries)
            notice = next((notice for notice in job.pending if (notice.target, notice.tries) == wanted), None)
            if notice is None or job.has_expired(now):
                return None
            if notice.lease_until > now:
                self.lifecycle.remind_of(job, notice)
                return None
            ours = replace(notice, lease_until=now + TELLING_MS, tries=notice.tries + 1)
            try:
                return self.lifecycle.settle(job, ours), ours
            except Conflict as conflict:
                job = conflict.current
        raise PortUnavailable("contention")

    def _untold(self, job: Job, notice: Notice, error: Untold, waits: Sequence[float], *, read: Notice) -> None:
        """Note a failed try, and plan the next one."""
        again = error.again and notice.tries <= len(waits)
        failed = replace(notice, last_error=error.message[:REASON_CHARACTERS_MAX], lease_until=0)
        if again:
            asked = min(error.retry_after_seconds or 0.0, RETRY_AFTER_SECONDS_MAX)
            seconds = max(waits[notice.tries - 1], asked) * self.chance.uniform(1.0, 1.0 + JITTER)
            failed = replace(failed, lease_until=self.clock.now() + round(1000 * seconds))
        else:
            failed = replace(failed, status=NoticeStatus.GIVEN_UP, told_at=self.clock.now())
        written = self._write(job, failed, read=read)
        self.journal.note(
            "target_untold",
            job_id=job.job_id,
            target=notice.target,
            reason=failed.last_error,
            tries=notice.tries,
            again=again,
        )
        if written and again:
            self.lifecycle.remind_of(job, failed)

    def _write(self, job: Job, notice: Notice, *, read: Notice) -> bool:
        """Note what became of it, whatever became of the other targets meanwhile.

        False if the try is not ours any more: the job was run again, or somebody made another than we had read.
        """
        current: Job | None = job
        for _ in range(CONFLICTS_MAX):
            if current is None or current.claims != job.claims:
                return False
            if not any((other.target, other.tries) == (read.target, read.tries) for other in current.pending):
                return False
            try:
                self.lifecycle.settle(current, notice)
                return True
            except Conflict as conflict:
                current = conflict.current
        raise PortUnavailable("contention")


@dataclass(frozen=True)
class ToldHere:
    """Tells a target of an end where it is stored: no queue, no cold start, and two writes and a message fewer.

    `Lifecycle.told_here` holds one for each target told so. A target that takes its time is left to the notifier.
    """

    delivery: Delivery
    lifecycle: Lifecycle
    journal: Journal

    def __call__(self, job: Job, notice: Notice) -> None:
        """Tell it, within TOLD_HERE_SECONDS_MAX, or send the message. Raises PortUnavailable if that fails too."""
        thread = threading.Thread(target=self._tell, args=(job, notice), name="told-here", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many threads
            self._leave(job, notice, "no_thread")
            return
        thread.join(TOLD_HERE_SECONDS_MAX)
        if thread.is_alive():
            self._leave(job, notice, "slow")

    def _leave(self, job: Job, notice: Notice, reason: str) -> None:
        self.journal.note("not_told_at_once", job_id=job.job_id, target=notice.target, reason=reason)
        self.lifecycle.remind_of(job, notice)

    def _tell(self, job: Job, notice: Notice) -> None:
        try:
            self.delivery.tell_at_once(job, notice)
        except PortUnavailable as error:  # it is told and not noted, or not told; the row is due, and the repairer acts
            self.journal.note("not_told_at_once", job_id=job.job_id, target=notice.target, reason=error.message)
