"""What every store of clients' tallies keeps, in memory and on DynamoDB: one step with the job's row, or none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

from backburner.adapters.aws import client as aws_client
from backburner.adapters.dynamodb import JobsTable
from backburner.adapters.tallies import TalliesTable
from backburner.budgets import Budgets
from backburner.errors import BudgetUsedUp, Busy, PortUnavailable
from backburner.models import Charge, ClientLimits, Job, JobStatus, Tally
from backburner.ports import Conflict, Guard, JobStore, Moved, Tallies
from tests.fakes.memory import START, FakeChance, FakeClock, MemoryJournal, MemoryStore, MemoryTallies
from tests.integration.deployed import Deployed
from tests.integration.jobs import NOW, a_job
from tests.integration.test_job_store_contract import MANY

DAY = "2027-01-15"
LIMITS = ClientLimits(requests_per_minute=10, tokens_per_day=150, micro_usd_per_day=2_000_000)
FIRST = Tally(minute=7, requests=1, day=DAY, tokens=90, micro_usd=700_000)
GUARD = Guard(frozenset(JobStatus))


@dataclass(frozen=True)
class Books:
    """Tallies and jobs, and the hand that removes a row of either."""

    tallies: Tallies
    jobs: JobStore
    forget: Callable[[], None]


def _memory() -> Books:
    store = MemoryStore()
    tallies = MemoryTallies(store)

    def forget() -> None:
        store.rows.clear()
        tallies.rows.clear()

    return Books(tallies, store, forget)


def _tables(deployed: Deployed) -> Books:
    client = aws_client("dynamodb", connect_seconds=1, read_seconds=5, tries=1)
    jobs, limits = deployed.names["JobsTable"], deployed.names["LimitsTable"]

    def forget() -> None:
        client.delete_item(TableName=jobs, Key={"job_id": {"S": "job_1"}})
        client.delete_item(TableName=limits, Key={"limit_id": {"S": "client#alice"}})

    return Books(TalliesTable(client, limits, jobs), JobsTable(client, jobs), forget)


@pytest.fixture(params=["memory", "dynamodb"])
def books(request: pytest.FixtureRequest) -> Books:
    """Either store."""
    return _memory() if request.param == "memory" else _tables(request.getfixturevalue("deployed"))


def a_charged_job(number: int = 1, tokens: int = 90, micro_usd: int = 700_000, day: str = DAY) -> Job:
    return a_job(job_id=f"job_{number}", owner=f"o{number}", charge=Charge(day, tokens, micro_usd))


def one_more(tally: Tally, job: Job, **changes: Any) -> Tally:
    """The tally with this job in it."""
    assert job.charge is not None
    more = {"requests": tally.requests + 1, "tokens": tally.tokens + job.charge.tokens,
            "micro_usd": tally.micro_usd + job.charge.micro_usd}  # fmt: skip
    return replace(tally, **(more | changes))


# ── Admitting ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_is_stored_and_counted_in_one_step(books: Books) -> None:
    """The first of a client, too, of whom there is no row yet."""
    assert books.tallies.read("alice") is None
    job = a_charged_job()
    assert books.tallies.admit(job, NOW, None, FIRST, LIMITS) is None
    assert books.tallies.read("alice") == FIRST
    assert books.jobs.get("job_1") == job
    small = a_charged_job(2, 10, 5)
    second = one_more(FIRST, small)
    assert books.tallies.admit(small, NOW, FIRST, second, LIMITS) is None
    assert books.tallies.read("alice") == second


def test_a_job_that_stands_there_is_returned_and_nothing_is_counted(books: Books) -> None:
    """Whatever the tally: a replay is a replay."""
    books.tallies.admit(a_charged_job(), NOW, None, FIRST, LIMITS)
    again = replace(a_charged_job(), owner="o2")
    for before in (FIRST, None, replace(FIRST, day="2027-01-14")):
        assert books.tallies.admit(again, NOW, before, FIRST, LIMITS) == a_charged_job()
    assert books.tallies.read("alice") == FIRST


def test_an_expired_job_is_replaced(books: Books) -> None:
    """As JobStore.add does."""
    books.jobs.add(a_job(expires_at=NOW // 1000), 0)
    assert books.tallies.admit(a_charged_job(), NOW, None, FIRST, LIMITS) is None
    assert books.jobs.get("job_1") == a_charged_job()


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        (LIMITS, True),
        (ClientLimits(), True),
        (replace(LIMITS, requests_per_minute=3), True),
        (replace(LIMITS, requests_per_minute=2), False),
        (replace(LIMITS, tokens_per_day=110), True),
        (replace(LIMITS, tokens_per_day=109), False),
        (replace(LIMITS, micro_usd_per_day=700_010), True),
        (replace(LIMITS, micro_usd_per_day=700_009), False),
    ],
    ids=str,
)
def test_what_came_in_between_is_counted_against_the_limits(books: Books, limits: ClientLimits, fits: bool) -> None:
    """The step is added to what stands there now, if that does not exceed a limit; else nothing is stored."""
    books.tallies.admit(a_charged_job(), NOW, None, FIRST, LIMITS)
    between, late = a_charged_job(2, 10, 5), a_charged_job(3, 10, 5)
    now_there = one_more(FIRST, between)
    books.tallies.admit(between, NOW, FIRST, now_there, LIMITS)
    if fits:
        assert books.tallies.admit(late, NOW, FIRST, one_more(FIRST, late), limits) is None
        assert books.tallies.read("alice") == one_more(now_there, late)
        return
    with pytest.raises(Moved) as moved:
        books.tallies.admit(late, NOW, FIRST, one_more(FIRST, late), limits)
    assert moved.value.current == now_there == books.tallies.read("alice")
    assert books.jobs.get("job_3") is None


def test_a_new_minute_and_a_new_day_begin_at_nothing(books: Books) -> None:
    """Each by itself, and once: whoever saw the old one learns of the new one."""
    books.tallies.admit(a_charged_job(), NOW, None, replace(FIRST, warned=80), LIMITS)
    job = a_charged_job(2, 10, 5)
    minute = one_more(replace(FIRST, warned=80), job, minute=8, requests=1)
    books.tallies.admit(job, NOW, replace(FIRST, warned=80), minute, LIMITS)
    assert books.tallies.read("alice") == minute
    job = a_charged_job(3, 10, 5, "2027-01-16")
    day = Tally(minute=8, requests=3, day="2027-01-16", tokens=10, micro_usd=5)
    books.tallies.admit(job, NOW, minute, replace(day, requests=minute.requests + 1), LIMITS)
    day = replace(day, requests=minute.requests + 1)
    assert books.tallies.read("alice") == day
    for before in (replace(day, minute=7), replace(day, day=DAY), minute, None):
        with pytest.raises(Moved) as moved:
            books.tallies.admit(a_charged_job(4), NOW, before, day, LIMITS)
        assert moved.value.current == day
    assert books.jobs.get("job_4") is None


def test_a_warning_is_kept_until_the_day_is_over(books: Books) -> None:
    """Whoever read the tally before it does not take it back."""
    books.tallies.admit(a_charged_job(), NOW, None, FIRST, LIMITS)
    loud, quiet = a_charged_job(2, 10, 5), a_charged_job(3, 10, 5)
    books.tallies.admit(loud, NOW, FIRST, one_more(FIRST, loud, warned=80), LIMITS)
    books.tallies.admit(quiet, NOW, FIRST, one_more(FIRST, quiet), LIMITS)
    tally = books.tallies.read("alice")
    assert tally is not None
    assert (tally.warned, tally.tokens) == (80, 110)


def test_a_job_without_a_charge_counts_as_a_request_only(books: Books) -> None:
    """Of a client without a budget."""
    job = a_job()
    books.tallies.admit(job, NOW, None, Tally(7, 1, DAY), LIMITS)
    assert books.tallies.read("alice") == Tally(7, 1, DAY)
    assert books.jobs.get("job_1") == job


# ── Settling ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("tokens", "micro_usd"), [(-40, -500_000), (-90, -700_000), (0, 0), (60, 5)])
def test_a_charge_is_settled_in_one_step_with_its_row(books: Books, tokens: int, micro_usd: int) -> None:
    """Down to nothing, or up where the estimate was too low."""
    books.tallies.admit(a_charged_job(), NOW, None, FIRST, LIMITS)
    spent = Charge(DAY, 90 + tokens, 700_000 + micro_usd)
    books.tallies.settle(a_charged_job(), GUARD, {"charge": spent}, Charge(DAY, tokens, micro_usd))
    assert books.tallies.read("alice") == replace(FIRST, tokens=spent.tokens, micro_usd=spent.micro_usd)
    assert books.jobs.get("job_1") == replace(a_charged_job(), charge=spent)


def test_a_row_that_has_changed_is_a_conflict_and_the_tally_stays(books: Books) -> None:
    """So nothing is settled twice; also where the tally would refuse too."""
    books.tallies.admit(a_charged_job(), NOW, None, FIRST, LIMITS)
    for change in (Charge(DAY, -1, -1), Charge("2027-01-14", -1, -1)):
        with pytest.raises(Conflict) as conflict:
            books.tallies.settle(a_charged_job(), replace(GUARD, claims=5), {"charge": None}, change)
        assert conflict.value.current == a_charged_job()
    with pytest.raises(Conflict) as conflict:
        books.tallies.settle(a_job(job_id="job_gone"), GUARD, {"charge": None}, Charge(DAY, -1, -1))
    assert conflict.value.current is None
    assert books.tallies.read("alice") == FIRST


@pytest.mark.parametrize(
    "change", [Charge("2027-01-14", -1, -1), Charge(DAY, -91, 0), Charge(DAY, 0, -700_001)], ids=str
)
def test_another_days_tally_and_one_that_would_fall_below_zero_stay(books: Books, change: Charge) -> None:
    """And so does the job's row."""
    books.tallies.admit(a_charged_job(), NOW, None, FIRST, LIMITS)
    with pytest.raises(Moved) as moved:
        books.tallies.settle(a_charged_job(), GUARD, {"charge": None}, change)
    assert moved.value.current == FIRST == books.tallies.read("alice")
    assert books.jobs.get("job_1") == a_charged_job()


