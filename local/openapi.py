"""The HTTP API described for tools: `docs/openapi.json`, made from the models. Run by `make openapi`.

OpenAPI 3.1. Requests come from the pydantic models; replies, which the program builds as plain JSON, are described here
and held against the deployed stack by tests/e2e/test_whatever_is_asked.py.
"""

import json
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from backburner.errors import Refusal
from backburner.http import PAGE_MAX, WAIT_SECONDS_MAX
from backburner.models import JobRequest, JobStatus, Lane
from backburner.responses import ResponseRequest
from local.state import ROOT

FILE = ROOT / "docs" / "openapi.json"
SCHEMAS = "#/components/schemas/"
ERROR_CODES = sorted({kind.code for kind in Refusal.__subclasses__()})
GATEWAY_CODES = ["gateway_refused", "unavailable"]

type Json = dict[str, Any]


def ref(name: str) -> Json:
    """A schema by its name."""
    return {"$ref": f"{SCHEMAS}{name}"}


def obj(required: Sequence[str], **properties: Any) -> Json:
    """An object; more fields may come with later versions."""
    return {"type": "object", "required": list(required), "properties": properties}


TEXT: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}
SECONDS: Json = {"type": "integer", "description": "Unix seconds."}

USAGE = obj(
    ["input_tokens", "output_tokens", "cached_tokens", "cache_write_tokens", "total_tokens"],
    input_tokens=INTEGER,
    output_tokens=INTEGER,
    cached_tokens=INTEGER,
    cache_write_tokens=INTEGER,
    total_tokens=INTEGER,
    estimated={"const": True},
)
FAILURE = obj(["code", "message", "retryable"], code=TEXT, message=TEXT, retryable={"type": "boolean"})
SUMMARY: Json = {
    "job_id": TEXT,
    "status": {"enum": list(JobStatus)},
    "priority": {"enum": list(Lane)},
    "attempts": INTEGER,
    "created_at": SECONDS,
    "deadline_at": SECONDS,
    "finished_at": SECONDS,
    "expires_at": SECONDS,
    "error": ref("Failure"),
}
SUMMARY_REQUIRED = ["job_id", "status", "priority", "attempts", "created_at", "deadline_at", "expires_at"]
RECEIPT_LINE = obj(
    ["attempt", "outcome", "began_at", "ended_at"],
    attempt=INTEGER,
    outcome=TEXT,
    began_at=SECONDS,
    ended_at=SECONDS,
    provider=TEXT,
    model=TEXT,
    request_id=TEXT,
    usage=ref("Usage"),
    cost_usd=NUMBER,
)
DELIVERY = obj(
    ["target", "status", "tries"],
    target=TEXT,
    status={"enum": ["pending", "delivered", "given_up"]},
    tries=INTEGER,
    told_at=SECONDS,
    given_up_at=SECONDS,
    last_error=TEXT,
)
NEVER_TOLD = obj(
    ["target", "outcome", "tries"],
    target=TEXT,
    outcome={"const": "given_up"},
    tries=INTEGER,
    ended_at=SECONDS,
    error=TEXT,
)
JOB = obj(
    SUMMARY_REQUIRED,
    **SUMMARY,
    position=INTEGER,
    estimated_start_at=SECONDS,
    metadata={"type": "object"},
    usage=ref("Usage"),
    cost_usd=NUMBER,
    deliveries={"type": "array", "items": DELIVERY},
    receipt={"type": "array", "items": {"anyOf": [RECEIPT_LINE, NEVER_TOLD]}},
    result=obj(
        ["text", "finish_reason", "model", "provider"],
        text=TEXT,
        finish_reason={"enum": ["stop", "length", "unknown"]},
        model=TEXT,
        provider=TEXT,
    ),
    result_url=TEXT,
    result_note=TEXT,
)
PROBLEM = obj(
    ["type", "title", "detail", "code"],
    type=TEXT,
    title=TEXT,
    status=INTEGER,
    detail=TEXT,
    code={"enum": [*ERROR_CODES, *GATEWAY_CODES]},
    errors={"type": "array", "items": obj(["field", "message"], field=TEXT, message=TEXT)},
)
RESPONSE = obj(
    ["id", "object", "created_at", "status", "background", "model", "output", "metadata"],
    id=TEXT,
    object={"const": "response"},
    created_at=SECONDS,
    status={"enum": ["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]},
    background={"const": True},
    model=TEXT,
    output={"type": "array", "items": {"type": "object"}},
    metadata={"type": "object"},
    usage={"type": ["object", "null"]},
    error={"type": ["object", "null"]},
    incomplete_details={"type": ["object", "null"]},
)
OPENAI_ERROR = obj(
    ["error"],
    error=obj(
        ["message", "type", "param", "code"],
        message=TEXT,
        type=TEXT,
        param={"type": ["string", "null"]},
        code={"type": ["string", "null"]},
    ),
)
MODEL = obj(["id", "object", "created", "owned_by"], id=TEXT, object={"const": "model"}, created=INTEGER, owned_by=TEXT)


def reply(description: str, schema: Json, kind: str = "application/json") -> Json:
    """A reply with a body."""
    return {"description": description, "content": {kind: {"schema": schema}}}


def errors(*statuses: int, openai: bool = False) -> Json:
    """Error replies. The gateway's own 403, 413 and 5xx are problem documents as well, as application/json."""
    known = {
        400: "Not valid: the field is named.",
        401: "No valid key.",
        403: "Refused by the gateway.",
        404: "There is no such thing, it is not yours, or it has expired.",
        405: "Not with this method.",
        409: "Not in the state it is in.",
        413: "Too large.",
        415: "Not JSON.",
        422: "Valid, but not possible: a key used for another request, or beyond a whole budget.",
        429: "A limit of yours is used up, or the gateway's; see Retry-After.",
        500: "A fault of ours.",
        503: "Not just now; send it again with the same Idempotency-Key.",
    }
    shape = (
        {"application/json": {"schema": {"anyOf": [ref("OpenAIError"), ref("Problem")]}}}
        if openai
        else {kind: {"schema": ref("Problem")} for kind in ("application/problem+json", "application/json")}
    )
    return {
        str(status): {"description": known[status], "content": shape}
        for status in sorted({*statuses, 401, 403, 405, 413, 429, 500, 503})
    }


def parameter(name: str, where: str, schema: Json, description: str = "") -> Json:
    """A parameter; those of the path are required."""
    return {
        "name": name,
        "in": where,
        "required": where == "path",
        "schema": schema,
        **({"description": description} if description else {}),
    }


def body(model: str) -> Json:
    """A request's body."""
    return {"required": True, "content": {"application/json": {"schema": ref(model)}}}


def document() -> Json:
    """The whole."""
    _, requests = models_json_schema(
        [(JobRequest, "validation"), (ResponseRequest, "validation")], ref_template=SCHEMAS + "{model}"
    )
    key = parameter(
        "Idempotency-Key", "header", {"type": "string", "pattern": "^[!-~]{1,255}$"}, "The same key is the same job."
    )
    job_id = parameter("job_id", "path", TEXT)
    response_id = parameter("response_id", "path", TEXT, "The job's id.")
    wait = parameter(
        "wait", "query", {"type": "integer", "minimum": 0, "maximum": WAIT_SECONDS_MAX}, "Seconds to wait for a change."
    )
    accepted = obj(["job_id", "status", "poll_url", "expires_at"], job_id=TEXT, status=TEXT, poll_url=TEXT,
                   expires_at=SECONDS)  # fmt: skip
    page = obj(["jobs", "next_cursor"], jobs={"type": "array", "items": ref("JobSummary")},
               next_cursor={"type": ["string", "null"]})  # fmt: skip
    listing = [
        parameter("status", "query", {"enum": list(JobStatus)}),
        parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": PAGE_MAX}),
        parameter("cursor", "query", TEXT, "`next_cursor` of the page before."),
    ]
    ticket = obj(["ticket", "expires_at", "socket_url"], ticket=TEXT, expires_at=SECONDS, socket_url=TEXT)
    models = obj(["object", "data"], object={"const": "list"}, data={"type": "array", "items": ref("Model")})
    deleted = obj(["id", "object", "deleted"], id=TEXT, object=TEXT, deleted={"const": True})
    shown, response = reply("The job.", ref("Job")), reply("The response.", ref("Response"))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Backburner",
            "version": "1",
            "summary": "Asynchronous LLM work.",
            "description": "Jobs, and the same jobs as OpenAI's background responses.",
        },
        "security": [{"bearer": []}, {"key": []}],
        "paths": {
            "/jobs": {
                "post": {
                    "operationId": "createJob",
                    "parameters": [key],
                    "requestBody": body("JobRequest"),
                    "responses": {"202": reply("Accepted, and durable.", accepted), **errors(400, 415, 422)},
                },
                "get": {
                    "operationId": "listJobs",
                    "parameters": listing,
                    "responses": {"200": reply("A page, newest first.", page), **errors(400)},
                },
            },
            "/jobs/{job_id}": {
                "parameters": [job_id],
                "get": {
                    "operationId": "getJob",
                    "parameters": [wait],
                    "responses": {"200": shown, **errors(400, 404)},
                },
                "delete": {"operationId": "cancelJob", "responses": {"200": shown, **errors(404, 409)}},
            },
            "/tickets": {
                "post": {
                    "operationId": "createTicket",
                    "responses": {"201": reply("Opens one WebSocket connection.", ticket), **errors()},
                },
            },
            "/v1/responses": {
                "post": {
                    "operationId": "createResponse",
                    "parameters": [key],
                    "requestBody": body("ResponseRequest"),
                    "responses": {"200": response, **errors(400, 415, 422, openai=True)},
                },
            },
            "/v1/responses/{response_id}": {
                "parameters": [response_id],
                "get": {
                    "operationId": "getResponse",
                    "parameters": [wait],
                    "responses": {"200": response, **errors(400, 404, openai=True)},
                },
                "delete": {
                    "operationId": "deleteResponse",
                    "responses": {"200": reply("Gone.", deleted), **errors(404, 409, openai=True)},
                },
            },
            "/v1/responses/{response_id}/cancel": {
                "parameters": [response_id],
                "post": {"operationId": "cancelResponse", "responses": {"200": response, **errors(404, openai=True)}},
            },
            "/v1/models": {
                "get": {
                    "operationId": "listModels",
                    "responses": {"200": reply("The catalogue.", models), **errors(openai=True)},
                },
            },
            "/v1/models/{model}": {
                "parameters": [parameter("model", "path", TEXT)],
                "get": {
                    "operationId": "getModel",
                    "responses": {"200": reply("A model.", ref("Model")), **errors(404, openai=True)},
                },
            },
        },
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": {
                **requests["$defs"],
                "Job": JOB,
                "JobSummary": obj(SUMMARY_REQUIRED, **SUMMARY),
                "Failure": FAILURE,
                "Usage": USAGE,
                "Problem": PROBLEM,
                "Response": RESPONSE,
                "OpenAIError": OPENAI_ERROR,
                "Model": MODEL,
            },
        },
    }


def text() -> str:
    """The file's content."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
