"""What the functions do for Slack, each thing shown to need its permission: probes for test_permissions.py."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from backburner.channels.slack import GONE
from backburner.slack_events import HELP
from backburner.slack_text import STOP
from backburner.submission import job_id_for
from tests.e2e.conftest import Workspace, until
from tests.fakes.emulated import function_processes, kill
from tests.fakes.slack import BOT_USER

if TYPE_CHECKING:
    from tests.e2e.test_permissions import Scene

OPS = "C0000OPS1"
"""The operators' channel, as local/trial.py deploys it."""
LARGE = 101_000
"""Characters of an answer that is just too large for its row."""


def workspace(scene: Scene) -> Workspace:
    """A channel and a person of the probe's own."""
    name = scene.mark.removeprefix("mark-")[:12].upper()
    return Workspace(os.environ["BACKBURNER_FAKE_SLACK"], scene.stack.api_url, f"C{name}", f"U{name}")


def said(scene: Scene, slack: Workspace, text: str | None = None, **more: Any) -> dict[str, Any]:
    """A question that carries the probe's mark."""
    return slack.say(f"<@{BOT_USER}> {scene.mark if text is None else text}", **more)


def job_id_of(event: dict[str, Any]) -> str:
    """The id of a message's job."""
    return job_id_for("slack", f"{event['channel']}:{event['ts']}")


def row_of(scene: Scene, event: dict[str, Any]) -> dict[str, Any]:
    """The row of a message's job; empty if there is none."""
    reply = scene.stack.aws("dynamodb").get_item(
        TableName=scene.stack.outputs["JobsTableName"], Key={"job_id": {"S": job_id_of(event)}}, ConsistentRead=True
    )
    return dict(reply.get("Item", {}))


def untold(scene: Scene, event: dict[str, Any]) -> str | None:
    """Why the answer was not told so far."""
    for notice in json.loads(row_of(scene, event).get("outbox", {"S": "[]"})["S"]):
        if notice["target"] == "slack":
            return notice["last_error"]  # type: ignore[no-any-return]
    return None


def cool_down(scene: Scene, function: str) -> None:
    """End a function's processes, so that the next invocation starts with nothing in memory."""
    outputs = scene.stack.outputs
    of_this_stack = f"STANDARD_QUEUE_URL={outputs['StandardQueueUrl']}"
    kill(function_processes(outputs[f"{function.capitalize()}FunctionName"], of_this_stack))


def refused_then_taken(scene: Scene, **more: Any) -> None:
    """503, and no call is made; then 200, and the answer comes once."""
    slack = workspace(scene)
    event = said(scene, slack, **more)
    with scene.lacking():
        assert slack.send(event) == 503
        assert not scene.fake.calls(scene.mark)
    assert slack.send(event) == 200
    assert len(slack.answers(event["ts"])) == 1
    assert len(scene.fake.calls(scene.mark)) == 1


def a_question_in_a_thread_is_told_from_talk(scene: Scene) -> None:
    """503, since nobody knows whose thread it is; then 200, and nothing comes of it."""
    slack = workspace(scene)
    event = slack.say("said among people", thread_ts="1760000000.000100", kind="message")
    with scene.lacking():
        assert slack.send(event) == 503
    assert slack.send(event) == 200
    assert row_of(scene, event) == {}


def a_question_is_stopped(scene: Scene) -> None:
    """The button's request fails and the call goes on; then it is ended."""
    slack = workspace(scene)
    scene.fake.script(scene.mark, {"text": "word " * 400, "chunk_delay_seconds": 0.5})
    event = said(scene, slack)
    assert slack.send(event) == 200
    until(lambda: scene.fake.calls(scene.mark), 30, lambda: str(row_of(scene, event)))
    button = {"action_id": STOP, "value": job_id_of(event)}
    with scene.lacking():
        assert slack.press(button) == 503
        assert row_of(scene, event)["status"]["S"] == "processing"
    assert slack.press(button) == 200
    assert row_of(scene, event)["status"]["S"] == "cancelled"


