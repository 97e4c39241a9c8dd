"""Slack's functions over the template's tables and queues, in one process: what they cost, and who may what."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import boto3
import botocore.client
import pytest

from backburner.channels import slack as slack_channel
from backburner.channels import slack_stream, slack_thread
from backburner.models import ClientLimits
from backburner.slack_events import CANNOT
from backburner.submission import job_id_for
from cli.clients import limit_client
from tests.fakes.provider import Behaviour, FakeProvider
from tests.fakes.slack import SIGNING_SECRET, TOKEN, FakeSlack, signed
from tests.integration.deployed import Deployed
from tests.integration.functions import Context, Reply, Stack, event, reply_of

TS = "1760000000.000100"


@pytest.fixture
def slack() -> Iterator[FakeSlack]:
    with FakeSlack() as server:
        yield server


@pytest.fixture
def stack(deployed: Deployed, provider: FakeProvider, slack: FakeSlack) -> Stack:
    """The functions with Slack's secrets, and a Slack that answers."""
    provider.configure(tokens_per_chunk=100_000)
    return functions(deployed, provider, slack)


def functions(deployed: Deployed, provider: FakeProvider, slack: FakeSlack, **overrides: str) -> Stack:
    """The functions, with the addresses and the secrets that they need."""
    given = {"SLACK_API_BASE_URL": slack.base_url, "OPENAI_BASE_URL": f"{provider.base_url}/v1", **overrides}
    made = Stack(deployed, given)
    secrets = {"openai_api_key": "sk", "slack_signing_secret": SIGNING_SECRET, "slack_bot_token": TOKEN}
    made.provider_keys(json.dumps(secrets))
    return made


def send(stack: Stack, ts: str = TS, **more: Any) -> Reply:
    """The mention of events/slack_event.json, signed now."""
    asked = event("slack_event")
    envelope = json.loads(asked["body"])
    envelope["event"] |= {"ts": ts, **more}
    asked["body"] = json.dumps(envelope)
    asked["headers"] |= signed(SIGNING_SECRET, asked["body"], time.time())
    return reply_of(stack.function("SlackFunction")(asked, Context()))


def test_a_question_is_answered_by_the_functions_one_after_the_other(stack: Stack, slack: FakeSlack) -> None:
    """slack, worker, notifier; resent, it is the same question."""
    for _ in range(3):
        assert send(stack).status == 200
    assert stack.work("InteractiveQueue") == 1
    assert stack.tell() == 1
    assert send(stack).status == 200
    assert slack.answers("C0000CHN1", TS) == ["Echo: list three rivers"]
    assert len(stack.rows()) == 1


