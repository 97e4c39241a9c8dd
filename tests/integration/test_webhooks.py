"""From POST /jobs to a receiver that verifies: the functions as shipped, on moto, with a receiver on loopback."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import boto3
import openai
import pytest
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError

from backburner import bootstrap
from backburner.adapters.dynamodb import ClientsTable
from cli.clients import rotate_webhook_secret
from tests.fakes.provider import Behaviour, FakeProvider, openai_error
from tests.fakes.receiver import Receiver, Step
from tests.integration.deployed import Deployed
from tests.integration.functions import Stack, sigterm_kept
from tests.integration.test_webhook_secrets import seals

SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="


@pytest.fixture
def stack(deployed: Deployed, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """The functions, allowed to send to this machine."""
    monkeypatch.setattr(bootstrap.SystemChance, "uniform", lambda _self, low, _high: low)
    provider.configure(tokens_per_chunk=100_000)
    functions = Stack(deployed, {"WEBHOOK_ALLOW_LOOPBACK": "true"})
    functions.provider_keys()
    with sigterm_kept():
        yield functions


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Listening."""
    with Receiver() as listening:
        yield listening


def verified(receiver: Receiver, secret: str = SECRET) -> list[Any]:
    """What came, each proved to be ours."""
    return [Verifier(secret).verify(request.body, request.headers) for request in receiver.requests]


def test_an_answer_is_sent_signed_and_its_delivery_shown(
    stack: Stack, provider: FakeProvider, receiver: Receiver
) -> None:
    """The receiver's library accepts it; the body is the job as GET shows it."""
    provider.script("river", Behaviour(text="The Danube 中"))
    key = stack.client()
    asked = {"prompt": "Name a river.", "metadata": {"order": 7}, "webhook": {"url": receiver.url, "secret": SECRET}}
    job_id = stack.post(key, asked).json["job_id"]
    stack.work()
    assert stack.tell() == 1
    [event] = verified(receiver)
    shown = stack.get(key, job_id).json
    [delivery] = shown.pop("deliveries")
    assert (event["type"], event["version"], event["data"]) == ("job.completed", 1, shown)
    assert delivery == {"target": "webhook", "status": "delivered", "tries": 1, "told_at": delivery["told_at"]}
    assert "due_at" not in stack.row(job_id)


def test_an_openai_style_webhook_is_taken_by_its_sdk(stack: Stack, provider: FakeProvider, receiver: Receiver) -> None:
    """It names the response, which is then retrieved; the SDK verifies it and knows its type."""
    provider.script("river", Behaviour(text="The Danube"))
    provider.script("poem", Behaviour(text="cut", finish_reason="length"))
    key = stack.client()
    webhook = {"url": receiver.url, "secret": SECRET, "style": "openai"}
    asked = ("Name a river.", "Write a poem.")
    ids = [stack.post(key, {"prompt": prompt, "webhook": webhook}).json["job_id"] for prompt in asked]
    for _ in ids:
        stack.work()
        stack.tell()
    sdk = openai.OpenAI(api_key="unused", webhook_secret=SECRET)
    events = [sdk.webhooks.unwrap(request.body, request.headers) for request in receiver.requests]
    assert {(event.type, event.data.id) for event in events} == {  # type: ignore[union-attr]
        ("response.completed", ids[0]),
        ("response.incomplete", ids[1]),
    }
    assert "Danube" not in str(receiver.requests)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        sdk.webhooks.unwrap(receiver.requests[0].body + b" ", receiver.requests[0].headers)


def test_no_secret_and_no_signature_is_stored_or_logged_in_the_clear(
    stack: Stack, provider: FakeProvider, receiver: Receiver
) -> None:
    """Nor shown to anybody; large requests lie in S3, without it too."""
    key = stack.client()
    asked = {"prompt": "a" * 150_000, "webhook": {"url": receiver.url, "secret": SECRET}}
    reply = stack.post(key, asked)
    job_id = reply.json["job_id"]
    stack.work()
    stack.tell()
    [request] = receiver.requests
    hidden = [
        SECRET,
        SECRET[6:],
        "example-key",
        request.headers["webhook-signature"],
        request.headers["x-signature-sha256"],
    ]
    s3: Any = boto3.client("s3")
    objects = [
        s3.get_object(Bucket=stack.deployed.names["PayloadsBucket"], Key=name)["Body"].read().decode()
        for name in stack.objects()
    ]
    shown = [reply.text, stack.get(key, job_id).text, str(stack.row(job_id)), *objects, *stack.log.lines]
    assert stack.log.lines
    for text in shown:
        assert not [word for word in hidden if word in text]


