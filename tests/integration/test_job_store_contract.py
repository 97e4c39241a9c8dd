"""What every job store keeps: the simulator's ground (the one in memory) is as true as DynamoDB's."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import boto3
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from backburner.adapters.aws import client as aws_client
from backburner.adapters.dynamodb import JobsTable
from backburner.errors import InvalidRequest, PortUnavailable
from backburner.models import Attempt, Failure, Job, JobStatus, Lane, Notice, NoticeStatus, Payload, Usage
from backburner.ports import Conflict, Guard, JobStore
from tests.fakes.memory import MemoryStore
from tests.integration import jobs
from tests.integration.deployed import Deployed
from tests.integration.jobs import FULL, NOW, a_job

MANY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
"""Each example removes its row, so that they may share one table. The same ones at every run, and none made smaller:
on moto that takes minutes."""


@dataclass(frozen=True)
class Shelf:
    """A store and the hand that removes a row from it, as TTL or an operator does."""

    store: JobStore
    remove: Callable[[str], None]


def _memory() -> Shelf:
    store = MemoryStore()
    return Shelf(store, store.rows.__delitem__)


def _table(deployed: Deployed) -> Shelf:
    client = aws_client("dynamodb", connect_seconds=1, read_seconds=5, tries=1)
    name = deployed.names["JobsTable"]
    return Shelf(
        JobsTable(client, name), lambda job_id: client.delete_item(TableName=name, Key={"job_id": {"S": job_id}})
    )


@pytest.fixture(params=["memory", "dynamodb"])
def shelf(request: pytest.FixtureRequest) -> Shelf:
    """Either store."""
    return _memory() if request.param == "memory" else _table(request.getfixturevalue("deployed"))


@pytest.fixture
def store(shelf: Shelf) -> JobStore:
    """Either store."""
    return shelf.store


ANY = frozenset(JobStatus)
QUEUED = frozenset({JobStatus.QUEUED})


# ── Adding and reading ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_is_read_back_as_it_was_written(store: JobStore) -> None:
    """Every field, with its type."""
    assert {field.name for field in fields(Job) if not getattr(FULL, field.name)} == set()
    for job in (FULL, a_job()):
        assert store.add(job, NOW) is None
        assert store.get(job.job_id) == job


@MANY
@given(job=jobs.jobs)
def test_any_row_is_read_back_as_it_was_written(shelf: Shelf, job: Job) -> None:
    """Texts, empty ones too, and numbers of any size."""
    assert shelf.store.add(job, NOW) is None
    assert shelf.store.get(job.job_id) == job
    shelf.remove(job.job_id)


def test_there_is_no_row_until_it_is_added(store: JobStore) -> None:
    """None, not an error."""
    assert store.get("job_nobody") is None


def test_a_standing_row_is_returned_and_not_replaced(store: JobStore) -> None:
    """The conditional put is the whole idempotency check."""
    store.add(a_job(), NOW)
    assert store.add(a_job(owner="o2", fingerprint="other"), NOW) == a_job()
    assert store.get("job_1") == a_job()


def test_an_expired_row_is_replaced_before_ttl_removes_it(store: JobStore) -> None:
    """From its very second on; nothing of the old row is left."""
    old = replace(FULL, job_id="job_1", expires_at=NOW // 1000)
    new = a_job(owner="o2", created_at=NOW)
    store.add(old, 0)
    assert store.add(new, NOW - 1) == old
    assert store.add(new, NOW) is None
    assert store.get("job_1") == new


def test_the_oldest_waiting_row_of_a_lane_is_found(store: JobStore) -> None:
    """By when its run began to wait; rows of other lanes, and those that wait no more, do not count."""
    assert store.oldest_waiting(Lane.BULK) is None
    for number, since in enumerate((NOW + 2, NOW, None, NOW + 1)):
        store.add(a_job(job_id=f"job_{number}", lane=Lane.BULK, waiting_since=since), NOW)
    store.add(a_job(job_id="job_9", waiting_since=NOW - 5), NOW)
    assert store.oldest_waiting(Lane.BULK) == NOW
    store.update("job_1", Guard(QUEUED), status=JobStatus.PROCESSING, waiting_since=None)
    assert store.oldest_waiting(Lane.BULK) == NOW + 1
    store.update("job_1", Guard(ANY), status=JobStatus.QUEUED, waiting_since=NOW)
    assert store.oldest_waiting(Lane.BULK) == NOW


# ── Guards ───────────────────────────────────────────────────────────────────────────────────────────────────────────

NOTICES = (Notice("webhook"), Notice("slack", NoticeStatus.DELIVERED, told_at=5))
GUARDED = a_job(
    status=JobStatus.QUEUED,
    claims=3,
    available_at=100,
    due_at=200,
    lease_until=210,
    deadline_at=300,
    expires_at=400,
    outbox=NOTICES,
    targets=("webhook", "slack"),
)
GUARDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("status", {"statuses": QUEUED}, {"statuses": ANY - QUEUED}),
    ("claims", {"claims": 3}, {"claims": 2}),
    ("claims are not a minimum", {"claims": 3}, {"claims": 4}),
    ("available_by", {"available_by": 100}, {"available_by": 99}),
    ("due_by", {"due_by": 200}, {"due_by": 199}),
    ("due_after", {"due_after": 200}, {"due_after": 201}),
    ("lease_by", {"lease_by": 210}, {"lease_by": 209}),
    ("due_at", {"due_at": 200}, {"due_at": 201}),
    ("deadline_after", {"deadline_after": 299}, {"deadline_after": 300}),
    ("unexpired_at", {"unexpired_at": 399_999}, {"unexpired_at": 400_000}),
    ("outbox", {"outbox": NOTICES}, {"outbox": NOTICES[:1]}),
    ("outbox in its order", {"outbox": NOTICES}, {"outbox": NOTICES[::-1]}),
    ("outbox that is not empty", {"outbox": NOTICES}, {"outbox": ()}),
    ("outbox in every field", {"outbox": NOTICES}, {"outbox": (replace(NOTICES[0], tries=1), NOTICES[1])}),
    ("targets", {"targets": ("webhook", "slack")}, {"targets": ("webhook",)}),
    ("targets that are there", {"targets": ("webhook", "slack")}, {"targets": ()}),
]


@pytest.mark.parametrize(("holding", "failing"), [guard[1:] for guard in GUARDS], ids=[guard[0] for guard in GUARDS])
def test_each_guard_lets_a_write_through_or_stops_it(
    store: JobStore, holding: dict[str, Any], failing: dict[str, Any]
) -> None:
    """A refused write changes nothing and tells what stands there."""
    store.add(GUARDED, 0)
    with pytest.raises(Conflict) as refused:
        store.update("job_1", Guard(**{"statuses": ANY, **failing}), owner="o2")
    assert refused.value.current == GUARDED
    assert store.get("job_1") == GUARDED
    assert store.update("job_1", Guard(**{"statuses": ANY, **holding}), owner="o2") == replace(GUARDED, owner="o2")


def test_all_guards_must_hold(store: JobStore) -> None:
    """One that fails among seven that hold."""
    store.add(GUARDED, 0)
    every: dict[str, Any] = {"statuses": QUEUED}
    for _, holding, _ in GUARDS:
        every |= holding
    for _, _, failing in GUARDS:
        with pytest.raises(Conflict):
            store.update("job_1", Guard(**every | failing), owner="o2")
    assert store.update("job_1", Guard(**every), owner="o2").owner == "o2"


@pytest.mark.parametrize("guard", [{"due_by": 2**60}, {"due_at": 0}, {"due_at": 200}])
def test_a_row_that_nobody_need_look_at_is_never_due(store: JobStore, guard: dict[str, int]) -> None:
    """No `due_at` is neither early nor equal to anything."""
    store.add(replace(GUARDED, due_at=None), 0)
    with pytest.raises(Conflict):
        store.update("job_1", Guard(ANY, **guard), owner="o2")  # type: ignore[arg-type]


def test_a_discarded_row_can_be_kept_from_a_write(store: JobStore) -> None:
    """Once it is discarded, and not before."""
    store.add(GUARDED, 0)
    store.update("job_1", Guard(ANY, undiscarded=True), discarded_at=5)
    with pytest.raises(Conflict):
        store.update("job_1", Guard(ANY, undiscarded=True), owner="o2")
    assert store.update("job_1", Guard(ANY), owner="o2").owner == "o2"


def test_no_targets_can_be_asked_for(store: JobStore) -> None:
    """Of a job that nobody is to be told of."""
    store.add(replace(GUARDED, targets=()), 0)
    store.update("job_1", Guard(ANY, targets=()), targets=("websocket",))
    with pytest.raises(Conflict):
        store.update("job_1", Guard(ANY, targets=()), owner="o2")


def test_an_empty_outbox_can_be_asked_for(store: JobStore) -> None:
    """It is no other than one that was emptied."""
    store.add(replace(GUARDED, outbox=()), 0)
    store.update("job_1", Guard(ANY, outbox=()), owner="o2")
    store.update("job_1", Guard(ANY), outbox=NOTICES)
    store.update("job_1", Guard(ANY, outbox=NOTICES), outbox=())
    assert store.update("job_1", Guard(ANY, outbox=()), owner="o3").owner == "o3"


def test_res_05_no_write_recreates_a_removed_row(shelf: Shelf) -> None:
    """Whatever the patch, a missing row is a conflict without a current one."""
    store = shelf.store
    store.add(a_job(), NOW)
    shelf.remove("job_1")
    patches: list[dict[str, Any]] = [
        {"owner": "o2"},
        {"add_claims": 1, "add_attempts": 1},
        {"append_log": (Attempt(1, "completed", 0, 1),)},
        {"due_at": None},
        {"status": JobStatus.COMPLETED, "result": Payload("{}"), "due_at": None},
    ]
    for patch in patches:
        with pytest.raises(Conflict) as refused:
            store.update("job_1", Guard(ANY), **patch)
        assert refused.value.current is None
    assert store.get("job_1") is None
    assert list(store.due(2**60, 10)) == []
    assert store.list_by_client("alice", None, None, 10) == ([], None)


# ── Patches ──────────────────────────────────────────────────────────────────────────────────────────────────────────

LINE = Attempt(4, "timeout", 1, 2, provider="anthropic", usage=Usage(1, 2), cost_micro_usd=0)
PATCHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"status": JobStatus.PROCESSING}, {"status": JobStatus.PROCESSING}),
    ({"owner": "ö"}, {"owner": "ö"}),
    ({"owner": ""}, {"owner": ""}),
    ({"available_at": 1}, {"available_at": 1}),
    ({"deadline_at": 10**15}, {"deadline_at": 10**15}),
    ({"expires_at": 10**10}, {"expires_at": 10**10}),
    ({"due_at": 0}, {"due_at": 0}),
    ({"due_at": None}, {"due_at": None}),
    ({"claimed_at": 5}, {"claimed_at": 5}),
    ({"claimed_at": None}, {"claimed_at": None}),
    ({"finished_at": 5}, {"finished_at": 5}),
    ({"finished_at": None}, {"finished_at": None}),
    ({"attempts": 0}, {"attempts": 0}),
    ({"result": Payload("{}")}, {"result": Payload("{}")}),
    ({"result": Payload(None, "results/x")}, {"result": Payload(None, "results/x")}),
    ({"result": None}, {"result": None}),
    ({"error": Failure("x", "", retryable=False)}, {"error": Failure("x", "", retryable=False)}),
    ({"error": None}, {"error": None}),
    ({"outbox": NOTICES}, {"outbox": NOTICES}),
    ({"outbox": ()}, {"outbox": ()}),
    ({"targets": ("websocket",)}, {"targets": ("websocket",)}),
    ({"targets": ()}, {"targets": ()}),
    ({"request": Payload("")}, {"request": Payload("")}),
    ({"metadata": None}, {"metadata": None}),
    ({"webhook": None}, {"webhook": None}),
    ({"request": Payload('{"prompt":"b"}')}, {"request": Payload('{"prompt":"b"}')}),
    ({"request": Payload(None, "requests/y")}, {"request": Payload(None, "requests/y")}),
    ({"discarded_at": 5}, {"discarded_at": 5}),
    ({"add_claims": 1}, {"claims": FULL.claims + 1}),
    ({"add_attempts": 2}, {"attempts": FULL.attempts + 2}),
    ({"append_log": (LINE,)}, {"log": (*FULL.log, LINE)}),
    ({"append_log": (LINE, LINE), "add_claims": 1, "owner": "x"},
     {"log": (*FULL.log, LINE, LINE), "claims": FULL.claims + 1, "owner": "x"}),
    ({"append_log": (), "owner": "x"}, {"owner": "x"}),
    ({"attempts": 1, "add_claims": 1}, {"attempts": 1, "claims": FULL.claims + 1}),
]  # fmt: skip


@pytest.mark.parametrize(("patch", "expected"), PATCHES, ids=[str(patch)[:60] for patch, _ in PATCHES])
@pytest.mark.parametrize("row", [FULL, replace(a_job(), job_id="job_full")], ids=["full", "plain"])
def test_each_patch_writes_its_field_and_no_other(
    store: JobStore, row: Job, patch: dict[str, Any], expected: dict[str, Any]
) -> None:
    """What `update` returns is what is read afterwards; None removes; adding and appending begin at nothing."""
    store.add(row, 0)
    if row is not FULL:
        expected = {**expected}
        for name in ("claims", "attempts"):
            if f"add_{name}" in patch:
                expected[name] = patch[f"add_{name}"]
        if "append_log" in patch and "log" in expected:
            expected["log"] = patch["append_log"]
    written = store.update("job_full", Guard(ANY), **patch)
    assert written == replace(row, **expected)
    assert store.get("job_full") == written


def test_a_line_appended_twice_is_there_twice(store: JobStore) -> None:
    """The log is a list."""
    store.add(a_job(), NOW)
    rows = [store.update("job_1", Guard(ANY), append_log=(replace(LINE, number=number),)) for number in (1, 2, 3)]
    assert [line.number for line in rows[-1].log] == [1, 2, 3]


@st.composite
def updates(draw: st.DrawFn) -> tuple[Job, Guard, dict[str, Any]]:
    """A row, a guard that nearly holds or does, and a patch."""
    row = draw(jobs.jobs)

    def near(value: int | None) -> st.SearchStrategy[int | None]:
        return st.none() | st.sampled_from([(value or 0) - 1, value or 0, (value or 0) + 1])

    guard = Guard(
        statuses=draw(st.frozensets(st.sampled_from(JobStatus), min_size=1)) | draw(st.just(frozenset({row.status}))),
        claims=draw(near(row.claims)),
        available_by=draw(near(row.available_at)),
        due_by=draw(near(row.due_at)),
        due_after=draw(near(row.due_at)),
        lease_by=draw(near(row.lease_until)),
        due_at=draw(near(row.due_at)),
        deadline_after=draw(near(row.deadline_at)),
        unexpired_at=draw(st.none() | st.sampled_from([row.expires_at * 1000 + shift for shift in (-1, 0, 1)])),
        outbox=draw(st.none() | st.just(row.outbox)),
        targets=draw(st.none() | st.just(row.targets) | st.just(())),
    )
    possible: dict[str, st.SearchStrategy[Any]] = {
        "owner": jobs.texts, "available_at": jobs.instants, "deadline_at": jobs.instants, "expires_at": jobs.instants,
        "due_at": st.none() | jobs.instants, "lease_until": st.none() | jobs.instants,
        "claimed_at": st.none() | jobs.instants, "finished_at": st.none() | jobs.instants,
        "result": st.none() | jobs.payloads,
        "error": st.none() | jobs.failures, "outbox": jobs.outboxes, "add_claims": st.integers(0, 3),
        "append_log": jobs.logs, "targets": st.lists(jobs.texts, max_size=3).map(tuple), "request": jobs.payloads,
    }  # fmt: skip
    patch = draw(st.fixed_dictionaries({"status": st.sampled_from(JobStatus)}, optional=possible))
    counting = draw(st.sampled_from([{}, {"attempts": 1}, {"add_attempts": 1}]))
    return row, guard, patch | counting


@MANY
@given(update=updates())
def test_any_update_has_the_same_outcome_in_memory_and_in_dynamodb(
    deployed: Deployed, update: tuple[Job, Guard, dict[str, Any]]
) -> None:
    """The same row, or the same conflict."""
    row, guard, patch = update
    outcomes: list[Any] = []
    for shelf in (_memory(), _table(deployed)):
        shelf.store.add(row, 2**62)
        try:
            outcomes.append(shelf.store.update(row.job_id, guard, **patch))
        except Conflict as conflict:
            outcomes.append(("conflict", conflict.current))
        outcomes.append(shelf.store.get(row.job_id))
        shelf.remove(row.job_id)
    assert outcomes[:2] == outcomes[2:]


# ── What is due ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_due_rows_come_the_longest_overdue_first_and_no_more_than_asked(store: JobStore) -> None:
    """Over all keys that the index is spread over; a row without `due_at` is not in it."""
    instants = {f"job_{number}": (number * 37) % 101 + 1 for number in range(30)}
    for job_id, due_at in instants.items():
        store.add(a_job(job_id=job_id, due_at=due_at), NOW)
    store.add(a_job(job_id="job_done", due_at=None), NOW)
    order = sorted(instants, key=lambda job_id: instants[job_id])
    assert list(store.due(1_000, 100)) == order
    assert list(store.due(1_000, 7)) == order[:7]
    assert list(store.due(50, 100)) == [job_id for job_id in order if instants[job_id] < 50]
    assert list(store.due(1, 100)) == []


def test_jobs_in_hand_are_found_among_the_latest_due(store: JobStore) -> None:
    """Whatever else is due; a row that is not due before the instant is not among them."""
    for number in range(250):
        status = JobStatus.PROCESSING if number % 50 == 7 else JobStatus.QUEUED
        store.add(a_job(job_id=f"job_{number}", due_at=number + 1, status=status), NOW)
    assert set(store.in_hand(1_000, 10_000)) == {"job_7", "job_57", "job_107", "job_157", "job_207"}
    assert set(store.in_hand(158, 10_000)) == {"job_7", "job_57", "job_107"}
    assert "job_207" in store.in_hand(1_000, 160)
    assert "job_7" not in store.in_hand(1_000, 160)
    assert set(store.in_hand(1, 10_000)) == set()


def test_a_row_leaves_and_enters_the_due_ones_as_it_is_written(store: JobStore) -> None:
    """The index is sparse: None takes a row out of it."""
    store.add(a_job(due_at=5), NOW)
    store.update("job_1", Guard(ANY), due_at=None)
    assert list(store.due(2**60, 10)) == []
    store.update("job_1", Guard(ANY), due_at=9)
    assert list(store.due(9, 10)) == []
    assert list(store.due(10, 10)) == ["job_1"]


# ── A client's jobs ──────────────────────────────────────────────────────────────────────────────────────────────────


def pages(store: JobStore, status: JobStatus | None, limit: int, client_id: str = "alice") -> list[list[str]]:
    """The ids of every page until there is no cursor."""
    found: list[list[str]] = []
    cursor: str | None = None
    while len(found) < 100:
        page, cursor = store.list_by_client(client_id, status, cursor, limit)
        assert len(page) <= limit
        found.append([job.job_id for job in page])
        if cursor is None:
            return found
    raise AssertionError("the pages do not end")


def flat(found: list[list[str]]) -> list[str]:
    """All pages as one."""
    return list(itertools.chain.from_iterable(found))


def test_a_clients_jobs_come_newest_first_page_by_page(store: JobStore) -> None:
    """Each once, and nobody else's."""
    for number in range(7):
        store.add(a_job(job_id=f"job_{number}", created_at=NOW + number), NOW)
        store.add(a_job(job_id=f"bob_{number}", created_at=NOW + number, client_id="bob"), NOW)
    newest_first = [f"job_{number}" for number in range(6, -1, -1)]
    for limit in (1, 3, 7, 50):
        assert flat(pages(store, None, limit)) == newest_first
    assert pages(store, None, 3)[0] == newest_first[:3]
    assert store.list_by_client("carol", None, None, 10) == ([], None)


