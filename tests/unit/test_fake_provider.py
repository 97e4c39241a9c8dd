"""The fake provider behaves as the official SDKs expect of the real ones."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types.shared.enforced_spend_limit_reached_error import EnforcedSpendLimitReachedError

from tests.fakes.provider import Behaviour, FakeProvider, Usage, anthropic_error, openai_error

APIS = ["responses", "chat", "messages"]
OPENAI_APIS = ["responses", "chat"]
QUESTION = "hello there, how are you today?"
ECHO = f"Echo: {QUESTION}"


@pytest.fixture
def provider() -> Iterator[FakeProvider]:
    with FakeProvider() as running:
        yield running


def openai_client(provider: FakeProvider, timeout_seconds: float = 5, key: str = "sk-test-abcd") -> openai.OpenAI:
    """Strict: a reply that does not fit the SDK's types raises."""
    return openai.OpenAI(
        base_url=provider.base_url + "/v1",
        api_key=key,
        max_retries=0,
        timeout=timeout_seconds,
        _strict_response_validation=True,
    )


def anthropic_client(
    provider: FakeProvider, timeout_seconds: float = 5, key: str = "sk-ant-wxyz"
) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=provider.base_url,
        api_key=key,
        max_retries=0,
        timeout=timeout_seconds,
        _strict_response_validation=True,
    )


def ask(
    provider: FakeProvider,
    api: str,
    *,
    stream: bool = False,
    prompt: str = QUESTION,
    model: str = "some-model",
    max_tokens: int = 1000,
    timeout_seconds: float = 5,
    key: str = "sk-test-abcd",
) -> Any:
    """The SDK's answer: an object, or with `stream` the list of all events."""
    messages: Any = [{"role": "user", "content": prompt}]
    answer: Any
    if api == "messages":
        claude = anthropic_client(provider, timeout_seconds, key)
        answer = claude.messages.create(model=model, messages=messages, max_tokens=max_tokens, stream=stream)
    elif api == "responses":
        responses = openai_client(provider, timeout_seconds, key).responses
        answer = responses.create(model=model, input=prompt, max_output_tokens=max_tokens, stream=stream)
    else:
        chat = openai_client(provider, timeout_seconds, key).chat.completions
        options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = chat.create(model=model, messages=messages, max_completion_tokens=max_tokens, **options)
    return list(answer) if stream else answer


def streamed_text(api: str, events: list[Any]) -> str:
    if api == "responses":
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")
    if api == "messages":
        deltas = [event.delta for event in events if event.type == "content_block_delta"]
        return "".join(delta.text for delta in deltas if delta.type == "text_delta")
    return "".join(event.choices[0].delta.content or "" for event in events if event.choices)


def whole_text(api: str, answer: Any) -> str:
    if api == "responses":
        return str(answer.output_text)
    return str(answer.content[0].text if api == "messages" else answer.choices[0].message.content)


def wait_until_ended(provider: FakeProvider, count: int = 1) -> None:
    deadline = time.monotonic() + 5
    while sum(call.ended is not None for call in provider.ledger) < count:
        assert time.monotonic() < deadline, provider.ledger
        time.sleep(0.005)


# Answers


@pytest.mark.parametrize("api", APIS)
def test_a_plain_call_echoes_the_users_words(provider: FakeProvider, api: str) -> None:
    """Each API answers with the echo, and the ledger has the one billed call."""
    assert whole_text(api, ask(provider, api)) == ECHO
    [call] = provider.ledger
    assert (call.outcome, call.billed, call.model, call.api_key) == ("billed", True, "some-model", "abcd")
    assert (call.input_tokens, call.output_tokens) == (8, 10)
    assert call.prompt == QUESTION
    assert call.headers["x-stainless-retry-count"] == "0"
    assert call.ended is not None


@pytest.mark.parametrize("api", APIS)
def test_a_stream_carries_the_same_text_in_pieces(provider: FakeProvider, api: str) -> None:
    """The deltas of each API add up to the echo, in more than one piece."""
    provider.configure(tokens_per_chunk=1)
    events = ask(provider, api, stream=True)
    assert streamed_text(api, events) == ECHO
    assert len(events) > len(ECHO) / 4
    assert provider.ledger[0].billed


def test_the_responses_stream_has_the_documented_events(provider: FakeProvider) -> None:
    """Events come in the documented order, numbered without gaps, and the last one carries the usage."""
    events = ask(provider, "responses", stream=True, prompt="hi")
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.usage.total_tokens == 3


