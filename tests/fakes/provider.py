"""A fake LLM provider: a real HTTP server that the official OpenAI and Anthropic SDKs talk to over loopback.

    with FakeProvider() as provider:
        provider.script("capital of France", Behaviour(status=429), Behaviour(text="Paris"))
        openai.OpenAI(base_url=provider.base_url + "/v1", api_key="sk-test", max_retries=0)
        anthropic.Anthropic(base_url=provider.base_url, api_key="sk-test", max_retries=0)  # adds /v1 itself
        ...
        assert [call.billed for call in provider.ledger] == [False, True]

It serves /v1/responses (with background, retrieve, cancel), /v1/chat/completions and /v1/messages.
`python -m tests.fakes.provider --port 8900` runs it in a process of its own, steered over HTTP:

    GET    /_control/ledger    the calls, oldest first
    DELETE /_control/ledger    forget calls, scripts and background responses (the configuration stays)
    PUT    /_control/config    change fields of `Config`; GET shows it
    POST   /_control/scripts   {"match": "text in the prompt", "steps": [{"status": 529}, {"text": "Hello"}]}

Each call whose prompt contains `match` uses up one step; the last step repeats. Of several matches the one
registered first counts. Without a script the answer is an echo. A token is four bytes, rounded up.
"""

import argparse
import itertools
import json
import math
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl

__all__ = ["Behaviour", "Call", "Config", "FakeProvider", "Usage", "anthropic_error", "openai_error"]

Json = dict[str, Any]

APIS = {"/v1/responses": "responses", "/v1/chat/completions": "chat", "/v1/messages": "messages"}
ID_PREFIXES = {"responses": "resp", "chat": "chatcmpl", "messages": "msg"}
UNFIT_STATUS = 418  # no provider sends it, so a test that asks for the impossible cannot pass by accident
TOGETHER_SECONDS = 30.0
RETRIEVALS = {("GET", ""), ("POST", "cancel")}
FINAL_STATUSES = {"completed", "incomplete", "failed", "cancelled"}
LEDGER_HEADERS = {
    "x-stainless-retry-count",
    "x-stainless-read-timeout",
    "idempotency-key",
    "anthropic-version",
}

# What a fault spoils: the connection before any byte, any body, a stream; the answer; its success.
EARLY_FAULTS = {"hang", "reset"}
BODY_FAULTS = {"drip", "hang_mid_stream", "reset_mid_stream"}
STREAM_FAULTS = {"truncated_stream", "malformed_chunk"}
ANSWER_FAULTS = {"empty_choices", "null_content", "refusal", "thinking_only"}
FAILURES = {"error_in_stream", "response_failed"}
FAULTS = EARLY_FAULTS | BODY_FAULTS | STREAM_FAULTS | ANSWER_FAULTS | FAILURES


