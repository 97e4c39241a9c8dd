"""The WebSocket API: who gets in, what a client may ask, and that nobody waits for an end that has come."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from backburner import delivery
from backburner.channels.websocket import LISTENERS_MAX, WebSocketChannel
from backburner.delivery import Delivery, ToldHere
from backburner.errors import ContentFiltered, PortUnavailable, Unauthorized, Untold
from backburner.models import WEBSOCKET, Client, Job, JobStatus, Lane, Notice, NoticeStatus, Telling
from backburner.ports import Listener
from backburner.sockets import CONNECTION_SECONDS, JOBS_MAX, MESSAGE_BYTES_MAX, SocketApi
from tests.fakes.house import ALICE, BOB, House
from tests.fakes.sockets import AtOnce, MemoryConnections, MemorySockets

KEYS = {"key-alice": ALICE, "key-bob": BOB}


@dataclass
class Api:
    """A house with a WebSocket API."""

    house: House = field(default_factory=House)
    sockets: MemorySockets = field(default_factory=MemorySockets)

    def __post_init__(self) -> None:
        clock = self.house.clock
        self.connections = MemoryConnections(lambda: clock.now() // 1000)
        self.api = SocketApi(
            authenticate=self._authenticate,
            submission=self.house.submission,
            connections=self.connections,
            tickets=self.connections,
            sockets=self.sockets,
            clock=clock,
            chance=self.house.chance,
            journal=self.house.journal,
        )
        self.house.channel = WebSocketChannel(
            self.connections, self.sockets, AtOnce(), clock=clock, journal=self.house.journal
        )

    def _authenticate(self, headers: Any) -> Client:
        try:
            return KEYS[headers["x-api-key"]]
        except KeyError as error:
            raise Unauthorized from error

    def event(self, route: str, connection_id: str = "c", **more: Any) -> int:
        """Status of API Gateway's event."""
        reply = self.api.handle({"requestContext": {"routeKey": route, "connectionId": connection_id}, **more}, None)
        assert set(reply) == {"statusCode"}
        return int(reply["statusCode"])

    def connect(self, key: str = "key-alice", connection_id: str = "c") -> int:
        """Status of $connect with a key."""
        return self.event("$connect", connection_id, headers={"X-Api-Key": key})

    def ask(self, message: Any, connection_id: str = "c") -> dict[str, Any]:
        """The one frame that answers a message."""
        before = len(self.sockets.frames)
        body = message if isinstance(message, str) else json.dumps(message)
        assert self.event("$default", connection_id, body=body) == 200
        ((name, frame),) = self.sockets.frames[before:]
        assert name == connection_id
        return frame

    def subscribe(self, job: Job | str, connection_id: str = "c", **more: Any) -> dict[str, Any]:
        """The frame that answers a subscription."""
        job_id = job if isinstance(job, str) else job.job_id
        return self.ask({"action": "subscribe", "job_id": job_id, **more}, connection_id)


@pytest.fixture
def api() -> Api:
    return Api()


# ── Who gets in ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_opens_a_connection_whatever_the_case_of_its_header(api: Api) -> None:
    """Proxies and browsers do not agree on it."""
    assert api.event("$connect", headers={"X-API-KEY": "key-alice"}) == 200
    assert api.connections.client_id("c") == "alice"


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"headers": None},
        {"headers": {"x-api-key": "key-nobody"}},
        {"queryStringParameters": {"ticket": ""}},
        {"queryStringParameters": {"ticket": "no-such-ticket"}},
        {"queryStringParameters": {"ticket": "t" * 10_000}},
        {"queryStringParameters": {"ticket": "no-such-ticket"}, "headers": {"x-api-key": "key-alice"}},
    ],
    ids=str,
)
def test_whoever_has_neither_key_nor_ticket_is_refused(api: Api, event: dict[str, Any]) -> None:
    """401, and nothing is stored. A bad ticket is not made good by a key."""
    assert api.event("$connect", **event) == 401
    assert api.connections.client_id("c") is None


