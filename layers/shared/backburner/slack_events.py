"""What Slack sends: messages, buttons, slash commands. A signed request in, a durable job out, well within a second.

Slack wants its 200 within three seconds and sends an event again otherwise, up to three times; so a message's job has
an id made of channel and timestamp, and 200 means that the job is durable. Answers are told by channels/slack.py.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import re
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from backburner.documents import json_text, problem_document
from backburner.errors import (
    IdempotencyConflict,
    InternalError,
    InvalidRequest,
    JobIsFinal,
    JobNotFound,
    NotFromSlack,
    PayloadMissing,
    PortUnavailable,
    Refusal,
    SlackNotConfigured,
    TooLarge,
    Unavailable,
)
from backburner.intake import trail_of
from backburner.models import Client, JobRequest, SlackOrigin, Trail
from backburner.ports import Clock, Journal, Marks
from backburner.slack_text import RETRY, STOP, is_slacks, plain_text
from backburner.submission import Submission

type Handler = Callable[[dict[str, Any], Any], dict[str, Any]]
type Json = dict[str, Any]

CLOCK_SECONDS: Final = 300
"""A request signed longer ago, or so far in the future, is not taken: Slack's own advice against replays."""
BODY_BYTES_MAX: Final = 1_000_000
DEADLINE_SECONDS: Final = 1_800
"""Who asks in a chat has gone by then."""
PROMPT_CHARACTERS_MAX: Final = 20_000
"""Five times what Slack lets people type; so it fits into the row, whatever the characters."""
FILES_MAX, FILE_CHARACTERS_MAX = 10, 100
HOOK_SECONDS: Final = 1.0
"""For the one call that is made while Slack waits."""
PEOPLES_SUBTYPES: Final = frozenset({"", "file_share", "thread_broadcast", "me_message"})
"""Messages that people write; all other subtypes are edits, deletions, joins, topics, other apps' messages …"""

HELP = "Ask me something: write your question after my name, or send it to me directly."
NO_FILES = "I cannot read files. Put what I should know into the message, and ask again."
SLOW_DOWN = "That was a lot within one minute. Please wait a moment and ask again."
CANNOT = "I cannot take any more questions just now. Please ask again later."
TOO_OLD = "This question is no longer kept. Please ask it again."
COMMAND_HELP = "Write your question after the command, such as `/ask What is a monad?`"
ON_IT = "On it. The answer will be here in a moment."

_CHANNEL = re.compile(r"[A-Z0-9]{3,24}")
_TS = re.compile(r"[0-9]{1,12}\.[0-9]{1,9}")
_STAMP = re.compile(r"[0-9]{1,12}")
_USER = re.compile(r"[UW][A-Z0-9]{2,24}")


def is_genuine(secret: str, headers: Mapping[str, str], body: bytes, now_seconds: float) -> bool:
    """Whether Slack has signed this body within the last five minutes. `headers` have lower-case names.

    The same as slack_sdk.signature, which raises on junk and brings in the whole SDK.
    Source: https://docs.slack.dev/authentication/verifying-requests-from-slack
    """
    stamp, given = headers.get("x-slack-request-timestamp", ""), headers.get("x-slack-signature", "")
    if not _STAMP.fullmatch(stamp) or abs(now_seconds - int(stamp)) > CLOCK_SECONDS:
        return False
    wanted = hmac.new(secret.encode(), b"v0:%b:%b" % (stamp.encode(), body), hashlib.sha256).hexdigest()
    return hmac.compare_digest(f"v0={wanted}".encode(), given.encode(errors="replace"))


