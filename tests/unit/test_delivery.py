"""Telling targets that a job has ended."""

from typing import Any

import pytest

from backburner.delivery import TELLING_MS, TRIES_MAX
from backburner.errors import ConnectionLost, Overloaded, ProviderRefusedRequest
from backburner.models import Job, JobStatus, NoticeStatus
from tests.fakes.house import House
from tests.fakes.memory import MemoryStore, ScriptedProvider


class _WithTargets(MemoryStore):
    """Rows with targets, as requests will bring them."""

    def add(self, job: Job, now: int) -> Job | None:
        from dataclasses import replace

        return super().add(replace(job, targets=("webhook", "slack")), now)


class _KilledError(BaseException):
    """The notifier is gone."""


def finished(*script: Any) -> tuple[House, Job]:
    """A house with one job that has ended, its targets untold."""
    house = House(store=_WithTargets(), provider=ScriptedProvider(*script))
    job = house.accept()
    house.work()
    return house, house.job(job.job_id)


def statuses(house: House, job: Job) -> dict[str, NoticeStatus]:
    """How far the telling is."""
    return {notice.target: notice.status for notice in house.job(job.job_id).outbox}


def test_each_target_is_told_by_its_own_message_and_once() -> None:
    """Doubled messages tell nobody twice; then nobody need look at the row again."""
    house, job = finished()
    assert [target for _, _, target in house.notices.sent] == ["webhook", "slack"]
    house.notices.sent *= 2
    house.tell()
    assert [told.job_id for told in house.channel.told] == [job.job_id] * 2
    assert set(statuses(house, job).values()) == {NoticeStatus.DELIVERED}
    assert house.job(job.job_id).due_at is None


def test_a_failed_jobs_targets_are_told_too() -> None:
    """Silence is no failure report."""
    house, job = finished(ProviderRefusedRequest())
    house.tell()
    assert [told.status for told in house.channel.told] == [JobStatus.FAILED] * 2
    assert statuses(house, job)["slack"] is NoticeStatus.DELIVERED


def test_a_cancelled_and_an_expired_jobs_targets_are_told_too() -> None:
    """By the same road."""
    house = House(store=_WithTargets())
    from tests.fakes.house import ALICE

    first, second = house.accept(), house.accept(deadline_seconds=1)
    house.submission.cancel(ALICE, first.job_id)
    house.clock.advance(2)
    house.repair.run_once()
    house.tell()
    assert {told.status for told in house.channel.told} == {JobStatus.CANCELLED, JobStatus.EXPIRED}
    assert second.job_id in {told.job_id for told in house.channel.told}


def test_whk_05_a_failing_receiver_is_tried_again_and_the_job_stays_as_it_is() -> None:
    """With backoff, one call to the provider, and the other target is not held up."""
    house, job = finished()
    house.channel.failures = [Overloaded(), ConnectionLost()]
    house.settle()
    row = house.job(job.job_id)
    assert (row.status, len(house.provider.questions)) == (JobStatus.COMPLETED, 1)  # type: ignore[attr-defined]
    assert set(statuses(house, job).values()) == {NoticeStatus.DELIVERED}
    assert sorted(notice.tries for notice in row.outbox) in ([1, 3], [2, 2])


def test_whk_05_a_final_refusal_ends_the_telling_and_stays_visible() -> None:
    """Given up after one try, with its reason."""
    house, job = finished()
    house.channel.failures = [ProviderRefusedRequest()]
    house.settle()
    given_up = [n for n in house.job(job.job_id).outbox if n.status is NoticeStatus.GIVEN_UP]
    assert [(notice.tries, notice.last_error) for notice in given_up] == [(1, "invalid_request")]
    assert house.job(job.job_id).due_at is None


def test_a_receiver_that_never_answers_is_given_up_after_a_bound() -> None:
    """Not for ever."""
    house, job = finished()
    house.channel.failures = [Overloaded() for _ in range(100)]
    house.settle()
    assert {notice.tries for notice in house.job(job.job_id).outbox} == {TRIES_MAX}
    assert set(statuses(house, job).values()) == {NoticeStatus.GIVEN_UP}


@pytest.mark.parametrize("told_before_the_crash", [True, False])
def test_sqs_11_a_crash_around_the_telling(told_before_the_crash: bool) -> None:
    """Before it: told once. Between telling and noting, the documented window: told again. Never silent, never paid."""
    house, job = finished()
    tell = house.channel.tell

    def die(ended: Job) -> None:
        if told_before_the_crash:
            tell(ended)
        raise _KilledError

    house.channel.tell = die
    _, _, target = house.notices.sent.pop(0)
    with pytest.raises(_KilledError):
        house.delivery.deliver(job.job_id, target)
    house.channel.tell = tell
    house.delivery.deliver(job.job_id, target)  # a doubled message: the lease holds
    assert len(house.channel.told) == told_before_the_crash
    house.clock.advance(TELLING_MS / 1000 + 60)
    house.settle()
    assert len(house.channel.told) == 2 + told_before_the_crash
    assert len(house.provider.questions) == 1  # type: ignore[attr-defined]


def test_lost_notices_are_sent_again() -> None:
    """The row says who is still to be told."""
    house, job = finished()
    house.notices.sent.clear()
    house.clock.advance(61)
    house.repair.run_once()
    house.tell()
    assert set(statuses(house, job).values()) == {NoticeStatus.DELIVERED}


def test_nothing_is_told_of_a_job_that_has_expired_or_is_unknown() -> None:
    """A straggling message finds nothing to do."""
    house, job = finished()
    house.clock.time = job.expires_at * 1000
    house.tell()
    house.delivery.deliver("job_nobody", "webhook")
    assert house.channel.told == []
