"""Webhooks on the deployed stack: a receiver that verifies, fails, comes back; and one that has gone for good."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from standardwebhooks import Webhook as Verifier

from backburner.adapters.dynamodb import attributes
from backburner.channels.outbound import SECONDS_MAX
from backburner.delivery import JITTER, WAITS_SECONDS
from backburner.models import Notice
from tests.e2e.conftest import Fake, Stack, until
from tests.fakes.receiver import Receiver, Step

pytestmark = pytest.mark.e2e

SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Listening on loopback, which the local stack's parameters allow."""
    with Receiver() as listening:
        yield listening


def submit(stack: Stack, receiver: Receiver, mark: str, **fields: Any) -> str:
    """A job that tells the receiver; its id."""
    webhook = {"url": receiver.url, "secret": SECRET}
    return str(stack.submit(prompt=mark, webhook=webhook, **fields)["job_id"])


def delivered(stack: Stack, job_id: str, status: str = "delivered") -> dict[str, Any]:
    """The job once its one delivery has come to that."""

    def job() -> dict[str, Any] | None:
        found = stack.job(job_id)
        return found if [each["status"] for each in found.get("deliveries", [])] == [status] else None

    return until(job, 60, lambda: f"not {status}: {stack.job(job_id)}")


def events(receiver: Receiver) -> list[Any]:
    """What came, each accepted by the standard's own library."""
    return [Verifier(SECRET).verify(request.body, request.headers) for request in receiver.requests]


def test_a_receiver_that_fails_twice_gets_its_answer_at_the_third_try(
    stack: Stack, fake: Fake, mark: str, receiver: Receiver
) -> None:
    """By the schedule as it is shipped: 2 s, then 10 s. One call; each try freshly signed under one id."""
    receiver.script = [Step(500), Step(503)]
    fake.script(mark, {"text": f"héllo 中 {mark}", "finish_reason": "stop"})
    job_id = submit(stack, receiver, mark, metadata={"order": 4711})
    job = delivered(stack, job_id)
    assert (job["status"], job["deliveries"][0]["tries"]) == ("completed", 3)
    assert len(fake.calls(mark)) == 1
    first, second, third = receiver.requests
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1
    assert all(abs(int(request.headers["webhook-timestamp"]) - request.at) < 60 for request in receiver.requests)
    for earlier, later, wait in ((first, second, WAITS_SECONDS[0]), (second, third, WAITS_SECONDS[1])):
        assert wait <= later.at - earlier.at < wait * (1 + JITTER) + 5
    assert [event["type"] for event in events(receiver)] == ["job.completed"] * 3
    data = events(receiver)[-1]["data"]
    assert data == {name: value for name, value in stack.job(job_id).items() if name != "deliveries"}
    assert data["result"]["text"] == f"héllo 中 {mark}"


def test_a_receiver_that_times_out_is_told_later(stack: Stack, mark: str, receiver: Receiver) -> None:
    """It takes the request and never answers: after the call's deadline, the usual wait."""
    receiver.script = [Step(hang=True)]
    job = delivered(stack, submit(stack, receiver, mark))
    assert job["deliveries"][0]["tries"] == 2
    first, second = receiver.requests
    assert SECONDS_MAX + WAITS_SECONDS[0] <= second.at - first.at < SECONDS_MAX + WAITS_SECONDS[0] * (1 + JITTER) + 5


def test_the_wait_that_a_receiver_asks_for_is_kept(stack: Stack, mark: str, receiver: Receiver) -> None:
    """Where it is longer than the planned one; the row holds it, and nothing is sent before. First it was away."""
    asked = 6 * WAITS_SECONDS[1]
    receiver.script = [Step(drop=True), Step(429, [("Retry-After", str(asked))])]
    job_id = submit(stack, receiver, mark)

    def refused() -> dict[str, Any] | None:
        row = stack.aws("dynamodb").get_item(
            TableName=stack.outputs["JobsTableName"], Key={"job_id": {"S": job_id}}, ConsistentRead=True
        )["Item"]
        (notice,) = json.loads(row.get("outbox", {"S": "[{}]"})["S"])
        return dict(notice) if notice.get("last_error") == "http_429" else None

    notice = until(refused, 30, lambda: str(stack.job(job_id)))
    (request,) = receiver.requests
    assert (notice["status"], notice["tries"]) == ("pending", 2)
    assert asked <= notice["lease_until"] / 1000 - request.at < asked * (1 + JITTER) + 5


