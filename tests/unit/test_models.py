"""The nouns: what a request may say, one spelling for equal ones, and what a job knows of itself."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from backburner import errors, models
from backburner.errors import BackburnerError, Refusal
from backburner.models import (
    Attempt,
    Job,
    JobRequest,
    JobStatus,
    Lane,
    Message,
    Notice,
    NoticeStatus,
    Payload,
    Usage,
    canonical_json,
    fingerprint,
)

JOB = Job(
    job_id="job_1",
    client_id="alice",
    lane=Lane.STANDARD,
    status=JobStatus.QUEUED,
    fingerprint="f",
    request=Payload("{}"),
    owner="o",
    created_at=1_000,
    available_at=1_000,
    deadline_at=2_000,
    deadline_seconds=1,
    expires_at=5,
    due_at=1_500,
)


@pytest.mark.parametrize("status", JobStatus)
def test_a_status_knows_whether_it_is_final(status: JobStatus) -> None:
    """All but the two that somebody still has to do something about."""
    assert status.is_final is (status.value not in ("queued", "processing"))


def test_the_statuses_and_lanes_are_the_documented_ones() -> None:
    """Clients and stored rows hold these words."""
    assert [status.value for status in JobStatus] == [
        "queued", "processing", "completed", "failed", "cancelled", "expired",
    ]  # fmt: skip
    assert [lane.value for lane in Lane] == ["interactive", "standard", "bulk"]
    assert [status.value for status in NoticeStatus] == ["pending", "delivered", "given_up"]


# ── Spelling ─────────────────────────────────────────────────────────────────────────────────────────────────────────

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)


@given(value=json_values)
def test_the_one_spelling_says_the_same(value: Any) -> None:
    """It reads back equal, and is spelt the same again."""
    spelled = canonical_json(value)
    assert json.loads(spelled) == value
    assert canonical_json(json.loads(spelled)) == spelled


@given(fields=st.dictionaries(st.text(), json_values, min_size=2, max_size=5))
def test_the_order_of_keys_makes_no_difference(fields: dict[str, Any]) -> None:
    """Nor does the spelling of characters."""
    assert canonical_json(dict(reversed(fields.items()))) == canonical_json(fields)
    assert canonical_json(json.loads(json.dumps(fields, indent=3))) == canonical_json(fields)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_there_is_no_spelling_for_what_is_no_number(number: float) -> None:
    """It would not be JSON."""
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"n": number})


def test_a_fingerprint_is_the_same_on_every_machine_and_at_any_time() -> None:
    """It is stored: another one for the same request would turn replays into conflicts."""
    request = JobRequest.model_validate({"prompt": "Name a river.", "metadata": {"b": 0.7, "a": "中"}, "max_tokens": 5})
    assert request.canonical() == '{"max_tokens":5,"metadata":{"a":"中","b":0.7},"prompt":"Name a river."}'
    assert fingerprint(request.canonical()) == "c92d57bc4265e162e238400d8452858d13960bceddf5b8b08c2f6c05df51973f"


def test_what_is_left_out_or_null_is_not_spelt() -> None:
    """So a deployment may change its defaults, and a new field may come, without a replay becoming a conflict."""
    full = JobRequest.model_validate(dict.fromkeys(JobRequest.model_fields) | {"prompt": "a"})
    assert full.canonical() == JobRequest(prompt="a").canonical() == '{"prompt":"a"}'
    with_metadata = JobRequest(prompt="a", metadata={"k": None})
    assert with_metadata.canonical(leave_out=frozenset({"metadata"})) == '{"prompt":"a"}'
    assert with_metadata.canonical() == '{"metadata":{"k":null},"prompt":"a"}'


@given(
    left=st.dictionaries(st.sampled_from("abc"), json_values, max_size=2),
    right=st.dictionaries(st.sampled_from("abc"), json_values, max_size=2),
)
def test_other_requests_have_other_fingerprints(left: dict[str, Any], right: dict[str, Any]) -> None:
    """1, 1.0 and true are not the same request, though Python takes them for equal."""
    same = json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
    prints = {fingerprint(JobRequest(prompt="a", metadata=metadata).canonical()) for metadata in (left, right)}
    assert (len(prints) == 1) is same


# ── Requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_is_read_back_from_its_spelling() -> None:
    """As the worker does it."""
    request = JobRequest.model_validate(
        {"messages": [{"role": "user", "content": "a\u0000 🏞️"}], "priority": "bulk", "metadata": {"k": [1, 0.5, None]}}
    )
    assert JobRequest.model_validate(json.loads(request.canonical())) == request
    assert request.lane is Lane.BULK


def test_a_request_of_an_unspoken_priority_is_standard() -> None:
    """Neither urgent nor patient."""
    assert JobRequest(prompt="a").lane is Lane.STANDARD


@pytest.mark.parametrize("text", ["", " ", "\n\t", "\u3000\u2028", "\u00a0"])
def test_a_blank_text_asks_nothing(text: str) -> None:
    """In any script's white space."""
    for fields in ({"prompt": text}, {"prompt": "a", "system_prompt": text}):
        with pytest.raises(ValidationError):
            JobRequest.model_validate(fields)
    with pytest.raises(ValidationError):
        Message(role="user", content=text)