def test_the_messages_stream_has_the_documented_events(provider: FakeProvider) -> None:
    """The SDK swallows the ping; start and end events carry the usage."""
    events = ask(provider, "messages", stream=True, prompt="hi")
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0].message.usage.input_tokens == 1
    assert (events[-2].usage.output_tokens, events[-2].delta.stop_reason) == (2, "end_turn")


def test_the_messages_stream_pings(provider: FakeProvider) -> None:
    """A ping is on the wire although the SDK does not show it."""
    with anthropic_client(provider).messages.with_streaming_response.create(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}], stream=True
    ) as response:
        assert b"event: ping\n" in response.read()


def test_a_chat_stream_ends_with_usage_when_asked(provider: FakeProvider) -> None:
    """The last chunk has the usage and no choice, as with include_usage."""
    last = ask(provider, "chat", stream=True)[-1]
    assert last.choices == []
    assert last.usage.total_tokens == 18
    without = openai_client(provider).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    assert all(chunk.usage is None for chunk in without)


@pytest.mark.parametrize("api", APIS)
def test_a_script_is_used_step_by_step_and_its_last_step_repeats(provider: FakeProvider, api: str) -> None:
    """Only calls whose prompt matches use up steps."""
    provider.script("hello", Behaviour(text="one"), Behaviour(text="two"))
    assert whole_text(api, ask(provider, api, prompt="other")) == "Echo: other"
    assert [whole_text(api, ask(provider, api)) for _ in range(3)] == ["one", "two", "two"]


def test_system_prompts_count_and_match(provider: FakeProvider) -> None:
    """The prompt is the system prompt and all messages in each API's way of saying so; the echo is the user's."""
    chat: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    gpt, claude = openai_client(provider), anthropic_client(provider)
    gpt.responses.create(model="m", instructions="be brief", input="hi")
    gpt.responses.create(model="m", input=chat)
    gpt.chat.completions.create(model="m", messages=chat)
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    claude.messages.create(model="m", max_tokens=9, system="be brief", messages=parts)
    blocks: Any = [{"type": "text", "text": "be brief"}]
    claude.messages.create(model="m", max_tokens=9, system=blocks, messages=parts)
    assert {call.prompt for call in provider.ledger} == {"be brief\nhi"}
    assert {call.output_tokens for call in provider.ledger} == {2}


def test_finish_reasons_are_said_in_each_apis_words(provider: FakeProvider) -> None:
    """Length and content filter have their words in each API."""
    provider.script("length", Behaviour(finish_reason="length"))
    provider.script("filter", Behaviour(finish_reason="content_filter"))
    said = []
    for prompt in ("length", "filter"):
        response = ask(provider, "responses", prompt=prompt)
        said.append((response.status, response.incomplete_details.reason))
        said.append(ask(provider, "chat", prompt=prompt).choices[0].finish_reason)
        said.append(ask(provider, "messages", prompt=prompt).stop_reason)
    assert said == [
        ("incomplete", "max_output_tokens"), "length", "max_tokens",
        ("incomplete", "content_filter"), "content_filter", "refusal",
    ]  # fmt: skip


@pytest.mark.parametrize("api", APIS)
def test_the_token_limit_cuts_the_answer(provider: FakeProvider, api: str) -> None:
    """An answer longer than max tokens is cut there, and says so."""
    answer = ask(provider, api, max_tokens=2)
    assert whole_text(api, answer) == ECHO[:8]
    assert "length" in str(answer) or "max_" in str(answer)
    assert provider.ledger[0].output_tokens == 2


def test_cached_tokens_are_reported_as_each_api_counts_them(provider: FakeProvider) -> None:
    """OpenAI's input includes cached tokens, Anthropic's does not."""
    usage = Usage(input_tokens=100, output_tokens=7, cached_tokens=60, cache_creation_tokens=30, reasoning_tokens=5)
    provider.script("hello", Behaviour(usage=usage))
    response, chat = ask(provider, "responses").usage, ask(provider, "chat").usage
    claude = ask(provider, "messages").usage
    assert (response.input_tokens, response.input_tokens_details.cached_tokens) == (100, 60)
    assert response.output_tokens_details.reasoning_tokens == 5
    assert (chat.prompt_tokens, chat.prompt_tokens_details.cached_tokens) == (100, 60)
    assert (claude.input_tokens, claude.cache_read_input_tokens, claude.cache_creation_input_tokens) == (
        10,
        60,
        30,
    )


