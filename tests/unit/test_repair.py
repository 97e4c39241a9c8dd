"""The loop that repairs everything."""

from dataclasses import replace
from typing import Any

import pytest

from backburner.errors import Overloaded, PortUnavailable
from backburner.lifecycle import LEASE_MS, PATIENCE_MS
from backburner.models import Hint, Job, JobStatus, Lane
from backburner.ports import Conflict
from backburner.repair import ROWS_MAX
from tests.fakes.house import House
from tests.fakes.memory import ScriptedProvider

SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="


class _KilledError(BaseException):
    """The worker process is gone."""


def _kill_during_the_call(house: House, job: Job) -> None:
    def die() -> str:
        raise _KilledError

    house.provider.script.insert(0, die)  # type: ignore[attr-defined]
    with pytest.raises(_KilledError):
        house.run(job.job_id)


def test_a_killed_workers_job_is_taken_over_within_90_seconds() -> None:
    """Whenever the kill falls in the repairer's minute, and whatever the function's timeout."""
    for killed_at in range(0, 60, 5):
        house = House()
        job = house.accept()
        house.clock.advance(killed_at)
        _kill_during_the_call(house, job)
        killed = house.clock.now()
        house.hints.sent.clear()
        second = killed_at
        while house.job(job.job_id).status is not JobStatus.COMPLETED:
            second += 1
            assert second < killed_at + 200, house.job(job.job_id)
            house.clock.advance(1)
            if second % 60 == 0:
                house.repair.run_once()
            house.work()
        assert house.clock.now() - killed <= 90_000


def test_a_killed_workers_job_does_not_wait_behind_a_backlog() -> None:
    """However many rows are overdue, which a run moves on a thousand at a time."""
    house = House()
    for _ in range(ROWS_MAX + 200):
        house.accept()
    house.clock.advance(300)
    job = house.accept()
    _kill_during_the_call(house, job)
    killed = house.clock.now()
    house.hints.sent.clear()
    while house.job(job.job_id).status is not JobStatus.COMPLETED:
        house.clock.advance(20)
        if (house.clock.now() - killed) % 60_000 == 40_000:
            house.repair.run_once()
        house.hints.sent[:] = [
            sent for sent in house.hints.sent if sent.hint.job_id == job.job_id
        ]  # all workers are busy
        house.work()
        assert house.clock.now() - killed <= 90_000, house.job(job.job_id)


def test_a_backlog_is_moved_on_also_where_the_jobs_in_hand_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Throttled, say."""
    house = House()
    for _ in range(ROWS_MAX):
        house.accept()
    house.clock.advance(300)

    def unseen(*_: object) -> list[str]:
        raise PortUnavailable("ThrottlingException")

    monkeypatch.setattr(house.store, "in_hand", unseen)
    house.hints.sent.clear()
    assert house.repair.run_once() == ROWS_MAX
    assert len(house.hints.sent) == ROWS_MAX


def test_a_job_that_waited_long_is_taken_over_as_soon() -> None:
    """When it is claimed, its next look lies an hour off; that of a job in hand must not."""
    house = House()
    job = house.accept()
    for _ in range(60):
        house.clock.advance(60)
        house.repair.run_once()
    assert (house.job(job.job_id).due_at or 0) > house.clock.now() + 120_000
    _kill_during_the_call(house, job)
    killed = house.clock.now()
    house.hints.sent.clear()
    while house.job(job.job_id).status is not JobStatus.COMPLETED:
        assert house.clock.now() - killed < 90_000
        house.clock.advance(1)
        if (house.clock.now() - killed) % 60_000 == 59_000:
            house.repair.run_once()
        house.work()


def test_a_call_moves_its_row_in_the_repairers_index_once_in_half_a_minute() -> None:
    """The lease is no key of it: a claim and most renewals cost their row's write only. Nor does it outlive the key."""
    house = House()
    due_at = house.accept().due_at or 0
    lease = house.leases
    job = house.lifecycle.claim(next(iter(house.store.rows)), "worker")
    seen = []
    with lease.hold(job):
        for _ in range(15):
            house.clock.advance(10)
            lease.tick()
            row = house.job(job.job_id)
            assert row.lease_until == house.clock.now() + LEASE_MS
            assert row.lease_until <= (row.due_at or 0) <= house.clock.now() + PATIENCE_MS
            seen.append(row.due_at)
    moved = [due_at + number * 40_000 for number in range(4)]
    assert seen == [moved[0]] * 3 + [moved[1]] * 4 + [moved[2]] * 4 + [moved[3]] * 4


def test_a_hint_that_comes_too_early_is_refused_once() -> None:
    """The second write of a claim is for jobs that have waited, not for those that are to wait."""
    house = House()
    job = house.accept()
    house.lifecycle.park(house.lifecycle.claim(job.job_id, "worker"), house.clock.now() + 600_000)
    tried: list[str] = []
    update = house.store.update

    def counted(job_id: str, *given: Any, **patch: Any) -> Any:
        tried.append(job_id)
        return update(job_id, *given, **patch)

    house.store.update = counted
    with pytest.raises(Conflict):
        house.lifecycle.claim(job.job_id, "early")
    assert len(tried) == 1


