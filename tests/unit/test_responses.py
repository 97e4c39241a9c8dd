"""OpenAI's wire format: what is taken, what is refused by name, and what a job looks like in it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import ResponseStatus

from backburner import responses
from backburner.errors import IdempotencyConflict, InvalidRequest, Refusal, TooManyRequests, Unauthorized, Unavailable
from backburner.models import Attempt, Failure, Job, JobRequest, JobStatus, Lane, Payload, Quota, Usage
from tests.fakes.house import ALICE, House

BLANK = {"role": "user", "content": " "}
BASE = {"background": True, "model": "m-1", "input": "Name a river."}


def parsed(**fields: Any) -> JobRequest:
    return responses.parse(json.dumps({**BASE, **fields}))


def refused(**fields: Any) -> dict[str, str]:
    """The fields that the refusal names, with its words."""
    with pytest.raises(InvalidRequest) as raised:
        parsed(**fields)
    error = raised.value
    return dict(error.fields) or {str(error.field): error.message}


# ── Requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_field_that_maps_reaches_the_job() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    request = parsed(
        instructions="Be brief.",
        max_output_tokens=50,
        metadata={"team": "maps"},
        temperature=0.5,
        text={"format": {"type": "json_schema", "name": "river", "schema": schema, "strict": True}},
        prompt_cache_key="rivers",
        safety_identifier="user-7",
        service_tier="flex",
        webhook={"url": "https://example.com/hook"},
        fallback_models=["m-2"],
        deadline_seconds=60,
    )
    assert request.model_dump(exclude_none=True) == {
        "prompt": "Name a river.",
        "model": "m-1",
        "system_prompt": "Be brief.",
        "max_tokens": 50,
        "metadata": {"team": "maps"},
        "temperature": 0.5,
        "response_format": {"type": "json_schema", "name": "river", "json_schema": schema},
        "prompt_cache_key": "rivers",
        "user_id": "user-7",
        "priority": "bulk",
        "webhook": {"url": "https://example.com/hook", "style": "openai"},
        "fallback_models": ["m-2"],
        "deadline_seconds": 60,
    }


def test_a_plain_request_is_the_same_job_as_the_other_apis() -> None:
    """So a key that was used for one is a replay for the other."""
    assert parsed().canonical() == JobRequest(prompt="Name a river.", model="m-1").canonical()


@pytest.mark.parametrize(
    ("tier", "lane"),
    [
        ("auto", Lane.STANDARD),
        ("default", Lane.STANDARD),
        (None, Lane.STANDARD),
        ("flex", Lane.BULK),
        ("priority", Lane.INTERACTIVE),
    ],
)
def test_a_service_tier_chooses_the_lane(tier: str | None, lane: Lane) -> None:
    assert parsed(service_tier=tier).lane is lane


def test_a_conversation_keeps_its_turns_and_its_system_turns_become_instructions() -> None:
    """An earlier response's output is taken as it came."""
    before = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "The Danube.", "annotations": [], "logprobs": []}],
    }
    request = parsed(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Rivers only."},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "Name"}, {"type": "input_text", "text": "one"}],
            },
            before,
            {"role": "user", "content": "Another."},
        ],
    )
    assert request.system_prompt == "Be brief.\n\nRivers only."
    assert [(turn.role, turn.content) for turn in request.messages or ()] == [
        ("user", "Name\none"),
        ("assistant", "The Danube."),
        ("user", "Another."),
    ]