def test_a_cancelled_job_is_told(stack: Stack, fake: Fake, mark: str, receiver: Receiver) -> None:
    """By the endpoint that cancelled it."""
    fake.script(mark, {"text": "word " * 400, "chunk_delay_seconds": 0.5})
    job_id = submit(stack, receiver, mark)
    until(lambda: fake.calls(mark), 30, lambda: "the call did not begin")
    assert stack.http().delete(f"/jobs/{job_id}").status_code == 200
    assert delivered(stack, job_id)["status"] == "cancelled"
    [event] = events(receiver)
    assert (event["type"], event["data"]["job_id"]) == ("job.cancelled", job_id)


def test_a_failed_and_an_expired_job_are_told(stack: Stack, fake: Fake, mark: str, receiver: Receiver) -> None:
    """With the code; the expired one by the repairer."""
    fake.script(mark, {"status": 400, "body": {"error": {"message": "no", "type": "invalid_request_error"}}})
    failed = submit(stack, receiver, mark)
    delivered(stack, failed)
    off = {"status": 429, "headers": {"retry-after": "600"}, "body": {"error": {"code": "rate_limit_exceeded"}}}
    fake.script(f"{mark}-late", off)
    expired = submit(stack, receiver, f"{mark}-late", deadline_seconds=1)
    time.sleep(1.1)
    stack.repair()
    assert delivered(stack, expired)["status"] in ("expired", "failed")
    first, second = events(receiver)
    assert (first["type"], first["data"]["error"]["code"]) == ("job.failed", "invalid_request")
    assert second["type"] in ("job.expired", "job.failed")


def test_a_receiver_that_has_gone_is_given_up_and_the_job_stays_completed(
    stack: Stack, fake: Fake, mark: str, receiver: Receiver
) -> None:
    """410 after one try, one call, and the result is there."""
    receiver.script = [Step(410)]
    job_id = submit(stack, receiver, mark)
    job = delivered(stack, job_id, "given_up")
    assert job["status"] == "completed"
    assert mark in job["result"]["text"]
    [delivery] = job["deliveries"]
    assert (delivery["tries"], delivery["last_error"]) == (1, "http_410")
    given_up = {"target": "webhook", "outcome": "given_up", "tries": 1, "error": "http_410"}
    assert job["receipt"][-1] == given_up | {"ended_at": delivery["given_up_at"]}
    assert len(fake.calls(mark)) == 1


def test_a_message_that_was_lost_is_sent_by_the_repairer(stack: Stack, mark: str, receiver: Receiver) -> None:
    """As if the worker had died before it announced the end: the row is due and untold."""
    job_id = submit(stack, receiver, mark)
    delivered(stack, job_id)
    receiver.requests.clear()
    row = attributes({"outbox": (Notice("webhook"),), "due_at": 1}, job_id)
    stack.aws("dynamodb").update_item(
        TableName=stack.outputs["JobsTableName"],
        Key={"job_id": {"S": job_id}},
        UpdateExpression="SET outbox = :untold, due_at = :past, due_shard = :shard",
        ExpressionAttributeValues={
            ":untold": row["outbox"],
            ":past": row["due_at"],
            ":shard": row["due_shard"],
        },
    )
    assert stack.job(job_id)["deliveries"][0]["status"] == "pending"
    stack.repair()
    delivered(stack, job_id)
    assert len(receiver.requests) == 1


def test_a_large_result_comes_as_a_link_that_works(stack: Stack, fake: Fake, mark: str, receiver: Receiver) -> None:
    """Without any key."""
    answer = "a" * 300_000
    fake.script(mark, {"text": answer, "finish_reason": "stop"})
    delivered(stack, submit(stack, receiver, mark, max_tokens=100_000))
    [event] = events(receiver)
    reply = httpx2.get(event["data"]["result_url"], timeout=30, trust_env=False)
    assert reply.json()["text"] == answer
