"""A thread in Slack: what was said before becomes the conversation, and people see that somebody is at work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backburner.channels import slack_thread
from backburner.channels.slack import GONE, SlackChannel
from backburner.channels.slack_api import SlackApi
from backburner.channels.slack_thread import (
    AGAIN,
    HISTORY_BYTES_MAX,
    OURSELVES,
    TOO_LONG,
    SlackPresence,
    SlackThreads,
    _conversation,
    _newest,
)
from backburner.models import Client, Job, JobStatus, Message, Payload, SlackOrigin
from backburner.slack_events import HELP, SLOW_DOWN
from backburner.slack_text import STOP
from tests.fakes.house import House
from tests.fakes.slack import BOT_USER, CHANNEL, DIRECT, TEAM, USER, FakeSlack

OTHER = "U0000USR2"


@pytest.fixture
def slack() -> Iterator[FakeSlack]:
    with FakeSlack() as server:
        server.configure(messages_per_second=10_000.0)
        yield server


@pytest.fixture
def house() -> House:
    return House()


def api_of(slack: FakeSlack) -> SlackApi:
    return SlackApi(lambda: slack.token, lambda _: False, base_url=slack.base_url, timeout_seconds=2)


def asked_in(house: House, event: dict[str, Any], **more: Any) -> Job:
    """The job of a message."""
    origin = SlackOrigin(
        channel=event["channel"], user=event["user"], team=TEAM, surface="channel",
        thread_ts=event.get("thread_ts", event["ts"]), message_ts=event["ts"],
    )  # fmt: skip
    return house.accept(event["ts"], slack=replace(origin, **more))


def channel_of(house: House, slack: FakeSlack) -> SlackChannel:
    return SlackChannel(
        api_of(slack), payloads=house.payloads, line=house.limits, clock=house.clock, journal=house.journal
    )


def answer(house: House, slack: FakeSlack, job: Job, text: str, status: JobStatus = JobStatus.COMPLETED) -> None:
    """Post the end of a job that was called for once, as the notifier does."""
    told = replace(job, status=status, claims=1, result=Payload(f'{{"text":"{text}"}}'))
    channel_of(house, slack).tell(told)


def recalled(house: House, slack: FakeSlack, job: Job, text: str) -> list[tuple[str, str]]:
    """The conversation up to the question."""
    threads = SlackThreads(api_of(slack), time.monotonic, house.journal)
    return [(turn.role, turn.content) for turn in threads.recall(job, Message(role="user", content=text))]


# ── What was said before ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_thread_becomes_a_conversation(house: House, slack: FakeSlack) -> None:
    """People's messages as the user's turns, our answers as the assistant's; neither failures nor what came later."""
    root = slack.say(f"<@{BOT_USER}> list three &lt;rivers&gt;")
    job = asked_in(house, root)
    answer(house, slack, job, "Rhine, Elbe, Oder & so on")
    answer(house, slack, job, "", JobStatus.FAILED)
    question = slack.say("and lakes?", thread_ts=root["ts"])
    asked = asked_in(house, question)
    slack.say("never mind", thread_ts=root["ts"])
    assert recalled(house, slack, asked, "and lakes?") == [
        ("user", f"@name-of-{BOT_USER.lower()} list three <rivers>"),
        ("assistant", "Rhine, Elbe, Oder & so on"),
        ("user", "and lakes?"),
    ]


def test_who_says_what_is_told_where_several_speak(house: House, slack: FakeSlack) -> None:
    """By name, also of other apps: an alert may be what the question is about."""
    root = slack.say("the disk is full")
    alert = next(message for message in slack.messages() if message.ts == root["ts"])
    alert.user, alert.bot, alert.bot_id = "U0000BOT9", True, "B0000BOT9"
    slack.say(f"<@{OTHER}> can you look?", thread_ts=root["ts"])
    asked = asked_in(house, slack.say("what does it mean?", thread_ts=root["ts"], user=OTHER))
    assert recalled(house, slack, asked, f"what does it mean for @{USER}?") == [
        (
            "user",
            (
                "app: the disk is full\n\n"
                f"name-of-{USER.lower()}: @name-of-{OTHER.lower()} can you look?\n\n"
                f"name-of-{OTHER.lower()}: what does it mean for @name-of-{USER.lower()}?"
            ),
        )
    ]


