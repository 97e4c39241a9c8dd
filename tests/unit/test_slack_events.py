"""Slack's requests: signed ones start each question once, whatever is sent twice, odd or by a bot."""

from __future__ import annotations

import base64
import json
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slack_sdk.signature import Clock, SignatureVerifier

from backburner.errors import PortUnavailable
from backburner.models import SLACK, Client, ClientLimits, Failure, Job, JobStatus, NoticeStatus
from backburner.slack_events import CANNOT, HELP, NO_FILES, SLOW_DOWN, SlackDesk, is_genuine
from backburner.slack_text import RETRY, STOP
from tests.fakes.house import House
from tests.fakes.memory import MemoryMarks
from tests.fakes.slack import BOT_USER, CHANNEL, DIRECT, SIGNING_SECRET, USER, FakeSlack, signed

Json = dict[str, Any]
PEOPLE = Client("slack", "Slack")


@dataclass
class Desk:
    """A Slack desk in a house of fakes, and the workspace that sends to it."""

    house: House = field(default_factory=House)
    slack: FakeSlack = field(default_factory=FakeSlack)
    marks: MemoryMarks = field(default_factory=MemoryMarks)
    secret: str = SIGNING_SECRET
    secrets_to_come: list[str] = field(default_factory=list)
    settings: Json = field(default_factory=dict)
    client: Client = PEOPLE

    def __post_init__(self) -> None:
        self.desk = SlackDesk(
            client=lambda: self.client,
            submission=self.house.submission,
            marks=self.marks,
            signing_secret=lambda: self.secret,
            renewed=self._renew,
            clock=self.house.clock,
            journal=self.house.journal,
            **self.settings,
        )

    def _renew(self, refused: str) -> bool:
        if self.secrets_to_come:
            self.secret = self.secrets_to_come.pop(0)
        return self.secret != refused

    def post(self, path: str, body: str, headers: Json | None = None, *, signed_at: float | None = None) -> Json:
        """A request as API Gateway hands it on, signed by Slack unless headers are given."""
        if headers is None:
            at = self.house.clock.now() / 1000 if signed_at is None else signed_at
            headers = signed(SIGNING_SECRET, body, at)
        return self.desk.handle({"path": f"/slack/{path}", "headers": headers, "body": body}, None)

    def send(self, envelope: Json) -> int:
        """An event; the status of the reply."""
        return int(self.post("events", json.dumps(envelope))["statusCode"])

    def press(self, action_id: str, job_id: str, *, user: str = USER, **more: Any) -> Json:
        """A button of ours is pressed."""
        action = {"action_id": action_id, "value": job_id, "action_ts": self.slack.new_ts()}
        payload = {"type": "block_actions", "user": {"id": user}, "actions": [action], **more}
        return self.post("interactions", urllib.parse.urlencode({"payload": json.dumps(payload)}))

    def command(self, text: str, **more: str) -> Json:
        """`/ask` is used."""
        form = {"command": "/ask", "text": text, "channel_id": CHANNEL, "user_id": USER, "team_id": "T0000HOME",
                "trigger_id": "13345224609.738474920.8088930838d88f008e0",
                "response_url": "https://hooks.slack.com/commands/T/1/x", **more}  # fmt: skip
        reply = self.post("commands", urllib.parse.urlencode(form))
        assert reply["statusCode"] == 200
        return dict(json.loads(reply["body"]))

    @property
    def jobs(self) -> list[Job]:
        """Jobs that call a model."""
        return [job for job in self.house.store.rows.values() if job.result is None]

    @property
    def said(self) -> list[str]:
        """What is to be said without a call."""
        rows = self.house.store.rows.values()
        return [json.loads(job.result.text)["text"] for job in rows if job.result is not None and not job.log]

    def prompts(self) -> list[str]:
        """What was asked."""
        return [json.loads(job.request.text or "")["prompt"] for job in self.jobs]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def mention(text: str = f"<@{BOT_USER}> list three rivers", **more: Any) -> Json:
    """The event of the cases, as it stands there."""
    return {
        "type": "app_mention", "user": USER, "text": text, "ts": "1760000000.000100", "event_ts": "1760000000.000100",
        "channel": CHANNEL, "channel_type": "channel", **more,
    }  # fmt: skip


# ── Signatures ───────────────────────────────────────────────────────────────────────────────────────────────────────

