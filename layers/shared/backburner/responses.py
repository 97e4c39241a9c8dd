"""OpenAI's Responses API as a second way in: its requests into the core's words, jobs into its Response objects.

The format is OpenAI's of background responses (https://platform.openai.com/docs/api-reference/responses), for every
provider. A response's id is its job's, so both APIs show the same jobs. A field that cannot be honoured is refused by
name, unless it says what happens anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, StringConstraints, field_validator

from backburner.documents import json_text, usage_document
from backburner.errors import ContentFiltered, InvalidRequest, Refusal, TooLarge
from backburner.intake import parse_object, validated
from backburner.models import Job, JobRequest, JobStatus, Lane, ModelInfo, Quota, WebhookRequest

PAIRS_MAX = 16
"""Of metadata, with keys of 64 and values of 512 characters, as OpenAI has it."""
LANES: Final = {"flex": Lane.BULK, "priority": Lane.INTERACTIVE}
"""Service tiers that choose a lane; the others mean the standard one."""
TIERS: Final = {Lane.BULK: "flex", Lane.INTERACTIVE: "priority", Lane.STANDARD: "default"}
NAMES: Final = {
    "prompt": "input",
    "messages": "input",
    "system_prompt": "instructions",
    "max_tokens": "max_output_tokens",
    "user_id": "safety_identifier",
    "priority": "service_tier",
    "response_format": "text.format",
}
"""What fields of the core's request are called here."""
NOT_HERE: Final[Mapping[str, tuple[Sequence[Any], str]]] = {
    "stream": ((False,), "follow the answer over the WebSocket API, or retrieve it"),
    "stream_options": ((), "nothing is streamed here"),
    "store": ((True,), "a background response has to be stored; delete it when you have it"),
    "previous_response_id": ((), "send the whole conversation as input"),
    "conversation": ((), "send the whole conversation as input"),
    "prompt": ((), "prompt templates are OpenAI's; send the text as input"),
    "tools": (([],), "tools are not called here"),
    "tool_choice": (("auto", "none"), "tools are not called here"),
    "parallel_tool_calls": ((True, False), "tools are not called here"),
    "max_tool_calls": ((), "tools are not called here"),
    "include": (([],), "there is nothing more to include"),
    "reasoning": (({},), "it is left as the model has it"),
    "top_p": ((1,), "use temperature, where the model has one"),
    "top_logprobs": ((0,), "log probabilities are not kept"),
    "truncation": (("disabled",), "a request that does not fit the model fails"),
    "user": ((), "use safety_identifier and prompt_cache_key"),
    "background_options": ((), "use service_tier flex"),
    "prompt_cache_retention": ((), "it is left as the provider has it"),
}
"""OpenAI's fields without an equal here: the values that change nothing, and what to do instead."""
ERROR_CODES: Final = {
    "rate_limited": "rate_limit_exceeded",
    "invalid_request": "invalid_prompt",
    "context_length_exceeded": "invalid_prompt",
}
"""OpenAI's names for the failures that have one; all others are a `server_error`. Our own begins the message."""


class _Body(BaseModel):
    # Built when first used: the accept path of the other API does without them.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class TextPart(_Body):
    """A piece of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    logprobs: Annotated[list[JsonValue], Field(max_length=0)] | None = None


def _parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class InputMessage(_Body):
    """An item of the input; `id` and `status` may come along from an earlier response's output."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        list[TextPart], Field(min_length=1), BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])
    ]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @property
    def text(self) -> str:
        """Its pieces, a line each."""
        return "\n".join(part.text for part in self.content)


class Format(_Body):
    """The shape of the answer."""

    type: Literal["text", "json_schema"]
    name: str | None = None
    json_schema: dict[str, JsonValue] | None = Field(None, alias="schema")
    strict: Literal[True] | None = Field(None, description="Answers are always held to the schema strictly.")


class TextOptions(_Body):
    """How the answer is written."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ResponseRequest(_Body):
    """The body of `POST /v1/responses`. The last three fields are not OpenAI's; SDKs send them by `extra_body`."""

    background: Annotated[bool, Field(validate_default=True)] = False
    model: str | None = Field(None, description="Absent: the deployment's default.")
    input: Annotated[
        list[InputMessage],
        Field(min_length=1),
        BeforeValidator(_items, json_schema_input_type=str | list[InputMessage]),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=PAIRS_MAX),
        ]
        | None
    ) = None
    temperature: float | None = None
    text: TextOptions | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None

    webhook: WebhookRequest | None = None
    fallback_models: list[str] | None = None
    deadline_seconds: int | None = None

    @field_validator("background")
    @classmethod
    def _asynchronous(cls, value: bool) -> bool:  # noqa: FBT001
        if not value:
            raise ValueError("must be true: answers are written in the background here; retrieve the response for it")
        return value


# ── Requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def in_its_words(system_turns: int = 0) -> Iterator[None]:
    """Refusals name fields as this API has them.

    system_turns: how many items at the beginning of the input became the system prompt.
    """

    def renamed(field: str) -> str:
        head, *path = field.split(".")
        if head == "messages" and path and path[0].isdecimal():
            path[0] = str(int(path[0]) + system_turns)
        if head == "response_format" and path[:1] == ["json_schema"]:
            path[0] = "schema"
        return ".".join((NAMES.get(head, head), *path))

    try:
        yield
    except Refusal as refusal:
        refusal.field = refusal.field and renamed(refusal.field)
        refusal.fields = tuple((renamed(field), message) for field, message in refusal.fields)
        raise


def parse(body: str) -> JobRequest:
    """The request in the body of `POST /v1/responses`. Raises InvalidRequest, naming each field that is wrong."""
    return job_request(parse_object(body, "body"))


def job_request(given: Mapping[str, Any]) -> JobRequest:
    """The request in these fields. Raises InvalidRequest, naming each field that is wrong."""
    wrong = [
        (name, f"not supported; {instead}")
        for name, (neutral, instead) in NOT_HERE.items()
        if given.get(name) is not None and given[name] not in neutral
    ]
    if wrong:
        refusal = InvalidRequest()
        refusal.fields = tuple(wrong)
        raise refusal
    request = validated(ResponseRequest, {name: value for name, value in given.items() if name not in NOT_HERE})
    return _job_request(request)


def _job_request(request: ResponseRequest) -> JobRequest:
    turns = list(request.input)
    instructions = [request.instructions] if request.instructions is not None else []
    while turns and turns[0].role in ("system", "developer"):
        instructions.append(turns.pop(0).text)
    system_turns = len(request.input) - len(turns)
    late = next((i for i, turn in enumerate(turns, system_turns) if turn.role in ("system", "developer")), None)
    if late is not None:
        raise InvalidRequest("must stand before what the user and the assistant say", field=f"input.{late}.role")
    if not turns:
        raise InvalidRequest("holds nothing that the user says", field="input")
    fields: dict[str, Any] = {
        "model": request.model,
        "system_prompt": "\n\n".join(instructions) if instructions else None,
        "max_tokens": request.max_output_tokens,
        "metadata": request.metadata,
        "temperature": request.temperature,
        "prompt_cache_key": request.prompt_cache_key,
        "user_id": request.safety_identifier,
        "priority": LANES.get(request.service_tier or "", None),
        "response_format": _response_format(request.text),
        "webhook": _webhook(request.webhook),
        "fallback_models": request.fallback_models,
        "deadline_seconds": request.deadline_seconds,
    }
    if len(turns) == 1 and turns[0].role == "user":
        fields["prompt"] = turns[0].text
    else:
        fields["messages"] = [{"role": turn.role, "content": turn.text} for turn in turns]
    with in_its_words(system_turns):
        return validated(JobRequest, {name: value for name, value in fields.items() if value is not None})


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    wanted = text.format if text is not None else None
    if wanted is None or wanted.type == "text":
        return None
    given = {"type": wanted.type, "name": wanted.name, "json_schema": wanted.json_schema}
    return {name: value for name, value in given.items() if value is not None}


def _webhook(webhook: WebhookRequest | None) -> dict[str, Any] | None:
    """In the style of this API, unless the caller wants the other."""
    return None if webhook is None else {"style": "openai", **webhook.model_dump()}


# ── Replies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def status_of(job: Job, finish_reason: str | None) -> str:
    """The status that a Response has for it. An expired job is a failed response; its error says why."""
    if job.status is JobStatus.COMPLETED:
        return "incomplete" if finish_reason == "length" else "completed"
    if job.error is not None and job.error.code == ContentFiltered.code:
        return "incomplete"
    return {
        JobStatus.QUEUED: "queued",
        JobStatus.PROCESSING: "in_progress",
        JobStatus.CANCELLED: "cancelled",
    }.get(job.status, "failed")


