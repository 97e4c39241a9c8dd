"""OpenAI, and every server that speaks its API (vLLM, Ollama, LiteLLM, llama.cpp).

A model whose catalogue entry says `api: responses` is asked through the Responses API, one that says `chat` through
chat completions, which is what compatible servers have.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx2
import openai

from backburner.errors import (
    ConnectionLost,
    ContentFiltered,
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

NAME = "openai"
CANCEL_SECONDS = 5.0
POLL_SECONDS = 2.0
EVENTS = openai.Stream[object]
_CHAT_REASONS = {"stop": "stop", "length": "length"}


class OpenAI:
    """The provider, as ports.Provider. An empty `base_url` is the provider's own."""

    def __init__(self, account: Account, base_url: str = "") -> None:
        self._account = account
        self._client = openai.OpenAI(
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
        background: Background | None = None,
        said: Callable[[str], None] | None = None,
    ) -> Answer:
        """Make one call; a second one only if the first was refused for a key that has since been changed."""

        def ask(key: str) -> Answer:
            on_the_responses_road = question.model.api == "responses"
            call = _Responses(question, said, background) if on_the_responses_road else _Chat(question, said)
            return self._make(call, key, timeout_seconds, abandoned)

        return self._account.use(ask)

    def cancel(self, handle: str) -> None:
        """Stop a background response, if it is still being written. Raises JobFailed if that is not known."""
        with wire.watching(CANCEL_SECONDS, lambda: False) as watch:
            try:
                self._account.use(
                    lambda key: self._client.with_options(api_key=key, timeout=watch.timeout()).responses.cancel(handle)
                )
            except (openai.APIError, httpx2.HTTPError, *faults.UNREADABLE) as error:
                raise _translated(error, watch, None, None) from error

    def _make(self, call: _Call, key: str, timeout_seconds: float, abandoned: Callable[[], bool]) -> Answer:
        with wire.watching(timeout_seconds, abandoned) as watch:
            client = self._client.with_options(api_key=key, timeout=watch.timeout())
            try:
                return call.run(client, watch)
            except JobFailed:
                raise
            except (openai.APIError, httpx2.HTTPError, *faults.UNREADABLE) as error:
                raise _translated(error, watch, call.usage_so_far(), call.request_id) from error


def _translated(error: Exception, watch: wire.Watch, usage: Usage | None, request_id: str | None) -> JobFailed:
    if watch.verdict is not None:
        return watch.verdict(usage=usage, request_id=request_id)
    if isinstance(error, openai.APIStatusError):
        return faults.failure_of(error.status_code, error.body, error.response.headers, request_id=error.request_id)
    if isinstance(error, openai.APITimeoutError | httpx2.TimeoutException):
        return ProviderTimeout(usage=usage, request_id=request_id)
    if not isinstance(error, openai.APIError) or isinstance(error, openai.APIConnectionError):
        return faults.broken(error, usage, request_id)
    return faults.failure_of(None, error.body, {}, usage=usage, request_id=request_id)  # an error inside a 200 stream