@pytest.fixture
def streaming(deployed: Deployed, provider: FakeProvider, slack: FakeSlack, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """The functions as SlackStreaming=true sets them up; Slack is looked at, and takes messages, without waits."""
    for module, name in ((slack_thread, "LOOK_SECONDS"), (slack_stream, "FLUSH_SECONDS")):
        monkeypatch.setattr(module, name, 0.05)
    monkeypatch.setattr(slack_channel, "SPACING_MICROS", 50_000)
    slack.configure(messages_per_second=1_000.0)
    return functions(deployed, provider, slack, SLACK_STREAMING="true")


def test_an_answer_that_is_shown_while_it_is_written_is_whole_in_the_end(
    streaming: Stack, provider: FakeProvider, slack: FakeSlack
) -> None:
    """Beyond one message's 12,000 characters it goes on in the next one; the notifier lays the answer over them."""
    answer = "\n\n".join(f"part {n:03}: {'a < b ' * 40}".strip() for n in range(110))
    provider.configure(tokens_per_chunk=100)
    provider.script("three rivers", Behaviour(text=answer, finish_reason="stop", chunk_delay_seconds=0.03))
    assert send(streaming).status == 200
    assert streaming.work("InteractiveQueue") == 1
    # A message that was begun while the job ended is not in its row, so it is taken back.
    taken_back = {call.arguments["ts"] for call in slack.calls("chat.delete")}
    shown = [call.ts for call in slack.calls("chat.startStream") if call.ts not in taken_back]
    drafts = {message.ts: message.text for message in slack.messages("C0000CHN1", TS)}
    assert len(taken_back) <= 1
    assert len(shown) >= 3
    assert [*drafts] == shown
    assert all(0 < len(text) <= 12_000 for text in drafts.values())
    assert answer.startswith("".join(drafts.values()).replace("&lt;", "<"))
    assert slack.calls("chat.appendStream")
    streaming.tell()
    messages = slack.messages("C0000CHN1", TS)
    assert "".join(message.markdown for message in messages).replace("&lt;", "<") == answer
    assert all(len(message.markdown) <= 12_000 for message in messages)
    assert [message.ts for message in messages][: len(shown)] == shown[: len(messages)]
    parts = [(message.metadata or {})["event_payload"]["part"] for message in messages]
    assert parts == list(range(len(messages)))
    assert len(slack.calls("chat.postMessage")) == max(0, len(messages) - len(shown))
    assert len(provider.ledger) == 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all calls to AWS."""
    made: list[str] = []
    real = botocore.client.BaseClient._make_api_call  # type: ignore[attr-defined]

    def spying(self: Any, operation: str, arguments: dict[str, Any]) -> Any:
        made.append(operation)
        return real(self, operation, arguments)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", spying)
    return made


def test_a_question_costs_a_count_a_row_and_a_hint(stack: Stack, calls: list[str]) -> None:
    """Of a warm function; a bot's message and talk among people cost nothing."""
    send(stack)
    calls.clear()
    send(stack, "1760000001.000100")
    assert calls == ["UpdateItem", "PutItem", "SendMessage"]
    calls.clear()
    send(stack, "1760000002.000100", bot_id="B1")
    send(stack, "1760000003.000100", type="message", text="among people")
    assert calls == []


def test_slk_13_an_event_is_acknowledged_only_when_its_hint_is_sent(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 else; the resend makes it one job with its hint."""
    send(stack, "1759999999.000100")  # the function is warm, and its queues' clients are made
    real = botocore.client.BaseClient._make_api_call  # type: ignore[attr-defined]

    def failing(self: Any, operation: str, arguments: dict[str, Any]) -> Any:
        if operation == "SendMessage":
            raise botocore.client.ClientError({"Error": {"Code": "RequestThrottled"}}, operation)
        return real(self, operation, arguments)

    with monkeypatch.context() as patched:
        patched.setattr(botocore.client.BaseClient, "_make_api_call", failing)
        assert send(stack).status == 503
    assert send(stack).status == 200
    job_id = job_id_for("slack", f"C0000CHN1:{TS}")
    assert len([message for message in stack.messages("InteractiveQueue") if job_id in message["Body"]]) == 1


def test_the_limits_of_all_people_together_are_set_while_they_ask(stack: Stack, slack: FakeSlack) -> None:
    """By `backburner clients limits slack`; who comes too late is told so."""
    table = boto3.resource("dynamodb").Table(stack.deployed.names["ClientsTable"])
    wanted: dict[str, int | None] = {"requests_per_minute": 1}
    assert limit_client(table, "slack", wanted) == ClientLimits(requests_per_minute=1)
    for number in range(2):
        assert send(stack, f"176000000{number}.000100").status == 200
    stack.tell()
    assert slack.answers() == [CANNOT]
    assert limit_client(table, "slack", {"requests_per_minute": None}) == ClientLimits()


def test_nobody_has_the_key_of_all_people_in_slack(stack: Stack) -> None:
    """Their row has no key's hash, so no key leads to it."""
    table = boto3.resource("dynamodb").Table(stack.deployed.names["ClientsTable"])
    limit_client(table, "slack", {"requests_per_minute": 1})
    send(stack)
    for key in ("slack", "", "null"):
        assert stack.get(key, job_id_for("slack", f"C0000CHN1:{TS}")).status == 401


def test_no_secret_prompt_or_answer_reaches_a_log(stack: Stack, slack: FakeSlack) -> None:
    """Of any of the functions, also when Slack is in trouble."""
    slack.script("chat.postMessage", {"status": 500})
    send(stack)
    stack.work("InteractiveQueue")
    stack.tell()
    lines = "\n".join(stack.log.lines)
    assert "target_untold" in lines
    for secret in ("three rivers", SIGNING_SECRET, TOKEN):
        assert secret not in lines
