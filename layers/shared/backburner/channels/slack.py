"""Telling in Slack: the answer in the thread that asked for it, once, whole and harmless.

Each message carries, in metadata that people do not see, which part of which job's answer it is. Another try reads the
thread first and goes on after what it finds there, so a reply that was lost makes no second message. What is left: a
try that begins before Slack shows what it took a second ago, and channels that the app may post in but not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from backburner.channels.slack_api import SlackApi
from backburner.errors import PayloadMissing, Untold
from backburner.models import SLACK, Job, JobStatus, Payload, SlackOrigin
from backburner.ports import Clock, Journal, Line, PayloadStore
from backburner.slack_text import RETRY, escaped_plainly, is_slacks, split

WAITS_SECONDS: Final = (1, 3, 10, 60, 300, 900, 3_600)
"""Between the tries: people wait. Slack's own Retry-After wins where it is longer."""
TELLING_MS_MAX: Final = 40_000
"""An answer of more messages than fit into this goes on in another try."""
SPACING_MICROS: Final = 1_000_000
"""Slack takes one message a second and channel."""
TURN_SECONDS_MAX: Final = 15.0
"""A longer wait for the channel's turn is given back rather than slept."""
LINE_KEPT_SECONDS: Final = 3_600
PAGES_MAX, PAGE_MESSAGES = 5, 200
HOOK_POSTS_MAX, HOOK_CHARACTERS_MAX = 5, 3_500
"""Slack takes five posts to a `response_url`, and cuts up longer texts as it likes."""
QUESTION_CHARACTERS_MAX: Final = 300
EVENT_TYPE: Final = "backburner_message"
"""`event_type` of the metadata; its payload is `{"job_id", "run", "part", "kind"}`, kind `answer` or `notice`.

A later question in the thread is told the answers; whatever else we say is a notice.
"""
BLOCKS_REFUSED: Final = frozenset({"invalid_blocks", "invalid_blocks_format", "msg_blocks_too_long"})

CUT_OFF = "\n\n_(The answer ends here because it reached its token limit.)_"
STOPPED = "Stopped."
GONE = "The answer is no longer stored."
REST = "\n\n_(The rest is too long for here. Ask me in a channel that I am a member of.)_"
SENTENCES: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("rate_limited", "overloaded", "provider_error", "timeout", "connection"),
        "The model could not answer: its provider is overloaded or out of reach, and I tried several times.",
    ),
    **dict.fromkeys(
        ("quota_exhausted", "spend_limit", "authentication", "model_not_found", "unreachable", "undeliverable"),
        "I cannot answer at the moment, and asking again does not help: whoever runs me has been told.",
    ),
    **dict.fromkeys(("content_filtered", "refused"), "The model declined to answer this."),
    "context_length_exceeded": "This conversation is too long for me. Ask again in a new thread, with what matters.",
    "empty_answer": "The model had nothing to say to this.",
    "deadline_passed": "I could not get to this in time.",
}
OTHERWISE = "Something went wrong while I worked on this."
FINAL_CODES: Final = frozenset({"content_filtered", "context_length_exceeded", "invalid_request", "refused"})
"""Failures that the same question meets again, so there is no button."""


@dataclass(frozen=True, slots=True)
class _Message:
    text: str
    kind: str
    blocks: tuple[dict[str, Any], ...]


