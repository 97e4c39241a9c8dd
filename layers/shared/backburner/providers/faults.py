"""Providers' failures in Backburner's words: structured fields first, then the status, and prose last.

Sources: the error pages of the OpenAI and Anthropic API references, and RFC 9110 section 10.2.3 for `Retry-After`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from backburner.errors import (
    Authentication,
    ConnectionLost,
    ContentFiltered,
    ContextLengthExceeded,
    JobFailed,
    ModelNotFound,
    Overloaded,
    ProviderFault,
    ProviderRefusedRequest,
    ProviderTimeout,
    QuotaExhausted,
    RateLimited,
    SpendLimit,
)
from backburner.models import Limits, Question, Usage

MESSAGE_CHARACTERS_MAX = 300
RETRY_AFTER_SECONDS_MAX = 86_400.0
"""A longer wait is taken for nonsense, and so is a negative one."""
TOKEN_BYTES = 4
"""Bytes of English text in a token, roughly; only where a provider leaves its own count out."""

BY_CODE: Mapping[str, type[JobFailed]] = {
    # OpenAI's error.code, error.type and response.error.code
    "insufficient_quota": QuotaExhausted,
    "billing_hard_limit_reached": SpendLimit,
    "billing_not_active": QuotaExhausted,
    "rate_limit_exceeded": RateLimited,
    "context_length_exceeded": ContextLengthExceeded,
    "model_not_found": ModelNotFound,
    "invalid_api_key": Authentication,
    "content_filter": ContentFiltered,
    "content_policy_violation": ContentFiltered,
    "invalid_prompt": ContentFiltered,
    "bio_policy": ContentFiltered,
    "misalignment_policy_violation": ContentFiltered,
    "server_error": ProviderFault,
    # Anthropic's error.details.error_code and error.type
    "contract_spend_limit_reached": SpendLimit,
    "enforced_spend_limit_reached": SpendLimit,
    "linked_organization_spend_limit_reached": SpendLimit,
    "billing_error": QuotaExhausted,
    "rate_limit_error": RateLimited,
    "overloaded_error": Overloaded,
    "api_error": ProviderFault,
    "timeout_error": ProviderTimeout,
    "authentication_error": Authentication,
    "permission_error": Authentication,
    "not_found_error": ModelNotFound,
    "request_too_large": ContextLengthExceeded,
    # llama.cpp's error.type
    "exceed_context_size_error": ContextLengthExceeded,
}
BY_STATUS: Mapping[int, type[JobFailed]] = {
    401: Authentication,
    402: QuotaExhausted,
    403: Authentication,
    404: ModelNotFound,
    408: ProviderTimeout,
    409: ProviderFault,
    413: ContextLengthExceeded,
    425: ProviderFault,
    429: RateLimited,
    503: Overloaded,
    504: ProviderTimeout,
    529: Overloaded,
}
_CONTEXT_PROSE = re.compile(
    r"prompt is too long|context (length|window|size)|maximum context|too many (input )?tokens", re.IGNORECASE
)
_OWN_WORDS = (Authentication, QuotaExhausted, SpendLimit)
"""Their messages may quote a key or an account, so ours are used instead."""


def failure_of(
    status: int | None,
    body: object,
    headers: Mapping[str, str],
    *,
    request_id: str | None = None,
    usage: Usage | None = None,
) -> JobFailed:
    """The failure that a provider's error reply, or an error event in its stream (status None), stands for."""
    codes, prose = _fields(body)
    kind = next((BY_CODE[code] for code in codes if code in BY_CODE), None)
    if kind is None and status in (400, 422, None) and _CONTEXT_PROSE.search(prose):
        kind = ContextLengthExceeded
    if kind is None and status is not None:
        kind = BY_STATUS.get(status) or (ProviderRefusedRequest if 400 <= status < 500 else ProviderFault)
    kind = kind or ProviderFault
    message = None if issubclass(kind, _OWN_WORDS) else cleaned(prose)
    if message is None and not issubclass(kind, _OWN_WORDS) and status is not None:
        message = f"{(kind.__doc__ or '').strip()} It answered with status {status}."
    return kind(
        message,
        retry_after_seconds=retry_after_seconds(headers),
        usage=usage,
        request_id=request_id,
        seen=limits_of(headers),
    )