@dataclass(frozen=True)
class Usage:
    """Token counts; those given replace the computed ones.

    `input_tokens` is all that was sent; Anthropic's field of that name leaves out what a cache read or wrote.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int = 0
    cache_creation_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class Behaviour:
    """How one call is answered.

    `status` with `body` (JSON, or text such as an HTML page) and `headers` is the whole answer; without body
    it is the provider's own error for it. `finish_reason` "stop", "length" and "content_filter" become
    each API's words, any other is passed on as it is. Faults:

    - any call: "hang" (never answers), "reset" (closes before any byte), "drip" (a byte every
      `chunk_delay_seconds`, or 0.05), "hang_mid_stream", "reset_mid_stream" (half, then silence or a close)
    - streams: "truncated_stream" (half, then a clean end), "malformed_chunk", "error_in_stream" (of `body`)
    - answers: "empty_choices", "null_content" (not /v1/messages), "refusal", "thinking_only"
    - /v1/responses: "response_failed" (ends with status failed and the error of `body`)

    "error_in_stream" on /v1/responses sends the documented flat event or, if `body` has a key "error", the
    nested one that is seen in the wild. Of a background response the connection's faults spoil only the call
    that creates it; after "hang" and "reset" it was not created. Faults that do not fit are answered by 418.
    """

    status: int | None = None
    body: Json | str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    text: str | None = None
    finish_reason: str | None = None
    latency_seconds: float | None = None
    chunk_delay_seconds: float | None = None
    usage: Usage = Usage()
    fault: str | None = None

    def __post_init__(self) -> None:
        if self.fault is not None and self.fault not in FAULTS:
            raise ValueError(f"unknown fault {self.fault!r}; known: {', '.join(sorted(FAULTS))}")

    @classmethod
    def from_json(cls, data: Json) -> Self:
        unknown = set(data) - {known.name for known in fields(cls)}
        if unknown:
            raise ValueError(f"unknown fields of a behaviour: {', '.join(sorted(unknown))}")
        return cls(**{**data, "usage": Usage(**data.get("usage", {}))})


@dataclass(frozen=True)
class Call:
    """One request for a completion that arrived. Retrieving and cancelling count in the call they mean."""

    sequence: int
    endpoint: str
    model: str
    api_key: str  # its last four characters
    prompt: str  # its first 200 characters
    request: Json  # the body as sent
    headers: dict[str, str]
    began: float  # epoch seconds
    concurrent: int  # calls in progress at arrival, with this one and background responses
    ended: float | None = None
    outcome: str = "open"  # then billed, error:<status>, fault:<name>, client_gone or cancelled
    billed: bool = False  # a completion was produced, whether or not anybody read it
    response_id: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0  # produced, also when the end came early
    attached: int = 0  # how often a background response was retrieved, by poll or stream
    cancelled: bool = False  # somebody asked to cancel it, in time or not


@dataclass(frozen=True)
class Config:
    latency_seconds: float = 0.0  # until the answer; in streams until the first text
    chunk_delay_seconds: float = 0.0  # before each further chunk of text
    together: int = 0  # answers wait until as many calls are in progress, for TOGETHER_SECONDS at most
    tokens_per_chunk: int = 4
    context_tokens: int = 200_000
    api_keys: list[str] | None = None  # None accepts every key that is not empty
    # requests_per_minute, tokens_per_minute, input_tokens_per_minute, output_tokens_per_minute, burst_seconds
    limits: dict[str, float] | None = None
    rate_headers: bool = (
        True  # whether replies state the limits, as the real ones do and many compatible servers do not
    )


class ProviderError(Exception):
    """The call is refused; without a body in the provider's usual words for the status."""

    def __init__(self, status: int, body: Json | str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, dict(headers or {})


class ClientGoneError(Exception):
    """The client closed its connection, or the server is stopping."""


# --- Errors: type, code, message (OpenAI) and type, message (Anthropic) by status ---

OPENAI_ERRORS = {
    400: ("invalid_request_error", None, "Invalid request."),
    401: ("invalid_request_error", "invalid_api_key", "Incorrect API key provided."),
    403: ("invalid_request_error", "insufficient_permissions", "You have insufficient permissions for this."),
    404: ("invalid_request_error", "model_not_found", "The model does not exist or you do not have access to it."),
    429: ("requests", "rate_limit_exceeded", "Rate limit reached for requests. Please try again in 1s."),
    500: ("server_error", None, "The server had an error while processing your request. Sorry about that!"),
    503: ("service_unavailable_error", "server_is_overloaded", "Our servers are currently overloaded."),
}
ANTHROPIC_ERRORS = {
    400: ("invalid_request_error", "Invalid request."),
    401: ("authentication_error", "invalid x-api-key"),
    402: ("billing_error", "Your credit balance is too low."),
    403: ("permission_error", "Your API key does not have permission to use the specified resource."),
    404: ("not_found_error", "model: not found"),
    429: ("rate_limit_error", "This request would exceed your organization's rate limit."),
    500: ("api_error", "Internal server error"),
    504: ("timeout_error", "The request timed out."),
    529: ("overloaded_error", "Overloaded"),
}


def openai_error(message: str, kind: str, code: str | None = None, param: str | None = None) -> Json:
    """The body, with `kind` as the error's type."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(message: str, kind: str, error_code: str | None = None) -> Json:
    """The body, with `kind` as the error's type; an `error_code` is "enforced_spend_limit_reached", say."""
    details = {"details": {"error_code": error_code}} if error_code else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def error_body(api: str, status: int, message: str = "", code: str | None = None, param: str | None = None) -> Json:
    """The provider's error for a status, in words of its own or the usual ones."""
    nearest = min(status, 500)
    if api == "messages":
        kind, usual = ANTHROPIC_ERRORS.get(status) or ANTHROPIC_ERRORS.get(nearest) or ANTHROPIC_ERRORS[400]
        return anthropic_error(message or usual, kind)
    kind, usual_code, usual = OPENAI_ERRORS.get(status) or OPENAI_ERRORS.get(nearest) or OPENAI_ERRORS[400]
    return openai_error(message or usual, kind, code if message else usual_code, param)


# --- What is asked ---


@dataclass(frozen=True)
class Request:
    api: str
    body: Json
    model: str
    prompt: str  # system prompt and all messages
    question: str  # the user's last message
    max_tokens: int | None
    stream: bool
    background: bool

    @property
    def tokens(self) -> int:
        return tokens_in(self.prompt)


def tokens_in(text: str) -> int:
    return math.ceil(len(text.encode()) / 4)


def text_in(content: object) -> str:
    """The text of a message's content, which in all three APIs is a string or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def read_request(api: str, body: Json) -> Request:
    """Takes any body, since refused calls are in the ledger too; `FakeProvider.check` does the refusing."""
    messages = body.get("input" if api == "responses" else "messages")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    messages = [item for item in messages if isinstance(item, dict)] if isinstance(messages, list) else []
    texts = [text_in(body.get("instructions" if api == "responses" else "system"))]
    texts += [text_in(message.get("content")) for message in messages]
    asked = [text_in(message.get("content")) for message in messages if message.get("role") == "user"]
    limits = [body.get(name) for name in ("max_output_tokens", "max_completion_tokens", "max_tokens")]
    return Request(
        api=api,
        body=body,
        model=str(body.get("model") or ""),
        prompt="\n".join(text for text in texts if text),
        question=asked[-1] if asked else "",
        max_tokens=next((limit for limit in limits if isinstance(limit, int)), None),
        stream=body.get("stream") is True,
        background=api == "responses" and body.get("background") is True,
    )


# --- What is answered ---


class Event(NamedTuple):
    """One server-sent event; `text` is the part of the answer that it carries."""

    name: str
    data: Json
    text: str = ""

    def encode(self) -> bytes:
        name = f"event: {self.name}\n" if self.name else ""
        return f"{name}data: {json.dumps(self.data) if self.data else '[DONE]'}\n\n".encode()


@dataclass(frozen=True)
class Answer:
    request: Request
    behaviour: Behaviour
    id: str
    created: int
    text: str
    chunks: list[str]
    finish_reason: str
    input_tokens: int
    output_tokens: int
    error: Json | None  # why it failed, without the envelope

    @property
    def fault(self) -> str | None:
        return self.behaviour.fault


def make_answer(request: Request, behaviour: Behaviour, config: Config, answer_id: str) -> Answer:
    fault, usage, text, finish = behaviour.fault, behaviour.usage, behaviour.text, behaviour.finish_reason
    if text is None:
        usual = {"empty_choices": "", "null_content": "", "thinking_only": "Let me think about that."}
        usual["refusal"] = "I'm sorry, but I can't help with that."
        text = usual.get(fault or "", f"Echo: {request.question[:200]}")
    if finish is None and request.max_tokens is not None and tokens_in(text) > request.max_tokens:
        text, finish = text.encode()[: 4 * request.max_tokens].decode(errors="ignore"), "length"
    size = 4 * config.tokens_per_chunk
    error = None
    if fault in FAILURES:
        body = behaviour.body if isinstance(behaviour.body, dict) else error_body(request.api, 500)
        error = body.get("error", body)
        if request.api == "responses":
            given = {name: value for name, value in error.items() if value is not None}
            error = {"code": "server_error", "param": None, **given}
    return Answer(
        request=request,
        behaviour=behaviour,
        id=answer_id,
        created=int(time.time()),
        text=text,
        chunks=[text[start : start + size] for start in range(0, len(text), size)],
        finish_reason=finish or ("length" if fault == "thinking_only" else "stop"),
        input_tokens=request.tokens if usage.input_tokens is None else usage.input_tokens,
        output_tokens=tokens_in(text) if usage.output_tokens is None else usage.output_tokens,
        error=error,
    )


def middle(events: list[Event]) -> int:
    """Where mid-stream faults strike: after half of the chunks of text, at least one if there is any."""
    texts = [index for index, event in enumerate(events) if event.text]
    return texts[(len(texts) - 1) // 2] + 1 if texts else len(events) // 2


def paced(events: list[Event], behaviour: Behaviour, config: Config) -> Iterator[tuple[float, Event]]:
    """Events with the seconds to wait before each: the latency before the first text, a delay before more."""
    latency, delay = behaviour.latency_seconds, behaviour.chunk_delay_seconds
    latency = config.latency_seconds if latency is None else latency
    delay = config.chunk_delay_seconds if delay is None else delay
    slow = next((index for index, event in enumerate(events) if event.text), len(events) - 1)
    for index, event in enumerate(events):
        yield latency if index == slow else delay if event.text else 0.0, event


# --- The three shapes, several fields to a line ---
# fmt: off


def chat_usage(answer: Answer) -> Json:
    usage = answer.behaviour.usage
    return {
        "prompt_tokens": answer.input_tokens, "completion_tokens": answer.output_tokens,
        "total_tokens": answer.input_tokens + answer.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0,
                                  "cache_write_tokens": usage.cache_creation_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens, "audio_tokens": 0,
                                      "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }


def chat_body(answer: Answer) -> Json:
    said = {"refusal": None, "null_content": None, "thinking_only": ""}.get(answer.fault or "", answer.text)
    message: Json = {"role": "assistant", "content": said, "annotations": [],
               "refusal": answer.text if answer.fault == "refusal" else None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
    return {"id": answer.id, "object": "chat.completion", "created": answer.created,
            "model": answer.request.model, "service_tier": "default", "system_fingerprint": "fp_fake",
            "choices": [] if answer.fault == "empty_choices" else [choice], "usage": chat_usage(answer)}


def chat_events(answer: Answer) -> list[Event]:
    with_usage = (answer.request.body.get("stream_options") or {}).get("include_usage") is True

    def chunk(choices: list[Json], usage: Json | None = None, text: str = "") -> Event:
        return Event("", {"id": answer.id, "object": "chat.completion.chunk", "created": answer.created,
                          "model": answer.request.model, "service_tier": "default", "choices": choices,
                          "system_fingerprint": "fp_fake", **({"usage": usage} if with_usage else {})}, text)

    def choice(delta: Json, finish_reason: str | None = None) -> list[Json]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]

    events = []
    if answer.fault != "empty_choices":
        opening = None if answer.fault == "null_content" else ""
        events.append(chunk(choice({"role": "assistant", "content": opening, "refusal": None})))
        said = "refusal" if answer.fault == "refusal" else "content"
        if answer.fault != "thinking_only":
            events += [chunk(choice({said: piece}), text=piece) for piece in answer.chunks]
        events.append(chunk(choice({}, answer.finish_reason)))
    if with_usage:
        events.append(chunk([], chat_usage(answer)))
    if answer.error is not None:
        events = [*events[: middle(events)], Event("", {"error": answer.error})]
    return [*events, Event("", {})]


def responses_status(answer: Answer) -> str:
    if answer.error is not None:
        return "failed"
    return "completed" if answer.finish_reason == "stop" else "incomplete"


def responses_output(answer: Answer, status: str) -> list[Json]:
    if answer.fault == "empty_choices":
        return []
    if answer.fault == "thinking_only":
        return [{"id": answer.id.replace("resp", "rs"), "type": "reasoning", "summary": []}]
    part: Json = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
    if answer.fault == "refusal":
        part = {"type": "refusal", "refusal": answer.text}
    content = [] if answer.fault == "null_content" else [part]
    return [{"id": answer.id.replace("resp", "msg"), "type": "message", "role": "assistant", "status": status,
             "content": content}]


def responses_body(answer: Answer, status: str | None = None) -> Json:
    """The response object, by default in its final state."""
    status = status or responses_status(answer)
    asked, usage, finish = answer.request.body, answer.behaviour.usage, answer.finish_reason
    body = {
        "id": answer.id, "object": "response", "created_at": answer.created, "status": status, "error": None,
        "background": answer.request.background, "completed_at": None, "incomplete_details": None,
        "instructions": asked.get("instructions"), "max_output_tokens": answer.request.max_tokens,
        "max_tool_calls": None, "model": answer.request.model, "output": [], "parallel_tool_calls": True,
        "previous_response_id": None, "prompt_cache_key": asked.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None}, "safety_identifier": asked.get("safety_identifier"),
        "service_tier": "default", "store": asked.get("store", True), "temperature": 1.0, "top_p": 1.0,
        "text": asked.get("text") or {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "truncation": "disabled", "usage": None, "user": None,
        "metadata": asked.get("metadata") or {},
    }
    if status == "failed":
        return {**body, "error": answer.error}
    if status not in {"completed", "incomplete"}:
        return body
    if status == "incomplete":
        body["incomplete_details"] = {"reason": "max_output_tokens" if finish == "length" else finish}
    return {**body, "completed_at": int(time.time()) if status == "completed" else None,
            "output": responses_output(answer, status), "usage": {
                "input_tokens": answer.input_tokens, "output_tokens": answer.output_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens,
                                         "cache_write_tokens": usage.cache_creation_tokens},
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": answer.input_tokens + answer.output_tokens}}


def responses_events(answer: Answer) -> list[Event]:
    first = "queued" if answer.request.background else "in_progress"
    states = {"created": first, first: first, "in_progress": "in_progress"}  # by event; queued only in background
    events = [Event(f"response.{name}", {"response": responses_body(answer, status)})
              for name, status in states.items()]
    status = responses_status(answer)
    for item in responses_output(answer, status):
        opening = {**item, "status": "in_progress", **({"content": []} if "content" in item else {})}
        events.append(Event("response.output_item.added", {"output_index": 0, "item": opening}))
        for part in item.get("content", []):
            name, said = ("refusal", "refusal") if part["type"] == "refusal" else ("output_text", "text")
            at: Json = {"item_id": item["id"], "output_index": 0, "content_index": 0}
            extra: Json = {"logprobs": []} if said == "text" else {}
            events.append(Event("response.content_part.added", {**at, "part": {**part, said: ""}}))
            events += [Event(f"response.{name}.delta", {**at, "delta": piece, **extra}, piece)
                       for piece in answer.chunks]
            events.append(Event(f"response.{name}.done", {**at, said: answer.text, **extra}))
            events.append(Event("response.content_part.done", {**at, "part": part}))
        events.append(Event("response.output_item.done", {"output_index": 0, "item": item}))
    if answer.error is not None:
        events = events[: middle(events) if answer.text else len(states)]
    if answer.error is not None and answer.fault == "error_in_stream":
        nested = isinstance(answer.behaviour.body, dict) and "error" in answer.behaviour.body
        flat = {name: answer.error.get(name) for name in ("code", "message", "param")}
        events.append(Event("error", {"error": answer.error} if nested else flat))
    events.append(Event(f"response.{status}", {"response": responses_body(answer)}))
    return [Event(event.name, {"type": event.name, "sequence_number": number, **event.data}, event.text)
            for number, event in enumerate(events)]


def messages_usage(answer: Answer) -> Json:
    usage = answer.behaviour.usage
    return {"input_tokens": max(0, answer.input_tokens - usage.cached_tokens - usage.cache_creation_tokens),
            "cache_creation_input_tokens": usage.cache_creation_tokens,
            "cache_read_input_tokens": usage.cached_tokens, "output_tokens": answer.output_tokens}


def messages_body(answer: Answer) -> Json:
    words = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}
    reason = "refusal" if answer.fault == "refusal" else words.get(answer.finish_reason, answer.finish_reason)
    details = {"type": "refusal", "category": None, "explanation": None} if reason == "refusal" else None
    content: list[Json] = [{"type": "text", "text": answer.text}]
    if answer.fault == "thinking_only":
        content = [{"type": "thinking", "thinking": answer.text, "signature": "c2lnbmF0dXJl"}]
    elif answer.fault == "empty_choices" or (answer.fault == "refusal" and answer.behaviour.text is None):
        content = []
    return {"id": answer.id, "type": "message", "role": "assistant", "model": answer.request.model,
            "content": content, "stop_reason": reason, "stop_sequence": None, "stop_details": details,
            "usage": {**messages_usage(answer), "service_tier": "standard"}}


def messages_events(answer: Answer) -> list[Event]:
    body = messages_body(answer)
    opening = {**body, "content": [], "stop_reason": None, "stop_details": None,
               "usage": {**body["usage"], "output_tokens": 1}}
    events = [Event("message_start", {"message": opening})]
    for block in body["content"]:
        said = block["type"]
        empty = {**block, said: "", **({"signature": ""} if said == "thinking" else {})}
        events.append(Event("content_block_start", {"index": 0, "content_block": empty}))
        events.append(Event("ping", {}))
        deltas = [({"type": f"{said}_delta", said: piece}, piece) for piece in answer.chunks]
        if said == "thinking":
            deltas.append(({"type": "signature_delta", "signature": block["signature"]}, ""))
        events += [Event("content_block_delta", {"index": 0, "delta": delta}, text) for delta, text in deltas]
        events.append(Event("content_block_stop", {"index": 0}))
    ending = {name: body[name] for name in ("stop_reason", "stop_sequence", "stop_details")}
    events.append(Event("message_delta", {"delta": ending, "usage": messages_usage(answer)}))
    events.append(Event("message_stop", {}))
    if answer.error is not None:
        events = [*events[: middle(events)], Event("error", {"error": answer.error})]
    return [Event(event.name, {"type": event.name, **event.data}, event.text) for event in events]


# fmt: on
BODIES = {"chat": chat_body, "responses": responses_body, "messages": messages_body}
EVENTS = {"chat": chat_events, "responses": responses_events, "messages": messages_events}


# --- Limits and background responses ---


class Limits:
    """Allowances per model and dimension that refill continuously and hold `burst_seconds` of their rate.

    Requests and input are taken at admission, output once it is known, so that a level can go below zero.
    `clock` tells seconds.
    """

    def __init__(self, settings: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._burst_seconds = settings.get("burst_seconds", 1)
        suffix = "_per_minute"
        self.rates = {name.removesuffix(suffix): rate for name, rate in settings.items() if name.endswith(suffix)}
        self._levels: dict[tuple[str, str], tuple[float, float]] = {}  # level, and when it was so
        self._lock = threading.RLock()

    def _capacity(self, name: str) -> float:
        return max(1.0, self.rates[name] / 60 * self._burst_seconds)

    def _level(self, model: str, name: str) -> float:
        level, since = self._levels.get((model, name), (self._capacity(name), 0.0))
        return min(self._capacity(name), level + (self._clock() - since) * self.rates[name] / 60)

    def admit(self, model: str, costs: Mapping[str, int]) -> tuple[str, float] | None:
        """None, or the dimension that is short and for how many seconds."""
        with self._lock:
            for name, rate in self.rates.items():
                wanted = min(max(1, costs.get(name, 0)), self._capacity(name))
                if (short := wanted - self._level(model, name)) > 0:
                    return name, short / rate * 60
            self.charge(model, costs)
        return None

    def charge(self, model: str, costs: Mapping[str, int]) -> None:
        with self._lock:
            for name in self.rates.keys() & costs.keys():
                self._levels[model, name] = self._level(model, name) - costs[name], self._clock()

    def state(self, model: str, name: str) -> tuple[int, int, float]:
        """The limit per minute, what remains of it, and the seconds until all is refilled."""
        if name not in self.rates:
            generous = 1_000_000 if name == "requests" else 2_000_000_000
            return generous, generous - 1, 60 / generous
        with self._lock:
            level, rate = self._level(model, name), self.rates[name]
        return int(rate), max(0, int(level)), (self._capacity(name) - level) / rate * 60


class BackgroundResponse:
    """A response that is produced whether or not anybody waits, and read by whoever knows its id."""

    def __init__(self, answer: Answer, sequence: int) -> None:
        self.answer, self.sequence = answer, sequence
        self.plan = responses_events(answer)
        self.produced: list[Event] = []
        self.status = "queued"
        self.changed = threading.Condition()
        self.stop = threading.Event()

    def produce(self, event: Event) -> None:
        with self.changed:
            self.produced.append(event)
            name = event.name.removeprefix("response.")
            if name == "in_progress" or name in FINAL_STATUSES:
                self.status = name
            self.changed.notify_all()

    def cancel(self) -> None:
        with self.changed:
            if self.status not in FINAL_STATUSES:
                self.status = "cancelled"
                self.stop.set()
                self.changed.notify_all()

    def follow(self, after: int) -> Iterator[Event]:
        """Events with a higher number than `after`, as they come. A cancelled response has no final event."""
        position = after + 1
        while True:
            with self.changed:
                while position >= len(self.produced) and self.status not in FINAL_STATUSES:
                    self.changed.wait()
                news = self.produced[position:]
            if not news:
                return
            yield from news
            position += len(news)

    def body(self) -> Json:
        with self.changed:
            return responses_body(self.answer, self.status)


# --- The provider ---


class FakeProvider:
    """The server and all that it knows. It runs while the context is entered, on `port` or a free one."""

    def __init__(self, port: int = 0, config: Config | None = None) -> None:
        self.config = config or Config()
        self.connections: set[socket.socket] = set()
        self._port = port
        self._limits = Limits(self.config.limits or {})
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._calls: dict[int, Call] = {}
        self._open: set[int] = set()
        self._most = 0
        self._scripts: dict[str, list[Behaviour]] = {}
        self._background: dict[str, BackgroundResponse] = {}
        self._instance = uuid.uuid4().hex[:12]
        self._ids, self._sequences = itertools.count(1), itertools.count(1)

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", self._port), _Handler)
        self._server.provider = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.reset()
        for connection in list(self.connections):  # wakes the handlers that hang, wait or idle
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    @property
    def base_url(self) -> str:
        """Anthropic's SDK takes it as it is, OpenAI's with /v1 appended."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def ledger(self) -> list[Call]:
        with self._lock:
            return list(self._calls.values())

    def script(self, match: str, *behaviours: Behaviour) -> None:
        if not behaviours:
            raise ValueError("a script needs at least one step")
        with self._lock:
            self._scripts[match] = list(behaviours)

    def configure(self, **changes: Any) -> None:
        """Changes fields of `Config`; new limits start full."""
        self.config = replace(self.config, **changes)
        self._most = 0
        if "limits" in changes:
            self._limits = Limits(self.config.limits or {})

    def reset(self) -> None:
        """Forgets calls, scripts and background responses; the configuration stays."""
        with self._lock:
            background = list(self._background.values())
            self._calls, self._scripts, self._background = {}, {}, {}
        for response in background:
            response.cancel()

    # The ledger. What a test may look for is recorded before the last byte of the answer.

    def arrive(self, endpoint: str, request: Request, api_key: str, headers: Mapping[str, str]) -> int:
        sequence = next(self._sequences)
        with self._changed:
            self._open.add(sequence)
            self._most = max(self._most, len(self._open))
            self._changed.notify_all()
            self._calls[sequence] = Call(
                sequence=sequence,
                endpoint=endpoint,
                model=request.model,
                api_key=api_key[-4:],
                prompt=request.prompt[:200],
                request=request.body,
                headers={name: value for name, value in headers.items() if name in LEDGER_HEADERS},
                began=time.time(),
                concurrent=len(self._open),
            )
        return sequence

    def wait_together(self) -> None:
        """Wait until as many calls as configured have been in progress at once since then."""
        with self._changed:
            self._changed.wait_for(lambda: self._most >= self.config.together, TOGETHER_SECONDS)

    def record(self, sequence: int, *, end: bool = False, attach: int = 0, **changes: Any) -> None:
        with self._lock:
            if end and sequence in self._open:
                self._open.remove(sequence)
                changes["ended"] = time.time()
            if sequence in self._calls:
                call = self._calls[sequence]
                self._calls[sequence] = replace(call, attached=call.attached + attach, **changes)

    def complete(self, sequence: int, answer: Answer) -> None:
        """The answer has been produced, or has failed, which costs nothing."""
        tokens = answer.output_tokens if answer.error is None else 0
        outcome = f"fault:{answer.fault}" if answer.fault else "billed"
        self.record(sequence, end=True, outcome=outcome, billed=answer.error is None, output_tokens=tokens)
        self._limits.charge(answer.request.model, {"tokens": tokens, "output_tokens": tokens})

    # Decisions

    def check(self, request: Request, api_key: str, headers: Mapping[str, str]) -> None:
        """Refuses what the provider would: the key, the form, the model, the rate, the length."""
        api, body, claude = request.api, request.body, request.api == "messages"
        if not api_key:
            missing = "x-api-key header is required" if claude else "You didn't provide an API key."
            raise ProviderError(401, error_body(api, 401, missing))
        if self.config.api_keys is not None and api_key not in self.config.api_keys:
            raise ProviderError(401)
        for name in ["model", "input" if api == "responses" else "messages", *(["max_tokens"] if claude else [])]:
            if not body.get(name):
                problem = f"{name}: Field required" if claude else f"Missing required parameter: '{name}'."
                raise ProviderError(400, error_body(api, 400, problem, "missing_required_parameter", name))
        if claude and "anthropic-version" not in headers:
            raise ProviderError(400, error_body(api, 400, "anthropic-version: header is required"))
        if request.background and body.get("store") is False:
            raise ProviderError(400, error_body(api, 400, "Background mode requires store=true.", None, "store"))
        if request.model == "no-such-model":
            words = f"model: {request.model}" if claude else f"The model `{request.model}` does not exist."
            raise ProviderError(404, error_body(api, 404, words, "model_not_found", "model"))
        costs = {"requests": 1, "tokens": request.tokens, "input_tokens": request.tokens}
        refused = self._limits.admit(request.model, costs)
        if refused is not None:
            raise self._rate_limited(request, *refused)
        if request.tokens > self.config.context_tokens and not (api == "responses" and request.stream):
            raise ProviderError(400, self._context_error(request))

    def _rate_limited(self, request: Request, dimension: str, wait_seconds: float) -> ProviderError:
        words, limit = dimension.replace("_", " "), int(self._limits.rates[dimension])
        headers = {"retry-after": str(math.ceil(wait_seconds))}
        if request.api == "messages":
            message = f"This request would exceed your organization's rate limit of {limit} {words} per minute."
            return ProviderError(429, anthropic_error(message, "rate_limit_error"), headers)
        headers["retry-after-ms"] = str(math.ceil(wait_seconds * 1000))
        message = f"Rate limit reached for {request.model} on {words} per min: Limit {limit}."
        message += f" Please try again in {wait_seconds:.3f}s."
        kind = "requests" if dimension == "requests" else "tokens"
        return ProviderError(429, openai_error(message, kind, "rate_limit_exceeded"), headers)

    def _context_error(self, request: Request) -> Json:
        tokens, limit = request.tokens, self.config.context_tokens
        messages = {
            "messages": f"prompt is too long: {tokens} tokens > {limit} maximum",
            "responses": "Your input exceeds the context window of this model.",
            "chat": f"This model's maximum context length is {limit} tokens. You sent {tokens} tokens.",
        }
        param = "input" if request.api == "responses" else "messages"
        return error_body(request.api, 400, messages[request.api], "context_length_exceeded", param)

    def behaviour_for(self, request: Request) -> Behaviour:
        """The next step of the matching script.

        In a stream of /v1/responses too long a prompt is noticed only after the stream has begun: the error
        comes inside the 200.
        """
        if request.tokens > self.config.context_tokens:
            return Behaviour(fault="error_in_stream", text="", body=self._context_error(request))
        with self._lock:
            found = (steps for match, steps in self._scripts.items() if match in request.prompt)
            steps = next(found, [Behaviour()])
            behaviour = steps.pop(0) if len(steps) > 1 else steps[0]
        fault = behaviour.fault
        if (
            (fault in STREAM_FAULTS | {"error_in_stream"} and not request.stream)
            or (fault == "null_content" and request.api == "messages")
            or (fault == "response_failed" and request.api != "responses")
        ):
            message = f"fake provider: {fault} does not fit this call to {request.api} (stream={request.stream})"
            raise ProviderError(UNFIT_STATUS, error_body(request.api, UNFIT_STATUS, message))
        return behaviour

    def answer(self, request: Request, behaviour: Behaviour) -> Answer:
        return make_answer(request, behaviour, self.config, self.new_id(ID_PREFIXES[request.api]))

    # Background responses

    def start_background(self, answer: Answer, sequence: int) -> BackgroundResponse:
        response = BackgroundResponse(answer, sequence)
        with self._lock:
            self._background[answer.id] = response
        threading.Thread(target=self._run_background, args=(response,), daemon=True).start()
        return response

    def _run_background(self, response: BackgroundResponse) -> None:
        for delay, event in paced(response.plan, response.answer.behaviour, self.config):
            response.stop.wait(delay)
            with response.changed:
                if response.stop.is_set():
                    produced = tokens_in("".join(event.text for event in response.produced))
                    self.record(response.sequence, end=True, outcome="cancelled", output_tokens=produced)
                    return
                if event is response.plan[-1]:
                    self.complete(response.sequence, response.answer)
                response.produce(event)

    def find_background(self, response_id: str, streaming: bool) -> BackgroundResponse:
        with self._lock:
            response = self._background.get(response_id)
        if response is None:
            raise ProviderError(404, error_body("responses", 404, f"Response with id '{response_id}' not found."))
        if streaming and not response.answer.request.stream:
            problem = "This response cannot be streamed because it was not created with stream=true."
            raise ProviderError(400, error_body("responses", 400, problem, "invalid_request_error", "stream"))
        return response

    # Headers

    def new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._instance}{next(self._ids):012d}"

    def headers(self, api: str, model: str, request_id: str) -> dict[str, str]:
        if api == "messages":
            found = {"request-id": request_id, "anthropic-organization-id": "org-fake"}
        else:
            found = {"x-request-id": request_id, "openai-version": "2020-10-01", "openai-processing-ms": "1"}
        return found | (self._rate_headers(api, model) if self.config.rate_headers else {})

    def _rate_headers(self, api: str, model: str) -> dict[str, str]:
        found = {}
        if api == "messages":
            for name in ("requests", "tokens", "input_tokens", "output_tokens"):
                limit, remaining, reset = self._limits.state(model, name)
                prefix = "anthropic-ratelimit-" + name.replace("_", "-")
                moment = time.gmtime(math.ceil(time.time() + reset))
                found[f"{prefix}-limit"] = str(limit)
                found[f"{prefix}-remaining"] = str(remaining)
                found[f"{prefix}-reset"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", moment)
            return found
        for name in ("requests", "tokens"):
            limit, remaining, reset = self._limits.state(model, name)
            found[f"x-ratelimit-limit-{name}"] = str(limit)
            found[f"x-ratelimit-remaining-{name}"] = str(remaining)
            found[f"x-ratelimit-reset-{name}"] = f"{math.ceil(reset * 1000)}ms" if reset < 1 else f"{reset:.3f}s"
        return found


# --- HTTP ---


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    provider: FakeProvider

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a connection that broke is no news here
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.provider = self.server.provider
        self.provider.connections.add(self.connection)

    def finish(self) -> None:
        self.provider.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Silent: the ledger is the log."""

    def do_POST(self) -> None:
        path, _, query = self.path.partition("?")
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        api_key = self.headers.get("authorization", "").removeprefix("Bearer").strip()
        api_key = api_key or self.headers.get("x-api-key", "").strip()
        try:
            if path.startswith("/_control/"):
                self._control(f"{self.command} {path.removeprefix('/_control/')}", raw)
            elif path in APIS and self.command == "POST":
                self._create(APIS[path], raw, api_key)
            else:
                self._retrieve_or_cancel(path, dict(parse_qsl(query)), api_key)
        except (ClientGoneError, OSError):
            self.close_connection = True

    def do_GET(self) -> None:
        self.do_POST()

    def do_PUT(self) -> None:
        self.do_POST()

    def do_DELETE(self) -> None:
        self.do_POST()

    def _control(self, command: str, raw: bytes) -> None:
        status = 200
        body: object = {}
        try:
            if command == "GET ledger":
                body = [asdict(call) for call in self.provider.ledger]
            elif command == "DELETE ledger":
                self.provider.reset()
            elif command == "PUT config":
                self.provider.configure(**json.loads(raw))
            elif command == "GET config":
                body = asdict(self.provider.config)
            elif command == "POST scripts":
                script = json.loads(raw)
                self.provider.script(script["match"], *map(Behaviour.from_json, script["steps"]))
            else:
                status, body = 404, {"error": f"no such control: {command}"}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            status, body = 400, {"error": f"{type(error).__name__}: {error}"}
        data = json.dumps(body).encode()
        self._head(status, {"content-type": "application/json", "content-length": str(len(data))})
        self.wfile.write(data)

    def _create(self, api: str, raw: bytes, api_key: str) -> None:
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        request = read_request(api, body if isinstance(body, dict) else {})
        headers = {name.lower(): value for name, value in self.headers.items()}
        call = self.provider.arrive(self.path, request, api_key, headers)
        background = None
        try:
            self.provider.check(request, api_key, headers)
            behaviour = self.provider.behaviour_for(request)
            if behaviour.status is not None:
                self.provider.record(call, outcome=f"error:{behaviour.status}")
                self._pause(behaviour.latency_seconds or 0)
                raise ProviderError(behaviour.status, behaviour.body, behaviour.headers)
            if behaviour.fault in EARLY_FAULTS:
                self.provider.record(call, outcome=f"fault:{behaviour.fault}")
                self._break(behaviour.fault)
                return
            self.provider.wait_together()
            answer = self.provider.answer(request, behaviour)
            self.provider.record(call, response_id=answer.id, input_tokens=answer.input_tokens)
            if request.background:
                background = self.provider.start_background(answer, call)
            if request.stream:
                self._stream(answer, call, background)
            else:
                self._whole(answer, call, background)
        except ProviderError as error:
            self.provider.record(call, end=True, outcome=f"error:{error.status}")
            self._send_error(api, request.model, error)
        finally:
            if background is None:
                self.provider.record(call, end=True)

    def _whole(self, answer: Answer, call: int, background: BackgroundResponse | None) -> None:
        fault, latency = answer.fault, answer.behaviour.latency_seconds
        if background is None:
            try:
                self._pause(self.provider.config.latency_seconds if latency is None else latency)
            except ClientGoneError:  # the answer is produced all the same
                self.provider.complete(call, answer)
                self.provider.record(call, outcome="client_gone")
                raise
            self.provider.complete(call, answer)
        body = background.body() if background else BODIES[answer.request.api](answer)
        data = json.dumps(body).encode()
        cut = len(data) // 2 if fault in BODY_FAULTS - {"drip"} else len(data)
        self._provider_head(answer.request, {"content-type": "application/json", "content-length": str(len(data))})
        self._write(data[:cut], answer.behaviour, chunked=False)
        if cut < len(data):
            self._break(fault)

    def _stream(self, answer: Answer, call: int, background: BackgroundResponse | None) -> None:
        behaviour, fault = answer.behaviour, answer.fault
        events = background.plan if background else EVENTS[answer.request.api](answer)
        pace = paced(events, behaviour, self.provider.config)
        source = background.follow(-1) if background else self._waiting(pace)
        strike = middle(events) if fault in STREAM_FAULTS | (BODY_FAULTS - {"drip"}) else None
        said, ended = "", background is not None
        self._provider_head(answer.request, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
        try:
            for index, event in enumerate(source):
                if not ended and (index == strike or event is events[-1]):
                    self.provider.complete(call, answer)
                    ended = True
                if index == strike:
                    if background is None:
                        self.provider.record(call, output_tokens=tokens_in(said))
                    if fault == "malformed_chunk":
                        self._write(event.encode()[:-12] + b"\n\n", behaviour)
                    self._break(fault)
                    return
                self._write(event.encode(), behaviour)
                said += event.text
            self._break(None)
        finally:
            if not ended:  # the client went away, and the generation stops
                outcome = f"fault:{fault}" if fault else "client_gone"
                self.provider.record(call, outcome=outcome, billed=True, output_tokens=tokens_in(said))

    def _retrieve_or_cancel(self, path: str, query: dict[str, str], api_key: str) -> None:
        response_id, _, action = path.removeprefix("/v1/responses/").partition("/")
        streaming = query.get("stream") == "true"
        try:
            if not path.startswith("/v1/responses/") or (self.command, action) not in RETRIEVALS:
                raise ProviderError(404, error_body("chat", 404, f"Invalid URL ({self.command} {path})"))
            if not api_key:
                raise ProviderError(401)
            response = self.provider.find_background(response_id, streaming)
        except ProviderError as error:
            self._send_error("responses", "", error)
            return
        request = response.answer.request
        if action == "cancel":
            self.provider.record(response.sequence, cancelled=True)
            response.cancel()
        else:
            self.provider.record(response.sequence, attach=1)
        if streaming:
            self._provider_head(request, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
            for event in response.follow(int(query.get("starting_after", -1))):
                self._write(event.encode(), Behaviour())
            self._break(None)
        else:
            data = json.dumps(response.body()).encode()
            self._provider_head(request, {"content-type": "application/json", "content-length": str(len(data))})
            self.wfile.write(data)

    # Waiting and writing

    def _pause(self, seconds: float | None) -> None:
        """Waits, and notices at once when the client goes or the server stops (which closes connections)."""
        if seconds == 0:
            return
        self.connection.settimeout(seconds)
        try:
            if self.connection.recv(1, socket.MSG_PEEK) == b"":
                raise ClientGoneError
        except TimeoutError:
            pass
        finally:
            self.connection.settimeout(None)

    def _waiting(self, events: Iterable[tuple[float, Event]]) -> Iterator[Event]:
        for delay, event in events:
            self._pause(delay)
            yield event

    def _write(self, data: bytes, behaviour: Behaviour, chunked: bool = True) -> None:
        drip = behaviour.fault == "drip"
        for piece in [data[index : index + 1] for index in range(len(data))] if drip else [data]:
            if drip:
                self._pause(behaviour.chunk_delay_seconds or 0.05)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)

    def _break(self, fault: str | None) -> None:
        """Ends an answer: by silence, by a close, or (a stream) as if nothing were missing."""
        if fault in {"hang", "hang_mid_stream"}:
            self._pause(None)
        elif fault in {"reset", "reset_mid_stream"}:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _provider_head(self, request: Request, headers: Mapping[str, str]) -> None:
        usual = self.provider.headers(request.api, request.model, self.provider.new_id("req"))
        self._head(200, {**usual, **headers})

    def _send_error(self, api: str, model: str, error: ProviderError) -> None:
        request_id = self.provider.new_id("req")
        body = error_body(api, error.status) if error.body is None else error.body
        headers = self.provider.headers(api, model, request_id)
        headers["content-type"] = "text/html; charset=utf-8" if isinstance(body, str) else "application/json"
        if error.body is None and error.status == 429:
            headers["retry-after"] = "1"
        if isinstance(body, dict) and api == "messages":
            body = {**body, "request_id": request_id}
            headers["x-should-retry"] = "true" if error.status == 429 or error.status >= 500 else "false"
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        headers["content-length"] = str(len(data))
        self._head(error.status, headers | {name.lower(): value for name, value in error.headers.items()})
        self.wfile.write(data)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A fake OpenAI and Anthropic server on loopback.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds until an answer")
    options = parser.parse_args(arguments)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with FakeProvider(options.port, Config(latency_seconds=options.latency)) as provider:
        sys.stdout.write(f"{provider.base_url}\n")
        sys.stdout.flush()
        stopped.wait()


if __name__ == "__main__":
    main()