class SlackChannel:
    """A Slack thread, as ports.Channel."""

    waits_seconds: Sequence[float] = WAITS_SECONDS

    def __init__(
        self,
        api: SlackApi,
        *,
        payloads: PayloadStore,
        line: Line,
        clock: Clock,
        journal: Journal,
        api_base_url: str = "",
    ) -> None:
        self._api, self._payloads, self._line = api, payloads, line
        self._clock, self._journal, self._api_base_url = clock, journal, api_base_url

    def tell(self, job: Job) -> None:
        """Post what became of the job. Raises Untold."""
        origin = job.slack
        if origin is None:
            raise Untold("no_slack_thread")
        tries = next((notice.tries for notice in job.outbox if notice.target == SLACK), 1)
        posted = self._posted(job, origin) if tries > 1 else {}
        try:
            self._post(job, origin, posted)
        except Untold as error:
            if origin.response_url is None or posted or error.again:
                raise
            self._post_to_hook(job, origin.response_url)  # a command may be given where the app may not post

    # ── Posting ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _post(self, job: Job, origin: SlackOrigin, posted: dict[int, str]) -> None:
        """Post what is not posted yet, in order; in the thread, or below the first message where there is none."""
        ends_at = self._clock.now() + TELLING_MS_MAX
        messages = self._messages(job, origin)
        # A part of an answer that did not come to its end stays as it is.
        streams = origin.streams if job.status is JobStatus.COMPLETED else ()
        self._end_streams(origin)
        for part, message in enumerate(messages):
            if part in posted:
                continue
            if self._clock.now() > ends_at:
                raise Untold("unfinished", again=True)
            payload = {"job_id": job.job_id, "run": job.claims, "part": part, "kind": message.kind}
            if part < len(streams) and self._lay_over(origin.channel, streams[part], message, payload):
                posted[part] = streams[part]
                continue
            self._take_turn(origin.channel)
            thread_ts = origin.thread_ts or (posted.get(0) if part else None)
            posted[part] = self._post_one(origin.channel, thread_ts, message, payload)
        for ts in streams[len(messages) :]:  # more than the answer needs
            self._take_away(origin.channel, ts)

    def _end_streams(self, origin: SlackOrigin) -> None:
        """End what is still open of an answer shown while it was written. Raises Untold for what may pass."""
        for ts in origin.streams:
            try:
                self._api.call("chat.stopStream", channel=origin.channel, ts=ts)
            except Untold as error:
                if error.again:
                    raise

    def _lay_over(self, channel: str, ts: str, message: _Message, payload: Mapping[str, Any]) -> bool:
        """Put a part of the answer in the place of what was shown while it was written; whether that was possible."""
        try:
            self._api.call(
                "chat.update",
                channel=channel,
                ts=ts,
                text=message.text,
                blocks=list(message.blocks),
                metadata={"event_type": EVENT_TYPE, "event_payload": payload},
            )
        except Untold as error:
            if error.again:
                raise
            self._journal.note("slack_stream_not_updated", reason=error.message)
            self._take_away(channel, ts)
            return False
        return True

    def _take_away(self, channel: str, ts: str) -> None:
        try:
            self._api.call("chat.delete", channel=channel, ts=ts)
        except Untold as error:
            if error.again:
                raise

    def _post_one(self, channel: str, thread_ts: str | None, message: _Message, payload: Mapping[str, Any]) -> str:
        """Post one message; return its ts. What Slack does not take in blocks goes as plain text."""
        arguments = {
            "channel": channel,
            "thread_ts": thread_ts,
            "text": message.text,  # for notifications, and for the history that a later question reads
            "metadata": {"event_type": EVENT_TYPE, "event_payload": payload},
            "unfurl_links": False,
            "unfurl_media": False,
        }
        try:
            reply = self._api.call("chat.postMessage", **arguments, blocks=list(message.blocks))
        except Untold as error:
            if error.message not in BLOCKS_REFUSED:
                raise
            self._journal.note("slack_blocks_refused", reason=error.message)
            reply = self._api.call("chat.postMessage", **arguments)
        return str(reply["ts"])

    def _take_turn(self, channel: str) -> None:
        """Wait for the channel's next free second, among all notifiers. Raises Untold where that is far off."""
        wait_seconds = seconds_to_turn(self._line, self._clock, channel)
        if wait_seconds > TURN_SECONDS_MAX:
            raise Untold("channel_busy", again=True, retry_after_seconds=wait_seconds)
        if wait_seconds > 0:
            self._clock.sleep(wait_seconds)

    def _post_to_hook(self, job: Job, url: str) -> None:
        """Tell the one who gave the command, as far as five posts go. Slack's markup there knows no Markdown blocks."""
        if not is_slacks(url, self._api_base_url):
            raise Untold("not_a_slack_address")
        parts = [part.sent for part in split(self._text(job), HOOK_CHARACTERS_MAX)]
        if len(parts) > HOOK_POSTS_MAX:
            parts = [*parts[: HOOK_POSTS_MAX - 1], parts[HOOK_POSTS_MAX - 1] + REST]
        button = self._button(job)  # of a failure, which is one short text
        for part in parts:
            blocks = [_section(part), *button] if button else None
            self._api.post_to_hook(url, text=part, blocks=blocks, response_type="ephemeral", replace_original=False)

    # ── What is there already ─────────────────────────────────────────────────────────────────────────────────────

    def _posted(self, job: Job, origin: SlackOrigin) -> dict[int, str]:
        """The parts that an earlier try has posted, with their ts. Raises Untold if that cannot be known just now."""
        root, found = origin.thread_ts, dict[int, str]()
        try:
            if root is None:
                oldest = f"{job.created_at // 1000}.000000"
                found = self._parts_in("conversations.history", job, channel=origin.channel, oldest=oldest)
                root = found.get(0)
            if root is not None:
                oldest = origin.message_ts or root
                found |= self._parts_in("conversations.replies", job, channel=origin.channel, ts=root, oldest=oldest)
        except Untold as error:
            if error.again:
                raise
            self._journal.note("slack_thread_unread", job_id=job.job_id, reason=error.message)
            return {}
        return found

    def _parts_in(self, method: str, job: Job, **where: Any) -> dict[int, str]:
        found: dict[int, str] = {}
        cursor: str | None = None
        for _ in range(PAGES_MAX):
            page = self._api.call(method, **where, cursor=cursor, limit=PAGE_MESSAGES, include_all_metadata=True)
            for message in page.get("messages", []):
                payload = payload_of(message)
                if (payload.get("job_id"), payload.get("run")) == (job.job_id, job.claims):
                    found[int(payload["part"])] = message["ts"]
            cursor = (page.get("response_metadata") or {}).get("next_cursor")
            if not cursor:
                break
        return found

    # ── What is said ──────────────────────────────────────────────────────────────────────────────────────────────

    def _messages(self, job: Job, origin: SlackOrigin) -> list[_Message]:
        text = self._text(job)
        if job.status is JobStatus.COMPLETED:
            kind = "answer" if job.claims and text != GONE else "notice"  # without a claim no model was asked
            sent = [part.sent for part in split(text)]
            messages = [_Message(part, kind, ({"type": "markdown", "text": part},)) for part in sent]
        else:
            said = escaped_plainly(text)
            messages = [_Message(said, "notice", (_section(said), *self._button(job)))]
        if origin.surface == "command":
            messages[0] = replace(messages[0], blocks=(self._asked(job, origin), *messages[0].blocks))
        return messages

    @staticmethod
    def _button(job: Job) -> tuple[dict[str, Any], ...]:
        """The button of a failure that asking again can mend; else nothing."""
        failed = job.status not in (JobStatus.COMPLETED, JobStatus.CANCELLED)
        return (button_row("Try again", RETRY, job.job_id),) if failed and _code(job) not in FINAL_CODES else ()

    def _text(self, job: Job) -> str:
        """The answer, or one sentence about why there is none."""
        if job.status is JobStatus.CANCELLED:
            return STOPPED
        if job.status is not JobStatus.COMPLETED:
            return SENTENCES.get(_code(job), OTHERWISE)
        result = self._stored(job.result)
        if result is None:
            return GONE
        return (str(result["text"]) or GONE) + (CUT_OFF if result.get("finish_reason") == "length" else "")

    def _asked(self, job: Job, origin: SlackOrigin) -> dict[str, Any]:
        """Who asked what: nobody but them has seen the command."""
        request = self._stored(job.request) or {}
        question = str(request.get("prompt", ""))
        short = question if len(question) <= QUESTION_CHARACTERS_MAX else f"{question[:QUESTION_CHARACTERS_MAX]}…"
        text = f"<@{origin.user}> asked: {escaped_plainly(short)}"
        return {"type": "context", "elements": [{"type": "mrkdwn", "text": text}]}

    def _stored(self, payload: Payload | None) -> dict[str, Any] | None:
        if payload is None:
            return None
        try:
            text = payload.text if payload.text is not None else self._payloads.get(payload.key or "")
        except PayloadMissing:
            return None
        fields = json.loads(text)
        return fields if isinstance(fields, dict) else None


def seconds_to_turn(line: Line, clock: Clock, channel: str) -> float:
    """Take the channel's next free second; how long it is until then. Raises PortUnavailable."""
    now = clock.now()
    until = now // 1000 + LINE_KEPT_SECONDS
    place = line.advance(f"slack-channel#{channel}", now * 1000, SPACING_MICROS, until)
    return max(0.0, (place - now * 1000) / 1_000_000)


def _code(job: Job) -> str:
    return job.error.code if job.error is not None else ""


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}}


def button_row(label: str, action_id: str, value: str) -> dict[str, Any]:
    """A row with one button."""
    element = {"type": "button", "text": {"type": "plain_text", "text": label}, "action_id": action_id, "value": value}
    return {"type": "actions", "elements": [element]}


def payload_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Our own metadata of a message; empty for anybody else's."""
    metadata = message.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("event_type") != EVENT_TYPE:
        return {}
    payload = metadata.get("event_payload")
    return payload if isinstance(payload, dict) else {}
