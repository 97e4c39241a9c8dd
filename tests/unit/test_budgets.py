"""Client limits: what is charged at accept, what is settled at the end, and what a client is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from backburner.budgets import day_of, quotas, worst_case
from backburner.errors import (
    Authentication,
    BackburnerError,
    BudgetUsedUp,
    Busy,
    IdempotencyConflict,
    OverBudget,
    PortUnavailable,
    RateLimited,
    Refusal,
    TooManyRequests,
    Unavailable,
)
from backburner.models import (
    BUDGET,
    Attempt,
    Charge,
    Client,
    ClientLimits,
    Hint,
    Job,
    JobRequest,
    JobStatus,
    Lane,
    NoticeStatus,
    Quota,
    Tally,
    Usage,
)
from backburner.ports import Moved
from backburner.pricing import cost_micro_usd
from tests.fakes.house import ALICE, House
from tests.fakes.memory import MODEL, START, FakeClock, MemoryStore, MemoryTallies, ScriptedProvider

DAY = "2027-01-15"
MIDNIGHT_SECONDS = 57_600
"""From START to the end of its day: it begins at eight in the morning."""
CHARGE = Charge(DAY, 13 + 1_024, 10_273)
"""Of "Name a river.": five tokens of text, eight of a turn, and the deployment's longest answer, at MODEL's prices.

Thirteen tokens written to the cache cost 32.5 micro-dollars, 1,024 of output 10,240; together, rounded up.
"""


def limited(**limits: int) -> Client:
    return replace(ALICE, limits=ClientLimits(**limits))


def held(house: House) -> tuple[int, int]:
    """What the jobs of the tally's day hold together."""
    tally = house.tallies.rows["alice"]
    charges = [row.charge for row in house.store.rows.values() if row.charge and row.charge.day == tally.day]
    return sum(charge.tokens for charge in charges), sum(charge.micro_usd for charge in charges)


def counted(house: House) -> tuple[int, int]:
    tally = house.tallies.rows["alice"]
    return tally.tokens, tally.micro_usd


# ── The worst case ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "input_tokens"),
    [
        ({"prompt": "Name a river."}, 5 + 8),
        ({"prompt": "Name a river.", "system_prompt": "Be brief."}, 8 + 16),
        ({"prompt": "中" * 30}, 30 + 8),
        ({"messages": [{"role": "user", "content": "a" * 300}] * 3}, 300 + 24),
        (
            {"prompt": "a", "response_format": {"type": "json_schema", "name": "n", "json_schema": {"a": "b" * 289}}},
            116,
        ),
    ],
    ids=["text", "system", "chinese", "turns", "shape"],
)
def test_input_is_estimated_from_its_bytes(fields: dict[str, Any], input_tokens: int) -> None:
    """All that the model reads counts: three bytes a token, and eight tokens for each text."""
    charge = worst_case(JobRequest.model_validate(fields), [MODEL], 100, cost_micro_usd)
    assert charge.tokens == input_tokens + 100


def test_the_dearest_model_and_the_dearest_kind_of_input_are_charged() -> None:
    """Whichever may come to serve the job, within what each can write."""
    request = JobRequest(prompt="a" * 2_976)  # a thousand tokens
    cheap = replace(MODEL, name="cheap", input_price=10, output_price=10, output_tokens_max=9_000)
    assert worst_case(request, [MODEL], 5_000, cost_micro_usd) == Charge("", 1_000 + 4_000, 2_500 + 40_000)
    assert worst_case(request, [cheap, MODEL], 5_000, cost_micro_usd) == Charge("", 1_000 + 5_000, 42_500)
    flat = replace(MODEL, cache_write_price=0)
    assert worst_case(request, [flat], 100, cost_micro_usd).micro_usd == 2_000 + 1_000


def test_a_job_is_charged_with_the_deployments_defaults() -> None:
    """Its longest answer and its fallback models, where the request names none."""
    house = House()
    job = house.accept(client=limited(tokens_per_day=10_000))
    assert job.charge == house.job(job.job_id).charge == CHARGE
    dear = replace(MODEL, name="dear", output_price=MODEL.output_price * 10)
    house.catalogue._models["dear"] = dear
    house.submission = replace(house.submission, fallback_models=("dear",))
    assert house.accept(client=limited(tokens_per_day=10_000)).charge == Charge(DAY, 1_037, 102_433)
    assert house.accept(client=limited(tokens_per_day=10_000), fallback_models=[]).charge == job.charge


