"""Taking requests in."""

from dataclasses import replace
from typing import Any

import pytest

from backburner.errors import (
    IdempotencyConflict,
    InvalidRequest,
    JobInUse,
    JobIsFinal,
    JobNotFound,
    LaneFull,
    PortUnavailable,
    RateLimited,
    Unavailable,
)
from backburner.models import (
    BUDGET,
    DEAD_LETTER,
    WEBHOOK,
    Gauge,
    Hint,
    JobRequest,
    JobStatus,
    Lane,
    Limits,
    Notice,
    NoticeStatus,
    Outlook,
    Payload,
)
from backburner.submission import job_id_for
from tests.fakes.house import ALICE, BOB, House
from tests.fakes.memory import MODEL, FakeChance, MemoryCatalogue, MemoryHints, ScriptedProvider


def test_an_accepted_job_is_stored_and_hinted_once() -> None:
    """Row and hint are both there when accept returns."""
    house = House()
    job = house.accept()
    assert house.job(job.job_id).status is JobStatus.QUEUED
    assert [sent.hint for sent in house.hints.sent] == [Hint(job.job_id)]


def test_the_same_key_and_request_is_the_same_job() -> None:
    """A replay creates nothing and sends nothing, however the request is spelled."""
    house = House()
    request = {"prompt": "a", "metadata": {"x": 1, "y": [None, 0.5]}}
    first = house.submission.accept(ALICE, JobRequest.model_validate(request), "k")
    again = house.submission.accept(ALICE, JobRequest.model_validate(dict(reversed(request.items()))), "k")
    assert (first.replayed, again.replayed) == (False, True)
    assert again.job.job_id == first.job.job_id
    assert len(house.store.rows) == len(house.hints.sent) == 1


def test_the_same_key_for_another_request_is_refused() -> None:
    """Nothing is created, and the first job stays."""
    house = House()
    first = house.accept("k")
    with pytest.raises(IdempotencyConflict):
        house.accept("k", prompt="Name a lake.")
    assert list(house.store.rows) == [first.job_id]


def test_a_field_at_its_default_and_a_null_do_not_make_another_request() -> None:
    """null counts as absent."""
    house = House()
    assert house.accept("k", model=None).job_id == house.accept("k").job_id


def test_api_10_keys_are_scoped_to_the_client_and_cannot_be_made_to_collide() -> None:
    """Client `a` with key `b#c` is not client `a#b` with key `c`; nor does one client see another's job."""
    assert job_id_for("a", "b#c") != job_id_for("a#b", "c")
    house = House()
    alice, bob = house.accept("same-key"), house.accept("same-key", client=BOB)
    assert alice.job_id != bob.job_id
    with pytest.raises(JobNotFound):
        house.submission.find(BOB, alice.job_id)


def test_sqs_03_after_retention_the_key_is_free_though_the_row_still_stands() -> None:
    """An expired row reads as absent and is replaced, before TTL removes it."""
    house = House()
    first = house.accept("k")
    house.clock.time = first.expires_at * 1000
    with pytest.raises(JobNotFound):
        house.submission.find(ALICE, first.job_id)
    second = house.submission.accept(ALICE, JobRequest(prompt="Name a river."), "k")
    assert not second.replayed
    assert house.job(first.job_id).created_at == house.clock.now()


def test_the_key_of_a_failed_job_says_that_it_failed() -> None:
    """The documented rule: a key names one job for good; the reply carries its present status."""
    house = House()
    job = house.accept("k")
    house.store.rows[job.job_id] = replace(job, status=JobStatus.FAILED, due_at=None)
    replay = house.submission.accept(ALICE, JobRequest(prompt="Name a river."), "k")
    assert replay.replayed
    assert replay.job.status is JobStatus.FAILED


class _RefusingHints(MemoryHints):
    refusing = True

    def send(self, *args: object, **kwargs: object) -> None:
        if self.refusing:
            raise PortUnavailable("AccessDenied")
        super().send(*args, **kwargs)  # type: ignore[arg-type]


def test_sqs_09_a_refused_send_is_an_error_and_the_retry_completes_the_job() -> None:
    """The caller learns it, the row is marked, and the retry under the same key sends the hint at once."""
    house = House()
    hints = _RefusingHints(house.clock)
    house = House(hints=hints, clock=house.clock)
    with pytest.raises(Unavailable):
        house.accept("k")
    assert len(house.store.rows) == 1
    hints.refusing = False
    replay = house.submission.accept(ALICE, JobRequest(prompt="Name a river."), "k")
    assert replay.replayed
    assert house.work() == 1
    assert house.job(replay.job.job_id).status is JobStatus.COMPLETED