def test_a_client_without_a_tally_has_nothing_to_settle(books: Books) -> None:
    """None is made."""
    books.jobs.add(a_charged_job(), NOW)
    with pytest.raises(Moved) as moved:
        books.tallies.settle(a_charged_job(), GUARD, {"charge": None}, Charge(DAY, 0, 0))
    assert moved.value.current is None is books.tallies.read("alice")


counts = st.integers(0, 10**15)
days = st.sampled_from([DAY, "2027-01-16"])
tallies = st.builds(Tally, st.integers(0, 9), counts, days, counts, counts, st.sampled_from([0, 80]))


@MANY
@given(tally=tallies)
def test_any_tally_is_read_back_as_it_was_written(books: Books, tally: Tally) -> None:
    """Numbers of any size. The first one is written as the step from nothing."""
    job = a_charged_job(1, tally.tokens, tally.micro_usd, tally.day)
    first = replace(tally, requests=1)
    books.tallies.admit(job, NOW, None, first, ClientLimits())
    assert books.tallies.read("alice") == first
    books.forget()


# ── DynamoDB alone ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tally_expires_after_its_day_is_over(deployed: Deployed) -> None:
    """By the attribute that TTL watches."""
    books = _tables(deployed)
    books.tallies.admit(a_charged_job(), NOW, None, FIRST, LIMITS)
    client: Any = boto3.client("dynamodb")
    item = client.get_item(TableName=deployed.names["LimitsTable"], Key={"limit_id": {"S": "client#alice"}})["Item"]
    assert 86_400 < int(item["expires_at"]["N"]) - NOW // 1000 < 7 * 86_400


