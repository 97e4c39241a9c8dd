"""Jobs for tests of stores: a plain one, and any at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from backburner.models import (
    Attempt,
    Charge,
    Failure,
    Job,
    JobStatus,
    Lane,
    Notice,
    NoticeStatus,
    Payload,
    SlackOrigin,
    Slot,
    Trail,
    Usage,
    Webhook,
)

NOW = 1_800_000_000_000


def a_job(**changes: Any) -> Job:
    """A queued job with every instant in its natural order."""
    job = Job(
        job_id="job_1",
        client_id="alice",
        lane=Lane.STANDARD,
        status=JobStatus.QUEUED,
        fingerprint="f" * 64,
        request=Payload('{"prompt":"Name a river."}'),
        owner="o1",
        created_at=NOW,
        available_at=NOW,
        deadline_at=NOW + 86_400_000,
        deadline_seconds=86_400,
        expires_at=NOW // 1000 + 15 * 86_400,
        due_at=NOW + 60_000,
    )
    return replace(job, **changes)


FULL = a_job(
    job_id="job_full",
    status=JobStatus.FAILED,
    request=Payload(None, "requests/job_full/x"),
    claims=7,
    attempts=3,
    attempts_limit=6,
    model_index=1,
    background=True,
    handle="resp_1",
    slot=Slot("m-1", NOW + 9, 12, 34, {"requests": 100_000, "tokens": 46_000}, (10.5, 40.0)),
    place=NOW + 8,
    parked_since=NOW + 7,
    lease_until=NOW + 30_000,
    claimed_at=NOW + 1,
    finished_at=NOW + 2,
    result=Payload('{"text":"Donau 🏞️"}'),
    error=Failure("rate_limited", "Slow down. 慢", retryable=True),
    log=(
        Attempt(1, "rate_limited", NOW, NOW + 1),
        Attempt(
            2, "completed", NOW + 1, NOW + 2, provider="openai", model="m-1", request_id="req_1",
            usage=Usage(10, 20, cached_tokens=5, cache_write_tokens=2, estimated=True), cost_micro_usd=2**60,
            first_token_ms=300,
        ),
    ),
    metadata='{"a":0.7,"n":9007199254740993,"e":"","z":null,"t":true}',
    targets=("webhook", "slack"),
    webhook=Webhook("https://hooks.example.com/ü", "gAAAAA…"),
    outbox=(
        Notice("webhook", NoticeStatus.DELIVERED, tries=2, told_at=NOW + 3),
        Notice("slack", NoticeStatus.PENDING, tries=1, lease_until=NOW + 4, last_error="timeout"),
        Notice("dead_letter", NoticeStatus.GIVEN_UP),
    ),
    ahead=17,
    charge=Charge("2027-01-15", 1_000, 2**60, since=1),
    slack=SlackOrigin(
        channel="C1", user="U1", team="T1", surface="command", thread_ts="1760000123.000700",
        message_ts="1760000123.000700", response_url="https://hooks.slack.com/x", failed_ts="1760000124.000100",
        streams=("1760000125.000100", "1760000126.000200"),
    ),
    waiting_since=NOW - 5,
    trail=Trail("req-1", "Root=1-5759e988-bd862e3fe1be46a994272793;Sampled=1"),
    discarded_at=NOW + 10,
)  # fmt: skip
"""Every field has a value."""

texts = st.text(max_size=30)
names = st.text(min_size=1, max_size=20)
instants = st.integers(0, 10**18)
counts = st.integers(0, 10**12)
usages = st.builds(Usage, counts, counts, counts, counts, st.booleans())
failures = st.builds(Failure, texts, texts, st.booleans())
attempts = st.builds(
    Attempt, counts, texts, instants, instants, provider=st.none() | texts, model=st.none() | texts,
    request_id=st.none() | texts, usage=st.none() | usages, cost_micro_usd=st.none() | counts,
    first_token_ms=st.none() | counts,
)  # fmt: skip
notices = st.builds(
    Notice, texts, st.sampled_from(NoticeStatus), counts, instants, told_at=st.none() | instants,
    last_error=st.none() | texts,
)  # fmt: skip
payloads = st.builds(Payload, texts) | st.builds(Payload, st.none(), names)
logs = st.lists(attempts, max_size=3).map(tuple)
outboxes = st.lists(notices, max_size=3).map(tuple)

guesses = st.floats(0, 1e9)
slots = st.builds(
    Slot, names, instants, counts, counts, st.dictionaries(names, counts, max_size=4), st.tuples(guesses, guesses)
)

maybe = st.none() | texts
origins = st.builds(
    SlackOrigin,
    texts,
    texts,
    texts,
    texts,
    thread_ts=maybe,
    message_ts=maybe,
    response_url=maybe,
    failed_ts=maybe,
    streams=st.lists(texts, max_size=3).map(tuple),
)
jobs = st.builds(
    Job, job_id=names, client_id=names, lane=st.sampled_from(Lane), status=st.sampled_from(JobStatus),
    fingerprint=texts, request=payloads, owner=texts, created_at=instants, available_at=instants,
    deadline_at=instants, deadline_seconds=counts, expires_at=instants, due_at=st.none() | instants,
    attempts_limit=st.none() | counts, model_index=st.integers(0, 5), background=st.booleans(),
    handle=st.none() | names, slot=st.none() | slots, place=st.none() | instants,
    schema_version=st.just(1), claims=counts, attempts=counts, claimed_at=st.none() | instants,
    finished_at=st.none() | instants, result=st.none() | payloads, error=st.none() | failures, log=logs,
    metadata=st.none() | texts, targets=st.lists(texts, max_size=3).map(tuple), outbox=outboxes,
    ahead=st.none() | counts, charge=st.none() | st.builds(Charge, names, counts, counts, counts),
    webhook=st.none() | st.builds(Webhook, texts, st.none() | texts),
    slack=st.none() | origins, waiting_since=st.none() | instants,
    trail=st.none() | st.builds(Trail, names, maybe),
    discarded_at=st.none() | instants, parked_since=st.none() | instants, lease_until=st.none() | instants,
)  # fmt: skip
"""Any job that could stand in a row."""
