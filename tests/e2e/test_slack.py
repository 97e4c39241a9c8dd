"""Slack all the way: a signed event in, an answer in the thread out, by the deployed stack and the real slack-sdk."""

from __future__ import annotations

import json
import time
import urllib.parse
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx2
import pytest

from backburner.channels.slack import SENTENCES, STOPPED
from backburner.slack_events import HELP
from backburner.slack_text import RETRY
from backburner.submission import job_id_for
from tests.e2e.conftest import Fake, Stack, Workspace, until
from tests.e2e.slack_probes import OPS
from tests.fakes.slack import BOT_USER

pytestmark = pytest.mark.e2e

ASK = f"<@{BOT_USER}> "


def job_of(stack: Stack, event: dict[str, Any]) -> dict[str, Any]:
    """The row of a message's job."""
    job_id = job_id_for("slack", f"{event['channel']}:{event['ts']}")
    table = stack.outputs["JobsTableName"]
    reply = stack.aws("dynamodb").get_item(TableName=table, Key={"job_id": {"S": job_id}}, ConsistentRead=True)
    row: dict[str, Any] = reply["Item"]
    return row


def outbox(stack: Stack, event: dict[str, Any]) -> dict[str, Any]:
    """How far the telling of a message's answer is."""
    (notice,) = json.loads(job_of(stack, event).get("outbox", {"S": "[{}]"})["S"])
    return dict(notice)


def test_a_question_is_answered_in_its_thread(stack: Stack, fake: Fake, slack: Workspace, mark: str) -> None:
    """Acknowledged fast, asked once without the mention, answered once in the thread, harmless."""
    fake.script(mark, {"text": f"**{mark}**: ask <!channel>, if a < b && c"})
    event = slack.say(f"{ASK}what is {mark}?")
    began = time.monotonic()
    assert slack.send(event) == 200
    assert time.monotonic() - began < 3
    assert slack.answers(event["ts"]) == [f"**{mark}**: ask &lt;!channel>, if a &lt; b && c"]
    (call,) = fake.calls(mark)
    assert BOT_USER not in json.dumps(call["request"])
    until(lambda: outbox(stack, event).get("status") == "delivered", 10, lambda: str(outbox(stack, event)))
    assert job_of(stack, event)["lane"]["S"] == "interactive"


def test_slk_01_resends_make_one_call_and_one_answer(stack: Stack, fake: Fake, slack: Workspace, mark: str) -> None:
    """While the first one's call is open, in parallel, and as mention and message."""
    fake.script(mark, {"text": "one", "latency_seconds": 4})
    event = slack.say(f"{ASK}{mark}")
    copies = [event, {**event, "type": "message"}] * 3
    with ThreadPoolExecutor(max_workers=6) as pool:
        assert list(pool.map(slack.send, copies)) == [200] * 6
    until(partial(fake.calls, mark), 30, lambda: "the call did not begin")
    assert slack.send(event, {"X-Slack-Retry-Num": "1", "X-Slack-Retry-Reason": "http_timeout"}) == 200
    assert slack.answers(event["ts"]) == ["one"]
    assert slack.send(event, {"X-Slack-Retry-Num": "2", "X-Slack-Retry-Reason": "http_timeout"}) == 200
    time.sleep(2)
    assert slack.answers(event["ts"]) == ["one"]
    assert len(fake.calls(mark)) == 1


@pytest.mark.parametrize(
    "steps",
    [
        [{"status": 429, "headers": {"Retry-After": "2"}}],
        [{"error": "ratelimited"}],
        [{"status": 500}],
        [{"lost": True}],
        [{"lost": True}, {"status": 429, "headers": {"Retry-After": "1"}}],
    ],
    ids=json.dumps,
)
def test_slk_18_whatever_slack_does_the_answer_comes_once(
    stack: Stack, fake: Fake, slack: Workspace, mark: str, steps: list[dict[str, Any]]
) -> None:
    """And the model is asked once."""
    fake.script(mark, {"text": mark})
    event = slack.say(f"{ASK}{mark}")
    slack.script("chat.postMessage", *steps)
    assert slack.send(event) == 200
    until(lambda: outbox(stack, event).get("status") == "delivered", 30, lambda: str(job_of(stack, event)))
    assert slack.answers(event["ts"]) == [mark]
    assert len(fake.calls(mark)) == 1