@pytest.mark.parametrize("name", sorted(responses.NOT_HERE))
def test_what_cannot_be_honoured_is_refused_by_name_and_what_changes_nothing_is_taken(name: str) -> None:
    neutral, instead = responses.NOT_HERE[name]
    assert refused(**{name: "something else"}) == {name: f"not supported; {instead}"}
    for value in (None, *neutral):
        assert parsed(**{name: value}) == parsed()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"background": False}, "background"),
        ({"background": None}, "background"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "system", "content": "only"}]}, "input"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}]}, "input.1.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]}, "input.0.type"),
        ({"input": [{"role": "system", "content": "s"}, BLANK, {"role": "user", "content": "q"}]}, "input.1.content"),
        ({"input": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"instructions": " "}, "instructions"),
        ({"metadata": {"n": 1}}, "metadata.n"),
        ({"metadata": {"k" * 65: "v"}}, f"metadata.{'k' * 65}.[key]"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format.type"),
        ({"text": {"format": {"type": "text", "strict": False}}}, "text.format.strict"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"safety_identifier": "with space"}, "safety_identifier"),
        ({"webhook": {"url": "https://example.com", "secret": "no"}}, "webhook.secret"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_as_the_caller_wrote_it(fields: dict[str, Any], named: str) -> None:
    assert named in refused(**fields)


def test_what_only_the_deployment_knows_is_named_so_too() -> None:
    house = House()
    with pytest.raises(InvalidRequest) as raised, responses.in_its_words():
        house.submission.accept(ALICE, parsed(max_output_tokens=1_000_000))
    assert raised.value.field == "max_output_tokens"
    with pytest.raises(InvalidRequest) as raised, responses.in_its_words():
        house.submission.accept(ALICE, parsed(temperature=1.0))
    assert raised.value.field == "temperature"


# ── Replies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def job(status: JobStatus = JobStatus.QUEUED, **fields: Any) -> Job:
    house = House()
    accepted = house.submission.accept(ALICE, parsed(metadata={"a": "b"}))
    return replace(accepted.job, status=status, **fields)


def shown(of: Job, **result: Any) -> dict[str, Any]:
    answer = {"text": "The Danube.", "finish_reason": "stop", "model": "m-1", "provider": "p", **result}
    return responses.document(of, parsed(), "m-1", answer if of.status is JobStatus.COMPLETED else None)


def failed(code: str) -> Job:
    return job(JobStatus.FAILED, error=Failure(code, "So it went.", retryable=False))


@pytest.mark.parametrize(
    ("of", "status"),
    [
        (job(), "queued"),
        (job(JobStatus.PROCESSING), "in_progress"),
        (job(JobStatus.CANCELLED), "cancelled"),
        (job(JobStatus.EXPIRED), "failed"),
        (failed("overloaded"), "failed"),
        (failed("content_filtered"), "incomplete"),
        (job(JobStatus.COMPLETED, result=Payload("{}")), "completed"),
    ],
)
def test_every_state_has_a_status_of_openais(of: Job, status: ResponseStatus) -> None:
    assert shown(of)["status"] == status


def test_a_completed_job_is_a_message_with_its_usage() -> None:
    line = Attempt(1, "completed", began_at=0, ended_at=1, usage=Usage(10, 4, cached_tokens=6))
    document = shown(job(JobStatus.COMPLETED, finished_at=5_000, log=(line,)))
    (message,) = document["output"]
    assert [part["text"] for part in message["content"]] == ["The Danube."]
    assert document["usage"]["input_tokens_details"]["cached_tokens"] == 6
    assert (document["usage"]["total_tokens"], document["completed_at"]) == (14, 5)
    assert document["metadata"] == {"a": "b"}
    assert document["error"] is document["incomplete_details"] is None


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    document = shown(job(JobStatus.COMPLETED), finish_reason="length")
    assert (document["status"], document["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert document["output"][0]["status"] == "incomplete"


def test_a_replay_whose_answer_is_not_at_hand_is_not_called_complete() -> None:
    assert responses.document(job(JobStatus.COMPLETED), parsed(), "m-1", None)["status"] == "in_progress"


@pytest.mark.parametrize(
    ("code", "shown_code"),
    [("rate_limited", "rate_limit_exceeded"), ("invalid_request", "invalid_prompt"), ("overloaded", "server_error")],
)
def test_a_failure_has_openais_code_and_ours_in_its_message(code: str, shown_code: str) -> None:
    assert shown(failed(code))["error"] == {"code": shown_code, "message": f"{code}: So it went."}


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        (job(JobStatus.COMPLETED), "response.completed"),
        (failed("overloaded"), "response.failed"),
        (failed("content_filtered"), "response.incomplete"),
        (job(JobStatus.CANCELLED), "response.cancelled"),
        (job(JobStatus.EXPIRED), "response.failed"),
    ],
)
def test_an_event_names_the_response_and_nothing_of_it(of: Job, kind: str) -> None:
    event = responses.event(of, "w-1", {"text": "t", "finish_reason": "stop"} if of.status == "completed" else None)
    assert (event["type"], event["data"], event["id"]) == (kind, {"id": of.job_id}, "evt_w-1")
    assert event["object"] == "event"


@pytest.mark.parametrize(
    ("refusal", "kind", "param"),
    [
        (InvalidRequest("unknown", field="model"), "invalid_request_error", "model"),
        (Unauthorized(), "authentication_error", None),
        (TooManyRequests(), "rate_limit_error", None),
        (IdempotencyConflict(field="Idempotency-Key"), "invalid_request_error", "Idempotency-Key"),
        (Unavailable(), "server_error", None),
    ],
)
def test_an_error_has_openais_format(refusal: Refusal, kind: str, param: str | None) -> None:
    error = responses.error_document(refusal)["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, refusal.code)
    assert refusal.message in error["message"]


def test_the_quotas_that_openai_knows_are_told_in_its_headers() -> None:
    quotas = [Quota(name, name, 10, 60, 7, 30) for name in ("requests", "cost")]
    assert responses.quota_headers(quotas) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "7",
        "x-ratelimit-reset-requests": "30s",
    }