def test_a_ticket_opens_one_connection(api: Api) -> None:
    """The second that comes with it is refused."""
    api.connections.issue("a-ticket", "alice", api.house.clock.now() // 1000 + 60)
    asked = {"queryStringParameters": {"ticket": "a-ticket"}}
    assert api.event("$connect", "first", **asked) == 200
    assert api.event("$connect", "second", **asked) == 401
    assert api.connections.client_id("first") == "alice"


def test_a_ticket_expires(api: Api) -> None:
    """A minute after it was issued, at the second."""
    api.connections.issue("a-ticket", "alice", api.house.clock.now() // 1000 + 60)
    api.house.clock.advance(60)
    assert api.event("$connect", queryStringParameters={"ticket": "a-ticket"}) == 401


def test_a_connection_that_cannot_be_noted_is_not_opened(api: Api) -> None:
    """503: the client tries again."""

    def unavailable(*_: Any) -> None:
        raise PortUnavailable("InternalServerError")

    api.connections.open = unavailable  # type: ignore[method-assign, assignment]
    assert api.connect() == 503


# ── What a client may ask ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"action": "shout"}, "action"),
        ({"action": ["subscribe"]}, "action"),
        ({}, "action"),
        ({"action": "subscribe"}, "job_id"),
        ({"action": "subscribe", "job_id": 7}, "job_id"),
        ({"action": "subscribe", "job_id": "a b"}, "job_id"),
        ({"action": "subscribe", "job_id": "x" * 65}, "job_id"),
        ({"action": "subscribe", "job_id": "x", "after": 7}, "after"),
        ({"action": "subscribe", "job_id": "x", "after": {"draft": 1}}, "after.position"),
        ({"action": "subscribe", "job_id": "x", "after": {"draft": -1, "position": 0}}, "after.draft"),
        ({"action": "subscribe", "job_id": "x", "after": {"draft": True, "position": 0}}, "after.draft"),
        ({"action": "subscribe", "job_id": "x", "before": 1}, "before"),
        ({"action": "unsubscribe"}, "job_id"),
        ({"action": "ping", "payload": "x"}, "payload"),
    ],
    ids=str,
)
def test_a_wrong_message_is_answered_with_the_field_that_is_wrong(api: Api, message: Any, field: str) -> None:
    """In the shape of HTTP's problem documents."""
    api.connect()
    frame = api.ask(message)
    assert frame["type"] == "error"
    assert frame["problem"]["code"] == "invalid_request"
    assert [error["field"] for error in frame["problem"]["errors"]] == [field]


@pytest.mark.parametrize(
    "message",
    ["", "not json", "[]", "null", "7", '{"action":', '{"action":NaN}', "[" * 4_000, " " * (MESSAGE_BYTES_MAX + 1),
     '{"action":"ping","action":"ping"}', '{"action":"\ud800"}'],
    ids=lambda text: text[:20].encode("ascii", "backslashreplace").decode(),
)  # fmt: skip
def test_what_is_no_message_is_refused(api: Api, message: str) -> None:
    """And the connection stays open."""
    api.connect()
    assert api.ask(message)["problem"]["code"] == "invalid_request"
    assert api.ask({"action": "ping"}) == {"type": "pong"}


def test_somebody_elses_job_is_no_job(api: Api) -> None:
    """The same answer for both, and no subscription."""
    api.connect("key-bob")
    job = api.house.accept()
    theirs, none = api.subscribe(job), api.subscribe("job_nobody")
    assert theirs["problem"] == none["problem"]
    assert none["problem"]["code"] == "job_not_found"
    assert none["job_id"] == "job_nobody"
    assert api.connections.listeners(job.job_id, 9, sure=True) == []
    assert api.house.job(job.job_id).targets == ()


