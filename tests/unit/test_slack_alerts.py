"""Alarms in Slack: what it means, the figure, the way to the runbook; and what is no alarm is shown as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from backburner.channels.slack_alerts import SlackAlerts, alert_text
from backburner.channels.slack_api import SlackApi
from backburner.errors import Untold
from tests.fakes.memory import MemoryJournal
from tests.fakes.slack import FakeSlack

OPS = "C0000OPS1"


def alarm(state: str = "ALARM", **changes: Any) -> dict[str, Any]:
    """A notification as CloudWatch sends it."""
    return {
        "AlarmName": "backburner-DeadLetterDepthAlarm-1ABC",
        "AlarmDescription": "At least one job is dead & waits. Runbook: Dead letters, and what to do.",
        "AWSAccountId": "123456789012",
        "NewStateValue": state,
        "OldStateValue": "OK",
        "NewStateReason": "Threshold Crossed: 1 datapoint [12.0 (29/11/26 18:00:00)] was greater than or equal to the "
        "threshold (1.0).",
        "StateChangeTime": "2026-11-29T18:01:00.000+0000",
        "Region": "US East (N. Virginia)",
        "AlarmArn": "arn:aws:cloudwatch:us-east-1:123456789012:alarm:backburner-DeadLetterDepthAlarm-1ABC",
        "Trigger": {"MetricName": "ApproximateNumberOfMessagesVisible", "Threshold": 1.0, "Period": 60},
        **changes,
    }


def text_of(message: Any, url: str = "https://wiki.example.test/runbook") -> list[str]:
    return alert_text(message if isinstance(message, str) else json.dumps(message), url).split("\n")


def test_an_alarm_says_what_it_means_by_how_much_and_where_to_read_on() -> None:
    """In three lines."""
    assert text_of(alarm()) == [
        ":red_circle: *Alarm:* At least one job is dead &amp; waits.",
        "ApproximateNumberOfMessagesVisible is *12*; the threshold is 1.",
        (
            "<https://wiki.example.test/runbook#dead-letters-and-what-to-do|Runbook> · "
            "<https://us-east-1.console.aws.amazon.com/cloudwatch/home?region=us-east-1#alarmsV2:alarm/"
            "backburner-DeadLetterDepthAlarm-1ABC|CloudWatch>"
        ),
    ]


def test_its_end_is_told_too() -> None:
    """With the figure that ended it."""
    assert text_of(alarm("OK"))[0] == ":large_green_circle: *Over:* At least one job is dead &amp; waits."


@pytest.mark.parametrize(
    ("changes", "line", "expected"),
    [
        ({"NewStateReason": "it was <set> by hand"}, 1, "it was &lt;set&gt; by hand"),
        ({"Trigger": None}, 1, "Threshold Crossed: 1 datapoint [12.0"),
        ({"AlarmDescription": None}, 0, ":red_circle: *Alarm:* backburner-DeadLetterDepthAlarm-1ABC"),
        ({"NewStateValue": "INSUFFICIENT_DATA"}, 0, "*INSUFFICIENT_DATA:* At least"),
        ({"AlarmArn": None}, 2, "<https://wiki.example.test/runbook#dead-letters-and-what-to-do|Runbook>"),
        ({"AlarmDescription": "<!channel> " * 400}, 0, ":red_circle: *Alarm:* &lt;!channel&gt;"),
    ],
)
def test_what_an_alarm_leaves_out_or_makes_up_does_no_harm(changes: Any, line: int, expected: str) -> None:
    """Less is said, nothing fails, and nothing in it is alive."""
    lines = text_of(alarm(**changes))
    assert lines[line].startswith(expected)
    assert "<!" not in "\n".join(lines)
    assert len("\n".join(lines)) <= 24_000


def test_without_a_runbook_there_is_no_link_to_one() -> None:
    """Only to CloudWatch."""
    assert text_of(alarm(), "")[2].startswith("<https://us-east-1.console")


@pytest.mark.parametrize("message", ["a word by hand", "", "[1]", '"x"', '{"a": 1}', "{"])
def test_any_other_message_is_shown_as_it_is(message: str) -> None:
    """Somebody tries the topic out."""
    assert text_of(message) == [message or "(an empty notification)"]


@pytest.fixture
def slack() -> Iterator[FakeSlack]:
    with FakeSlack() as server:
        yield server


def alerts(slack: FakeSlack, channel: str = OPS, *, slept: list[float] | None = None) -> SlackAlerts:
    api = SlackApi(lambda: slack.token, lambda _: False, base_url=slack.base_url)
    return SlackAlerts(api, channel, "", MemoryJournal(), sleep=([] if slept is None else slept).append)


def event(*messages: str) -> dict[str, Any]:
    return {"Records": [{"Sns": {"Message": message}} for message in messages]}


def test_each_notification_is_a_message_in_the_operators_channel(slack: FakeSlack) -> None:
    """Also of alarms whose texts are as long as they can be."""
    long = json.dumps(alarm(AlarmDescription="&" * 1024, NewStateReason="<" * 1023, Trigger=None))
    alerts(slack).handle(event(json.dumps(alarm()), "by hand", long), None)
    assert [answer.split("\n")[0] for answer in slack.answers(OPS)][:2] == [
        ":red_circle: *Alarm:* At least one job is dead &amp; waits.",
        "by hand",
    ]
    assert len(slack.answers(OPS)) == 3


def test_an_alarm_that_was_just_made_and_is_well_is_no_news(slack: FakeSlack) -> None:
    """A deployment makes dozens. One that goes off from the start is told, and so is the end of one that was on."""
    told = [("INSUFFICIENT_DATA", "OK"), ("INSUFFICIENT_DATA", "ALARM"), ("ALARM", "OK"), ("OK", "INSUFFICIENT_DATA")]
    alerts(slack).handle(event(*(json.dumps(alarm(new, OldStateValue=old)) for old, new in told)), None)
    assert [answer.split(" ")[0] for answer in slack.answers(OPS)] == [
        ":red_circle:", ":large_green_circle:", "*INSUFFICIENT_DATA:*",
    ]  # fmt: skip


def test_a_burst_of_alarms_is_told_at_slacks_pace(slack: FakeSlack) -> None:
    """One message a second: the others wait for their turn, in this invocation, and none is lost."""
    slack.script("chat.postMessage", *[{"status": 429, "headers": {"Retry-After": "1"}}] * 3)
    slept: list[float] = []
    alerts(slack, slept=slept).handle(event("one", "two"), None)
    assert slack.answers(OPS) == ["one", "two"]
    assert slept == [1.0] * 3


def test_no_alarm_waits_beyond_its_functions_time(slack: FakeSlack) -> None:
    """It is left to the next try."""
    slack.script("chat.postMessage", *[{"status": 429, "headers": {"Retry-After": "15"}}] * 3)
    slept: list[float] = []
    with pytest.raises(Untold):
        alerts(slack, slept=slept).handle(event("one"), None)
    assert slept == [15.0, 15.0]


def test_what_passes_is_left_to_lambdas_own_tries(slack: FakeSlack) -> None:
    """The invocation fails, so it comes again; what is final is noted and ends."""
    slack.script("chat.postMessage", {"status": 429, "headers": {"Retry-After": "60"}}, {"error": "channel_not_found"})
    with pytest.raises(Untold):
        alerts(slack).handle(event("one"), None)
    told = alerts(slack)
    told.handle(event("one"), None)
    assert told.journal.named("alert_untold") == [{"reason": "channel_not_found", "again": False}]  # type: ignore[attr-defined]
    assert slack.answers(OPS) == []
