"""The fake Slack is like Slack, as the official SDK sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError
from slack_sdk.signature import SignatureVerifier

from tests.fakes.slack import BOT_USER, CHANNEL, DIRECT, TEAM, USER, FakeSlack


@pytest.fixture
def slack() -> Iterator[FakeSlack]:
    with FakeSlack() as server:
        yield server


@pytest.fixture
def web(slack: FakeSlack) -> WebClient:
    return WebClient(token=slack.token, base_url=slack.base_url, retry_handlers=[])


def refused(call: Any, **arguments: Any) -> tuple[int, str]:
    """Status and error of a call that Slack refuses."""
    with pytest.raises(SlackApiError) as error:
        call(**arguments)
    return error.value.response.status_code, error.value.response["error"]


def test_what_is_said_can_be_read(slack: FakeSlack, web: WebClient) -> None:
    """A question and the app's answer, root first, metadata only where asked for, ts as they were."""
    asked = slack.say(f"<@{BOT_USER}> hello")
    metadata = {"event_type": "kind", "event_payload": {"part": 1}}
    blocks = [{"type": "markdown", "text": "**hi**"}]
    posted = web.chat_postMessage(channel=CHANNEL, thread_ts=asked["ts"], text="hi", blocks=blocks, metadata=metadata)
    plain = web.conversations_replies(channel=CHANNEL, ts=asked["ts"])["messages"]
    assert [message["ts"] for message in plain] == [asked["ts"], posted["ts"]]
    assert all("metadata" not in message for message in plain)
    _, answer = web.conversations_replies(
        channel=CHANNEL, ts=asked["ts"], oldest=asked["ts"], include_all_metadata=True
    )["messages"]
    assert answer["metadata"]["event_payload"] == {"part": 1}
    assert slack.answers(CHANNEL, asked["ts"]) == ["**hi**"]


@pytest.mark.parametrize("root_on_each_page", [False, True])
def test_a_thread_comes_in_pages_the_oldest_first(slack: FakeSlack, web: WebClient, root_on_each_page: bool) -> None:
    """The root is the first message of the first page, and perhaps of each; 999 messages are the most."""
    slack.configure(root_on_each_page=root_on_each_page)
    root = slack.say("0")
    for number in range(1, 1_002):
        slack.say(str(number), thread_ts=root["ts"])

    def pages(limit: int, **bounds: Any) -> list[list[str]]:
        found = web.conversations_replies(channel=CHANNEL, ts=root["ts"], limit=limit, **bounds)
        return [[message["text"] for message in page["messages"]] for page in found]

    again = ["0"] * root_on_each_page
    first, second = pages(5_000)
    assert (len(first), first[:2], second) == (999, ["0", "1"], [*again, "999", "1000", "1001"])
    until = slack.messages()[4].ts
    assert pages(2, latest=until) == [["0", "1"], [*again, "2", "3"]]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"text": ""}, "no_text"),
        ({"text": "a", "channel": "nowhere"}, "channel_not_found"),
        ({"text": "a", "thread_ts": "1760000000.1"}, "invalid_thread_ts"),
        ({"markdown_text": "a", "text": "a"}, "markdown_text_conflict"),
        ({"markdown_text": "a" * 12_001}, "msg_too_long"),
        ({"text": "a", "blocks": [{"type": "markdown", "text": "a" * 6_001}] * 2}, "msg_blocks_too_long"),
        (
            {"text": "a", "blocks": [{"type": "section", "text": {"type": "mrkdwn", "text": "a" * 3_001}}]},
            "invalid_blocks",
        ),
    ],
)
def test_what_slack_refuses_is_refused(web: WebClient, arguments: dict[str, Any], error: str) -> None:
    """`ok: false` in a 200."""
    assert refused(web.chat_postMessage, **{"channel": CHANNEL, **arguments}) == (200, error)


