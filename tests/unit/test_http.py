"""The HTTP endpoint: bad input is refused by field, odd events are no error, and nothing is stored for either."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backburner import documents, http
from backburner.errors import Overloaded, PortUnavailable
from backburner.models import Attempt, Client, Failure, Job, JobStatus, Lane, Notice, NoticeStatus, Payload, Usage
from tests.fakes.house import ALICE, BOB, House
from tests.fakes.memory import START, FakeChance, MemoryClients, MemoryHints, MemoryStore
from tests.fakes.sockets import MemoryConnections

KEY, OTHER_KEY = "bb_alice-0001", "bb_bob-0002"
JSON = {"Content-Type": "application/json"}


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True)
class Reply:
    """What the gateway would send; `json` is the body read."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def reply_of(answer: dict[str, Any]) -> Reply:
    """A handler's answer, if it is one that API Gateway takes."""
    assert set(answer) == {"statusCode", "body", "isBase64Encoded", "multiValueHeaders"}
    headers = {name.lower(): ", ".join(values) for name, values in answer["multiValueHeaders"].items()}
    return Reply(answer["statusCode"], headers, answer["body"])


def gateway_event(method: str, path: str, headers: Any = None, body: Any = None, **more: Any) -> dict[str, Any]:
    """As the REST API sends it."""
    return {
        "resource": path,
        "path": path,
        "httpMethod": method,
        "headers": headers,
        "multiValueHeaders": None if headers is None else {name: [value] for name, value in headers.items()},
        "queryStringParameters": None,
        "multiValueQueryStringParameters": None,
        "pathParameters": None,
        "stageVariables": None,
        "requestContext": {"stage": "api", "path": f"/api{path}", "httpMethod": method},
        "body": body,
        "isBase64Encoded": False,
        **more,
    }


@dataclass
class Context:
    """Lambda's: 28 seconds from now on, by the house's clock."""

    house: House

    def __post_init__(self) -> None:
        self._ends_at = self.house.clock.now() + 28_000

    def get_remaining_time_in_millis(self) -> int:
        return self._ends_at - self.house.clock.now()


@dataclass
class Desk:
    """Both handlers over one house."""

    house: House = field(default_factory=House)

    def __post_init__(self) -> None:
        self.clients = MemoryClients({_hash(KEY): ALICE, _hash(OTHER_KEY): BOB})
        self.connections = MemoryConnections(lambda: self.house.clock.now() // 1000)
        office = http.TicketOffice(self.connections, self.house.clock, self.house.chance, "wss://sockets.example.test")
        arguments = (self.house.submission, http.Doorkeeper(self.clients), self.house.journal)
        self.ingest = http.ingest_handler(*arguments)
        self.status = http.status_handler(*arguments, office, long_poll_seconds=20)

    def post(self, body: Any, headers: dict[str, Any] | None = None, **more: Any) -> Reply:
        """POST /jobs; a value that is no text is written as JSON."""
        text = body if isinstance(body, str) else json.dumps(body)
        given = {"Authorization": f"Bearer {KEY}", **JSON} if headers is None else headers
        return reply_of(self.ingest(gateway_event("POST", "/jobs", given, text, **more), None))

    def ask(self, method: str, path: str, headers: dict[str, Any] | None = None, **more: Any) -> Reply:
        """Anything else."""
        given = {"Authorization": f"Bearer {KEY}"} if headers is None else headers
        return reply_of(self.status(gateway_event(method, path, given, **more), Context(self.house)))

    @property
    def is_untouched(self) -> bool:
        """Nothing stored, nothing queued."""
        house = self.house
        return not (house.store.rows or house.hints.sent or house.payloads.texts or house.dead_letters.letters)


@pytest.fixture
def desk() -> Desk:
    """A fresh one."""
    return Desk()


def refused(reply: Reply, status: int, code: str, *fields: str) -> Any:
    """The problem document, which has the shape of all of them and names these fields."""
    assert reply.status == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    document = reply.json
    assert document["type"] == f"urn:backburner:problem:{code}"
    assert document["status"] == status
    assert document["code"] == code
    assert document["title"]
    assert document["detail"]
    assert set(document) <= {"type", "title", "status", "detail", "code", "errors"}
    assert [error["field"] for error in document.get("errors", [])] == list(fields)
    assert all(error["message"] for error in document.get("errors", []))
    return document


# ── Accepting ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_accepted_job_is_answered_with_all_that_is_needed_to_follow_it(desk: Desk) -> None:
    """The whole reply; its row and its hint are there."""
    reply = desk.post({"prompt": "Name a river."})
    [job_id] = desk.house.store.rows
    assert reply == Reply(
        202,
        {"content-type": "application/json", "location": f"jobs/{job_id}"},
        json.dumps(
            {
                "job_id": job_id,
                "status": "queued",
                "poll_url": f"/jobs/{job_id}",
                "expires_at": START // 1000 + 15 * 86_400,
            },
            separators=(",", ":"),
        ),
    )
    assert [sent.hint.job_id for sent in desk.house.hints.sent] == [job_id]


def test_every_documented_field_is_taken(desk: Desk) -> None:
    """All at once, with null for what is absent."""
    body = {
        "prompt": None,
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                     {"role": "user", "content": "c"}],
        "system_prompt": "Be brief.", "model": "m-1", "provider": "fake", "max_tokens": 4_000, "user_id": "u-1",
        "metadata": {"k": [1, None]}, "priority": "bulk", "deadline_seconds": 3_600,
    }  # fmt: skip
    reply = desk.post(body)
    assert reply.status == 202
    job = desk.ask("GET", f"/jobs/{reply.json['job_id']}").json
    assert (job["priority"], job["metadata"], job["deadline_at"]) == ("bulk", {"k": [1, None]}, START // 1000 + 3_600)


# ── Bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "body",
    [
        "[1,2]", '"hi"', "null", "7", "true", "{}", "[]", '{"prompt":["a"]}', '{"prompt":{"text":"a"}}',
        '{"prompt":null}', '{"prompt":"a","prompt":"b"}', "", " ", "{", '{"prompt":"a"', '{"prompt":"a"}{}',
        "prompt=a", "<prompt/>", "\ufeff{}", "'", '{"prompt":"a",}', "{'prompt':'a'}", '{"prompt":"a\nb"}',
    ],
    ids=ascii,
)  # fmt: skip
def test_api_01_json_of_the_wrong_shape_is_a_400(desk: Desk, body: str) -> None:
    """In the shape of every error; nothing is stored or queued."""
    assert (desk.post(body).status, desk.post(body).json["code"]) == (400, "invalid_request")
    assert desk.is_untouched