def test_slk_18_a_permanent_error_ends_the_delivery_with_its_reason(
    stack: Stack, fake: Fake, slack: Workspace, mark: str
) -> None:
    """One try; the result is kept, and the model is not asked again."""
    fake.script(mark, {"text": mark})
    event = slack.say(f"{ASK}{mark}")
    slack.script("chat.postMessage", *[{"error": "is_archived"}] * 3)
    assert slack.send(event) == 200
    until(lambda: outbox(stack, event).get("status") == "given_up", 30, lambda: str(job_of(stack, event)))
    assert (outbox(stack, event)["last_error"], outbox(stack, event)["tries"]) == ("is_archived", 1)
    row = job_of(stack, event)
    assert row["status"]["S"] == "completed"
    assert mark in row["result"]["S"]
    assert len(fake.calls(mark)) == len(slack.calls("chat.postMessage")) == 1


def test_a_long_answer_comes_whole_and_in_order(stack: Stack, fake: Fake, slack: Workspace, mark: str) -> None:
    """In several messages, with a reply lost in between."""
    text = "\n\n".join(f"part {n:02}\n\n```\n{'x < y ' * 300}\n```" for n in range(20))
    fake.script(mark, {"text": text, "finish_reason": "stop"})
    event = slack.say(f"{ASK}{mark}")
    slack.script("chat.postMessage", {}, {"lost": True})
    assert slack.send(event) == 200
    until(lambda: outbox(stack, event).get("status") == "delivered", 60, lambda: str(outbox(stack, event)))
    answers = slack.answers(event["ts"])
    assert len(answers) >= 3
    joined = "".join(answers)
    assert [joined.count(f"part {n:02}") for n in range(20)] == [1] * 20
    assert joined.replace("&lt;", "<").count("x < y ") == 20 * 300