def test_a_question_of_its_own_costs_no_call(house: House, slack: FakeSlack) -> None:
    """But for the name of who asks, which the next one costs no more; ids in it get their names."""
    threads = SlackThreads(api_of(slack), time.monotonic, house.journal)
    job = asked_in(house, slack.say("hello"))
    for _ in range(2):
        (turn,) = threads.recall(job, Message(role="user", content="see #C0000CHN2"))
        assert turn.content == "see #name-of-c0000chn2"
    assert [call.method for call in slack.ledger] == ["users.info", "conversations.info"]


@pytest.mark.parametrize(
    "step",
    [{"status": 429, "headers": {"Retry-After": "60"}}, {"error": "not_in_channel"}, {"status": 500}, {"lost": True}],
)
def test_without_slack_the_question_is_asked_alone(house: House, slack: FakeSlack, step: dict[str, Any]) -> None:
    """Neither is it put off, nor does it fail."""
    root = slack.say("before")
    asked = asked_in(house, slack.say("question", thread_ts=root["ts"]))
    slack.script("conversations.replies", step)
    assert recalled(house, slack, asked, "question") == [("user", "question")]
    assert house.journal.named("slack_thread_unread")


def test_slow_names_do_not_hold_up_the_question(
    house: House, slack: FakeSlack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not there in time is left as an id."""
    monkeypatch.setattr(slack_thread, "RECALL_SECONDS_MAX", 0.3)
    slack.script("users.info", *[{"delay_seconds": 1.0}] * 10)
    asked = asked_in(house, slack.say("question"))
    began = time.monotonic()
    (turn,) = recalled(house, slack, asked, " ".join(f"@U0000USR{n}" for n in range(9)))
    assert time.monotonic() - began < 6
    assert "@U0000USR8" in turn[1]


@pytest.mark.parametrize("root_on_each_page", [False, True])
def test_of_a_thread_of_thousands_the_newest_is_told(house: House, slack: FakeSlack, root_on_each_page: bool) -> None:
    """Slack gives the oldest first, a page at a time, the root perhaps with each; nothing is told twice."""
    slack.configure(root_on_each_page=root_on_each_page)
    root = slack.say("the beginning")
    for number in range(2_050):
        slack.say(f"reply {number:04}", thread_ts=root["ts"])
    asked = asked_in(house, slack.say("and now?", thread_ts=root["ts"]))
    ((role, told),) = recalled(house, slack, asked, "and now?")
    assert role == "user"
    assert told.endswith("reply 2048\n\nreply 2049\n\nand now?")
    kept = told.split("\n\n")[:-1]
    assert kept == [f"reply {number:04}" for number in range(2_050 - len(kept), 2_050)]
    assert len(kept) == HISTORY_BYTES_MAX // len("reply 0000")
    assert len(slack.calls("conversations.replies")) == 3


def test_a_short_thread_in_pages_is_told_whole(house: House, slack: FakeSlack, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the pages fall."""
    root = slack.say("0")
    for number in range(1, 9):
        slack.say(str(number), thread_ts=root["ts"])
    asked = asked_in(house, slack.say("9", thread_ts=root["ts"]))
    for size in range(1, 11):
        monkeypatch.setattr(slack_thread, "PAGE_MESSAGES", size)
        assert recalled(house, slack, asked, "9") == [("user", "\n\n".join("0123456789"))]


@pytest.mark.parametrize(("pages", "seconds", "reason"), [(2, 0.0, TOO_LONG), (10, 1.0, "timeout")])
def test_a_thread_whose_end_is_not_reached_is_not_told(
    house: House, slack: FakeSlack, monkeypatch: pytest.MonkeyPatch, pages: int, seconds: float, reason: str
) -> None:
    """What was said long ago is no answer to what "it" is; the bound is a number of pages, and a time."""
    for name, value in (("PAGES_MAX", pages), ("PAGE_MESSAGES", 2), ("RECALL_SECONDS_MAX", 1.5)):
        monkeypatch.setattr(slack_thread, name, value)
    root = slack.say("0")
    for number in range(1, 9):
        slack.say(str(number), thread_ts=root["ts"])
    asked = asked_in(house, slack.say("question", thread_ts=root["ts"]))
    ticks = count(0.0, seconds)  # the time at each look at the clock
    threads = SlackThreads(api_of(slack), lambda: next(ticks), house.journal)
    (turn,) = threads.recall(asked, Message(role="user", content="question"))
    assert (turn.role, turn.content) == ("user", "question")
    (event,) = house.journal.named("slack_thread_unread")
    assert event["reason"] == reason
    assert len(slack.calls("conversations.replies")) == 2


def test_a_draft_of_ours_is_no_turn(house: House, slack: FakeSlack) -> None:
    """Cut off or still growing, it carries no mark: the answer it became a part of is told, another app's reply too."""
    api, root = api_of(slack), slack.say("list rivers")
    where = {"channel": CHANNEL, "thread_ts": root["ts"], "recipient_team_id": TEAM, "recipient_user_id": USER}
    for _ in range(2):
        api.call("chat.startStream", **where, markdown_text="Rhine, El")
    answer(house, slack, asked_in(house, root), "Rhine, Elbe")
    slack.say("also the Oder", thread_ts=root["ts"])
    other = slack.messages()[-1]
    other.user, other.bot, other.bot_id = "U0000BOT9", True, "B0000BOT9"
    asked = asked_in(house, slack.say("and lakes?", thread_ts=root["ts"]))
    name = f"name-of-{USER.lower()}"
    assert recalled(house, slack, asked, "and lakes?") == [
        ("user", f"{name}: list rivers"),
        ("assistant", "Rhine, Elbe"),
        ("user", f"app: also the Oder\n\n{name}: and lakes?"),
    ]
    assert len(slack.calls("auth.test")) == 1


def test_our_alarm_at_the_root_is_what_the_question_is_about(house: House, slack: FakeSlack) -> None:
    """It carries no mark either, but a draft is never a root; so Slack need not say who we are."""
    ts = api_of(slack).call("chat.postMessage", channel=CHANNEL, text="Alarm: the disk is full")["ts"]
    asked = asked_in(house, slack.say("what now?", thread_ts=ts))
    ((_, told),) = recalled(house, slack, asked, "what now?")
    assert told.startswith("app: Alarm: the disk is full\n\n")
    assert slack.calls("auth.test") == []


def test_where_slack_does_not_say_who_we_are_drafts_stay(house: House, slack: FakeSlack) -> None:
    """It is asked once for a question, and again for the next one."""
    api, root = api_of(slack), slack.say("list rivers")
    where = {"channel": CHANNEL, "thread_ts": root["ts"], "recipient_team_id": TEAM, "recipient_user_id": USER}
    for _ in range(2):
        api.call("chat.startStream", **where, markdown_text="Rhine, El")
    asked = asked_in(house, slack.say("and lakes?", thread_ts=root["ts"]))
    threads = SlackThreads(api, time.monotonic, house.journal)
    slack.script("auth.test", {"status": 500})
    for drafts, calls in ((2, 1), (0, 2), (0, 2)):
        (turn,) = threads.recall(asked, Message(role="user", content="and lakes?"))
        assert turn.content.count("Rhine, El") == drafts
        assert len(slack.calls("auth.test")) == calls


def test_what_we_say_without_a_call_is_no_turn(house: House, slack: FakeSlack) -> None:
    """Help, "too many questions", an answer that is no longer stored: the model said none of it."""
    house.channel = channel_of(house, slack)
    root = slack.say("list rivers")
    for text in (HELP, SLOW_DOWN):
        origin = asked_in(house, root).slack
        assert origin is not None
        house.submission.say(Client("slack", "Slack"), text, text, slack=origin)
    house.tell()
    answer(house, slack, asked_in(house, root), "")
    assert slack.answers(CHANNEL, root["ts"]) == [HELP, SLOW_DOWN, GONE]
    asked = asked_in(house, slack.say("and lakes?", thread_ts=root["ts"]))
    assert recalled(house, slack, asked, "and lakes?") == [("user", "list rivers\n\nand lakes?")]


SAID = st.lists(
    st.tuples(st.sampled_from([OURSELVES, USER, OTHER]), st.sampled_from(["hi", "word " * 900, "é" * 5_000])),
    max_size=20,
)


@given(SAID, st.sampled_from([USER, OTHER]))
def test_any_thread_is_a_conversation_that_providers_take(said: list[tuple[str, str]], who: str) -> None:
    """It begins and ends with a person, the sides take turns, it is bounded, and the question is last."""
    turns = _conversation([*said, (who, "the question")], {})
    assert (turns[0].role, turns[-1].role) == ("user", "user")
    assert all(one.role != next_.role for one, next_ in pairwise(turns))
    assert turns[-1].content.endswith("the question")
    assert sum(len(turn.content.encode()) for turn in turns) <= HISTORY_BYTES_MAX + 200


@given(SAID)
def test_what_is_left_out_of_memory_has_no_place_in_the_conversation(said: list[tuple[str, str]]) -> None:
    """Forgetting the oldest while the pages come changes nothing."""
    said = [(who and USER, text) for who, text in said]
    kept: list[tuple[str, str]] = []
    for turn in said:
        kept = _newest([*kept, turn])
        assert sum(len(text.encode()) for _, text in kept) <= HISTORY_BYTES_MAX
    question = (USER, "the question")
    assert _conversation([*kept, question], {}) == _conversation([*said, question], {})


# ── That somebody is at work ─────────────────────────────────────────────────────────────────────────────────────────


def until(look: Any) -> None:
    end = time.monotonic() + 5
    while not look():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of a test's length."""
    monkeypatch.setattr(slack_thread, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(slack_thread, "STOP_SECONDS", 0.1)


def test_a_status_shows_where_slack_has_it(house: House, slack: FakeSlack) -> None:
    """In a direct message; our answer ends it."""
    job = asked_in(house, slack.say("hi", channel=DIRECT))
    with SlackPresence(api_of(slack), time.monotonic, house.journal).listening(job) as shown:
        until(lambda: slack.statuses)
        assert shown is None
    assert [call.method for call in slack.ledger] == ["assistant.threads.setStatus"]


def test_a_reaction_shows_where_it_has_not(house: House, slack: FakeSlack) -> None:
    """On the question, while it is worked on; also if a lost worker has left it there."""
    event = slack.say("hi")
    job = asked_in(house, event)
    (message,) = slack.messages(CHANNEL)
    presence = SlackPresence(api_of(slack), time.monotonic, house.journal)
    for _ in range(2):
        with presence.listening(job):
            until(lambda: "eyes" in message.reactions)
        assert message.reactions == []
        message.reactions.append("eyes")


@pytest.mark.usefixtures("quick")
def test_who_waits_long_is_offered_to_stop(house: House, slack: FakeSlack) -> None:
    """Once, and nobody else sees it."""
    job = asked_in(house, slack.say("hi"))
    with SlackPresence(api_of(slack), time.monotonic, house.journal).listening(job):
        until(lambda: slack.calls("chat.postEphemeral"))
        time.sleep(0.2)
    (call,) = slack.calls("chat.postEphemeral")
    button = call.arguments["blocks"][1]["elements"][0]
    assert (button["action_id"], button["value"]) == (STOP, job.job_id)
    assert (call.arguments["user"], call.arguments["thread_ts"]) == (USER, job.slack and job.slack.thread_ts)


def test_a_short_answer_is_not_offered_to_be_stopped(house: House, slack: FakeSlack) -> None:
    """The button would come with it."""
    with SlackPresence(api_of(slack), time.monotonic, house.journal).listening(asked_in(house, slack.say("hi"))):
        until(lambda: slack.calls("reactions.add"))
    assert slack.calls("chat.postEphemeral") == []


def test_the_failure_that_was_told_is_taken_back_while_it_is_tried_again(house: House, slack: FakeSlack) -> None:
    """Its button is gone."""
    event = slack.say("hi")
    answer(house, slack, asked_in(house, event), "", JobStatus.FAILED)
    failure = slack.messages(CHANNEL, event["ts"])[0]
    job = asked_in(house, {**event, "ts": "1760000001.000100"}, failed_ts=failure.ts)
    with SlackPresence(api_of(slack), time.monotonic, house.journal).listening(job):
        until(lambda: failure.edited)
    assert (failure.text, failure.blocks) == (AGAIN, [])


@pytest.mark.usefixtures("quick")
def test_a_slack_in_trouble_neither_fails_nor_holds_up_the_job(house: House, slack: FakeSlack) -> None:
    """Whatever it answers, or if it does not."""
    job = asked_in(house, slack.say("hi"))
    for method in ("assistant.threads.setStatus", "reactions.add", "chat.postEphemeral", "reactions.remove"):
        slack.script(method, {"status": 500}, {"delay_seconds": 1.5})
    began = time.monotonic()
    for _ in range(2):
        with SlackPresence(api_of(slack), time.monotonic, house.journal).listening(job):
            time.sleep(0.2)
    assert time.monotonic() - began < 8
    assert house.journal.named("slack_presence_failed") == []


def test_a_job_from_elsewhere_is_shown_nowhere(house: House, slack: FakeSlack) -> None:
    """Slack is not called."""
    with SlackPresence(api_of(slack), time.monotonic, house.journal).listening(house.accept("key")):
        pass
    assert slack.ledger == []