@pytest.mark.parametrize(("levels", "fits"), [(31, True), (32, False)])
def test_metadata_nests_as_deep_as_dynamodb_and_readers_allow(levels: int, fits: bool) -> None:
    """The object itself is the first level."""
    value: Any = 1
    for number in range(levels):
        value = [value] if number % 2 else {"k": value}
    metadata = {"k": value}
    if fits:
        assert JobRequest(prompt="a", metadata=metadata).metadata == metadata
    else:
        with pytest.raises(ValidationError, match="32 levels"):
            JobRequest(prompt="a", metadata=metadata)


@pytest.mark.parametrize(("text", "fits"), [("x" * 16_376, True), ("x" * 16_377, False), ("中" * 5_459, False)])
def test_metadata_is_measured_in_bytes(text: str, fits: bool) -> None:
    """16 KiB of the one spelling."""
    if fits:
        assert len(canonical_json({"m": text}).encode()) == models.METADATA_BYTES_MAX
        JobRequest(prompt="a", metadata={"m": text})
    else:
        with pytest.raises(ValidationError, match="larger than 16384 bytes"):
            JobRequest(prompt="a", metadata={"m": text})


def test_nouns_do_not_change_under_anybodys_hands() -> None:
    """They are shared between threads."""
    with pytest.raises(FrozenInstanceError):
        JOB.status = JobStatus.FAILED  # type: ignore[misc]
    with pytest.raises(ValidationError):
        JobRequest(prompt="a").prompt = "b"  # type: ignore[misc]


# ── Jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("now", "expired"), [(4_999, False), (5_000, True), (5_001, True)])
def test_a_row_counts_as_absent_from_its_second_of_expiry_on(now: int, expired: bool) -> None:
    """Whether or not TTL has deleted it."""
    assert JOB.has_expired(now) is expired


def test_the_pending_targets_are_those_neither_told_nor_given_up() -> None:
    """In their order."""
    outbox = (
        Notice("a"),
        Notice("b", NoticeStatus.DELIVERED),
        Notice("c", NoticeStatus.GIVEN_UP),
        Notice("d", lease_until=9),
    )
    assert [notice.target for notice in replace(JOB, outbox=outbox).pending] == ["a", "d"]


def test_a_jobs_usage_is_its_last_and_its_cost_the_sum() -> None:
    """What is not known of an attempt is no zero."""
    assert (JOB.usage, JOB.cost_micro_usd) == (None, None)
    log = (
        Attempt(1, "timeout", 0, 1, usage=Usage(1, 1), cost_micro_usd=5),
        Attempt(2, "completed", 1, 2, usage=Usage(2, 3), cost_micro_usd=7),
        Attempt(3, "connection", 2, 3),
    )
    job = replace(JOB, log=log)
    assert (job.usage, job.cost_micro_usd) == (Usage(2, 3), 12)
    assert Usage(2, 3).total_tokens == 5
    free = replace(JOB, log=(Attempt(1, "completed", 0, 1, usage=Usage(), cost_micro_usd=0),))
    assert free.cost_micro_usd == 0


# ── Errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def every_error(kind: type[BackburnerError] = BackburnerError) -> list[type[BackburnerError]]:
    """All error classes of the program's own."""
    found = [kind]
    for child in kind.__subclasses__():
        found += every_error(child)
    return [kind for kind in found if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_an_error_says_what_it_means_and_whether_trying_again_helps(kind: type[BackburnerError]) -> None:
    """A stable code in snake case; its docstring is its message, unless something better is known."""
    assert kind.code == kind.code.lower().replace("-", "_").strip()
    assert kind.__doc__
    assert kind().message == kind.__doc__.strip()[:500]
    assert kind("x" * 1_000).message == "x" * 500
    assert kind().failure() == models.Failure(kind.code, kind().message, kind.retryable)
    if issubclass(kind, Refusal):
        assert 400 <= kind.http_status < 600
        assert kind.retryable or kind.http_status < 500
        assert not kind.retryable or kind.http_status in {409, 429, *range(500, 600)}
