"""Anthropic's Messages API."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anthropic
import httpx2

from backburner.errors import (
    ContextLengthExceeded,
    EmptyAnswer,
    JobFailed,
    ProviderFault,
    ProviderTimeout,
    Refused,
)
from backburner.models import Answer, Limits, Question, Usage
from backburner.ports import Background
from backburner.providers import faults, wire
from backburner.providers.account import Account

NAME = "anthropic"
EVENTS = anthropic.Stream[object]
CACHED_BYTES_MIN = 4_096
"""A shorter system prompt is below the 1,024 tokens from which the provider caches."""
_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}


class Anthropic:
    """The provider, as ports.Provider. An empty `base_url` is the provider's own."""

    def __init__(self, account: Account, base_url: str = "") -> None:
        self._account = account
        self._client = anthropic.Anthropic(
            api_key="set for each call",
            base_url=base_url or None,
            max_retries=0,  # one owner of retries: the job's attempts
            http_client=wire.http_client(),
        )

    def ask(
        self,
        question: Question,
        *,
        timeout_seconds: float,
        abandoned: Callable[[], bool],
        background: Background | None = None,  # noqa: ARG002  calls end with their connection here
        said: Callable[[str], None] | None = None,
    ) -> Answer:
        """Make one call; a second one only if the first was refused for a key that has since been changed."""
        return self._account.use(lambda key: self._make(_Call(question, said), key, timeout_seconds, abandoned))

    def cancel(self, handle: str) -> None:
        """No call goes on here."""

    def _make(self, call: _Call, key: str, timeout_seconds: float, abandoned: Callable[[], bool]) -> Answer:
        with wire.watching(timeout_seconds, abandoned) as watch:
            client = self._client.with_options(api_key=key, timeout=watch.timeout())
            try:
                return call.run(client, watch)
            except JobFailed:
                raise
            except (anthropic.APIError, httpx2.HTTPError, *faults.UNREADABLE) as error:
                raise _translated(error, watch, call.usage_so_far(), call.request_id) from error


def _translated(error: Exception, watch: wire.Watch, usage: Usage | None, request_id: str | None) -> JobFailed:
    if watch.verdict is not None:
        return watch.verdict(usage=usage, request_id=request_id)
    if isinstance(error, anthropic.APIStatusError):
        status = error.status_code if error.status_code >= 400 else None  # an error inside a 200 stream
        return faults.failure_of(
            status, error.body, error.response.headers, usage=usage, request_id=error.request_id or request_id
        )
    if isinstance(error, anthropic.APITimeoutError | httpx2.TimeoutException):
        return ProviderTimeout(usage=usage, request_id=request_id)
    return faults.broken(error, usage, request_id)


class _Call:
    """One streamed call: what has come of it so far."""

    def __init__(self, question: Question, said: Callable[[str], None] | None) -> None:
        self.question = question
        self.said = said
        self.parts: list[str] = []
        self.asked_at = time.monotonic()
        self.first_token_ms: int | None = None
        self.began = False
        self.exact = False
        self.stop_reason: str | None = None
        self.counts: dict[str, int] = {}
        self.request_id: str | None = None
        self.seen: Limits | None = None

    def usage_so_far(self) -> Usage | None:
        """The provider's count; a guess for a call that broke off; None before the reply began."""
        if not self.began:
            return None
        if not self.exact:
            return faults.estimated_usage(self.question, "".join(self.parts))
        cached, written = (
            self.counts.get("cache_read_input_tokens", 0),
            self.counts.get("cache_creation_input_tokens", 0),
        )
        return Usage(
            input_tokens=self.counts.get("input_tokens", 0) + cached + written,
            output_tokens=self.counts.get("output_tokens", 0),
            cached_tokens=cached,
            cache_write_tokens=written,
        )

    def run(self, client: anthropic.Anthropic, watch: wire.Watch) -> Answer:
        """Make the call and read its stream to the end."""
        body = {**_arguments(self.question), "stream": True}
        # Events as the provider's JSON has them: the typed method makes an object of each, which is most of its time.
        stream: anthropic.Stream[Any] = client.post(
            "/v1/messages", body=body, cast_to=object, stream=True, stream_cls=EVENTS
        )
        with stream:
            self.request_id = stream.response.headers.get("request-id")
            self.seen = faults.limits_of(stream.response.headers)
            for event in stream:
                self._take(event)
                if event["type"] == "message_stop":
                    watch.wind_down()
                    with suppress(anthropic.APIError, httpx2.HTTPError, *faults.UNREADABLE):
                        for _ in stream:
                            pass
                    return self._ended()
        early = "The provider's stream ended early."
        raise ProviderFault(early, usage=self.usage_so_far(), request_id=self.request_id)

    def _take(self, event: Any) -> None:
        """Note what an event says."""
        if event["type"] == "message_start":
            self.began = True
            self._count(event["message"].get("usage"))
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            text = event["delta"]["text"]
            if not isinstance(text, str):
                raise TypeError("a piece of an answer is text")
            self.parts.append(text)
            self.first_token_ms = self.first_token_ms or round(1000 * (time.monotonic() - self.asked_at))
            if self.said is not None:
                self.said(text)
        elif event["type"] == "message_delta":
            self.stop_reason = event["delta"].get("stop_reason")
            self._count(event.get("usage"))
            self.exact = {"input_tokens", "output_tokens"} <= set(self.counts)

    def _ended(self) -> Answer:
        """The answer, or the named outcome of one without text."""
        text = faults.whole("".join(self.parts))
        about: dict[str, Any] = {"usage": self.usage_so_far(), "request_id": self.request_id}
        if self.stop_reason == "refusal":
            raise Refused(**about)
        if not text.strip():
            if self.stop_reason == "model_context_window_exceeded":
                raise ContextLengthExceeded(**about)
            limit = "The token limit was reached before any text; raise max_tokens."
            raise EmptyAnswer(limit if self.stop_reason == "max_tokens" else None, **about)
        usage = about["usage"] or Usage(estimated=True)
        reason = _REASONS.get(self.stop_reason or "", "unknown")
        return Answer(
            text=text,
            finish_reason=reason,
            model=self.question.model.name,
            provider=NAME,
            usage=usage,
            request_id=self.request_id,
            first_token_ms=self.first_token_ms,
            seen=self.seen,
        )

    def _count(self, reported: object) -> None:
        usage = faults.members(reported)
        for name in ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
            value = faults.counted(usage.get(name))
            if value is not None:
                self.counts[name] = value


def _arguments(question: Question) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": question.model.name,
        "max_tokens": question.max_tokens,
        "messages": [{"role": turn.role, "content": turn.content} for turn in question.messages],
    }
    if question.system_prompt is not None:
        system: dict[str, Any] = {"type": "text", "text": question.system_prompt}
        if len(question.system_prompt.encode()) >= CACHED_BYTES_MIN:
            system["cache_control"] = {"type": "ephemeral"}
        arguments["system"] = [system]
    if question.response_format is not None:
        schema = question.response_format.json_schema
        arguments["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    if question.user_hash is not None:
        arguments["metadata"] = {"user_id": question.user_hash}
    return arguments