def test_a_client_without_limits_costs_nothing_more() -> None:
    """No tally is read, no row grows, nothing is left to settle."""
    house = House(tallies=Unreachable())
    job = house.accept()
    house.settle()
    assert (job.charge, house.job(job.job_id).outbox) == (None, ())


class Unreachable:
    """A port that nobody may call."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was not to be called")


# ── Accepting ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_are_counted_by_the_minute_of_the_clock() -> None:
    """As many as allowed; the next one learns when the minute ends; then they begin anew."""
    house = House()
    house.clock.advance(15)
    client = limited(requests_per_minute=3)
    for _ in range(3):
        house.accept(client=client)
    with pytest.raises(TooManyRequests) as refused:
        house.accept(client=client)
    assert refused.value.retry_after_seconds == 45
    assert [quota.remaining for quota in refused.value.quotas] == [0]
    house.clock.advance(45)
    house.accept(client=client)
    assert house.tallies.rows["alice"].requests == 1
    assert len(house.store.rows) == len(house.hints.sent) == 4


def test_a_client_with_requests_limited_only_has_nothing_to_settle() -> None:
    """Its jobs are counted, not charged."""
    house = House()
    job = house.accept(client=limited(requests_per_minute=3))
    house.settle()
    assert (job.charge, house.job(job.job_id).outbox) == (None, ())


@pytest.mark.parametrize("limits", [{"tokens_per_day": 2 * 1_037}, {"micro_usd_per_day": 2 * 10_273}], ids=str)
def test_a_budget_is_used_up_to_its_end_and_whole_again_at_midnight(limits: dict[str, int]) -> None:
    """To the last token, or micro-dollar."""
    house = House()
    client = limited(**limits)
    house.accept(client=client)
    house.accept(client=client)
    with pytest.raises(BudgetUsedUp) as refused:
        house.accept(client=client)
    assert refused.value.retry_after_seconds == MIDNIGHT_SECONDS
    house.clock.advance(MIDNIGHT_SECONDS - 1)
    with pytest.raises(BudgetUsedUp) as refused:
        house.accept(client=client)
    assert refused.value.retry_after_seconds == 1
    assert len(house.store.rows) == 2
    house.clock.advance(1)
    assert house.accept(client=client).charge == Charge("2027-01-16", 1_037, 10_273)
    assert counted(house) == (1_037, 10_273)


@pytest.mark.parametrize("limits", [{"tokens_per_day": 1_036}, {"micro_usd_per_day": 10_272}], ids=str)
def test_a_request_larger_than_the_whole_budget_is_refused_as_such(limits: dict[str, int]) -> None:
    """Coming back tomorrow would not help, so nobody is told to. Nothing is stored."""
    house = House()
    with pytest.raises(OverBudget, match=r"may use .* your whole daily budget is") as refused:
        house.accept(client=limited(**limits), prompt="Name a river.")
    assert refused.value.http_status == 422
    assert refused.value.retry_after_seconds is None
    assert not house.store.rows
    assert not house.tallies.rows


def test_a_large_request_that_is_refused_leaves_nothing_behind() -> None:
    """Its text is not stored either."""
    house = House()
    with pytest.raises(OverBudget):
        house.accept(client=limited(tokens_per_day=1_000), prompt="a" * 200_000)
    assert not house.payloads.texts


def test_the_refusal_names_what_is_asked_and_what_is_left() -> None:
    """In the client's own units."""
    house = House()
    client = limited(tokens_per_day=2_000, micro_usd_per_day=15_000)
    house.accept(client=client)
    with pytest.raises(BudgetUsedUp, match=r"may use 1,037 tokens; of your daily budget 963 tokens are left"):
        house.accept(client=client)
    client = limited(micro_usd_per_day=15_000)
    with pytest.raises(BudgetUsedUp, match=r"may use \$0.010273; of your daily budget \$0.004727 are left"):
        house.accept(client=client)


def test_replays_are_answered_when_everything_is_used_up_and_take_nothing() -> None:
    """Once accepted is accepted; another request under the key is still a conflict."""
    house = House()
    client = limited(requests_per_minute=1, tokens_per_day=1_037)
    first = house.accept("k", client=client)
    before = house.tallies.rows["alice"]
    for _ in range(3):
        replay = house.submission.accept(client, JobRequest(prompt="Name a river."), "k")
        assert (replay.replayed, replay.job) == (True, first)
        assert [quota.remaining for quota in replay.quotas] == [0, 0]
    with pytest.raises(IdempotencyConflict):
        house.accept("k", client=client, prompt="Name a lake.")
    poorer = limited(tokens_per_day=1)
    assert house.submission.accept(poorer, JobRequest(prompt="Name a river."), "k").replayed
    assert house.tallies.rows["alice"] == before


