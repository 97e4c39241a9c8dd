"""What every payload store and queue keeps, in memory and on AWS."""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
from cachetools import TTLCache

from backburner.adapters.aws import client as aws_client
from backburner.adapters.aws import translated
from backburner.adapters.dynamodb import ClientsTable
from backburner.adapters.s3 import PayloadsBucket
from backburner.adapters.sqs import (
    DEPTH_SECONDS,
    DeadLetters,
    LaneDepths,
    LaneQueues,
    NoticesQueue,
    hint_body,
    parse_hint,
    parse_telling,
)
from backburner.errors import PayloadMissing, PortUnavailable
from backburner.models import Client, Hint, Lane, Telling
from backburner.ports import DeadLetterQueue, HintQueue, NoticeQueue, PayloadStore
from cli.clients import create_client
from tests.fakes.memory import FakeClock, MemoryDeadLetters, MemoryHints, MemoryPayloads
from tests.integration.deployed import Deployed


def _client(service: str) -> Any:
    return aws_client(service, connect_seconds=1, read_seconds=5, tries=1)


# ── Payloads ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["memory", "s3"])
def payloads(request: pytest.FixtureRequest) -> PayloadStore:
    """Either store."""
    if request.param == "memory":
        return MemoryPayloads()
    deployed = request.getfixturevalue("deployed")
    return PayloadsBucket(lambda: _client("s3"), deployed.names["PayloadsBucket"])


@pytest.mark.parametrize(
    "text", ["", "{}", "Donau 🏞️\u0000\r\n", "中" * 1_700_000], ids=["empty", "small", "odd", "5 MB"]
)
def test_a_text_is_read_back_as_it_was_put(payloads: PayloadStore, text: str) -> None:
    """Of any size, in any script."""
    payloads.put("requests/job_1/f", text)
    assert payloads.get("requests/job_1/f") == text


def test_a_text_put_twice_is_there_once(payloads: PayloadStore) -> None:
    """A retry of a put whose reply was lost does no harm."""
    for _ in range(2):
        payloads.put("results/job_1/1", "an answer")
    assert payloads.get("results/job_1/1") == "an answer"


def test_a_text_that_is_not_there_is_missing(payloads: PayloadStore) -> None:
    """Not merely unavailable: trying again cannot help."""
    with pytest.raises(PayloadMissing):
        payloads.get("requests/job_1/gone")


def test_a_removed_text_is_missing_and_may_be_removed_again(payloads: PayloadStore) -> None:
    """The others stay."""
    for name in ("f", "g"):
        payloads.put(f"requests/job_1/{name}", name)
    for _ in range(2):
        payloads.remove("requests/job_1/f")
    with pytest.raises(PayloadMissing):
        payloads.get("requests/job_1/f")
    assert payloads.get("requests/job_1/g") == "g"


def test_a_link_names_its_text_and_its_time(payloads: PayloadStore) -> None:
    """Only the holder of the link reads the text, and only so long."""
    payloads.put("results/job_1/1", "an answer")
    link = payloads.link("results/job_1/1", 900)
    assert link.startswith("https://")
    assert "results/job_1/1" in link
    assert "900" in link


def test_a_link_is_signed_and_reads_the_text(deployed: Deployed) -> None:
    """Without credentials; the expiry is part of what is signed."""
    requests = pytest.importorskip("requests")  # moto's own, which it answers in place of S3
    store = PayloadsBucket(lambda: _client("s3"), deployed.names["PayloadsBucket"])
    store.put("results/job_1/1", '{"text":"Donau 🏞️"}')
    link = store.link("results/job_1/1", 900)
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(link).query)
    assert query.get("X-Amz-Expires") == ["900"]
    assert "X-Amz-Signature" in query
    reply = requests.get(link, timeout=5)
    assert json.loads(reply.content.decode()) == {"text": "Donau 🏞️"}
    assert reply.headers["content-type"] == "application/json; charset=utf-8"


# ── Hints ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Lanes:
    """The lane queues, what of them has appeared, and how many hints have not yet."""

    queue: HintQueue
    appeared: Callable[[], list[Hint]]
    delayed: Callable[[], int]