def test_a_thread_goes_on_as_a_conversation(stack: Stack, fake: Fake, slack: Workspace, mark: str) -> None:
    """A reply needs no mention, and what was said before reaches the model in order."""
    fake.script(mark, {"text": "Rhine & Elbe"})
    event = slack.say(f"{ASK}list rivers {mark}")
    assert slack.send(event) == 200
    slack.answers(event["ts"])
    more = slack.say("and lakes?", thread_ts=event["ts"], kind="message")
    assert slack.send(more) == 200
    assert len(slack.answers(event["ts"], count=2)) == 2
    (call,) = [call for call in fake.calls(mark) if "and lakes?" in json.dumps(call["request"])]
    turns = call["request"]["input"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert [mark in json.dumps(turns[0]), "Rhine & Elbe" in json.dumps(turns[1])] == [True, True]


def test_a_failure_is_told_and_its_button_asks_again_once(
    stack: Stack, fake: Fake, slack: Workspace, mark: str
) -> None:
    """One sentence, nothing of the provider's; pressed twice, it is one new call."""
    fake.script(mark, {"status": 401, "body": {"error": {"message": "sk-secret is wrong"}}}, {"text": "at last"})
    event = slack.say(f"{ASK}{mark}")
    assert slack.send(event) == 200
    assert slack.answers(event["ts"]) == [SENTENCES["authentication"]]
    (failure,) = slack.messages(event["ts"])
    button = failure["blocks"][1]["elements"][0]
    assert button["action_id"] == RETRY
    for _ in range(2):
        assert slack.press(button, container={"message_ts": failure["ts"]}) == 200
    assert slack.answers(event["ts"], count=2)[-1] == "at last"
    assert len(fake.calls(mark)) == 2


def test_the_stop_button_ends_the_call(stack: Stack, fake: Fake, slack: Workspace, mark: str) -> None:
    """While the model writes; the thread says so."""
    fake.script(mark, {"text": "word " * 400, "chunk_delay_seconds": 0.5})
    event = slack.say(f"{ASK}{mark}")
    assert slack.send(event) == 200
    until(lambda: fake.calls(mark), 30, lambda: "the call did not begin")
    job_id = job_of(stack, event)["job_id"]["S"]
    assert slack.press({"action_id": "backburner_stop", "value": job_id}) == 200
    assert slack.answers(event["ts"]) == [STOPPED]
    gone = until(lambda: [call for call in fake.calls(mark) if call["ended"]], 30, lambda: "the call goes on")
    assert gone[0]["outcome"] == "client_gone"


def test_a_command_is_answered_in_the_channel(stack: Stack, fake: Fake, slack: Workspace, mark: str) -> None:
    """With who asked what, since nobody else has seen it."""
    fake.script(mark, {"text": "the answer"})
    form = {"command": "/ask", "text": mark, "channel_id": slack.channel, "user_id": slack.user, "team_id": "T0000HOME",
            "trigger_id": uuid.uuid4().hex, "response_url": "https://hooks.slack.com/commands/x"}  # fmt: skip
    for _ in range(2):
        reply = slack.post("commands", urllib.parse.urlencode(form))
        assert (reply.status_code, reply.json()["response_type"]) == (200, "ephemeral")
    slack.answers()
    (message,) = slack.messages()
    assert message["blocks"][0]["elements"][0]["text"] == f"<@{slack.user}> asked: {mark}"
    assert message["text"] == "the answer"
    assert len(fake.calls(mark)) == 1


def test_slk_10_a_mention_alone_gets_help_and_no_call(stack: Stack, fake: Fake, slack: Workspace) -> None:
    """A short reply in the thread, once."""
    event = slack.say(ASK)
    for _ in range(2):
        assert slack.send(event) == 200
    assert slack.answers(event["ts"]) == [HELP]
    assert fake.calls(slack.channel) == []


def test_slk_12_what_slack_has_not_signed_is_refused(stack: Stack, slack: Workspace) -> None:
    """401 for everything, and the other methods do not exist."""
    body = json.dumps({"type": "url_verification", "challenge": "c-1"})
    assert slack.post("events", body).json() == {"challenge": "c-1"}
    for headers in ({"X-Slack-Signature": "v0=junk"}, {"X-Slack-Request-Timestamp": "abc"}):
        reply = slack.post("events", body, headers)
        assert (reply.status_code, reply.json()["code"]) == (401, "bad_signature")
    assert httpx2.post(f"{stack.api_url}/slack/events", content=body, trust_env=False).status_code == 401
    reply = httpx2.get(f"{stack.api_url}/slack/events", trust_env=False)
    assert (reply.status_code, reply.headers.get("allow")) == (405, "POST")


def test_every_alarm_is_told_in_the_operators_channel_and_its_end_too(stack: Stack, slack: Workspace) -> None:
    """With what it means, and the reason."""
    ops = replace(slack, channel=OPS)
    cloudwatch = stack.aws("cloudwatch")
    alarms = cloudwatch.describe_alarms()["MetricAlarms"]
    assert alarms
    slack.control("PUT", "config", json={"messages_per_second": 1_000.0})
    try:
        for alarm in alarms:
            cloudwatch.set_alarm_state(AlarmName=alarm["AlarmName"], StateValue="OK", StateReason="to begin with")
            for state, sign in (("ALARM", ":red_circle:"), ("OK", ":large_green_circle:")):
                reason = f"by hand {uuid.uuid4().hex}"
                cloudwatch.set_alarm_state(AlarmName=alarm["AlarmName"], StateValue=state, StateReason=reason)

                def told(reason: str = reason) -> list[str]:
                    return [text for text in ops.answers() if reason in text]

                (text,) = until(told, 20, partial("{} is not told".format, alarm["AlarmName"]))
                assert text.startswith(sign)
                assert alarm["AlarmDescription"].partition(" Runbook:")[0] in text
    finally:
        slack.control("PUT", "config", json={"messages_per_second": 1.0})
