"""Telling in Slack, through the official SDK: once and whole, whatever Slack answers; and what Slack cannot be told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from backburner.channels.slack import CUT_OFF, GONE, OTHERWISE, REST, SENTENCES, STOPPED, SlackChannel
from backburner.channels.slack_api import SlackApi
from backburner.errors import Untold
from backburner.models import Answer, Failure, Job, JobStatus, Notice, NoticeStatus, SlackOrigin, Usage
from backburner.slack_text import RETRY
from tests.fakes.house import House
from tests.fakes.memory import ScriptedProvider
from tests.fakes.slack import BOT_USER, CHANNEL, DIRECT, TEAM, USER, FakeSlack

ROOT = "1760000123.000700"


@pytest.fixture
def slack() -> Iterator[FakeSlack]:
    with FakeSlack() as server:
        server.configure(messages_per_second=10_000.0)
        yield server


@dataclass
class Told:
    """A house whose answers go to the fake Slack, by the real SDK."""

    slack: FakeSlack
    house: House = field(default_factory=House)
    token: str = ""
    tokens_to_come: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token = self.token or self.slack.token
        self.house.clock.time = time.time_ns() // 1_000_000  # whatever time it is in Slack
        self.api = SlackApi(lambda: self.token, self._renew, base_url=self.slack.base_url, timeout_seconds=5)
        self.channel = SlackChannel(
            self.api,
            payloads=self.house.payloads,
            line=self.house.limits,
            clock=self.house.clock,
            journal=self.house.journal,
            api_base_url=self.slack.base_url,
        )
        self.house.channel = self.channel

    def _renew(self, refused: str) -> bool:
        if self.tokens_to_come:
            self.token = self.tokens_to_come.pop(0)
        return self.token != refused

    def ask(
        self, text: str = "an answer", *, finish: str = "stop", question: str = "Name a river.", **where: Any
    ) -> Job:
        """A question asked in the thread of a message, answered so; its row."""
        asked = self.slack.say(f"<@{BOT_USER}> hello")
        usual = {"channel": CHANNEL, "user": USER, "team": TEAM, "surface": "channel", "thread_ts": asked["ts"],
                 "message_ts": asked["ts"]}  # fmt: skip
        origin = SlackOrigin(**{**usual, **where})
        self.house.provider = self.provider = ScriptedProvider()
        answer = Answer(text, finish, "m-1", "fake", Usage(1, 1))
        self.provider.ask = lambda _question, **_: answer  # type: ignore[method-assign]
        self.house.execution = replace(self.house.execution, providers=lambda _: self.provider)
        job = self.house.accept(asked["ts"], slack=origin, prompt=question)
        self.house.work()
        return self.house.job(job.job_id)

    def ended(self, status: JobStatus, code: str | None = None, **where: Any) -> Job:
        """A question that ended otherwise."""
        job = self.ask(**where)
        error = Failure(code, "secret detail of the provider", True) if code else None
        row = replace(job, status=status, result=None, error=error)
        self.house.store.rows[job.job_id] = row
        return row

    def deliver(self, job: Job, seconds: float = 4_000.0) -> Notice:
        """Let the notifier work for so long; how far it is."""
        end = self.house.clock.now() + round(1000 * seconds)
        while self.house.clock.now() < end:
            self.house.tell()
            if not self.house.job(job.job_id).pending:
                break
            self.house.clock.advance(1)
        (notice,) = self.house.job(job.job_id).outbox
        return notice

    def answers(self, job: Job) -> list[str]:
        """What people see in the job's thread."""
        assert job.slack is not None
        return self.slack.answers(job.slack.channel, job.slack.thread_ts)


@pytest.fixture
def told(slack: FakeSlack) -> Told:
    return Told(slack)