# ── What a message is ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Said:
    """A person's message that is, or may be, meant for us. `text` is as Slack writes it; `own` are our user ids.

    addressed: it mentions us or was sent to us directly; else it is a reply in a thread, perhaps one of ours.
    """

    origin: SlackOrigin
    text: str
    own: frozenset[str]
    files: tuple[str, ...]
    addressed: bool

    @property
    def key(self) -> str:
        """The same for every copy of the message: resent, shared with another workspace, as mention and as message."""
        return f"{self.origin.channel}:{self.origin.message_ts}"

    @property
    def prompt(self) -> str:
        """The question, with the names of files that go unread; empty if there is none."""
        text = plain_text(self.text, self.own)
        if len(text) > PROMPT_CHARACTERS_MAX:
            text = f"{text[:PROMPT_CHARACTERS_MAX]}\n\n[The rest of the message is cut off.]"
        if text and self.files:
            return f"{text}\n\n[Files were attached that you cannot read: {', '.join(self.files)}]"
        return text


def said_in(envelope: Json) -> Said | None:
    """The message in an `event_callback`; None for bots, edits, deletions, joins and whatever else starts nothing."""
    event, own = envelope.get("event"), _own_ids(envelope)
    if not isinstance(event, dict) or not _is_a_persons(event, envelope, own):
        return None
    channel, ts, text, thread_ts = (_text(event, name) for name in ("channel", "ts", "text", "thread_ts"))
    if not _CHANNEL.fullmatch(channel) or not _TS.fullmatch(ts):
        return None
    thread_ts = thread_ts if _TS.fullmatch(thread_ts) else ts
    direct = _text(event, "channel_type") == "im" or channel.startswith("D")
    mentioned = _text(event, "type") == "app_mention" or any(re.search(rf"<@{bot}[|>]", text) for bot in own)
    if not direct and not mentioned and (thread_ts == ts or re.match(r"\s*<@", text)):
        return None  # among others, or to another
    files = event.get("files")
    origin = SlackOrigin(
        channel=channel,
        thread_ts=thread_ts,
        message_ts=ts,
        user=_text(event, "user"),
        team=_text(envelope, "team_id"),
        surface="im" if direct else "channel",
    )
    return Said(
        origin=origin,
        text=text,
        own=own,
        files=tuple(_file_name(file) for file in files[:FILES_MAX]) if isinstance(files, list) else (),
        addressed=direct or mentioned,
    )


def _is_a_persons(event: Json, envelope: Json, own: frozenset[str]) -> bool:
    """Whether a person wrote it, just now: by any of the marks, since no single one is on all that bots write.

    Slack sends a mention anew whenever its message is edited, marked `edited`. A resend is a copy of what did not get
    through, so a message comes again without that mark, whatever became of it since.
    """
    user = _text(event, "user")
    return (
        _text(event, "type") in ("app_mention", "message")
        and _text(event, "subtype") in PEOPLES_SUBTYPES
        and not event.get("hidden")
        and not event.get("edited")
        and not event.get("bot_id")
        and not event.get("bot_profile")
        and (not event.get("app_id") or event["app_id"] != envelope.get("api_app_id"))
        and _USER.fullmatch(user) is not None
        and user not in own
        and user != "USLACKBOT"
    )


def _own_ids(envelope: Json) -> frozenset[str]:
    authorizations = envelope.get("authorizations")
    return frozenset(
        _text(entry, "user_id")
        for entry in (authorizations if isinstance(authorizations, list) else ())
        if isinstance(entry, dict) and entry.get("is_bot") and _USER.fullmatch(_text(entry, "user_id"))
    )


def _file_name(file: Any) -> str:
    name = (_text(file, "name") or _text(file, "title")) if isinstance(file, dict) else ""
    return name[:FILE_CHARACTERS_MAX] or "a file"


def _text(fields: Mapping[str, Any], name: str) -> str:
    """A text field, without halves of surrogate pairs, which can be neither stored nor sent; else empty."""
    value = fields.get(name)
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") if isinstance(value, str) else ""


