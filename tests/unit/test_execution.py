"""Running jobs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from backburner.errors import (
    ContextLengthExceeded,
    Interrupted,
    Overloaded,
    PortUnavailable,
    ProviderRefusedRequest,
    RateLimited,
)
from backburner.lifecycle import LEASE_MS, RENEW_MS
from backburner.models import WEBHOOK, WEBSOCKET, Answer, Hint, Job, JobStatus, Lane, Notice, Question
from backburner.ports import Audience, Background
from tests.fakes.house import ALICE, House
from tests.fakes.memory import ScriptedProvider


def test_a_job_is_answered() -> None:
    """Three writes: put, claim, finish; the answer, its usage and its cost are in the row."""
    house = House()
    job = house.accept()
    house.work()
    row = house.job(job.job_id)
    assert row.status is JobStatus.COMPLETED
    assert row.result is not None
    assert '"text":"an answer"' in (row.result.text or "")
    assert (row.attempts, row.claims, row.due_at) == (1, 1, None)
    assert row.cost_micro_usd == 10 * 2 + 5 * 10


def test_sqs_01_a_second_delivery_neither_calls_nor_ends_the_job() -> None:
    """While the first worker thinks, the second finds a live lease and drops its message."""
    house = House()
    job = house.accept()
    house.provider = ScriptedProvider(lambda: house.run(job.job_id))
    house.run(job.job_id)
    assert len(house.provider.questions) == 1
    assert house.job(job.job_id).status is JobStatus.COMPLETED
    house.run(job.job_id)
    assert len(house.provider.questions) == 1


def test_a_hint_that_comes_a_moment_early_by_this_clock_is_sent_again() -> None:
    """The clock that made the job available is ahead; while the claim is refused, this one catches up."""
    house = House()
    job = house.accept()
    house.clock.time -= 3
    claim = house.store.update

    def refuse_and_take_time(*arguments: Any, **patch: Any) -> Job:
        try:
            return claim(*arguments, **patch)  # type: ignore[no-any-return]
        finally:
            house.clock.time += 5

    house.store.update = refuse_and_take_time
    house.run(job.job_id)
    assert house.job(job.job_id).status is JobStatus.QUEUED
    house.hints.sent = [sent for sent in house.hints.sent if sent.at >= house.clock.now()]  # the one just sent
    house.work()
    assert house.job(job.job_id).status is JobStatus.COMPLETED


def test_the_loser_of_a_lease_cannot_finish() -> None:
    """A stalls beyond its lease, B takes over and answers; A's answer is discarded but its usage is kept."""
    house = House()
    job = house.accept()

    def stall() -> str:
        house.clock.time += LEASE_MS + 1
        house.run(job.job_id)
        return "late"

    house.provider = ScriptedProvider(stall, "in time")
    house.run(job.job_id)
    row = house.job(job.job_id)
    assert '"in time"' in (row.result.text if row.result else "") or ""  # type: ignore[operator]
    assert [line.outcome for line in row.log] == ["outcome_unknown", "completed", "discarded"]


def test_a_late_answer_is_kept_while_nobody_else_has_claimed_the_job() -> None:
    """The repairer has put the job back, but the paid answer arrives first: it is not paid for again."""
    house = House()
    job = house.accept()

    def stall() -> str:
        house.clock.time += LEASE_MS + 1
        house.repair.run_once()
        assert house.job(job.job_id).status is JobStatus.QUEUED
        return "late"

    house.provider = ScriptedProvider(stall)
    house.run(job.job_id)
    house.settle()
    assert house.job(job.job_id).status is JobStatus.COMPLETED
    assert len(house.provider.questions) == 1


def test_the_lease_is_renewed_while_the_call_runs() -> None:
    """A call much longer than the lease is not taken over."""
    house = House()
    job = house.accept()

    def long() -> None:
        for _ in range(20):
            house.clock.time += RENEW_MS
            house.leases.tick()
            house.run(job.job_id)

    house.provider = ScriptedProvider(long)
    house.run(job.job_id)
    assert len(house.provider.questions) == 1
    assert house.job(job.job_id).attempts == 1


def test_clock_skew_of_seconds_does_no_harm() -> None:
    """Another container's clock, 15 s ahead, finds a lease that is renewed in time still alive."""
    house = House()
    job = house.accept()

    def skewed() -> None:
        house.clock.time += RENEW_MS
        house.leases.tick()
        house.clock.time += RENEW_MS - 1 + 15_000
        house.run(job.job_id)
        house.clock.time -= 15_000

    house.provider = ScriptedProvider(skewed)
    house.run(job.job_id)
    assert len(house.provider.questions) == 1