# ── The answer ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_is_a_markdown_message_in_the_thread(told: Told) -> None:
    """With a plain text for notifications, no unfurled links, and metadata that says whose it is."""
    job = told.ask("**Rhine**, Elbe & Oder")
    assert told.deliver(job).status is NoticeStatus.DELIVERED
    assert told.answers(job) == ["**Rhine**, Elbe & Oder"]
    (call,) = told.slack.calls("chat.postMessage")
    assert call.arguments["blocks"] == [{"type": "markdown", "text": "**Rhine**, Elbe & Oder"}]
    assert call.arguments["text"] == "**Rhine**, Elbe & Oder"
    assert call.arguments["unfurl_links"] is False
    assert call.arguments["metadata"]["event_payload"] == {
        "job_id": job.job_id, "run": 1, "part": 0, "kind": "answer",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("thread_ts", "message_ts", "expected"),
    [("1760000123.000700", "1760000123.000700", "1760000123.000700"),
     ("1760000100.000200", "1760000123.000700", "1760000100.000200")],
)  # fmt: skip
def test_slk_18_an_answer_is_posted_at_the_root_of_its_thread(
    told: Told, thread_ts: str, message_ts: str, expected: str
) -> None:
    """The timestamp stays a text, trailing zeros and all."""
    told.deliver(told.ask(thread_ts=thread_ts, message_ts=message_ts))
    (call,) = told.slack.calls("chat.postMessage")
    assert call.arguments["thread_ts"] == expected


SLK_18: dict[str, tuple[list[dict[str, Any]], float]] = {
    "429 with Retry-After": ([{"status": 429, "headers": {"Retry-After": "2"}}], 2.0),
    "429 without": ([{"status": 429}], 1.0),
    "429 with junk": ([{"status": 429, "headers": {"Retry-After": "soon"}}], 1.0),
    "ratelimited in a 200": ([{"error": "ratelimited"}], 1.0),
    "500": ([{"status": 500}], 1.0),
    "a page instead of JSON": ([{"status": 502, "body": {}}], 1.0),
    "internal_error in a 200": ([{"error": "internal_error"}], 1.0),
    "several": ([{"status": 429, "headers": {"Retry-After": "30"}}, {"status": 500}, {"error": "fatal_error"}], 31.0),
}


@pytest.mark.parametrize(("steps", "seconds"), SLK_18.values(), ids=SLK_18)
def test_slk_18_what_passes_is_tried_again_after_its_wait_and_posted_once(
    told: Told, steps: list[dict[str, Any]], seconds: float
) -> None:
    """The model is not asked again."""
    job = told.ask()
    began = told.house.clock.now()
    told.slack.script("chat.postMessage", *steps)
    notice = told.deliver(job)
    assert notice.status is NoticeStatus.DELIVERED
    assert told.answers(job) == ["an answer"]
    assert notice.told_at is not None
    assert (notice.told_at - began) / 1000 >= seconds
    assert told.house.job(job.job_id).attempts == 1


PERMANENT = ("is_archived", "channel_not_found", "not_in_channel", "token_revoked", "account_inactive", "invalid_auth",
             "missing_scope", "restricted_action", "an_error_of_tomorrow")  # fmt: skip


@pytest.mark.parametrize("error", PERMANENT)
def test_slk_18_what_is_final_ends_the_delivery_after_one_try(told: Told, error: str) -> None:
    """With Slack's own word for it; the result stays, and the model is not asked again."""
    job = told.ask()
    told.slack.script("chat.postMessage", *[{"error": error}] * 5)
    notice = told.deliver(job)
    assert (notice.status, notice.last_error, notice.tries) == (NoticeStatus.GIVEN_UP, error, 1)
    assert len(told.slack.calls("chat.postMessage")) == 1
    row = told.house.job(job.job_id)
    assert (row.status, row.attempts, row.due_at) == (JobStatus.COMPLETED, 1, None)
    assert row.result is not None


def test_a_reply_that_was_lost_makes_no_second_message(told: Told) -> None:
    """Slack has taken the message; the next try finds it in the thread."""
    job = told.ask()
    told.slack.script("chat.postMessage", {"lost": True})
    assert told.deliver(job).tries == 2
    assert told.answers(job) == ["an answer"]
    assert len(told.slack.calls("chat.postMessage")) == 1


def test_nothing_is_posted_while_it_is_not_known_what_was(told: Told) -> None:
    """A thread that cannot be read just now is read in another try."""
    job = told.ask()
    told.slack.script("chat.postMessage", {"lost": True})
    told.slack.script("conversations.replies", {"status": 500}, {"status": 429})
    assert told.deliver(job).status is NoticeStatus.DELIVERED
    assert told.answers(job) == ["an answer"]