def test_a_job_cancelled_while_it_is_put_off_is_looked_at_soon() -> None:
    """The row that a cancellation has read may be another by the time of its write, and due in an hour."""
    house = House()
    job = house.accept(webhook={"url": "https://receiver.example/", "secret": SECRET})
    house.clock.advance(20)
    claimed = house.lifecycle.claim(job.job_id, "worker")
    assert claimed.due_at == job.due_at
    house.lifecycle.park(claimed, house.clock.now() + 3_600_000)
    assert house.lifecycle.cancel(claimed)
    assert (house.job(job.job_id).due_at or 0) <= house.clock.now() + PATIENCE_MS


def test_a_lease_that_an_older_version_took_over_is_in_due_at() -> None:
    """It leaves `lease_until` as the dead worker had it, which says nothing of the living one."""
    house = House()
    job = house.accept()
    house.lifecycle.claim(job.job_id, "killed")
    house.clock.time += PATIENCE_MS + 1
    now = house.clock.now()
    row = house.job(job.job_id)
    house.store.rows[job.job_id] = replace(
        row, owner="old worker", claims=row.claims + 1, claimed_at=now, due_at=now + LEASE_MS
    )
    house.hints.sent.clear()
    house.repair.run_once()
    house.work()
    assert house.job(job.job_id).owner == "old worker"
    house.clock.time += LEASE_MS + 1
    house.work()
    assert house.job(job.job_id).status is JobStatus.COMPLETED


def test_a_row_of_before_leases_had_a_field_of_their_own_lapses_when_it_is_due() -> None:
    """Its worker, of an earlier version, is dead; a live one renews by `due_at`."""
    house = House()
    job = house.accept()
    house.lifecycle.claim(job.job_id, "old worker")
    now = house.clock.now()
    house.store.rows[job.job_id] = replace(house.job(job.job_id), lease_until=None, due_at=now + LEASE_MS)
    house.hints.sent.clear()
    house.repair.run_once()
    assert house.job(job.job_id).status is JobStatus.PROCESSING
    house.clock.time += LEASE_MS + 1
    house.work()
    assert house.job(job.job_id).status is JobStatus.COMPLETED


def test_sqs_06_a_job_that_kills_its_worker_ends_after_its_attempts() -> None:
    """However often it is delivered, under whatever message: calls <= attempts, and an honest code."""
    house = House()
    job = house.accept()
    for _ in range(3):
        _kill_during_the_call(house, job)
        house.clock.time += LEASE_MS + 1
    for _ in range(10):
        house.run(job.job_id)
    house.repair.run_once()
    row = house.job(job.job_id)
    assert row.status is JobStatus.FAILED
    assert row.error is not None
    assert (row.error.code, row.attempts) == ("worker_lost", 3)
    assert len(house.provider.questions) == 3  # type: ignore[attr-defined]
    assert [letter.reason for letter in house.dead_letters.letters] == ["worker_lost"]


def test_a_lost_hint_is_sent_again() -> None:
    """The row is the truth."""
    house = House()
    job = house.accept()
    house.hints.sent.clear()
    house.clock.advance(60)
    house.repair.run_once()
    house.work()
    assert house.job(job.job_id).status is JobStatus.COMPLETED


def test_a_backlog_is_hinted_again_ever_more_rarely() -> None:
    """An hour in the queue costs a handful of extra hints, not sixty."""
    house = House()
    house.accept()
    house.hints.sent.clear()
    for _ in range(60):
        house.clock.advance(60)
        house.repair.run_once()
    assert 3 <= len(house.hints.sent) <= 7


def test_the_oldest_waiting_job_is_known_from_its_first_minute_on_and_until_it_is_taken() -> None:
    """A job that is taken at once is never entered, so a lane without a backlog pays nothing to be watched."""
    house = House()

    def oldest() -> float:
        house.repair.run_once()
        seen: float = house.journal.named("lane_seen")[-2]["oldest_seconds"]  # interactive, standard, bulk
        return seen

    quick = house.accept()
    assert house.job(quick.job_id).waiting_since is None
    house.work()
    assert oldest() == 0
    slow = house.accept()
    house.hints.sent.clear()
    house.clock.advance(61)
    assert oldest() == 61
    house.clock.advance(600)
    assert oldest() == 661
    house.work()
    assert house.job(slow.job_id).status is JobStatus.COMPLETED
    assert oldest() == 0


def test_the_age_of_the_oldest_dead_letter_is_known_however_often_it_was_looked_at() -> None:
    """Explained or not; without a letter it is nothing."""
    house = House()

    def oldest() -> float:
        house.repair.run_once()
        seen: float = house.journal.named("letters_seen")[-1]["oldest_seconds"]
        return seen

    assert oldest() == 0
    house.dead_letters.bury("?", reason="timeout", detail="", lane=Lane.BULK, client_id=None)
    house.clock.advance(60)
    house.dead_letters.bury("?", reason="timeout", detail="", lane=Lane.BULK, client_id=None)
    for minute in range(1, 6):
        assert oldest() == 60 * minute
        house.clock.advance(60)