@pytest.mark.parametrize(
    ("number", "says"),
    [
        ("NaN", "NaN is not JSON"),
        ("Infinity", "Infinity is not JSON"),
        ("-Infinity", "-Infinity is not JSON"),
        ("1e400", "the number 1e400 is out of range"),
        ("-1e400", "the number -1e400 is out of range"),
        ("1" + "0" * 4_400, None),
        ("-" + "9" * 5_000, None),
        ("0x10", None),
        ("01", None),
        (".5", None),
        ("+1", None),
    ],
    ids=lambda value: (value or "")[:12],
)
@pytest.mark.parametrize("where", ['{"prompt":"a","max_tokens":%s}', '{"prompt":"a","metadata":{"n":[%s]}}'])
def test_what_is_no_number_is_refused_wherever_it_stands(desk: Desk, where: str, number: str, says: str | None) -> None:
    """Decided at intake, once, so that no store or reader downstream meets it."""
    document = refused(desk.post(where % number), 400, "invalid_request")
    assert says is None or says in document["detail"]
    assert len(document["detail"]) < 300
    assert desk.is_untouched


@pytest.mark.parametrize("number", ["9007199254740993", "0.7", "-0.0", "1e-400", "1E5", "1" + "0" * 300])
def test_a_number_comes_back_equal(desk: Desk, number: str) -> None:
    """Of any size that JSON readers agree on."""
    job_id = desk.post(f'{{"prompt":"a","metadata":{{"n":{number}}}}}').json["job_id"]
    assert desk.ask("GET", f"/jobs/{job_id}").json["metadata"] == {"n": json.loads(number)}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ('{"prompt":"\\ud800"}', "prompt"),
        ('{"prompt":"a\\udc00b"}', "prompt"),
        ('{"messages":[{"role":"user","content":"\\ud83d"}]}', "messages.0.content"),
        ('{"prompt":"a","metadata":{"k":["\\udfff"]}}', "metadata.k.0"),
        ('{"prompt":"a","metadata":{"\\ud800":1}}', "metadata.?"),
        ('{"prompt":"a","\\ud800":1}', "?"),
    ],
)
def test_half_a_character_is_refused_by_field(desk: Desk, body: str, where: str) -> None:
    """A lone surrogate can be neither stored nor sent; a pair is a character like any other."""
    refused(desk.post(body), 400, "invalid_request", where)
    assert desk.is_untouched
    assert desk.post('{"prompt":"\\ud83d\\ude00"}').status == 202


def test_half_a_character_in_the_bodys_own_text_is_refused(desk: Desk) -> None:
    """The event itself is JSON, and may hold what UTF-8 cannot."""
    refused(desk.post('{"prompt":"\ud800"}'), 400, "invalid_request")
    assert desk.is_untouched


@pytest.mark.parametrize(
    "text",
    ["a\u0000b", "a\u000bb", "esc \u001b[0m", "a\ufffeb", "a\uffffb", "tab\tlf\ncr\r ok", "a\u2028b", "é", "e\u0301"],
    ids=ascii,
)
def test_api_06_characters_that_sqs_refuses_are_accepted_since_no_message_holds_them(desk: Desk, text: str) -> None:
    """The text is stored as it is; the hint is a job id."""
    reply = desk.post({"prompt": text, "metadata": {"k": text}})
    assert reply.status == 202
    [sent] = desk.house.hints.sent
    assert sent.hint.job_id == reply.json["job_id"]
    desk.house.work()
    assert desk.house.provider.questions[0].messages[0].content == text  # type: ignore[attr-defined]
    assert desk.ask("GET", f"/jobs/{sent.hint.job_id}").json["metadata"] == {"k": text}


@pytest.mark.parametrize(
    "body",
    [
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 100_000,
        '{"prompt":"a","metadata":{"a":' + "[" * 100_000 + "]" * 100_000 + "}}",
        '{"prompt":"a","metadata":{"a":' + "[" * 900 + "]" * 900 + "}}",
        '{"prompt":"a","metadata":{"a":' + '{"b":' * 32 + "1" + "}" * 34,
        '{"prompt":' + "[" * 900 + "]" * 900 + "}",
        '{"prompt":"a","x":' + "[" * 900 + "]" * 900 + "}",
        '{"messages":' + "[" * 900 + "]" * 900 + "}",
    ],
    ids=lambda body: f"{body[:30]}-{len(body)}",
)
def test_deep_nesting_is_refused(desk: Desk, body: str) -> None:
    """However deep, and wherever; the refusal itself stays small."""
    reply = desk.post(body)
    assert reply.status == 400
    assert len(reply.text) < 10_000
    assert desk.is_untouched


def test_metadata_may_nest_as_deep_as_documented(desk: Desk) -> None:
    """And is read back."""
    metadata = json.loads('{"a":' + "[" * 31 + "]" * 31 + "}")
    job_id = desk.post({"prompt": "a", "metadata": metadata}).json["job_id"]
    assert desk.ask("GET", f"/jobs/{job_id}").json["metadata"] == metadata


@pytest.mark.parametrize(
    "body",
    [
        "{" + ",".join(f'"k{n}":{n}' for n in range(20_000)) + ',"k19999":1}',
        "{" + ",".join(f'"k{n}":{n}' for n in range(200_000)) + "}",
        '{"prompt":"a","metadata":{' + ",".join(f'"k{n}":1' for n in range(200_000)) + "}}",
        '{"messages":[' + ",".join(["1"] * 1_000_000) + "]}",
        '{"prompt":"' + "\\u0000" * 800_000 + '"}',
    ],
    ids=["a late double", "unknown fields", "metadata", "messages", "escapes"],
)
def test_a_body_of_many_parts_is_answered_soon(desk: Desk, body: str) -> None:
    """Within the time of a function that others share; the work is no more than proportional to the body."""
    began = time.thread_time()  # the work, whatever else the machine does
    reply = desk.post(body)
    assert reply.status in (400, 202)
    assert len(reply.text) < 10_000
    assert time.thread_time() - began < 5


# ── Fields ───────────────────────────────────────────────────────────────────────────────────────────────────────────

