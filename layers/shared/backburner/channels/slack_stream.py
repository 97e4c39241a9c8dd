"""An answer in its Slack thread while it is written: chat.startStream, appendStream, stopStream.

What stands there in the end is the notifier's business: it knows the messages from the row, and lays the whole answer
over them. So whatever breaks here, breaks off.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from backburner.channels.slack_api import SlackApi
from backburner.errors import PortUnavailable, Untold
from backburner.models import Job, SlackOrigin
from backburner.ports import Conflict, Journal
from backburner.slack_text import FENCE_CHARACTERS_MAX, MESSAGE_CHARACTERS_MAX, escaped, fitting, open_fence, size

ROLL_SECONDS: Final = 240.0
"""Slack closes a stream after about five minutes, by reports; nowhere documented."""
FLUSH_SECONDS: Final = 1.0
"""Slack takes some 100 appends a minute."""
PAUSE_SECONDS: Final = 2.0
"""After a failure that does not say how long."""
FAILURES_MAX: Final = 5
ENDED: Final = frozenset({"message_not_in_streaming_state", "msg_too_long"})
"""The message takes no more; another one does."""
_HALF = re.compile(r"&[#\w]{0,32}$|[\ud800-\udbff]$")
"""What only the next piece tells the meaning of: half an entity, half a character."""


class Draft:
    """An answer cut into messages as it comes: `next` says what to send, `sent` that it was, `cut` that one ended.

    A message ends at its limit, or at the first line break after three quarters of it.
    """

    def __init__(self, limit: int = MESSAGE_CHARACTERS_MAX) -> None:
        self._limit = limit - FENCE_CHARACTERS_MAX - 1
        self._pending = ""
        self._message = ""

    def add(self, piece: str) -> None:
        """Another piece of the answer. A pair of surrogates may come in two."""
        whole = (self._pending + piece).encode("utf-16-le", "surrogatepass")
        self._pending = whole.decode("utf-16-le", "surrogatepass")

    def next(self, *, last: bool = False) -> tuple[str, bool]:
        """The text that may be sent now, and whether the message ends with it. `last`: nothing more will come."""
        text = self._pending
        if not last and (half := _HALF.search(text)):
            text = text[: half.start()]
        used = size(escaped(self._message))
        fits = fitting(text, max(0, self._limit - used))
        if fits < len(text):
            return text[: self._boundary(text, fits)], True
        line_end = text.find("\n")
        if used > self._limit * 3 // 4 and line_end >= 0:
            return text[: line_end + 1], True
        return text, last

    def sent(self, text: str) -> None:
        """This much of what was to be sent is in the message now."""
        self._message += text
        self._pending = self._pending[len(text) :]

    def closing(self, text: str = "") -> str:
        """What ends the code block that is open after this text."""
        fence = open_fence(self._message + text)
        return "" if fence is None else fence.closing(self._message + text)

    def cut(self) -> None:
        """The message has ended; the next one opens the code block again."""
        fence = open_fence(self._message)
        self._message = ""
        if fence is not None:
            self._pending = fence.opening + self._pending

    @staticmethod
    def _boundary(text: str, fits: int) -> int:
        for mark in ("\n", " "):
            found = text.rfind(mark, fits // 2, fits)
            if found >= 0:
                return found + 1
        return fits


class LiveAnswer:
    """One attempt's answer in its thread. `say` runs in the call's thread; all else in the presence's.

    record: notes in the row which messages hold the answer; raises Conflict when the job is ours no more.
    turn: takes the next free second of the channel's, and says how long it is until then.
    """

    def __init__(
        self,
        api: SlackApi,
        job: Job,
        *,
        record: Callable[[Job, SlackOrigin], Any],
        turn: Callable[[str], float],
        monotonic: Callable[[], float],
        journal: Journal,
    ) -> None:
        if job.slack is None:
            raise LookupError(job.job_id)
        self._api, self._job, self._origin = api, job, job.slack
        self._record, self._turn, self._monotonic, self._journal = record, turn, monotonic, journal
        self._draft = Draft()
        self._lock = threading.Lock()
        self._said: list[str] = []
        self._ts: str | None = None
        self._streams: tuple[str, ...] = ()
        self._turn_at: float | None = None
        self._began = self._flush_at = 0.0
        self._failures = 0
        self._broken = False

    def say(self, piece: str) -> None:
        """Another piece of the answer."""
        with self._lock:
            self._said.append(piece)

    def seen(self, row: Job) -> None:
        """Nothing new: whoever asked in a thread was there from the start."""

    def flush(self) -> None:
        """Send what there is to send, if it is time."""
        now = self._monotonic()
        if now < self._flush_at:
            return
        self._flush_at = now + FLUSH_SECONDS
        self._take_note()
        if self._ts is not None and now - self._began > ROLL_SECONDS:
            self._try(lambda: self._stop(self._draft.closing()))
        while not self._broken:
            text, ends = self._draft.next()
            if not text and not ends:
                return
            if self._ts is None and not self._has_turn():
                return
            if not self._try(partial(self._send, text, ends)):
                return

    def end(self) -> None:
        """The attempt is over: send the rest, and end the message. Nothing new is begun."""
        self._take_note()
        if self._ts is not None and not self._broken:
            text, _ = self._draft.next(last=True)
            self._try(lambda: self._stop(text + self._draft.closing(text)))

    def _has_turn(self) -> bool:
        """Whether the channel takes another message now."""
        if self._turn_at is None:
            self._turn_at = self._monotonic() + self._turn(self._origin.channel)
        return self._monotonic() >= self._turn_at

    def _take_note(self) -> None:
        with self._lock:
            said, self._said = self._said, []
        for piece in said:
            self._draft.add(piece)

    def _send(self, text: str, ends: bool) -> None:  # noqa: FBT001  as the draft has it
        if self._ts is None:
            self._start(text)
            self._draft.sent(text)
            text = ""
        if ends:
            self._stop(text + self._draft.closing(text), text)
        elif text:
            sent = escaped(text)
            self._api.call("chat.appendStream", channel=self._origin.channel, ts=self._ts, markdown_text=sent)
            self._draft.sent(text)

    def _start(self, text: str) -> None:
        """Begin a message; note it in the row, or take it back where the job is ours no more."""
        for draft in () if self._streams else self._origin.streams:  # of an attempt that came to nothing
            with suppress(Untold):
                self._api.call("chat.delete", channel=self._origin.channel, ts=draft)
        reply = self._api.call(
            "chat.startStream",
            channel=self._origin.channel,
            thread_ts=self._origin.thread_ts,
            recipient_team_id=self._origin.team,
            recipient_user_id=self._origin.user,
            markdown_text=escaped(text) or None,
        )
        self._ts, self._began, self._turn_at = str(reply["ts"]), self._monotonic(), None
        self._streams = (*self._streams, self._ts)
        try:
            self._record(self._job, replace(self._origin, streams=self._streams))
        except (Conflict, PortUnavailable):
            self._broken = True
            self._api.call("chat.delete", channel=self._origin.channel, ts=self._ts)

    def _stop(self, text: str, of_answer: str = "") -> None:
        sent = escaped(text) or None
        self._api.call("chat.stopStream", channel=self._origin.channel, ts=self._ts, markdown_text=sent)
        self._draft.sent(of_answer)
        self._draft.cut()
        self._ts = None

    def _try(self, do: Callable[[], Any]) -> bool:
        """Whether it went well. What may pass is waited for; a message that takes no more is followed by another."""
        try:
            do()
        except Untold as error:
            if error.message in ENDED:
                self._draft.cut()
                self._ts = None
                return False
            self._failures += 1
            self._broken = self._broken or not error.again or self._failures > FAILURES_MAX
            self._flush_at = self._monotonic() + (error.retry_after_seconds or PAUSE_SECONDS)
            if self._broken:
                self._journal.note("slack_stream_broken", job_id=self._job.job_id, reason=error.message)
            return False
        return not self._broken