class _Call(ABC):
    """One streamed call: what has come of it so far."""

    def __init__(self, question: Question, said: Callable[[str], None] | None) -> None:
        self.question = question
        self.said = said
        self.parts: list[str] = []
        self.asked_at = time.monotonic()
        self.first_token_ms: int | None = None
        self.usage: Usage | None = None
        self.began = False
        self.request_id: str | None = None
        self.seen: Limits | None = None

    def say(self, text: object) -> None:
        """Add a piece of the answer. Raises TypeError for what is no text: the SDK does not check."""
        if not isinstance(text, str):
            raise TypeError("a piece of an answer is text")
        self.parts.append(text)
        if text and self.first_token_ms is None:
            self.first_token_ms = round(1000 * (time.monotonic() - self.asked_at))
        if text and self.said is not None:
            self.said(text)

    def _open_reply(self, headers: Mapping[str, str]) -> None:
        self.request_id = headers.get("x-request-id")
        self.seen = faults.limits_of(headers)

    def usage_so_far(self) -> Usage | None:
        """The provider's count, or a guess once the reply has begun; None before."""
        if self.usage is None and self.began:
            return faults.estimated_usage(self.question, "".join(self.parts))
        return self.usage

    def _post(self, client: openai.OpenAI, path: str, body: Mapping[str, Any]) -> openai.Stream[Any]:
        """Begin the stream of a call's events, as the provider's JSON has them.

        The SDK's typed methods make an object of each event; over a call that is half of all CPU time.
        """
        given = {name: value for name, value in body.items() if value is not None}
        return client.post(path, body={**given, "stream": True}, cast_to=object, stream=True, stream_cls=EVENTS)

    def _count(self, reported: object, asked: str, written: str) -> None:
        """Take the provider's count, unless it is none. asked, written: what it calls input and output."""
        usage = faults.members(reported)
        input_tokens, output_tokens = (faults.counted(usage.get(f"{name}_tokens")) for name in (asked, written))
        if input_tokens is not None and output_tokens is not None:
            details = faults.members(usage.get(f"{asked}_tokens_details"))
            self.usage = Usage(
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                cached_tokens=faults.counted(details.get("cached_tokens")) or 0,
                cache_write_tokens=faults.counted(details.get("cache_write_tokens")) or 0,
            )

    @abstractmethod
    def run(self, client: openai.OpenAI, watch: wire.Watch) -> Answer:
        """Make the call and read its stream to the final event."""

    def answer(self, text: str, finish_reason: str) -> Answer:
        """The answer, or the named outcome of one without text."""
        text = faults.whole(text)
        usage = self.usage_so_far() or Usage(estimated=True)
        if not text.strip():
            reason = (
                "The token limit was reached before any text; raise max_tokens." if finish_reason == "length" else None
            )
            raise EmptyAnswer(reason, usage=usage, request_id=self.request_id)
        return Answer(
            text=text,
            finish_reason=finish_reason,
            model=self.question.model.name,
            provider=NAME,
            usage=usage,
            request_id=self.request_id,
            first_token_ms=self.first_token_ms,
            seen=self.seen,
        )


class _Responses(_Call):
    """A call through the Responses API; with leave for the background, one that outlives its worker."""

    def __init__(self, question: Question, said: Callable[[str], None] | None, background: Background | None) -> None:
        super().__init__(question, said)
        self.background = background

    def run(self, client: openai.OpenAI, watch: wire.Watch) -> Answer:
        stream = self._open(client)
        if stream is None:
            return self._poll(client, watch)
        with stream:
            self._open_reply(stream.response.headers)
            for event in stream:
                self._name(event)
                if event["type"] == "response.output_text.delta":
                    self.say(event["delta"])
                elif event["type"] in ("response.completed", "response.incomplete", "response.failed"):
                    watch.wind_down()
                    with suppress(openai.APIError, httpx2.HTTPError, *faults.UNREADABLE):
                        for _ in stream:
                            pass
                    return self._ended(event["response"])
                elif event["type"] == "error":
                    raise faults.failure_of(None, event, {}, usage=self.usage_so_far(), request_id=self.request_id)
        if self.background is not None:  # it goes on at the provider; the next attempt attaches to it
            raise ConnectionLost(usage=self.usage_so_far(), request_id=self.request_id)
        early = "The provider's stream ended early."
        raise ProviderFault(early, usage=self.usage_so_far(), request_id=self.request_id)

    def _open(self, client: openai.OpenAI) -> openai.Stream[Any] | None:
        """The stream of a response begun before, or of a new one; None for one that can only be polled."""
        if self.background is not None and self.background.handle is not None:
            try:
                reply = client.responses.with_raw_response.retrieve(self.background.handle, stream=True)
                return reply.parse(to=EVENTS)
            except openai.BadRequestError:
                return None
            except openai.NotFoundError:  # the provider keeps it no longer, or never began it
                self.background = replace(self.background, handle=None)
        question = self.question
        body: dict[str, Any] = {
            "model": question.model.name,
            "input": [{"role": turn.role, "content": turn.content} for turn in question.messages],
            "max_output_tokens": question.max_tokens,
            "instructions": question.system_prompt,
            "safety_identifier": question.user_hash,
            "prompt_cache_key": question.cache_key,
            "background": True if self.background is not None else None,
            "store": self.background is not None,  # the provider keeps what goes on without us
            "temperature": question.temperature,
        }
        if question.response_format is not None:
            wanted = question.response_format
            schema = {"type": "json_schema", "name": wanted.name, "schema": wanted.json_schema, "strict": True}
            body["text"] = {"format": schema}
        return self._post(client, "/responses", body)

    def _name(self, event: Any) -> None:
        """Have the response's name remembered before it is waited for."""
        response = None if self.began else event.get("response")
        self.began = True
        if response is not None and self.background is not None and self.background.handle is None:
            self.background.remember(str(response["id"]))

    def _poll(self, client: openai.OpenAI, watch: wire.Watch) -> Answer:
        """Wait for a background response that cannot be streamed."""
        handle = (self.background.handle if self.background is not None else None) or ""
        while True:
            response = client.responses.retrieve(handle).to_dict()
            self.began = True
            if response["status"] not in ("queued", "in_progress"):
                return self._ended(response)
            time.sleep(POLL_SECONDS)
            watch.check()

    def _ended(self, response: Mapping[str, Any]) -> Answer:
        self._count(response.get("usage"), "input", "output")
        about: dict[str, Any] = {"usage": self.usage_so_far(), "request_id": self.request_id}
        if response["status"] == "failed" or response.get("error") is not None:
            raise faults.failure_of(None, response.get("error"), {}, **about)
        contents = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
        text = "".join(part["text"] for part in contents if part["type"] == "output_text")
        if not text and any(part["type"] == "refusal" for part in contents):
            raise Refused(**about)
        reason = (response.get("incomplete_details") or {}).get("reason")
        if reason == "content_filter":
            raise ContentFiltered(**about)
        finish_reason = (
            "length" if reason == "max_output_tokens" else "stop" if response["status"] == "completed" else "unknown"
        )
        return self.answer(text, finish_reason)


