"""A Slack thread as a worker knows it: what was said there before, and that somebody is at work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final, Literal

from cachetools import TTLCache

from backburner.channels.slack import button_row, payload_of
from backburner.channels.slack_api import SlackApi
from backburner.channels.slack_stream import LiveAnswer
from backburner.errors import PortUnavailable, Untold
from backburner.models import Job, Message, SlackOrigin
from backburner.ports import Audience, Journal
from backburner.slack_text import STOP, ids_in, plain_text, with_names

# ── What was said before ─────────────────────────────────────────────────────────────────────────────────────────────

RECALL_SECONDS_MAX: Final = 2.5
"""For all that is read of the thread; the question does not wait for more. A call ends within the api's own timeout."""
PAGE_MESSAGES, PAGES_MAX = 999, 10
"""Slack gives no more at once, and the oldest first: the newest, which count, are on the last page."""
HISTORY_BYTES_MAX: Final = 16_000
"""Some 4,000 tokens of what was said before; the newest of it."""
NAMES_MAX: Final = 10
"""Names that are looked up for one question."""
NAMES_KEPT, NAME_SECONDS = 2_000, 3_600
TOO_LONG: Final = "thread_too_long"
OURSELVES: Final = ""

type Turn = tuple[str, str]
"""Who said it (a user's id, another app's name, OURSELVES), and what."""


class SlackThreads:
    """Slack's threads, as ports.Conversations. Thread-safe. `monotonic` is in seconds."""

    def __init__(self, api: SlackApi, monotonic: Callable[[], float], journal: Journal) -> None:
        self._api, self._monotonic, self._journal = api, monotonic, journal
        self._names: TTLCache[str, str] = TTLCache(maxsize=NAMES_KEPT, ttl=NAME_SECONDS)
        self._own: TTLCache[str, frozenset[str]] = TTLCache(maxsize=1, ttl=NAME_SECONDS)
        self._lock = threading.Lock()

    def recall(self, job: Job, asked: Message) -> Sequence[Message]:
        """The thread up to the question, with names for ids; the question alone if Slack does not say more in time."""
        origin = job.slack
        if origin is None:
            return (asked,)
        ends_at = self._monotonic() + RECALL_SECONDS_MAX
        said: list[Turn] = []
        if origin.thread_ts is not None and origin.thread_ts != origin.message_ts:
            try:
                said = self._before(origin, ends_at)
            except Untold as error:
                self._journal.note("slack_thread_unread", job_id=job.job_id, reason=error.message)
        said.append((origin.user, asked.content))
        names = self._names_of([who for who, _ in said if who] + [i for _, text in said for i in ids_in(text)], ends_at)
        return _conversation(said, names)

    def _before(self, origin: SlackOrigin, ends_at: float) -> list[Turn]:
        """What was said in the thread before the question, as far as it counts, oldest first. Raises Untold.

        All or nothing: where the pages end before the thread does, what is known is not what was said last.
        """
        said: list[Turn] = []
        own_ids = cache(lambda: self._own_ids(ends_at))
        after, before = 0.0, float(origin.message_ts or "inf")
        cursor: str | None = None
        for number in range(PAGES_MAX):
            if number and self._monotonic() > ends_at:
                raise Untold("timeout", again=True)
            page = self._api.call(
                "conversations.replies",
                channel=origin.channel,
                ts=origin.thread_ts,
                latest=origin.message_ts,
                cursor=cursor,
                limit=PAGE_MESSAGES,
                include_all_metadata=True,
            )
            for message in page.get("messages", []):
                at = float(message.get("ts") or 0)
                if after < at < before:  # the root may come with each page
                    after = at
                    said += _said_in(message, origin, own_ids)
            said = _newest(said)
            cursor = (page.get("response_metadata") or {}).get("next_cursor")
            if not cursor:
                return said
        raise Untold(TOO_LONG)

    def _own_ids(self, ends_at: float) -> frozenset[str]:
        """Our own ids, as a bot and as a user; none if they cannot be had in time."""
        with self._lock:
            own = self._own.get("")
        if own is None:
            if self._monotonic() > ends_at:
                return frozenset()
            try:
                us = self._api.call("auth.test")
            except Untold:
                return frozenset()
            own = frozenset(str(us[name]) for name in ("bot_id", "user_id") if us.get(name))
            with self._lock:
                self._own[""] = own
        return own

    def _names_of(self, ids: Sequence[str], ends_at: float) -> dict[str, str]:
        """Names of users and channels, as far as they can be had in time."""
        names: dict[str, str] = {}
        looked_up = 0
        for wanted in dict.fromkeys(ids):
            with self._lock:
                name = self._names.get(wanted)
            if name is None and looked_up < NAMES_MAX and self._monotonic() < ends_at:
                looked_up += 1
                name = self._look_up(wanted)
            if name:
                names[wanted] = name
        return names

    def _look_up(self, wanted: str) -> str:
        try:
            if wanted.startswith(("U", "W")):
                user = self._api.call("users.info", user=wanted).get("user") or {}
                profile = user.get("profile") or {}
                name = profile.get("display_name") or profile.get("real_name") or user.get("name") or ""
            else:
                name = (self._api.call("conversations.info", channel=wanted).get("channel") or {}).get("name") or ""
        except Untold as error:
            if error.again:
                return ""
            name = ""  # not to be known, so not asked again for a while
        with self._lock:
            self._names[wanted] = str(name)
        return str(name)