def test_where_the_app_may_not_read_it_posts_again(told: Told) -> None:
    """Twice is better than not at all; the manual names the scope."""
    job = told.ask()
    told.slack.script("chat.postMessage", {"status": 500})
    told.slack.script("conversations.replies", {"error": "missing_scope"})
    assert told.deliver(job).status is NoticeStatus.DELIVERED
    assert told.answers(job) == ["an answer"]


def long_answer() -> str:
    return "\n\n".join(f"## Part {n}\n\n```python\n" + "x = 1 < 2\n" * 400 + "```" for n in range(10))


@pytest.mark.parametrize("lost_at", [None, 0, 1, 2, 3])
def test_a_long_answer_comes_in_order_and_whole_wherever_it_was_interrupted(told: Told, lost_at: int | None) -> None:
    """Each part once, each within Slack's limit, code closed and opened again."""
    text = long_answer()
    job = told.ask(text)
    if lost_at is not None:
        told.slack.script("chat.postMessage", *[{}] * lost_at, {"lost": True}, {"status": 429}, {})
    assert told.deliver(job).status is NoticeStatus.DELIVERED
    answers = told.answers(job)
    assert len(answers) >= 4
    assert all(len(part) <= 12_000 and part.count("```") % 2 == 0 for part in answers)
    shown = "".join(answers).replace("&lt;", "<")
    assert shown.count("x = 1 < 2") == text.count("x = 1 < 2")
    assert [shown.index(f"## Part {n}") for n in range(10)] == sorted(shown.index(f"## Part {n}") for n in range(10))


def test_another_jobs_parts_in_the_thread_are_not_taken_for_this_ones(told: Told) -> None:
    """Two questions in one thread, and a run of the same job before."""
    first = told.ask("the first answer")
    told.deliver(first)
    assert first.slack is not None
    second = told.ask("the second answer", thread_ts=first.slack.thread_ts)
    told.slack.script("chat.postMessage", {"status": 500})
    told.deliver(second)
    assert told.answers(first) == ["the first answer", "the second answer"]


def test_an_answer_cut_off_says_so(told: Told) -> None:
    """It ran out of tokens."""
    job = told.ask("and then", finish="length")
    told.deliver(job)
    assert told.answers(job) == ["and then" + CUT_OFF]


def test_a_large_answer_comes_from_where_it_is_kept(told: Told) -> None:
    """And if it is no longer kept, people are told so."""
    job = told.ask("word " * 30_000)
    assert job.result is not None
    assert job.result.key is not None
    told.deliver(job)
    assert sum(len(part) for part in told.answers(job)) >= 150_000
    gone = told.ask("word " * 30_000)
    told.house.payloads.texts.clear()
    told.deliver(gone)
    assert told.answers(gone) == [GONE]


def test_blocks_that_slack_refuses_go_as_plain_text(told: Told) -> None:
    """An answer without looks is better than none."""
    job = told.ask("**yes**")
    told.slack.script("chat.postMessage", {"error": "invalid_blocks"})
    assert told.deliver(job).status is NoticeStatus.DELIVERED
    assert told.answers(job) == ["**yes**"]
    assert "blocks" not in told.slack.calls("chat.postMessage")[-1].arguments


def test_slk_16_nothing_alive_reaches_slack(told: Told) -> None:
    """Neither in the answer nor in the text for notifications."""
    job = told.ask("Attention <!channel>, ask <@U0000ADM1>: <https://evil.example.test|https://bank.example.test>")
    told.deliver(job)
    assert "<" not in json.dumps(told.slack.calls("chat.postMessage")[0].arguments)


def test_a_channel_gets_one_message_a_second_from_all_notifiers(told: Told) -> None:
    """Its turn is waited for; where that is far off, the try is given back."""
    jobs = [told.ask(f"answer {n}") for n in range(3)]
    began = told.house.clock.now()
    for job in jobs:
        told.channel.tell(job)
    assert told.house.clock.now() - began == 2_000
    other = told.ask("elsewhere", channel=DIRECT)
    told.channel.tell(other)
    assert told.house.clock.now() - began == 2_000
    for _ in range(20):
        told.house.limits.advance(f"slack-channel#{CHANNEL}", told.house.clock.now() * 1000, 1_000_000, 0)
    with pytest.raises(Untold) as error:
        told.channel.tell(jobs[0])
    assert (error.value.message, error.value.again) == ("channel_busy", True)
    assert error.value.retry_after_seconds is not None
    assert error.value.retry_after_seconds > 15


