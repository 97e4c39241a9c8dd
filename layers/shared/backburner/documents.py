"""A job in JSON, as every channel shows it: HTTP, webhook, WebSocket.

Instants are Unix seconds, as in the LLM providers' own APIs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from typing import Any

from backburner.errors import PayloadMissing, Refusal
from backburner.models import INTERNAL_TARGETS, Attempt, EpochMs, Job, Notice, NoticeStatus, Outlook, Usage
from backburner.ports import PayloadStore

LINK_SECONDS = 900
"""So long a link to a large result works."""


def json_text(value: Any) -> str:
    """Compact JSON, characters as themselves. Raises ValueError for numbers that JSON does not have."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def job_document(
    job: Job,
    payloads: PayloadStore | None,
    *,
    fits: Callable[[str], bool],
    fetch: bool = True,
    without: Collection[str] = (),
    outlook: Outlook | None = None,
) -> str:
    """A job as `GET /jobs/{id}` shows it, as JSON text, without the fields named.

    Without `deliveries` its receipt has no lines of targets either.

    outlook: what a waiting job may expect.
    fits: whether a text is small enough for the channel; a result that makes it too large becomes a link or a note.
    payloads: None for a channel that is too narrow for any result kept outside the row; such a one becomes a note.
    fetch: False where there is no time to read one; it becomes a link.
    """
    told = [notice for notice in job.outbox if notice.target not in INTERNAL_TARGETS]
    document = job_summary(job) | _given(
        position=outlook.position if outlook is not None else None,
        estimated_start_at=_seconds(outlook.starts_at) if outlook is not None else None,
        metadata=None if job.metadata is None else json.loads(job.metadata),
        usage=usage_document(job.usage),
        cost_usd=_usd(job.cost_micro_usd),
        deliveries=None if "deliveries" in without else [_delivery(notice) for notice in told] or None,
        receipt=[*map(_receipt_line, job.log), *([] if "deliveries" in without else _given_up(told))] or None,
    )
    document = {name: value for name, value in document.items() if name not in without}
    if job.result is None:
        return json_text(document)
    text, key = job.result.text, job.result.key
    if text is None and payloads is not None and fetch:
        try:
            text = payloads.get(key or "")
        except PayloadMissing:
            return json_text(document | {"result_note": "The result is no longer stored."})
    if text is not None:
        full = json_text(document | {"result": json.loads(text)})
        if fits(full):
            return full
    if key is None or payloads is None:
        return json_text(document | {"result_note": "The result is too large for this message; GET the job."})
    note = f"The result is too large for a reply; fetch it from result_url within {LINK_SECONDS} seconds."
    return json_text(document | {"result_url": payloads.link(key, LINK_SECONDS), "result_note": note})


def stored_result(job: Job, payloads: PayloadStore) -> dict[str, Any] | None:
    """The result, wherever it is kept; None if the job has none, or it is gone."""
    if job.result is None:
        return None
    try:
        text = job.result.text if job.result.text is not None else payloads.get(job.result.key or "")
    except PayloadMissing:
        return None
    result: dict[str, Any] = json.loads(text)
    return result


def _seconds(instant: EpochMs | None) -> int | None:
    return None if instant is None else instant // 1000


def _usd(micro_usd: int | None) -> float | None:
    return None if micro_usd is None else micro_usd / 1_000_000


def usage_document(usage: Usage | None) -> dict[str, Any] | None:
    """What a call used, as a job and each line of its receipt show it."""
    if usage is None:
        return None
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
        "total_tokens": usage.total_tokens,
        **({"estimated": True} if usage.estimated else {}),
    }


def _receipt_line(attempt: Attempt) -> dict[str, Any]:
    return _given(
        attempt=attempt.number,
        outcome=attempt.outcome,
        began_at=_seconds(attempt.began_at),
        ended_at=_seconds(attempt.ended_at),
        provider=attempt.provider,
        model=attempt.model,
        request_id=attempt.request_id,
        usage=usage_document(attempt.usage),
        cost_usd=_usd(attempt.cost_micro_usd),
    )


def _delivery(notice: Notice) -> dict[str, Any]:
    is_given_up = notice.status is NoticeStatus.GIVEN_UP
    return _given(
        target=notice.target,
        status=notice.status,
        tries=notice.tries,
        told_at=None if is_given_up else _seconds(notice.told_at),
        given_up_at=_seconds(notice.told_at) if is_given_up else None,
        last_error=notice.last_error,
    )


def _given_up(told: Sequence[Notice]) -> list[dict[str, Any]]:
    """A line of the receipt for each target that was never told."""
    return [
        _given(target=n.target, outcome=n.status, tries=n.tries, ended_at=_seconds(n.told_at), error=n.last_error)
        for n in told
        if n.status is NoticeStatus.GIVEN_UP
    ]


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def job_summary(job: Job) -> dict[str, Any]:
    """A job as a listing shows it."""
    return _given(
        job_id=job.job_id,
        status=job.status,
        priority=job.lane,
        attempts=job.attempts,
        created_at=_seconds(job.created_at),
        deadline_at=_seconds(job.deadline_at),
        finished_at=_seconds(job.finished_at),
        expires_at=job.expires_at,
        error=None
        if job.error is None
        else {"code": job.error.code, "message": job.error.message, "retryable": job.error.retryable},
    )


def problem_document(refusal: Refusal) -> dict[str, Any]:
    """An error as a problem document (RFC 9457), with its code and the fields that are wrong."""
    errors = refusal.fields or (((refusal.field, refusal.message),) if refusal.field else ())
    detail = refusal.message
    if refusal.fields:
        detail = "; ".join(f"{name}: {message}" for name, message in refusal.fields[:3])
    elif refusal.field:
        detail = f"{refusal.field}: {refusal.message}"
    return {
        "type": f"urn:backburner:problem:{refusal.code}",
        "title": HTTPStatus(refusal.http_status).phrase,
        "status": refusal.http_status,
        "detail": detail,
        "code": refusal.code,
        **({"errors": [{"field": name, "message": message} for name, message in errors]} if errors else {}),
    }