def test_rate_headers_and_request_ids_are_there(provider: FakeProvider) -> None:
    """Each provider's own header names, also on streams."""
    gpt = openai_client(provider).responses.with_raw_response.create(model="m", input="hi", stream=True)
    assert gpt.headers["x-ratelimit-limit-requests"] == "1000000"
    assert gpt.headers["x-request-id"].startswith("req_")
    claude = anthropic_client(provider).messages.with_raw_response.create(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
    )
    assert claude.headers["anthropic-ratelimit-input-tokens-remaining"] == "1999999999"
    assert claude.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    assert claude.headers["request-id"].startswith("req_")


# Errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("api", "status", "error"),
    [
        ("responses", 429, openai.RateLimitError),
        ("chat", 500, openai.InternalServerError),
        ("chat", 403, openai.PermissionDeniedError),
        ("responses", 400, openai.BadRequestError),
        ("responses", 529, openai.InternalServerError),
        ("messages", 429, anthropic.RateLimitError),
        ("messages", 500, anthropic.InternalServerError),
        ("messages", 400, anthropic.BadRequestError),
        ("messages", 529, anthropic.OverloadedError),
        ("messages", 503, anthropic.ServiceUnavailableError),
    ],
)
def test_a_status_raises_the_sdks_own_error(
    provider: FakeProvider, api: str, status: int, error: type[Exception], stream: bool
) -> None:
    """A scripted status arrives as the SDK's class for it, streaming or not, and is not billed."""
    provider.script("hello", Behaviour(status=status))
    with pytest.raises(error) as caught:
        ask(provider, api, stream=stream)
    assert type(caught.value) is error
    assert str(getattr(caught.value, "request_id", "")).startswith("req_")
    [call] = provider.ledger
    assert (call.outcome, call.billed) == (f"error:{status}", False)


def test_a_rate_limit_says_when_to_come_back(provider: FakeProvider) -> None:
    """A 429 has retry-after and the provider's type and code."""
    provider.script("hello", Behaviour(status=429))
    with pytest.raises(openai.RateLimitError) as gpt:
        ask(provider, "chat")
    with pytest.raises(anthropic.RateLimitError) as claude:
        ask(provider, "messages")
    assert gpt.value.code == "rate_limit_exceeded"
    assert claude.value.type == "rate_limit_error"
    assert gpt.value.response.headers["retry-after"] == claude.value.response.headers["retry-after"] == "1"


def test_money_errors_are_told_from_rate_limits(provider: FakeProvider) -> None:
    """Spent quota and spend limits come as 429, known by their code."""
    provider.script(
        "hello",
        Behaviour(status=429, body=openai_error("Quota.", "insufficient_quota", "insufficient_quota")),
    )
    with pytest.raises(openai.RateLimitError) as gpt:
        ask(provider, "responses")
    assert gpt.value.code == "insufficient_quota"
    body = anthropic_error("Limit.", "rate_limit_error", "enforced_spend_limit_reached")
    provider.script("hello", Behaviour(status=429, body=body))
    with pytest.raises(EnforcedSpendLimitReachedError):
        ask(provider, "messages")


@pytest.mark.parametrize(
    ("api", "error"),
    [
        ("responses", openai.InternalServerError),
        ("chat", openai.InternalServerError),
        ("messages", anthropic.InternalServerError),
    ],
)
def test_an_html_error_page_is_an_error_without_fields(
    provider: FakeProvider, api: str, error: type[Exception]
) -> None:
    """A proxy's HTML 502 raises by its status, with neither type nor code."""
    provider.script("hello", Behaviour(status=502, body="<html>Bad gateway</html>"))
    with pytest.raises(error) as caught:
        ask(provider, api)
    assert getattr(caught.value, "type", "absent") is None


@pytest.mark.parametrize("api", OPENAI_APIS)
def test_an_unknown_model_is_not_found_at_openai(provider: FakeProvider, api: str) -> None:
    """404 with the code model_not_found."""
    with pytest.raises(openai.NotFoundError) as caught:
        ask(provider, api, model="no-such-model")
    assert caught.value.code == "model_not_found"


def test_an_unknown_model_is_not_found_at_anthropic(provider: FakeProvider) -> None:
    """404 with the type not_found_error."""
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(provider, "messages", model="no-such-model")
    assert caught.value.type == "not_found_error"


def test_too_long_a_prompt_is_a_bad_request(provider: FakeProvider) -> None:
    """400 in each provider's shape; OpenAI has a code, Anthropic only words."""
    provider.configure(context_tokens=3)
    for api in OPENAI_APIS:
        with pytest.raises(openai.BadRequestError) as gpt:
            ask(provider, api)
        assert gpt.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError) as claude:
        ask(provider, "messages", stream=True)
    assert claude.value.api_message == "prompt is too long: 8 tokens > 3 maximum"