def test_a_replay_below_the_limits_takes_nothing_either() -> None:
    """The transaction that finds the row counts nothing."""
    house = House()
    client = limited(requests_per_minute=10, tokens_per_day=10_000)
    house.accept("k", client=client)
    before = house.tallies.rows["alice"]
    replay = house.submission.accept(client, JobRequest(prompt="Name a river."), "k")
    assert replay.replayed
    assert house.tallies.rows["alice"] == before
    assert [quota.remaining for quota in replay.quotas] == [9, 10_000 - 1_037]


def test_where_the_client_stands_is_told_with_every_answer() -> None:
    """Limit by limit, with what is left and until when."""
    house = House()
    client = limited(requests_per_minute=5, tokens_per_day=5_000, micro_usd_per_day=1_000_000)
    accepted = house.submission.accept(client, JobRequest(prompt="Name a river."))
    assert accepted.quotas == (
        Quota("requests", "requests", 5, 60, 4, 60),
        Quota("tokens", "tokens", 5_000, 86_400, 5_000 - 1_037, MIDNIGHT_SECONDS),
        Quota("cost", "micro-usd", 1_000_000, 86_400, 1_000_000 - 10_273, MIDNIGHT_SECONDS),
    )


def test_nothing_that_is_past_counts_and_nothing_is_below_zero() -> None:
    """A minute and a day that are over leave everything; a lowered limit leaves nothing."""
    limits = ClientLimits(requests_per_minute=5, tokens_per_day=100)
    old = Tally(START // 60_000, 3, DAY, tokens=70)
    assert [quota.remaining for quota in quotas(limits, old, START)] == [2, 30]
    assert [quota.remaining for quota in quotas(limits, old, START + 60_000)] == [5, 30]
    assert [quota.remaining for quota in quotas(limits, old, START + 86_400_000)] == [5, 100]
    assert [quota.remaining for quota in quotas(limits, None, START)] == [5, 100]
    assert [quota.remaining for quota in quotas(ClientLimits(1, 1), old, START)] == [0, 0]


def test_a_clock_that_is_behind_does_not_open_the_last_day_again() -> None:
    """Two functions' clocks differ at midnight: the row's day is the later one, and stays."""
    house = House()
    client = limited(requests_per_minute=2, tokens_per_day=2_100)
    house.clock.advance(MIDNIGHT_SECONDS)
    house.accept(client=client)
    house.clock.advance(-5)
    assert house.accept(client=client).charge == Charge("2027-01-16", 1_037, 10_273)
    assert counted(house) == held(house)
    with pytest.raises(TooManyRequests):
        house.accept(client=limited(requests_per_minute=2))
    with pytest.raises(BudgetUsedUp):
        house.accept(client=limited(tokens_per_day=2_100))


class Contended(MemoryTallies):
    """Others are always, or for a while, at the same row."""

    def __init__(self, store: MemoryStore, *errors: Exception | None) -> None:
        super().__init__(store)
        self.errors = list(errors)
        self.tries = 0

    def _meet(self) -> None:
        self.tries += 1
        if self.errors:
            error = self.errors[0] if len(self.errors) == 1 else self.errors.pop(0)
            if error is not None:
                raise error

    def admit(self, *args: Any) -> Job | None:
        self._meet()
        return super().admit(*args)

    def settle(self, *args: Any) -> None:
        self._meet()
        super().settle(*args)


def test_a_request_tries_for_a_second_and_then_gives_up() -> None:
    """503: nothing was stored, and the same request may be sent again."""
    store = MemoryStore()
    tallies = Contended(store, Busy())
    house = House(store=store, tallies=tallies)
    with pytest.raises(Unavailable):
        house.accept(client=limited(tokens_per_day=10_000))
    assert not store.rows
    assert 1_000 <= house.clock.now() - START <= 1_100
    assert 5 <= tallies.tries <= 30


def test_a_request_that_only_meets_others_is_accepted() -> None:
    """A few refused writes are no refusal."""
    store = MemoryStore()
    met: list[Any] = [Busy(), Moved(None), Busy(), None]
    house = House(store=store, tallies=Contended(store, *met))
    assert house.accept(client=limited(tokens_per_day=10_000)).charge is not None


@pytest.mark.parametrize("limits", [{"tokens_per_day": 10_370}, {"micro_usd_per_day": 102_730}], ids=str)
def test_four_fifths_of_a_budget_are_told_of_once_a_day(limits: dict[str, int]) -> None:
    """And each request that is refused for it."""
    house = House()
    client = limited(**limits)
    for number in range(10):
        assert len(house.journal.named("budget_nearly_used")) == (number > 7)
        house.accept(client=client)
    assert house.journal.named("budget_nearly_used") == [{"client_id": "alice", "percent": 80}]
    for _ in range(2):
        with pytest.raises(BudgetUsedUp):
            house.accept(client=client)
    assert [noted["code"] for noted in house.journal.named("job_refused")] == ["budget_used_up"] * 2
    house.clock.advance(MIDNIGHT_SECONDS)
    for _ in range(10):
        house.accept(client=client)
    assert len(house.journal.named("budget_nearly_used")) == 2


# ── Settling ─────────────────────────────────────────────────────────────────────────────────────────────────────────

SPENT = (15, 70)
"""What ScriptedProvider's answer uses: 10 tokens in, 5 out, at MODEL's prices."""


def test_what_a_job_did_not_use_is_given_back_when_it_ends() -> None:
    """The tally holds what it cost, its row says so, and nobody need look at it again. It is no delivery."""
    house = House()
    job = house.accept(client=limited(tokens_per_day=1_037))
    assert counted(house) == (1_037, 10_273)
    house.work()
    assert counted(house) == SPENT
    row = house.job(job.job_id)
    assert row.charge == Charge(DAY, *SPENT)
    assert [(notice.target, notice.status) for notice in row.outbox] == [(BUDGET, NoticeStatus.DELIVERED)]
    assert (row.status, row.due_at) == (JobStatus.COMPLETED, None)
    assert house.notices.sent == []
    with pytest.raises(BudgetUsedUp):
        house.accept(client=limited(tokens_per_day=1_037))


def test_all_attempts_of_a_job_are_settled() -> None:
    """The receipt's sum, whatever became of each."""
    usage = Usage(input_tokens=100, output_tokens=50)
    house = House(provider=ScriptedProvider(RateLimited(usage=usage), "an answer"))
    house.accept(client=limited(tokens_per_day=10_000))
    house.settle()
    assert counted(house) == (150 + 15, 700 + 70)


def test_a_job_that_used_more_than_was_charged_is_settled_with_that() -> None:
    """The estimate was too low; the budget may be overdrawn by that much."""
    house = House(provider=ScriptedProvider(RateLimited(usage=Usage(3_000, 2_000)), "an answer"))
    client = limited(tokens_per_day=1_100)
    house.accept(client=client)
    house.settle()
    assert counted(house)[0] == 5_015
    with pytest.raises(BudgetUsedUp, match="0 tokens are left"):
        house.accept(client=client)


def _cancelled(house: House, job: Job) -> None:
    house.submission.cancel(ALICE, job.job_id)


def _expired(house: House, job: Job) -> None:
    house.hints.sent.clear()
    house.clock.advance(job.deadline_seconds)
    house.repair.run_once()


def _failed(house: House, _job: Job) -> None:
    house.provider.script.append(Authentication())  # type: ignore[attr-defined]
    house.work()


@pytest.mark.parametrize("end", [_cancelled, _expired, _failed])
def test_a_job_that_came_to_nothing_gives_everything_back(end: Callable[[House, Job], None]) -> None:
    """Cancelled, expired or failed: what no provider billed is free again."""
    house = House()
    job = house.accept(client=limited(tokens_per_day=1_037), deadline_seconds=60)
    end(house, job)
    assert house.job(job.job_id).status.is_final
    assert counted(house) == (0, 0)
    assert house.accept(client=limited(tokens_per_day=1_037)).charge is not None


@pytest.mark.parametrize("trouble", [PortUnavailable(), Busy()], ids=["unavailable", "busy"])
def test_a_settlement_that_failed_is_made_by_the_repairer_once(trouble: Exception) -> None:
    """The notice stays pending and the row due; telling the client is not held up."""
    store = MemoryStore()
    tallies = Contended(store, None, *[trouble] * 5, None)
    house = House(store=store, tallies=tallies)
    job = house.accept(client=limited(tokens_per_day=10_000))
    store.rows[job.job_id] = replace(job, targets=("webhook",))
    house.work()
    assert counted(house) == (1_037, 10_273)
    assert len(house.notices.sent) == 1
    house.settle()
    assert counted(house) == SPENT == held(house)
    assert house.job(job.job_id).due_at is None


def test_the_settlement_of_another_day_touches_no_tally() -> None:
    """It ends with its notice: a job counts on the day on which it was accepted."""
    house = House()
    client = limited(tokens_per_day=10_000)
    old = house.accept(client=client)
    house.clock.advance(MIDNIGHT_SECONDS)
    new = house.accept(client=client)
    house.run(old.job_id)
    assert counted(house) == (1_037, 10_273)
    assert house.job(old.job_id).due_at is None
    house.run(new.job_id)
    assert counted(house) == SPENT


def test_a_tally_that_was_reset_by_hand_does_not_fall_below_zero() -> None:
    """The notice is marked, and the tally left as it was."""
    house = House()
    job = house.accept(client=limited(tokens_per_day=10_000))
    house.tallies.rows["alice"] = replace(house.tallies.rows["alice"], tokens=3)
    house.work()
    assert house.tallies.rows["alice"].tokens == 3
    assert house.job(job.job_id).due_at is None


@pytest.mark.parametrize("settled", [True, False], ids=["settled", "unsettled"])
@pytest.mark.parametrize("days", [0, 1])
def test_a_redriven_job_adds_what_its_new_run_costs(settled: bool, days: int) -> None:
    """Nothing is charged anew when it is revived, and nothing of its first run is counted twice, settled or not."""
    store = MemoryStore()
    tallies = Contended(store)
    house = House(store=store, tallies=tallies, provider=ScriptedProvider(Authentication(usage=Usage(100, 50))))
    client = limited(tokens_per_day=10_000)
    job = house.accept(client=client)
    if not settled:
        tallies.errors = [PortUnavailable()]
    house.work()
    tallies.errors = []
    dead = house.job(job.job_id)
    assert dead.status is JobStatus.FAILED
    assert counted(house)[0] == (150 if settled else 1_037)
    house.clock.advance(days * 86_400)
    before = (150, 700)
    if days:
        house.accept(client=client)
        before = counted(house)
    house.run(Hint(job.job_id, died=dead.claims))
    assert house.job(job.job_id).status is JobStatus.COMPLETED
    assert counted(house) == (before[0] + 15, before[1] + 70)
    house.repair.run_once()
    assert house.job(job.job_id).outbox[-1].status is NoticeStatus.DELIVERED


def test_an_answer_that_came_after_the_settlement_is_settled_too() -> None:
    """Its cost goes into the receipt, and the tally follows."""
    house = House()
    client = limited(tokens_per_day=10_000)

    def cancelled_meanwhile() -> None:
        house.submission.cancel(ALICE, job.job_id)
        assert counted(house) == (0, 0)

    house.provider = ScriptedProvider(cancelled_meanwhile)
    job = house.accept(client=client)
    house.work()
    assert [line.outcome for line in house.job(job.job_id).log] == ["discarded"]
    house.repair.run_once()
    assert counted(house) == SPENT == held(house)
    assert house.job(job.job_id).due_at is None


def test_a_cost_that_comes_while_a_charge_is_settled_is_not_lost() -> None:
    """Whoever settles by the receipt without it is turned away, and reads again."""

    class Interrupted(MemoryTallies):
        late = True

        def settle(self, *args: Any) -> None:
            if self.late:
                self.late = False
                house.lifecycle.record_discarded(house.job(job.job_id), line)
            super().settle(*args)

    store = MemoryStore()
    house = House(store=store, tallies=Interrupted(store))
    job = house.accept(client=limited(tokens_per_day=10_000))
    line = Attempt(1, "discarded", START, START, usage=Usage(100, 50), cost_micro_usd=700)
    house.work()
    assert counted(house) == (SPENT[0] + 150, SPENT[1] + 700) == held(house)
    house.repair.run_once()
    assert house.job(job.job_id).due_at is None


# ── Any order of things ──────────────────────────────────────────────────────────────────────────────────────────────


class Behind(MemoryTallies):
    """Tallies that are read as they were some writes ago: the worst that concurrency can do to a reader."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.past: list[dict[str, Tally]] = [{}]
        self.lag = 0

    def read(self, client_id: str) -> Tally | None:
        return self.past[max(0, len(self.past) - 1 - self.lag)].get(client_id)

    def admit(self, *args: Any) -> Job | None:
        standing = super().admit(*args)
        self.past.append(dict(self.rows))
        return standing

    def settle(self, *args: Any) -> None:
        super().settle(*args)
        self.past.append(dict(self.rows))


class AnyOrder(RuleBasedStateMachine):
    """Accepts, ends, troubles, redrives and midnights in any order: the tally is the sum of what the jobs hold."""

    accepted = Bundle("jobs")

    @initialize()
    def open(self) -> None:
        store = MemoryStore()
        self.tallies = Behind(store)
        self.house = House(store=store, tallies=self.tallies, clock=FakeClock(START + 57_000_000))
        self.client = limited(requests_per_minute=30, tokens_per_day=5_000, micro_usd_per_day=40_000)
        self.day = ""

    @rule(
        target=accepted,
        size=st.integers(1, 4_000),
        key=st.none() | st.sampled_from("abc"),
        lag=st.integers(0, 5),
    )
    def accept(self, size: int, key: str | None, lag: int) -> str | None:
        self.tallies.lag = lag
        before = self.tallies.rows.get("alice")
        request = JobRequest(prompt=f"{key} {size}", max_tokens=size)
        try:
            accepted = self.house.submission.accept(self.client, request, key)
        except Refusal:
            assert self.tallies.rows.get("alice") == before
            return None
        if not accepted.replayed:
            self._within_the_limits()
        return accepted.job.job_id

    def _within_the_limits(self) -> None:
        tally, limits = self.tallies.rows["alice"], self.client.limits
        assert limits is not None
        assert tally.requests <= (limits.requests_per_minute or 0)
        assert tally.tokens <= (limits.tokens_per_day or 0)
        assert tally.micro_usd <= (limits.micro_usd_per_day or 0)

    @rule(job_id=accepted)
    def cancel(self, job_id: str | None) -> None:
        if job_id is not None:
            try:
                self.house.submission.cancel(self.client, job_id)
            except BackburnerError:
                return

    @rule(job_id=accepted, dies=st.booleans(), cancelled=st.booleans())
    def work(self, job_id: str | None, dies: bool, cancelled: bool) -> None:
        if job_id is not None:
            died = self.house.job(job_id).claims
            usage = Usage(300, 200)
            step: Any = Authentication(usage=usage) if dies else (lambda: self.cancel(job_id) if cancelled else None)
            self.house.provider = ScriptedProvider(step)
            self.house.run(Hint(job_id, died=died))

    @rule(seconds=st.sampled_from([1, 30, 400, 3_600]))
    def wait(self, seconds: int) -> None:
        self.house.clock.advance(seconds)

    @rule()
    def repair(self) -> None:
        self.house.repair.run_once()

    @invariant()
    def the_tally_is_the_sum_of_what_the_jobs_hold(self) -> None:
        tally = self.tallies.rows.get("alice")
        if tally is not None and tally.day >= day_of(self.house.clock.now()):  # else it is history
            assert counted(self.house) == held(self.house)
            assert tally.day >= self.day
            self.day = tally.day

    @invariant()
    def what_is_settled_is_what_was_spent(self) -> None:
        tally = self.tallies.rows.get("alice")
        for row in self.house.store.rows.values():
            if tally is None or row.charge is None or row.charge.day != tally.day:
                continue
            redriven_before_the_days_first_job = row.charge.day != day_of(row.created_at) and not row.charge.tokens
            if row.status.is_final and not row.pending and not redriven_before_the_days_first_job:
                assert row.charge == row.spent


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_days_are_utcs() -> None:
    """Whatever the machine's zone."""
    assert [day_of(START + ms) for ms in (0, MIDNIGHT_SECONDS * 1000 - 1, MIDNIGHT_SECONDS * 1000)] == [
        DAY,
        DAY,
        "2027-01-16",
    ]


def test_lanes_share_their_clients_budget() -> None:
    """It is the client's, not the lane's."""
    house = House()
    client = limited(tokens_per_day=2 * 1_037)
    house.accept(client=client, priority=Lane.BULK)
    house.accept(client=client, priority=Lane.INTERACTIVE)
    with pytest.raises(BudgetUsedUp):
        house.accept(client=client)
