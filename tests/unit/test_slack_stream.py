"""Answers in Slack while they are written: each message within its limits, and in the end the whole text, once."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from backburner.channels import slack_stream, slack_thread
from backburner.channels.slack import SENTENCES, SlackChannel, seconds_to_turn
from backburner.channels.slack_api import SlackApi
from backburner.channels.slack_stream import Draft, LiveAnswer
from backburner.channels.slack_thread import SlackPresence
from backburner.errors import ProviderRefusedRequest
from backburner.models import Answer, Job, JobStatus, NoticeStatus, SlackOrigin, Usage
from backburner.ports import Conflict
from backburner.slack_text import escaped, size
from tests.fakes.house import House
from tests.fakes.memory import ScriptedProvider
from tests.fakes.slack import BOT_USER, CHANNEL, TEAM, USER, FakeSlack
from tests.unit.test_slack_text import PIECES, shown

# ── What is sent ─────────────────────────────────────────────────────────────────────────────────────────────────────


ODD = re.compile(r"^[ \t]*(?:\t| {4})[ \t]*(?:`{3}|~{3})|`{17}|~{17}", re.MULTILINE)
"""A fence so deep is one in a list, which is where models write it; elsewhere it is part of an indented block. And one
so long (FENCE_CHARACTERS_MAX) is none to us."""


def written(pieces: list[str], limit: int) -> list[tuple[list[str], str]]:
    """The messages of an answer that comes in these pieces: what was appended to each, and what closed it."""
    draft, messages, parts = Draft(limit), list[tuple[list[str], str]](), list[str]()

    def send(*, last: bool) -> None:
        nonlocal parts
        while True:
            text, ends = draft.next(last=last)
            if not text and not ends:
                return
            whole = draft._pending == text
            closing = draft.closing(text) if ends else ""
            draft.sent(text)
            parts.append(text)
            if ends:
                messages.append((parts, closing))
                parts = []
                draft.cut()
            if last and whole:
                return

    for piece in pieces:
        draft.add(piece)
        send(last=False)
    send(last=True)
    return messages


@given(st.lists(PIECES, max_size=60), st.integers(200, 400))
@example(["```py\n", "x = 1\n" * 200, "```\n"], 200)
@example(["<" * 500], 200)
@example(["a" * 170, "&", "lt;", "!here&gt;"], 200)
@example(["\ud83d", "\ude00"], 200)
@example(["    ", "```"], 200)
@example(["```"] * 6, 200)
def test_whatever_comes_in_whatever_pieces_each_message_is_sound(pieces: list[str], limit: int) -> None:
    """Together they are the text; each fits, holds nothing alive, and closes what it opens."""
    messages = written(pieces, limit)
    text = "".join(pieces).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    raw = ["".join(parts) for parts, _ in messages]
    for parts, closing in messages:
        sent = "".join(escaped(part) for part in parts) + closing
        assert size(sent) <= limit
        assert "<" not in sent
        assert shown(sent) == "".join(parts) + closing  # also where an entity came in two pieces
        if not ODD.search(text):
            assert "<p>after</p>" in MarkdownIt().render(f"{''.join(parts)}{closing}\n\nafter")
    # Without the fences that were opened again, it is the text.
    position = 0
    for message in raw:
        opening, _, rest = message.partition("\n")
        again = not text[position:].startswith(message)
        assert not again or (re.match(r"`{3,}|~{3,}", opening) and text[position:].startswith(rest))
        position += len(rest if again else message)
    assert position == len(text)


# ── A whole answer ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def slack() -> Iterator[FakeSlack]:
    with FakeSlack() as server:
        server.configure(messages_per_second=10_000.0)
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of a test's length."""
    monkeypatch.setattr(slack_thread, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(slack_stream, "FLUSH_SECONDS", 0.02)
    monkeypatch.setattr(slack_stream, "PAUSE_SECONDS", 0.02)


class Writer:
    """A house that answers in Slack while it writes."""

    def __init__(self, slack: FakeSlack) -> None:
        self.slack, self.house = slack, House()
        self.house.clock.time = time.time_ns() // 1_000_000
        self.api = SlackApi(lambda: slack.token, lambda _: False, base_url=slack.base_url, timeout_seconds=2)
        channel = SlackChannel(
            self.api,
            payloads=self.house.payloads,
            line=self.house.limits,
            clock=self.house.clock,
            journal=self.house.journal,
        )
        self.house.channel = channel
        presence = SlackPresence(self.api, time.monotonic, self.house.journal, self.live)
        self.house.execution = replace(self.house.execution, deltas=presence, providers=lambda _: self.provider)
        self.provider: Any = ScriptedProvider()

    def live(self, job: Job) -> LiveAnswer:
        return LiveAnswer(
            self.api,
            job,
            record=self.house.lifecycle.shown_in,
            turn=lambda channel: seconds_to_turn(self.house.limits, self.house.clock, channel) / 1_000,
            monotonic=time.monotonic,
            journal=self.house.journal,
        )

    def wait_for_stream(self, before: str = "") -> None:
        """Until a message with the answer, other than the one before, is noted in a row; 10 s at most."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            noted = {ts for row in self.house.store.rows.values() if row.slack for ts in row.slack.streams}
            if noted - {before}:
                return
            time.sleep(0.01)

    def answer(self, pieces: list[str], error: Exception | None = None, pause: float = 0.03) -> Job:
        """A question whose answer comes in these pieces, told by the notifier; its row."""
        asked = self.slack.say(f"<@{BOT_USER}> hello")
        origin = SlackOrigin(CHANNEL, USER, TEAM, "channel", thread_ts=asked["ts"], message_ts=asked["ts"])

        def ask(question: Any, *, said: Any, **_: Any) -> Answer:
            for piece in pieces:
                said(piece)
                time.sleep(pause)
            if error is not None:
                self.wait_for_stream()
                raise error
            return Answer("".join(pieces), "stop", "m-1", "fake", Usage(1, 1))

        self.provider.ask = ask
        job = self.house.accept(asked["ts"], slack=origin)
        self.house.work()
        return self.house.job(job.job_id)

    def tell(self, job: Job) -> list[str]:
        """Let the notifier do its work; what people see in the thread then."""
        for _ in range(5_000):
            self.house.tell()
            if not self.house.job(job.job_id).pending:
                break
            self.house.clock.advance(1)
        (notice,) = [notice for notice in self.house.job(job.job_id).outbox if notice.target == "slack"]
        assert notice.status is NoticeStatus.DELIVERED
        assert job.slack is not None
        return self.slack.answers(CHANNEL, job.slack.thread_ts)

    def methods(self) -> list[str]:
        return [call.method for call in self.slack.ledger if "tream" in call.method]


@pytest.fixture
def writer(slack: FakeSlack) -> Writer:
    return Writer(slack)


def test_an_answer_grows_in_its_thread_and_is_there_once(writer: Writer) -> None:
    """Started, appended to, stopped; then the notifier lays the whole over it."""
    job = writer.answer([f"word{n} " for n in range(12)])
    assert job.slack is not None
    assert len(job.slack.streams) == 1
    (live,) = writer.slack.messages(CHANNEL, job.slack.thread_ts)
    assert live.text.startswith("word0 word1")
    assert writer.methods()[0] == "chat.startStream"
    assert writer.methods().count("chat.appendStream") >= 2
    text = "".join(f"word{n} " for n in range(12))
    assert writer.tell(job) == [text]
    (message,) = writer.slack.messages(CHANNEL, job.slack.thread_ts)
    assert message.metadata is not None
    assert message.metadata["event_payload"]["job_id"] == job.job_id


def test_a_long_answer_rolls_over_to_further_messages(writer: Writer) -> None:
    """Before Slack's limit; in the end each holds its part, and no message is left over."""
    pieces = [f"## {n}\n\n```\n" + "x < 1\n" * 200 + "```\n\n" for n in range(30)]
    job = writer.answer(pieces)
    assert job.slack is not None
    assert len(job.slack.streams) >= 4
    answers = writer.tell(job)
    assert [re.findall(r"## (\d+)\n", "".join(answers))] == [[str(n) for n in range(30)]]
    assert "".join(answers).count("x &lt; 1") == 30 * 200
    assert all(part.count("```") % 2 == 0 for part in answers)


def test_a_stream_that_slack_closes_goes_on_in_another_message(writer: Writer) -> None:
    """Its time was over."""
    writer.slack.configure(stream_seconds=0.1)
    job = writer.answer([f"word{n} " for n in range(20)])
    assert job.slack is not None
    assert len(job.slack.streams) >= 2
    assert writer.tell(job) == ["".join(f"word{n} " for n in range(20))]


def test_a_stream_ends_before_its_time(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slack need not close it."""
    monkeypatch.setattr(slack_stream, "ROLL_SECONDS", 0.1)
    job = writer.answer(["```\n", *[f"word{n} \n" for n in range(20)], "```"])
    assert job.slack is not None
    assert len(job.slack.streams) >= 2
    assert all(call.error is None for call in writer.slack.ledger if "tream" in call.method)
    assert writer.tell(job) == ["```\n" + "".join(f"word{n} \n" for n in range(20)) + "```"]


FAULTS: list[dict[str, Any]] = [
    {"status": 429, "headers": {"Retry-After": "1"}},
    {"status": 500},
    {"lost": True},
    {"error": "channel_type_not_supported"},
    {"error": "message_not_in_streaming_state"},
    {"error": "stopped_by_user"},
]
METHODS = ["chat.startStream", "chat.appendStream", "chat.stopStream", "chat.update", "chat.delete", "chat.postMessage"]


@pytest.mark.parametrize(("method", "fault"), list(itertools.product(METHODS, FAULTS)))
def test_whatever_breaks_the_complete_text_ends_up_in_the_thread(
    writer: Writer, method: str, fault: dict[str, Any]
) -> None:
    """Also if it breaks twice. Only what Slack took without telling its ts may stand beside it."""
    if method == "chat.postMessage" and fault.get("error") in ("channel_type_not_supported", "stopped_by_user"):
        pytest.skip("the delivery ends there")
    writer.slack.script(method, *([{}] if fault.get("status") == 500 else []), fault, fault)
    text = "".join(f"word{n} " for n in range(15))
    job = writer.answer([f"word{n} " for n in range(15)])
    answers = writer.tell(job)
    if method == "chat.startStream" and fault.get("lost"):
        answers = [answer for answer in answers if answer == text]
    assert answers == [text]


def test_slack_is_told_of_nothing_once_the_job_is_ours_no_more(writer: Writer) -> None:
    """The message just begun is taken back."""

    def lost(*_: Any) -> None:
        raise Conflict(None)

    live = writer.live
    writer.live = lambda job: replace_record(live(job), lost)  # type: ignore[method-assign]
    presence = SlackPresence(writer.api, time.monotonic, writer.house.journal, writer.live)
    writer.house.execution = replace(writer.house.execution, deltas=presence)
    job = writer.answer(["one ", "two "])
    assert job.slack is not None
    assert writer.slack.messages(CHANNEL, job.slack.thread_ts) == []
    assert writer.tell(job) == ["one two "]


def replace_record(live: LiveAnswer, record: Any) -> LiveAnswer:
    live._record = record
    return live


def test_the_draft_of_an_attempt_that_failed_makes_way_for_the_next(writer: Writer) -> None:
    """And what was written stays, closed, where there is no next one."""
    job = writer.answer(["half an ", "answer"], ProviderRefusedRequest("no"))
    assert job.status is JobStatus.FAILED
    answers = writer.tell(job)
    assert answers == ["half an answer", SENTENCES["overloaded"]] or answers[0] == "half an answer"
    assert job.slack is not None
    (stream,) = job.slack.streams
    (message,) = [message for message in writer.slack.messages(CHANNEL) if message.ts == stream]
    assert message.streaming_until is None
    again = replace(job, status=JobStatus.QUEUED, error=None, finished_at=None, outbox=(), due_at=1, available_at=1)
    writer.house.store.rows[job.job_id] = again

    def ask(_question: Any, *, said: Any, **_: Any) -> Answer:
        said("whole")
        writer.wait_for_stream(stream)
        return Answer("whole", "stop", "m-1", "fake", Usage(1, 1))

    writer.provider.ask = ask
    writer.house.lifecycle.hint(again)
    writer.house.work()
    assert stream not in [message.ts for message in writer.slack.messages(CHANNEL)]
    assert writer.tell(writer.house.job(job.job_id))[-1] == "whole"
