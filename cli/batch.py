"""OpenAI's batch file format: https://platform.openai.com/docs/guides/batch.

A line is `{"custom_id": …, "method": "POST", "url": "/v1/responses" | "/v1/chat/completions", "body": {…}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backburner import responses
from backburner.errors import InvalidRequest
from backburner.models import JobRequest

URLS = ("/v1/responses", "/v1/chat/completions")
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}
"""Fields of chat completions that the Responses API calls otherwise."""
PARTS = {"user": "input_text", "assistant": "output_text"}


def is_batch_line(fields: Mapping[str, Any]) -> bool:
    """Whether a line is one of this format rather than a request as `POST /jobs` takes it."""
    return "custom_id" in fields or "body" in fields


def batch_request(fields: Mapping[str, Any]) -> JobRequest:
    """The job that a line asks for, its `custom_id` in the metadata. Raises InvalidRequest, naming each wrong field."""
    unknown = fields.keys() - {"custom_id", "method", "url", "body"}
    if unknown:
        raise InvalidRequest("unknown field", field=min(unknown))
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequest("must be a text", field="custom_id")
    if fields.get("method", "POST") != "POST":
        raise InvalidRequest("must be POST", field="method")
    if url not in URLS:
        raise InvalidRequest(f"must be {' or '.join(URLS)}", field="url")
    if not isinstance(body, dict):
        raise InvalidRequest("must be an object", field="body")
    given = body if url == URLS[0] else _as_response(body)
    request = responses.job_request({**given, "background": True})
    return request.model_copy(update={"metadata": {**(request.metadata or {}), "custom_id": custom_id}})


def _as_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion's body as a response's; what has no equal keeps its name, to be refused by it."""
    given = {NAMES.get(name, name): value for name, value in body.items() if name != "response_format"}
    if isinstance(given.get("input"), list):
        given["input"] = [_turn(turn) for turn in given["input"]]
    shape = body.get("response_format")
    if isinstance(shape, dict):
        given["text"] = {"format": {"type": shape.get("type"), **shape.get("json_schema", {})}}
    return given


def _turn(turn: Any) -> Any:
    """A message, its pieces of text named as the other API does."""
    if not isinstance(turn, dict) or not isinstance(turn.get("content"), list):
        return turn
    kind = PARTS.get(str(turn.get("role")), "input_text")
    pieces = [{**p, "type": kind} if isinstance(p, dict) and p.get("type") == "text" else p for p in turn["content"]]
    return {**turn, "content": pieces}
