"""Telling targets that a job has ended."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from backburner.delivery import JITTER, RETRY_AFTER_SECONDS_MAX, TELLING_MS, WAITS_SECONDS
from backburner.errors import PortUnavailable, ProviderRefusedRequest, Untold
from backburner.lifecycle import NOTICE_GRACE_MS
from backburner.models import Job, JobStatus, Notice, NoticeStatus, Telling
from backburner.ports import Conflict
from tests.fakes.house import House
from tests.fakes.memory import MemoryStore, ScriptedProvider

SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="


class _WithTargets(MemoryStore):
    """Rows with targets, as requests will bring them."""

    def add(self, job: Job, now: int) -> Job | None:
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
    assert [telling.target for _, telling in house.notices.sent] == ["webhook", "slack"]
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
    house.channel.failures = [Untold("http_503", again=True), Untold("timeout", again=True)]
    house.settle()
    row = house.job(job.job_id)
    assert (row.status, len(house.provider.questions)) == (JobStatus.COMPLETED, 1)  # type: ignore[attr-defined]
    assert set(statuses(house, job).values()) == {NoticeStatus.DELIVERED}
    assert sorted(notice.tries for notice in row.outbox) in ([1, 3], [2, 2])


def test_whk_05_a_final_refusal_ends_the_telling_and_stays_visible() -> None:
    """Given up after one try, with its reason."""
    house, job = finished()
    house.channel.failures = [Untold("http_410", again=False)]
    house.settle()
    given_up = [n for n in house.job(job.job_id).outbox if n.status is NoticeStatus.GIVEN_UP]
    assert [(notice.tries, notice.last_error) for notice in given_up] == [(1, "http_410")]
    assert house.job(job.job_id).due_at is None


def test_a_receiver_that_never_answers_is_given_up_after_a_bound() -> None:
    """Not for ever."""
    house, job = finished()
    house.channel.failures = [Untold("http_500", again=True) for _ in range(100)]
    house.settle(minutes=2_000)
    assert {notice.tries for notice in house.job(job.job_id).outbox} == {len(WAITS_SECONDS) + 1}
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
    _, telling = house.notices.sent.pop(0)
    with pytest.raises(_KilledError):
        house.delivery.deliver(telling)
    house.channel.tell = tell
    house.delivery.deliver(telling)  # a doubled message: its try is made
    house.delivery.deliver(Telling(job.job_id, telling.target, 1))  # a message for the next: the lease holds
    assert len(house.channel.told) == told_before_the_crash
    house.clock.advance(TELLING_MS / 1000 + 60)
    house.settle()
    assert len(house.channel.told) == 2 + told_before_the_crash
    assert len(house.provider.questions) == 1  # type: ignore[attr-defined]


def test_a_jobs_only_target_is_leased_without_reading_the_row() -> None:
    """A doubled message finds that it was told; one whose job was run again meanwhile, that it is not its any more."""
    house = House()
    job = house.accept(webhook={"url": "https://receiver.example/", "secret": SECRET})
    house.work()
    [(_, telling)] = house.notices.sent
    assert telling == Telling(job.job_id, "webhook", 0, house.job(job.job_id).claims)
    stale = replace(telling, claims=(telling.claims or 0) - 1)
    with _unreadable(house):
        house.delivery.deliver(replace(telling, job_id="job_nobody"))
        house.delivery.deliver(stale)
        assert len(house.channel.told) == 1, "its row tells that the try is still to be made"
        house.delivery.deliver(telling)
    assert len(house.channel.told) == 1
    row = house.job(job.job_id)
    assert [(notice.status, notice.tries) for notice in row.outbox] == [(NoticeStatus.DELIVERED, 1)]
    assert row.due_at is None


def test_a_lease_without_reading_is_looked_at_when_it_lapses() -> None:
    """Whoever dies while telling is followed by the repairer, as after any lease; the index is not written for it."""
    house = House()
    job = house.accept(webhook={"url": "https://receiver.example/", "secret": SECRET})
    house.work()
    due_at = house.job(job.job_id).due_at
    house.clock.advance(1)

    def die(_: Job) -> None:
        raise _KilledError

    tell, house.channel.tell = house.channel.tell, die
    [(_, telling)] = house.notices.sent
    with pytest.raises(_KilledError):
        house.delivery.deliver(telling)
    row = house.job(job.job_id)
    assert row.outbox[0].lease_until == house.clock.now() + TELLING_MS
    assert row.due_at == due_at
    house.channel.tell = tell
    house.notices.sent.clear()
    house.clock.advance(((due_at or 0) - house.clock.now()) / 1000)
    house.repair.run_once()
    assert house.notices.sent == [], "the try may still be under way"
    assert house.job(job.job_id).due_at == row.outbox[0].lease_until + NOTICE_GRACE_MS
    house.settle()
    assert len(house.channel.told) == 1


@contextmanager
def _unreadable(house: House) -> Iterator[None]:
    """The store answers no reads."""

    def unavailable(_: str) -> Job:
        raise PortUnavailable("InternalServerError")

    get, house.store.get = house.store.get, unavailable
    yield
    house.store.get = get


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
    house.delivery.deliver(Telling("job_nobody", "webhook"))
    assert house.channel.told == []


def notice_of(house: House, job: Job, target: str = "webhook") -> Any:
    """One target's notice."""
    return next(notice for notice in house.job(job.job_id).outbox if notice.target == target)