def test_too_long_a_prompt_is_found_inside_a_responses_stream(provider: FakeProvider) -> None:
    """In a stream of /v1/responses the error comes inside the 200, so its class is the bare one."""
    provider.configure(context_tokens=3)
    with pytest.raises(openai.APIError) as caught:
        ask(provider, "responses", stream=True)
    assert type(caught.value) is openai.APIError
    assert caught.value.code == "context_length_exceeded"


def test_keys_that_are_not_accepted_are_unauthorized(provider: FakeProvider) -> None:
    """A key outside the configured ones is the provider's 401."""
    provider.configure(api_keys=["sk-new"])
    with pytest.raises(openai.AuthenticationError) as gpt:
        ask(provider, "chat", key="sk-old")
    assert gpt.value.code == "invalid_api_key"
    with pytest.raises(anthropic.AuthenticationError) as claude:
        ask(provider, "messages", key="sk-old")
    assert claude.value.type == "authentication_error"
    assert whole_text("chat", ask(provider, "chat", key="sk-new")) == ECHO


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages"])
def test_a_missing_key_is_unauthorized(provider: FakeProvider, path: str) -> None:
    """No key, or an empty one, is 401 (neither SDK would send that, so this is plain HTTP)."""
    for headers in ({}, {"authorization": "Bearer"}):
        answer = httpx2.post(provider.base_url + path, json={"model": "m"}, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("api", APIS)
def test_missing_parameters_are_refused(provider: FakeProvider, api: str) -> None:
    """An empty prompt is 400, as is a call without anthropic-version."""
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)):
        ask(provider, api, model="")
    if api == "messages":
        answer = httpx2.post(
            provider.base_url + "/v1/messages",
            json={"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
            headers={"x-api-key": "k"},
        )
        assert answer.status_code == 400
        assert "anthropic-version" in answer.json()["error"]["message"]


# Faults


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_reset_before_any_byte_is_a_connection_error(provider: FakeProvider, api: str, stream: bool) -> None:
    """Closing without an answer is a connection error that is not a timeout, and costs nothing."""
    provider.script("hello", Behaviour(fault="reset"))
    with pytest.raises((openai.APIConnectionError, anthropic.APIConnectionError)) as caught:
        ask(provider, api, stream=stream)
    assert isinstance(caught.value.__cause__, httpx2.RemoteProtocolError)
    wait_until_ended(provider)
    assert (provider.ledger[0].outcome, provider.ledger[0].billed) == ("fault:reset", False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_hanging_call_times_out(provider: FakeProvider, api: str, stream: bool) -> None:
    """A call that is never answered is the SDK's timeout error."""
    provider.script("hello", Behaviour(fault="hang"))
    with pytest.raises((openai.APITimeoutError, anthropic.APITimeoutError)):
        ask(provider, api, stream=stream, timeout_seconds=0.1)
    wait_until_ended(provider)
    assert provider.ledger[0].outcome == "fault:hang"


@pytest.mark.parametrize("api", APIS)
def test_a_truncated_stream_raises_nothing(provider: FakeProvider, api: str) -> None:
    """Half of the text and a clean end look like success: only the final event is missing."""
    provider.configure(tokens_per_chunk=1)
    provider.script("hello", Behaviour(fault="truncated_stream"))
    events = ask(provider, api, stream=True)
    text = streamed_text(api, events)
    assert text
    assert text != ECHO
    assert ECHO.startswith(text)
    [call] = provider.ledger
    assert (call.outcome, call.billed, call.output_tokens) == ("fault:truncated_stream", True, len(text) / 4)


@pytest.mark.parametrize("api", APIS)
def test_a_malformed_chunk_is_a_json_error(provider: FakeProvider, api: str) -> None:
    """Both SDKs let the JSON error through."""
    provider.script("hello", Behaviour(fault="malformed_chunk"))
    with pytest.raises(json.JSONDecodeError):
        ask(provider, api, stream=True)


@pytest.mark.parametrize("api", OPENAI_APIS)
def test_a_reset_mid_stream_is_a_connection_error_at_openai(provider: FakeProvider, api: str) -> None:
    """OpenAI's SDK wraps the dropped stream; the call is billed all the same."""
    provider.script("hello", Behaviour(fault="reset_mid_stream"))
    with pytest.raises(openai.APIConnectionError):
        ask(provider, api, stream=True)
    assert (provider.ledger[0].outcome, provider.ledger[0].billed) == ("fault:reset_mid_stream", True)


def test_a_reset_mid_stream_is_a_raw_error_at_anthropic(provider: FakeProvider) -> None:
    """Anthropic's SDK lets the transport's error through."""
    provider.script("hello", Behaviour(fault="reset_mid_stream"))
    with pytest.raises(httpx2.RemoteProtocolError):
        ask(provider, "messages", stream=True)


@pytest.mark.parametrize(
    ("api", "error"),
    [
        ("responses", openai.APITimeoutError),
        ("chat", openai.APITimeoutError),
        ("messages", httpx2.ReadTimeout),
    ],
)
def test_a_stalled_stream_times_out(provider: FakeProvider, api: str, error: type[Exception]) -> None:
    """A stall is the SDK's timeout error at OpenAI, the transport's at Anthropic."""
    provider.script("hello", Behaviour(fault="hang_mid_stream"))
    with pytest.raises(error):
        ask(provider, api, stream=True, timeout_seconds=0.1)


@pytest.mark.parametrize("api", ["chat", "messages"])
def test_a_drip_defeats_the_read_timeout(provider: FakeProvider, api: str) -> None:
    """Single bytes keep the SDK waiting beyond its timeout, so that only a deadline helps."""
    provider.script("hello", Behaviour(fault="drip", chunk_delay_seconds=0.001))
    began = time.monotonic()
    assert whole_text(api, ask(provider, api, timeout_seconds=0.3)) == ECHO
    assert time.monotonic() - began > 0.3


def test_an_error_in_a_chat_stream_is_a_bare_api_error(provider: FakeProvider) -> None:
    """It has type and code but no status."""
    body = openai_error("Slow down.", "tokens", "rate_limit_exceeded")
    provider.script("hello", Behaviour(fault="error_in_stream", body=body))
    with pytest.raises(openai.APIError) as caught:
        ask(provider, "chat", stream=True)
    assert type(caught.value) is openai.APIError
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "tokens")
    assert not provider.ledger[0].billed


def test_an_error_in_a_messages_stream_is_a_status_error_of_200(provider: FakeProvider) -> None:
    """Anthropic's SDK raises its status error with status 200: the type tells what happened."""
    body = anthropic_error("Overloaded", "overloaded_error")
    provider.script("hello", Behaviour(fault="error_in_stream", body=body))
    with pytest.raises(anthropic.APIStatusError) as caught:
        ask(provider, "messages", stream=True)
    assert (caught.value.status_code, caught.value.type) == (200, "overloaded_error")


def test_an_error_in_a_responses_stream_comes_in_two_shapes(provider: FakeProvider) -> None:
    """The documented flat event is yielded like any other and followed by response.failed; a nested one raises."""
    provider.script("hello", Behaviour(fault="error_in_stream"))
    events = ask(provider, "responses", stream=True)
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2].code == events[-1].response.error.code == "server_error"
    nested = openai_error("Slow down.", "tokens", "rate_limit_exceeded")
    provider.script("hello", Behaviour(fault="error_in_stream", body=nested))
    with pytest.raises(openai.APIError) as caught:
        ask(provider, "responses", stream=True)
    assert caught.value.code == "rate_limit_exceeded"