def test_an_answer_too_long_for_one_try_goes_on_in_the_next(told: Told) -> None:
    """Each part once, although the first try ended in the middle."""
    job = told.ask("\n\n".join(["word " * 2_300] * 50))
    assert told.deliver(job).tries == 2
    assert len(told.answers(job)) == 50


# ── Other ends ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "code", "sentence", "has_button"),
    [
        (JobStatus.FAILED, "overloaded", SENTENCES["overloaded"], True),
        (JobStatus.FAILED, "authentication", SENTENCES["authentication"], True),
        (JobStatus.FAILED, "content_filtered", SENTENCES["content_filtered"], False),
        (JobStatus.FAILED, "context_length_exceeded", SENTENCES["context_length_exceeded"], False),
        (JobStatus.FAILED, "an_error_of_tomorrow", OTHERWISE, True),
        (JobStatus.EXPIRED, "deadline_passed", SENTENCES["deadline_passed"], True),
        (JobStatus.CANCELLED, None, STOPPED, False),
    ],
)
def test_any_other_end_is_told_in_one_sentence(
    told: Told, status: JobStatus, code: str | None, sentence: str, has_button: bool
) -> None:
    """With a button where asking again can help, and nothing of what the provider said."""
    job = told.ended(status, code)
    told.deliver(job)
    assert told.answers(job) == [sentence]
    (call,) = told.slack.calls("chat.postMessage")
    assert "secret detail" not in json.dumps(call.arguments)
    buttons = [block["elements"][0] for block in call.arguments["blocks"] if block["type"] == "actions"]
    assert [(button["action_id"], button["value"]) for button in buttons] == [(RETRY, job.job_id)] * has_button


# ── Commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_commands_answer_shows_who_asked_what_and_goes_on_in_its_own_thread(told: Told) -> None:
    """Nobody else has seen the question."""
    job = told.ask(long_answer(), surface="command", thread_ts=None, message_ts=None)
    told.slack.script("chat.postMessage", {}, {"lost": True})
    assert told.deliver(job).status is NoticeStatus.DELIVERED
    messages = [message for message in told.slack.messages(CHANNEL) if message.bot]
    assert [message.thread_ts for message in messages] == [None] + [messages[0].ts] * (len(messages) - 1)
    context = messages[0].blocks[0]["elements"][0]["text"]
    assert context == f"<@{USER}> asked: Name a river."
    assert "".join(message.text for message in messages).count("## Part") == 10


@pytest.mark.parametrize(
    ("question", "shown"),
    [
        ("<!channel> <!here|x> <!subteam^S1>", "&lt;!channel&gt; &lt;!here|x&gt; &lt;!subteam^S1&gt;"),
        ("<@U0000ADM1> in <#C0000OPS1>", "&lt;@U0000ADM1&gt; in &lt;#C0000OPS1&gt;"),
        ("<https://evil.example.test|https://bank.example.test>",
         "&lt;https://evil.example.test|https://bank.example.test&gt;"),
        ("&lt;!channel&gt; & co", "&amp;lt;!channel&amp;gt; &amp; co"),
        ("> *x* `<!channel>`\n```<!here>```", "&gt; *x* `&lt;!channel&gt;`\n```&lt;!here&gt;```"),
        ("a" * 298 + "<!channel>", "a" * 298 + "&lt;!…"),
        ("<" * 400, "&lt;" * 300 + "…"),
    ],
    ids=["broadcasts", "mentions", "link", "entities", "markdown", "cut", "long"],
)  # fmt: skip
def test_slk_16_a_commands_question_mentions_nobody(told: Told, question: str, shown: str) -> None:
    """Only who asked is mentioned, whatever the question holds; it is cut before it is escaped."""
    where: dict[str, Any] = {"surface": "command", "thread_ts": None, "message_ts": None}
    told.deliver(told.ask("<!here> yes", question=question, **where))
    (call,) = told.slack.calls("chat.postMessage")
    assert call.arguments["blocks"][0]["elements"][0]["text"] == f"<@{USER}> asked: {shown}"
    assert json.dumps(call.arguments).count("<") == 1