def document(job: Job, request: JobRequest, model: str, result: Mapping[str, Any] | None) -> dict[str, Any]:
    """The job as a Response.

    model: the one asked for. result: as stored, of a completed job; without it, one counts as still in progress, since
    nobody is told that it is complete without getting it.
    """
    if job.status is JobStatus.COMPLETED and result is None:
        status = "in_progress"
    else:
        status = status_of(job, result["finish_reason"] if result else None)
    reasons = {JobStatus.COMPLETED: "max_output_tokens", JobStatus.FAILED: "content_filter"}
    shape = request.response_format
    return {
        "id": job.job_id,
        "object": "response",
        "created_at": job.created_at // 1000,
        "completed_at": job.finished_at // 1000 if status == "completed" and job.finished_at is not None else None,
        "status": status,
        "background": True,
        "model": result["model"] if result else model,
        "output": [_message(job, result, status)] if result else [],
        "usage": _usage(job),
        "error": _error(job) if status == "failed" else None,
        "incomplete_details": {"reason": reasons[job.status]} if status == "incomplete" else None,
        "instructions": request.system_prompt,
        "max_output_tokens": request.max_tokens,
        "metadata": json.loads(job.metadata) if job.metadata is not None else {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": None,
        "safety_identifier": request.user_id,
        "service_tier": TIERS[job.lane],
        "store": True,
        "temperature": request.temperature,
        "text": {
            "format": {"type": "text"}
            if shape is None
            else {"type": shape.type, "name": shape.name, "schema": shape.json_schema, "strict": True}
        },
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
    }


def _message(job: Job, result: Mapping[str, Any], status: str) -> dict[str, Any]:
    text = {"type": "output_text", "text": result["text"], "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{job.job_id}_{job.claims}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text],
    }


def _usage(job: Job) -> dict[str, Any] | None:
    counted = usage_document(job.usage)
    if counted is None:
        return None
    return {
        "input_tokens": counted["input_tokens"],
        "input_tokens_details": {
            "cached_tokens": counted["cached_tokens"],
            "cache_write_tokens": counted["cache_write_tokens"],
        },
        "output_tokens": counted["output_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["total_tokens"],
    }


def _error(job: Job) -> dict[str, str]:
    code, message = (job.error.code, job.error.message) if job.error is not None else (job.status.value, "")
    return {"code": ERROR_CODES.get(code, "server_error"), "message": f"{code}: {message}".removesuffix(": ")}


def reply(document: Mapping[str, Any], bytes_max: int) -> str:
    """A Response as JSON. Raises TooLarge."""
    text = json_text(document)
    if len(json_text(text).encode()) > bytes_max:
        raise TooLarge(f"The answer is too large for a reply; GET /jobs/{document['id']} gives a link to it.")
    return text


def event(job: Job, event_id: str, result: Mapping[str, Any] | None) -> dict[str, Any]:
    """The body of a webhook: it names the response, which is then to be retrieved."""
    status = status_of(job, result["finish_reason"] if result else None)
    return {
        "id": f"evt_{event_id}",
        "object": "event",
        "created_at": (job.finished_at or job.created_at) // 1000,
        "type": f"response.{status}",
        "data": {"id": job.job_id},
    }


def deleted(job_id: str) -> dict[str, Any]:
    """The reply to a deletion."""
    return {"id": job_id, "object": "response", "deleted": True}


def model_document(model: ModelInfo) -> dict[str, Any]:
    """One entry of the catalogue. Nobody notes when a model was made, but the SDKs expect a number."""
    return {"id": model.name, "object": "model", "created": 0, "owned_by": model.provider}


def error_document(refusal: Refusal) -> dict[str, Any]:
    """An error in OpenAI's format: the SDKs make their exceptions of its status and fields."""
    field, message = refusal.fields[0] if refusal.fields else (refusal.field, refusal.message)
    if refusal.fields:
        message = "; ".join(f"{name}: {text}" for name, text in refusal.fields[:3])
    elif field:
        message = f"{field}: {message}"
    kinds = {HTTPStatus.UNAUTHORIZED: "authentication_error", HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error"}
    kind = "server_error" if refusal.http_status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": message,
            "type": kinds.get(HTTPStatus(refusal.http_status), kind),
            "param": field,
            "code": refusal.code,
        }
    }


def quota_headers(quotas: Sequence[Quota]) -> dict[str, str]:
    """Where a limited client stands, as OpenAI's headers tell it."""
    return {
        name: value
        for quota in quotas
        if quota.name in ("requests", "tokens")
        for name, value in (
            (f"x-ratelimit-limit-{quota.name}", str(quota.limit)),
            (f"x-ratelimit-remaining-{quota.name}", str(quota.remaining)),
            (f"x-ratelimit-reset-{quota.name}", f"{quota.reset_seconds}s"),
        )
    }