VECTOR = {
    "secret": "test-signing-secret-0001",
    "timestamp": "1760000000",
    "raw_body": '{"type":"url_verification","challenge":"c-0001"}',
    "signature": "v0=975eccb5b1b927f546a1d13a982252e78bd985e7b0cd7d0a20d790c67af47e0f",
}
NOW = 1_760_000_000
SLK_12 = {
    "not ASCII": {"X-Slack-Signature": "v0=\u00ff\u00ff"},
    "empty": {"X-Slack-Signature": ""},
    "no version": {"X-Slack-Signature": VECTOR["signature"].removeprefix("v0=")},
    "no number": {"X-Slack-Request-Timestamp": "abc"},
    "a fraction": {"X-Slack-Request-Timestamp": "1760000000.5"},
    "negative": {"X-Slack-Request-Timestamp": "-1"},
    "huge": {"X-Slack-Request-Timestamp": "9" * 40},
    "other digits": {"X-Slack-Request-Timestamp": "١٧٦٠٠٠٠٠٠٠"},
    "spaces": {"X-Slack-Request-Timestamp": " 1760000000 "},
    "from the future": signed(VECTOR["secret"], VECTOR["raw_body"], NOW + 3600),
    "from the past": signed(VECTOR["secret"], VECTOR["raw_body"], NOW - 301),
    "absent": {"X-Slack-Signature": None, "X-Slack-Request-Timestamp": None},
    "a surrogate": {"X-Slack-Signature": "v0=\ud800"},
}


@pytest.fixture
def verifying() -> Desk:
    """The desk of the vector: its secret, and the clock at its timestamp."""
    desk = Desk(secret=VECTOR["secret"])
    desk.house.clock.time = NOW * 1000
    return desk


def vector_headers() -> Json:
    return {"X-Slack-Request-Timestamp": VECTOR["timestamp"], "X-Slack-Signature": VECTOR["signature"]}


@pytest.mark.parametrize("rename", [str, str.lower, str.upper])
@pytest.mark.parametrize("encode", [False, True])
def test_slk_12_the_untouched_vector_verifies(verifying: Desk, rename: Callable[[str], str], encode: bool) -> None:
    """Whatever the case of the headers, and also where the gateway sends the body as base64."""
    body = VECTOR["raw_body"]
    event = {
        "path": "/slack/events",
        "headers": {rename(name): value for name, value in vector_headers().items()},
        "body": base64.b64encode(body.encode()).decode() if encode else body,
        "isBase64Encoded": encode,
    }
    reply = verifying.desk.handle(event, None)
    assert (reply["statusCode"], json.loads(reply["body"])) == (200, {"challenge": "c-0001"})


@pytest.mark.parametrize("change", SLK_12.values(), ids=SLK_12)
def test_slk_12_junk_in_the_headers_is_a_401_and_leaves_nothing(verifying: Desk, change: Json) -> None:
    """Never a 5xx that any stranger could cause."""
    headers = {name: value for name, value in {**vector_headers(), **change}.items() if value is not None}
    reply = verifying.post("events", VECTOR["raw_body"], headers)
    assert reply["statusCode"] == 401
    assert json.loads(reply["body"])["code"] == "bad_signature"
    assert verifying.house.store.rows == {}
    assert verifying.marks.items == {}


@pytest.mark.parametrize(
    ("body", "encoded"),
    [(base64.b64encode(b"\xff\xfe{}").decode(), True), ("not base64!", True), ("é", True), ("", False), (None, False)],
)
def test_slk_12_a_body_that_is_no_text_is_a_401(verifying: Desk, body: str | None, encoded: bool) -> None:
    """With any signature."""
    event = {"path": "/slack/events", "headers": vector_headers(), "body": body, "isBase64Encoded": encoded}
    assert verifying.desk.handle(event, None)["statusCode"] == 401


def test_no_headers_at_all_is_a_401(desk: Desk) -> None:
    """A gateway may leave them null."""
    assert desk.desk.handle({"path": "/slack/events", "headers": None, "body": "{}"}, None)["statusCode"] == 401


@pytest.mark.parametrize("secret", [None, "another"], ids=["unsigned", "signed by another"])
def test_slk_12_buttons_and_commands_need_a_signature_too(desk: Desk, secret: str | None) -> None:
    """401, and nothing is stopped or asked; the same requests signed do both."""
    desk.send(desk.slack.envelope(mention()))
    (job,) = desk.jobs
    payload = {"type": "block_actions", "user": {"id": USER}, "actions": [{"action_id": STOP, "value": job.job_id}]}
    command = {"command": "/ask", "text": "hi", "channel_id": CHANNEL, "user_id": USER, "trigger_id": "1"}
    forms = {"interactions": {"payload": json.dumps(payload)}, "commands": command}
    requests = [(path, urllib.parse.urlencode(form)) for path, form in forms.items()]
    for path, body in requests:
        headers = {} if secret is None else signed(secret, body, desk.house.clock.now() / 1000)
        reply = desk.post(path, body, headers)
        assert (reply["statusCode"], json.loads(reply["body"])["code"]) == (401, "bad_signature")
    assert [row.status for row in desk.jobs] == [JobStatus.QUEUED]
    assert [desk.post(path, body)["statusCode"] for path, body in requests] == [200, 200]
    assert [row.status for row in desk.jobs] == [JobStatus.CANCELLED, JobStatus.QUEUED]