def test_a_connection_follows_a_bounded_number_of_jobs(api: Api) -> None:
    """Those that have ended do not count."""
    api.connect()
    jobs = [api.house.accept(prompt=f"{number}") for number in range(JOBS_MAX + 1)]
    for job in jobs[:-1]:
        assert api.subscribe(job)["type"] == "job"
    assert api.subscribe(jobs[-1])["problem"]["code"] == "too_many_subscriptions"
    assert api.subscribe(jobs[0])["type"] == "job"
    assert api.ask({"action": "unsubscribe", "job_id": jobs[0].job_id}) == {
        "type": "unsubscribed",
        "job_id": jobs[0].job_id,
    }
    assert api.subscribe(jobs[-1])["type"] == "job"
    api.house.work()
    api.house.tell()
    assert api.subscribe(api.house.accept(prompt="another"))["type"] == "job"


def test_a_connection_that_has_expired_is_told_so(api: Api) -> None:
    """API Gateway closes it about then; TTL deletes late."""
    api.connect()
    job = api.house.accept()
    api.house.clock.advance(CONNECTION_SECONDS)
    assert api.subscribe(job)["problem"]["code"] == "connection_unknown"


def test_a_port_that_fails_is_answered(api: Api) -> None:
    """The client may send the message again."""
    api.connect()

    def unavailable(*_: Any) -> None:
        raise PortUnavailable("InternalServerError")

    api.connections.client_id = unavailable  # type: ignore[method-assign, assignment]
    assert api.subscribe("job_1")["problem"]["code"] == "unavailable"


def test_a_fault_of_ours_is_no_leak(api: Api) -> None:
    """An exception's text may hold what a client sent; Lambda would log it."""
    api.connect()

    def broken(*_: Any) -> None:
        raise ValueError("job_secret")

    api.connections.client_id = broken  # type: ignore[method-assign, assignment]
    assert api.event("$default", body='{"action":"subscribe","job_id":"job_secret"}') == 500
    assert "job_secret" not in str(api.house.journal.events)


def test_a_disconnected_client_follows_nothing(api: Api) -> None:
    """As far as API Gateway tells of it."""
    api.connect()
    job = api.house.accept()
    api.subscribe(job)
    assert api.event("$disconnect") == 200
    assert api.connections.listeners(job.job_id, 9, sure=True) == []


# ── States and ends ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_subscriber_gets_the_state_at_once_and_the_end_when_it_comes(api: Api) -> None:
    """Also of a job that was submitted without a word about listening."""
    api.connect()
    job = api.house.accept()
    assert api.subscribe(job)["job"]["status"] == "queued"
    api.house.work()
    api.house.tell()
    end = api.sockets.sent("c", "job")[-1]["job"]
    assert (end["status"], end["result"]["text"]) == ("completed", "an answer")
    assert [notice.status for notice in api.house.job(job.job_id).outbox] == [NoticeStatus.DELIVERED]


def test_a_finished_job_answers_at_once(api: Api) -> None:
    """With its result, and without a subscription."""
    api.connect()
    job = api.house.accept()
    api.house.work()
    assert api.subscribe(job)["job"]["result"]["text"] == "an answer"
    assert api.connections.listeners(job.job_id, 9, sure=True) == []


@pytest.mark.parametrize("end", ["fail", "cancel", "expire"])
def test_every_end_is_told(api: Api, end: str) -> None:
    """Failed, cancelled and expired jobs too."""
    api.connect()
    job = api.house.accept(deadline_seconds=60)
    api.subscribe(job)
    if end == "fail":
        api.house.provider.script = [ContentFiltered()]  # type: ignore[attr-defined]
    elif end == "cancel":
        api.house.submission.cancel(ALICE, job.job_id)
    else:
        api.house.clock.advance(61)
    api.house.work()
    api.house.tell()
    status = {"fail": "failed", "cancel": "cancelled", "expire": "expired"}[end]
    assert api.sockets.sent("c", "job")[-1]["job"]["status"] == status