def test_a_failure_told_through_a_response_url_keeps_its_button(told: Told) -> None:
    """Where asking again can help."""
    told.slack.configure(closed_channels=(CHANNEL,))
    where: dict[str, Any] = {"surface": "command", "thread_ts": None, "message_ts": None}
    for code, has_button in (("overloaded", True), ("content_filtered", False)):
        job = told.ended(JobStatus.FAILED, code, **where, response_url=told.slack.response_url())
        assert told.deliver(job).status is NoticeStatus.DELIVERED
        message = told.slack.messages(CHANNEL)[-1]
        assert (message.text, message.markdown, message.ephemeral_for) == (*[SENTENCES[code]] * 2, USER)
        buttons = [block["elements"][0] for block in message.blocks if block["type"] == "actions"]
        assert [(button["action_id"], button["value"]) for button in buttons] == [(RETRY, job.job_id)] * has_button


def test_a_command_is_answered_through_its_response_url_where_the_app_may_not_post(told: Told) -> None:
    """To the one who asked; five posts are the most, and the last says so."""
    told.slack.configure(closed_channels=(CHANNEL,))
    where: dict[str, Any] = {"surface": "command", "thread_ts": None, "message_ts": None}
    job = told.ask("**yes**", **where, response_url=told.slack.response_url())
    assert told.deliver(job).status is NoticeStatus.DELIVERED
    (message,) = [message for message in told.slack.messages(CHANNEL) if message.bot]
    assert (message.text, message.ephemeral_for) == ("**yes**", USER)
    long = told.ask("word " * 10_000, **where, response_url=told.slack.response_url())
    assert told.deliver(long).status is NoticeStatus.DELIVERED
    texts = [call.arguments["text"] for call in told.slack.calls("response_url")]
    assert len(texts) == 6
    assert texts[-1].endswith(REST)


@pytest.mark.parametrize(
    ("url", "reason"),
    [(None, "not_in_channel"), ("https://elsewhere.example.test/x", "not_a_slack_address"), ("gone", "used_url")],
)
def test_a_command_that_can_be_answered_nowhere_is_given_up(told: Told, url: str | None, reason: str) -> None:
    """With the reason."""
    told.slack.configure(closed_channels=(CHANNEL,))
    url = f"{told.slack.address}/hooks/gone" if url == "gone" else url
    job = told.ask("yes", surface="command", thread_ts=None, message_ts=None, response_url=url)
    notice = told.deliver(job)
    assert (notice.status, notice.last_error) == (NoticeStatus.GIVEN_UP, reason)


# ── The token ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_token_that_was_changed_is_read_again(slack: FakeSlack) -> None:
    """Once, when Slack refuses it."""
    told = Told(slack, token="xoxb-old", tokens_to_come=[slack.token])
    job = told.ask()
    assert told.deliver(job).tries == 1
    assert told.answers(job) == ["an answer"]


def test_without_a_token_the_delivery_ends_with_what_is_missing(slack: FakeSlack) -> None:
    """And Slack is not called."""
    told = Told(slack)
    told.token = ""
    notice = told.deliver(told.ask())
    assert (notice.status, notice.last_error) == (NoticeStatus.GIVEN_UP, "slack_not_configured")
    assert slack.ledger == []


def test_a_slack_that_cannot_be_reached_is_tried_for_more_than_an_hour(slack: FakeSlack) -> None:
    """Then given up, visibly."""
    told = Told(slack)
    told.api._base_url = "http://127.0.0.1:9/api/"
    job = told.ask()
    notice = told.deliver(job, 10_000)
    assert (notice.status, notice.last_error, notice.tries) == (NoticeStatus.GIVEN_UP, "connection", 8)


def test_a_slack_that_does_not_answer_is_a_timeout(slack: FakeSlack) -> None:
    """Which may have had its effect, so the next try looks first."""
    told = Told(slack)
    told.api = SlackApi(lambda: slack.token, lambda _: False, base_url=slack.base_url, timeout_seconds=1)
    told.channel._api = told.api
    job = told.ask()
    slack.script("chat.postMessage", {"delay_seconds": 1.6})
    slack.script("conversations.replies", {"delay_seconds": 0.9})
    notice = told.deliver(job)
    assert (notice.status, notice.tries) == (NoticeStatus.DELIVERED, 2)
    assert told.answers(job) == ["an answer"]