class _At(Clock):
    def __init__(self, at: float) -> None:
        self._at = at

    def now(self) -> float:
        return self._at


@given(st.text(max_size=30), st.integers(0, 2_000_000_000), st.integers(-400, 400), st.booleans())
def test_signatures_are_slacks_own(body: str, at: int, skew: int, right: bool) -> None:
    """We and the official verifier agree, on both sides of the window."""
    headers = {name.lower(): value for name, value in signed("secret" if right else "other", body, at).items()}
    official = SignatureVerifier("secret", _At(at + skew)).is_valid_request(body, headers)
    assert is_genuine("secret", headers, body.encode(), at + skew) == official


def test_a_secret_that_was_changed_is_read_again(desk: Desk) -> None:
    """Once, when a signature does not fit."""
    desk.secret, desk.secrets_to_come = "old", [SIGNING_SECRET]
    assert desk.send(desk.slack.envelope(mention())) == 200
    assert len(desk.jobs) == 1


def test_without_a_signing_secret_nothing_is_taken(desk: Desk) -> None:
    """And the reply says what is missing. An empty secret signs nothing, though anybody could sign with it."""
    desk.secret = ""
    reply = desk.post("events", "{}", signed("", "{}", desk.house.clock.now() / 1000))
    assert (reply["statusCode"], json.loads(reply["body"])["code"]) == (404, "slack_not_configured")
    assert "slack_signing_secret" in json.loads(reply["body"])["detail"]


@pytest.mark.parametrize("body", ["", "[]", "{", "null", '"x"', "[" * 10_000, '{"type":"event_callback"}x'])
def test_signed_junk_is_refused_or_passed_over(desk: Desk, body: str) -> None:
    """Without an error of ours."""
    assert desk.post("events", body)["statusCode"] in (200, 400)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
            ["type", "event", "user", "text", "ts", "channel", "subtype", "authorizations", "files", "thread_ts",
             "user_id", "is_bot", "channel_type", "bot_id", "name"]), inner, max_size=6),
        max_leaves=20,
    ),
    st.sampled_from(["type", "event", "authorizations"]),
)  # fmt: skip
def test_fields_of_any_type_do_no_harm(value: Any, name: str) -> None:
    """A signed event whose fields are not what they should be is answered 200."""
    desk = Desk()
    envelope = desk.slack.envelope(mention())
    if name == "event" and isinstance(value, dict):
        envelope["event"] |= value
    else:
        envelope[name] = value
    assert desk.send(envelope) == 200


def test_that_slack_holds_back_events_is_noted(desk: Desk) -> None:
    """Slack sends no more than 30,000 events an hour, and says so; that starts nothing."""
    told = {"type": "app_rate_limited", "token": "unused", "team_id": "T0000HOME", "minute_rate_limited": 1_760_000_000,
            "api_app_id": "A0000APP1"}  # fmt: skip
    reply = desk.post("events", json.dumps(told))
    assert (reply["statusCode"], json.loads(reply["body"])) == (200, {})
    assert [event["minute"] for event in desk.house.journal.named("slack_events_dropped")] == [1_760_000_000]
    assert desk.house.store.rows == {}
    assert desk.house.hints.sent == desk.house.notices.sent == []
    assert desk.marks.items == {}


def test_odd_interactions_and_commands_are_refused_or_passed_over(desk: Desk) -> None:
    """400 or 200."""
    for body in ("", "payload=", "payload=[]", "payload={}", 'payload={"actions":[]}', 'payload={"actions":[1]}',
                 'payload={"actions":{},"user":1,"container":[]}', "payload=" + "%5B" * 9_000):  # fmt: skip
        assert desk.post("interactions", body)["statusCode"] in (200, 400)
    for body in ("", "text=a", "channel_id=x&user_id=y&trigger_id=1&text=a", "&".join(["a=1"] * 200), "%ff%fe=%zz"):
        assert desk.post("commands", body)["statusCode"] == 400
    assert desk.post("commands", "ssl_check=1")["statusCode"] == 200
    assert desk.house.store.rows == {}


# ── Messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_question_becomes_a_job_with_all_that_its_answer_needs() -> None:
    """The prompt without the mention, the deployment's words for Slack, and the thread to answer in."""
    desk = Desk(settings={"system_prompt": "Be brief.", "model": "m-1"})
    assert desk.send(desk.slack.envelope(mention())) == 200
    (job,) = desk.jobs
    asked = json.loads(job.request.text or "")
    assert asked["prompt"] == "list three rivers"
    assert (asked["system_prompt"], asked["model"], asked["user_id"]) == ("Be brief.", "m-1", USER)
    assert (job.client_id, job.targets) == ("slack", (SLACK,))
    assert job.slack is not None
    assert (job.slack.channel, job.slack.thread_ts, job.slack.message_ts) == (CHANNEL, *["1760000000.000100"] * 2)
    assert (job.slack.user, job.slack.team, job.slack.surface) == (USER, "T0000HOME", "channel")
    assert len(desk.house.hints.sent) == 1


def test_slk_01_resends_are_answered_at_once_and_start_nothing(desk: Desk) -> None:
    """Three copies, one job, while the first one's call is still open."""
    envelope = desk.slack.envelope(mention())
    assert desk.send(envelope) == 200
    (job,) = desk.jobs
    desk.house.lifecycle.claim(job.job_id, "worker")
    for seconds in (3.2, 60):
        desk.house.clock.advance(seconds)
        assert desk.send(envelope) == 200
    assert len(desk.house.store.rows) == 1
    assert len(desk.house.hints.sent) == 1


def test_slk_02_a_resend_whose_first_copy_never_got_in_is_processed(desk: Desk) -> None:
    """The headers that mark a resend say nothing about what we have."""
    body = json.dumps(desk.slack.envelope(mention()))
    at = desk.house.clock.now() / 1000
    for number in ("1", "2"):
        headers = signed(SIGNING_SECRET, body, at)
        headers |= {"X-Slack-Retry-Num": number, "X-Slack-Retry-Reason": "http_error"}
        assert desk.post("events", body, headers)["statusCode"] == 200
        assert len(desk.jobs) == 1


EDITED = {"edited": {"user": USER, "ts": "1760000030.000000"}}


@pytest.mark.parametrize("asked_before", [True, False])
@pytest.mark.parametrize("retry", [{}, {"X-Slack-Retry-Num": "1", "X-Slack-Retry-Reason": "http_timeout"}])
@pytest.mark.parametrize(
    "event",
    [
        mention("<@U0000BOT1> list four rivers", **EDITED),
        mention("<@U0000BOT1> list four rivers", type="message", **EDITED),
        mention("list four rivers", type="message", channel=DIRECT, channel_type="im", **EDITED),
        mention("and a lake", type="message", ts="1760000020.000100", thread_ts="1760000000.000100", **EDITED),
    ],
    ids=["mention", "message", "direct", "reply"],
)
def test_an_edit_starts_nothing(desk: Desk, event: Json, retry: Json, asked_before: bool) -> None:
    """Whether it was a question before or not, resent or not; what was first sent still asks when it is resent."""
    if asked_before:
        desk.send(desk.slack.envelope(mention()))
    body = json.dumps(desk.slack.envelope(event))
    headers = signed(SIGNING_SECRET, body, desk.house.clock.now() / 1000)
    assert desk.post("events", body, headers | retry)["statusCode"] == 200
    assert desk.prompts() == ["list three rivers"] * asked_before
    desk.send(desk.slack.envelope(mention()))
    assert desk.prompts() == ["list three rivers"]


@pytest.mark.parametrize("order", list(permutations(range(2))))
@pytest.mark.parametrize("thread_ts", [None, "1759999999.000100"])
def test_slk_04_mention_and_message_are_one_question(desk: Desk, order: tuple[int, ...], thread_ts: str | None) -> None:
    """In either order, also in a thread; and a plain direct message is one, too."""
    more = {"client_msg_id": "11111111-aaaa-4bbb-8ccc-000000000001"} | ({"thread_ts": thread_ts} if thread_ts else {})
    copies = [mention(**more), mention(type="message", **more)]
    for index in order:
        assert desk.send(desk.slack.envelope(copies[index])) == 200
    assert desk.prompts() == ["list three rivers"]
    assert desk.jobs[0].slack is not None
    assert desk.jobs[0].slack.thread_ts == (thread_ts or copies[0]["ts"])
    desk.send(desk.slack.envelope(desk.slack.say("list three rivers", channel=DIRECT)))
    assert desk.prompts() == ["list three rivers"] * 2


