"""The WebSocket API, worker and notifier as they are shipped, on moto; frames are what API Gateway was given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto.apigatewaymanagementapi.models import apigatewaymanagementapi_backends

from docs.examples.follow import Answer
from tests.fakes.provider import Behaviour, FakeProvider
from tests.integration.deployed import Deployed
from tests.integration.functions import Context, Stack, event, reply_of, sigterm_kept

TEXT = "The Danube 🏞️ flows through ten countries. " * 4


@pytest.fixture
def stack(deployed: Deployed, provider: FakeProvider) -> Iterator[Stack]:
    """The functions, and no connection of an earlier test."""
    backend().connections.clear()
    functions = Stack(deployed)
    functions.provider_keys()
    with sigterm_kept():
        yield functions


def backend() -> Any:
    """moto's side of @connections."""
    return apigatewaymanagementapi_backends["123456789012"]["eu-central-1"]


def frames() -> list[dict[str, Any]]:
    """What the one connection was sent."""
    text = "".join(connection.data.decode() for connection in backend().connections.values())
    found, decoder = [], json.JSONDecoder()
    while text:
        frame, end = decoder.raw_decode(text)
        found.append(frame)
        text = text[end:]
    return found


def jobs_told() -> list[dict[str, Any]]:
    """The jobs as the one connection was shown them; a piece of an answer may come late, also after its end."""
    return [frame["job"] for frame in frames() if frame["type"] == "job"]


def connect(stack: Stack, key: str) -> str:
    """Open the connection with a ticket, which is returned."""
    asked = event("post_job") | {"path": "/tickets", "body": None}
    asked["headers"] = asked["multiValueHeaders"] = {}
    asked |= {"headers": {"x-api-key": key}, "multiValueHeaders": {"x-api-key": [key]}}
    ticket = str(reply_of(stack.function("StatusFunction")(asked, Context())).json["ticket"])
    opening = event("socket_connect") | {"queryStringParameters": {"ticket": ticket}}
    assert stack.function("WebsocketFunction")(opening, Context()) == {"statusCode": 200}
    assert stack.function("WebsocketFunction")(opening, Context()) == {"statusCode": 401}
    return ticket


def send(stack: Stack, **message: Any) -> dict[str, Any]:
    """Send a message; the frame that answers it."""
    asked = event("socket_message") | {"body": json.dumps(message)}
    assert stack.function("WebsocketFunction")(asked, Context()) == {"statusCode": 200}
    return frames()[-1]


def tell(stack: Stack) -> None:
    """What Lambda's poller does with the notifications queue, once."""
    batch = event("lane_batch")
    records = [
        {**batch["Records"][0], "messageId": message["MessageId"], "body": message["Body"]}
        for message in stack.messages("NotificationsQueue")
    ]
    assert records
    answer = stack.function("NotifierFunction")({"Records": records}, Context())
    assert answer == {"batchItemFailures": []}


def test_a_client_with_a_ticket_follows_a_job_from_queue_to_answer(stack: Stack, provider: FakeProvider) -> None:
    """State, state, pieces, end; and of ticket, key, question and answer nothing is logged."""
    provider.configure(tokens_per_chunk=8)
    provider.script("river", Behaviour(text=TEXT, chunk_delay_seconds=0.3))
    key = stack.client()
    ticket = connect(stack, key)
    job_id = stack.post(key, {"prompt": "Tell me of a river.", "stream": True}).json["job_id"]
    assert send(stack, action="subscribe", job_id=job_id)["job"]["status"] == "queued"
    stack.work()
    answer = Answer()
    seen = frames()[1:]
    for frame in seen[1:-1]:
        assert answer.take(frame)
    assert seen[0]["job"]["status"] == "processing"
    assert seen[-1]["job"] == {
        name: value for name, value in stack.get(key, job_id).json.items() if name != "deliveries"
    } | {"deliveries": seen[-1]["job"]["deliveries"]}
    assert seen[-1]["job"]["result"]["text"] == TEXT
    assert len(answer.text) > 30
    assert TEXT.startswith(answer.text)
    log = "\n".join(stack.log.lines)
    assert "socket_opened" in log
    assert "listeners_told" in log
    assert "job_followed" in log
    assert not [secret for secret in (ticket, key, "Danube", "river") if secret in log]


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_was_told_by_the_worker_follows_the_job_no_more(stack: Stack, stream: bool) -> None:
    """All that is left in the table is the connection, and the notifier has no message."""
    key = stack.client()
    connect(stack, key)
    job_id = stack.post(key, {"prompt": "Tell me.", "stream": stream}).json["job_id"]
    send(stack, action="subscribe", job_id=job_id)
    stack.work()
    told = jobs_told()
    assert told[-1]["status"] == "completed"
    assert stack.tell() == 0
    assert stack.get(key, job_id).json["deliveries"][0]["status"] == "delivered"
    table = boto3.resource("dynamodb").Table(stack.deployed.names["ConnectionsTable"])
    (item,) = table.scan()["Items"]
    assert str(item["pk"]).startswith("connection#")
    assert "jobs" not in item
    closing = event("socket_message")
    closing["requestContext"] |= {"routeKey": "$disconnect", "eventType": "DISCONNECT"}
    assert stack.function("WebsocketFunction")(closing, Context()) == {"statusCode": 200}
    assert table.scan()["Items"] == []


@pytest.mark.parametrize("message", [{"action": "ping"}, {"action": "nothing"}, {"action": "subscribe", "job_id": "x"}])
def test_every_message_is_answered(stack: Stack, message: dict[str, Any]) -> None:
    """By a frame of a documented type."""
    connect(stack, stack.client())
    assert send(stack, **message)["type"] in {"pong", "error"}