def limits_of(headers: Mapping[str, str]) -> Limits | None:
    """The limits per minute that a reply's headers state; None if they state none.

    Sources: "Rate limits" in the OpenAI and in the Anthropic API reference. OpenAI also uses the header for limits per
    day, which take hours to reset: these are passed over.
    """
    found: dict[str, int] = {}
    for dimension, name in _LIMIT_HEADERS:
        text, reset = headers.get(name, ""), headers.get(name.replace("-limit-", "-reset-"), "")
        if text.isascii() and text.isdigit() and 0 < int(text) < 10**12 and not ("h" in reset or "d" in reset):
            found[dimension] = int(text)
    return Limits(**found) if found else None


_LIMIT_HEADERS = (
    ("requests", "x-ratelimit-limit-requests"),
    ("tokens", "x-ratelimit-limit-tokens"),
    ("requests", "anthropic-ratelimit-requests-limit"),
    ("input_tokens", "anthropic-ratelimit-input-tokens-limit"),
    ("output_tokens", "anthropic-ratelimit-output-tokens-limit"),
)


def _fields(body: object) -> tuple[list[str], str]:
    """The codes of an error body, the most specific first, and its prose."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return [], error if isinstance(error, str) else ""
    details = error.get("details")
    found = [details.get("error_code") if isinstance(details, dict) else None, error.get("code"), error.get("type")]
    prose = error.get("message")
    return [code for code in found if isinstance(code, str)], prose if isinstance(prose, str) else ""


def cleaned(prose: str) -> str | None:
    """A provider's prose as a client may see it: one line, printable, bounded; None for a web page or nothing."""
    line = " ".join("".join(c if c.isprintable() else " " for c in prose[: 4 * MESSAGE_CHARACTERS_MAX]).split())
    if not line or re.match(r"<(!doctype|html|\?xml)", line, re.IGNORECASE):
        return None
    return line[:MESSAGE_CHARACTERS_MAX]


def retry_after_seconds(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that the provider asks to wait: `retry-after-ms`, then `retry-after` as seconds or as an HTTP date.

    None where there is no such header, or one that makes no sense.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        wait = _seconds(headers.get(name), now)
        if wait is not None and 0 <= wait * unit <= RETRY_AFTER_SECONDS_MAX:
            return wait * unit
    return None


def _seconds(text: str | None, now: float | None) -> float | None:
    """A number, or an HTTP date as seconds from now."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        try:
            return parsedate_to_datetime(text).timestamp() - (time.time() if now is None else now)
        except (ValueError, TypeError, OverflowError):
            return None


def whole(text: str) -> str:
    """The text with split pairs of UTF-16 joined; half a pair that stays alone becomes U+FFFD, so it can be stored."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def counted(value: object) -> int | None:
    """A count of tokens, or None for what is none: a compatible server may report anything."""
    return value if type(value) is int and value >= 0 else None


def members(value: object) -> Mapping[str, Any]:
    """Of a JSON object, or none: where an answer hangs on it, another shape must not cost it."""
    return value if isinstance(value, dict) else {}


def estimated_usage(question: Question, text: str) -> Usage:
    """A guess at what a call used that broke off before the provider said so."""
    asked = sum(len(turn.content.encode()) for turn in question.messages) + len((question.system_prompt or "").encode())
    return Usage(
        input_tokens=-(-asked // TOKEN_BYTES), output_tokens=-(-len(text.encode()) // TOKEN_BYTES), estimated=True
    )


UNREADABLE = (ValueError, TypeError, AttributeError, LookupError)
"""What reading a reply of the wrong shape raises: the SDKs check no types."""


def broken(error: Exception, usage: Usage | None, request_id: str | None) -> JobFailed:
    """The failure that a broken connection or an unreadable reply stands for."""
    if isinstance(error, UNREADABLE):
        return ProviderFault("The provider's reply could not be read.", usage=usage, request_id=request_id)
    return ConnectionLost(usage=usage, request_id=request_id)
