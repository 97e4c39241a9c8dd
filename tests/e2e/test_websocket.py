"""The WebSocket API of the deployed stack: who gets in, what is told, and answers while they are written."""

from __future__ import annotations

import json
import socket as sockets
from dataclasses import replace
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from cli.clients import create_client
from docs.examples.follow import Answer
from tests.e2e.conftest import Fake, Stack, until
from tests.e2e.sockets import FINAL, ask, connection, is_end, read

pytestmark = pytest.mark.e2e

TEXT = "".join(f"{number}: Ärger 中文 😀 and so on, until it ends.\n" for number in range(17))


def cut(socket: Any) -> None:
    """Break the connection off, without a word."""
    socket.socket.shutdown(sockets.SHUT_RDWR)


def test_a_client_cut_off_three_times_while_the_answer_streams_has_exactly_its_text(
    stack: Stack, fake: Fake, mark: str
) -> None:
    """Each new connection goes on where the last one ended: no gap, no repeat, while the model writes."""
    fake.script(mark, {"text": TEXT, "chunk_delay_seconds": 0.15})
    job_id = stack.submit(prompt=mark, stream=True, max_tokens=100_000)["job_id"]
    answer, cuts, deltas = Answer(), 0, 0
    end: dict[str, Any] | None = None
    while end is None:
        first = True
        with connection(stack) as socket:
            ask(socket, action="subscribe", job_id=job_id, after={"draft": answer.draft, "position": answer.position})
            try:
                for message in socket:
                    frame = json.loads(message)
                    if is_end(frame):
                        end = frame["job"]
                        break
                    if frame["type"] == "delta":
                        assert not first or frame["position"] == answer.position
                        first, deltas = False, deltas + 1
                        assert answer.take(frame)
                        if cuts < 3 and answer.position >= (cuts + 1) * len(TEXT) // 5:
                            cuts += 1
                            cut(socket)
            except ConnectionClosed:
                pass
    assert cuts == 3
    assert end["result"]["text"] == TEXT
    assert answer.text == TEXT[: len(answer.text)]
    assert len(answer.text) > 0.9 * len(TEXT), "the pieces stopped long before the end"
    assert deltas > 10
    assert len(fake.calls(mark)) == 1


def test_a_retry_is_another_draft(stack: Stack, fake: Fake, mark: str) -> None:
    """The provider breaks off half-way; what it had said is replaced, and states are told."""
    fake.script(
        mark,
        {"text": "wrong " * 60, "chunk_delay_seconds": 0.5, "fault": "error_in_stream",
         "body": {"error": {"type": "server_error", "code": "server_error", "message": "x"}}},
        {"text": "right " * 60, "chunk_delay_seconds": 0.1},
    )  # fmt: skip
    with connection(stack) as socket:
        job_id = stack.submit(prompt=mark, stream=True)["job_id"]
        ask(socket, action="subscribe", job_id=job_id)
        answer = Answer()
        states: list[str] = []
        drafts: list[tuple[int, str]] = []
        while not states or states[-1] not in FINAL:
            frame = read(socket)
            if frame["type"] == "job":
                states.append(frame["job"]["status"])
            else:
                answer.take(frame)
                drafts.append((answer.draft, answer.text[:5]))
    assert [state for before, state in zip([None, *states], states, strict=False) if before != state][-3:] == [
        "queued",
        "processing",
        "completed",
    ]
    assert (1, "wrong") in drafts
    assert drafts[-1] == (2, "right")


def test_a_finished_job_answers_at_once(stack: Stack, fake: Fake, mark: str) -> None:
    """With its result; one that was never submitted to be listened to."""
    job_id = stack.submit(prompt=f"Say {mark}")["job_id"]
    shown = stack.ended(job_id)
    with connection(stack) as socket:
        ask(socket, action="subscribe", job_id=job_id)
        assert read(socket) == {"type": "job", "job": shown}


def test_any_job_can_be_followed_to_its_end(stack: Stack, fake: Fake, mark: str) -> None:
    """Also when it is being worked on already; its state at once, its end when it comes."""
    fake.script(mark, {"text": "slowly", "latency_seconds": 2})
    job_id = stack.submit(prompt=mark)["job_id"]
    until(lambda: fake.calls(mark), 30, lambda: "the call did not begin")
    with connection(stack) as socket:
        ask(socket, action="subscribe", job_id=job_id)
        assert read(socket)["job"]["status"] == "processing"
        assert read(socket)["job"]["result"]["text"] == "slowly"
    (delivery,) = until(lambda: stack.job(job_id).get("deliveries"), 10, lambda: "no delivery is noted")
    assert delivery["target"] == "websocket"