def test_a_status_is_asked_for_over_all_pages(store: JobStore) -> None:
    """Jobs of other statuses in between leave no holes."""
    for number in range(12):
        status = JobStatus.FAILED if number % 4 == 0 else JobStatus.QUEUED
        store.add(a_job(job_id=f"job_{number:02}", created_at=NOW + number, status=status), NOW)
    assert flat(pages(store, JobStatus.FAILED, 2)) == ["job_08", "job_04", "job_00"]
    assert flat(pages(store, JobStatus.CANCELLED, 2)) == []
    assert len(flat(pages(store, JobStatus.QUEUED, 50))) == 9


def test_a_job_that_is_added_while_somebody_pages_does_not_shift_the_pages(store: JobStore) -> None:
    """A cursor is a place between jobs, not a number of them."""
    for number in range(4):
        store.add(a_job(job_id=f"job_{number}", created_at=NOW + number), NOW)
    first, cursor = store.list_by_client("alice", None, None, 2)
    store.add(a_job(job_id="job_new", created_at=NOW + 9), NOW)
    second, _ = store.list_by_client("alice", None, cursor, 2)
    assert [job.job_id for job in (*first, *second)] == ["job_3", "job_2", "job_1", "job_0"]


def test_a_listed_job_tells_what_a_listing_shows(store: JobStore) -> None:
    """Status, times, attempts and error; requests and results need not be read for it."""
    store.add(FULL, NOW)
    [job], _ = store.list_by_client("alice", None, None, 10)
    shown = ("job_id", "client_id", "lane", "status", "attempts", "created_at", "deadline_at", "finished_at",
             "expires_at", "error", "claims", "owner", "due_at", "schema_version", "targets")  # fmt: skip
    assert [getattr(job, name) for name in shown] == [getattr(FULL, name) for name in shown]