def test_a_failed_response_is_no_exception(provider: FakeProvider) -> None:
    """A response can end as failed under status 200, with its error inside, and costs nothing."""
    provider.script("hello", Behaviour(fault="response_failed"))
    answer = ask(provider, "responses")
    assert (answer.status, answer.error.code, answer.usage) == ("failed", "server_error", None)
    assert ask(provider, "responses", stream=True)[-1].type == "response.failed"
    assert not any(call.billed for call in provider.ledger)


@pytest.mark.parametrize("stream", [False, True])
def test_empty_and_null_answers_have_no_text(provider: FakeProvider, stream: bool) -> None:
    """No choices, no content, a null content: all of them are well-formed successes."""
    provider.script("hello", Behaviour(fault="empty_choices"))
    chat, claude = ask(provider, "chat", stream=stream), ask(provider, "messages", stream=stream)
    response = ask(provider, "responses", stream=stream)
    if stream:
        assert all(chunk.choices == [] for chunk in chat)
        assert [event.type for event in claude] == ["message_start", "message_delta", "message_stop"]
        assert response[-1].response.output == []
    else:
        assert (chat.choices, claude.content, response.output) == ([], [], [])
    provider.script("hello", Behaviour(fault="null_content"))
    chat, response = ask(provider, "chat", stream=stream), ask(provider, "responses", stream=stream)
    if stream:
        assert all(choice.delta.content is None for chunk in chat for choice in chunk.choices)
    else:
        assert chat.choices[0].message.content is None
        assert response.output[0].content == []