def test_sqs_09_without_a_retry_the_repairer_sends_the_hint() -> None:
    """A row without its hint is not lost."""
    house = House()
    hints = _RefusingHints(house.clock)
    house = House(hints=hints, clock=house.clock)
    with pytest.raises(Unavailable):
        house.accept("k")
    hints.refusing = False
    house.settle()
    assert [row.status for row in house.store.rows.values()] == [JobStatus.COMPLETED]


def test_a_killed_acceptance_is_completed_by_a_later_retry() -> None:
    """Row written, process gone: a retry after the hint's patience sends it, without the repairer."""
    house = House()
    job = house.accept("k")
    house.hints.sent.clear()
    house.clock.advance(61)
    house.accept("k")
    assert house.work() == 1
    assert house.job(job.job_id).status is JobStatus.COMPLETED


def test_a_lost_reply_of_the_store_is_not_a_replay() -> None:
    """The put had its effect though its reply was lost; the second try finds its own row and sends the hint."""
    house = House()
    stored = house.store.add

    def add_twice(job: object, now: int) -> object:
        stored(job, now)
        return stored(job, now)

    house.store.add = add_twice
    accepted = house.submission.accept(ALICE, JobRequest(prompt="a"), "k")
    assert not accepted.replayed
    assert len(house.hints.sent) == 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": "nobody"}, "model"),
        ({"model": "m-1", "provider": "other"}, "provider"),
        ({"max_tokens": 4_001}, "max_tokens"),
    ],
)
def test_what_this_deployment_cannot_do_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    """And nothing is stored."""
    house = House()
    with pytest.raises(InvalidRequest) as refused:
        house.accept(**fields)
    assert refused.value.field == field
    assert not house.store.rows


def test_a_large_request_is_kept_beside_the_row_and_its_size_is_counted_in_bytes() -> None:
    """100,000 bytes are many fewer characters of Chinese."""
    house = House()
    job = house.accept(prompt="中" * 40_000)
    assert job.request.text is None
    assert job.request.key in house.payloads.texts
    house.work()
    assert house.job(job.job_id).status is JobStatus.COMPLETED
    assert house.provider.questions[0].messages[0].content == "中" * 40_000  # type: ignore[attr-defined]


def test_cancel_wins_over_queued_at_once_and_is_idempotent() -> None:
    """The hint of a cancelled job finds nothing to do."""
    house = House()
    job = house.accept()
    assert house.submission.cancel(ALICE, job.job_id).status is JobStatus.CANCELLED
    assert house.submission.cancel(ALICE, job.job_id).status is JobStatus.CANCELLED
    house.work()
    assert not house.provider.questions  # type: ignore[attr-defined]


def test_a_final_job_cannot_be_cancelled() -> None:
    """409, and the result stays."""
    house = House()
    job = house.accept()
    house.work()
    with pytest.raises(JobIsFinal):
        house.submission.cancel(ALICE, job.job_id)
    assert house.job(job.job_id).status is JobStatus.COMPLETED


def test_somebody_elses_job_cannot_be_cancelled() -> None:
    """It looks as if it did not exist."""
    house = House()
    job = house.accept()
    with pytest.raises(JobNotFound):
        house.submission.cancel(BOB, job.job_id)


# ── Erasing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_erased_job_is_gone_with_all_that_it_held() -> None:
    """At once, for every reader; its key is free, and a redrive of it finds nothing."""
    house = House()
    accepted = house.submission.accept(
        ALICE, JobRequest(prompt="Name a river." + "a" * 200_000, metadata={"a": "b"}), "k-1"
    )
    house.work()
    house.submission.erase(ALICE, accepted.job.job_id)
    with pytest.raises(JobNotFound):
        house.submission.find(ALICE, accepted.job.job_id)
    row = house.store.rows[accepted.job.job_id]
    assert (row.request, row.result, row.metadata, row.due_at) == (Payload(""), None, None, None)
    assert house.payloads.texts == {}
    assert not house.submission.accept(ALICE, JobRequest(prompt="Name another."), "k-1").replayed


def test_a_job_that_has_not_ended_is_not_erased() -> None:
    """Its answer may be paid for already."""
    house = House()
    job = house.accept()
    with pytest.raises(JobInUse, match="queued"):
        house.submission.erase(ALICE, job.job_id)
    assert house.job(job.job_id) == job


def test_somebody_elses_job_is_not_erased() -> None:
    """It looks as if it did not exist."""
    house = House()
    job = house.accept()
    house.work()
    with pytest.raises(JobNotFound):
        house.submission.erase(BOB, job.job_id)
    assert house.job(job.job_id).result is not None