def _said_in(message: Mapping[str, Any], origin: SlackOrigin, own_ids: Callable[[], frozenset[str]]) -> list[Turn]:
    """The turn that a message is; none if it says nothing, or is of ours and no answer."""
    text, kind = plain_text(str(message.get("text") or "")), payload_of(message).get("kind")
    if not text or kind not in (None, "answer"):
        return []
    if kind == "answer":
        return [(OURSELVES, text)]
    if not message.get("bot_id"):
        return [(str(message.get("user") or "somebody"), text)]
    # A reply of ours without a mark is what a broken stream has left; a root of ours without one is an alarm.
    is_reply = message.get("ts") != origin.thread_ts
    if is_reply and not own_ids().isdisjoint((message["bot_id"], message.get("user"))):
        return []
    return [(str((message.get("bot_profile") or {}).get("name") or message.get("username") or "app"), text)]


def _newest(said: Sequence[Turn]) -> list[Turn]:
    """The newest turns that can still have a place in the conversation."""
    size = 0
    for back, (_, text) in enumerate(reversed(said)):
        size += len(text.encode())
        if size > HISTORY_BYTES_MAX:
            return list(said[len(said) - back :])
    return list(said)


def _conversation(said: Sequence[Turn], names: Mapping[str, str]) -> tuple[Message, ...]:
    """The newest turns that fit, ours as the assistant's; names before what is said where more than one person speaks.

    It begins with a person, and no two turns of one side follow each other: providers want both.
    """
    several = len({who for who, _ in said if who != OURSELVES}) > 1
    turns: list[Message] = []
    size = 0
    for back, (who, text) in enumerate(reversed(said)):
        content = with_names(text, names)
        if several and who != OURSELVES:
            content = f"{names.get(who, who)}: {content}"
        size += len(content.encode()) if back else 0  # the question itself is no history
        if size > HISTORY_BYTES_MAX:
            break
        role: Literal["user", "assistant"] = "assistant" if who == OURSELVES else "user"
        if turns and turns[0].role == role:
            turns[0] = Message(role=turns[0].role, content=f"{content}\n\n{turns[0].content}")
        else:
            turns.insert(0, Message(role=role, content=content))
    return tuple(turns[1:] if turns[0].role == "assistant" else turns)


# ── That somebody is at work ─────────────────────────────────────────────────────────────────────────────────────────

