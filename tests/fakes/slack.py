"""A fake Slack: a real HTTP server that the official slack-sdk talks to over loopback, and the sender of its events.

    with FakeSlack() as slack:
        WebClient(token=slack.token, base_url=slack.base_url).chat_postMessage(channel="C0000CHN1", text="hello")
        event = slack.say("<@U0000BOT1> list three rivers")          # a person's message, and the event it causes
        body, headers = slack.signed(slack.envelope(event))          # as Slack would POST it
        slack.script("chat.postMessage", {"status": 429, "headers": {"Retry-After": "2"}})
        assert [call.error for call in slack.calls("chat.postMessage")] == ["ratelimited", None]

It keeps the documented limits and error shapes (https://docs.slack.dev/reference/methods): errors come as `ok: false`
in a 200, too many requests as 429 with Retry-After: one message a second and channel with a short burst, the least that
the tier of any other method allows a minute. A message's markdown ends at 12,000 characters, a stream after
`stream_seconds`. `python -m tests.fakes.slack --port 8901` runs it
in a process of its own, steered over HTTP:

    GET    /_control/ledger       the calls, oldest first         DELETE  forgets calls, scripts and messages
    GET    /_control/messages     what the channels hold          ?channel=C…&thread_ts=…
    POST   /_control/messages     a person says something: {"text": …, "channel": …, "thread_ts": …, "user": …}
    POST   /_control/hooks        a new response_url
    PUT    /_control/config       change fields of `Config`
    POST   /_control/scripts      {"method": "chat.postMessage", "match": "text in it", "steps": [{"error": "…"}]}

Each call whose method and content match uses up one step: {"error": …} or {"status": …, "headers": …, "body": …} is the
answer; {"lost": true} does what was asked and closes the connection without a reply; {"delay_seconds": …} waits first;
{} does nothing out of the ordinary. After the last step all is well again.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import itertools
import json
import math
import re
import signal
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

__all__ = ["Config", "FakeSlack", "SlackCall", "signed"]

type Json = dict[str, Any]

TEAM, APP, BOT_USER, BOT_ID = "T0000HOME", "A0000APP1", "U0000BOT1", "B0000BOT1"
CHANNEL, DIRECT, USER = "C0000CHN1", "D0000DM01", "U0000USR1"
SIGNING_SECRET, TOKEN = "fake-slack-signing-secret", "xoxb-fake-slack-token"
TS = re.compile(r"\d{10}\.\d{6}")
MARKDOWN_MAX, TEXT_MAX, SECTION_MAX, BLOCKS_MAX = 12_000, 40_000, 3_000, 50
HOOK_USES, HOOK_SECONDS = 5, 1_800
TIER_2, TIER_3, TIER_4 = 20, 50, 100
TIERS: Mapping[str, int] = {
    "chat.appendStream": TIER_4,
    "chat.delete": TIER_3,
    "chat.postEphemeral": TIER_4,
    "chat.startStream": TIER_2,
    "chat.stopStream": TIER_2,
    "chat.update": TIER_3,
    "conversations.history": TIER_3,
    "conversations.info": TIER_3,
    "conversations.replies": TIER_3,
    "reactions.add": TIER_3,
    "reactions.remove": TIER_2,
    "users.info": TIER_4,
}
"""Calls a minute and method, the least that its tier allows (https://docs.slack.dev/apis/web-api/rate-limits)."""
PAGE_MAX = 999


@dataclass(frozen=True)
class Config:
    """What this workspace is like."""

    messages_per_second: float = 1.0  # a channel
    burst: float = 4.0
    tiers: bool = True
    scopes: str = (
        "app_mentions:read,channels:history,channels:read,chat:write,commands,groups:history,groups:read,im:history,"
        "reactions:write,users:read"
    )
    missing_channels: tuple[str, ...] = ()  # channel_not_found
    closed_channels: tuple[str, ...] = ()  # not_in_channel
    status_in_channels: bool = False  # setStatus works in threads that the app itself began, and in direct messages
    stream_seconds: float = 300.0
    latency_seconds: float = 0.0
    root_on_each_page: bool = False  # of a thread; Slack documents neither


@dataclass(frozen=True)
class SlackCall:
    """One call that arrived."""

    method: str
    arguments: Json
    at: float  # epoch seconds
    error: str | None = None  # what it was answered, "lost" if it had its effect and no answer
    status: int = 200
    ts: str | None = None  # of the message it made


class SlackError(Exception):
    """An error as Slack answers it."""

    def __init__(self, error: str, status: int = 200, headers: Mapping[str, str] | None = None, **more: Any) -> None:
        super().__init__(error)
        self.error, self.status, self.headers, self.more = error, status, dict(headers or {}), more


@dataclass
class Message:
    """A message in a channel."""

    channel: str
    ts: str
    user: str
    text: str
    thread_ts: str | None = None
    bot: bool = False
    blocks: list[Json] = field(default_factory=list)
    metadata: Json | None = None
    ephemeral_for: str | None = None
    streaming_until: float | None = None
    edited: bool = False
    reactions: list[str] = field(default_factory=list)
    subtype: str | None = None
    bot_id: str = BOT_ID  # of a bot's message; another app's has another

    def shown(self, metadata: bool) -> Json:
        """As conversations.replies returns it."""
        body: Json = {"type": "message", "ts": self.ts, "user": self.user, "text": self.text}
        if self.bot:
            body |= {"bot_id": self.bot_id, "blocks": self.blocks}
            body |= {"app_id": APP} if self.bot_id == BOT_ID else {}
        if self.thread_ts:
            body["thread_ts"] = self.thread_ts
        if self.subtype:
            body["subtype"] = self.subtype
        if metadata and self.metadata:
            body["metadata"] = self.metadata
        return body

    @property
    def markdown(self) -> str:
        """What people see of a message of the app: its markdown, else its sections, else its text."""
        texts = [
            block["text"]["text"] if isinstance(block.get("text"), dict) else block.get("text", "")
            for block in self.blocks
            if block.get("type") in ("markdown", "section")
        ]
        return "\n".join(texts) if texts else self.text


def signed(secret: str, body: str | bytes, at: float) -> dict[str, str]:
    """The headers by which Slack vouches for a request.

    Source: https://docs.slack.dev/authentication/verifying-requests-from-slack
    """
    raw = body if isinstance(body, bytes) else body.encode()
    stamp = str(int(at))
    digest = hmac.new(secret.encode(), b"v0:" + stamp.encode() + b":" + raw, hashlib.sha256).hexdigest()
    return {"X-Slack-Request-Timestamp": stamp, "X-Slack-Signature": f"v0={digest}"}


class FakeSlack:
    """The server and the workspace it stands for."""

    def __init__(self, port: int = 0, config: Config | None = None) -> None:
        self.config = config or Config()
        self.token, self.signing_secret = TOKEN, SIGNING_SECRET
        self._port = port
        self._lock = threading.RLock()
        self._serial = itertools.count(1)
        self.reset()

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", self._port), _Handler)
        self._server.slack = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def base_url(self) -> str:
        """As WebClient takes it, and as the template's SlackApiBaseUrl."""
        return f"{self.address}/api/"

    # ── What a test does and sees ─────────────────────────────────────────────────────────────────────────────────

    def reset(self) -> None:
        """Forget calls, scripts and messages; the configuration stays."""
        with self._lock:
            self.ledger: list[SlackCall] = []
            self._messages: list[Message] = []
            self._scripts: list[tuple[str, str, list[Json]]] = []
            self._budget: dict[str, tuple[float, float]] = {}
            self._hooks: dict[str, tuple[str, str, float, int]] = {}
            self.statuses: dict[str, str] = {}

    def configure(self, **changes: Any) -> None:
        known = {name.name for name in fields(Config)}
        if set(changes) - known:
            raise ValueError(f"unknown: {sorted(set(changes) - known)}")
        self.config = replace(self.config, **changes)

    def script(self, method: str, *steps: Json, match: str = "") -> None:
        with self._lock:
            self._scripts.append((method, match, list(steps)))

    def calls(self, method: str, match: str = "") -> list[SlackCall]:
        with self._lock:
            return [call for call in self.ledger if call.method == method and match in json.dumps(call.arguments)]

    def say(
        self,
        text: str,
        *,
        channel: str = CHANNEL,
        user: str = USER,
        thread_ts: str | None = None,
        kind: str = "app_mention",
        **more: Any,
    ) -> Json:
        """A person writes a message; the event that Slack sends for it."""
        message = Message(channel, self.new_ts(), user, text, thread_ts)
        with self._lock:
            self._messages.append(message)
        event = {"type": kind, "user": user, "text": text, "ts": message.ts, "event_ts": message.ts}
        event |= {"channel": channel, "channel_type": "im" if channel.startswith("D") else "channel"}
        if channel.startswith("D"):
            event["type"] = "message"
        return event | ({"thread_ts": thread_ts} if thread_ts else {}) | more

    def envelope(self, event: Json, **more: Any) -> Json:
        """An event as Slack's Events API wraps it."""
        return {
            "type": "event_callback",
            "token": "unused",
            "team_id": TEAM,
            "api_app_id": APP,
            "event_id": f"Ev{next(self._serial):08d}",
            "event_time": int(float(event.get("event_ts", "0"))),
            "event": event,
            "authorizations": [{"team_id": TEAM, "user_id": BOT_USER, "is_bot": True, "is_enterprise_install": False}],
            **more,
        }

    def signed(self, body: Json | str, *, at: float | None = None) -> tuple[str, dict[str, str]]:
        """A body and the headers that go with it."""
        text = body if isinstance(body, str) else json.dumps(body)
        kind = "application/json" if not isinstance(body, str) or body.startswith("{") else _FORM
        return text, {"Content-Type": kind, **signed(self.signing_secret, text, time.time() if at is None else at)}

    def response_url(self, channel: str = CHANNEL, user: str = USER) -> str:
        """Where answers to a slash command or a button may be sent, five times within half an hour."""
        name = f"hook{next(self._serial)}"
        with self._lock:
            self._hooks[name] = (channel, user, time.time(), 0)
        return f"{self.address}/hooks/{name}"

    def messages(self, channel: str | None = None, thread_ts: str | None = None) -> list[Message]:
        """What the channels hold, oldest first; of a thread, without its root."""
        with self._lock:
            return [
                message
                for message in self._messages
                if channel in (None, message.channel) and thread_ts in (None, message.thread_ts)
            ]

    def answers(self, channel: str | None = None, thread_ts: str | None = None) -> list[str]:
        """What people see of the app's messages there, but for those that only one of them sees."""
        found = self.messages(channel, thread_ts)
        return [message.markdown for message in found if message.bot and message.ephemeral_for is None]

    def new_ts(self) -> str:
        return f"{int(time.time())}.{next(self._serial):06d}"

    # ── Calls ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def call(self, method: str, arguments: Json, token: str) -> tuple[int, dict[str, str], Json] | None:
        """The answer to a call: status, headers, body; None for none at all."""
        step = self._step(method, arguments)
        time.sleep(step.get("delay_seconds", self.config.latency_seconds))
        try:
            if "error" in step or "status" in step:
                status = step.get("status", 200)
                usual = "ratelimited" if status == 429 else "internal_error"
                raise SlackError(step.get("error", usual), status, step.get("headers"), **step.get("body", {}))
            if token != self.token:
                raise SlackError("invalid_auth" if token else "not_authed")
            if method not in METHODS:
                raise SlackError("unknown_method")
            needed = needed_scope(method, arguments)
            if needed and needed not in self.config.scopes.split(","):
                raise SlackError("missing_scope", needed=needed, provided=self.config.scopes)
            with self._lock:
                if self.config.tiers and method in TIERS:
                    self._spend(method, TIERS[method] / 60, TIERS[method])
                body = METHODS[method](self, arguments)
        except SlackError as error:
            self._record(SlackCall(method, arguments, time.time(), error.error, error.status))
            return error.status, error.headers, {"ok": False, "error": error.error, **error.more}
        lost = "lost" if step.get("lost") else None
        self._record(SlackCall(method, arguments, time.time(), lost, ts=body.get("ts")))
        if lost:
            return None
        headers = {"x-oauth-scopes": self.config.scopes}
        return 200, headers, {"ok": True, **body}

    def _record(self, call: SlackCall) -> None:
        with self._lock:
            self.ledger.append(call)

    def _step(self, method: str, arguments: Json) -> Json:
        with self._lock:
            content = json.dumps(arguments, ensure_ascii=False)
            for scripted, match, steps in self._scripts:
                if scripted == method and match in content and steps:
                    return steps.pop(0)
        return {}

    def hook(self, name: str, body: Json) -> tuple[int, str]:
        """A post to a response_url."""
        with self._lock:
            step = self._step("response_url", body)
            if "status" in step:
                self._record(SlackCall("response_url", body, time.time(), "scripted", step["status"]))
                return step["status"], "no"
            channel, user, since, uses = self._hooks.get(name, ("", "", 0.0, HOOK_USES))
            gone = uses >= HOOK_USES or time.time() - since > HOOK_SECONDS
            self._record(
                SlackCall("response_url", body, time.time(), "used_url" if gone else None, 404 if gone else 200)
            )
            if gone:
                return 404, "used_url"
            self._hooks[name] = (channel, user, since, uses + 1)
            if body.get("delete_original"):
                return 200, "ok"
            whom = None if body.get("response_type") == "in_channel" else user
            message = Message(channel, self.new_ts(), BOT_USER, str(body.get("text", "")), bot=True, ephemeral_for=whom)
            message.blocks = body.get("blocks") or []
            self._messages.append(message)
            return 200, "ok"

    # ── Methods ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _channel(self, arguments: Json, name: str = "channel") -> str:
        channel = str(arguments.get(name) or "")
        if not re.fullmatch(r"[CDGU][A-Z0-9]{2,}", channel) or channel in self.config.missing_channels:
            raise SlackError("channel_not_found")
        return channel

    def _find(self, arguments: Json, name: str = "ts", missing: str = "message_not_found") -> Message:
        channel, ts = self._channel(arguments), str(arguments.get(name))
        for message in self._messages:
            if (message.channel, message.ts) == (channel, ts):
                return message
        raise SlackError(missing)

    def _spend(self, name: str, rate: float, burst: float) -> None:
        """One of so many a second, by channel or method."""
        now = time.monotonic()
        level, since = self._budget.get(name, (burst, now))
        level = min(burst, level + (now - since) * rate)
        if level < 1:
            self._budget[name] = (level, now)
            raise SlackError("ratelimited", 429, {"Retry-After": str(math.ceil((1 - level) / rate))})
        self._budget[name] = (level - 1, now)

    def _thread_ts(self, arguments: Json) -> str | None:
        ts = arguments.get("thread_ts")
        if ts is not None and not (isinstance(ts, str) and TS.fullmatch(ts)):
            raise SlackError("invalid_thread_ts")
        return ts

    def _content(self, arguments: Json) -> tuple[str, list[Json]]:
        text, markdown = str(arguments.get("text") or ""), arguments.get("markdown_text")
        blocks = _parsed(arguments.get("blocks")) or []
        if markdown is not None:
            if text or blocks:
                raise SlackError("markdown_text_conflict")
            if len(markdown) > MARKDOWN_MAX:
                raise SlackError("msg_too_long")
            return markdown, [{"type": "markdown", "text": markdown}]
        if not text and not blocks:
            raise SlackError("no_text")
        _check_blocks(blocks)
        return text[:TEXT_MAX], blocks

    def _post(self, arguments: Json) -> Json:
        channel = self._channel(arguments)
        if channel in self.config.closed_channels:
            raise SlackError("not_in_channel")
        text, blocks = self._content(arguments)
        thread_ts = self._thread_ts(arguments)
        self._spend(channel, self.config.messages_per_second, self.config.burst)
        message = Message(channel, self.new_ts(), BOT_USER, text, thread_ts, True, blocks)
        message.metadata = _parsed(arguments.get("metadata"))
        self._messages.append(message)
        return {"channel": channel, "ts": message.ts, "message": message.shown(metadata=True)}

    def _post_ephemeral(self, arguments: Json) -> Json:
        channel = self._channel(arguments)
        if not arguments.get("user"):
            raise SlackError("user_not_in_channel")
        text, blocks = self._content(arguments)
        message = Message(channel, self.new_ts(), BOT_USER, text, self._thread_ts(arguments), True, blocks)
        message.ephemeral_for = str(arguments["user"])
        self._messages.append(message)
        return {"message_ts": message.ts}

    def _update(self, arguments: Json) -> Json:
        message = self._find(arguments)
        if not message.bot or message.ephemeral_for:
            raise SlackError("cant_update_message")
        if message.streaming_until is not None:
            raise SlackError("streaming_state_conflict")
        message.text, message.blocks = self._content(arguments)
        message.edited = True
        if arguments.get("metadata"):
            message.metadata = _parsed(arguments["metadata"])
        return {"channel": message.channel, "ts": message.ts, "text": message.text}

    def _delete(self, arguments: Json) -> Json:
        message = self._find(arguments)
        if not message.bot:
            raise SlackError("cant_delete_message")
        self._messages.remove(message)
        return {"channel": message.channel, "ts": message.ts}

    def _start_stream(self, arguments: Json) -> Json:
        channel, thread_ts = self._channel(arguments), self._thread_ts(arguments)
        if thread_ts is None:
            raise SlackError("invalid_thread_ts")
        if not channel.startswith("D"):
            for name in ("recipient_team_id", "recipient_user_id"):
                if not arguments.get(name):
                    raise SlackError(f"missing_{name}")
        self._spend(channel, self.config.messages_per_second, self.config.burst)
        message = Message(channel, self.new_ts(), BOT_USER, "", thread_ts, True)
        message.streaming_until = time.time() + self.config.stream_seconds
        self._messages.append(message)
        self._extend(message, arguments)
        return {"channel": channel, "ts": message.ts}

    def _extend(self, message: Message, arguments: Json) -> None:
        added = str(arguments.get("markdown_text") or "")
        chunks = _parsed(arguments.get("chunks")) or []
        added += "".join(chunk.get("text", "") for chunk in chunks if chunk.get("type") == "markdown_text")
        if len(added) > MARKDOWN_MAX or len(message.text) + len(added) > MARKDOWN_MAX:
            raise SlackError("msg_too_long")
        message.text += added

    def _streaming(self, arguments: Json) -> Message:
        message = self._find(arguments)
        if message.streaming_until is None or message.streaming_until < time.time():
            message.streaming_until = None
            raise SlackError("message_not_in_streaming_state")
        return message

    def _append_stream(self, arguments: Json) -> Json:
        message = self._streaming(arguments)
        self._extend(message, arguments)
        return {"channel": message.channel, "ts": message.ts}

    def _stop_stream(self, arguments: Json) -> Json:
        message = self._streaming(arguments)
        self._extend(message, arguments)
        message.streaming_until = None
        message.metadata = _parsed(arguments.get("metadata"))
        return {"channel": message.channel, "ts": message.ts, "message": message.shown(metadata=True)}

    def _set_status(self, arguments: Json) -> Json:
        channel = self._channel(arguments, "channel_id")
        thread_ts = str(arguments.get("thread_ts") or "")
        roots = [m for m in self._messages if m.channel == channel and m.ts == thread_ts]
        ours = channel.startswith("D") or self.config.status_in_channels or any(root.bot for root in roots)
        if not TS.fullmatch(thread_ts) or not ours:
            raise SlackError("invalid_thread_ts")
        self.statuses[thread_ts] = str(arguments.get("status") or "")
        return {}

    def _react(self, arguments: Json) -> Json:
        message = self._find(arguments, "timestamp")
        if arguments["name"] in message.reactions:
            raise SlackError("already_reacted")
        message.reactions.append(arguments["name"])
        return {}

    def _unreact(self, arguments: Json) -> Json:
        message = self._find(arguments, "timestamp")
        if arguments["name"] not in message.reactions:
            raise SlackError("no_reaction")
        message.reactions.remove(arguments["name"])
        return {}

    def _replies(self, arguments: Json) -> Json:
        channel, root = self._channel(arguments), str(arguments.get("ts"))
        if channel in self.config.closed_channels:
            raise SlackError("not_in_channel")
        roots = [m for m in self._messages if (m.channel, m.ts) == (channel, root)]
        if not roots:
            raise SlackError("thread_not_found")
        replies = [m for m in self._messages if (m.channel, m.thread_ts) == (channel, root)]
        return self._page(replies, arguments, root=roots[0])

    def _history(self, arguments: Json) -> Json:
        channel = self._channel(arguments)
        found = [m for m in self._messages if m.channel == channel and m.thread_ts is None]
        return self._page(found, arguments)

    def _page(self, found: list[Message], arguments: Json, root: Message | None = None) -> Json:
        """A page of messages, oldest first; a thread's root is the first of them, whatever the bounds."""
        oldest, latest = float(arguments.get("oldest") or 0), float(arguments.get("latest") or 9e12)
        within = _truth(arguments.get("inclusive"))
        metadata = _truth(arguments.get("include_all_metadata"))
        start, limit = int(arguments.get("cursor") or 0), min(PAGE_MAX, int(arguments.get("limit") or PAGE_MAX))

        def wanted(message: Message) -> bool:
            at = float(message.ts)
            inside = oldest <= at <= latest if within else oldest < at < latest
            return inside and message.ephemeral_for is None

        chosen = ([root] if root else []) + [m for m in found if wanted(m)]
        page = chosen[start : start + limit]
        if root and start and self.config.root_on_each_page:
            page.insert(0, root)
        more = start + limit < len(chosen)
        return {
            "messages": [message.shown(metadata) for message in page],
            "has_more": more,
            "response_metadata": {"next_cursor": str(start + limit) if more else ""},
        }

    def _user(self, arguments: Json) -> Json:
        user = str(arguments.get("user"))
        if not user.startswith(("U", "W")):
            raise SlackError("user_not_found")
        name = f"name-of-{user.lower()}"
        return {"user": {"id": user, "name": name, "profile": {"display_name": name, "real_name": f"Real {name}"}}}

    def _conversation(self, arguments: Json) -> Json:
        channel = self._channel(arguments)
        return {"channel": {"id": channel, "name": f"name-of-{channel.lower()}"}}

    def _auth_test(self, _arguments: Json) -> Json:
        return {"url": f"{self.address}/", "team": "Home", "user": "helper", "team_id": TEAM, "user_id": BOT_USER,
                "bot_id": BOT_ID}  # fmt: skip


METHODS: Mapping[str, Callable[[FakeSlack, Json], Json]] = {
    "assistant.threads.setStatus": FakeSlack._set_status,
    "auth.test": FakeSlack._auth_test,
    "chat.appendStream": FakeSlack._append_stream,
    "chat.delete": FakeSlack._delete,
    "chat.postEphemeral": FakeSlack._post_ephemeral,
    "chat.postMessage": FakeSlack._post,
    "chat.startStream": FakeSlack._start_stream,
    "chat.stopStream": FakeSlack._stop_stream,
    "chat.update": FakeSlack._update,
    "conversations.history": FakeSlack._history,
    "conversations.info": FakeSlack._conversation,
    "conversations.replies": FakeSlack._replies,
    "reactions.add": FakeSlack._react,
    "reactions.remove": FakeSlack._unreact,
    "users.info": FakeSlack._user,
}


def needed_scope(method: str, arguments: Json) -> str | None:
    """The scope that a method needs; some by the kind of channel."""
    kind = {"D": "im", "G": "groups"}.get(str(arguments.get("channel"))[:1], "channels")
    scopes = {
        "chat": "chat:write",
        "assistant": "chat:write",
        "reactions": "reactions:write",
        "users": "users:read",
        "conversations": f"{kind}:read" if method == "conversations.info" else f"{kind}:history",
    }
    return scopes.get(method.partition(".")[0])


def _check_blocks(blocks: list[Json]) -> None:
    markdown = 0
    if len(blocks) > BLOCKS_MAX:
        raise SlackError("invalid_blocks", response_metadata={"messages": ["too many blocks"]})
    for block in blocks:
        kind, text = block.get("type"), block.get("text")
        if kind == "markdown":
            markdown += len(text or "")
        if kind == "markdown" and not text:
            raise SlackError("invalid_blocks", response_metadata={"messages": ["text must not be empty"]})
        if kind == "section" and not 0 < len((text or {}).get("text", "")) <= SECTION_MAX:
            raise SlackError("invalid_blocks", response_metadata={"messages": ["must be less than 3001 characters"]})
        for element in block.get("elements", []):
            if len(str(element.get("value", ""))) > 2000 or len(str(element.get("action_id", ""))) > 255:
                raise SlackError("invalid_blocks")
    if markdown > MARKDOWN_MAX:
        raise SlackError("msg_blocks_too_long")


def _parsed(value: Any) -> Any:
    """Lists and objects come as JSON text in a form."""
    return json.loads(value) if isinstance(value, str) else value


def _truth(value: Any) -> bool:
    return value in (True, "1", "true")


# ── HTTP ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_FORM = "application/x-www-form-urlencoded"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    slack: FakeSlack

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a connection that broke is no news here
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Silent: the ledger is the log."""

    def do_POST(self) -> None:
        path, _, query = self.path.partition("?")
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        slack = self.server.slack
        if path.startswith("/_control/"):
            self._control(f"{self.command} {path.removeprefix('/_control/')}", dict(urllib.parse.parse_qsl(query)), raw)
        elif path.startswith("/hooks/"):
            status, text = slack.hook(path.removeprefix("/hooks/"), json.loads(raw))
            self._send(status, {"content-type": "text/plain"}, text.encode())
        elif path.startswith("/api/"):
            reply = slack.call(path.removeprefix("/api/"), self._arguments(raw), self._token())
            if reply is None:
                self.close_connection = True
                return
            status, headers, body = reply
            self._send(
                status, {"content-type": "application/json; charset=utf-8", **headers}, json.dumps(body).encode()
            )
        else:
            self._send(404, {"content-type": "text/html"}, b"<html>Not found</html>")

    def do_GET(self) -> None:
        self.do_POST()

    def do_PUT(self) -> None:
        self.do_POST()

    def do_DELETE(self) -> None:
        self.do_POST()

    def _token(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer").strip()

    def _arguments(self, raw: bytes) -> Json:
        if "json" in self.headers.get("content-type", ""):
            return dict(json.loads(raw))
        return dict(urllib.parse.parse_qsl(raw.decode(), keep_blank_values=True))

    def _control(self, command: str, query: dict[str, str], raw: bytes) -> None:
        slack, status = self.server.slack, 200
        body: Any = {}
        try:
            match command:
                case "GET ledger":
                    body = [asdict(call) for call in list(slack.ledger)]
                case "DELETE ledger":
                    slack.reset()
                case "GET messages":
                    found = slack.messages(query.get("channel"), query.get("thread_ts"))
                    body = [asdict(message) | {"markdown": message.markdown} for message in found]
                case "POST messages":
                    body = slack.say(**json.loads(raw))
                case "POST hooks":
                    body = slack.response_url(**json.loads(raw))
                case "PUT config":
                    slack.configure(**json.loads(raw))
                case "POST scripts":
                    script = json.loads(raw)
                    slack.script(script["method"], *script["steps"], match=script.get("match", ""))
                case _:
                    status, body = 404, {"error": f"no such control: {command}"}
        except (ValueError, TypeError, KeyError) as error:
            status, body = 400, {"error": f"{type(error).__name__}: {error}"}
        self._send(status, {"content-type": "application/json"}, json.dumps(body).encode())

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser(description="A fake Slack on loopback.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with FakeSlack(parser.parse_args().port) as slack:
        sys.stdout.write(f"{slack.address}\n")
        sys.stdout.flush()
        stopped.wait()


if __name__ == "__main__":
    main()