def a_fresh_desk_reads_the_signing_secret(scene: Scene) -> None:
    """503; then 200."""
    cool_down(scene, "slack")
    refused_then_taken(scene)


def a_fresh_desk_reads_slacks_limits(scene: Scene) -> None:
    """503, since nobody knows what the client may use; then 200."""
    cool_down(scene, "slack")  # a client once read is kept for half a minute
    refused_then_taken(scene)


def the_depth_before_a_question_is_seen(scene: Scene) -> None:
    """It is taken all the same, but nobody knows how many were before it."""
    slack = workspace(scene)
    for known in (False, True):
        cool_down(scene, "slack")  # a depth once read is kept for some seconds
        event = said(scene, slack)
        if known:
            assert slack.send(event) == 200
        else:
            with scene.lacking():
                assert slack.send(event) == 200
        assert ("ahead" in row_of(scene, event)) is known


def what_is_said_without_a_call_is_announced(scene: Scene) -> None:
    """503, the row is there; then the repairer announces it."""
    slack = workspace(scene)
    event = said(scene, slack, "")
    with scene.lacking():
        assert slack.send(event) == 503
    scene.turn(job_id_of(event), "due_at")
    scene.stack.repair()
    assert slack.answers(event["ts"]) == [HELP]


def told_later(scene: Scene, text: str = "an answer") -> None:
    """The try fails and is planned again; then the answer comes once, without another call."""
    slack = workspace(scene)
    scene.fake.script(scene.mark, {"text": text, "finish_reason": "stop"})
    event = said(scene, slack)
    with scene.lacking():
        assert slack.send(event) == 200
        until(lambda: untold(scene, event) == "unavailable", 30, lambda: str(row_of(scene, event)))
        assert slack.messages() == []
    assert "".join(slack.answers(event["ts"], count=-(-len(text) // 12_000))).strip() == text
    assert len(scene.fake.calls(scene.mark)) == 1


def a_fresh_notifier_reads_slacks_token(scene: Scene) -> None:
    """The try fails; then the answer comes."""
    cool_down(scene, "notifier")
    told_later(scene)


def a_large_answer_is_told(scene: Scene) -> None:
    """The try fails; then all of it comes."""
    told_later(scene, "a" * LARGE)


def a_missing_answer_is_told_as_such(scene: Scene) -> None:
    """Without s3:ListBucket, S3 says 403 of a missing object, so the telling would go on; the emulator says 404."""
    slack = workspace(scene)
    scene.fake.script(scene.mark, {"text": "a" * LARGE, "finish_reason": "stop"})
    event = said(scene, slack)
    slack.script("chat.postMessage", {"status": 429, "headers": {"Retry-After": "6"}})
    with scene.lacking():
        assert slack.send(event) == 200
        until(lambda: untold(scene, event) == "ratelimited", 30, lambda: str(row_of(scene, event)))
        scene.lose_object(f"results/{job_id_of(event)}/")
        assert slack.answers(event["ts"]) == [GONE]


def alarm(scene: Scene, seconds: float = 20) -> bool:
    """Something is said to the alarm topic; whether it was told in the operators' channel."""
    slack = replace(workspace(scene), channel=OPS)
    text = f"{scene.mark} {time.monotonic()}"
    scene.stack.aws("sns").publish(TopicArn=scene.stack.outputs["AlarmTopicArn"], Message=text)
    try:
        until(lambda: text in slack.answers(), seconds, lambda: text)
    except AssertionError:
        return False
    return True


def a_fresh_alert_reads_slacks_token(scene: Scene) -> None:
    """Nothing is told; then the next one is."""
    assert alarm(scene)
    cool_down(scene, "alerts")
    with scene.lacking():
        assert not alarm(scene, 5)
    assert alarm(scene)


def road(scene: Scene) -> int:
    """A question by way of all functions; when it began, in epoch milliseconds."""
    slack, began = workspace(scene), time.time_ns() // 1_000_000
    event = said(scene, slack)
    assert slack.send(event) == 200
    slack.answers(event["ts"])
    return began