def test_two_repairers_at_once_send_one_hint() -> None:
    """Every step is a conditional write that one of the two loses."""
    house = House()
    job = house.accept()
    house.hints.sent.clear()
    house.clock.advance(60)
    stale = house.job(job.job_id)
    house.repair.run_once()
    get = house.store.get
    house.store.get = lambda job_id: stale
    house.store.due = lambda before, limit: [job.job_id]
    house.repair.run_once()
    house.store.get = get
    assert len(house.hints.sent) == 1


def test_a_passed_deadline_is_noticed_without_a_hint() -> None:
    """Expired, though no worker ever looked."""
    house = House()
    job = house.accept(deadline_seconds=30)
    house.hints.sent.clear()
    house.clock.advance(31)
    house.repair.run_once()
    assert house.job(job.job_id).status is JobStatus.EXPIRED


def test_hints_that_the_redrive_policy_buries_end_their_job_as_failed() -> None:
    """Code that cannot even answer: after as many dead hints as attempts, the row fails and its letter says why."""
    house = House()
    job = house.accept()
    for _ in range(3):
        house.hints.sent.clear()
        assert house.job(job.job_id).status is JobStatus.QUEUED
        house.dead_letters.redrive_policy_moves(Hint(job.job_id))
        house.repair.run_once()
    row = house.job(job.job_id)
    assert row.status is JobStatus.FAILED
    assert row.error is not None
    assert (row.error.code, row.attempts) == ("undeliverable", 0)
    (letter,) = house.dead_letters.letters
    assert (letter.reason, letter.hint) == ("undeliverable", Hint(job.job_id, died=0))
    house.run(letter.hint)
    assert house.job(job.job_id).status is JobStatus.COMPLETED


def test_sqs_07_a_hint_that_died_for_lack_of_capacity_does_not_fail_its_job() -> None:
    """Throttled receives count as receives; the job gets another hint at once and its letter is gone."""
    house = House()
    job = house.accept()
    house.hints.sent.clear()
    house.dead_letters.redrive_policy_moves(Hint(job.job_id))
    house.repair.run_once()
    assert house.dead_letters.letters == []
    house.work()
    row = house.job(job.job_id)
    assert (row.status, row.attempts) == (JobStatus.COMPLETED, 1)


def test_a_buried_straggler_of_a_living_or_finished_job_is_removed() -> None:
    """It changes nothing and is not left to alarm anybody."""
    house = House()
    job = house.accept()
    house.work()
    house.dead_letters.redrive_policy_moves(Hint(job.job_id))
    house.repair.run_once()
    assert house.job(job.job_id).status is JobStatus.COMPLETED
    assert house.dead_letters.letters == []


def test_a_buried_message_that_is_no_hint_gets_its_reason() -> None:
    """Poison stays visible."""
    house = House()
    house.dead_letters.redrive_policy_moves(None, "garbage")
    house.repair.run_once()
    assert [(letter.reason, letter.body) for letter in house.dead_letters.letters] == [("malformed_hint", "garbage")]


def test_a_dead_jobs_missing_letter_is_sent() -> None:
    """The dead-letter queue is one of the row's targets: a crash before the letter does not lose it."""
    house = House(provider=ScriptedProvider(*[Overloaded() for _ in range(3)]))
    job = house.accept()
    bury = house.dead_letters.bury

    def die(*_: object, **__: object) -> None:
        raise _KilledError

    house.dead_letters.bury = die
    for _ in range(3):
        try:
            house.work()
        except _KilledError:
            break
        house.clock.advance(300)
    assert house.job(job.job_id).status is JobStatus.FAILED
    house.dead_letters.bury = bury
    house.clock.advance(61)
    house.repair.run_once()
    assert [letter.reason for letter in house.dead_letters.letters] == ["overloaded"]
    assert house.job(job.job_id).due_at is None


def test_a_dead_jobs_row_outlives_its_letter() -> None:
    """SQS keeps a letter for 14 days; redriven on the last of them it finds its row."""
    house = House(provider=ScriptedProvider(*[Overloaded() for _ in range(3)]))
    job = house.accept()
    house.store.rows[job.job_id] = replace(job, expires_at=job.deadline_at // 1000 + 86_400)
    house.settle()
    row = house.job(job.job_id)
    assert row.finished_at is not None
    assert row.expires_at * 1000 >= row.finished_at + 14 * 86_400_000 - 1000


def test_nothing_is_left_to_do_when_all_jobs_have_ended() -> None:
    """No row stays in the due index."""
    house = House()
    for _ in range(3):
        house.accept()
    house.settle()
    assert list(house.store.due(2**62, 10)) == []