STATUS: Final = "is thinking…"
STATUS_SECONDS: Final = 100.0
"""Slack drops a status after two minutes."""
REACTION: Final = "eyes"
STOP_SECONDS: Final = 8.0
"""Who has waited so long is offered a button; most answers are there before."""
LOOK_SECONDS: Final = 0.5
END_SECONDS_MAX: Final = 3.0
"""Nothing here is waited for any longer once the attempt is over."""
AGAIN = "I am trying again."
WORKING = "This takes a little longer."


class SlackPresence:
    """Shows in the thread that a job is being worked on, as ports.Deltas: a status, and a button to stop it.

    live: makes what shows its answer while it is written, if it is shown.
    """

    def __init__(
        self,
        api: SlackApi,
        monotonic: Callable[[], float],
        journal: Journal,
        live: Callable[[Job], LiveAnswer] | None = None,
    ) -> None:
        self._api, self._monotonic, self._journal, self._live = api, monotonic, journal, live

    @contextmanager
    def listening(self, job: Job) -> Iterator[Audience | None]:
        """Show it while the block runs. Nothing is held up by Slack, and nothing fails with it."""
        if job.slack is None:
            yield None
            return
        over = threading.Event()
        live = self._live(job) if self._live is not None and job.slack.thread_ts is not None else None
        arguments = (job, job.slack, live, over)
        thread = threading.Thread(target=self._run, args=arguments, name="slack-presence", daemon=True)
        thread.start()
        try:
            yield live
        finally:
            over.set()
            thread.join(END_SECONDS_MAX)

    def _run(self, job: Job, origin: SlackOrigin, live: LiveAnswer | None, over: threading.Event) -> None:
        try:
            self._show(job, origin, live, over)
        except Exception as error:  # noqa: BLE001  the answer matters, the show does not
            self._journal.note("slack_presence_failed", job_id=job.job_id, error=type(error).__name__)

    def _show(self, job: Job, origin: SlackOrigin, live: LiveAnswer | None, over: threading.Event) -> None:
        if origin.failed_ts is not None:
            self._try("chat.update", channel=origin.channel, ts=origin.failed_ts, text=AGAIN, blocks=[])
        began = shown_at = self._monotonic()
        reacted = not self._set_status(origin) and self._react(origin)
        offered = False
        while not over.wait(LOOK_SECONDS):
            now = self._monotonic()
            if live is not None:
                with suppress(PortUnavailable):  # no turn is to be had just now
                    live.flush()
            if not offered and now - began >= STOP_SECONDS:
                offered = True
                self._offer_to_stop(job, origin)
            if not reacted and now - shown_at >= STATUS_SECONDS:
                shown_at = now
                self._set_status(origin)
        if live is not None:
            live.end()
        if reacted:
            self._try("reactions.remove", channel=origin.channel, name=REACTION, timestamp=origin.message_ts)

    def _set_status(self, origin: SlackOrigin) -> bool:
        """Whether this thread can show a status. A message that we post there ends it."""
        if origin.thread_ts is None:
            return False
        return self._try(
            "assistant.threads.setStatus", channel_id=origin.channel, thread_ts=origin.thread_ts, status=STATUS
        )

    def _react(self, origin: SlackOrigin) -> bool:
        """Mark the question; whether there is a mark of ours to be taken off again."""
        if origin.message_ts is None:
            return False
        try:
            self._api.call("reactions.add", channel=origin.channel, name=REACTION, timestamp=origin.message_ts)
        except Untold as error:
            return error.message == "already_reacted"
        return True

    def _offer_to_stop(self, job: Job, origin: SlackOrigin) -> None:
        """Only who asked sees it, and it leaves no message behind."""
        blocks = [
            {"type": "section", "text": {"type": "mrkdwn", "text": WORKING}},
            button_row("Stop", STOP, job.job_id),
        ]
        self._try(
            "chat.postEphemeral",
            channel=origin.channel,
            user=origin.user,
            thread_ts=origin.thread_ts,
            text=WORKING,
            blocks=blocks,
        )

    def _try(self, method: str, **arguments: Any) -> bool:
        with suppress(Untold):
            self._api.call(method, **arguments)
            return True
        return False
