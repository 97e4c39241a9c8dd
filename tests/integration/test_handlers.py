"""The functions as they are shipped, on moto, with the official SDKs talking to a fake provider."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import boto3
import botocore.client
import pytest
from botocore.exceptions import ClientError

from backburner import bootstrap, lifecycle
from backburner.models import INLINE_BYTES_MAX, ClientLimits
from backburner.providers import wire
from cli.clients import limit_client, micro_usd
from cli.screen import Refused
from tests.fakes.provider import Behaviour, FakeProvider, Usage, anthropic_error, openai_error
from tests.integration.deployed import Deployed, resources
from tests.integration.functions import Context, Reply, Stack, event, sigterm_kept

LOCAL_MODEL = {
    "smollm2": {"provider": "openai", "context_tokens": 8192, "output_tokens_max": 2000, "api": "chat"},
}
MODELS = ["gpt-5.4-mini", "claude-haiku-4-5", "smollm2"]
RIVER = "The Danube flows through ten countries."
NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What SQS refuses in bodies and attributes."""


@pytest.fixture
def stack(deployed: Deployed, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """The functions with keys in the secret and a small model of one's own; backoff without jitter, so without wait."""
    monkeypatch.setattr(bootstrap.SystemChance, "uniform", lambda _self, low, _high: low)
    provider.configure(tokens_per_chunk=100_000)
    functions = Stack(deployed, {"EXTRA_MODELS": json.dumps(LOCAL_MODEL)})
    functions.provider_keys()
    with sigterm_kept():
        yield functions


type Spy = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Every call to AWS that any client makes, as it is sent."""
    made: Spy = []
    real = botocore.client.BaseClient._make_api_call  # type: ignore[attr-defined]

    def spying(self: Any, operation: str, arguments: dict[str, Any]) -> Any:
        made.append((operation, arguments))
        return real(self, operation, arguments)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", spying)
    return made


def refuse(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Let AWS refuse one kind of call until further notice."""
    real = botocore.client.BaseClient._make_api_call  # type: ignore[attr-defined]

    def refusing(self: Any, name: str, arguments: dict[str, Any]) -> Any:
        if name == operation:
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, operation)
        return real(self, name, arguments)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", refusing)


def problem(reply: Reply, status: int, code: str) -> Any:
    """The problem document of a refusal."""
    assert (reply.status, reply.headers["content-type"]) == (status, "application/problem+json")
    assert reply.json["code"] == code
    return reply.json


# ── The happy road ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("model", MODELS)
def test_a_job_goes_all_the_way(stack: Stack, provider: FakeProvider, model: str) -> None:
    """Accepted, queued, answered, read: every field of every reply, and one billed call."""
    provider.script("river", Behaviour(text=RIVER, usage=Usage(input_tokens=1_000, output_tokens=100)))
    key = stack.client()
    accepted = stack.post(key, {"prompt": "Name a river.", "model": model, "max_tokens": 64, "metadata": {"order": 7}})
    job_id = accepted.json["job_id"]
    assert re.fullmatch(r"job_[a-z2-7]{26}", job_id)
    expires_at = accepted.json["expires_at"]
    assert (accepted.status, accepted.json) == (
        202,
        {"job_id": job_id, "status": "queued", "poll_url": f"/jobs/{job_id}", "expires_at": expires_at},
    )
    assert accepted.headers == {"content-type": "application/json", "location": f"jobs/{job_id}"}

    waiting = stack.get(key, job_id)
    assert waiting.status == 200
    created_at = waiting.json["created_at"]
    expected = {
        "job_id": job_id,
        "status": "queued",
        "priority": "standard",
        "attempts": 0,
        "created_at": created_at,
        "deadline_at": created_at + 86_400,
        "expires_at": expires_at,
        "metadata": {"order": 7},
    }
    outlook = {"position": waiting.json["position"], "estimated_start_at": waiting.json["estimated_start_at"]}
    assert waiting.json == expected | outlook
    assert outlook["position"] in (1, 2)  # SQS's count may have the job itself in it
    assert 0 <= outlook["estimated_start_at"] - created_at <= 5

    assert stack.work() == 1
    done = stack.get(key, job_id).json
    finished_at = done["finished_at"]
    name = "anthropic" if "claude" in model else "openai"
    price = {"gpt-5.4-mini": 750 + 450, "claude-haiku-4-5": 1_000 + 500, "smollm2": 0}[model] / 1_000_000
    usage = {
        "input_tokens": 1_000,
        "output_tokens": 100,
        "cached_tokens": 0,
        "cache_write_tokens": 0,
        "total_tokens": 1_100,
    }
    line = done["receipt"][0]
    assert done == expected | {
        "status": "completed",
        "attempts": 1,
        "finished_at": finished_at,
        "usage": usage,
        "cost_usd": price,
        "result": {"text": RIVER, "finish_reason": "stop", "model": model, "provider": name},
        "receipt": [
            {
                "attempt": 1,
                "outcome": "completed",
                "began_at": line["began_at"],
                "ended_at": line["ended_at"],
                "provider": name,
                "model": model,
                "request_id": line["request_id"],
                "usage": usage,
                "cost_usd": price,
            }
        ],
    }
    assert created_at <= line["began_at"] <= line["ended_at"] <= finished_at
    [call] = provider.ledger
    assert (call.model, call.billed, call.api_key) == (model, True, "-ant" if name == "anthropic" else "enai")
    assert stack.messages() == []
    assert stack.messages("DeadLetterQueue") == []


def test_the_committed_events_are_what_the_functions_take(stack: Stack, provider: FakeProvider) -> None:
    """Each file in events/ as it is."""
    assert stack.repair() == {"seen": 0}
    key = stack.client()
    posted = event("post_job")
    posted["headers"]["Authorization"] = f"Bearer {key}"
    assert stack.function("IngestFunction")(posted, Context())["statusCode"] == 202
    for name, status in (("get_job", 404), ("delete_job", 404), ("list_jobs", 200)):
        asked = event(name)
        asked["headers"]["Authorization"] = f"Bearer {key}"
        assert stack.function("StatusFunction")(asked, Context())["statusCode"] == status
    assert stack.function("WorkerFunction")(event("lane_batch"), Context()) == {"batchItemFailures": []}
    assert stack.function("NotifierFunction")(event("notifications_batch"), Context()) == {"batchItemFailures": []}