# ── The endpoint ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SlackDesk:
    """Takes in what Slack sends.

    client: the one client that all people in Slack are, with the limits of one.
    signing_secret: the app's; renewed: reads it again, and says whether it differs from the one that did not fit.
    user_requests_per_minute: of each person; 0 for any number. api_base_url: empty for Slack itself.
    trail: of the request at hand.
    """

    client: Callable[[], Client]
    submission: Submission
    marks: Marks
    signing_secret: Callable[[], str]
    renewed: Callable[[str], bool]
    clock: Clock
    journal: Journal
    system_prompt: str = ""
    model: str = ""
    user_requests_per_minute: int = 0
    api_base_url: str = ""
    trail: Trail | None = None

    def handle(self, event: Json, _context: Any) -> Json:
        """An API Gateway event in, its reply out. 5xx where the job is not known to be durable, so Slack resends."""
        trail = trail_of(event, os.environ)
        with self.journal.about(correlation_id=trail.correlation_id):
            return replace(self, trail=trail).answer(event)

    def answer(self, event: Json) -> Json:
        """The reply to the request at hand."""
        try:
            return self._reply(event)
        except Refusal as refusal:
            self.journal.note("request_refused", code=refusal.code, cause=_cause(refusal))
            return _problem(refusal)
        except PortUnavailable as error:
            self.journal.note("request_refused", code=Unavailable.code, cause=error.message)
            return _problem(Unavailable())
        except Exception as error:  # noqa: BLE001  a gateway's 502 would hold the error's text
            self.journal.note("request_faulted", error=type(error).__name__)
            return _problem(InternalError())

    def _reply(self, event: Json) -> Json:
        headers = {str(name).lower(): str(value) for name, value in (event.get("headers") or {}).items()}
        body = _raw_body(event)
        self._check(headers, body)
        path = str(event.get("path") or "").rstrip("/").rpartition("/")[2]
        match path:
            case "events":
                return self._event(_parsed(body), retry=headers.get("x-slack-retry-num"))
            case "interactions":
                return self._interaction(_parsed(_form(body).get("payload", "").encode()))
            case _:
                return self._command(_form(body))

    def _check(self, headers: Mapping[str, str], body: bytes) -> None:
        """Raises NotFromSlack unless Slack has signed the request, SlackNotConfigured where nothing can be signed."""
        secret, now_seconds = self.signing_secret(), self.clock.now() / 1000
        if secret and is_genuine(secret, headers, body, now_seconds):
            return
        if self.renewed(secret):  # it was changed since this function read it
            secret = self.signing_secret()
            if secret and is_genuine(secret, headers, body, now_seconds):
                return
        raise NotFromSlack if secret else SlackNotConfigured

    # ── Events ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _event(self, envelope: Json, retry: str | None) -> Json:
        match envelope.get("type"):
            case "url_verification":
                return _json(200, {"challenge": _text(envelope, "challenge")})
            case "app_rate_limited":
                self.journal.note("slack_events_dropped", minute=envelope.get("minute_rate_limited"))
            case "event_callback":
                said = said_in(envelope)
                if said is not None and (said.addressed or self._takes_part(said.origin)):
                    self._take(said, retry)
        return _json(200, {})

    def _takes_part(self, origin: SlackOrigin) -> bool:
        """Whether we were asked in this thread before: at its root, or in a reply."""
        root = f"{origin.channel}:{origin.thread_ts}"
        return self.submission.knows(self.client(), root) or self.marks.is_marked(_thread_mark(origin))

    def _take(self, said: Said, retry: str | None) -> None:
        """Make a job of a message, or of what is to be said about it without one."""
        origin, prompt = said.origin, said.prompt
        if said.addressed and origin.surface == "channel" and origin.thread_ts != origin.message_ts:
            until = self.clock.now() // 1000 + self.submission.retention_seconds
            self.marks.admit(_thread_mark(origin), "asked", limit=1, until=until)
        if not prompt:
            self._say(said.key, origin, NO_FILES if said.files else HELP)
        elif not self._may_ask(origin.user, origin.message_ts or ""):
            minute = _minute(origin.message_ts or "")
            self._say(f"slow:{origin.user}:{minute}", origin, SLOW_DOWN)  # once a minute, however much comes
        else:
            self._ask(self._request(prompt, origin), said.key, origin)
        self.journal.note("slack_message_taken", channel=origin.channel, retry=retry, surface=origin.surface)

    def _request(self, prompt: str, origin: SlackOrigin) -> JobRequest:
        return JobRequest(
            prompt=prompt,
            system_prompt=self.system_prompt or None,
            model=self.model or None,
            user_id=origin.user,
            priority="interactive",
            deadline_seconds=DEADLINE_SECONDS,
        )

    def _ask(self, request: JobRequest, key: str, origin: SlackOrigin) -> None:
        """Accept the job; what stands against it for longer than a resend is told in the thread."""
        try:
            self.submission.accept(self.client(), request, key, slack=origin, trail=self.trail)
        except IdempotencyConflict:
            pass  # a copy from before this deployment's settings changed
        except Unavailable:
            raise
        except Refusal as refusal:
            self.journal.note("slack_message_refused", code=refusal.code)
            self._say(key, origin, CANNOT)

    def _say(self, key: str, origin: SlackOrigin, text: str) -> None:
        self.submission.say(self.client(), key, text, slack=origin)

    def _may_ask(self, user: str, item: str) -> bool:
        """Whether this is one of the person's first requests of its minute; the same one asked again is no other."""
        limit, minute = self.user_requests_per_minute, _minute(item)
        if limit == 0:
            return True
        until = (minute + 10) * 60
        return self.marks.admit(f"slack-user#{user}#{minute}", item, limit=limit, until=until)

    # ── Buttons ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _interaction(self, payload: Json) -> Json:
        actions = payload.get("actions")
        action = actions[0] if isinstance(actions, list) and actions and isinstance(actions[0], dict) else {}
        job_id = _text(action, "value")[:128]
        user = payload.get("user") if isinstance(payload.get("user"), dict) else {}
        container = payload.get("container") if isinstance(payload.get("container"), dict) else {}
        match _text(action, "action_id"):
            case name if name == STOP:
                self._replace(payload, self._stop(job_id))
            case name if name == RETRY:
                who, here = _text(user or {}, "id"), _text(payload, "response_url")
                note = self._retry(job_id, who, _text(action, "action_ts"), _text(container or {}, "message_ts"), here)
                if note:
                    self._whisper(payload, note)
        return _json(200, {})

    def _stop(self, job_id: str) -> str:
        try:
            self.submission.cancel(self.client(), job_id)
        except (JobIsFinal, JobNotFound):
            return "There was nothing to stop any more."
        return "Stopped."

    def _retry(self, job_id: str, user: str, action_ts: str, message_ts: str, response_url: str) -> str:
        """Run a failed job again, as a new one; pressed twice it is the same one. Returns what to tell who pressed.

        response_url: the pressed button's own; a command's may have lapsed by now.
        """
        try:
            job = self.submission.find(self.client(), job_id)
        except JobNotFound:
            return TOO_OLD
        if job.slack is None or not job.status.is_final or job.error is None:
            return ""
        if not self._may_ask(user, action_ts if _TS.fullmatch(action_ts) else job_id):
            return SLOW_DOWN
        again = replace(
            job.slack,
            failed_ts=message_ts if _TS.fullmatch(message_ts) else None,
            streams=(),
            response_url=(response_url or job.slack.response_url) if job.slack.response_url else None,
        )
        try:
            request = self.submission.request_of(job)
        except PayloadMissing:
            return TOO_OLD
        self._ask(request, f"retry:{job.job_id}", again)
        return ""

    def _replace(self, payload: Json, text: str) -> None:
        self._post_hook(payload, {"replace_original": True, "text": text})

    def _whisper(self, payload: Json, text: str) -> None:
        self._post_hook(payload, {"replace_original": False, "response_type": "ephemeral", "text": text})

    def _post_hook(self, payload: Json, message: Json) -> None:
        """Change the pressed button's message, if Slack takes it at once: nothing else depends on it."""
        url = _text(payload, "response_url")
        if not is_slacks(url, self.api_base_url):
            return
        request = urllib.request.Request(  # noqa: S310  to Slack, as checked
            url, data=json_text(message).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=HOOK_SECONDS).close()  # noqa: S310
        except OSError as error:
            self.journal.note("slack_button_unchanged", error=type(error).__name__)

    # ── Commands ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _command(self, form: Mapping[str, str]) -> Json:
        """A slash command. Slack does not send it again, so whatever stands against it is told at once."""
        if form.get("ssl_check"):
            return _json(200, {})
        prompt, channel, user = (
            plain_text(form.get("text", ""))[:PROMPT_CHARACTERS_MAX],
            form.get("channel_id", ""),
            form.get("user_id", ""),
        )
        if not _CHANNEL.fullmatch(channel) or not _USER.fullmatch(user) or not form.get("trigger_id"):
            raise InvalidRequest("not a slash command")
        if not prompt:
            return _json(200, {"response_type": "ephemeral", "text": COMMAND_HELP})
        now = self.clock.now() / 1000
        trigger = form["trigger_id"][:200]
        if not self._may_ask(user, f"{now:.6f}"):
            return _json(200, {"response_type": "ephemeral", "text": SLOW_DOWN})
        origin = SlackOrigin(
            channel=channel,
            user=user,
            team=form.get("team_id", ""),
            surface="command",
            response_url=form.get("response_url") or None,
        )
        try:
            self.submission.accept(
                self.client(), self._request(prompt, origin), f"command:{trigger}", slack=origin, trail=self.trail
            )
        except IdempotencyConflict:
            pass
        except Refusal as refusal:
            self.journal.note("slack_message_refused", code=refusal.code)
            return _json(200, {"response_type": "ephemeral", "text": CANNOT})
        return _json(200, {"response_type": "ephemeral", "text": ON_IT})