TALK = [{"role": "user", "content": "a"}]
FIELDS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("unknown field", {"prompt": "a", "seed": 1}, ("seed",)),
    ("a temperature for a model without", {"prompt": "a", "temperature": 1}, ("temperature",)),
    ("two unknown fields", {"prompt": "a", "top_p": 1, "n": 2}, ("top_p", "n")),
    ("blank prompt", {"prompt": " \n\t\u3000"}, ("prompt",)),
    ("empty prompt", {"prompt": ""}, ("prompt",)),
    ("number for a prompt", {"prompt": 7}, ("prompt",)),
    ("blank system prompt", {"prompt": "a", "system_prompt": " "}, ("system_prompt",)),
    ("prompt and messages", {"prompt": "a", "messages": TALK}, ("(body)",)),
    ("neither", {"model": "m-1"}, ("(body)",)),
    ("no messages", {"messages": []}, ("messages",)),
    ("too many messages", {"messages": TALK * 1_001}, ("messages",)),
    ("messages of another kind", {"messages": "a"}, ("messages",)),
    ("a text for a message", {"messages": ["a"]}, ("messages.0",)),
    ("unknown role", {"messages": [{"role": "system", "content": "a"}]}, ("messages.0.role",)),
    ("no role", {"messages": [{"content": "a"}]}, ("messages.0.role",)),
    ("no content", {"messages": [{"role": "user"}]}, ("messages.0.content",)),
    ("blank content", {"messages": [{"role": "user", "content": " "}]}, ("messages.0.content",)),
    ("parts for content", {"messages": [{"role": "user", "content": [{"text": "a"}]}]}, ("messages.0.content",)),
    ("unknown field of a message", {"messages": [{**TALK[0], "name": "x"}]}, ("messages.0.name",)),
    ("assistant's turn last", {"messages": [*TALK, {"role": "assistant", "content": "b"}]}, ("messages",)),
    ("unknown model", {"prompt": "a", "model": "nobody"}, ("model",)),
    ("model with a space", {"prompt": "a", "model": "m 1"}, ("model",)),
    ("model with a line break", {"prompt": "a", "model": "m-1\n"}, ("model",)),
    ("empty model", {"prompt": "a", "model": ""}, ("model",)),
    ("long model", {"prompt": "a", "model": "m" * 129}, ("model",)),
    ("number for a model", {"prompt": "a", "model": 1}, ("model",)),
    ("other provider", {"prompt": "a", "provider": "other"}, ("provider",)),
    ("true for a number", {"prompt": "a", "max_tokens": True}, ("max_tokens",)),
    ("text for a number", {"prompt": "a", "max_tokens": "5"}, ("max_tokens",)),
    ("fraction", {"prompt": "a", "max_tokens": 5.5}, ("max_tokens",)),
    ("float for a whole number", {"prompt": "a", "max_tokens": 5.0}, ("max_tokens",)),
    ("zero tokens", {"prompt": "a", "max_tokens": 0}, ("max_tokens",)),
    ("more tokens than the model has", {"prompt": "a", "max_tokens": 4_001}, ("max_tokens",)),
    ("huge number of tokens", {"prompt": "a", "max_tokens": 10**300}, ("max_tokens",)),
    ("user id with a space", {"prompt": "a", "user_id": "a b"}, ("user_id",)),
    ("user id beyond ASCII", {"prompt": "a", "user_id": "ü"}, ("user_id",)),
    ("long user id", {"prompt": "a", "user_id": "u" * 129}, ("user_id",)),
    ("list for metadata", {"prompt": "a", "metadata": [1]}, ("metadata",)),
    ("text for metadata", {"prompt": "a", "metadata": "x"}, ("metadata",)),
    ("large metadata", {"prompt": "a", "metadata": {"m": "x" * 16_377}}, ("metadata",)),
    ("metadata large in bytes", {"prompt": "a", "metadata": {"m": "中" * 5_460}}, ("metadata",)),
    ("unknown priority", {"prompt": "a", "priority": "urgent"}, ("priority",)),
    ("no deadline", {"prompt": "a", "deadline_seconds": 0}, ("deadline_seconds",)),
    ("far deadline", {"prompt": "a", "deadline_seconds": 604_801}, ("deadline_seconds",)),
    ("true for a deadline", {"prompt": "a", "deadline_seconds": True}, ("deadline_seconds",)),
    ("three at once", {"prompt": 1, "model": 2, "max_tokens": "x"}, ("prompt", "model", "max_tokens")),
]


@pytest.mark.parametrize(("body", "fields"), [case[1:] for case in FIELDS], ids=[case[0] for case in FIELDS])
def test_every_field_has_a_type_and_a_limit_and_is_named_when_it_is_wrong(
    desk: Desk, body: dict[str, Any], fields: tuple[str, ...]
) -> None:
    """And nothing is stored or queued."""
    refused(desk.post(body), 400, "invalid_request", *fields)
    assert desk.is_untouched


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "metadata": {"m": "x" * 16_376}},
        {"prompt": "a", "metadata": {}},
        {"prompt": "a", "max_tokens": 4_000},
        {"prompt": "a", "deadline_seconds": 604_800},
        {"messages": TALK * 1_000},
        {"prompt": "a", "user_id": "u" * 128},
    ],
    ids=lambda body: str(body)[:60],
)
def test_the_limits_themselves_are_allowed(desk: Desk, body: dict[str, Any]) -> None:
    """The last value that is good."""
    assert desk.post(body).status == 202


def test_a_field_name_from_outside_is_shown_bounded_and_printable(desk: Desk) -> None:
    """An error document is no place for control characters or megabytes."""
    document = desk.post({"prompt": "a", "\u0000\n\u202e" + "x" * 10_000: 1}).json
    [error] = document["errors"]
    assert error["field"].isprintable()
    assert len(error["field"]) <= 100
    assert document["detail"].isprintable()


# ── Sizes: API-07 ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("letter", ["a", "中", "😀", "\\\\"])
def test_api_07_the_limit_of_a_request_counts_bytes(desk: Desk, letter: str) -> None:
    """One byte too many is a 413 before any row, payload or message exists; the last one that fits is accepted."""
    room = http.BODY_BYTES_MAX - len('{"prompt":""}')
    size = len(letter.encode())
    fits, too_large = (f'{{"prompt":"{letter * count}"}}' for count in (room // size, room // size + 1))
    refused(desk.post(too_large), 413, "too_large")
    assert desk.is_untouched
    assert desk.post(fits).status == 202


@pytest.mark.parametrize("letter", ["a", "中", "😀", "\\", '"'])
def test_api_07_what_a_row_cannot_hold_is_kept_beside_it_counted_in_bytes(desk: Desk, letter: str) -> None:
    """With the largest metadata on top, no row comes near DynamoDB's 400 KB."""
    for count in (1_000, 100_000, 270_000, 400_000):
        prompt = letter * (count // len(letter.encode()))
        assert (
            desk.post(json.dumps({"prompt": prompt, "metadata": {"m": "x" * 16_000}}, ensure_ascii=False)).status == 202
        )
    rows = list(desk.house.store.rows.values())
    for job in rows:
        assert len((job.request.text or "").encode()) + len((job.metadata or "").encode()) < 120_000
    assert len(desk.house.payloads.texts) == sum(job.request.key is not None for job in rows) >= 1
    desk.house.work()
    assert {job.status for job in desk.house.store.rows.values()} == {JobStatus.COMPLETED}


# ── Keys: API-03 ─────────────────────────────────────────────────────────────────────────────────────────────────────

BAD_KEYS: list[dict[str, Any]] = [
    {},
    {"x-api-key": "kéy-0001"},
    {"Authorization": "Bearer “abc”"},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer "},
    {"Authorization": ""},
    {"Authorization": None},
    {"Authorization": "bearer  abc"},
    {"Authorization": "Basic !!!"},
    {"Authorization": KEY},
    {"Authorization": f"Bearer {KEY} x"},
    {"Authorization": f"Bearer {KEY.upper()}"},
    {"Authorization": f"Bearer {KEY}\u0000"},
    {"Authorization": f"Bearer \ufeff{KEY}"},
    {"x-api-key": "a" * 10_000},
    {"x-api-key": ""},
    {"x-api-key": None},
    {"x-api-key": "\ud800"},
]


@pytest.mark.parametrize("headers", BAD_KEYS, ids=lambda headers: ascii(headers)[:40])
def test_api_03_a_malformed_key_is_answered_as_a_wrong_one(desk: Desk, headers: dict[str, Any]) -> None:
    """401 in the very same words, at every endpoint, whatever else is wrong; no trace of it anywhere."""
    wrong = desk.ask("GET", "/jobs/any", {"Authorization": "Bearer bb_wrong"})
    document = refused(wrong, 401, "unauthorized")
    assert "errors" not in document
    assert wrong.headers["www-authenticate"] == "Bearer"
    replies = [
        desk.ask("GET", "/jobs/any", headers),
        desk.ask("DELETE", "/jobs/any", headers),
        desk.ask("GET", "/jobs", headers),
        desk.post({"prompt": "a"}, headers | JSON),
        desk.post("not json", headers | JSON),
        desk.post({"prompt": "a"}, headers | {"Content-Type": "text/plain"}),
    ]
    assert replies == [wrong] * len(replies)
    assert desk.is_untouched
    assert desk.house.journal.events == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"AUTHORIZATION": f"BEARER   {KEY}  "},
        {"X-API-Key": KEY},
        {"x-api-key": f" {KEY} "},
        {"Authorization": "Basic dXNlcjpwYXNz", "x-api-key": KEY},
        {"Authorization": None, "x-api-key": KEY},
    ],
    ids=str,
)
def test_a_key_is_found_however_its_header_is_written(desk: Desk, headers: dict[str, Any]) -> None:
    """API Gateway passes names on in the sender's case."""
    assert desk.post({"prompt": "a"}, headers | JSON).status == 202