def test_copies_for_other_workspaces_and_under_new_settings_are_one_question(desk: Desk) -> None:
    """Slack Connect sends a shared channel's message once for each workspace."""
    desk.send(desk.slack.envelope(mention()))
    desk.send(desk.slack.envelope(mention(), team_id="T0000AWAY"))
    other = Desk(house=desk.house, settings={"system_prompt": "Now be brief."})
    assert other.send(other.slack.envelope(mention())) == 200
    assert len(desk.house.store.rows) == 1


NESTED = {
    "type": "message",
    "bot_id": "B0000BOT1",
    "text": "See <https://docs.example.test/a>",
    "ts": "1760000045.000100",
}
SLK_07 = [
    {"type": "message", "subtype": "message_changed", "hidden": True, "channel": DIRECT, "channel_type": "im",
     "ts": "1760000050.000200", "event_ts": "1760000050.000200", "message": NESTED, "previous_message": NESTED},
    {"type": "message", "subtype": "message_changed", "channel": DIRECT, "channel_type": "im", "user": USER,
     "ts": "1760000050.000200", "message": {**NESTED, "user": USER, "bot_id": None}, "text": "edited"},
    {"type": "message", "subtype": "message_deleted", "hidden": True, "channel": DIRECT, "channel_type": "im",
     "ts": "1760000051.000200", "event_ts": "1760000051.000200", "deleted_ts": "1760000045.000100"},
    {"type": "message", "subtype": "channel_topic", "user": USER, "text": f"<@{USER}> set the channel topic",
     "channel": CHANNEL, "ts": "1760000052.000300"},
    *[{"type": "message", "subtype": subtype, "user": USER, "text": f"<@{BOT_USER}> x", "channel": DIRECT,
       "channel_type": "im", "ts": "1760000052.000400"}
      for subtype in ("channel_join", "message_replied", "reminder_add", "assistant_app_thread", "unheard_of")],
    {"type": "reaction_added", "user": USER, "item": {"channel": CHANNEL, "ts": "1760000052.000300"}},
]  # fmt: skip


@pytest.mark.parametrize("event", SLK_07, ids=lambda event: event.get("subtype") or event["type"])
def test_slk_07_what_is_no_message_of_a_person_starts_nothing(desk: Desk, event: Json) -> None:
    """Edits, unfurled links, deletions, topics, joins: 200 and no job."""
    assert desk.send(desk.slack.envelope(event)) == 200
    assert desk.house.store.rows == {}


SLK_08 = [
    {"type": "message", "subtype": "bot_message", "bot_id": "B0000BOT1", "text": "done", "channel": DIRECT,
     "channel_type": "im", "ts": "1760000060.000100", "event_ts": "1760000060.000100"},
    {"type": "message", "user": BOT_USER, "bot_id": "B0000BOT1", "app_id": "A0000APP1", "text": "done",
     "channel": DIRECT, "channel_type": "im", "ts": "1760000061.000100", "event_ts": "1760000061.000100"},
    {"type": "message", "user": BOT_USER, "text": "done (no bot_id at all)", "channel": DIRECT, "channel_type": "im",
     "ts": "1760000062.000100", "event_ts": "1760000062.000100"},
    {"type": "app_mention", "user": "U0000OTHR", "text": f"<@{BOT_USER}> ping", "ts": "1760000063.000100",
     "channel": CHANNEL, "channel_type": "channel", "bot_id": "B0000OTHR", "app_id": "A0000OTHR"},
    {"type": "message", "user": "U0000NEW1", "app_id": "A0000APP1", "text": "done", "channel": DIRECT,
     "channel_type": "im", "ts": "1760000064.000100"},
    {"type": "message", "user": "USLACKBOT", "text": "reminder", "channel": DIRECT, "channel_type": "im",
     "ts": "1760000065.000100"},
]  # fmt: skip


def test_slk_08_no_bot_starts_anything_not_even_ourselves(desk: Desk) -> None:
    """A burst of 100 such events is no job at all."""
    for number in range(100):
        event = SLK_08[number % len(SLK_08)]
        assert desk.send(desk.slack.envelope({**event, "ts": f"17600001{number:02}.000100"})) == 200
    assert desk.house.store.rows == {}


SLK_10 = ["<@U0000BOT1>", "  <@U0000BOT1>   ", "<@U0000BOT1>\u00a0\u200b", "<@U0000BOT1|helper>", ""]