@pytest.fixture(params=["memory", "sqs"])
def lanes(request: pytest.FixtureRequest) -> Lanes:
    """Either queue."""
    if request.param == "memory":
        memory = MemoryHints(FakeClock())
        return Lanes(memory, lambda: [sent.hint for sent in memory.take_ready()], lambda: len(memory.sent))
    url = request.getfixturevalue("deployed").names["StandardQueue"]
    sqs = _client("sqs")

    def appeared() -> list[Hint]:
        found = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages", [])
        return [parse_hint(message["Body"]) for message in found]

    def delayed() -> int:
        name = "ApproximateNumberOfMessagesDelayed"
        return int(sqs.get_queue_attributes(QueueUrl=url, AttributeNames=[name])["Attributes"][name])

    return Lanes(LaneQueues(sqs, {Lane.STANDARD: url}), appeared, delayed)


@pytest.mark.parametrize(
    "hint", [Hint("job_1"), Hint("job_1", died=0), Hint("job_1", died=7, alone=True), Hint("x" * 128)], ids=str
)
def test_a_hint_arrives_as_it_was_sent(lanes: Lanes, hint: Hint) -> None:
    """With all that it says."""
    lanes.queue.send(hint, client_id="alice", lane=Lane.STANDARD)
    assert lanes.appeared() == [hint]


def test_a_delayed_hint_has_not_appeared(lanes: Lanes) -> None:
    """Up to 900 seconds, which is SQS's most."""
    for seconds in (1, 900):
        lanes.queue.send(Hint("job_1"), client_id="alice", lane=Lane.STANDARD, delay_seconds=seconds)
    assert lanes.appeared() == []
    assert lanes.delayed() == 2


def test_a_hint_sent_twice_is_there_twice(lanes: Lanes) -> None:
    """A queue does not deduplicate; the row does."""
    for _ in range(2):
        lanes.queue.send(Hint("job_1"), client_id="alice", lane=Lane.STANDARD)
    assert lanes.appeared() == [Hint("job_1")] * 2


def test_a_clients_hints_are_one_message_group(deployed: Deployed) -> None:
    """That is what SQS's fair queues go by."""
    sqs = _client("sqs")
    url = deployed.names["StandardQueue"]
    LaneQueues(sqs, {Lane.STANDARD: url}).send(Hint("job_1"), client_id="alice", lane=Lane.STANDARD)
    [message] = sqs.receive_message(QueueUrl=url, MessageSystemAttributeNames=["All"])["Messages"]
    assert message["Attributes"]["MessageGroupId"] == "alice"
    assert message["Body"] == '{"job_id":"job_1","v":1}'


def test_messages_carry_the_trace_of_their_request(deployed: Deployed) -> None:
    """As the system attribute that Lambda goes on from; a message without a trace has none."""
    sqs, trace = _client("sqs"), "Root=1-5759e988-bd862e3fe1be46a994272793;Sampled=1"
    lane, notices = deployed.names["StandardQueue"], deployed.names["NotificationsQueue"]
    hints = LaneQueues(sqs, {Lane.STANDARD: lane})
    hints.send(Hint("job_1"), client_id="alice", lane=Lane.STANDARD, trace=trace)
    hints.send(Hint("job_2"), client_id="alice", lane=Lane.STANDARD)
    NoticesQueue(sqs, notices).send(Telling("job_1", "webhook"), client_id="alice", trace=trace)
    carried = {}
    for url in (lane, notices):
        reply = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, MessageSystemAttributeNames=["All"])
        for message in reply["Messages"]:
            carried[url, json.loads(message["Body"])["job_id"]] = message["Attributes"].get("AWSTraceHeader")
    assert carried == {(lane, "job_1"): trace, (lane, "job_2"): None, (notices, "job_1"): trace}


QUEUES = {Lane.INTERACTIVE: "InteractiveQueue", Lane.STANDARD: "StandardQueue", Lane.BULK: "BulkQueue"}


def test_each_lane_is_a_queue_of_its_own(deployed: Deployed) -> None:
    """A hint appears in its lane only, and is counted there."""
    sqs = _client("sqs")
    urls = {lane: deployed.names[name] for lane, name in QUEUES.items()}
    for count, lane in enumerate(Lane):
        for _ in range(count):
            LaneQueues(sqs, urls).send(Hint("job_1"), client_id="alice", lane=lane)
        LaneQueues(sqs, urls).send(Hint("job_1"), client_id="alice", lane=lane, delay_seconds=60)
    depths = LaneDepths(sqs, urls)
    assert [depths.waiting(lane) for lane in Lane] == [0, 1, 2]
    assert [depths.put_off(lane) for lane in Lane] == [1, 1, 1]