def test_a_refusal_has_its_own_place_in_each_api(provider: FakeProvider) -> None:
    """A part in Responses, a field in chat, a stop reason with details in Messages."""
    provider.script("hello", Behaviour(fault="refusal"))
    assert ask(provider, "responses").output[0].content[0].refusal.startswith("I'm sorry")
    message = ask(provider, "chat").choices[0].message
    assert (message.content, message.refusal) == (None, "I'm sorry, but I can't help with that.")
    claude = ask(provider, "messages")
    assert (claude.stop_reason, claude.stop_details.type, claude.content) == ("refusal", "refusal", [])
    assert any(event.type == "response.refusal.delta" for event in ask(provider, "responses", stream=True))
    assert ask(provider, "messages", stream=True)[-2].delta.stop_reason == "refusal"


def test_thinking_alone_is_an_answer_without_text(provider: FakeProvider) -> None:
    """All tokens went into thinking: the answer ends at its limit without any text."""
    provider.script("hello", Behaviour(fault="thinking_only"))
    response = ask(provider, "responses")
    assert (response.output[0].type, response.incomplete_details.reason) == ("reasoning", "max_output_tokens")
    choice = ask(provider, "chat").choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    claude = ask(provider, "messages")
    assert (claude.content[0].type, claude.stop_reason) == ("thinking", "max_tokens")
    assert streamed_text("messages", ask(provider, "messages", stream=True)) == ""


def test_a_fault_that_does_not_fit_cannot_pass_unnoticed(provider: FakeProvider) -> None:
    """A plain call cannot have a truncated stream: it gets a status that no provider sends."""
    provider.script("hello", Behaviour(fault="truncated_stream"))
    with pytest.raises(openai.APIStatusError, match="does not fit") as caught:
        ask(provider, "chat")
    assert caught.value.status_code == 418
    with pytest.raises(ValueError, match="unknown fault"):
        Behaviour(fault="no such fault")


# Background responses


def test_a_background_response_is_there_at_once_and_billed_once(provider: FakeProvider) -> None:
    """Creating returns before the answer exists; polling finds it; many retrievals are one billed call."""
    provider.configure(latency_seconds=1.5)
    responses = openai_client(provider).responses
    began = time.monotonic()
    created = responses.create(model="m", input=QUESTION, background=True)
    assert time.monotonic() - began < 1.5
    assert created.status in {"queued", "in_progress"}
    assert responses.retrieve(created.id).usage is None
    wait_until_ended(provider)
    for _ in range(2):
        found = responses.retrieve(created.id)
        assert (found.status, found.output_text) == ("completed", ECHO)
    [call] = provider.ledger
    assert (call.billed, call.attached, call.response_id) == (True, 3, created.id)


def test_a_background_response_completes_without_its_creator(provider: FakeProvider) -> None:
    """Nobody has to be there for the answer to be produced, and billed."""
    provider.configure(latency_seconds=0.05)
    openai_client(provider).responses.create(model="m", input=QUESTION, background=True)
    wait_until_ended(provider)
    [call] = provider.ledger
    assert (call.outcome, call.attached) == ("billed", 0)