def test_api_10_a_clients_cursor_shows_another_client_nothing(store: JobStore) -> None:
    """A cursor is a position, no permission."""
    for number in range(4):
        store.add(a_job(job_id=f"job_{number}", created_at=NOW + number), NOW)
    store.add(a_job(job_id="bob_1", created_at=NOW, client_id="bob"), NOW)
    _, cursor = store.list_by_client("alice", None, None, 2)
    assert cursor is not None
    page, _ = store.list_by_client("bob", None, cursor, 10)
    assert {job.client_id for job in page} <= {"bob"}


def _spelled(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "cursor",
    [
        "not a cursor", "é", "=", "AA", *map(_spelled, (
            "7", "null", "true", "{}", '{"a":1,"b":2}', "[]", "[1]", '["1","job_1"]', '[true,"job_1"]', '[1,""]',
            '[1,2]', '[1,"x",3]', '[NaN,"job_1"]', '[1.5,"job_1"]', "[" * 5_000, f'[1,"{"x" * 500}"]',
            f'[{10**40},"job_1"]',
        )),
    ],
)  # fmt: skip
def test_what_no_listing_returned_is_no_cursor(store: JobStore, cursor: str) -> None:
    """The caller's mistake, named by its field."""
    store.add(a_job(), NOW)
    with pytest.raises(InvalidRequest) as refused:
        store.list_by_client("alice", None, cursor, 10)
    assert refused.value.field == "cursor"


