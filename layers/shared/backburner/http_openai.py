"""OpenAI's API over HTTP: its routes, its errors, its headers. The format is in responses.py."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, Final

from aws_lambda_powertools.event_handler import APIGatewayRestResolver, Response

from backburner import responses
from backburner.documents import json_text, stored_result
from backburner.errors import InvalidRequest, JobIsFinal, NotFound, PayloadMissing, Refusal, Unavailable
from backburner.http import (
    REPLY_BYTES_MAX,
    Doorkeeper,
    Handler,
    Paths,
    about,
    awaited,
    body_of,
    handler_of,
    idempotency_key,
    json_reply,
    known_job_id,
    resolver,
    seconds_left,
)
from backburner.intake import trail_of
from backburner.models import Job, JobStatus
from backburner.ports import Catalogue, Journal
from backburner.submission import Submission

FETCH_SECONDS = 13.0
"""So long it may take to read both texts of a response that are kept outside its row."""
PATHS: Final[Paths] = (
    (re.compile(r"/v1/responses/?"), ("POST",)),
    (re.compile(r"/v1/responses/[^/]+/?"), ("GET", "DELETE")),
    (re.compile(r"/v1/responses/[^/]+/cancel/?"), ("POST",)),
    (re.compile(r"/v1/models(/[^/]+)?/?"), ("GET",)),
)


def error_reply(refusal: Refusal, headers: Mapping[str, str]) -> Response[str]:
    """An error in OpenAI's format."""
    more = {**headers, **about(refusal), **responses.quota_headers(refusal.quotas)}
    return json_reply(refusal.http_status, json_text(responses.error_document(refusal)), more)


def _named(handler: Handler) -> Handler:
    """Replies carry the request's id, which the logs have too, in the header that the SDKs look at."""

    def handle(event: dict[str, Any], context: Any) -> dict[str, Any]:
        reply = handler(event, context)
        reply["multiValueHeaders"]["x-request-id"] = [trail_of(event, os.environ).correlation_id]
        return reply

    return handle


def create_handler(submission: Submission, doorkeeper: Doorkeeper, journal: Journal) -> Handler:
    """The handler of `POST /v1/responses`."""
    app = resolver(journal, error_reply, PATHS)

    @app.post("/v1/responses")
    def create() -> Response[str]:
        headers = app.current_event.headers
        client = doorkeeper.client(headers)
        request = responses.parse(body_of(app))
        with responses.in_its_words():
            trail = trail_of(app.current_event.raw_event, os.environ)
            accepted = submission.accept(client, request, idempotency_key(headers), trail=trail)
        # Of a replay's answer only what stands in the row, which is all that this function may read.
        text = accepted.job.result.text if accepted.job.result is not None else None
        shown = responses.document(
            accepted.job, request, request.model or submission.default_model, json.loads(text) if text else None
        )
        more = {"Idempotent-Replayed": "true"} if accepted.replayed else {}
        return json_reply(200, responses.reply(shown, REPLY_BYTES_MAX), more | responses.quota_headers(accepted.quotas))

    return _named(handler_of(app, journal))


def _shown_response(job: Job, submission: Submission, seconds_left: float) -> Response[str]:
    """A job as OpenAI's Response. Raises NotFound, Unavailable."""
    outside = [payload for payload in (job.request, job.result) if payload is not None and payload.key is not None]
    if outside and seconds_left < FETCH_SECONDS:  # after a long wait; the SDKs ask again by themselves
        raise Unavailable("There is no time left to read the response. Ask again.")
    try:
        request = submission.request_of(job)
    except PayloadMissing as error:
        raise NotFound("The request is no longer stored.") from error
    result = stored_result(job, submission.payloads) if job.status is JobStatus.COMPLETED else None
    if job.status is JobStatus.COMPLETED and result is None:
        raise NotFound("The answer is no longer stored.")
    document = responses.document(job, request, request.model or submission.default_model, result)
    return json_reply(200, responses.reply(document, REPLY_BYTES_MAX))


def _serve_responses(
    app: APIGatewayRestResolver, submission: Submission, doorkeeper: Doorkeeper, long_poll_seconds: int
) -> None:
    """What OpenAI's API does with a response that exists."""

    @app.get("/v1/responses/<text>")
    def retrieve(text: str) -> Response[str]:
        parameters = app.current_event.query_string_parameters or {}
        for name in ("stream", "starting_after", "include", "include[]"):
            if parameters.get(name, "false") != "false":
                raise InvalidRequest("not supported; follow it over the WebSocket API, or retrieve it", field=name)
        job = awaited(app, submission, doorkeeper, text, long_poll_seconds)
        return _shown_response(job, submission, seconds_left(app))

    @app.post("/v1/responses/<text>/cancel")
    def stop(text: str) -> Response[str]:
        client = doorkeeper.client(app.current_event.headers)
        try:
            job = submission.cancel(client, known_job_id(text))
        except JobIsFinal:  # cancelling what has ended is no error there
            job = submission.find(client, known_job_id(text))
        return _shown_response(job, submission, seconds_left(app))

    @app.delete("/v1/responses/<text>")
    def erase(text: str) -> Response[str]:
        submission.erase(doorkeeper.client(app.current_event.headers), known_job_id(text))
        return json_reply(200, json_text(responses.deleted(text)))


def _serve_models(app: APIGatewayRestResolver, catalogue: Catalogue, doorkeeper: Doorkeeper) -> None:
    """The catalogue as OpenAI's API lists models."""

    @app.get("/v1/models")
    def models() -> Response[str]:
        doorkeeper.client(app.current_event.headers)
        known = [catalogue.find(name) for name in catalogue.names()]
        data = [responses.model_document(model) for model in known if model is not None]
        return json_reply(200, json_text({"object": "list", "data": data}))

    @app.get("/v1/models/<name>")
    def model(name: str) -> Response[str]:
        doorkeeper.client(app.current_event.headers)
        found = catalogue.find(name)
        if found is None:
            raise NotFound(f"This deployment knows no model {name[:100]!r}.")
        return json_reply(200, json_text(responses.model_document(found)))


def responses_handler(
    submission: Submission, doorkeeper: Doorkeeper, journal: Journal, long_poll_seconds: int
) -> Handler:
    """The handler of all other paths and methods below OPENAI_PATH."""
    app = resolver(journal, error_reply, PATHS)
    _serve_responses(app, submission, doorkeeper, long_poll_seconds)
    _serve_models(app, submission.catalogue, doorkeeper)
    return _named(handler_of(app, journal))