STEPS = ("find", "connections.subscribe", "follow", "connections.unsubscribe")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("step", STEPS)
def test_nobody_waits_for_an_end_that_has_come(api: Api, step: str, stream: bool) -> None:
    """Whenever the job ends while somebody subscribes, that one is told, if not twice."""
    api.connect()
    job = api.house.accept(stream=stream)
    owner: Any = api.connections if step.startswith("connections.") else api.house.submission
    name = step.rpartition(".")[2]
    original = getattr(owner, name)
    ended = False

    def after(*given: Any, **named: Any) -> Any:
        nonlocal ended
        got = original(*given, **named)
        if not ended:
            ended = True
            api.house.work()
            api.house.tell()
        return got

    if owner is api.house.submission:
        api.api = replace(api.api, submission=_Wrapped(owner, name, after))  # type: ignore[arg-type]
    else:
        setattr(owner, name, after)
    api.event("$default", body=json.dumps({"action": "subscribe", "job_id": job.job_id}))
    if not ended:
        api.house.work()
        api.house.tell()
    assert api.house.job(job.job_id).status is JobStatus.COMPLETED
    assert "completed" in [frame["job"]["status"] for frame in api.sockets.sent("c", "job")]


class _Wrapped:
    """An object with one method replaced: Submission is frozen."""

    def __init__(self, inner: Any, name: str, method: Callable[..., Any]) -> None:
        self._inner = inner
        setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_subscriber_who_comes_while_the_call_runs_is_told_of_its_end(api: Api) -> None:
    """The worker's own copy of the row is older than the subscription."""
    api.connect()
    job = api.house.accept()
    api.house.provider.script = [lambda: api.subscribe(job) and "late answer"]  # type: ignore[attr-defined]
    api.house.work()
    api.house.tell()
    assert [frame["job"]["status"] for frame in api.sockets.sent("c", "job")] == ["processing", "completed"]


# ── The channel ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _ended(api: Api, *connections: str) -> Job:
    job = api.house.accept(stream=True)
    for connection_id in connections:
        api.connect(connection_id=connection_id)
        api.subscribe(job, connection_id)
    api.house.work()
    return api.house.job(job.job_id)


def test_a_gone_connection_is_removed_and_a_failing_one_is_told_later(api: Api) -> None:
    """Who was told is not told again."""
    job = _ended(api, "a", "b", "c")
    api.sockets.gone.add("a")
    api.sockets.broken.add("b")
    with pytest.raises(Untold) as untold:
        api.house.channel.tell(job)
    assert untold.value.again
    assert api.connections.client_id("a") is None
    api.sockets.broken.clear()
    api.house.channel.tell(job)
    for connection_id, times in (("a", 0), ("b", 1), ("c", 1)):
        ends = [f for f in api.sockets.sent(connection_id, "job") if f["job"]["status"] == "completed"]
        assert len(ends) == times


def test_a_job_that_nobody_follows_is_told_to_nobody(api: Api) -> None:
    """And that is all there is to do."""
    api.house.channel.tell(_ended(api))
    assert api.sockets.frames == []


def test_more_listeners_than_one_try_tells_are_told_by_the_next(api: Api) -> None:
    """None is left out."""
    job = _ended(api)
    for number in range(LISTENERS_MAX + 1):
        api.connections.open(f"c{number}", "alice", 2**40)
        api.connections.subscribe(job.job_id, Listener(f"c{number}", f"s{number}"), jobs_max=1)
    with pytest.raises(Untold) as untold:
        api.house.channel.tell(job)
    assert untold.value.again
    api.house.channel.tell(job)
    assert len({connection_id for connection_id, _ in api.sockets.frames}) == LISTENERS_MAX + 1


def _to_be_told_by_its_worker(api: Api) -> tuple[Job, Notice]:
    """A job that has just ended, of which the connection `c` wants to know; no message is on its way."""
    job = _ended(api)
    api.connect()
    api.connections.subscribe(job.job_id, Listener("c", "s"), jobs_max=1)
    api.house.notices.sent.clear()
    (notice,) = job.pending
    return job, notice


def _told_here(api: Api) -> ToldHere:
    return ToldHere(api.house.delivery, api.house.lifecycle, api.house.journal)