def test_a_dropped_background_stream_is_taken_up_at_its_cursor(provider: FakeProvider) -> None:
    """After a drop, streaming on from the last seen event gives the rest, without a second call."""
    provider.configure(tokens_per_chunk=1, chunk_delay_seconds=0.005)
    provider.script("hello", Behaviour(fault="reset_mid_stream"))
    responses = openai_client(provider).responses
    seen: list[Any] = []
    with pytest.raises(openai.APIConnectionError):
        seen.extend(responses.create(model="m", input=QUESTION, background=True, stream=True))
    rest = list(responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number))
    assert [event.type for event in seen[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert streamed_text("responses", seen + rest) == ECHO
    assert [event.sequence_number for event in seen + rest] == list(range(len(seen + rest)))
    assert rest[-1].type == "response.completed"
    [call] = provider.ledger
    assert (call.outcome, call.billed, call.attached) == ("fault:reset_mid_stream", True, 1)


def test_cancelling_a_background_response_stops_the_spending(provider: FakeProvider) -> None:
    """It ends as cancelled and unbilled, its stream without a final event; cancelling twice changes nothing."""
    provider.configure(latency_seconds=30)
    responses = openai_client(provider).responses
    stream = responses.create(model="m", input=QUESTION, background=True, stream=True)
    response_id = next(event.response.id for event in stream if event.type == "response.created")
    assert responses.cancel(response_id).status == "cancelled"
    assert "response.completed" not in [event.type for event in stream]
    assert responses.cancel(response_id).status == "cancelled"
    wait_until_ended(provider)
    [call] = provider.ledger
    assert (call.outcome, call.billed, call.cancelled, call.output_tokens) == ("cancelled", False, True, 0)


def test_cancelling_a_finished_response_changes_nothing(provider: FakeProvider) -> None:
    """A completed response stays completed and billed."""
    responses = openai_client(provider).responses
    created = responses.create(model="m", input=QUESTION, background=True)
    wait_until_ended(provider)
    assert responses.cancel(created.id).status == "completed"
    assert provider.ledger[0].billed


def test_a_background_response_can_fail(provider: FakeProvider) -> None:
    """The creating call succeeds, the response ends as failed with its error."""
    error = {"code": "rate_limit_exceeded", "message": "You exceeded your current quota."}
    provider.script("hello", Behaviour(fault="response_failed", body=error))
    responses = openai_client(provider).responses
    created = responses.create(model="m", input=QUESTION, background=True)
    wait_until_ended(provider)
    found = responses.retrieve(created.id)
    assert found.error is not None
    assert (found.status, found.error.code) == ("failed", "rate_limit_exceeded")


def test_what_cannot_be_retrieved_says_why(provider: FakeProvider) -> None:
    """An unknown id is 404; a response that was not created as a stream cannot be streamed."""
    responses = openai_client(provider).responses
    with pytest.raises(openai.NotFoundError):
        responses.retrieve("resp_unknown")
    created = responses.create(model="m", input=QUESTION, background=True)
    with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
        responses.retrieve(created.id, stream=True)
    with pytest.raises(openai.BadRequestError):
        responses.create(model="m", input=QUESTION, background=True, store=False)


# Ledger, limits, server


@pytest.mark.parametrize("api", APIS)
def test_a_client_that_leaves_a_stream_has_bought_it(provider: FakeProvider, api: str) -> None:
    """Leaving mid-stream is client_gone and billed, and stops the generation early."""
    provider.configure(chunk_delay_seconds=0.02, tokens_per_chunk=1)
    provider.script("hello", Behaviour(text="word " * 400))
    client: Any = openai_client(provider) if api != "messages" else anthropic_client(provider)
    messages: Any = [{"role": "user", "content": QUESTION}]
    if api == "responses":
        stream = client.responses.create(model="m", input=QUESTION, stream=True)
    elif api == "chat":
        stream = client.chat.completions.create(model="m", messages=messages, stream=True)
    else:
        stream = client.messages.create(model="m", messages=messages, max_tokens=900, stream=True)
    for _ in range(6):
        next(stream)
    stream.close()
    wait_until_ended(provider)
    [call] = provider.ledger
    assert (call.outcome, call.billed) == ("client_gone", True)
    assert 0 < call.output_tokens < 100


def test_a_client_that_gives_up_waiting_has_bought_the_answer(provider: FakeProvider) -> None:
    """A plain call that the client times out is produced and billed all the same."""
    provider.configure(latency_seconds=30)
    with pytest.raises(openai.APITimeoutError):
        ask(provider, "chat", timeout_seconds=0.1)
    wait_until_ended(provider)
    assert (provider.ledger[0].outcome, provider.ledger[0].billed) == ("client_gone", True)


def test_latency_comes_before_the_first_text(provider: FakeProvider) -> None:
    """The stream begins at once, its text only after the latency."""
    provider.configure(latency_seconds=2.0)
    began = time.monotonic()
    arrived = {
        event.type: time.monotonic() - began
        for event in openai_client(provider).responses.create(model="m", input="hi", stream=True)
    }
    assert arrived["response.created"] < 2.0 <= arrived["response.output_text.delta"]


def test_connections_are_kept(provider: FakeProvider) -> None:
    """One client's calls, errors and streams included, share a connection."""
    chat = openai_client(provider).chat.completions
    provider.script("fail", Behaviour(status=500))
    for _ in range(2):
        chat.create(model="m", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.InternalServerError):
            chat.create(model="m", messages=[{"role": "user", "content": "fail"}])
    claude = anthropic_client(provider).messages
    for _ in range(2):
        list(claude.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}], stream=True))
    assert len(provider.connections) == 2