def test_a_retryable_failure_waits_at_least_what_the_provider_asked() -> None:
    """Backoff comes on top of retry-after, and no earlier hint starts the job."""
    house = House(provider=ScriptedProvider(Overloaded(retry_after_seconds=40), "then"))
    job = house.accept()
    house.work()
    row = house.job(job.job_id)
    assert row.status is JobStatus.QUEUED
    assert row.error is not None
    assert row.error.code == "overloaded"
    assert row.available_at >= house.clock.now() + 40_000
    house.run(job.job_id)
    assert house.job(job.job_id).status is JobStatus.QUEUED
    house.settle()
    assert house.job(job.job_id).status is JobStatus.COMPLETED
    assert house.job(job.job_id).error is None


def test_a_wait_beyond_what_sqs_can_delay_is_a_chain() -> None:
    """retry-after of an hour: hints of at most 900 s each, and no call before the hour is over."""
    house = House(provider=ScriptedProvider(RateLimited(retry_after_seconds=3600), "then"))
    job = house.accept()
    began = house.clock.now()
    house.work()
    house.settle()
    row = house.job(job.job_id)
    assert row.status is JobStatus.COMPLETED
    assert row.log[-1].began_at - began >= 3_600_000
    assert row.attempts == 1, "a call refused for its rate cost nothing"


def test_attempts_end_in_an_honest_failure_and_a_dead_letter() -> None:
    """Three attempts, three calls, then failed with the last error; the letter says why and at which claim."""
    house = House(provider=ScriptedProvider(*[Overloaded() for _ in range(9)]))
    job = house.accept()
    house.settle()
    row = house.job(job.job_id)
    assert row.status is JobStatus.FAILED
    assert row.error is not None
    assert (row.error.code, row.attempts) == ("overloaded", 3)
    assert len(house.provider.questions) == 3  # type: ignore[attr-defined]
    (letter,) = house.dead_letters.letters
    assert (letter.reason, letter.hint) == ("overloaded", Hint(job.job_id, died=row.claims))


@pytest.mark.parametrize(("error", "letters"), [(ProviderRefusedRequest(), 0), (ContextLengthExceeded(), 0)])
def test_prv_08_a_deterministic_error_costs_one_call(error: Exception, letters: int) -> None:
    """And what only the caller can mend wakes no operator."""
    house = House(provider=ScriptedProvider(error))  # type: ignore[arg-type]
    job = house.accept()
    house.settle()
    assert house.job(job.job_id).status is JobStatus.FAILED
    assert len(house.provider.questions) == 1  # type: ignore[attr-defined]
    assert len(house.dead_letters.letters) == letters


def test_a_redrive_runs_a_dead_job_again_once() -> None:
    """The letter starts a new run; its double and a straggler start nothing."""
    house = House(provider=ScriptedProvider(*[Overloaded() for _ in range(3)], "alive"))
    job = house.accept()
    house.settle()
    (letter,) = house.dead_letters.letters
    house.run(Hint(job.job_id))
    assert house.job(job.job_id).status is JobStatus.FAILED
    house.run(letter.hint)
    row = house.job(job.job_id)
    assert (row.status, row.attempts, row.claims) == (JobStatus.COMPLETED, 1, 4)
    house.run(letter.hint)
    assert len(house.provider.questions) == 4  # type: ignore[attr-defined]


def test_a_redrive_of_a_finished_job_does_nothing() -> None:
    """Whatever the letter says."""
    house = House()
    job = house.accept()
    house.work()
    house.run(Hint(job.job_id, died=1))
    assert len(house.provider.questions) == 1  # type: ignore[attr-defined]


def test_an_expired_deadline_is_told_and_costs_no_call() -> None:
    """Its hint arrives late: expired."""
    house = House()
    job = house.accept(deadline_seconds=5)
    house.clock.advance(5)
    house.work()
    row = house.job(job.job_id)
    assert row.status is JobStatus.EXPIRED
    assert row.error is not None
    assert row.error.code == "deadline_passed"
    assert not house.provider.questions  # type: ignore[attr-defined]


def test_retries_end_where_the_deadline_comes_first() -> None:
    """No retry is planned beyond it: the job fails now, with its cause."""
    house = House(provider=ScriptedProvider(Overloaded(retry_after_seconds=100)))
    job = house.accept(deadline_seconds=60)
    house.work()
    row = house.job(job.job_id)
    assert row.status is JobStatus.FAILED
    assert row.error is not None
    assert row.error.code == "overloaded"


def test_a_cancelled_jobs_late_answer_is_discarded_but_its_usage_recorded() -> None:
    """DELETE wins; what the call cost is still true."""
    house = House()
    job = house.accept()
    house.provider = ScriptedProvider(lambda: house.submission.cancel(ALICE, job.job_id))
    house.run(job.job_id)
    row = house.job(job.job_id)
    assert (row.status, row.result) == (JobStatus.CANCELLED, None)
    assert row.usage is not None
    assert row.log[-1].outcome == "discarded"