def test_a_channel_takes_one_message_a_second_after_a_short_burst(slack: FakeSlack, web: WebClient) -> None:
    """Then 429 with Retry-After, for that channel only."""
    slack.configure(burst=2.0)
    for _ in range(2):
        web.chat_postMessage(channel=CHANNEL, text="a")
    with pytest.raises(SlackApiError) as error:
        web.chat_postMessage(channel=CHANNEL, text="a")
    assert error.value.response.status_code == 429
    assert error.value.response.headers["Retry-After"] == "1"
    web.chat_postMessage(channel="C0000CHN2", text="a")
    assert [call.error for call in slack.calls("chat.postMessage")] == [None, None, "ratelimited", None]


def test_scripted_faults_strike_once_each_and_a_lost_reply_has_its_effect(slack: FakeSlack, web: WebClient) -> None:
    """Errors, statuses and a connection closed after the message was posted."""
    slack.script("chat.postMessage", {"error": "is_archived"}, {"status": 500}, {"lost": True}, match="marked")
    web.chat_postMessage(channel=CHANNEL, text="another")
    assert refused(web.chat_postMessage, channel=CHANNEL, text="marked") == (200, "is_archived")
    assert refused(web.chat_postMessage, channel=CHANNEL, text="marked")[0] == 500
    with pytest.raises(ConnectionError):
        web.chat_postMessage(channel=CHANNEL, text="marked")
    assert slack.answers(CHANNEL) == ["another", "marked"]


def test_a_stream_needs_its_recipient_grows_and_ends(slack: FakeSlack, web: WebClient) -> None:
    """And takes nothing more once it has ended, or when its time is over."""
    asked = slack.say(f"<@{BOT_USER}> hello")
    here = {"channel": CHANNEL, "thread_ts": asked["ts"]}
    assert refused(web.chat_startStream, **here) == (200, "missing_recipient_team_id")
    ts = web.chat_startStream(**here, recipient_team_id=TEAM, recipient_user_id=USER)["ts"]
    web.chat_appendStream(channel=CHANNEL, ts=ts, markdown_text="one ")
    web.chat_stopStream(channel=CHANNEL, ts=ts, markdown_text="two")
    assert slack.answers(CHANNEL, asked["ts"]) == ["one two"]
    assert (
        refused(web.chat_appendStream, channel=CHANNEL, ts=ts, markdown_text="x")[1] == "message_not_in_streaming_state"
    )
    slack.configure(stream_seconds=0.0)
    ts = web.chat_startStream(**here, recipient_team_id=TEAM, recipient_user_id=USER)["ts"]
    assert (
        refused(web.chat_appendStream, channel=CHANNEL, ts=ts, markdown_text="x")[1] == "message_not_in_streaming_state"
    )


def test_a_status_shows_where_slack_has_it(slack: FakeSlack, web: WebClient) -> None:
    """In direct messages, not in a thread that a person began in a channel."""
    for channel, works in ((DIRECT, True), (CHANNEL, False)):
        asked = slack.say("hello", channel=channel)
        where = {"channel_id": channel, "thread_ts": asked["ts"], "status": "is thinking"}
        if works:
            assert web.assistant_threads_setStatus(**where)["ok"]
        else:
            assert refused(web.assistant_threads_setStatus, **where) == (200, "invalid_thread_ts")


def test_a_wrong_token_is_refused(slack: FakeSlack) -> None:
    """Whatever is asked."""
    assert refused(WebClient(token="xoxb-other", base_url=slack.base_url).auth_test) == (200, "invalid_auth")


def test_its_requests_are_signed_as_slacks(slack: FakeSlack) -> None:
    """The official verifier accepts them."""
    body, headers = slack.signed(slack.envelope(slack.say("hello")))
    assert SignatureVerifier(slack.signing_secret).is_valid_request(body, headers)


def test_a_method_is_called_as_often_as_its_tier_allows(slack: FakeSlack, web: WebClient) -> None:
    """20 a minute for Tier 2; other methods have limits of their own."""
    asked = slack.say("hello")
    there = {"channel": CHANNEL, "timestamp": asked["ts"], "name": "eyes"}
    for _ in range(20):
        web.reactions_add(**there)
        web.reactions_remove(**there)
    web.reactions_add(**there)
    assert refused(web.reactions_remove, **there) == (429, "ratelimited")
    [*_, call] = slack.calls("reactions.remove")
    assert (call.status, call.error) == (429, "ratelimited")
    slack.configure(tiers=False)
    web.reactions_remove(**there)