@pytest.mark.parametrize("text", SLK_10)
@pytest.mark.parametrize(("more", "reply"), [({}, HELP), ({"files": [{"name": "a.pdf"}]}, NO_FILES)])
def test_slk_10_an_empty_question_gets_a_short_reply_and_no_call(desk: Desk, text: str, more: Json, reply: str) -> None:
    """Once, told like an answer, and without a hint to any worker."""
    envelope = desk.slack.envelope(mention(text, subtype="file_share" if more else "", **more))
    for _ in range(2):
        assert desk.send(envelope) == 200
    assert desk.said == [reply]
    assert desk.jobs == []
    assert desk.house.hints.sent == []
    assert [telling.target for _, telling in desk.house.notices.sent] == [SLACK]
    desk.house.tell()
    (job,) = desk.house.store.rows.values()
    assert job.outbox[0].status is NoticeStatus.DELIVERED
    assert job.due_at is None


def test_a_question_with_files_says_that_they_go_unread(desk: Desk) -> None:
    """The model is told their names, so that it can say so."""
    files = [{"name": "plan.pdf"}, {"title": "sketch"}, {}, 7]
    desk.send(desk.slack.envelope(mention(files=files, subtype="file_share")))
    (prompt,) = desk.prompts()
    assert prompt.startswith("list three rivers\n\n[Files were attached that you cannot read: plan.pdf, sketch, a file")


@pytest.mark.parametrize("subtype", ["thread_broadcast", "me_message", "file_share"])
def test_peoples_messages_of_all_kinds_are_questions(desk: Desk, subtype: str) -> None:
    """A reply that is also sent to the channel, for one."""
    desk.send(desk.slack.envelope(mention(type="message", subtype=subtype)))
    assert desk.prompts() == ["list three rivers"]


def test_half_a_character_is_no_reason_to_fail(desk: Desk) -> None:
    """A lone surrogate, which JSON allows and nothing can store."""
    body = json.dumps(desk.slack.envelope(mention("<@U0000BOT1> hi \ud83d")))
    assert desk.post("events", body)["statusCode"] == 200
    assert desk.prompts() == ["hi \ufffd"]


# ── Threads ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def reply(thread_ts: str, text: str = "and three lakes", **more: Any) -> Json:
    """A message in a thread that mentions nobody."""
    return mention(text, type="message", ts="1760000500.000100", thread_ts=thread_ts, **more)


def test_a_reply_in_our_thread_needs_no_mention(desk: Desk) -> None:
    """Where the thread began with a mention, or where one came later."""
    root = "1760000000.000100"
    desk.send(desk.slack.envelope(reply(root)))
    desk.send(desk.slack.envelope(reply("1750000000.000100")))
    assert desk.jobs == []
    desk.send(desk.slack.envelope(mention()))
    desk.send(desk.slack.envelope(reply(root)))
    assert desk.prompts() == ["list three rivers", "and three lakes"]
    desk.send(
        desk.slack.envelope(mention("<@U0000BOT1> join us", ts="1760000300.000100", thread_ts="1750000000.000100"))
    )
    later = reply("1750000000.000100", "and what about lakes", client_msg_id="1") | {"ts": "1760000600.000100"}
    desk.send(desk.slack.envelope(later))
    assert desk.prompts()[2:] == ["join us", "and what about lakes"]
    assert {job.slack.thread_ts for job in desk.jobs if job.slack} == {root, "1750000000.000100"}


@pytest.mark.parametrize(
    "event",
    [
        mention("nothing for you", type="message"),
        reply("1760000000.000100", "<@U0000USR2> what do you think?"),
        reply("1760000000.000100") | {"thread_ts": "1760000500.000100"},
    ],
    ids=["in the channel", "to somebody else in our thread", "a root of its own"],
)
def test_what_people_say_to_each_other_starts_nothing(desk: Desk, event: Json) -> None:
    """Only what is said to us does."""
    desk.send(desk.slack.envelope(mention()))
    assert desk.send(desk.slack.envelope({**event, "ts": "1760000500.000100"})) == 200
    assert len(desk.house.store.rows) == 1


# ── Durability ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_slk_13_an_event_whose_hint_could_not_be_sent_is_not_acknowledged(desk: Desk) -> None:
    """5xx, and the resend makes the one job good."""
    send, envelope = desk.house.hints.send, desk.slack.envelope(mention())

    def down(*_: Any, **__: Any) -> None:
        raise PortUnavailable

    desk.house.hints.send = down
    assert desk.send(envelope) == 503
    desk.house.hints.send = send
    desk.house.clock.advance(1)
    assert desk.send(envelope) == 200
    assert len(desk.jobs) == len(desk.house.hints.sent) == 1