def test_a_failed_and_a_cancelled_job_are_told_as_well(
    stack: Stack, provider: FakeProvider, receiver: Receiver
) -> None:
    """By the worker that failed it, and by the endpoint that cancelled it."""
    provider.script("fail", Behaviour(status=400, body=openai_error("no", "invalid_request_error")))
    key = stack.client()
    webhook = {"url": receiver.url, "secret": SECRET}
    stack.post(key, {"prompt": "fail", "webhook": webhook})
    stack.work()
    stack.delete(key, stack.post(key, {"prompt": "cancel", "webhook": webhook}).json["job_id"])
    assert stack.tell() == 2
    assert sorted(event["type"] for event in verified(receiver)) == ["job.cancelled", "job.failed"]


def test_a_receiver_that_is_gone_costs_one_try_and_no_result(stack: Stack, provider: FakeProvider) -> None:
    """410: given up at once, for the owner to see, also in the receipt."""
    key = stack.client()
    with Receiver(default=Step(410)) as gone:
        asked = {"prompt": "a", "webhook": {"url": gone.url, "secret": SECRET}}
        job_id = stack.post(key, asked).json["job_id"]
        stack.work()
        stack.tell()
        assert stack.tell() == 0
    job = stack.get(key, job_id).json
    at = job["deliveries"][0]["given_up_at"]
    assert at >= job["finished_at"]
    assert (job["status"], job["deliveries"]) == (
        "completed",
        [{"target": "webhook", "status": "given_up", "tries": 1, "given_up_at": at, "last_error": "http_410"}],
    )
    assert [line["outcome"] for line in job["receipt"]] == ["completed", "given_up"]
    assert job["receipt"][-1] == {
        "target": "webhook", "outcome": "given_up", "tries": 1, "ended_at": at, "error": "http_410",
    }  # fmt: skip


def test_a_clients_own_secret_signs_and_while_it_is_replaced_both_do(
    stack: Stack, provider: FakeProvider, receiver: Receiver
) -> None:
    """As the operator's tool makes it; before there is one, the request says what to do."""
    key = stack.client()
    asked = {"prompt": "a", "webhook": {"url": receiver.url}}
    refused = stack.post(key, asked)
    assert (refused.status, refused.json["errors"][0]["field"]) == (400, "webhook.secret")
    table = ClientsTable(boto3.client("dynamodb"), stack.deployed.names["ClientsTable"])
    first = rotate_webhook_secret(table, seals(stack.deployed), "alice", now=0, grace_ms=10**15)
    stack.post(key, asked)
    second = rotate_webhook_secret(table, seals(stack.deployed), "alice", now=1, grace_ms=10**15)
    stack.post(key, asked)
    stack.work()
    assert stack.tell() == 2
    for secret in (first, second):
        assert len(verified(receiver, secret)) == 2


@pytest.mark.parametrize(
    ("webhook", "field"),
    [
        ({"url": "https://10.0.0.1/"}, "webhook.url"),
        ({"url": "http://hooks.example.com/"}, "webhook.url"),
        ({"url": "https://hooks.example.com:25/"}, "webhook.url"),
        ({"url": "https://hooks.example.com/" + "a" * 2_048}, "webhook.url"),
        ({"url": ""}, "webhook.url"),
        ({}, "webhook.url"),
        ({"url": "https://hooks.example.com/", "secret": "whsec_"}, "webhook.secret"),
        ({"url": "https://hooks.example.com/", "secret": "whsec_" + "YWJj" * 4}, "webhook.secret"),
        ({"url": "https://hooks.example.com/", "secret": "whsec_" + "YWJj" * 22}, "webhook.secret"),
        ({"url": "https://hooks.example.com/", "secret": "ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="}, "webhook.secret"),
        ({"url": "https://hooks.example.com/", "secret": "whsec_!!!"}, "webhook.secret"),
        ({"url": "https://hooks.example.com/", "secret": SECRET, "events": []}, "webhook.events"),
        ({"url": "https://hooks.example.com/", "secret": 7}, "webhook.secret"),
        ("https://hooks.example.com/", "webhook"),
        ([], "webhook"),
    ],
    ids=str,
)
def test_whk_02_a_webhook_that_cannot_be_is_refused_by_field(stack: Stack, webhook: Any, field: str) -> None:
    """With nothing stored, and without a word of the secret."""
    reply = stack.post(stack.client(), {"prompt": "a", "webhook": webhook})
    assert reply.status == 400
    assert [error["field"] for error in reply.json["errors"]] == [field]
    assert "YWJj" not in reply.text
    assert stack.rows() == []


def test_null_is_no_webhook(stack: Stack, provider: FakeProvider) -> None:
    """As everywhere."""
    assert stack.post(stack.client(), {"prompt": "a", "webhook": None}).status == 202
    stack.work()
    assert stack.tell() == 0