def test_the_hot_path_keeps_to_its_budget(stack: Stack, provider: FakeProvider, calls: Spy) -> None:
    """Accepting costs one put and one message, a plain job three writes in all, and its limits two at most."""
    key = stack.client()
    stack.post(key, {"prompt": "warm"})
    stack.work()
    calls.clear()
    stack.post(key, {"prompt": "Name a river."})
    assert [name for name, _ in calls] == ["PutItem", "SendMessage"]
    stack.work()
    limits = stack.deployed.names["LimitsTable"]
    writes = [
        name if sent.get("TableName") != limits else "limits"
        for name, sent in calls
        if name in ("PutItem", "UpdateItem", "SendMessage", "TransactWriteItems")
    ]
    assert writes == ["PutItem", "SendMessage", "UpdateItem", "limits", "UpdateItem", "limits"]


def test_the_numbers_and_nothings_of_metadata_survive(stack: Stack, provider: FakeProvider) -> None:
    """Equal as JSON, which DynamoDB's own numbers would not have it."""
    key = stack.client()
    metadata = (
        '{"f":0.7,"big":9007199254740993,"e":"","n":null,"t":true,"z":-0.0,"x":1e-300,"huge":1234567890123456789012345,'
        '"deep":{"l":[1,[2.5,{"k":null}],"\\u0000 \\u2028 🏞️"]}}'
    )
    job_id = stack.post(key, f'{{"prompt":"a","metadata":{metadata}}}').json["job_id"]
    sent = json.loads(metadata)
    assert stack.get(key, job_id).json["metadata"] == sent
    stack.work()
    assert json.dumps(stack.get(key, job_id).json["metadata"], sort_keys=True) == json.dumps(sent, sort_keys=True)


# ── Failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("model", "behaviour", "code", "dead"),
    [
        ("gpt-5.4-mini", Behaviour(status=400), "invalid_request", False),
        ("gpt-5.4-mini", Behaviour(status=401), "authentication", True),
        ("gpt-5.4-mini", Behaviour(status=429, body=openai_error("q", "insufficient_quota", "insufficient_quota")),
         "quota_exhausted", True),
        ("gpt-5.4-mini", Behaviour(fault="refusal"), "refused", False),
        ("smollm2", Behaviour(status=400, body={"error": {"type": "exceed_context_size_error", "message": "no"}}),
         "context_length_exceeded", False),
        ("smollm2", Behaviour(status=404), "model_not_found", True),
        ("claude-haiku-4-5", Behaviour(status=429, body=anthropic_error("s", "rate_limit_error",
                                                                        "enforced_spend_limit_reached")),
         "spend_limit", True),
        ("claude-haiku-4-5", Behaviour(fault="thinking_only"), "empty_answer", False),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_what_the_provider_refuses_for_good_fails_at_once_with_its_code(
    stack: Stack, provider: FakeProvider, model: str, behaviour: Behaviour, code: str, dead: bool
) -> None:
    """One call; an operator's matter goes to the dead-letter queue with its reason, a caller's does not."""
    provider.script("river", behaviour)
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river.", "model": model}).json["job_id"]
    stack.work()
    job = stack.get(key, job_id).json
    assert (job["status"], job["attempts"]) == ("failed", 1)
    assert job["error"] == {"code": code, "message": job["error"]["message"], "retryable": False}
    assert job["error"]["message"]
    assert "result" not in job
    assert [line["outcome"] for line in job["receipt"]] == [code]
    assert len(provider.ledger) == 1
    letters = stack.messages("DeadLetterQueue")
    reasons = [letter["MessageAttributes"]["reason"]["StringValue"] for letter in letters]
    assert reasons == ([code] if dead else [])
    assert stack.messages() == []


@pytest.mark.parametrize("model", MODELS)
def test_a_passing_failure_is_tried_again(stack: Stack, provider: FakeProvider, model: str) -> None:
    """Back in the queue with its error, then completed; both attempts are on the receipt."""
    provider.script("river", Behaviour(status=500), Behaviour(text=RIVER))
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river.", "model": model}).json["job_id"]
    stack.work()
    between = stack.get(key, job_id).json
    assert (between["status"], between["error"]["code"]) == ("queued", "provider_error")
    assert stack.work() == 1
    job = stack.get(key, job_id).json
    assert (job["status"], job["result"]["text"], job["attempts"]) == ("completed", RIVER, 2)
    assert "error" not in job
    assert [line["outcome"] for line in job["receipt"]] == ["provider_error", "completed"]


def test_prv_03_a_failure_that_does_not_pass_costs_as_many_calls_as_the_template_allows(
    stack: Stack, provider: FakeProvider, deployed: Deployed
) -> None:
    """SDK, worker and queue do not multiply: MAX_ATTEMPTS requests in all, then failed and dead."""
    provider.script("river", Behaviour(status=500))
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    for _ in range(10):
        stack.work()
    attempts = int(deployed.environments["WorkerFunction"]["MAX_ATTEMPTS"])
    job = stack.get(key, job_id).json
    assert (job["status"], job["attempts"], job["error"]["code"]) == ("failed", attempts, "provider_error")
    assert len(provider.ledger) == attempts
    assert len(job["receipt"]) == attempts
    [letter] = stack.messages("DeadLetterQueue")
    assert json.loads(letter["Body"]) == {"died": attempts, "job_id": job_id, "v": 1}


def test_a_provider_that_says_when_is_not_asked_before(stack: Stack, provider: FakeProvider, calls: Spy) -> None:
    """`retry-after` becomes the hint's delay, and the row's time to wait for."""
    provider.script("river", Behaviour(status=529, headers={"retry-after": "77"}))
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    calls.clear()
    stack.work()
    [sent] = [arguments for name, arguments in calls if name == "SendMessage"]
    assert sent["DelaySeconds"] in (77, 78)
    row = stack.row(job_id)
    assert int(row["available_at"]["N"]) - int(row["created_at"]["N"]) >= 77_000


def test_a_refusal_for_the_rate_holds_the_model_and_costs_no_attempt(
    stack: Stack, provider: FakeProvider, calls: Spy
) -> None:
    """The job is parked until shortly before the provider allows calls again; other models go on."""
    provider.script("river", Behaviour(status=429, headers={"retry-after": "77"}))
    key = stack.client()
    held = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    stack.work()
    row = stack.row(held)
    assert (row["status"]["S"], row["attempts"]["N"]) == ("queued", "0")
    assert 70_000 <= int(row["available_at"]["N"]) - int(row["created_at"]["N"]) <= 78_000
    assert [call.model for call in provider.ledger] == ["gpt-5.4-mini"]
    provider.script("river", Behaviour(text="Danube"))
    other = stack.post(key, {"prompt": "Name a river.", "model": "claude-haiku-4-5"}).json["job_id"]
    same = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    stack.work()
    assert stack.get(key, other).json["status"] == "completed"
    assert stack.get(key, same).json["status"] == "queued"


def test_a_limit_is_changed_while_jobs_run(stack: Stack, provider: FakeProvider) -> None:
    """By the row alone: one call an hour, then as many as one likes."""
    stack.limit("smollm2", 10**9)
    key = stack.client()
    stack.post(key, {"prompt": "a", "model": "smollm2"})
    stack.work()
    stack.limit("smollm2", 1)
    late = stack.post(key, {"prompt": "b", "model": "smollm2"}).json["job_id"]
    later = stack.post(key, {"prompt": "c", "model": "smollm2"}).json["job_id"]
    stack.work()
    assert [stack.get(key, name).json["status"] for name in (late, later)].count("queued") >= 1


def test_a_missing_key_fails_the_job_and_says_what_to_do(stack: Stack, provider: FakeProvider) -> None:
    """As `authentication`, with no request sent."""
    stack.provider_keys('{"openai_api_key": ""}')
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    stack.work()
    error = stack.get(key, job_id).json["error"]
    assert error["code"] == "authentication"
    assert "openai_api_key" in error["message"]
    assert provider.ledger == []


@pytest.mark.parametrize("secret", ["sk-pasted-without-json", "[]", "null", '{"openai_api_key": 7}', "{}"])
def test_a_secret_that_is_not_filled_in_as_it_should_be_is_an_authentication_failure(
    stack: Stack, provider: FakeProvider, secret: str
) -> None:
    """The operator's slip is named as such, is not tried three times, and is not shown to the client."""
    stack.provider_keys(secret)
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    stack.work()
    job = stack.get(key, job_id).json
    assert (job["status"], job["error"]["code"]) == ("failed", "authentication")
    assert "sk-pasted" not in json.dumps(job)
    assert not [line for line in stack.log.lines if "sk-pasted" in line]


def test_a_secret_that_cannot_be_read_costs_a_job_no_attempt(
    stack: Stack, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing permission or an outage, longer than the attempts would last: the job waits, and then completes."""
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    with monkeypatch.context() as patch:
        refuse(patch, "GetSecretValue")
        for _ in range(5):
            assert stack.work() == 1
            assert stack.work() == 0  # not at once again
            job = stack.get(key, job_id).json
            assert (job["status"], job["attempts"]) == ("queued", 0)
            stack.let_pass(job_id, "available_at")
            stack.let_pass(job_id, "due_at")
            stack.repair()
    stack.work()
    job = stack.get(key, job_id).json
    assert (job["status"], job["attempts"]) == ("completed", 1)
    assert [line["outcome"] for line in job["receipt"]] == ["completed"]
    assert len(provider.ledger) == 1


# ── Idempotency ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_replay_says_so_and_is_the_same_job(stack: Stack, provider: FakeProvider) -> None:
    """Whatever the formatting and the order of keys; one row, one hint, one call, also once it has ended."""
    key = stack.client()
    header = {"Idempotency-Key": "order-4711"}
    first = stack.post(key, '{"prompt":"Name a river.","max_tokens":64}', **header)
    again = stack.post(key, ' { "max_tokens" : 64,\n "prompt":"Name a r\\u0069ver.", "user_id": null } ', **header)
    assert (first.status, again.status) == (202, 202)
    assert again.json == first.json
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert stack.work() == 1
    later = stack.post(key, {"prompt": "Name a river.", "max_tokens": 64}, **header)
    assert later.json == first.json | {"status": "completed"}
    assert stack.work() == 0
    assert len(provider.ledger) == len(stack.rows()) == 1


def test_the_same_key_for_another_request_is_422(stack: Stack) -> None:
    """No row and no hint is created, however large the other request is."""
    key = stack.client()
    header = {"Idempotency-Key": "order-4711"}
    stack.post(key, {"prompt": "Name a river."}, **header)
    assert len(stack.messages()) == 1
    other = stack.post(key, {"prompt": "x" * (INLINE_BYTES_MAX + 1)}, **header)
    problem(other, 422, "idempotency_conflict")
    assert len(stack.rows()) == 1
    assert stack.messages() == []


def test_api_10_two_clients_with_one_key_have_two_jobs(stack: Stack) -> None:
    """Each sees, lists and cancels its own only."""
    alice, bob = stack.client("alice"), stack.client("bob")
    header = {"Idempotency-Key": "same-key"}
    first = stack.post(alice, {"prompt": "a secret"}, **header).json["job_id"]
    second = stack.post(bob, {"prompt": "a secret"}, **header)
    assert second.json["job_id"] != first
    assert "idempotent-replayed" not in second.headers
    nobody = stack.get(bob, "job_nobody")
    for reply in (stack.get(bob, first), stack.delete(bob, first), nobody):
        assert (reply.status, reply.text) == (404, nobody.text)
    assert [job["job_id"] for job in stack.listing(alice).json["jobs"]] == [first]


@pytest.mark.parametrize("operation", ["SendMessage", "PutItem"])
def test_sqs_09_a_refused_write_is_a_503_and_the_retry_completes_the_job(
    stack: Stack, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Row without hint, or neither: the caller learns it, and one job comes of both requests."""
    key = stack.client()
    header = {"Idempotency-Key": "order-4711"}
    with monkeypatch.context() as patch:
        refuse(patch, operation)
        refused = stack.post(key, {"prompt": "Name a river."}, **header)
    problem(refused, 503, "unavailable")
    assert refused.headers["retry-after"] == "1"
    accepted = stack.post(key, {"prompt": "Name a river."}, **header)
    assert accepted.status == 202
    stack.work()
    assert stack.get(key, accepted.json["job_id"]).json["status"] == "completed"
    assert len(provider.ledger) == 1


def test_sqs_09_without_a_retry_the_repairer_sends_the_hint(
    stack: Stack, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is due at once."""
    key = stack.client()
    with monkeypatch.context() as patch:
        refuse(patch, "SendMessage")
        assert stack.post(key, {"prompt": "Name a river."}).status == 503
    assert stack.repair() == {"seen": 1}
    assert stack.work() == 1
    [job] = stack.listing(key).json["jobs"]
    assert job["status"] == "completed"


# ── Cancel and list ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_queued_job_is_cancelled_and_not_called(stack: Stack, provider: FakeProvider) -> None:
    """Its hint finds nothing to do; a second DELETE is no error, one of an ended job is a 409."""
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    cancelled = stack.delete(key, job_id)
    assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
    assert stack.delete(key, job_id).json == cancelled.json
    assert stack.work() == 1
    assert provider.ledger == []
    assert stack.get(key, job_id).json == cancelled.json
    done = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    stack.work()
    assert problem(stack.delete(key, done), 409, "job_is_final")["detail"] == (
        "The job is completed; it can no longer be cancelled."
    )


def test_a_client_lists_its_jobs_page_by_page(stack: Stack, provider: FakeProvider) -> None:
    """Newest first, each once, by status if asked; a listing shows no requests and no results."""
    provider.script("fail", Behaviour(status=400))
    key = stack.client()
    made = [stack.post(key, {"prompt": f"{'fail' if n % 2 else 'river'} {n}"}).json["job_id"] for n in range(5)]
    for _ in range(2):
        stack.work()
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = stack.listing(key, limit="2", **({"cursor": cursor} if cursor else {})).json
        assert set(page) == {"jobs", "next_cursor"}
        seen += [job["job_id"] for job in page["jobs"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sorted(seen) == sorted(made)
    failed = stack.listing(key, status="failed").json["jobs"]
    assert {job["job_id"] for job in failed} == {made[1], made[3]}
    assert failed[0] == {
        name: value
        for name, value in stack.get(key, failed[0]["job_id"]).json.items()
        if name not in ("receipt", "metadata", "usage", "cost_usd")
    }
    problem(stack.listing(key, cursor="7"), 400, "invalid_request")


# ── Sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("model", MODELS)
def test_a_large_request_goes_through_the_bucket(stack: Stack, provider: FakeProvider, model: str) -> None:
    """Unharmed, and out of the row; the provider gets every character of it."""
    provider.configure(context_tokens=10_000_000)
    prompt = "river " + '中😀\\"\u0001' * 250_000
    key = stack.client()
    accepted = stack.post(key, json.dumps({"prompt": prompt, "model": model}, ensure_ascii=False))
    assert accepted.status == 202
    job_id = accepted.json["job_id"]
    [name] = stack.objects()
    assert name.startswith(f"requests/{job_id}/")
    stack.work()
    assert stack.get(key, job_id).json["status"] == "completed"
    sent = provider.ledger[0].request
    turn = (sent["input"] if "input" in sent else sent["messages"])[-1]
    assert turn["content"] == prompt
    assert len(json.dumps(stack.row(job_id))) < 10_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ascii", "a" * 410_000),
        ("chinese", "中" * 140_000),
        ("emoji", "😀" * 110_000),
        ("just inline", "a" * (INLINE_BYTES_MAX - 200)),
        ("just beside", "a" * INLINE_BYTES_MAX),
    ],
    ids=lambda value: value if len(value) < 20 else "",
)
def test_res_02_a_result_beyond_the_rows_limit_is_paid_once_and_read(
    stack: Stack, provider: FakeProvider, name: str, text: str
) -> None:
    """Measured in bytes, kept beside the row; five more deliveries cost nothing."""
    provider.script("river", Behaviour(text=text))
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river.", "max_tokens": 128_000}).json["job_id"]
    stack.work()
    for _ in range(5):
        assert stack.run(json.dumps({"job_id": job_id, "v": 1})) == []
    job = stack.get(key, job_id).json
    assert (job["status"], job["result"]["text"]) == ("completed", text)
    assert len(provider.ledger) == 1
    assert len(stack.objects()) == (0 if name == "just inline" else 1)


@pytest.mark.parametrize(
    "text", ["a" * 6_300_000, "中" * 2_100_000, '"' * 2_600_000, "\n" * 2_600_000], ids=["a", "中", "quotes", "lines"]
)
def test_a_result_too_large_for_a_reply_comes_as_a_link(stack: Stack, provider: FakeProvider, text: str) -> None:
    """Beyond Lambda's 6 MB, or less that JSON doubles: the reply says so, the link gives the whole, paid once."""
    requests = pytest.importorskip("requests")  # moto answers it in place of S3
    provider.script("river", Behaviour(text="a" + text, finish_reason="stop"))
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    stack.work()
    reply = stack.get(key, job_id)
    assert reply.status == 200
    job = reply.json
    assert job["status"] == "completed"
    assert "result" not in job
    assert "900 seconds" in job["result_note"]
    body = requests.get(job["result_url"], timeout=10).content.decode()
    assert json.loads(body)["text"] == "a" + text
    assert len(provider.ledger) == 1


def test_a_reply_fits_lambdas_limit_whatever_is_in_it(stack: Stack, provider: FakeProvider) -> None:
    """Lambda wraps the body in JSON once more, which doubles every quote and backslash in it."""
    provider.script("river", Behaviour(text="a" + '"' * 2_400_000, finish_reason="stop"))
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    stack.work()
    assert stack.get(key, job_id).json["status"] == "completed"  # reply_of() holds the reply to the limit


@pytest.mark.parametrize("prompt", ["a", "中", "😀", "\\", '"', "\u0001"], ids=ascii)
def test_api_07_sizes_are_measured_on_the_bytes_really_sent(
    stack: Stack, provider: FakeProvider, calls: Spy, prompt: str
) -> None:
    """Around the limit of a row and beyond that of a message: no row over 400 KB, no message over 1 KB, no 5xx."""
    stack.limit("gpt-5.4-mini", 10**9)
    key = stack.client()
    for size in (INLINE_BYTES_MAX, 400_000, 1_048_577):
        written = json.dumps(prompt, ensure_ascii=False)[1:-1]
        text = written * (size // len(written.encode()) + 1)
        assert stack.post(key, f'{{"prompt":"{text}","metadata":{{"m":"{"中" * 5_000}"}}}}').status == 202
    for name, arguments in calls:
        if name == "PutItem":
            item = json.dumps(arguments["Item"], ensure_ascii=False)
            assert len(item.encode()) < 400_000
        if name == "SendMessage":
            assert len(arguments["MessageBody"].encode()) < 1_000
    provider.configure(context_tokens=10_000_000)
    assert stack.work() == 3
    assert {job["status"] for job in stack.listing(key).json["jobs"]} == {"completed"}


def test_a_request_beyond_the_limit_is_413_and_leaves_nothing(stack: Stack) -> None:
    """Before any row, object or message exists; counted in bytes."""
    key = stack.client()
    body = json.dumps({"prompt": "中" * 1_700_000}, ensure_ascii=False)
    problem(stack.post(key, body), 413, "too_large")
    assert (stack.rows(), stack.objects(), stack.messages()) == ([], [], [])


# ── What is sent ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    ["a\u0000b", "a\u000bb", "esc \u001b[0m", "a\ufffeb", "a\uffffb", "tab\tlf\ncr\r ok", "del \u007f nel \u0085"],
    ids=ascii,
)
def test_api_06_hints_hold_nothing_that_sqs_refuses_and_the_text_arrives(
    stack: Stack, provider: FakeProvider, calls: Spy, text: str
) -> None:
    """moto takes any character, so this looks at every string that SQS is given; the provider gets the text."""
    provider.script(text, Behaviour(status=400))
    key = stack.client()
    reply = stack.post(key, {"prompt": text, "system_prompt": text, "metadata": {text: text}})
    assert reply.status == 202
    stack.work()
    messages = [arguments for name, arguments in calls if name == "SendMessage"]
    assert messages
    for arguments in messages:
        strings = [arguments["MessageBody"], arguments.get("MessageGroupId", "")]
        strings += [value["StringValue"] for value in arguments.get("MessageAttributes", {}).values()]
        assert not [string for string in strings if NO_XML.search(string) or text in string]
    assert provider.ledger[0].request["input"][0]["content"] == text
    assert stack.get(key, reply.json["job_id"]).json["metadata"] == {text: text}


def test_no_log_line_holds_a_key_a_prompt_or_an_answer(stack: Stack, provider: FakeProvider) -> None:
    """Neither when all goes well nor when all goes wrong."""
    provider.script("river", Behaviour(text="SECRET-ANSWER"))
    provider.script("lake", Behaviour(status=401, body=openai_error("bad key sk-openai SECRET-LAKE", "x")))
    key = stack.client()
    stack.post(key, {"prompt": "SECRET-PROMPT river", "metadata": {"m": "SECRET-METADATA"}})
    stack.post(key, {"prompt": "SECRET-PROMPT lake"})
    stack.post(key, '{"prompt": "SECRET-PROMPT", "oops": "SECRET-FIELD"}')
    stack.post("bb_SECRET-WRONG-KEY", {"prompt": "SECRET-PROMPT"})
    stack.work()
    stack.run("SECRET-BODY", "{}")
    stack.repair()
    assert len(stack.log.lines) > 3
    for word in ("SECRET", key, "sk-openai", "sk-ant"):
        assert not [line for line in stack.log.lines if word in line]


def test_a_job_ended_is_logged_with_what_an_operator_asks_for(stack: Stack, provider: FakeProvider) -> None:
    """Job, client, lane, status, attempts and time, in one line."""
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    stack.work()
    [line] = [line for line in stack.log.lines if line.startswith("job_ended")]
    for part in (job_id, "'client_id': 'alice'", "completed", "'attempts': 1", "total_ms"):
        assert part in line


# ── Batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sqs_05_a_poison_message_does_not_take_its_siblings_along(stack: Stack, provider: FakeProvider) -> None:
    """Each is answered on its own: nothing comes back that is done with, and what is no hint lies with its reason."""
    provider.script("lake", Behaviour(status=500))
    key = stack.client()
    good, bad = (stack.post(key, {"prompt": f"Name a {what}."}).json["job_id"] for what in ("river", "lake"))
    stack.messages()  # in flight from now on
    failed = stack.run(
        json.dumps({"job_id": good, "v": 1}),
        "{not json",
        json.dumps({"job_id": "does-not-exist"}),
        json.dumps({"job_id": bad, "v": 1}),
        None,
        json.dumps({"job_id": good, "v": 99}),
    )
    assert failed == []
    assert stack.get(key, good).json["status"] == "completed"
    between = stack.get(key, bad).json
    assert (between["status"], between["error"]["code"]) == ("queued", "provider_error")
    assert len(provider.ledger) == 2
    letters = stack.messages("DeadLetterQueue")
    reasons = sorted(letter["MessageAttributes"]["reason"]["StringValue"] for letter in letters)
    assert reasons == ["malformed_hint", "malformed_hint", "malformed_hint", "unknown_job"]


def test_sqs_05_exactly_the_messages_that_nothing_could_be_decided_for_come_back(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the table does not answer, hints come back; while the dead-letter queue does not, poison does."""
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    stack.messages()
    hint = json.dumps({"job_id": job_id, "v": 1})
    with monkeypatch.context() as patch:
        refuse(patch, "UpdateItem")
        assert stack.run("poison", hint) == ["m-1"]
    with monkeypatch.context() as patch:
        refuse(patch, "SendMessage")
        assert stack.run("poison", hint) == ["m-0"]
    assert stack.get(key, job_id).json["status"] == "completed"


@pytest.mark.parametrize("records", [{}, {"Records": []}, {"Records": None}])
def test_sqs_05_an_empty_batch_is_answered(stack: Stack, records: dict[str, Any]) -> None:
    """Nothing to do is no error."""
    assert stack.function("WorkerFunction")(records, Context()) == {"batchItemFailures": []}


def test_ten_jobs_of_a_batch_wait_at_the_same_time(stack: Stack, provider: FakeProvider) -> None:
    """Ten waits share one bill. (The worker is warm: a cold one imports the SDKs one after the other.)"""
    key = stack.client()
    for model in MODELS:
        stack.limit(model, 10**9)
        stack.post(key, {"prompt": "warm up", "model": model})
    stack.work()
    provider.configure(together=10)
    for number in range(10):
        stack.post(key, {"prompt": f"river {number}", "model": MODELS[number % 3]})
    assert stack.work() == 10
    assert max(call.concurrent for call in provider.ledger) == 10
    assert {job["status"] for job in stack.listing(key).json["jobs"]} == {"completed"}


def test_prv_09_a_cold_workers_first_batch_makes_one_client(
    stack: Stack, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten threads ask for the provider at once; each client has a trust store to load."""
    made: list[None] = []
    make = wire.http_client

    def counting() -> Any:
        made.append(None)
        time.sleep(0.05)
        return make()

    monkeypatch.setattr(wire, "http_client", counting)
    key = stack.client()
    for number in range(10):
        stack.post(key, {"prompt": f"river {number}"})
    assert stack.work() == 10
    assert len(made) == 1


def test_a_job_delivered_twice_in_one_batch_is_called_once(stack: Stack, provider: FakeProvider) -> None:
    """SQS-01: whichever of the two claims it, the other drops out."""
    provider.configure(latency_seconds=0.3)
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    hint = json.dumps({"job_id": job_id, "v": 1})
    assert stack.run(hint, hint) == []
    assert len(provider.ledger) == 1
    assert stack.get(key, job_id).json["status"] == "completed"


# ── Repair and expiry ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lost_hint_is_sent_again_by_the_repairer(stack: Stack, provider: FakeProvider) -> None:
    """The row says when somebody must look again."""
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    stack.messages()  # received, and lost with its worker
    stack.repair()
    assert stack.messages() == []  # too early
    stack.let_pass(job_id, "due_at")
    assert stack.repair() == {"seen": 1}
    assert stack.work() == 1
    assert stack.get(key, job_id).json["status"] == "completed"
    assert stack.repair() == {"seen": 0}


def test_a_killed_workers_job_is_taken_up_again(stack: Stack, provider: FakeProvider) -> None:
    """Killed in the middle of the call (a BaseException), the lease lapses, the repairer puts the job back."""

    class KilledError(BaseException):
        """No handler catches this, as none catches SIGKILL."""

    def killed(*_: Any, **__: Any) -> Any:
        raise KilledError

    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle.Lifecycle, "complete", killed)
        [message] = stack.messages()
        assert stack.run(message["Body"]) == ["m-0"]
    assert stack.get(key, job_id).json["status"] == "processing"
    stack.let_pass(job_id, "lease_until")
    stack.let_pass(job_id, "due_at")
    stack.repair()
    stack.work()
    job = stack.get(key, job_id).json
    assert (job["status"], job["attempts"]) == ("completed", 2)
    assert [line["outcome"] for line in job["receipt"]] == ["outcome_unknown", "completed"]


def test_hints_that_no_worker_ever_answers_end_their_job(stack: Stack, deployed: Deployed) -> None:
    """The queue's redrive policy moves them; the job gets as many as it has attempts, then ends and says why."""
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    url = deployed.names["StandardQueue"]
    for _ in range(int(deployed.environments["RepairFunction"]["MAX_ATTEMPTS"])):
        assert stack.get(key, job_id).json["status"] == "queued"
        while stack.sqs.receive_message(QueueUrl=url, VisibilityTimeout=0).get("Messages"):
            pass  # received, and not answered
        stack.repair()
    job = stack.get(key, job_id).json
    assert (job["status"], job["error"]["code"], job["error"]["retryable"]) == ("failed", "undeliverable", True)
    assert job["attempts"] == 0
    letters = stack.messages("DeadLetterQueue")
    assert [letter["MessageAttributes"]["reason"]["StringValue"] for letter in letters] == ["undeliverable"]


def test_a_redriven_letter_runs_its_job_again_once(stack: Stack, provider: FakeProvider) -> None:
    """As the console's redrive moves it: body unchanged. A second copy finds a finished job and does nothing."""
    provider.script("river", Behaviour(status=401), Behaviour(text=RIVER))
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river."}).json["job_id"]
    stack.work()
    assert stack.get(key, job_id).json["status"] == "failed"
    [letter] = stack.messages("DeadLetterQueue")
    assert stack.run(letter["Body"], letter["Body"]) == []
    assert stack.run(letter["Body"]) == []
    job = stack.get(key, job_id).json
    assert (job["status"], job["result"]["text"]) == ("completed", RIVER)
    assert len(provider.ledger) == 2


def test_res_04_every_row_expires_in_seconds_at_every_stage_of_its_life(stack: Stack, provider: FakeProvider) -> None:
    """The attribute that the template's TTL names, as a whole number, beyond the job's own time; what the API says."""
    specification = resources("AWS::DynamoDB::Table")["JobsTable"]["Properties"]["TimeToLiveSpecification"]
    assert specification["Enabled"] is True
    attribute = specification["AttributeName"]
    provider.script("lake", Behaviour(status=500))
    key = stack.client()
    made = [stack.post(key, {"prompt": f"Name a {what}."}).json["job_id"] for what in ("river", "lake", "sea")]
    stack.delete(key, made[2])

    def check() -> None:
        for job_id in made:
            row = stack.row(job_id)
            [(kind, value)] = row[attribute].items()
            now = int(row["created_at"]["N"]) // 1000
            assert kind == "N"
            assert re.fullmatch(r"[0-9]+", value)
            assert now < int(row["deadline_at"]["N"]) // 1000 < int(value) < now + 400 * 86_400
            assert stack.get(key, job_id).json["expires_at"] == int(value)

    check()
    for _ in range(5):
        stack.work()
        check()
    statuses = {stack.get(key, job_id).json["status"] for job_id in made}
    assert statuses == {"completed", "failed", "cancelled"}


def test_sqs_03_an_expired_job_is_gone_though_its_row_still_stands(stack: Stack, provider: FakeProvider) -> None:
    """404, not listed, not run, its key free; whatever TTL has or has not deleted."""
    key = stack.client()
    header = {"Idempotency-Key": "order-4711"}
    job_id = stack.post(key, {"prompt": "Name a river."}, **header).json["job_id"]
    stack.messages()
    stack.let_pass(job_id, "expires_at")
    problem(stack.get(key, job_id), 404, "job_not_found")
    problem(stack.delete(key, job_id), 404, "job_not_found")
    assert stack.listing(key).json["jobs"] == []
    assert stack.run(json.dumps({"job_id": job_id, "v": 1})) == []
    assert provider.ledger == []
    again = stack.post(key, {"prompt": "Name a lake."}, **header)
    assert (again.status, again.json["job_id"]) == (202, job_id)
    assert "idempotent-replayed" not in again.headers
    stack.work()
    assert stack.get(key, job_id).json["status"] == "completed"


def test_the_log_level_and_service_of_a_function_are_the_templates(deployed: Deployed) -> None:
    """Each function logs under its own name."""
    names = [environment["POWERTOOLS_SERVICE_NAME"] for environment in deployed.environments.values()]
    assert len(set(names)) == len(names)


# ── Lanes ────────────────────────────────────────────────────────────────────────────────────────────────────────────

LANES = {"interactive": "InteractiveQueue", "standard": "StandardQueue", "bulk": "BulkQueue"}


@pytest.mark.parametrize("lane", LANES)
def test_a_job_waits_in_its_own_lane_only(stack: Stack, lane: str) -> None:
    """And is worked off there."""
    key = stack.client()
    job_id = stack.post(key, {"prompt": "Name a river.", "priority": lane}).json["job_id"]
    assert all(not stack.messages(queue) for other, queue in LANES.items() if other != lane)
    assert stack.work(LANES[lane]) == 1
    job = stack.get(key, job_id).json
    assert (job["status"], job["priority"]) == ("completed", lane)


@pytest.mark.parametrize("lane", LANES)
def test_poison_is_buried_under_its_lane(stack: Stack, lane: str) -> None:
    """The letter says where it came from."""
    assert stack.run("poison", queue=LANES[lane]) == []
    (letter,) = stack.messages("DeadLetterQueue")
    assert letter["MessageAttributes"]["lane"]["StringValue"] == lane


def test_a_full_lane_refuses_new_jobs_and_knows_the_old_ones(stack: Stack) -> None:
    """503 with Retry-After, while a replay is answered and the other lanes go on."""
    stack.overrides["LANE_DEPTH_MAX"] = "1"
    key = stack.client()
    first = stack.post(key, {"prompt": "a", "priority": "bulk"}, **{"Idempotency-Key": "k"})
    assert stack.row(first.json["job_id"])["ahead"] == {"N": "0"}
    for _ in range(2):
        stack.sqs.send_message(QueueUrl=stack.deployed.names["BulkQueue"], MessageBody="{}")
    stack = Stack(stack.deployed, stack.overrides)  # cold: it has read no depth yet
    refusal = stack.post(key, {"prompt": "b", "priority": "bulk"})
    problem(refusal, 503, "lane_full")
    assert 60 <= int(refusal.headers["retry-after"]) <= 900
    again = stack.post(key, {"prompt": "a", "priority": "bulk"}, **{"Idempotency-Key": "k"})
    assert (again.status, again.json["job_id"]) == (202, first.json["job_id"])
    assert stack.post(key, {"prompt": "b"}).status == 202
    assert len(stack.rows()) == 2


def test_a_job_is_accepted_though_the_depth_of_its_lane_cannot_be_read(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row does not tell how many were before it."""
    refuse(monkeypatch, "GetQueueAttributes")
    accepted = stack.post(stack.client(), {"prompt": "a"})
    assert accepted.status == 202
    assert "ahead" not in stack.row(accepted.json["job_id"])


# ── Client limits ────────────────────────────────────────────────────────────────────────────────────────────────────

DAY_SECONDS = 86_400
SMALL = {"prompt": "Name a river.", "model": "gpt-5.4-mini", "max_tokens": 100}
"""Five tokens of text, eight of a turn, a hundred of answer: at 0.75 and 4.50 dollars a million, 460 micro-dollars."""


def test_a_limited_client_sees_where_it_stands(stack: Stack) -> None:
    """In the headers of every answer, in the words of the IETF's draft; an unlimited one sees none."""
    key = stack.client("alice", requests_per_minute=2, tokens_per_day=1_000, micro_usd_per_day=1_000_000)
    accepted = stack.post(key, SMALL)
    assert accepted.status == 202
    assert accepted.headers["ratelimit-policy"].split(", ") == [
        '"requests";q=2;w=60;qu="requests"',
        '"tokens";q=1000;w=86400;qu="tokens"',
        '"cost";q=1000000;w=86400;qu="micro-usd"',
    ]
    standing = re.fullmatch(
        r'"requests";r=1;t=(\d+), "tokens";r=887;t=(\d+), "cost";r=999540;t=\2', accepted.headers["ratelimit"]
    )
    assert standing is not None
    assert 0 < int(standing[1]) <= 60
    assert 0 < int(standing[2]) <= DAY_SECONDS
    assert not {"ratelimit", "ratelimit-policy"} & stack.post(stack.client("bob"), SMALL).headers.keys()


def test_requests_beyond_the_minutes_are_a_429(stack: Stack, calls: Spy) -> None:
    """With Retry-After; nothing is written for them. A replay is answered."""
    key = stack.client("alice", requests_per_minute=1)
    first = stack.post(key, SMALL, **{"Idempotency-Key": "k"})
    calls.clear()
    refusal = stack.post(key, SMALL)
    if refusal.status == 202:  # the clock's minute has just begun
        refusal = stack.post(key, SMALL)
    problem(refusal, 429, "too_many_requests")
    assert 0 < int(refusal.headers["retry-after"]) <= 60
    assert '"requests";r=0;t=' in refusal.headers["ratelimit"]
    assert not {"PutItem", "SendMessage"} & {operation for operation, _ in calls}
    again = stack.post(key, SMALL, **{"Idempotency-Key": "k"})
    assert (again.status, again.headers["idempotent-replayed"]) == (202, "true")
    assert again.json["job_id"] == first.json["job_id"]


@pytest.mark.parametrize("limits", [{"tokens_per_day": 150}, {"micro_usd_per_day": 510}], ids=str)
def test_a_budget_is_charged_and_settled_by_the_functions(
    stack: Stack, provider: FakeProvider, limits: dict[str, int]
) -> None:
    """One job fits; once it has ended, what it did not use is there for the next. `deliveries` say nothing of it."""
    provider.script("river", Behaviour(text=RIVER, usage=Usage(input_tokens=6, output_tokens=10)))
    key = stack.client("alice", **limits)
    job_id = stack.post(key, SMALL).json["job_id"]
    assert stack.tally("alice") == {"tokens": 113, "micro_usd": 460}
    refusal = problem(stack.post(key, SMALL), 429, "budget_used_up")
    assert "of your daily budget" in refusal["detail"]
    assert 0 < int(stack.post(key, SMALL).headers["retry-after"]) <= DAY_SECONDS
    assert stack.work() == 1
    job = stack.get(key, job_id).json
    assert job["status"] == "completed"
    assert "deliveries" not in job
    assert stack.tally("alice") == {"tokens": 16, "micro_usd": 50}
    assert "due_at" not in stack.row(job_id)
    assert stack.post(key, SMALL).status == 202


def test_a_request_beyond_the_whole_budget_is_a_422(stack: Stack) -> None:
    """It says so, since waiting does not help."""
    key = stack.client("alice", tokens_per_day=112)
    refusal = stack.post(key, SMALL)
    detail = "This request may use 113 tokens; your whole daily budget is 112 tokens."
    assert problem(refusal, 422, "over_budget")["detail"] == detail
    assert "retry-after" not in refusal.headers
    assert stack.rows() == []


def test_a_cancelled_job_is_settled_by_the_endpoint(stack: Stack) -> None:
    """At once."""
    key = stack.client("alice", tokens_per_day=150)
    job_id = stack.post(key, SMALL).json["job_id"]
    assert stack.delete(key, job_id).status == 200
    assert stack.tally("alice") == {"tokens": 0, "micro_usd": 0}
    assert stack.post(key, SMALL).status == 202


def test_a_settlement_that_failed_is_made_by_the_repairer(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is stored and read all the same."""
    key = stack.client("alice", tokens_per_day=1_000)
    job_id = stack.post(key, SMALL).json["job_id"]
    with monkeypatch.context() as patch:
        refuse(patch, "TransactWriteItems")
        assert stack.work() == 1
        assert stack.get(key, job_id).json["status"] == "completed"
    assert stack.tally("alice") == {"tokens": 113, "micro_usd": 460}
    stack.let_pass(job_id, "due_at")
    stack.repair()
    assert stack.tally("alice")["tokens"] < 113
    assert "due_at" not in stack.row(job_id)


def test_a_limited_request_costs_one_read_and_one_transaction(stack: Stack, calls: Spy) -> None:
    """In the place of the put. An unlimited one costs what it did."""
    limited, unlimited = stack.client("alice", tokens_per_day=1_000), stack.client("bob")
    for key in (limited, unlimited):
        assert stack.post(key, SMALL).status == 202  # both keys are known now, and the lane's depth
    calls.clear()
    stack.post(limited, SMALL)
    assert [operation for operation, _ in calls] == ["GetItem", "TransactWriteItems", "SendMessage"]
    calls.clear()
    stack.post(unlimited, SMALL)
    assert [operation for operation, _ in calls] == ["PutItem", "SendMessage"]


def test_a_limit_set_by_the_operator_counts_for_every_key_of_the_client(stack: Stack) -> None:
    """It comes with the client's row; taken back, it is gone."""
    table = boto3.resource("dynamodb").Table(stack.deployed.names["ClientsTable"])
    keys = [stack.client("alice"), stack.client("alice"), stack.client("bob")]
    wanted: dict[str, int | None] = {"tokens_per_day": 112, "requests_per_minute": 5}
    assert limit_client(table, "alice", wanted) == ClientLimits(requests_per_minute=5, tokens_per_day=112)
    assert [stack.post(key, SMALL).status for key in keys] == [422, 422, 202]
    stack = Stack(stack.deployed)  # the old one remembers its clients for a while
    assert limit_client(table, "alice", {"tokens_per_day": None}) == ClientLimits(requests_per_minute=5)
    assert [stack.post(key, SMALL).status for key in keys] == [202] * 3
    assert limit_client(table, "alice", {"requests_per_minute": None, "micro_usd_per_day": 1}) == ClientLimits(
        micro_usd_per_day=1
    )
    with pytest.raises(Refused, match="carol"):
        limit_client(table, "carol", {"tokens_per_day": 1})


def test_dollars_become_whole_micro_dollars() -> None:
    """As they are written, not as a binary fraction has them."""
    assert [micro_usd(usd) for usd in (0.07, 1.1, 0.000001, 2, 19.99)] == [70_000, 1_100_000, 1, 2_000_000, 19_990_000]