@pytest.mark.parametrize(
    ("reasons", "code", "raised"),
    [
        (["TransactionConflict", "None"], "TransactionCanceledException", Busy),
        (["None", "TransactionConflict"], "TransactionCanceledException", Busy),
        (["None", "ThrottlingError"], "TransactionCanceledException", Busy),
        (None, "TransactionInProgressException", Busy),
        (["None", "ValidationError"], "TransactionCanceledException", PortUnavailable),
        (None, "AccessDeniedException", PortUnavailable),
    ],
)
def test_a_transaction_that_met_others_may_be_tried_again(
    reasons: list[str] | None, code: str, raised: type[PortUnavailable]
) -> None:
    """Any other trouble is one."""

    class Refusing:
        def transact_write_items(self, **_: Any) -> None:
            response: Any = {"Error": {"Code": code, "Message": ""}}
            if reasons is not None:
                response["CancellationReasons"] = [{"Code": reason} for reason in reasons]
            raise ClientError(response, "TransactWriteItems")

    with pytest.raises(raised) as error:
        TalliesTable(Refusing(), "limits", "jobs").admit(a_charged_job(), NOW, None, FIRST, LIMITS)
    assert type(error.value) is raised


@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "stale"])
def test_rtb_01_twenty_at_once_are_admitted_as_far_as_the_budget_goes(books: Books, stale: bool) -> None:
    """RTB-01: 2.00 dollars and 150 tokens a day, 0.70 and 50 each: two of twenty, though all read before any wrote.

    Also of a client of whom there is no row yet. Each of the others is told so, and counts for nothing.
    """
    clock, started = FakeClock(), threading.Barrier(20)
    budgets = Budgets(books.tallies, clock, FakeChance(), MemoryJournal())
    if stale:
        books.tallies.admit(a_charged_job(99, 0, 0, "2027-01-14"), NOW, None, Tally(0, 1, "2027-01-14"), LIMITS)
    limits = replace(LIMITS, requests_per_minute=None)
    waits: list[int | None] = []

    def submit(number: int) -> bool:
        job = replace(a_charged_job(number, 50, 700_000), charge=Charge("", 50, 700_000))
        tally = budgets.look("alice", limits, job.charge)
        started.wait(30)
        try:
            charged, standing, _ = budgets.admit(job, limits, tally)
        except BudgetUsedUp as refusal:
            waits.append(refusal.retry_after_seconds)
            return False
        assert standing is None
        assert books.jobs.get(job.job_id) == charged
        return True

    with ThreadPoolExecutor(20) as pool:
        admitted = list(pool.map(submit, range(20)))
    assert admitted.count(True) == 2
    assert waits == [57_600] * 18
    tally = books.tallies.read("alice")
    assert tally is not None
    assert (tally.tokens, tally.micro_usd, tally.requests) == (100, 1_400_000, 2)
    assert tally.day == "2027-01-15"
    assert sum(books.jobs.get(f"job_{number}") is not None for number in range(20)) == 2
    assert clock.now() - START < 1_000