def test_who_comes_while_the_answer_is_written_gets_it_from_the_beginning(stack: Stack, fake: Fake, mark: str) -> None:
    """Of a job that nobody had asked to be streamed; the worker learns of it when it renews its lease."""
    fake.script(mark, {"text": TEXT, "chunk_delay_seconds": 0.5})
    job_id = stack.submit(prompt=mark, max_tokens=100_000)["job_id"]
    until(lambda: fake.calls(mark), 30, lambda: "the call did not begin")
    answer = Answer()
    with connection(stack) as socket:
        ask(socket, action="subscribe", job_id=job_id)
        while not is_end(frame := read(socket)):
            if frame["type"] == "delta":
                assert answer.take(frame)
    assert frame["job"]["result"]["text"] == TEXT
    assert answer.text == TEXT[: len(answer.text)]
    assert len(answer.text) > 0.9 * len(TEXT)


def test_a_cancelled_job_is_told(stack: Stack, fake: Fake, mark: str) -> None:
    """By whoever it was cancelled."""
    fake.script(mark, {"text": "never", "latency_seconds": 20})
    job_id = stack.submit(prompt=mark, stream=True)["job_id"]
    with connection(stack) as socket:
        ask(socket, action="subscribe", job_id=job_id)
        read(socket)
        assert stack.http().delete(f"/jobs/{job_id}").status_code == 200
        assert read(socket, is_end)["job"]["status"] == "cancelled"


def test_a_large_result_is_a_notice_to_fetch_it(stack: Stack, fake: Fake, mark: str) -> None:
    """Frames are bounded; the deltas are not fewer for it."""
    text = "large 中 " * 8_000
    fake.script(mark, {"text": text, "finish_reason": "stop"})
    with connection(stack) as socket:
        job_id = stack.submit(prompt=mark, stream=True, max_tokens=100_000)["job_id"]
        ask(socket, action="subscribe", job_id=job_id)
        end = read(socket, is_end)["job"]
    assert "result" not in end
    assert "GET the job" in end["result_note"]
    assert stack.job(job_id)["result"]["text"] == text


def test_a_ticket_opens_one_connection(stack: Stack) -> None:
    """For clients that cannot send a key."""
    ticket = stack.http().post("/tickets")
    assert ticket.status_code == 201
    assert ticket.json()["socket_url"] == stack.socket_url
    with connection(stack, ticket.json()["ticket"]) as socket:
        ask(socket, action="ping")
        assert read(socket) == {"type": "pong"}
    with pytest.raises((InvalidHandshake, InvalidMessage)), connection(stack, ticket.json()["ticket"]):
        pass


@pytest.mark.parametrize("key", ["", "bb_nobody"])
def test_nobody_gets_in_without_a_key(stack: Stack, key: str) -> None:
    """The handshake is refused."""
    with pytest.raises((InvalidHandshake, InvalidMessage)), connection(replace(stack, api_key=key)):
        pass


def test_somebody_elses_job_is_no_job(stack: Stack, mark: str) -> None:
    """A problem document, as over HTTP, and the connection stays open."""
    table = stack.aws("dynamodb", resource=True).Table(stack.outputs["ClientsTableName"])
    other = replace(stack, api_key=create_client(table, "another", "Another", 0))
    job_id = stack.submit(prompt=mark)["job_id"]
    with connection(other) as socket:
        ask(socket, action="subscribe", job_id=job_id)
        assert read(socket)["problem"]["code"] == "job_not_found"
        ask(socket, action="shout")
        problem = read(socket)["problem"]
        assert (problem["code"], problem["errors"][0]["field"]) == ("invalid_request", "action")


def test_a_connection_that_is_gone_leaves_nothing_behind(stack: Stack, fake: Fake, mark: str) -> None:
    """However it ended, once its job has."""
    fake.script(mark, {"text": TEXT, "chunk_delay_seconds": 0.1})
    job_id = stack.submit(prompt=mark, stream=True, max_tokens=100_000)["job_id"]
    with connection(stack) as socket:
        ask(socket, action="subscribe", job_id=job_id)
        read(socket)
        cut(socket)
    stack.ended(job_id)

    def listeners() -> list[Any]:
        reply = stack.aws("dynamodb").query(
            TableName=stack.outputs["ConnectionsTableName"],
            KeyConditionExpression="pk = :job",
            ExpressionAttributeValues={":job": {"S": f"job#{job_id}"}},
        )
        found: list[Any] = reply["Items"]
        return found

    until(lambda: not listeners(), 15, lambda: str(listeners()))
    assert stack.job(job_id)["result"]["text"] == TEXT