def test_a_key_is_looked_up_once_while_a_function_is_warm(desk: Desk) -> None:
    """A good one; a bad one is looked up each time, so that a new client need not wait."""
    for _ in range(3):
        desk.post({"prompt": "a"})
    assert desk.clients.reads == 1
    for _ in range(3):
        desk.ask("GET", "/jobs", {"Authorization": "Bearer bb_new"})
    assert desk.clients.reads == 4


# ── Idempotency: API-08, API-10 ──────────────────────────────────────────────────────────────────────────────────────


def _with_key(key: str, client: str = KEY) -> dict[str, Any]:
    return {"Authorization": f"Bearer {client}", "Idempotency-Key": key, **JSON}


def test_a_replay_says_that_it_is_one(desk: Desk) -> None:
    """Formatting and the order of keys do not matter; the status is the present one."""
    first = desk.post('{"prompt":"a","max_tokens":5}', _with_key("k"))
    again = desk.post('{ "max_tokens": 5, "prompt": "\\u0061", "model": null }', _with_key("k"))
    assert again.json == first.json
    assert again.headers == first.headers | {"idempotent-replayed": "true"}
    desk.house.work()
    assert desk.post('{"prompt":"a","max_tokens":5}', _with_key("k")).json == first.json | {"status": "completed"}


def test_the_same_key_with_another_request_is_a_422(desk: Desk) -> None:
    """Nothing new is stored or queued."""
    desk.post({"prompt": "a"}, _with_key("k"))
    desk.house.hints.sent.clear()
    for other in ({"prompt": "b"}, {"prompt": "a", "metadata": {}}, {"prompt": "a", "priority": "bulk"}):
        refused(desk.post(other, _with_key("k")), 422, "idempotency_conflict", "Idempotency-Key")
    assert len(desk.house.store.rows) == 1
    assert desk.house.hints.sent == []


@pytest.mark.parametrize("key", ["", " ", "a b", "ü", "k" * 256, "a\u0000", "a\n"], ids=ascii)
def test_a_malformed_idempotency_key_is_refused_by_name(desk: Desk, key: str) -> None:
    """Rather than passed over: the caller relies on it."""
    refused(desk.post({"prompt": "a"}, _with_key(key)), 400, "invalid_request", "Idempotency-Key")
    assert desk.is_untouched


def test_api_10_a_key_belongs_to_its_client(desk: Desk) -> None:
    """Two jobs, each visible to its own client only; joined names cannot be made to collide."""
    first = desk.post({"prompt": "a secret"}, _with_key("same-key"))
    second = desk.post({"prompt": "a secret"}, _with_key("same-key", OTHER_KEY))
    assert first.json["job_id"] != second.json["job_id"]
    assert "idempotent-replayed" not in second.headers
    bob = {"Authorization": f"Bearer {OTHER_KEY}"}
    nobody = desk.ask("GET", "/jobs/job_nobody", bob)
    for method in ("GET", "DELETE"):
        assert desk.ask(method, f"/jobs/{first.json['job_id']}", bob) == nobody
    assert [job["job_id"] for job in desk.ask("GET", "/jobs", bob).json["jobs"]] == [second.json["job_id"]]
    desk.clients._clients[_hash("bb_x")] = Client("alice#b", "x")
    third = desk.post({"prompt": "a secret"}, _with_key("c", "bb_x"))
    fourth = desk.post({"prompt": "a secret"}, _with_key("b#c"))
    assert third.json["job_id"] != fourth.json["job_id"]


class _Locked(MemoryStore):
    """As atomic as DynamoDB; `entered` is called before each conditional put, outside the lock."""

    def __init__(self, entered: Callable[[], object]) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._entered = entered

    def add(self, job: Job, now: int) -> Job | None:
        self._entered()
        with self._lock:
            return super().add(job, now)


class _LockedChance(FakeChance):
    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def name(self) -> str:
        with self._lock:
            return super().name()


@pytest.mark.parametrize("parallel", [2, 20])
def test_api_08_parallel_requests_with_one_key_make_one_job(parallel: int) -> None:
    """All stand before the store before one may enter: one id in all replies, one row, one hint, one call, no 5xx."""
    barrier = threading.Barrier(parallel)
    first = House()
    parts: dict[str, Any] = {"clock": first.clock, "chance": _LockedChance(), "hints": MemoryHints(first.clock)}
    house = House(store=_Locked(barrier.wait), **parts)
    # Each function has a process of its own, so each request has handlers of its own over the shared house.
    desks = [Desk(house) for _ in range(parallel)]
    with ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(one.post, {"prompt": "hello"}, _with_key("idem-0001")) for one in desks]
        replies = [future.result() for future in futures]
    assert {reply.status for reply in replies} == {202}
    assert len({reply.text for reply in replies}) == 1
    assert sum("idempotent-replayed" not in reply.headers for reply in replies) == 1
    assert len(house.store.rows) == len(house.hints.sent) == 1
    house.settle()
    assert len(house.provider.questions) == 1  # type: ignore[attr-defined]