def test_a_depth_is_read_once_in_ten_seconds(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read is a round trip, on the way of every request. A failed one is not repeated at once either."""
    sqs = _client("sqs")
    urls = {lane: deployed.names[name] for lane, name in QUEUES.items()} | {Lane.BULK: "https://sqs.test/none"}
    depths = LaneDepths(sqs, urls)
    now = 1000.0
    depths._known = TTLCache(maxsize=3, ttl=DEPTH_SECONDS, timer=lambda: now)
    reads: list[str] = []
    real = sqs.get_queue_attributes

    def counted(**asked: Any) -> Any:
        reads.append(asked["QueueUrl"])
        return real(**asked)

    monkeypatch.setattr(sqs, "get_queue_attributes", counted)
    for _ in range(3):
        assert depths.waiting(Lane.STANDARD) == 0
        assert depths.waiting(Lane.BULK) is None
        LaneQueues(sqs, urls).send(Hint("job_1"), client_id="alice", lane=Lane.STANDARD)
    assert sorted(reads) == sorted([urls[Lane.STANDARD], urls[Lane.BULK]])
    now += DEPTH_SECONDS
    assert depths.waiting(Lane.STANDARD) == 3


# ── Tellings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("telling", [Telling("job_1", "webhook"), Telling("x" * 128, "slack", tries=9)], ids=str)
def test_a_telling_arrives_as_it_was_sent_and_a_delayed_one_later(deployed: Deployed, telling: Telling) -> None:
    """In its client's message group, so that one whose receiver is slow does not hold up the others."""
    sqs, url = _client("sqs"), deployed.names["NotificationsQueue"]
    queue: NoticeQueue = NoticesQueue(sqs, url)
    queue.send(telling, client_id="alice", delay_seconds=900)
    assert "Messages" not in sqs.receive_message(QueueUrl=url)
    queue.send(telling, client_id="alice")
    [message] = sqs.receive_message(QueueUrl=url, MessageSystemAttributeNames=["All"])["Messages"]
    assert message["Attributes"]["MessageGroupId"] == "alice"
    assert parse_telling(message["Body"]) == telling


# ── Dead letters ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Graveyard:
    """The dead-letter queue, and what SQS's redrive policy does to a message received too often."""

    queue: DeadLetterQueue
    moved_by_policy: Callable[[str], None]


@pytest.fixture(params=["memory", "sqs"])
def graveyard(request: pytest.FixtureRequest) -> Graveyard:
    """Either queue; on SQS the policy is the template's own."""
    if request.param == "memory":
        memory = MemoryDeadLetters(FakeClock(round(1000 * time.time())))

        def moved(body: str) -> None:
            hint = parse_hint(body) if body.startswith("{") else None
            memory.redrive_policy_moves(hint, body)

        return Graveyard(memory, moved)
    deployed = request.getfixturevalue("deployed")
    sqs = _client("sqs")
    lane = deployed.names["StandardQueue"]

    def received_too_often(body: str) -> None:
        sqs.send_message(QueueUrl=lane, MessageBody=body)
        while sqs.receive_message(QueueUrl=lane, VisibilityTimeout=0).get("Messages"):
            pass

    return Graveyard(DeadLetters(sqs, deployed.names["DeadLetterQueue"]), received_too_often)


def test_a_buried_letter_needs_no_explanation(graveyard: Graveyard) -> None:
    """It says why it is there, and since when."""
    began_ms = 1000 * int(time.time())
    graveyard.queue.bury(Hint("job_1", died=3), reason="timeout", detail="late", lane=Lane.STANDARD, client_id="alice")
    graveyard.queue.bury("not a hint", reason="malformed_hint", detail="?", lane=Lane.STANDARD, client_id=None)
    letters = graveyard.queue.look(10)
    assert [letter.reason for letter in letters] == ["timeout", "malformed_hint"]
    assert all(began_ms <= letter.sent_at <= 1000 * time.time() for letter in letters)


def test_what_the_redrive_policy_moved_is_found_with_its_hint(graveyard: Graveyard) -> None:
    """Three receives without an answer, and the message lies there without a reason."""
    graveyard.moved_by_policy(hint_body(Hint("job_1", alone=True)))
    [letter] = graveyard.queue.look(10)
    assert (letter.hint, letter.reason) == (Hint("job_1", alone=True), None)


def test_what_is_no_hint_is_found_with_its_body(graveyard: Graveyard) -> None:
    """So that it can be explained as what it is."""
    graveyard.moved_by_policy("not a hint")
    [letter] = graveyard.queue.look(10)
    assert (letter.hint, letter.body) == (None, "not a hint")


def test_a_removed_letter_is_gone_and_the_others_stay(graveyard: Graveyard) -> None:
    """Looking at letters takes none of them away."""
    for number in range(3):
        graveyard.moved_by_policy(hint_body(Hint(f"job_{number}")))
    letters = graveyard.queue.look(10)
    assert {letter.hint.job_id for letter in letters if letter.hint} == {"job_0", "job_1", "job_2"}
    graveyard.queue.remove(letters[0])
    graveyard.queue.remove(letters[0])  # a second time does no harm


@pytest.mark.parametrize("limit", [1, 3, 12])
def test_no_more_letters_are_returned_than_asked_for(graveyard: Graveyard, limit: int) -> None:
    """The repairer works for a bounded time."""
    for number in range(15):
        graveyard.moved_by_policy(hint_body(Hint(f"job_{number}")))
    letters = graveyard.queue.look(limit)
    assert 0 < len(letters) <= limit
    assert len({letter.receipt for letter in letters}) == len(letters)


def test_letters_in_hand_are_seen_by_nobody_else_until_they_are_put_back(graveyard: Graveyard) -> None:
    """All letters, explained or not, each under one name at every look."""
    queue = graveyard.queue
    graveyard.moved_by_policy(hint_body(Hint("job_0")))
    queue.bury(Hint("job_1", died=3), reason="timeout", detail="late", lane=Lane.BULK, client_id="alice")
    letters = [letter for _ in range(3) for letter in queue.receive(60)]
    assert [letter.hint.job_id for letter in letters if letter.hint] == ["job_0", "job_1"]
    assert [(letter.reason, letter.detail) for letter in letters] == [(None, ""), ("timeout", "late")]
    queue.put_back(letters[1:])
    [again] = queue.receive(60)
    assert (again.name, again.hint) == (letters[1].name, letters[1].hint)
    queue.remove(again)
    queue.put_back([letters[0], again])  # one that is gone does no harm
    assert [letter.name for _ in range(2) for letter in queue.receive(60)] == [letters[0].name]


def test_no_more_than_ten_letters_are_taken_at_once(graveyard: Graveyard) -> None:
    """And all of them in the end."""
    for number in range(25):
        graveyard.queue.bury(Hint(f"job_{number}", died=0), reason="x", detail="", lane=Lane.BULK, client_id="a")
    takes = [graveyard.queue.receive(60) for _ in range(6)]
    assert max(len(take) for take in takes) <= 10
    assert len({letter.name for take in takes for letter in take}) == 25
    assert graveyard.queue.count() == 25  # in whosever hand they are


def test_a_letter_tells_the_tool_what_the_console_shows(deployed: Deployed) -> None:
    """Lane, client and when it was put there."""
    queue = _dead_letters(deployed)
    queue.bury(Hint("job_1", died=3), reason="timeout", detail="late", lane=Lane.BULK, client_id="alice")
    [letter] = queue.receive(60)
    assert (letter.lane, letter.client_id) == (Lane.BULK, "alice")
    assert abs(letter.sent_at - time.time() * 1000) < 60_000


def _buried(deployed: Deployed) -> dict[str, Any]:
    url = deployed.names["DeadLetterQueue"]
    [message] = _client("sqs").receive_message(QueueUrl=url, MessageAttributeNames=["All"])["Messages"]
    found: dict[str, Any] = message
    return found


def _dead_letters(deployed: Deployed) -> DeadLetters:
    return DeadLetters(_client("sqs"), deployed.names["DeadLetterQueue"])


def test_a_letter_shows_the_operator_why_what_and_whose(deployed: Deployed) -> None:
    """As message attributes, which the console lists."""
    _dead_letters(deployed).bury(
        Hint("job_1", died=3), reason="timeout", detail="The provider was late.", lane=Lane.STANDARD, client_id="alice"
    )
    letter = _buried(deployed)
    shown = {name: value["StringValue"] for name, value in letter["MessageAttributes"].items()}
    assert shown == {
        "reason": "timeout",
        "detail": "The provider was late.",
        "lane": "standard",
        "client_id": "alice",
    }
    assert letter["Body"] == '{"died":3,"job_id":"job_1","v":1}'


def test_api_06_a_letter_holds_no_character_that_sqs_refuses(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """moto lets them through, so this looks at what is sent; what is no hint may hold anything."""
    sqs = _client("sqs")
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(sqs, "send_message", lambda **arguments: sent.append(arguments))
    odd = "a\u0000\u000b\u001b\ufffe\uffff\ud800z \t\n\r é 中 😀"
    DeadLetters(sqs, deployed.names["DeadLetterQueue"]).bury(
        odd, reason="malformed_hint", detail=odd, lane=Lane.STANDARD, client_id=None
    )
    allowed = "a??????z \t\n\r é 中 😀"
    [arguments] = sent
    assert arguments["MessageBody"] == allowed
    assert arguments["MessageAttributes"]["detail"]["StringValue"] == allowed


@pytest.mark.parametrize(("body", "kept"), [("", "(empty)"), ("x" * 300_000, "x" * 10_000)], ids=["empty", "long"])
def test_a_letter_can_be_sent_whatever_was_found(deployed: Deployed, body: str, kept: str) -> None:
    """SQS takes neither an empty body nor one beyond its limit."""
    _dead_letters(deployed).bury(body, reason="malformed_hint", detail="", lane=Lane.STANDARD, client_id=None)
    assert _buried(deployed)["Body"] == kept


# ── Clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_client_is_found_by_the_hash_of_its_key_unless_it_is_disabled(deployed: Deployed) -> None:
    """As the operator's tool makes it; the key itself is kept nowhere."""
    import hashlib

    table = boto3.resource("dynamodb").Table(deployed.names["ClientsTable"])
    key = create_client(table, "alice", "Alice", 1)
    key_hash = hashlib.sha256(key.encode()).hexdigest()
    clients = ClientsTable(_client("dynamodb"), deployed.names["ClientsTable"])
    assert clients.find(key_hash) == Client("alice", "Alice")
    assert clients.find("0" * 64) is None
    [row] = table.scan()["Items"]
    assert key not in str(row)
    table.put_item(Item=row | {"disabled": True})
    assert clients.find(key_hash) is None


# ── Trouble ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "error",
    [EndpointConnectionError(endpoint_url="https://x.test"), ReadTimeoutError(endpoint_url="https://x.test")],
    ids=lambda error: type(error).__name__,
)
def test_a_service_that_does_not_answer_is_an_unavailable_port(error: Exception) -> None:
    """Named by its kind; where it was said to be is nobody's business."""
    with pytest.raises(PortUnavailable) as raised, translated():
        raise error
    assert raised.value.message == type(error).__name__


def test_what_is_not_awss_fault_is_not_translated() -> None:
    """A mistake of ours must not look like an outage."""
    with pytest.raises(KeyError), translated():
        raise KeyError("x")


def test_a_queue_or_bucket_that_is_not_there_is_an_unavailable_port(aws: None) -> None:
    """With AWS's code for the logs."""
    nowhere = "https://sqs.eu-central-1.amazonaws.com/123456789012/nowhere"
    calls: list[Callable[[], object]] = [
        lambda: LaneQueues(_client("sqs"), {Lane.STANDARD: nowhere}).send(
            Hint("job_1"), client_id="a", lane=Lane.STANDARD
        ),
        lambda: NoticesQueue(_client("sqs"), nowhere).send(Telling("job_1", "webhook"), client_id="a"),
        lambda: DeadLetters(_client("sqs"), nowhere).look(10),
        lambda: PayloadsBucket(lambda: _client("s3"), "nowhere").put("k", "v"),
        lambda: PayloadsBucket(lambda: _client("s3"), "nowhere").get("k"),
        lambda: ClientsTable(_client("dynamodb"), "nowhere").find("0"),
    ]
    for call in calls:
        with pytest.raises(PortUnavailable):
            call()