@pytest.mark.parametrize("target", [BUDGET, DEAD_LETTER])
def test_a_job_is_not_erased_before_its_cost_and_its_death_are_noted(target: str) -> None:
    """Else its client's budget would hold the worst case for the rest of the day, and no operator would hear of it."""
    house = House()
    job = house.accept()
    house.work()
    house.store.rows[job.job_id] = replace(house.job(job.job_id), outbox=(Notice(target),))
    with pytest.raises(JobInUse):
        house.submission.erase(ALICE, job.job_id)
    house.store.rows[job.job_id] = replace(
        house.job(job.job_id), outbox=(Notice(target, NoticeStatus.DELIVERED), Notice(WEBHOOK))
    )
    house.submission.erase(ALICE, job.job_id)
    assert not house.store.rows[job.job_id].pending


def test_a_job_that_changes_while_it_is_erased_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told of at this very moment, or run again."""
    house = House()
    job = house.accept()
    house.work()
    read = house.job(job.job_id)
    house.store.rows[job.job_id] = replace(read, claims=read.claims + 1)
    monkeypatch.setattr(house.store, "get", lambda _: read)
    with pytest.raises(JobInUse):
        house.submission.erase(ALICE, job.job_id)
    assert house.store.rows[job.job_id].result is not None


def test_a_payload_that_cannot_be_removed_just_now_is_left_to_the_stores_own_rule() -> None:
    """The job is gone all the same."""
    house = House()
    job = house.accept(prompt="a" * 200_000)
    house.work()

    def unavailable(_: str) -> None:
        raise PortUnavailable

    house.payloads.remove = unavailable
    house.submission.erase(ALICE, job.job_id)
    assert house.journal.named("payload_left") == [{"job_id": job.job_id}]
    with pytest.raises(JobNotFound):
        house.submission.find(ALICE, job.job_id)


# ── Lanes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lane", Lane)
def test_a_lane_takes_as_many_jobs_as_it_is_said_to(lane: Lane) -> None:
    """At its depth it takes one more, beyond it none; the other lanes go on. The caller learns when to come back."""
    house = House()
    house.depths.said[lane] = house.submission.lane_depth_max
    assert house.accept(priority=lane).ahead == house.submission.lane_depth_max
    house.depths.delayed[lane] = 1  # put off by the provider's limits, but waiting all the same
    with pytest.raises(LaneFull) as refused:
        house.accept("k", priority=lane)
    assert 60 <= (refused.value.retry_after_seconds or 0) <= 90
    assert len(house.store.rows) == len(house.hints.sent) == 1
    for other in set(Lane) - {lane}:
        assert house.accept(priority=other).ahead == 0


def test_a_large_request_for_a_full_lane_leaves_nothing_behind() -> None:
    """It is refused before its text is stored."""
    house = House()
    house.depths.said[Lane.BULK] = 10**6
    with pytest.raises(LaneFull):
        house.accept(priority="bulk", prompt="a" * 200_000)
    assert not house.payloads.texts


def test_an_accepted_key_is_answered_though_its_lane_has_filled_up() -> None:
    """A replay adds nothing to the lane. An expired row is no replay."""
    house = House()
    first = house.accept("k")
    house.depths.said[Lane.STANDARD] = 10**6
    again = house.submission.accept(ALICE, JobRequest(prompt="Name a river."), "k")
    assert (again.replayed, again.job.job_id) == (True, first.job_id)
    with pytest.raises(IdempotencyConflict):
        house.accept("k", prompt="Name a lake.")
    house.clock.time = first.expires_at * 1000
    with pytest.raises(LaneFull):
        house.accept("k")


def test_a_lane_of_unknown_depth_takes_jobs() -> None:
    """What cannot be read is no reason to refuse."""
    house = House()
    house.depths.said[Lane.STANDARD] = None
    assert house.accept().ahead is None


def test_the_time_to_come_back_grows_with_the_excess_within_bounds() -> None:
    """One minute at the least, a quarter of an hour at the most, and not the same for everybody."""
    house = House(chance=FakeChance(1))

    def told(depth: int) -> int:
        house.depths.said[Lane.STANDARD] = depth
        with pytest.raises(LaneFull) as refused:
            house.accept()
        return refused.value.retry_after_seconds or 0

    assert len({told(10_001) for _ in range(20)}) > 5
    assert told(10_001) < told(15_000) <= told(10**9) == 900
    assert min(told(10_001) for _ in range(100)) >= 60


# ── What a waiting job may expect ─────────────────────────────────────────────────────────────────────────────────────

ONE_A_SECOND = replace(MODEL, limits=Limits(requests=60))


def test_a_waiting_job_is_told_its_position_and_when_it_may_start() -> None:
    """Thirty before it, at a call a second."""
    house = House(catalogue=MemoryCatalogue(ONE_A_SECOND))
    house.depths.said[Lane.STANDARD] = 30
    job = house.accept()
    outlook = house.submission.outlook(job)
    assert outlook == Outlook(31, house.clock.now() + 30_000)
    house.depths.said[Lane.STANDARD] = 4
    outlook = house.submission.outlook(job)
    assert outlook == Outlook(5, house.clock.now() + 4_000), "never more than wait now"
    house.depths.said[Lane.STANDARD] = 400
    outlook = house.submission.outlook(job)
    assert outlook is not None
    assert outlook.position == 31, "never more than were there before it"


def test_without_limits_the_workers_set_the_pace() -> None:
    """Ten at once, two seconds each as long as nothing is known: five a second."""
    house = House()
    house.depths.said[Lane.STANDARD] = 100
    assert house.submission.outlook(house.accept()) == Outlook(101, house.clock.now() + 20_000)


def test_a_parked_job_is_told_its_own_time() -> None:
    """No position: it stands behind nobody."""
    house = House(catalogue=MemoryCatalogue(ONE_A_SECOND))
    now = house.clock.now()
    house.limits.gauges["model#m-1"] = Gauge("model#m-1", revision=1, cursors={"requests": (now + 90_000) * 1000})
    job = house.accept()
    house.work()
    parked = house.job(job.job_id)
    assert parked.status is JobStatus.QUEUED
    outlook = house.submission.outlook(parked)
    assert outlook is not None
    assert outlook.position is None
    assert outlook.starts_at >= now + 84_000


def test_what_a_parked_job_waited_for_its_slot_is_the_whole_wait() -> None:
    """From its first claim, however often it was parked; and a call that comes at once waited for nothing."""
    house = House(catalogue=MemoryCatalogue(ONE_A_SECOND))
    now = house.clock.now()
    house.limits.gauges["model#m-1"] = Gauge("model#m-1", revision=1, cursors={"requests": (now + 90_000) * 1000})
    job = house.accept()
    while house.job(job.job_id).status is not JobStatus.COMPLETED:
        house.work()
        house.clock.advance(1)
    assert house.journal.named("job_parked")
    [call] = house.journal.named("call_ended")
    assert 88_000 <= call["slot_wait_ms"] <= house.clock.now() - now
    assert house.job(job.job_id).parked_since is None
    house.clock.advance(120)
    house.accept("next")
    house.work()
    assert house.journal.named("call_ended")[-1]["slot_wait_ms"] == 0


def test_the_wait_after_a_refusal_is_a_wait_of_its_own() -> None:
    """The provider's limit was met twice; no second is counted for both, also where the second wait is parked."""
    for again_after in (2, 40):
        provider = ScriptedProvider(RateLimited(retry_after_seconds=again_after), "an answer")
        house = House(catalogue=MemoryCatalogue(ONE_A_SECOND), provider=provider)
        now = house.clock.now()
        house.limits.gauges["model#m-1"] = Gauge("model#m-1", revision=1, cursors={"requests": (now + 5_000) * 1000})
        job = house.accept()
        while house.job(job.job_id).status is not JobStatus.COMPLETED:
            house.work()
            house.clock.advance(1)
        first, second = (call["slot_wait_ms"] for call in house.journal.named("call_ended"))
        assert first >= 4_000
        assert second >= again_after * 1000
        assert first + second <= house.clock.now() - now


def test_a_job_that_does_not_wait_has_no_outlook() -> None:
    """It has ended; or nothing is known."""
    house = House()
    job = house.accept()
    house.work()
    assert house.submission.outlook(house.job(job.job_id)) is None
    waiting = house.accept("other")
    assert replace(house.submission, limiter=None).outlook(waiting) is None
    large = replace(waiting, request=Payload(None, "requests/large"))
    assert house.submission.outlook(large) is None


def test_a_cancelled_jobs_slot_goes_to_somebody_else() -> None:
    """While its time has not come."""
    house = House(catalogue=MemoryCatalogue(ONE_A_SECOND))
    now = house.clock.now()
    house.limits.gauges["model#m-1"] = Gauge("model#m-1", revision=1, cursors={"requests": (now + 1_700) * 1000})
    job = house.accept(priority="interactive")
    house.run(job.job_id, seconds_left=16)  # too little to sleep until the slot, so it is parked with it
    held = house.job(job.job_id).slot
    assert held is not None
    house.submission.cancel(ALICE, job.job_id)
    [vacancy] = house.limits.gauges["model#m-1"].vacant
    assert vacancy.start_at == held.start_at
    assert house.job(job.job_id).slot is None