def test_the_waits_between_tries_are_the_channels_with_jitter_on_top() -> None:
    """Never shorter than planned, and never told before its time, whatever messages come."""
    house, job = finished()
    house.channel.failures = [Untold("http_500", again=True) for _ in range(100)]
    waited = []
    for tries, planned in enumerate(WAITS_SECONDS, start=1):
        house.tell()
        notice = notice_of(house, job)
        assert notice.tries == tries
        waited.append((notice.lease_until - house.clock.now()) / 1000)
        assert planned <= waited[-1] <= planned * (1 + JITTER) + 0.001
        house.notices.sent = [(0, telling) for _, telling in house.notices.sent * 2]  # all early, and doubled
        house.tell()
        assert notice_of(house, job) == notice
        house.notices.sent = list(dict.fromkeys(house.notices.sent))
        while notice_of(house, job).lease_until > house.clock.now():
            house.clock.advance(1)
            house.tell() if notice_of(house, job).lease_until > house.clock.now() else None
    house.tell()
    assert statuses(house, job)["webhook"] is NoticeStatus.GIVEN_UP


@pytest.mark.parametrize(("asked", "waited"), [(90.0, 90.0), (0.5, 2.0), (10**9, RETRY_AFTER_SECONDS_MAX)])
def test_what_the_receiver_asks_for_is_waited_within_bounds(asked: float, waited: float) -> None:
    """Retry-After: not less than the plan, and not for ever."""
    house, job = finished()
    house.channel.failures = [Untold("http_429", again=True, retry_after_seconds=asked)]
    house.tell()
    told = notice_of(house, job)
    assert waited <= (told.lease_until - house.clock.now()) / 1000 <= waited * (1 + JITTER) + 0.001


def test_a_target_that_waits_for_hours_does_not_hold_up_one_whose_message_is_lost() -> None:
    """The row is due when the first of its targets is."""
    house, job = finished()
    house.channel.failures = [Untold("http_503", again=True, retry_after_seconds=14_000)]
    house.notices.sent = [entry for entry in house.notices.sent if entry[1].target == "webhook"]
    house.tell()
    house.notices.sent.clear()
    house.clock.advance(61)
    house.repair.run_once()
    house.tell()
    assert statuses(house, job) == {"webhook": NoticeStatus.PENDING, "slack": NoticeStatus.DELIVERED}
    assert house.job(job.job_id).due_at > house.clock.now() + 13_000_000  # type: ignore[operator]
    house.settle()
    assert set(statuses(house, job).values()) == {NoticeStatus.DELIVERED}


def test_a_target_that_takes_its_notifier_along_is_given_up_after_a_bound() -> None:
    """A try is counted before it is made, so a crash in it is one too."""
    house, job = finished()

    def die(_: Job) -> None:
        raise _KilledError

    house.channel.tell = die
    for _ in range(3 * len(WAITS_SECONDS)):
        for telling in house.notices.take_ready(house.clock.now()):
            with suppress(_KilledError):
                house.delivery.deliver(telling)
        house.clock.advance(3_600)
        house.repair.run_once()
    assert set(statuses(house, job).values()) == {NoticeStatus.GIVEN_UP}
    assert notice_of(house, job).last_error == "interrupted"


@pytest.mark.parametrize(
    ("fault", "reason"), [(KeyError("x"), "internal_error"), (PortUnavailable("AccessDenied"), "unavailable")]
)
def test_a_fault_of_ours_is_another_try_and_no_end(fault: Exception, reason: str) -> None:
    """The job stays as it is; the target is told in the end."""
    house, job = finished()
    house.channel.failures = [fault]
    house.tell()
    assert notice_of(house, job).last_error == reason
    house.settle()
    assert set(statuses(house, job).values()) == {NoticeStatus.DELIVERED}
    assert house.job(job.job_id).status is JobStatus.COMPLETED


def test_a_channel_that_this_version_does_not_have_is_tried_again() -> None:
    """By the next version, perhaps."""
    house, job = finished()
    channel = house.channel
    house.channels = {}
    house.tell()
    assert notice_of(house, job).last_error == "no_such_channel"
    house.channels = {"webhook": channel, "slack": channel}
    house.settle()
    assert set(statuses(house, job).values()) == {NoticeStatus.DELIVERED}


def test_a_batch_is_told_at_once_and_each_message_answered_on_its_own() -> None:
    """One that could not be noted comes back; its siblings do not."""
    house, job = finished()
    [(_, first), (_, second)] = house.notices.sent

    rows: dict[str, Job] = house.store.rows

    def get(job_id: str) -> Job | None:
        if job_id == "job_out_of_reach":
            raise PortUnavailable("Timeout")
        return rows.get(job_id)

    house.store.get = get
    batch = {"m-1": first, "m-2": Telling("job_out_of_reach", "webhook"), "m-3": second}
    assert house.delivery.run_batch(batch, lambda: 60.0) == ["m-2"]
    assert set(statuses(house, job).values()) == {NoticeStatus.DELIVERED}


def test_a_job_run_again_meanwhile_is_not_marked_as_told() -> None:
    """A telling of the old run notes nothing in the new one."""
    house, job = finished()
    told = house.channel.tell

    def run_again(ended: Job) -> None:
        told(ended)
        row = house.store.rows[ended.job_id]
        house.store.rows[ended.job_id] = replace(row, claims=row.claims + 1, outbox=(Notice("webhook"),))

    house.channel.tell = run_again
    _, telling = house.notices.sent.pop(0)
    house.delivery.deliver(telling)
    assert statuses(house, job) == {"webhook": NoticeStatus.PENDING}


def test_a_row_that_refuses_every_write_is_left_to_the_next_message() -> None:
    """Rather than that the whole batch waits for it."""
    house, job = finished()

    def settle(*_: Any) -> Job:
        raise Conflict(house.job(job.job_id))

    object.__setattr__(house.lifecycle, "settle", settle)
    _, telling = house.notices.sent.pop(0)
    assert house.delivery.run_batch({"m-1": telling}, lambda: 60.0) == ["m-1"]
    assert house.channel.told == []