def test_a_stack_for_production_sends_nothing_to_its_own_machine(deployed: Deployed, receiver: Receiver) -> None:
    """The parameter's default."""
    functions = Stack(deployed)
    for url in (receiver.url, receiver.url.replace("127.0.0.1", "localhost"), receiver.url.replace("http", "https")):
        reply = functions.post(functions.client(), {"prompt": "a", "webhook": {"url": url, "secret": SECRET}})
        assert reply.status == 400
    assert json.loads(json.dumps(receiver.requests)) == []


# ── By hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_tool_makes_a_secret_and_prints_it_once(stack: Stack, tool: Any, receiver: Receiver) -> None:
    """It signs; an unknown client is an error with its name."""
    key = stack.client()
    made = tool("clients", "webhook-secret", "rotate", "alice", "--json")
    assert made.exit_code == 0, made.output
    secret = json.loads(made.output)["webhook_secret"]
    at_once = ("clients", "webhook-secret", "rotate", "alice", "--grace-hours", "0", "--yes")
    assert "signs as well for 0 hours" in tool(*at_once).output
    job_id = stack.post(key, {"prompt": "a", "webhook": {"url": receiver.url}}).json["job_id"]
    stack.delete(key, job_id)
    stack.tell()
    [request] = receiver.requests
    with pytest.raises(WebhookVerificationError):
        Verifier(secret).verify(request.body, request.headers)
    unknown = tool("clients", "webhook-secret", "rotate", "nobody")
    assert (unknown.exit_code, "no client 'nobody'" in unknown.output) == (2, True)


def test_a_secret_is_ended_at_once_only_if_the_operator_says_so(stack: Stack, tool: Any) -> None:
    """With a time of grace nothing is lost, so nothing is asked."""
    stack.client()
    table = ClientsTable(boto3.client("dynamodb"), stack.deployed.names["ClientsTable"])
    rotate = ("clients", "webhook-secret", "rotate", "alice")
    assert tool(*rotate).exit_code == 0
    before = table.of("alice", 0)
    refused = tool(*rotate, "--grace-hours", "0", input="n\n")
    assert (refused.exit_code, "ends at once" in refused.stderr, table.of("alice", 0)) == (1, True, before)
    assert tool(*rotate, "--grace-hours", "0").exit_code == 1
    assert tool(*rotate, "--grace-hours", "0.5").exit_code == 0
    assert tool(*rotate, "--grace-hours", "0", input="y\n").exit_code == 0
    assert tool(*rotate, "--grace-hours", "0", "--yes", "--json").exit_code == 0
    assert len(table.of("alice", time.time_ns() // 1_000_000)) == 1


def test_the_tool_tells_again_whoever_was_given_up(stack: Stack, tool: Any) -> None:
    """And only them: what arrived is not sent twice."""
    key = stack.client()
    with Receiver([Step(410)]) as receiver:
        asked = {"prompt": "a", "webhook": {"url": receiver.url, "secret": SECRET}}
        job_id = stack.post(key, asked).json["job_id"]
        stack.delete(key, job_id)
        stack.tell()
        again = tool("jobs", "tell", job_id, "--json")
        assert json.loads(again.output) == {"job_id": job_id, "told_again": ["webhook"]}
        assert stack.tell() == 1
        assert stack.get(key, job_id).json["deliveries"][0]["status"] == "delivered"
        arrived = tool("jobs", "tell", job_id)
        assert (arrived.exit_code, "nobody was given up" in arrived.output) == (2, True)
        assert len(receiver.requests) == 2


def test_the_tool_sends_a_webhook_again_under_its_old_id(stack: Stack, tool: Any) -> None:
    """One that was given up, and one that arrived; what is to be sent is what the row says now."""
    key = stack.client()
    with Receiver([Step(410)]) as receiver:
        asked = {"prompt": "a", "webhook": {"url": receiver.url, "secret": SECRET}}
        job_id = stack.post(key, asked).json["job_id"]
        waiting = tool("webhooks", "resend", job_id)
        assert (waiting.exit_code, "is queued" in waiting.output) == (2, True)
        stack.delete(key, job_id)
        stack.tell()
        assert stack.get(key, job_id).json["deliveries"][0]["status"] == "given_up"
        for _ in range(2):
            sent = tool("webhooks", "resend", job_id)
            assert (sent.exit_code, "on its way" in sent.output) == (0, True)
            assert stack.get(key, job_id).json["deliveries"][0]["status"] == "pending"
            assert stack.tell() == 1
            assert stack.get(key, job_id).json["deliveries"][0]["status"] == "delivered"
        assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1
        assert len(receiver.requests) == 3
    plain = stack.post(key, {"prompt": "a"}).json["job_id"]
    assert "nobody was given up" in tool("jobs", "tell", plain).output
    assert "has no webhook" in tool("webhooks", "resend", plain).output
    assert "no job 'job_nobody'" in tool("webhooks", "resend", "job_nobody").output
