"""Providers' failures in Backburner's words: the pure part."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backburner import errors
from backburner.errors import JobFailed
from backburner.models import Message, ModelInfo, Question, Usage
from backburner.providers import faults

NOW = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": " 12 "}, 12.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Fri, 15 Jan 2027 08:01:30 GMT"}, 90.0),
        ({"retry-after": "Friday, 15-Jan-27 08:00:05 GMT"}, 5.0),
        ({"retry-after": "Fri, 15 Jan 2027 09:00:10 +0100"}, 10.0),
        ({"retry-after": "86400"}, 86_400.0),
        # Nonsense is as good as nothing.
        ({"retry-after": "86401"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "-inf"}, None),
        ({"retry-after": "1e400"}, None),
        ({"retry-after": "9" * 5_000}, None),
        ({"retry-after": "Fri, 15 Jan 2027 07:59:00 GMT"}, None),
        ({"retry-after": "Fri, 99 Foo 2027 07:59:00 GMT"}, None),
        ({"retry-after": "Fri, 15 Jan 99999 08:00:00 GMT"}, None),
        ({"retry-after": "Fri, 15 Jan 2036 08:00:00 GMT"}, None),
        # And hides no sense beside it.
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after-ms": "", "retry-after": "9"}, 9.0),
        ({"retry-after-ms": "-5", "retry-after": "9"}, 9.0),
        ({"retry-after-ms": "nan", "retry-after": "9"}, 9.0),
        ({"retry-after-ms": "99999999999", "retry-after": "9"}, 9.0),
    ],
    ids=lambda value: str(value)[:70],
)
def test_a_wait_is_read_in_seconds_milliseconds_or_as_a_date(headers: dict[str, str], seconds: float | None) -> None:
    """Milliseconds first, since they say more; never less than nothing, never more than a day."""
    assert faults.retry_after_seconds(httpx2.Headers(headers), NOW) == pytest.approx(seconds)


@given(ms=st.none() | st.text(), seconds=st.none() | st.text())
def test_no_wait_whatever_is_an_error(ms: str | None, seconds: str | None) -> None:
    """A number of seconds in a day, or none."""
    headers = {name: text for name, text in (("retry-after-ms", ms), ("retry-after", seconds)) if text is not None}
    wait = faults.retry_after_seconds(headers, NOW)
    assert wait is None or 0 <= wait <= 86_400


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        # The most specific field decides, whatever the status says.
        (429, {"code": "insufficient_quota", "type": "requests"}, errors.QuotaExhausted),
        (500, {"code": "context_length_exceeded"}, errors.ContextLengthExceeded),
        (400, {"error": {"type": "rate_limit_error"}}, errors.RateLimited),
        (429, {"error": {"type": "rate_limit_error", "details": {"error_code": "contract_spend_limit_reached"}}},
         errors.SpendLimit),
        (200, {"error": {"type": "overloaded_error"}}, errors.Overloaded),
        # Unknown fields leave it to the status.
        (429, {"code": "novelty", "type": "other"}, errors.RateLimited),
        (429, None, errors.RateLimited),
        (429, "INSUFFICIENT QUOTA", errors.RateLimited),
        (529, [1], errors.Overloaded),
        (599, 7, errors.ProviderFault),
        (451, {}, errors.ProviderRefusedRequest),
        (302, {}, errors.ProviderFault),
        # Prose comes last, and only where a context can be meant.
        (400, {"message": "prompt is too long"}, errors.ContextLengthExceeded),
        (422, "maximum context is 5", errors.ContextLengthExceeded),
        (500, {"message": "prompt is too long"}, errors.ProviderFault),
        (429, {"message": "too many input tokens per minute"}, errors.RateLimited),
        (None, {"message": "This model's maximum context length is 8192 tokens."}, errors.ContextLengthExceeded),
        (None, {}, errors.ProviderFault),
        (None, None, errors.ProviderFault),
        (None, {"code": "rate_limit_exceeded"}, errors.RateLimited),
    ],
)  # fmt: skip
def test_structured_fields_come_before_the_status_and_prose_comes_last(
    status: int | None, body: object, kind: type[JobFailed]
) -> None:
    """So a spent quota is not taken for a rate limit, nor the other way round."""
    assert type(faults.failure_of(status, body, {})) is kind


@pytest.mark.parametrize("code", faults.BY_CODE)
def test_each_known_code_is_found_wherever_a_provider_puts_it(code: str) -> None:
    """As code, type or error_code; in an envelope or not."""
    for error in ({"code": code}, {"type": code}, {"details": {"error_code": code}}):
        for body in (error, {"error": error}):
            assert type(faults.failure_of(500, body, {})) is faults.BY_CODE[code]


@given(
    status=st.none() | st.integers(100, 999),
    body=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["error", "code", "type", "message", "details", "error_code"]), inner, max_size=5
            )
        ),
    ),
)
def test_no_error_reply_whatever_is_an_error_of_ours(status: int | None, body: Any) -> None:
    """Each is some failure with a printable, bounded message."""
    failure = faults.failure_of(status, body, {})
    assert 0 < len(failure.message) <= 500
    assert failure.message.isprintable()


def test_a_failure_keeps_what_is_known_of_the_call() -> None:
    """Wait, usage and request id, for the backoff and the receipt."""
    failure = faults.failure_of(429, {}, {"retry-after": "3"}, request_id="req-1", usage=Usage(1, 2))
    assert (failure.retry_after_seconds, failure.request_id, failure.usage) == (3.0, "req-1", Usage(1, 2))


@pytest.mark.parametrize(
    ("prose", "shown"),
    [
        ("Slow  down.\r\n\tPlease.", "Slow down. Please."),
        ("a\u0000b\u202ec\u2028d", "a b c d"),
        ("x" * 5_000, "x" * 300),
        (" " * 5_000 + "late", None),
        ("", None),
        (" \n ", None),
        ("<!DOCTYPE html><p>no", None),
        ("  <html>no", None),
        ("<?xml version='1.0'?>", None),
        ("a < b", "a < b"),
        ("<b>bold</b>", "<b>bold</b>"),
        ("half \ud800 pair", "half pair"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_prose_is_shown_as_one_bounded_printable_line(prose: str, shown: str | None) -> None:
    """A web page says nothing to a client."""
    assert faults.cleaned(prose) == shown


@pytest.mark.parametrize("kind", [errors.Authentication, errors.QuotaExhausted, errors.SpendLimit])
def test_what_may_quote_a_key_or_an_account_is_said_in_our_own_words(kind: type[JobFailed]) -> None:
    """The deployment's affairs are not the client's."""
    code = next(code for code, known in faults.BY_CODE.items() if known is kind)
    failure = faults.failure_of(401, {"code": code, "message": "key sk-…1234 of org-77"}, {})
    assert failure.message == (kind.__doc__ or "").strip()


def _question(prompt: str, system_prompt: str | None = None) -> Question:
    model = ModelInfo("m", "openai", 1, 1, 0, 0, 0, 0)
    return Question(
        model, (Message(role="user", content=prompt), Message(role="user", content=prompt)), system_prompt, 1
    )


@pytest.mark.parametrize(
    ("question", "text", "usage"),
    [
        (_question("abcd"), "", Usage(2, 0, estimated=True)),
        (_question("abcde"), "abcde", Usage(3, 2, estimated=True)),
        (_question("中"), "中中", Usage(2, 2, estimated=True)),
        (_question("abcd", "efgh"), "x", Usage(3, 1, estimated=True)),
    ],
)
def test_an_estimate_counts_bytes_and_says_that_it_is_one(question: Question, text: str, usage: Usage) -> None:
    """Four to a token, rounded up; all turns and the system prompt."""
    assert faults.estimated_usage(question, text) == usage