def test_slk_13_an_event_lost_between_row_and_hint_is_found(desk: Desk) -> None:
    """The process died there: the row is due after a minute, resend or not."""
    envelope = desk.slack.envelope(mention())
    send = desk.house.hints.send
    desk.house.hints.send = lambda *_, **__: (_ for _ in ()).throw(SystemExit)
    with pytest.raises(SystemExit):
        desk.send(envelope)
    desk.house.hints.send = send
    assert desk.send(envelope) == 200
    desk.house.clock.advance(61)
    desk.house.repair.run_once()
    assert len(desk.jobs) == len(desk.house.hints.sent) == 1


@pytest.mark.parametrize("text", ["<@U0000BOT1>", "<@U0000BOT1> hi"])
def test_nothing_is_acknowledged_that_could_not_be_stored(desk: Desk, text: str) -> None:
    """Neither a question nor a reply of ours."""

    def down(*_: Any, **__: Any) -> None:
        raise PortUnavailable

    add, desk.house.store.add = desk.house.store.add, down
    assert desk.send(desk.slack.envelope(mention(text))) == 503
    desk.house.store.add = add
    assert desk.send(desk.slack.envelope(mention(text))) == 200
    assert len(desk.house.store.rows) == 1


def test_a_reply_whose_message_could_not_be_sent_is_told_by_the_repairer(desk: Desk) -> None:
    """It is due like any other job's."""
    send = desk.house.notices.send

    def down(*_: Any, **__: Any) -> None:
        raise PortUnavailable

    desk.house.notices.send = down
    assert desk.send(desk.slack.envelope(mention("<@U0000BOT1>"))) == 503
    desk.house.notices.send = send
    desk.house.clock.advance(61)
    desk.house.repair.run_once()
    assert len(desk.house.notices.sent) == 1


def test_an_error_of_ours_says_nothing_of_itself(desk: Desk) -> None:
    """A 500 whose text is ours."""
    desk.house.store.add = lambda *_: 1 / 0
    reply = desk.post("events", json.dumps(desk.slack.envelope(mention())))
    assert (reply["statusCode"], json.loads(reply["body"])["code"]) == (500, "internal_error")


# ── Limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_person_may_ask_so_often_a_minute_and_is_told_once() -> None:
    """Others are not affected, and a resend of what was taken is no further request."""
    desk = Desk(settings={"user_requests_per_minute": 2})
    events = [mention(ts=f"17600000{second:02}.000100") for second in range(5)]
    for event in events + events:
        assert desk.send(desk.slack.envelope(event)) == 200
    assert len(desk.jobs) == 2
    assert desk.said == [SLOW_DOWN]
    desk.send(desk.slack.envelope(mention(ts="1760000006.000100", user="U0000USR2")))
    desk.send(desk.slack.envelope(mention(ts="1760000061.000100")))
    assert len(desk.jobs) == 4


def test_all_people_together_have_the_limits_of_one_client() -> None:
    """Whoever comes too late is told so, in the thread, and no call is made."""
    desk = Desk(client=replace(PEOPLE, limits=ClientLimits(requests_per_minute=2)))
    for number in range(4):
        event = mention(ts=f"17600000{number:02}.000100", user=f"U0000USR{number}")
        assert desk.send(desk.slack.envelope(event)) == 200
    assert len(desk.jobs) == 2
    assert desk.said == [CANNOT] * 2
    assert desk.command("one more", trigger_id="1", user_id="U0000USR9")["text"] == CANNOT


# ── Buttons ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def failed(desk: Desk) -> Job:
    """A question whose call failed for good."""
    desk.send(desk.slack.envelope(mention()))
    job = desk.jobs[-1]
    row = replace(
        desk.house.job(job.job_id),
        status=JobStatus.FAILED,
        error=Failure("overloaded", "no", True),
        finished_at=1,
        due_at=None,
    )
    desk.house.store.rows[job.job_id] = row
    return row