# ── Odd events ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "odd",
    [
        {"headers": None, "multiValueHeaders": None},
        {"headers": {}, "multiValueHeaders": {}},
        {"headers": None},
        {"multiValueHeaders": None},
        {"pathParameters": None},
        {"queryStringParameters": None, "multiValueQueryStringParameters": None},
        {"queryStringParameters": {"status": ""}},
        {"requestContext": None},
        {"requestContext": {}},
        {"stageVariables": None},
        {"isBase64Encoded": None},
        {"body": None},
        {"body": None, "isBase64Encoded": True},
        {"body": "", "isBase64Encoded": True},
        {"body": "!!!", "isBase64Encoded": True},
        {"body": "YQ", "isBase64Encoded": True},
        {"body": base64.b64encode(b"\xff\xfe").decode(), "isBase64Encoded": True},
        {"body": "é", "isBase64Encoded": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("missing", [False, True], ids=["null", "missing"])
def test_an_odd_gateway_event_is_never_a_500(desk: Desk, odd: dict[str, Any], missing: bool) -> None:
    """Nulls where mappings are usual, or nothing at all; bodies that are not what they say."""
    headers = {"Authorization": f"Bearer {KEY}", **JSON}
    for handler, method, path in (
        (desk.ingest, "POST", "/jobs"),
        (desk.status, "GET", "/jobs"),
        (desk.status, "GET", "/jobs/any"),
        (desk.status, "DELETE", "/jobs/any"),
        (desk.status, "PUT", "/nowhere"),
    ):
        event = gateway_event(method, path, headers, '{"prompt":"a"}') | odd
        for name in [name for name, value in odd.items() if missing and value is None]:
            del event[name]
        assert reply_of(handler(event, Context(desk.house))).status < 500
    assert desk.house.journal.named("request_failed") == desk.house.journal.named("request_faulted") == []


def test_a_body_in_base64_is_read(desk: Desk) -> None:
    """As a gateway with binary media types sends it."""
    encoded = base64.b64encode('{"prompt":"Donau 🏞️"}'.encode()).decode()
    assert desk.post(encoded, isBase64Encoded=True).status == 202
    [job] = desk.house.store.rows.values()
    assert json.loads(job.request.text) == {"prompt": "Donau 🏞️"}


def test_a_body_that_is_not_what_it_says_is_a_400(desk: Desk) -> None:
    """Not base64, or not UTF-8."""
    for body in ("YQ", "é", base64.b64encode(b"\xff{}").decode()):
        refused(desk.post(body, isBase64Encoded=True), 400, "invalid_request")
    assert desk.is_untouched


def test_headers_given_twice_are_no_error(desk: Desk) -> None:
    """The gateway shows the last one, and all of them beside it."""
    headers = {"Authorization": f"Bearer {KEY}", **JSON, "Idempotency-Key": "k2"}
    many = {"Authorization": ["Bearer wrong", f"Bearer {KEY}"], "Idempotency-Key": ["k1", "k2"],
            "Content-Type": ["text/plain", "application/json"]}  # fmt: skip
    assert desk.post({"prompt": "a"}, headers, multiValueHeaders=many).status == 202
    both_cases = {"authorization": "Bearer wrong", "Authorization": f"Bearer {KEY}", **JSON}
    assert desk.post({"prompt": "a"}, both_cases).status in (202, 401)


@pytest.mark.parametrize(
    "media_type",
    ["application/json", "APPLICATION/JSON", "application/json; charset=utf-8", " application/json ;x",
     "application/vnd.x+json", "", None],
)  # fmt: skip
def test_json_is_taken_under_all_its_names(desk: Desk, media_type: str | None) -> None:
    """Or none."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": media_type}
    assert desk.post({"prompt": "a"}, headers).status == 202
    assert desk.post({"prompt": "a"}, {"authorization": f"Bearer {KEY}"}).status == 202


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json", ";"]
)
def test_what_is_not_json_is_a_415(desk: Desk, media_type: str) -> None:
    """Whatever the body looks like."""
    headers = {"authorization": f"Bearer {KEY}", "CONTENT-TYPE": media_type}
    refused(desk.post({"prompt": "a"}, headers), 415, "unsupported_media_type")
    assert desk.is_untouched


# ── Paths and methods ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "path", ["/", "/nowhere", "/jobs/a/b", "//jobs", "/Jobs", "/job", "/jobs.json", "/favicon.ico", "/é"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS"])
def test_an_unknown_path_is_a_404(desk: Desk, method: str, path: str) -> None:
    """As a problem document, also without a key."""
    refused(desk.ask(method, path, {}), 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        *((method, "/jobs", "GET, POST") for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE")),
        *((method, "/jobs/x", "GET, DELETE") for method in ("POST", "PUT", "PATCH", "OPTIONS", "HEAD")),
        ("BREW", "/jobs", "GET, POST"),
    ],
)
def test_a_wrong_method_is_a_405_that_says_which_are_right(desk: Desk, method: str, path: str, allowed: str) -> None:
    """Both functions share the paths, so the list is of both."""
    reply = desk.ask(method, path)
    refused(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == allowed


@pytest.mark.parametrize(
    "job_id",
    ["job_nobody", "x", "-", "é", "%00", "a%2Fb", "..", "`", '"x"', "a\nb", "\\", "#", "a" * 10_000, "job_ 1", "💥"],
    ids=ascii,
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_job_has_such_an_id(desk: Desk, method: str, job_id: str) -> None:
    """404 as for any other, and never 405 with the very method in `Allow`."""
    reply = desk.ask(method, f"/jobs/{job_id}", pathParameters={"job_id": job_id})
    assert reply.status == 404
    assert reply.json["code"] in ("job_not_found", "not_found")


# ── Reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def stored(desk: Desk, **changes: Any) -> Job:
    """A job of Alice's as it stands in the store."""
    job: Job = replace(desk.house.accept(), **changes)
    desk.house.store.rows[job.job_id] = job
    return job


def test_a_queued_job_is_shown(desk: Desk) -> None:
    """With what is known so far, and no nulls."""
    job = stored(desk)
    reply = desk.ask("GET", f"/jobs/{job.job_id}")
    assert (reply.status, reply.headers, reply.json) == (
        200,
        {"content-type": "application/json"},
        {
            "job_id": job.job_id,
            "status": "queued",
            "priority": "standard",
            "attempts": 0,
            "created_at": START // 1000,
            "deadline_at": START // 1000 + 86_400,
            "expires_at": START // 1000 + 15 * 86_400,
            "position": 1,
            "estimated_start_at": START // 1000,
        },
    )


def test_a_failed_job_is_shown_with_its_receipt_and_its_deliveries(desk: Desk) -> None:
    """Every line and every figure; the operator's own target is not the client's business."""
    job = stored(
        desk,
        status=JobStatus.FAILED,
        attempts=2,
        finished_at=START + 9_999,
        error=Failure("timeout", "Late.", retryable=True),
        log=(
            Attempt(1, "worker_lost", START, START + 1_000),
            Attempt(2, "timeout", START + 2_000, START + 9_000, "openai", "m-1", "req-1",
                    Usage(10, 5, 4, 2, estimated=True), 1_234_567),
        ),
        outbox=(
            Notice("dead_letter"),
            Notice("webhook", NoticeStatus.GIVEN_UP, tries=8, told_at=START + 20_000, last_error="connection"),
            Notice("slack", NoticeStatus.DELIVERED, tries=1, told_at=START + 10_000),
        ),
        metadata='{"k":0.7}',
    )  # fmt: skip
    shown = desk.ask("GET", f"/jobs/{job.job_id}").json
    usage = {"input_tokens": 10, "output_tokens": 5, "cached_tokens": 4, "cache_write_tokens": 2, "total_tokens": 15,
             "estimated": True}  # fmt: skip
    second = START // 1000
    assert shown == {
        "job_id": job.job_id,
        "status": "failed",
        "priority": "standard",
        "attempts": 2,
        "created_at": second,
        "deadline_at": second + 86_400,
        "finished_at": second + 9,
        "expires_at": second + 15 * 86_400,
        "error": {"code": "timeout", "message": "Late.", "retryable": True},
        "metadata": {"k": 0.7},
        "usage": usage,
        "cost_usd": 1.234567,
        "deliveries": [
            {"target": "webhook", "status": "given_up", "tries": 8, "given_up_at": second + 20,
             "last_error": "connection"},
            {"target": "slack", "status": "delivered", "tries": 1, "told_at": second + 10},
        ],
        "receipt": [
            {"attempt": 1, "outcome": "worker_lost", "began_at": second, "ended_at": second + 1},
            {"attempt": 2, "outcome": "timeout", "began_at": second + 2, "ended_at": second + 9, "provider": "openai",
             "model": "m-1", "request_id": "req-1", "usage": usage, "cost_usd": 1.234567},
            {"target": "webhook", "outcome": "given_up", "tries": 8, "ended_at": second + 20, "error": "connection"},
        ],
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "中" * 100, '\u0000 \u2028 </script> \\ "'], ids=["empty", "中", "odd"])
def test_a_result_is_shown_as_it_was_given(desk: Desk, text: str) -> None:
    """Inline or from beside the row."""
    result = json.dumps({"text": text, "finish_reason": "stop", "model": "m-1", "provider": "fake"})
    for payload in (Payload(result), Payload(None, "results/x")):
        desk.house.payloads.texts["results/x"] = result
        job = stored(desk, status=JobStatus.COMPLETED, result=payload)
        assert desk.ask("GET", f"/jobs/{job.job_id}").json["result"] == json.loads(result)


@pytest.mark.parametrize("letter", ["a", "中", '"', "\n", "\\"])
def test_a_result_too_large_for_lambdas_reply_becomes_a_link(desk: Desk, letter: str) -> None:
    """Measured on the reply as Lambda sends it, in which JSON is wrapped in JSON; it says how long the link holds."""
    lambda_bytes_max = 6 * 1024 * 1024
    linked: list[bool] = []
    for count in (1_000_000, 2_400_000, 2_900_000, 4_990_000, 6_000_000):
        result = json.dumps({"text": letter * (count // len(letter.encode()))}, ensure_ascii=False)
        desk.house.payloads.texts["results/x"] = result
        job = stored(desk, status=JobStatus.COMPLETED, result=Payload(None, "results/x"))
        answer = desk.status(gateway_event("GET", f"/jobs/{job.job_id}", {"x-api-key": KEY}), Context(desk.house))
        assert len(json.dumps(answer, ensure_ascii=False).encode()) <= lambda_bytes_max
        shown = reply_of(answer).json
        linked.append("result_url" in shown)
        assert linked[-1] is ("result" not in shown)
        if linked[-1]:
            assert shown["result_url"] == f"https://payloads.example.test/results/x?seconds={documents.LINK_SECONDS}"
            assert str(documents.LINK_SECONDS) in shown["result_note"]
    assert linked == sorted(linked)
    assert (linked[0], linked[-1]) == (False, True)


def test_res_04_an_expired_job_reads_as_none_before_ttl_removes_it(desk: Desk) -> None:
    """`expires_at` in the reply is the row's own, in seconds, and 404 begins with that very second."""
    reply = desk.post({"prompt": "a"})
    job_id, expires_at = reply.json["job_id"], reply.json["expires_at"]
    assert desk.house.job(job_id).expires_at == expires_at
    assert START // 1000 < expires_at < START // 1000 + 400 * 86_400
    desk.house.clock.time = expires_at * 1000 - 1
    assert desk.ask("GET", f"/jobs/{job_id}").status == 200
    desk.house.clock.time = expires_at * 1000
    refused(desk.ask("GET", f"/jobs/{job_id}"), 404, "job_not_found")
    refused(desk.ask("DELETE", f"/jobs/{job_id}"), 404, "job_not_found")
    assert desk.ask("GET", "/jobs").json == {"jobs": [], "next_cursor": None}


def test_a_cancelled_job_is_answered_as_it_then_is(desk: Desk) -> None:
    """200 with the job, again and again; 409 once it has ended otherwise."""
    job_id = desk.post({"prompt": "a"}).json["job_id"]
    cancelled = desk.ask("DELETE", f"/jobs/{job_id}")
    assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
    assert desk.ask("DELETE", f"/jobs/{job_id}") == cancelled == desk.ask("GET", f"/jobs/{job_id}")
    done = stored(desk, status=JobStatus.COMPLETED, result=Payload("{}"))
    document = refused(desk.ask("DELETE", f"/jobs/{done.job_id}"), 409, "job_is_final")
    assert document["detail"] == "The job is completed; it can no longer be cancelled."


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ({"status": "done"}, "status"),
        ({"status": ""}, "status"),
        ({"status": "QUEUED"}, "status"),
        ({"limit": "0"}, "limit"),
        ({"limit": "51"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "1.0"}, "limit"),
        ({"limit": "٣"}, "limit"),
        ({"limit": "9" * 5_000}, "limit"),
        ({"limit": "ten"}, "limit"),
        ({"cursor": "nonsense"}, "cursor"),
        ({"cursor": "7"}, "cursor"),
        ({"cursor": "é"}, "cursor"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_a_wrong_parameter_of_a_listing_is_refused_by_name(desk: Desk, query: dict[str, str], name: str) -> None:
    """The page and the status that were meant are unknown, so nothing is guessed."""
    desk.post({"prompt": "a"})
    refused(desk.ask("GET", "/jobs", queryStringParameters=query), 400, "invalid_request", name)


def test_a_listing_shows_pages_of_jobs_without_their_contents(desk: Desk) -> None:
    """Newest first; unknown parameters are passed over."""
    for number in range(3):
        desk.house.clock.advance(1)
        stored(desk, status=JobStatus.COMPLETED if number else JobStatus.QUEUED, result=Payload("{}"))
    page = desk.ask("GET", "/jobs", queryStringParameters={"limit": "2", "x": "y"}).json
    assert [set(job) for job in page["jobs"]] == [
        {"job_id", "status", "priority", "attempts", "created_at", "deadline_at", "expires_at"}
    ] * 2
    rest = desk.ask("GET", "/jobs", queryStringParameters={"cursor": page["next_cursor"]}).json
    created = [job["created_at"] for job in page["jobs"] + rest["jobs"]]
    assert created == sorted(created, reverse=True)
    assert (len(created), rest["next_cursor"]) == (3, None)
    queued = desk.ask("GET", "/jobs", queryStringParameters={"status": "queued"}).json["jobs"]
    assert [job["status"] for job in queued] == ["queued"]


# ── Trouble of ours ──────────────────────────────────────────────────────────────────────────────────────────────────


def _raising(error: Exception) -> Callable[..., Any]:
    def raise_it(*_: Any, **__: Any) -> Any:
        raise error

    return raise_it


def test_a_store_that_does_not_answer_is_a_503_to_be_tried_again(desk: Desk) -> None:
    """Accepting, reading, listing and finding the client."""
    job_id = desk.post({"prompt": "a"}).json["job_id"]
    for name in ("add", "get", "list_by_client"):
        setattr(desk.house.store, name, _raising(PortUnavailable("ThrottlingException")))
    replies = [desk.post({"prompt": "a"}), desk.ask("GET", f"/jobs/{job_id}"), desk.ask("GET", "/jobs")]
    desk = Desk()
    desk.clients.find = _raising(PortUnavailable("ThrottlingException"))  # type: ignore[method-assign]
    for reply in (*replies, desk.post({"prompt": "a"})):
        refused(reply, 503, "unavailable")
        assert reply.headers["retry-after"] == "1"
        assert "Throttling" not in reply.text


@pytest.mark.parametrize("name", ["add", "get", "list_by_client", "find"])
def test_the_log_names_what_did_not_answer_and_no_fault_of_ours(desk: Desk, name: str) -> None:
    """A fault of ours raises an alarm, which takes a new version back; AWS's trouble is none."""
    setattr(
        desk.clients if name == "find" else desk.house.store, name, _raising(PortUnavailable("ThrottlingException"))
    )
    replies = [desk.post({"prompt": "a"}), desk.ask("GET", "/jobs/job_1"), desk.ask("GET", "/jobs")]
    failed = [reply for reply in replies if reply.status == 503]
    assert [noted["cause"] for noted in desk.house.journal.named("request_failed")] == ["ThrottlingException"] * len(
        failed
    )
    assert failed
    assert desk.house.journal.named("request_faulted") == []


def test_a_mistake_of_ours_is_a_500_that_gives_nothing_away(desk: Desk) -> None:
    """A problem document like all others; the log has the kind of the error, and no more."""
    desk.house.store.get = _raising(RuntimeError("SECRET in /var/task/x.py"))
    reply = desk.ask("GET", "/jobs/job_1")
    refused(reply, 500, "internal_error")
    assert "SECRET" not in reply.text
    [noted] = desk.house.journal.named("request_faulted")
    assert noted["error"] == "RuntimeError"
    assert "SECRET" not in str(noted)


def test_nothing_that_a_caller_sends_is_logged_or_sent_back(desk: Desk) -> None:
    """Keys, prompts and metadata, in good requests and in bad ones."""
    secret = "SECRET-4711"
    bodies: list[Any] = [
        {"prompt": secret},
        {"prompt": [secret]},
        {"prompt": "a", "max_tokens": secret},
        {"prompt": "a", "metadata": secret},
        {"messages": [{"role": secret, "content": secret}]},
        {"messages": secret},
        {"prompt": "a", "priority": secret},
        {"prompt": "a", "user_id": f"{secret} {secret}"},
        f'{{"prompt":"{secret}"',
        secret,
        f'{{"prompt":"{secret}","x":1}}',
        f'{{"prompt":"{secret}","max_tokens":NaN}}',
        f'{{"prompt":"{secret}\\ud800"}}',
    ]
    replies = [desk.post(body) for body in bodies]
    replies += [desk.post(body, {"x-api-key": secret, **JSON}) for body in bodies]
    replies.append(desk.post({"prompt": "a"}, _with_key(f"{secret} x")))
    assert not [reply for reply in replies if secret in reply.text or KEY in reply.text]
    assert secret not in str(desk.house.journal.events)
    assert KEY not in str(desk.house.journal.events)


# ── Anything at all ──────────────────────────────────────────────────────────────────────────────────────────────────

FIELD_NAMES = ["prompt", "messages", "system_prompt", "model", "provider", "max_tokens", "user_id", "metadata",
               "priority", "deadline_seconds", "role", "content"]  # fmt: skip
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(["m-1", "user"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELD_NAMES) | st.text(), inner, max_size=6)
    ),
    max_leaves=20,
)
requests = st.dictionaries(st.sampled_from(FIELD_NAMES), values, max_size=6)
good = st.fixed_dictionaries(
    {"prompt": st.text(min_size=1)},
    optional={
        "metadata": st.dictionaries(st.text(), values, max_size=4),
        "system_prompt": st.text(),
        "max_tokens": st.integers(-1, 4_001),
        "user_id": st.text(st.characters(codec="ascii"), max_size=5),
        "priority": st.sampled_from(["interactive", "standard", "bulk", None]),
        "deadline_seconds": st.integers(0, 10**6),
    },
)
"""Most of these are accepted."""
ANYTHING = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANYTHING
@given(body=good | requests | values)
def test_no_json_whatever_is_a_5xx(body: Any) -> None:
    """Accepted whole, or refused without a trace."""
    desk = Desk()
    reply = desk.post(json.dumps(body))
    assert reply.status in (202, 400)
    if reply.status == 400:
        refused_document = reply.json
        assert refused_document["code"] == "invalid_request"
        assert desk.is_untouched
    else:
        assert len(desk.house.store.rows) == len(desk.house.hints.sent) == 1
        shown = desk.ask("GET", f"/jobs/{reply.json['job_id']}").json
        assert shown.get("metadata") == body.get("metadata")
        desk.house.settle()
        assert {job.status for job in desk.house.store.rows.values()} == {JobStatus.COMPLETED}


@ANYTHING
@given(text=st.text(), is_base64=st.booleans())
def test_no_body_whatever_is_a_5xx(text: str, is_base64: bool) -> None:
    """JSON or not."""
    desk = Desk()
    assert desk.post(text, isBase64Encoded=is_base64).status in (202, 400)


@ANYTHING
@given(
    headers=st.dictionaries(
        st.sampled_from(["authorization", "x-api-key", "content-type", "idempotency-key", "Host"]),
        st.none() | st.text(st.characters()),
        max_size=5,
    ),
    path=st.text(st.characters(), max_size=30),
    method=st.sampled_from(["GET", "DELETE", "POST", "HEAD"]) | st.text(max_size=8),
    query=st.none() | st.dictionaries(st.sampled_from(["status", "limit", "cursor"]), st.text(st.characters())),
)
def test_no_headers_path_or_query_whatever_are_a_5xx(
    headers: dict[str, Any], path: str, method: str, query: dict[str, str] | None
) -> None:
    """With a good key or a bad one."""
    desk = Desk()
    for given_headers in (headers, headers | {"authorization": f"Bearer {KEY}"}):
        for place in (path, f"/{path}", f"/jobs/{path}", "/jobs"):
            reply = desk.ask(method, place, given_headers, queryStringParameters=query)
            assert reply.status < 500
        assert desk.post({"prompt": "a"}, given_headers).status < 500
    assert desk.house.journal.named("request_failed") == desk.house.journal.named("request_faulted") == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
    ids=["charset", "encoding"],
)
def test_another_encoding_than_utf_8_is_a_415(desk: Desk, headers: dict[str, str]) -> None:
    """Rather than read wrongly."""
    given = {"Authorization": f"Bearer {KEY}", **headers}
    refused(desk.post({"prompt": "a"}, given), 415, "unsupported_media_type")
    assert desk.is_untouched


def test_utf_8_may_be_named(desk: Desk) -> None:
    """In any case."""
    given = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json; Charset=UTF-8"}
    assert desk.post({"prompt": "a"}, given).status == 202


def test_error_texts_speak_of_json_and_not_of_python(desk: Desk) -> None:
    """A client need not know what the server is written in."""
    desk.house.submission = replace(desk.house.submission, lanes=frozenset())
    bodies = ({"prompt": "a", "metadata": []}, {"messages": [5]}, {"prompt": "a", "response_format": "json"})
    for body in (*bodies, '{"prompt":"a","max_tokens":' + "9" * 5_000 + "}"):
        text = desk.post(body).text
        assert not any(word in text for word in ("dict", "instance", "Lane", "sys.", "<", "Exceeds"))


def test_a_full_lane_is_a_503_that_says_when_to_come_back(desk: Desk) -> None:
    """With a code of its own: it is neither the client's mistake nor a passing trouble."""
    desk.house.depths.said[Lane.BULK] = 12_345
    reply = desk.post({"prompt": "a", "priority": "bulk"})
    assert refused(reply, 503, "lane_full")["detail"] == "12345 jobs wait in the lane bulk, which takes 10000."
    assert 60 <= int(reply.headers["retry-after"]) <= 900
    assert desk.is_untouched


# ── Tickets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_ticket_is_issued_to_its_client_for_a_minute(desk: Desk) -> None:
    """With the address to use it at; no cache may keep it."""
    reply = desk.ask("POST", "/tickets")
    assert reply.status == 201
    assert reply.headers["cache-control"] == "no-store"
    assert set(reply.json) == {"ticket", "expires_at", "socket_url"}
    assert reply.json["socket_url"] == "wss://sockets.example.test"
    assert reply.json["expires_at"] == START // 1000 + 60
    assert desk.connections.redeem(reply.json["ticket"]) == "alice"
    assert desk.ask("POST", "/tickets").json["ticket"] != reply.json["ticket"]


def test_nobody_gets_a_ticket_without_a_key(desk: Desk) -> None:
    """401, and the path has one method only."""
    refused(desk.ask("POST", "/tickets", {}), 401, "unauthorized")
    reply = desk.ask("GET", "/tickets")
    refused(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"


# ── Waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _waiting(desk: Desk, happens: Callable[[int], object]) -> tuple[list[float], Callable[..., Reply]]:
    """Let something happen at each pause of a waiting request; the pauses, and a way to ask."""
    pauses: list[float] = []
    sleep = desk.house.clock.sleep

    def slept(seconds: float) -> None:
        sleep(seconds)
        pauses.append(seconds)
        happens(len(pauses))

    desk.house.clock.sleep = slept  # type: ignore[method-assign]
    job = desk.house.accept()

    def ask(wait: str = "20") -> Reply:
        return desk.ask("GET", f"/jobs/{job.job_id}", queryStringParameters={"wait": wait})

    return pauses, ask


def test_a_waiting_request_is_answered_as_soon_as_the_job_ends(desk: Desk) -> None:
    """With the result."""
    pauses, ask = _waiting(desk, lambda count: desk.house.work() if count == 3 else None)
    reply = ask()
    assert (reply.json["status"], reply.json["result"]["text"]) == ("completed", "an answer")
    assert pauses == [0.25, 0.375, 0.5625]
    assert ask().json["status"] == "completed"
    assert len(pauses) == 3


def test_a_waiting_request_is_answered_when_the_job_is_taken_or_put_back(desk: Desk) -> None:
    """Also if it waits again by the next look, after another attempt."""
    desk.house.provider.script = [Overloaded()]  # type: ignore[attr-defined]
    pauses, ask = _waiting(desk, lambda count: desk.house.work() if count == 2 else None)
    assert ask().json["status"] == "queued"
    assert len(pauses) == 2


def test_a_request_waits_no_longer_than_it_asked(desk: Desk) -> None:
    """And asks the store about once a second in the end."""
    pauses, ask = _waiting(desk, lambda _: None)
    assert ask("20").json["status"] == "queued"
    assert sum(pauses) == pytest.approx(20, abs=0.01)
    assert len(pauses) <= 25
    pauses.clear()
    assert ask("0").json["status"] == "queued"
    assert pauses == []


def test_a_deployment_may_allow_less_waiting_or_none(desk: Desk) -> None:
    """A waiting request holds a concurrent execution that a small account may need for its workers."""
    office = http.TicketOffice(desk.connections, desk.house.clock, desk.house.chance, "wss://x")
    desk.status = http.status_handler(
        desk.house.submission, http.Doorkeeper(desk.clients), desk.house.journal, office, long_poll_seconds=0
    )
    pauses, ask = _waiting(desk, lambda _: None)
    assert ask().status == 200
    assert pauses == []


@pytest.mark.parametrize("wait", ["-1", "21", "1.5", "ten", "", " 5", "٣", "999999"])
def test_a_wrong_wait_is_refused_by_name(desk: Desk, wait: str) -> None:
    """Rather than understood as something else."""
    _, ask = _waiting(desk, lambda _: None)
    refused(ask(wait), 400, "invalid_request", "wait")


@pytest.mark.parametrize("look_ms", range(1_000, 5_001, 250))
def test_a_slow_store_does_not_keep_a_waiting_request_beyond_the_gateways_time(desk: Desk, look_ms: int) -> None:
    """However long each look takes; five seconds is the most."""
    find, get = desk.clients.find, desk.house.store.get

    def slow[T](look: Callable[[str], T]) -> Callable[[str], T]:
        def slowly(name: str) -> T:
            desk.house.clock.time += look_ms
            return look(name)

        return slowly

    _, ask = _waiting(desk, lambda _: None)
    desk.clients.find, desk.house.store.get = slow(find), slow(get)  # type: ignore[method-assign, assignment]
    assert ask().status == 200
    assert desk.house.clock.now() - START <= 28_000


def test_after_a_long_wait_a_result_beside_the_row_is_linked_to(desk: Desk) -> None:
    """There may be no time left to read it."""
    desk.house.payloads.texts["results/x"] = '{"text":"large"}'
    ended = {"status": JobStatus.COMPLETED, "result": Payload(None, "results/x")}

    def happens(count: int) -> None:
        if count == 20:
            desk.house.clock.time += 3_000  # a slow look
            (row,) = desk.house.store.rows.values()
            desk.house.store.rows[row.job_id] = replace(row, **ended)

    _, ask = _waiting(desk, happens)
    shown = ask().json
    assert "result" not in shown
    assert shown["result_url"].startswith("https://payloads.example.test/results/x")
    assert ask().json["result"] == {"text": "large"}