def test_a_rare_status_is_found_in_few_round_trips(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand finished jobs one is queued: asking for it must not take a thousand reads."""
    shelf = _table(deployed)
    table = boto3.resource("dynamodb").Table(deployed.names["JobsTable"])
    with table.batch_writer() as writer:
        for number in range(300):
            writer.put_item({
                "job_id": f"job_{number}", "client_id": "alice", "lane": "standard", "v": 1, "owner": "o",
                "status": "queued" if number == 0 else "completed", "fingerprint": "f", "request": "{}",
                **dict.fromkeys(("available_at", "deadline_at", "deadline_seconds", "claims", "attempts"), 1),
                "created_at": NOW + number, "expires_at": NOW,
            })  # fmt: skip
    client: Any = shelf.store._client  # type: ignore[attr-defined]
    trips: list[str] = []
    for name in ("query", "batch_get_item"):
        call = getattr(client, name)

        def counted(*, _name: str = name, _call: Any = call, **arguments: Any) -> Any:
            trips.append(_name)
            return _call(**arguments)

        monkeypatch.setattr(client, name, counted)
    assert flat(pages(shelf.store, JobStatus.QUEUED, 1)) == ["job_0"]
    assert len(trips) <= 30


def test_a_row_is_read_as_last_written(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto knows no other way of reading, so this looks at what is asked of DynamoDB."""
    store: Any = _table(deployed).store
    asked: dict[str, Any] = {}

    def get_item(**arguments: Any) -> dict[str, Any]:
        asked.update(arguments)
        return {}

    monkeypatch.setattr(store._client, "get_item", get_item)
    store.get("job_1")
    assert asked["ConsistentRead"] is True


# ── DynamoDB alone ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_res_04_the_row_expires_by_the_attribute_that_the_tables_ttl_watches(deployed: Deployed) -> None:
    """A whole number of seconds, as a number, under the very name."""
    shelf = _table(deployed)
    shelf.store.add(a_job(), NOW)
    client = boto3.client("dynamodb")
    name = deployed.names["JobsTable"]
    ttl = client.describe_time_to_live(TableName=name)["TimeToLiveDescription"]
    assert ttl["TimeToLiveStatus"] == "ENABLED"
    item = client.get_item(TableName=name, Key={"job_id": {"S": "job_1"}})["Item"]
    assert item[ttl["AttributeName"]] == {"N": str(a_job().expires_at)}


def test_a_row_of_a_later_version_of_the_code_is_read(deployed: Deployed) -> None:
    """Attributes that this version does not know are passed over, and survive its writes."""
    shelf = _table(deployed)
    shelf.store.add(a_job(), NOW)
    client = boto3.client("dynamodb")
    key: Any = {"job_id": {"S": "job_1"}}
    client.update_item(
        TableName=deployed.names["JobsTable"],
        Key=key,
        UpdateExpression="SET novelty = :n",
        ExpressionAttributeValues={":n": {"S": "x"}},
    )
    assert shelf.store.get("job_1") == a_job()
    shelf.store.update("job_1", Guard(ANY), owner="o2")
    assert client.get_item(TableName=deployed.names["JobsTable"], Key=key)["Item"]["novelty"] == {"S": "x"}


def test_a_table_that_is_not_there_is_an_unavailable_port(aws: None) -> None:
    """AWS's own words stay inside the adapter; its code is kept for the logs."""
    store = JobsTable(aws_client("dynamodb", connect_seconds=1, read_seconds=1, tries=1), "nowhere")
    calls: list[Callable[[], object]] = [
        lambda: store.get("job_1"),
        lambda: store.add(a_job(), NOW),
        lambda: store.update("job_1", Guard(ANY), owner="o2"),
        lambda: list(store.due(1, 1)),
        lambda: store.in_hand(1, 1),
        lambda: store.list_by_client("alice", None, None, 1),
    ]
    for call in calls:
        with pytest.raises(PortUnavailable, match="ResourceNotFoundException"):
            call()