def test_a_cancelled_call_is_told_to_stop_at_the_next_renewal() -> None:
    """`abandoned` turns true within RENEW_MS."""
    house = House()
    job = house.accept()
    seen: list[bool] = []

    class Listening(ScriptedProvider):
        def ask(
            self,
            question: Question,
            *,
            timeout_seconds: float,
            abandoned: Callable[[], bool],
            background: Background | None = None,
            said: Callable[[str], None] | None = None,
        ) -> Answer:
            seen.append(abandoned())
            house.submission.cancel(ALICE, job.job_id)
            house.clock.time += RENEW_MS
            house.leases.tick()
            seen.append(abandoned())
            return super().ask(question, timeout_seconds=timeout_seconds, abandoned=abandoned)

    house.provider = Listening()
    house.run(job.job_id)
    assert seen == [False, True]


def test_res_05_no_write_recreates_a_removed_row() -> None:
    """The row is deleted while the worker thinks: it stops, stores nothing, sends nothing."""
    house = House()
    house.accept()
    house.provider = ScriptedProvider(house.store.rows.clear)
    house.work()
    assert len(house.provider.questions) == 1
    house.settle()
    assert not house.store.rows
    assert not house.dead_letters.letters


def test_res_02_a_large_answer_is_kept_beside_the_row_and_paid_once() -> None:
    """420 KB in UTF-8 go to the payload store; five redeliveries cost nothing."""
    house = House(provider=ScriptedProvider("中" * 140_000))
    job = house.accept()
    for _ in range(5):
        house.run(job.job_id)
    row = house.job(job.job_id)
    assert row.result is not None
    assert row.result.key in house.payloads.texts
    assert len(house.provider.questions) == 1  # type: ignore[attr-defined]


def test_a_paid_answer_survives_a_store_that_fails_for_a_moment() -> None:
    """The finishing write is tried again rather than the job run again."""
    house = House()
    job = house.accept()
    update, failures = house.store.update, 2

    def failing(job_id: str, guard: object, **patch: object) -> Job:
        nonlocal failures
        if patch.get("status") is JobStatus.COMPLETED and failures:
            failures -= 1
            raise PortUnavailable("throttled")
        return update(job_id, guard, **patch)  # type: ignore[no-any-return]

    house.store.update = failing
    house.run(job.job_id)
    assert house.job(job.job_id).status is JobStatus.COMPLETED
    assert len(house.provider.questions) == 1  # type: ignore[attr-defined]


def test_an_unknown_job_becomes_a_dead_letter_with_its_reason() -> None:
    """An operator sees it; it does not come back."""
    house = House()
    house.run("job_nobody")
    (letter,) = house.dead_letters.letters
    assert letter.reason == "unknown_job"


def test_a_job_is_left_to_the_next_invocation_when_time_is_short() -> None:
    """No claim, no attempt, no call: a new hint."""
    house = House()
    job = house.accept()
    house.hints.sent.clear()
    house.run(job.job_id, seconds_left=12)
    assert house.job(job.job_id).attempts == 0
    assert [sent.hint.job_id for sent in house.hints.sent] == [job.job_id]


def test_sigterm_hands_the_job_back() -> None:
    """The job is queued again with its reason, and the stopped worker's answer no longer counts."""
    house = House()
    job = house.accept()
    house.provider = ScriptedProvider(house.execution.stop)
    house.run(job.job_id)
    row = house.job(job.job_id)
    assert row.log[0].outcome == Interrupted.code
    house.settle()
    assert house.job(job.job_id).status is JobStatus.COMPLETED


def test_a_fault_of_ours_is_an_attempt_with_an_honest_code() -> None:
    """An unforeseen exception neither leaves the job to its lease nor runs it for ever."""

    def broken() -> str:
        raise ZeroDivisionError

    house = House(provider=ScriptedProvider(broken, broken, broken, broken))
    job = house.accept()
    house.settle()
    row = house.job(job.job_id)
    assert row.error is not None
    assert (row.error.code, row.attempts) == ("internal_error", 3)


def test_ten_jobs_of_a_batch_run_at_once() -> None:
    """All ten are inside the provider together, so their waits share one bill."""
    house = House()
    jobs = [house.accept() for _ in range(10)]
    together = threading.Barrier(10, timeout=10)
    house.provider = ScriptedProvider(*[together.wait for _ in jobs])
    failed = house.execution.run_batch({f"m-{i}": Hint(job.job_id) for i, job in enumerate(jobs)}, lambda: 300.0)
    assert failed == []
    assert {house.job(job.job_id).status for job in jobs} == {JobStatus.COMPLETED}