def test_fifty_calls_at_once_are_served_side_by_side(provider: FakeProvider) -> None:
    """Each is answered when all have come, so they are served together, and the ledger saw it."""
    provider.configure(together=50)
    client = openai_client(provider, timeout_seconds=20)
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda number: client.responses.create(model="m", input=f"call {number}"), range(50)))
    assert {answer.output_text for answer in answers} == {f"Echo: call {number}" for number in range(50)}
    assert max(call.concurrent for call in provider.ledger) == 50
    assert sum(call.billed for call in provider.ledger) == len({call.sequence for call in provider.ledger}) == 50


@pytest.mark.parametrize("api", APIS)
def test_a_limit_refuses_what_exceeds_it_and_refills(provider: FakeProvider, api: str) -> None:
    """Two requests a second pass, faster ones are refused, and after half a second there is room for one."""
    provider.configure(limits={"requests_per_minute": 120})
    ask(provider, api)
    with pytest.raises((openai.RateLimitError, anthropic.RateLimitError)) as caught:
        [ask(provider, api) for _ in range(20)]
    error: Any = caught.value
    name = "anthropic-ratelimit-requests-limit" if api == "messages" else "x-ratelimit-limit-requests"
    assert (error.response.headers["retry-after"], error.response.headers[name]) == ("1", "120")
    time.sleep(0.5)
    ask(provider, api)
    assert [call.outcome for call in provider.ledger[-2:]] == ["error:429", "billed"]


def test_tokens_are_limited_too_and_output_is_charged_afterwards(provider: FakeProvider) -> None:
    """An answer that exceeds the output limit is given, and the next call waits for it."""
    provider.configure(limits={"output_tokens_per_minute": 60})
    ask(provider, "messages")
    with pytest.raises(anthropic.RateLimitError) as caught:
        ask(provider, "messages")
    assert caught.value.response.headers["retry-after"] == "10"
    provider.configure(limits={"tokens_per_minute": 600})
    ask(provider, "chat")
    with pytest.raises(openai.RateLimitError) as gpt:
        ask(provider, "chat")
    assert gpt.value.type == "tokens"


def test_stopping_does_not_wait_for_hanging_calls() -> None:
    """The server stops at once although calls hang, and the clients see a dropped connection."""
    with ThreadPoolExecutor(8) as pool:
        with FakeProvider() as provider:
            provider.script("hello", Behaviour(fault="hang"))
            provider.script("wait", Behaviour(latency_seconds=60))
            prompts = [QUESTION, "wait"] * 4
            waiting = [pool.submit(ask, provider, "chat", prompt=prompt, timeout_seconds=60) for prompt in prompts]
            while len(provider.ledger) < len(prompts):
                time.sleep(0.005)
            began = time.monotonic()
        assert time.monotonic() - began < 20
        for call in waiting:
            assert isinstance(call.exception(timeout=2), openai.APIConnectionError)


def test_it_runs_as_a_program_steered_over_http() -> None:
    """The control plane configures, scripts, lists and clears; SIGTERM ends the program cleanly."""
    command = [sys.executable, "-m", "tests.fakes.provider", "--latency", "0.01"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()

        def control(method: str, path: str, body: object = None) -> Any:
            data = json.dumps(body).encode()
            request = urllib.request.Request(f"{url}/_control/{path}", data=data, method=method)
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.load(answer)

        try:
            assert control("GET", "config")["latency_seconds"] == 0.01
            control("PUT", "config", {"latency_seconds": 0, "tokens_per_chunk": 1})
            steps = [{"status": 529}, {"text": "scripted", "usage": {"cached_tokens": 3}}]
            control("POST", "scripts", {"match": "hello", "steps": steps})
            client = anthropic.Anthropic(base_url=url, api_key="sk-ant-wxyz", max_retries=0)
            with pytest.raises(anthropic.OverloadedError):
                client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hello"}])
            answer = client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hello"}])
            assert whole_text("messages", answer) == "scripted"
            assert [call["outcome"] for call in control("GET", "ledger")] == ["error:529", "billed"]
            for path, body in (("scripts", {"match": "x", "steps": [{"no": 1}]}), ("config", {"no": 1})):
                with pytest.raises(urllib.error.HTTPError, match="400"):
                    control("POST" if path == "scripts" else "PUT", path, body)
            control("DELETE", "ledger")
            assert control("GET", "ledger") == []
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) == 0