def _thread_mark(origin: SlackOrigin) -> str:
    return f"slack-thread#{origin.channel}#{origin.thread_ts}"


def _minute(ts: str) -> int:
    return int(float(ts)) // 60 if _TS.fullmatch(ts) else 0


def _raw_body(event: Json) -> bytes:
    """The very bytes that were sent. Raises NotFromSlack, TooLarge."""
    text = event.get("body") or ""
    try:
        body = base64.b64decode(text, validate=True) if event.get("isBase64Encoded") else text.encode()
    except (binascii.Error, ValueError) as error:
        raise NotFromSlack from error
    if len(body) > BODY_BYTES_MAX:
        raise TooLarge(f"The body is larger than {BODY_BYTES_MAX} bytes.")
    return bytes(body)


def _parsed(body: bytes) -> Json:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is not JSON") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def _form(body: bytes) -> dict[str, str]:
    try:
        return dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100))
    except ValueError as error:
        raise InvalidRequest("the body is not a form") from error


def _cause(refusal: Refusal) -> str | None:
    cause = refusal.__cause__
    return cause.message if isinstance(cause, PortUnavailable) else None


def _json(status: int, document: Json, media_type: str = "application/json") -> Json:
    headers = {"Content-Type": media_type}
    return {"statusCode": status, "headers": headers, "body": json_text(document), "isBase64Encoded": False}


def _problem(refusal: Refusal) -> Json:
    reply = _json(refusal.http_status, problem_document(refusal), "application/problem+json")
    if refusal.retry_after_seconds is not None:
        reply["headers"]["Retry-After"] = str(refusal.retry_after_seconds)
    return reply


__all__ = ["SlackDesk", "is_genuine", "said_in"]