def test_the_retry_button_asks_again_once_however_often_it_is_pressed(desk: Desk) -> None:
    """A new job with the same question, in the same thread; the failed one stays as it is."""
    job = failed(desk)
    for _ in range(3):
        reply = desk.press(RETRY, job.job_id, container={"message_ts": "1760000700.000100"})
        assert reply["statusCode"] == 200
    assert len(desk.jobs) == 2
    again = next(row for row in desk.jobs if row.status is JobStatus.QUEUED)
    assert again.request.text == job.request.text
    assert again.slack is not None
    assert job.slack is not None
    assert (again.slack.thread_ts, again.slack.failed_ts) == (job.slack.thread_ts, "1760000700.000100")
    assert desk.house.job(job.job_id).status is JobStatus.FAILED


@pytest.mark.parametrize("given", ["https://hooks.slack.com/actions/T/2/y", ""])
def test_a_command_that_is_tried_again_is_answered_where_its_button_was(desk: Desk, given: str) -> None:
    """The command's own response_url may have lapsed. What was asked in a thread is answered there alone."""
    desk.command("list three rivers")
    (command,) = desk.jobs
    assert command.slack is not None
    for job in (command, failed(desk)):
        error = Failure("overloaded", "no", True)
        row = replace(job, status=JobStatus.FAILED, error=error, finished_at=1, due_at=None)
        desk.house.store.rows[job.job_id] = row
        desk.press(RETRY, job.job_id, response_url=given)
    again = [job.slack and job.slack.response_url for job in desk.jobs if job.status is JobStatus.QUEUED]
    assert again == [given or command.slack.response_url, None]


def test_the_retry_button_of_what_has_not_failed_does_nothing(desk: Desk) -> None:
    """Neither of an open job, nor of none, nor of another client's."""
    desk.send(desk.slack.envelope(mention()))
    others = desk.house.accept("key")
    for job_id in (desk.jobs[0].job_id, "job_unknown", others.job_id):
        assert desk.press(RETRY, job_id)["statusCode"] == 200
    assert len(desk.house.store.rows) == 2


def test_the_stop_button_cancels_while_there_is_something_to_stop(desk: Desk) -> None:
    """And only our own client's jobs."""
    desk.send(desk.slack.envelope(mention()))
    others = desk.house.accept("key")
    job = next(row for row in desk.jobs if row.client_id == PEOPLE.client_id)
    for job_id in (job.job_id, job.job_id, others.job_id, ""):
        assert desk.press(STOP, job_id, response_url="https://elsewhere.example.test/")["statusCode"] == 200
    assert desk.house.job(job.job_id).status is JobStatus.CANCELLED
    assert desk.house.job(others.job_id).status is JobStatus.QUEUED


def test_a_pressed_buttons_message_is_replaced() -> None:
    """By its response_url, if that is Slack's."""
    with FakeSlack() as slack:
        desk = Desk(slack=slack, settings={"api_base_url": slack.base_url})
        desk.send(slack.envelope(mention()))
        desk.press(STOP, desk.jobs[0].job_id, response_url=slack.response_url())
        assert [call.arguments["text"] for call in slack.calls("response_url")] == ["Stopped."]


# ── Commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_command_is_a_question_without_a_thread(desk: Desk) -> None:
    """It is answered at once with a word, and the job knows where to answer."""
    assert desk.command("list &lt;three&gt; <#C0000CHN9|rivers>")["response_type"] == "ephemeral"
    (job,) = desk.jobs
    assert desk.prompts() == ["list <three> #rivers"]
    assert job.slack is not None
    assert (job.slack.surface, job.slack.thread_ts, job.slack.channel) == ("command", None, CHANNEL)
    assert job.slack.response_url == "https://hooks.slack.com/commands/T/1/x"


def test_a_command_that_cannot_be_taken_is_told_so_at_once(desk: Desk) -> None:
    """Slack does not send it again."""
    assert "/ask" in desk.command("  ")["text"]

    def down(*_: Any, **__: Any) -> None:
        raise PortUnavailable

    desk.house.store.add = down
    assert desk.command("hi")["text"].startswith("I cannot take")
    assert desk.house.store.rows == {}


def test_a_command_counts_as_a_request_of_its_user() -> None:
    """The limit is one for all ways of asking."""
    desk = Desk(settings={"user_requests_per_minute": 1})
    desk.command("one", trigger_id="1")
    desk.house.clock.advance(0.001)
    assert desk.command("two", trigger_id="2")["text"] == SLOW_DOWN
    assert len(desk.jobs) == 1


def test_no_text_of_a_message_reaches_the_journal(desk: Desk) -> None:
    """Only ids and codes do."""
    desk.send(desk.slack.envelope(mention("<@U0000BOT1> a secret thing")))
    desk.command("a secret thing")
    assert "secret thing" not in str(desk.house.journal.events)
    assert "hooks.slack.com" not in str(desk.house.journal.events)