def test_a_worker_tells_listeners_itself_without_a_message(api: Api) -> None:
    """One frame, and the target is noted as told."""
    job, notice = _to_be_told_by_its_worker(api)
    _told_here(api)(job, notice)
    (frame,) = api.sockets.sent("c", "job")
    assert frame["job"]["status"] == "completed"
    assert api.house.notices.sent == []
    told = [
        (fields["count"], fields["told_ms"]) for name, fields in api.house.journal.events if name == "listeners_told"
    ]
    assert told == [(1, 0)]
    row = api.house.job(job.job_id)
    (told_notice,) = row.outbox
    assert (told_notice.status, told_notice.tries, row.due_at) == (NoticeStatus.DELIVERED, 1, None)


@pytest.mark.parametrize("trouble", ["broken", "no table", "a fault of ours"])
def test_whom_the_worker_could_not_tell_the_notifier_tells(
    api: Api, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the message of the second try."""
    job, notice = _to_be_told_by_its_worker(api)
    with monkeypatch.context() as patched:
        match trouble:
            case "broken":
                patched.setattr(api.sockets, "broken", {"c"})
            case "no table":
                patched.setattr(api.connections, "fails", True)
            case _:
                patched.setattr(api.house.channel, "tell", dict[Job, None]().__getitem__)
        _told_here(api)(job, notice)
    assert api.sockets.sent("c", "job") == []
    ((at, telling),) = api.house.notices.sent
    assert telling == Telling(job.job_id, WEBSOCKET, 1)
    api.house.clock.advance((at - api.house.clock.now()) / 1000)
    api.house.tell()
    assert len(api.sockets.sent("c", "job")) == 1
    (told,) = api.house.job(job.job_id).outbox
    assert (told.status, told.tries) == (NoticeStatus.DELIVERED, 2)


def test_what_a_worker_could_not_note_is_left_due(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised; the repairer finds the row."""
    job, notice = _to_be_told_by_its_worker(api)

    def unavailable(*_: Any, **__: Any) -> Job:
        raise PortUnavailable("InternalServerError")

    with monkeypatch.context() as patched:
        patched.setattr(api.house.store, "update", unavailable)
        _told_here(api)(job, notice)
    assert ("not_told_at_once", "InternalServerError") in [
        (name, fields.get("reason")) for name, fields in api.house.journal.events
    ]
    assert api.house.job(job.job_id).due_at == job.due_at is not None


def test_a_connection_that_hangs_holds_a_worker_up_for_a_moment_only(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker goes on while the post still hangs, and the notifier has its message; only one of the two counts."""
    monkeypatch.setattr(delivery, "TOLD_HERE_SECONDS_MAX", 0.05)
    job, notice = _to_be_told_by_its_worker(api)
    hangs, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def hang(_connection_id: str) -> None:
        hangs.set()
        may_end.wait(30)

    api.sockets.before_post = hang
    told_here = _told_here(api)
    tell = told_here.delivery.tell_at_once

    def tell_and_say_so(job: Job, notice: Notice) -> None:
        tell(job, notice)
        ended.set()

    with monkeypatch.context() as patched:
        patched.setattr(Delivery, "tell_at_once", lambda _, job, notice: tell_and_say_so(job, notice))
        told_here(job, notice)
    assert hangs.wait(30)
    assert api.sockets.sent("c", "job") == []
    ((_, telling),) = api.house.notices.sent
    assert telling == Telling(job.job_id, WEBSOCKET, 0, job.claims)
    may_end.set()
    assert ended.wait(30)
    api.house.tell()
    assert len(api.sockets.sent("c", "job")) == 1
    (told,) = api.house.job(job.job_id).outbox
    assert (told.status, told.tries) == (NoticeStatus.DELIVERED, 1)


def test_a_streamed_job_has_the_target_and_another_has_none(api: Api) -> None:
    """What is not asked for costs nothing."""
    assert api.house.accept(stream=True).targets == (WEBSOCKET,)
    assert api.house.accept(stream=False).targets == ()
    assert api.house.accept().targets == ()
    assert Lane.STANDARD in api.house.submission.lanes