class _Chat(_Call):
    finish_reason: str | None = None
    refused = False
    chose = False

    def run(self, client: openai.OpenAI, watch: wire.Watch) -> Answer:
        question = self.question
        turns: list[Any] = [{"role": turn.role, "content": turn.content} for turn in question.messages]
        if question.system_prompt is not None:
            turns.insert(0, {"role": "system", "content": question.system_prompt})
        body: dict[str, Any] = {
            "model": question.model.name,
            "messages": turns,
            "max_tokens": question.max_tokens,  # the older name, which every compatible server knows
            "stream_options": {"include_usage": True},
            "temperature": question.temperature,
        }
        if question.response_format is not None:
            wanted = question.response_format
            schema = {"name": wanted.name, "schema": wanted.json_schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        stream = self._post(client, "/chat/completions", body)
        with stream:
            self._open_reply(stream.response.headers)
            try:
                for chunk in stream:
                    self._take(chunk)
                    if self.finish_reason is not None and self.usage is not None:
                        watch.wind_down()
            except (openai.APIError, httpx2.HTTPError, *faults.UNREADABLE):
                if self.finish_reason is None:  # else the answer was whole, however its connection ended
                    raise
        return self._ended()

    def _take(self, chunk: Any) -> None:
        """Note what a chunk says."""
        self.began = True
        self._count(chunk.get("usage"), "prompt", "completion")
        for choice in chunk.get("choices", [])[:1]:
            self.chose = True
            delta = choice.get("delta") or {}
            self.say(delta.get("content") or "")
            self.refused = self.refused or bool(delta.get("refusal"))
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _ended(self) -> Answer:
        text = "".join(self.parts)
        about: dict[str, Any] = {"usage": self.usage_so_far(), "request_id": self.request_id}
        if self.finish_reason is None and (self.chose or self.usage is None):
            # Also a web page under status 200, which brings no event and raises nothing.
            raise ProviderFault("The provider's stream ended early.", **about)
        if self.finish_reason == "content_filter":
            raise ContentFiltered(**about)
        if self.refused and not text:
            raise Refused(**about)
        return self.answer(text, _CHAT_REASONS.get(self.finish_reason or "", "unknown"))
