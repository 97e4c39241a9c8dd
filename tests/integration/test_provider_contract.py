"""What every provider keeps, over the official SDKs against a server that behaves as the real ones do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from backburner import errors
from backburner.errors import JobFailed
from backburner.models import Answer, Message, Usage
from backburner.ports import Provider
from backburner.providers import wire
from tests.fakes.provider import Behaviour, FakeProvider
from tests.fakes.provider import Usage as Reported
from tests.integration.roads import CHAT, KEY, MESSAGES, RESPONSES, ROADS, Keyring, Road, ask, question

RIVER = "The Danube flows through ten countries, more than any other river does."


@pytest.fixture(params=ROADS, ids=lambda road: road.name)
def road(request: pytest.FixtureRequest) -> Road:
    """Each API of each provider."""
    assert isinstance(request.param, Road)
    return request.param


@pytest.fixture
def llm(road: Road, provider: FakeProvider) -> Provider:
    """The road's provider, asking the fake server."""
    return road.open(provider.base_url)


def failure(llm: Provider, road: Road, prompt: str = "Name a river.", seconds: float = 5.0) -> JobFailed:
    """The failure that a call ends in."""
    with pytest.raises(JobFailed) as raised:
        ask(llm, question(road, prompt), seconds)
    return raised.value


def canned(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[httpx2.Request], httpx2.Response]
) -> list[httpx2.Request]:
    """Put a server that says exactly that behind the SDKs; the requests that it gets."""
    seen: list[httpx2.Request] = []

    def respond(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        reply = answer(request)
        if hasattr(reply, "_content"):  # known beforehand, which no real transport does: its stream is never closed
            return httpx2.Response(reply.status_code, headers=reply.headers, stream=httpx2.ByteStream(reply.content))
        return reply

    monkeypatch.setattr(httpx2, "HTTPTransport", lambda **_: httpx2.MockTransport(respond))
    return seen


def streamed(road: Road, *events: dict[str, Any] | str) -> Callable[[httpx2.Request], httpx2.Response]:
    """A server that streams these events."""
    headers = {"content-type": "text/event-stream", "x-request-id": "req-1", "request-id": "req-1"}
    return lambda _: httpx2.Response(200, headers=headers, content=road.sse(*events))


def wait_until(true: Callable[[], bool], seconds: float = 3.0) -> None:
    """Wait for what another thread does, no longer than needed."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


# ── Answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_is_whole_and_costs_one_request(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """Text, reason, model, usage and the provider's request id; one call, of which the SDK repeats nothing."""
    provider.script("river", Behaviour(text=RIVER))
    answer = ask(llm, question(road))
    usage = Usage(input_tokens=4, output_tokens=18)
    assert answer == Answer(RIVER, "stop", "m-1", road.provider, usage, answer.request_id)
    assert answer.request_id.startswith("req_")
    [call] = provider.ledger
    assert (call.endpoint, call.outcome, call.billed) == (road.path, "billed", True)
    assert call.headers["x-stainless-retry-count"] == "0"
    assert "idempotency-key" not in call.headers


def test_the_request_is_what_the_provider_documents(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """Token limit, system prompt, turns, user and cache key under each provider's own names, and nothing else."""
    turns = (
        Message(role="user", content="Name a river."),
        Message(role="assistant", content="The Danube."),
        Message(role="user", content="Another one."),
    )
    ask(llm, question(road, messages=turns, system_prompt="Be brief.", max_tokens=77, user_hash="u1", cache_key="c1"))
    said = [{"role": turn.role, "content": turn.content} for turn in turns]
    expected: dict[str, dict[str, Any]] = {
        RESPONSES.name: {
            "model": "m-1",
            "input": said,
            "instructions": "Be brief.",
            "max_output_tokens": 77,
            "safety_identifier": "u1",
            "prompt_cache_key": "c1",
            "store": False,
            "stream": True,
        },
        CHAT.name: {
            "model": "m-1",
            "messages": [{"role": "system", "content": "Be brief."}, *said],
            "max_tokens": 77,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        MESSAGES.name: {
            "model": "m-1",
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": said,
            "max_tokens": 77,
            "metadata": {"user_id": "u1"},
            "stream": True,
        },
    }
    assert provider.ledger[0].request == expected[road.name]


def test_what_is_not_given_is_not_sent(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """No system prompt, user or cache key: no such field, not even null."""
    ask(llm, question(road))
    sent = provider.ledger[0].request
    assert not {"instructions", "system", "safety_identifier", "prompt_cache_key", "metadata"} & set(sent)
    assert None not in sent.values()


@pytest.mark.parametrize("size", [4_095, 4_096])
def test_anthropic_caches_a_system_prompt_from_the_smallest_size_that_it_can(provider: FakeProvider, size: int) -> None:
    """A shorter one would pay for the marker and cache nothing."""
    ask(MESSAGES.open(provider.base_url), question(MESSAGES, system_prompt="s" * size))
    [block] = provider.ledger[0].request["system"]
    assert ("cache_control" in block) is (size >= 4_096)


def test_usage_counts_cached_and_cache_write_tokens_as_part_of_the_input(
    road: Road, llm: Provider, provider: FakeProvider
) -> None:
    """However a provider splits them up, `input_tokens` is all that was sent."""
    reported = Reported(input_tokens=1_000, output_tokens=20, cached_tokens=600, cache_creation_tokens=300)
    provider.script("river", Behaviour(text=RIVER, usage=reported))
    assert ask(llm, question(road)).usage == Usage(1_000, 20, cached_tokens=600, cache_write_tokens=300)


def test_unicode_comes_back_as_it_was(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """Characters beyond the basic plane, combining ones and control characters, split over chunks."""
    provider.configure(tokens_per_chunk=1)
    text = "Donau 🏞️ — 多瑙河\n\tДунай \u0000 é 👩‍👩‍👧"
    provider.script("river", Behaviour(text=text))
    assert ask(llm, question(road)).text == text


def test_an_emoji_that_the_provider_split_in_two_is_one_character_again(
    road: Road, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that streams UTF-16 units sends half a pair in each chunk; the answer must be storable text."""
    canned(monkeypatch, streamed(road, *road.stream(["river \ud83c", "\udfde and \ud83c"])))
    answer = ask(road.open(provider.base_url), question(road))
    assert answer.text.encode() in ("river 🏞 and \ufffd".encode(), b"river \xf0\x9f\x8f\x9e and ?")


def test_an_answer_cut_by_its_limit_says_so(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """PRV-05: text and finish reason `length`."""
    provider.script("river", Behaviour(text="Half a sent", finish_reason="length"))
    answer = ask(llm, question(road))
    assert (answer.text, answer.finish_reason) == ("Half a sent", "length")


def test_a_finish_reason_that_nobody_knows_is_called_unknown(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """The text is paid for and kept; a new word of the provider's is no failure."""
    provider.script("river", Behaviour(text=RIVER, finish_reason="novelty"))
    answer = ask(llm, question(road))
    assert (answer.text, answer.finish_reason) == (RIVER, "unknown")


# ── Answers that are none: PRV-05 ────────────────────────────────────────────────────────────────────────────────────

ENDINGS = [
    ("length without text", ROADS, Behaviour(text="", finish_reason="length"), errors.EmptyAnswer),
    ("stop without text", ROADS, Behaviour(text=""), errors.EmptyAnswer),
    ("only white space", ROADS, Behaviour(text=" \n"), errors.EmptyAnswer),
    ("no choices", ROADS, Behaviour(fault="empty_choices"), errors.EmptyAnswer),
    ("null content", (RESPONSES, CHAT), Behaviour(fault="null_content"), errors.EmptyAnswer),
    ("thinking only", ROADS, Behaviour(fault="thinking_only"), errors.EmptyAnswer),
    ("filtered", (RESPONSES, CHAT), Behaviour(text="", finish_reason="content_filter"), errors.ContentFiltered),
    ("cut by the filter", (RESPONSES, CHAT), Behaviour(text="Ab", finish_reason="content_filter"),
     errors.ContentFiltered),
    ("refused", ROADS, Behaviour(fault="refusal"), errors.Refused),
    ("refused in words", (MESSAGES,), Behaviour(text="No.", finish_reason="content_filter"), errors.Refused),
    ("context full", (MESSAGES,), Behaviour(text="", finish_reason="model_context_window_exceeded"),
     errors.ContextLengthExceeded),
]  # fmt: skip


@pytest.mark.parametrize(
    ("road", "behaviour", "kind"),
    [
        pytest.param(road, behaviour, kind, id=f"{name}-{road.name}")
        for name, roads, behaviour, kind in ENDINGS
        for road in roads
    ],
)
def test_prv_05_each_answer_without_text_has_a_name_and_its_usage(
    provider: FakeProvider, road: Road, behaviour: Behaviour, kind: type[JobFailed]
) -> None:
    """Not retried unchanged, never a blank success, and what it cost is known exactly."""
    behaviour = Behaviour(text=behaviour.text, finish_reason=behaviour.finish_reason, fault=behaviour.fault,
                          usage=Reported(input_tokens=10, output_tokens=8_000))  # fmt: skip
    provider.script("river", behaviour)
    error = failure(road.open(provider.base_url), road)
    assert type(error) is kind
    assert not error.retryable
    assert error.usage == Usage(10, 8_000)
    assert error.request_id is not None
    assert len(provider.ledger) == 1


# ── Errors: PRV-02, PRV-08 and issue C, item 2 ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Refusal:
    """One error reply, and what it stands for."""

    name: str
    roads: tuple[Road, ...]
    status: int
    kind: type[JobFailed]
    body: tuple[str, str, str | None] | str | dict[str, Any] | None = None
    """message, type and code; or the text; or the JSON; or None for the provider's usual words."""

    def behaviour(self, road: Road, **more: Any) -> Behaviour:
        body = road.error(*self.body) if isinstance(self.body, tuple) else self.body
        return Behaviour(status=self.status, body=body, **more)


OPENAI = (RESPONSES, CHAT)
CLAUDE = (MESSAGES,)
HTML = "<!DOCTYPE html><html><body><h1>502 Bad Gateway</h1></body></html>"
REFUSALS = [
    Refusal("rate limit", ROADS, 429, errors.RateLimited),
    Refusal("spent quota", OPENAI, 429, errors.QuotaExhausted,
            ("You exceeded your current quota.", "insufficient_quota", "insufficient_quota")),
    Refusal("spent quota by type", OPENAI, 429, errors.QuotaExhausted,
            ("You exceeded your current quota.", "insufficient_quota", None)),
    Refusal("hard limit", OPENAI, 400, errors.SpendLimit,
            ("Billing hard limit has been reached.", "invalid_request_error", "billing_hard_limit_reached")),
    Refusal("spend limit", CLAUDE, 429, errors.SpendLimit,
            ("Your workspace has reached its limit.", "rate_limit_error", "enforced_spend_limit_reached")),
    Refusal("credit", CLAUDE, 402, errors.QuotaExhausted),
    Refusal("payment required", ROADS, 402, errors.QuotaExhausted, {"error": {"message": "payment required"}}),
    Refusal("quota in prose", ROADS, 429, errors.RateLimited,
            {"status": 429, "error": "INSUFFICIENT QUOTA", "message": "too many concurrent requests"}),
    Refusal("not JSON", ROADS, 429, errors.RateLimited, "not json"),
    Refusal("overloaded", CLAUDE, 529, errors.Overloaded),
    Refusal("overloaded", OPENAI, 503, errors.Overloaded),
    Refusal("overloaded, in HTML", ROADS, 503, errors.Overloaded, HTML),
    Refusal("server error", ROADS, 500, errors.ProviderFault),
    Refusal("bad gateway, in HTML", ROADS, 502, errors.ProviderFault, HTML),
    Refusal("an empty error", ROADS, 500, errors.ProviderFault, ""),
    Refusal("an error without fields", ROADS, 500, errors.ProviderFault, {}),
    Refusal("an error that is null", ROADS, 500, errors.ProviderFault, {"error": None}),
    Refusal("an error with odd fields", ROADS, 500, errors.ProviderFault,
            {"error": {"message": 7, "type": ["x"], "code": 500, "details": "?"}}),
    Refusal("gateway timeout", CLAUDE, 504, errors.ProviderTimeout),
    Refusal("gateway timeout, in HTML", ROADS, 504, errors.ProviderTimeout, HTML),
    Refusal("request timeout", ROADS, 408, errors.ProviderTimeout, {}),
    Refusal("conflict", ROADS, 409, errors.ProviderFault, {}),
    Refusal("invalid request", ROADS, 400, errors.ProviderRefusedRequest),
    Refusal("unprocessable", ROADS, 422, errors.ProviderRefusedRequest, {"detail": "role must be user"}),
    Refusal("context by code", OPENAI, 400, errors.ContextLengthExceeded,
            ("limit is 8192 tokens, request has 9001", "invalid_request_error", "context_length_exceeded")),
    Refusal("context in prose", CLAUDE, 400, errors.ContextLengthExceeded,
            ("prompt is too long: 9001 tokens > 8192 maximum", "invalid_request_error", None)),
    Refusal("context in any prose", ROADS, 400, errors.ContextLengthExceeded,
            {"error": {"message": "input of 9001 tokens does not fit the model's context length"}}),
    Refusal("context of llama.cpp", (CHAT,), 400, errors.ContextLengthExceeded,
            {"error": {"code": 400, "message": "too big", "type": "exceed_context_size_error", "n_ctx": 512}}),
    Refusal("too large", ROADS, 413, errors.ContextLengthExceeded, "Payload Too Large"),
    Refusal("too large by type", CLAUDE, 413, errors.ContextLengthExceeded,
            ("Request exceeds the maximum size", "request_too_large", None)),
    Refusal("key", ROADS, 401, errors.Authentication),
    Refusal("key without words", ROADS, 401, errors.Authentication, {"error": {"type": "authentication_error"}}),
    Refusal("permission", ROADS, 403, errors.Authentication),
    Refusal("model", ROADS, 404, errors.ModelNotFound),
    Refusal("model in prose", ROADS, 404, errors.ModelNotFound, {"error": {"message": "model not found"}}),
    Refusal("content policy", OPENAI, 400, errors.ContentFiltered,
            ("Your request was rejected.", "invalid_request_error", "content_policy_violation")),
    Refusal("a teapot", ROADS, 418, errors.ProviderRefusedRequest, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("road", "refusal"),
    [pytest.param(road, refusal, id=f"{refusal.name}-{road.name}") for refusal in REFUSALS for road in refusal.roads],
)
def test_prv_02_prv_08_each_error_reply_has_its_code_and_costs_one_request(
    provider: FakeProvider, road: Road, refusal: Refusal
) -> None:
    """Structured fields first, then the status, prose last; nothing is repeated here, and no usage is made up."""
    provider.script("river", refusal.behaviour(road))
    error = failure(road.open(provider.base_url), road)
    assert type(error) is refusal.kind
    assert error.usage is None
    assert error.request_id is not None
    assert error.request_id.startswith("req_")
    assert len(provider.ledger) == 1
    assert "<" not in error.message
    assert 0 < len(error.message) <= 500


RETRYABLE = {"rate_limited", "overloaded", "provider_error", "timeout", "connection"}
TERMINAL = {
    "invalid_request", "context_length_exceeded", "model_not_found", "content_filtered", "refused", "empty_answer",
    "quota_exhausted", "spend_limit", "authentication",
}  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_the_taxonomy_is_the_documented_one(refusal: Refusal) -> None:
    """Each code is in exactly one of the two documented lists, and `retryable` says which."""
    assert refusal.kind.code in (RETRYABLE if refusal.kind.retryable else TERMINAL)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"Retry-After": "0.5"}, 0.5),
        ({"retry-after": "soon"}, None),
        ({}, None),
    ],
)
def test_the_wait_that_the_provider_asks_for_is_known(
    road: Road, llm: Provider, provider: FakeProvider, headers: dict[str, str], seconds: float | None
) -> None:
    """`retry-after-ms` before `retry-after`; nonsense counts as nothing."""
    body = road.error("Slow down.", "rate_limit_error", None)
    provider.script("river", Behaviour(status=429, body=body, headers=headers))
    assert failure(llm, road).retry_after_seconds == seconds


def test_a_providers_prose_reaches_a_client_cleaned_and_bounded(
    road: Road, llm: Provider, provider: FakeProvider
) -> None:
    """One printable line."""
    prose = "Bad\u0000 value\r\n\tat \u2028line 1 " + "x" * 5_000
    provider.script("river", Behaviour(status=400, body=road.error(prose, "invalid_request_error", None)))
    message = failure(llm, road).message
    assert message.startswith("Bad value at line 1 xxx")
    assert message.isprintable()
    assert len(message) <= 300


def test_a_key_is_never_in_an_error(road: Road, provider: FakeProvider) -> None:
    """Not even when the provider quotes it, whole or in part."""
    body = road.error(f"Incorrect API key provided: {KEY}.", "authentication_error", "invalid_api_key")
    for status in (401, 403, 400, 500):
        provider.script("river", Behaviour(status=status, body=body))
        error = failure(road.open(provider.base_url), road)
        assert KEY not in error.message
        assert KEY[-6:] not in error.message


# ── Broken streams and connections ───────────────────────────────────────────────────────────────────────────────────


def test_a_truncated_stream_is_no_answer(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """It ends cleanly and raises nothing in either SDK; half a text is not an answer, and its cost is estimated."""
    provider.configure(tokens_per_chunk=1)
    provider.script("river", Behaviour(text=RIVER, fault="truncated_stream"))
    error = failure(llm, road)
    assert type(error) is errors.ProviderFault
    assert error.retryable
    assert error.usage is not None
    assert error.usage.estimated
    assert 0 < error.usage.output_tokens < 18
    assert error.request_id is not None


def test_a_truncated_stream_is_no_answer_though_each_chunk_carried_usage(
    provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some compatible servers count along in every chunk; that is no sign of an end."""
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    chunk = {"choices": [{"index": 0, "delta": {"content": "Half a"}, "finish_reason": None}], "usage": usage}
    canned(monkeypatch, streamed(CHAT, chunk))
    error = failure(CHAT.open(provider.base_url), CHAT)
    assert (type(error), error.usage) == (errors.ProviderFault, Usage(3, 1))


def test_a_stream_without_any_event_is_no_answer(
    road: Road, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 200 that ends at once is a provider's fault, to be tried again, and not an empty answer."""
    canned(monkeypatch, streamed(road))
    error = failure(road.open(provider.base_url), road)
    assert type(error) is errors.ProviderFault
    assert error.request_id == "req-1"


def test_a_malformed_chunk_is_a_providers_fault(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """Broken JSON in the middle of a stream."""
    provider.configure(tokens_per_chunk=1)
    provider.script("river", Behaviour(text=RIVER, fault="malformed_chunk"))
    error = failure(llm, road)
    assert type(error) is errors.ProviderFault
    assert error.usage is not None
    assert error.usage.estimated


ODD_EVENTS: dict[str, list[dict[str, Any] | str]] = {
    RESPONSES.name: [
        "7", "[1]", '"hi"', "null", "true", "{}", {"type": "novelty"},
        {"type": "response.completed"}, {"type": "response.completed", "response": None},
        {"type": "response.output_text.delta"}, {"type": "response.output_text.delta", "delta": 7},
        {"type": "response.completed", "response": {"status": "completed", "output": None}},
        {"type": "response.failed", "response": {"status": "failed"}},
        {"type": "error"},
    ],
    CHAT.name: [
        "7", "[1]", '"hi"', "null", "true", "{}", {"choices": None}, {"choices": [{}]}, {"choices": [None]},
        {"choices": [{"delta": None}]}, {"choices": [{"delta": {"content": 7}}]}, {"choices": "x"},
        {"error": "out of memory"}, {"error": {"message": None}},
    ],
    MESSAGES.name: [
        {"type": "novelty"}, {"type": "message_start"}, {"type": "message_start", "message": None},
        {"type": "content_block_delta"}, {"type": "content_block_delta", "delta": None},
        {"type": "content_block_delta", "delta": {"type": "text_delta"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": 7}},
        {"type": "message_delta"}, {"type": "message_delta", "delta": None}, {"type": "error"},
        {"type": "error", "error": "overloaded"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("road", "event"),
    [pytest.param(road, event, id=f"{road.name}-{event}") for road in ROADS for event in ODD_EVENTS[road.name]],
)
def test_an_event_of_a_wrong_shape_is_a_providers_fault(
    provider: FakeProvider, monkeypatch: pytest.MonkeyPatch, road: Road, event: dict[str, Any] | str
) -> None:
    """JSON, but not what was documented: tried again as the provider's fault, not shown as one of ours."""
    canned(monkeypatch, streamed(road, event))
    error = failure(road.open(provider.base_url), road)
    assert type(error) is errors.ProviderFault


def test_events_that_nobody_knows_are_passed_over(
    road: Road, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider adds kinds of events without notice."""
    events = road.stream(["The ", "Danube."])
    novelty: dict[str, Any] = {"choices": [], "novelty": 1} if road.api == "chat" else {"type": "novelty", "x": 1}
    canned(monkeypatch, streamed(road, novelty, *events[:1], novelty, *events[1:]))
    answer = ask(road.open(provider.base_url), question(road))
    assert answer == Answer("The Danube.", "stop", "m-1", road.provider, Usage(3, 2), "req-1")


@pytest.mark.parametrize("ending", ["usage", "_tokens_details"])
@pytest.mark.parametrize("shape", [None, "12", [], 7])
def test_a_count_of_another_shape_does_not_cost_the_answer(
    road: Road, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch, ending: str, shape: object
) -> None:
    """Nor does one that says nothing."""

    def spoilt(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shape if name.endswith(ending) else spoilt(item) for name, item in value.items()}
        return [spoilt(item) for item in value] if isinstance(value, list) else value

    canned(monkeypatch, streamed(road, *spoilt(road.stream(["The Danube."]))))
    assert ask(road.open(provider.base_url), question(road)).text == "The Danube."


@pytest.mark.parametrize("count", [None, "12", -1, 1.5])
def test_a_count_that_is_none_does_not_cost_the_answer(
    road: Road, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch, count: object
) -> None:
    """A compatible server may report null, a text or less than nothing: the answer is paid for and is kept."""

    def spoilt(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: count if name.endswith("_tokens") else spoilt(item) for name, item in value.items()}
        return [spoilt(item) for item in value] if isinstance(value, list) else value

    canned(monkeypatch, streamed(road, *spoilt(road.stream(["The Danube."]))))
    answer = ask(road.open(provider.base_url), question(road))
    assert answer.text == "The Danube."
    counts = (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.cached_tokens)
    assert all(type(value) is int and value >= 0 for value in counts)


@pytest.mark.parametrize(
    ("road", "body", "kind"),
    [
        (RESPONSES, {"code": "rate_limit_exceeded", "message": "Slow down."}, errors.RateLimited),
        (RESPONSES, {"error": {"code": "server_error", "message": "Sorry."}}, errors.ProviderFault),
        (RESPONSES, {"code": "context_length_exceeded", "message": "Too long."}, errors.ContextLengthExceeded),
        (CHAT, {"error": {"type": "server_error", "message": "Sorry."}}, errors.ProviderFault),
        (CHAT, {"error": {"code": "rate_limit_exceeded", "message": "Slow down."}}, errors.RateLimited),
        (CHAT, {"error": {"code": 500, "message": "CUDA out of memory"}}, errors.ProviderFault),
        (MESSAGES, {"error": {"type": "overloaded_error", "message": "Overloaded"}}, errors.Overloaded),
        (MESSAGES, {"error": {"type": "api_error", "message": "Sorry."}}, errors.ProviderFault),
        (MESSAGES, {"error": {"type": "novelty", "message": "?"}}, errors.ProviderFault),
    ],
    ids=lambda value: value.name if isinstance(value, Road) else getattr(value, "__name__", None),
)
def test_an_error_inside_a_200_stream_is_read_like_any_other(
    provider: FakeProvider, road: Road, body: dict[str, Any], kind: type[JobFailed]
) -> None:
    """By its code, not by its status; what had been said is estimated; the receipt names the request."""
    provider.configure(tokens_per_chunk=1)
    provider.script("river", Behaviour(text=RIVER, fault="error_in_stream", body=body))
    error = failure(road.open(provider.base_url), road)
    assert type(error) is kind
    assert error.usage is not None
    assert error.usage.estimated
    assert error.request_id is not None
    assert len(provider.ledger) == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("server_error", errors.ProviderFault),
        ("rate_limit_exceeded", errors.RateLimited),
        ("invalid_prompt", errors.ContentFiltered),
    ],
)
def test_a_response_that_failed_is_read_by_its_code(provider: FakeProvider, code: str, kind: type[JobFailed]) -> None:
    """The Responses API ends such a stream in good order, with `response.failed`."""
    body = {"error": {"code": code, "message": "It did not work out."}}
    provider.script("river", Behaviour(text=RIVER, fault="response_failed", body=body))
    error = failure(RESPONSES.open(provider.base_url), RESPONSES)
    assert (type(error), error.message) == (kind, "It did not work out.")
    assert error.request_id is not None


def test_too_long_a_prompt_is_noticed_wherever_the_provider_says_so(
    road: Road, llm: Provider, provider: FakeProvider
) -> None:
    """As a 400, or inside the stream that had begun already."""
    provider.configure(context_tokens=10)
    error = failure(llm, road, "river " * 100)
    assert type(error) is errors.ContextLengthExceeded
    assert len(provider.ledger) == 1


def test_a_connection_lost_after_the_final_event_does_not_cost_the_answer(
    road: Road, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is whole and paid for; how the connection ends is nobody's concern."""

    class Broken(httpx2.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield road.sse(*road.stream(["The Danube."]))
            raise httpx2.RemoteProtocolError("incomplete chunked read")

    headers = {"content-type": "text/event-stream"}
    canned(monkeypatch, lambda _: httpx2.Response(200, headers=headers, stream=Broken()))
    answer = ask(road.open(provider.base_url), question(road))
    assert (answer.text, answer.usage) == ("The Danube.", Usage(3, 2))


def test_a_web_page_under_status_200_is_a_providers_fault(
    road: Road, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy's login or maintenance page is no empty answer."""
    canned(monkeypatch, lambda _: httpx2.Response(200, headers={"content-type": "text/html"}, content=HTML))
    error = failure(road.open(provider.base_url), road)
    assert type(error) is errors.ProviderFault
    assert error.retryable


def test_a_redirect_is_not_followed(road: Road, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the key elsewhere."""
    seen = canned(monkeypatch, lambda _: httpx2.Response(307, headers={"location": "http://elsewhere.test/"}))
    error = failure(road.open(provider.base_url), road)
    assert type(error) is errors.ProviderFault
    assert len(seen) == 1


def test_a_reset_before_the_first_byte_is_retried_once(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """A kept-alive connection that had gone stale costs the job nothing."""
    provider.script("river", Behaviour(fault="reset"), Behaviour(text=RIVER))
    assert ask(llm, question(road)).text == RIVER
    assert [call.outcome for call in provider.ledger] == ["fault:reset", "billed"]


def test_a_second_reset_is_a_lost_connection(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """Two requests and no more: the job's attempts own all further retries."""
    provider.script("river", Behaviour(fault="reset"))
    error = failure(llm, road)
    assert type(error) is errors.ConnectionLost
    assert error.retryable
    assert error.usage is None
    assert len(provider.ledger) == 2


def test_a_reset_in_the_middle_is_not_retried(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """The answer had begun and is paid for; only the job may decide to pay again."""
    provider.configure(tokens_per_chunk=1)
    provider.script("river", Behaviour(text=RIVER, fault="reset_mid_stream"))
    error = failure(llm, road)
    assert type(error) is errors.ConnectionLost
    assert error.usage is not None
    assert error.usage.estimated
    assert error.request_id is not None
    assert len(provider.ledger) == 1


def test_nobody_there_is_a_lost_connection(road: Road) -> None:
    """A refused connection ends at once."""
    with FakeProvider() as gone:
        address = gone.base_url
    began = time.monotonic()
    error = failure(road.open(address), road)
    assert type(error) is errors.ConnectionLost
    assert time.monotonic() - began < 2


# ── Time: PRV-03 ─────────────────────────────────────────────────────────────────────────────────────────────────────

SLOW = [
    ("never answers", Behaviour(fault="hang"), 1),
    ("one byte at a time", Behaviour(fault="drip", chunk_delay_seconds=0.2), 1),
    ("falls silent", Behaviour(text=RIVER, fault="hang_mid_stream"), 1),
    ("falls silent late", Behaviour(text=RIVER, fault="hang_mid_stream", latency_seconds=0.8), 1),
    ("slow chunks", Behaviour(text=RIVER * 20, chunk_delay_seconds=0.15), 1),
    ("slow first text", Behaviour(text=RIVER, latency_seconds=30), 1),
    ("slow error", Behaviour(status=500, latency_seconds=30), 1),
]


@pytest.mark.parametrize("behaviour", [slow[1] for slow in SLOW], ids=[slow[0] for slow in SLOW])
def test_prv_03_a_call_ends_within_its_time_whatever_the_provider_does(
    road: Road, llm: Provider, provider: FakeProvider, behaviour: Behaviour
) -> None:
    """The time given is for the whole call: not for each byte, nor for each silence anew.

    A busy machine may hold one of three calls up, but none would be in time if any time began anew.
    """
    provider.configure(tokens_per_chunk=1)
    took: list[float] = []
    while len(took) < 3 and not any(seconds < 1.5 for seconds in took):
        provider.script("river", behaviour)
        began = time.monotonic()
        error = failure(llm, road, seconds=1.0)
        took.append(time.monotonic() - began)
        assert type(error) is errors.ProviderTimeout
        assert len(provider.ledger) == len(took)
    assert min(took) < 1.5


def test_a_retried_reset_does_not_begin_the_time_anew(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """A reset late in the call leaves the second request only what is left."""
    late: list[float] = []

    class Slow(httpx2.BaseTransport):
        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            late.append(request.extensions["timeout"]["read"])
            if len(late) == 1:
                time.sleep(0.6)
                raise httpx2.ReadError("reset")
            raise httpx2.ReadTimeout("silence")

    client = httpx2.Client(transport=wire.WatchedTransport(Slow()))
    with wire.watching(1.0, lambda: False) as watch, pytest.raises(httpx2.ReadTimeout):
        client.get("http://provider.test", timeout=watch.timeout())
    assert late[0] == pytest.approx(1.0, abs=0.1)
    assert late[1] == pytest.approx(0.4, abs=0.15)


# ── Cancelling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_abandoned_call_stops_at_the_next_chunk(
    road: Road, llm: Provider, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is closed, so the provider stops; what it had said is estimated."""
    monkeypatch.setattr(wire, "LOOK_SECONDS", 60.0)  # it is the chunk that tells
    provider.configure(tokens_per_chunk=1)
    provider.script("river", Behaviour(text=RIVER * 50, chunk_delay_seconds=0.05))
    with pytest.raises(errors.Abandoned) as raised:
        ask(llm, question(road), abandoned=lambda: any(time.time() - call.began > 0.2 for call in provider.ledger))
    assert raised.value.usage is not None
    assert raised.value.usage.estimated
    assert raised.value.usage.input_tokens == 4
    assert raised.value.request_id is not None
    wait_until(lambda: provider.ledger[0].ended is not None)
    [call] = provider.ledger
    assert call.outcome == "client_gone"
    assert call.output_tokens < 100


def test_a_call_abandoned_in_silence_stops_soon(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """A reasoning model is silent for minutes; a cancel must not wait for its next word."""
    provider.script("river", Behaviour(text=RIVER, latency_seconds=30))
    began = time.monotonic()
    with pytest.raises(errors.Abandoned):
        ask(llm, question(road), 8.0, abandoned=lambda: time.monotonic() - began > 0.5)
    assert time.monotonic() - began < 6


def test_a_call_abandoned_before_it_began_is_not_made(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """Nothing is sent, so nothing is paid."""
    with pytest.raises(errors.Abandoned) as raised:
        ask(llm, question(road), abandoned=lambda: True)
    assert raised.value.usage is None
    assert provider.ledger == []


# ── Keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_refused_key_is_refreshed_once_and_the_call_made_again(road: Road, provider: FakeProvider) -> None:
    """Rotation costs the job nothing."""
    provider.configure(api_keys=["sk-new-1234"])
    keyring = Keyring(["sk-old-0000", "sk-new-1234"])
    assert ask(road.open(provider.base_url, keyring), question(road)).finish_reason == "stop"
    assert keyring.refreshes == ["sk-old-0000"]
    assert [(call.api_key, call.outcome) for call in provider.ledger] == [("0000", "error:401"), ("1234", "billed")]


def test_a_key_that_stays_refused_fails_after_one_refresh(road: Road, provider: FakeProvider) -> None:
    """No hammering: one request if nothing newer is there, two if the newer one is refused as well."""
    provider.configure(api_keys=["sk-right"])
    same = Keyring(["sk-old-0000"])
    assert type(failure(road.open(provider.base_url, same), road)) is errors.Authentication
    assert (len(same.refreshes), len(provider.ledger)) == (1, 1)
    newer = Keyring(["sk-old-0000", "sk-bad-1111", "sk-bad-2222"])
    assert type(failure(road.open(provider.base_url, newer), road)) is errors.Authentication
    assert (len(newer.refreshes), len(provider.ledger)) == (1, 3)


def test_a_missing_key_names_the_provider_and_sends_nothing(road: Road, provider: FakeProvider) -> None:
    """`authentication`, with what to do about it."""
    error = failure(road.open(provider.base_url, Keyring([""])), road)
    assert type(error) is errors.Authentication
    assert f"{road.provider}_api_key" in error.message
    assert provider.ledger == []


def test_a_key_that_no_header_can_carry_is_an_authentication_failure(road: Road, provider: FakeProvider) -> None:
    """A pasted smart quote or line break is the deployment's mistake, to be named as such."""
    for key in ("sk-“quoted”", "sk-two\nlines"):
        error = failure(road.open(provider.base_url, Keyring([key])), road)
        assert type(error) is errors.Authentication
        assert key not in error.message
    assert provider.ledger == []


# ── Connections: PRV-09 ──────────────────────────────────────────────────────────────────────────────────────────────


class Counted(set[Any]):
    """A set that counts what was ever added."""

    added = 0

    def add(self, element: Any) -> None:
        self.added += 1
        super().add(element)


@pytest.mark.parametrize("road", [RESPONSES, MESSAGES], ids=lambda road: road.name)
def test_prv_09_a_warm_client_reuses_its_connection(road: Road, provider: FakeProvider) -> None:
    """Three calls, one connection. (In chat completions OpenAI's SDK hangs up at [DONE], a byte too early.)"""
    provider.connections = connections = Counted()
    llm = road.open(provider.base_url)
    for _ in range(3):
        ask(llm, question(road))
    assert [call.outcome for call in provider.ledger] == ["billed"] * 3
    assert connections.added == 1


def test_prv_09_three_calls_of_a_warm_client_are_three_requests(
    road: Road, llm: Provider, provider: FakeProvider
) -> None:
    """Also from a thread that did not make the client."""
    ask(llm, question(road))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask, llm, question(road)).result()
    ask(llm, question(road))
    assert [call.outcome for call in provider.ledger] == ["billed"] * 3


def test_prv_09_a_provider_works_in_many_threads_at_once(road: Road, llm: Provider, provider: FakeProvider) -> None:
    """Ten jobs of a batch run at the same time, each with its own answer, time and abandonment."""
    provider.configure(together=9)
    provider.script("river 3", Behaviour(latency_seconds=60))

    def run(number: int) -> str:
        if number == 3:
            with pytest.raises(errors.ProviderTimeout):
                ask(llm, question(road, f"river {number}"), 0.2)
            return "timeout"
        return str(ask(llm, question(road, f"river {number}")).text)

    with ThreadPoolExecutor(10) as pool:
        texts = list(pool.map(run, range(10)))
    assert texts == [("timeout" if number == 3 else f"Echo: river {number}") for number in range(10)]
    assert max(call.concurrent for call in provider.ledger) >= 9


def test_prv_09_the_client_is_made_once(road: Road, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a cold worker's first batch asks ten times at once: each has a trust store to load."""
    made: list[None] = []
    make = wire.http_client

    def counting() -> httpx2.Client:
        made.append(None)
        time.sleep(0.05)
        return make()

    monkeypatch.setattr(wire, "http_client", counting)
    llm = road.open(provider.base_url)
    barrier = threading.Barrier(8)

    def run(_: int) -> None:
        barrier.wait()
        ask(llm, question(road))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))
    assert len(made) == 1


def test_a_proxy_or_a_key_in_the_environment_is_not_picked_up(
    road: Road, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys come from the deployment's secret, addresses from its parameters, and from nowhere else."""
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(name, "sk-environment-9999")
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "other")
    ask(road.open(provider.base_url), question(road))
    assert provider.ledger[0].api_key == KEY[-4:]


@pytest.fixture(autouse=True)
def _no_thread_is_left(provider: FakeProvider) -> Iterator[None]:
    """A call's helpers end with the call."""
    yield
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "call-watch"])