def test_sqs_05_only_what_could_not_be_decided_comes_back() -> None:
    """A sibling whose row cannot be reached does not take the others along."""
    house = House()
    good, bad = house.accept(), house.accept()
    update = house.store.update

    def failing(job_id: str, guard: object, **patch: object) -> Job:
        if job_id == bad.job_id:
            raise PortUnavailable("throttled")
        return update(job_id, guard, **patch)  # type: ignore[no-any-return]

    house.store.update = failing
    hints = {"m-1": Hint(good.job_id), "m-2": Hint(bad.job_id), "m-3": Hint("job_nobody")}
    assert house.execution.run_batch(hints, lambda: 300.0) == ["m-2"]
    assert house.job(good.job_id).status is JobStatus.COMPLETED


def test_a_job_that_lost_a_worker_runs_after_its_siblings_and_by_itself() -> None:
    """So that it cannot take them along."""
    house = House()
    jobs = [house.accept(prompt=f"p{i}") for i in range(3)]
    order: list[str] = []
    house.provider = ScriptedProvider(*[lambda: order.append("called") for _ in jobs])
    hints = {"m-0": Hint(jobs[0].job_id, alone=True), "m-1": Hint(jobs[1].job_id), "m-2": Hint(jobs[2].job_id)}
    assert house.execution.run_batch(hints, lambda: 300.0) == []
    assert house.provider.questions[-1].messages[0].content == "p0"


def test_a_rejected_message_is_visible_to_an_operator() -> None:
    """What is no hint goes to the dead letters with its reason, at once."""
    house = House()
    house.execution.reject("{not json", Lane.STANDARD)
    (letter,) = house.dead_letters.letters
    assert (letter.reason, letter.body) == ("malformed_hint", "{not json")


def test_an_own_claim_whose_reply_was_lost_is_recognised() -> None:
    """The store took the claim; the retried write fails its condition on one's own row."""
    house = House()
    job = house.accept()
    update = house.store.update

    def twice(job_id: str, guard: object, **patch: object) -> Job:
        if patch.get("add_claims"):
            update(job_id, guard, **patch)
        return update(job_id, guard, **patch)  # type: ignore[no-any-return]

    house.store.update = twice
    house.run(job.job_id)
    assert house.job(job.job_id).status is JobStatus.COMPLETED
    assert house.job(job.job_id).claims == 1


def test_a_row_of_an_expired_job_is_not_run() -> None:
    """Retention is over: the hint is dropped."""
    house = House()
    job = house.accept()
    house.store.rows[job.job_id] = replace(job, expires_at=house.clock.now() // 1000)
    house.work()
    assert not house.provider.questions  # type: ignore[attr-defined]


def test_the_pieces_of_an_answer_go_to_whoever_listens() -> None:
    """And nobody is asked to pass on what nobody wants."""
    house = House(provider=ScriptedProvider("one", "two"))
    heard: list[tuple[str, str]] = []

    class Listener:
        def __init__(self, job_id: str) -> None:
            self.job_id = job_id

        def say(self, piece: str) -> None:
            heard.append((self.job_id, piece))

        def seen(self, row: Job) -> None:
            raise AssertionError(row)

    class Listeners:
        @contextmanager
        def listening(self, job: Job) -> Iterator[Audience | None]:
            yield Listener(job.job_id) if job.job_id == first.job_id else None

    first, _second = house.accept(), house.accept()
    house.execution = replace(house.execution, deltas=Listeners())
    house.work()
    assert heard == [(first.job_id, "one")]


def test_a_target_that_is_told_here_gets_no_message_whatever_the_end() -> None:
    """Told by the row as it ended, after the messages of the others. Not of a retry, nor of an answer that is late."""
    told: list[tuple[Job, Notice, int]] = []
    provider = ScriptedProvider("yes", ProviderRefusedRequest(), Overloaded())
    house = House(provider=provider)

    def tell(row: Job, notice: Notice) -> None:
        told.append((row, notice, len(house.notices.sent)))

    lifecycle = replace(house.lifecycle, told_here={WEBSOCKET: tell})
    house.execution = replace(house.execution, lifecycle=lifecycle)
    webhook = {"url": "https://receiver.example/", "secret": "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="}
    jobs = [house.accept(stream=True, webhook=webhook) for _ in range(3)]
    house.work()
    assert [(row.job_id, row.status, notice.target, sent) for row, notice, sent in told] == [
        (jobs[0].job_id, JobStatus.COMPLETED, WEBSOCKET, 1),
        (jobs[1].job_id, JobStatus.FAILED, WEBSOCKET, 2),
    ]
    assert {telling.target for _, telling in house.notices.sent} == {WEBHOOK}
    assert [row for row, _, _ in told] == [house.job(job.job_id) for job in jobs[:2]]
    late = house.accept(stream=True)
    provider.script.append(lambda: house.submission.cancel(ALICE, late.job_id))
    house.run(late.job_id)
    assert house.job(late.job_id).log[-1].outcome == "discarded"
    assert len(told) == 2
