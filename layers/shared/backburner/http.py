"""The HTTP endpoint: requests into the core's words, the core's answers into JSON, errors into problem documents.

Problem documents: RFC 9457. Instants in replies are Unix seconds, as in the LLM providers' own APIs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aws_lambda_powertools.event_handler import APIGatewayRestResolver, Response
from aws_lambda_powertools.event_handler.exceptions import NotFoundError
from cachetools import TTLCache

from backburner import responses
from backburner.documents import job_document, job_summary, json_text, problem_document, stored_result
from backburner.errors import (
    InternalError,
    InvalidRequest,
    JobIsFinal,
    MethodNotAllowed,
    NotFound,
    PayloadMissing,
    PortUnavailable,
    Refusal,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
)
from backburner.intake import parse_object, trail_of, validated
from backburner.models import Client, Job, JobRequest, JobStatus, Quota
from backburner.ports import Catalogue, Chance, Clients, Clock, Journal, Tickets
from backburner.submission import Submission

BODY_BYTES_MAX = 5_000_000
"""Of a request; Lambda's own limit is 6 MB for the event that wraps it."""
REPLY_BYTES_MAX = 6_000_000
"""Of a reply as Lambda sends it, in which the JSON of the body is wrapped in JSON once more; its limit is 6 MiB."""
KEY_CHARACTERS_MAX = 200
IDEMPOTENCY_KEY: Final = re.compile(r"[!-~]{1,255}")
JOB_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
CLIENT_CACHE_SECONDS = 30
"""So long a disabled key may still work in a warm function; it saves one read a request."""
PAGE_MAX = 50
TICKET_SECONDS = 60
"""A ticket stands in an address, which may be logged; so it is good for one connection, and not for long."""
WAIT_SECONDS_MAX = 20
LAST_LOOK_SECONDS = 8.0
"""Kept free behind a wait: its last look at the row takes up to 5 s."""
FETCH_SECONDS = 13.0
"""So long it may take to read both texts of a response that are kept outside its row."""
REPLY_SECONDS = 9.0
"""With less time than this left, a reply does without what it would have to ask for, which takes up to 8 s."""

type Handler = Callable[[dict[str, Any], Any], dict[str, Any]]


class Doorkeeper:
    """Tells whose key a request carries."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._known: TTLCache[str, Client] = TTLCache(maxsize=1_000, ttl=CLIENT_CACHE_SECONDS)

    def client(self, headers: Mapping[str, str]) -> Client:
        """The client whose key the headers carry. Raises Unauthorized, in the same words whatever is wrong."""
        given = headers.get("authorization") or ""
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            key = headers.get("x-api-key") or ""
        key = key.strip()
        if not 0 < len(key) <= KEY_CHARACTERS_MAX or not key.isascii() or not key.isprintable():
            raise Unauthorized
        key_hash = hashlib.sha256(key.encode()).hexdigest()
        client: Client | None = self._known.get(key_hash)
        if client is None:
            client = self._clients.find(key_hash)
            if client is None:
                raise Unauthorized
            self._known[key_hash] = client
        return client


# ── Requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_request(body: str) -> JobRequest:
    """The request in the body of `POST /jobs`. Raises InvalidRequest, naming each field that is wrong."""
    return validated(JobRequest, parse_object(body, "body"))


def _body(app: APIGatewayRestResolver) -> str:
    event = app.current_event
    media_type, _, parameters = (event.headers.get("content-type") or "application/json").lower().partition(";")
    if media_type.strip() != "application/json" and not media_type.strip().endswith("+json"):
        raise UnsupportedMediaType
    if "charset" in parameters and "utf-8" not in parameters:
        raise UnsupportedMediaType("JSON is sent as UTF-8.")
    if (event.headers.get("content-encoding") or "identity").lower() != "identity":
        raise UnsupportedMediaType("Send the body as it is, without Content-Encoding.")
    try:
        body = event.decoded_body or ""
        size = len(body.encode())
    except ValueError as error:  # not base64, or not UTF-8
        raise InvalidRequest("the body is not UTF-8 text") from error
    if size > BODY_BYTES_MAX:
        raise TooLarge(f"The body is larger than {BODY_BYTES_MAX} bytes.")
    return body


def _idempotency_key(headers: Mapping[str, str]) -> str | None:
    key = headers.get("idempotency-key")
    if key is not None and not IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidRequest("must be 1 to 255 visible ASCII characters", field="Idempotency-Key")
    return key


# ── Replies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _shown_job(job: Job, submission: Submission, *, in_time: bool = True) -> Response[str]:
    """The job, with what has to be asked for if there is time: what it may expect, a result kept outside the row."""

    def fits(text: str) -> bool:  # as a text inside the JSON that Lambda sends
        return len(json_text(text).encode()) <= REPLY_BYTES_MAX

    outlook = submission.outlook(job) if in_time else None
    return _json(200, job_document(job, submission.payloads, fits=fits, fetch=in_time, outlook=outlook))


def _json(status: int, body: str, headers: Mapping[str, str] | None = None) -> Response[str]:
    return Response(status, content_type="application/json", body=body, headers=dict(headers or {}))


def _quota_headers(quotas: Sequence[Quota]) -> dict[str, str]:
    """Where a limited client stands, as draft-ietf-httpapi-ratelimit-headers spells it; none for others."""
    if not quotas:
        return {}
    policies = (f'"{q.name}";q={q.limit};w={q.window_seconds};qu="{q.unit}"' for q in quotas)
    standings = (f'"{q.name}";r={q.remaining};t={q.reset_seconds}' for q in quotas)
    return {"RateLimit-Policy": ", ".join(policies), "RateLimit": ", ".join(standings)}


def _about(refusal: Refusal) -> dict[str, str]:
    """What HTTP says of an error beside its status."""
    waits = {} if refusal.retry_after_seconds is None else {"Retry-After": str(refusal.retry_after_seconds)}
    return waits | ({"WWW-Authenticate": "Bearer"} if isinstance(refusal, Unauthorized) else {})


def problem(refusal: Refusal, headers: Mapping[str, str] | None = None) -> Response[str]:
    """An error as a problem document."""
    more = {**(headers or {}), **_about(refusal), **_quota_headers(refusal.quotas)}
    return Response(
        refusal.http_status,
        content_type="application/problem+json",
        body=json_text(problem_document(refusal)),
        headers=more,
    )


# ── Endpoints ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _resolver(journal: Journal) -> APIGatewayRestResolver:
    app = APIGatewayRestResolver()

    def refuse(refusal: Refusal, headers: Mapping[str, str] | None = None) -> Response[str]:
        if not (app.current_event.path or "").startswith(responses.PATH):
            return problem(refusal, headers)
        more = {**(headers or {}), **_about(refusal), **responses.quota_headers(refusal.quotas)}
        return _json(refusal.http_status, json_text(responses.error_document(refusal)), more)

    @app.exception_handler(Refusal)  # type: ignore[untyped-decorator]
    def refused(error: Refusal) -> Response[str]:
        return refuse(error)

    @app.exception_handler(Exception)  # type: ignore[untyped-decorator]
    def broke(error: Exception) -> Response[str]:
        journal.note("request_failed", error=type(error).__name__, cause=type(error.__cause__).__name__)
        return refuse(Unavailable() if isinstance(error, PortUnavailable) else InternalError())

    @app.not_found
    def nothing_here(_: NotFoundError) -> Response[str]:
        path = app.current_event.path or ""
        allowed = next((methods for pattern, methods in PATHS if pattern.fullmatch(path)), None)
        if allowed is None or app.current_event.http_method in allowed:  # the latter: an id that no route would match
            return refuse(NotFound())
        return refuse(MethodNotAllowed(), {"Allow": ", ".join(allowed)})

    return app


PATHS: Final = (
    (re.compile(r"/jobs/?"), ("GET", "POST")),
    (re.compile(r"/jobs/[^/]+/?"), ("GET", "DELETE")),
    (re.compile(r"/tickets/?"), ("POST",)),
    (re.compile(r"/slack/(events|interactions|commands)/?"), ("POST",)),
    (re.compile(r"/v1/responses/?"), ("POST",)),
    (re.compile(r"/v1/responses/[^/]+/?"), ("GET", "DELETE")),
    (re.compile(r"/v1/responses/[^/]+/cancel/?"), ("POST",)),
    (re.compile(r"/v1/models(/[^/]+)?/?"), ("GET",)),
)
"""What exists, and with which methods: two functions share the paths, so neither resolver knows them all."""


def _handler(app: APIGatewayRestResolver, journal: Journal) -> Handler:
    def handle(event: dict[str, Any], context: Any) -> dict[str, Any]:
        # A gateway may leave these null, which Powertools takes for mappings.
        usual = {
            **event,
            "headers": event.get("headers") or {},
            "multiValueHeaders": event.get("multiValueHeaders") or {},
        }
        with journal.about(correlation_id=trail_of(event, os.environ).correlation_id):
            reply: dict[str, Any] = app.resolve(usual, context)
        if (event.get("path") or "").startswith(responses.PATH):  # the SDKs show it with what they raise
            request_id = str((event.get("requestContext") or {}).get("requestId") or "")
            reply["multiValueHeaders"]["x-request-id"] = [request_id]
        return reply

    return handle


def ingest_handler(submission: Submission, doorkeeper: Doorkeeper, journal: Journal) -> Handler:
    """The handler of `POST /jobs`."""
    app = _resolver(journal)

    @app.post("/jobs")
    def accept() -> Response[str]:
        headers = app.current_event.headers
        client = doorkeeper.client(headers)
        accepted = submission.accept(
            client,
            parse_request(_body(app)),
            _idempotency_key(headers),
            trail=trail_of(app.current_event.raw_event, os.environ),
        )
        job = accepted.job
        document = {
            "job_id": job.job_id,
            "status": job.status,
            "poll_url": f"/jobs/{job.job_id}",
            "expires_at": job.expires_at,
        }
        # Relative to the request's own address, so that it holds under any stage or base path.
        here = "" if (app.current_event.path or "").endswith("/") else "jobs/"
        more = {"Location": f"{here}{job.job_id}"} | ({"Idempotent-Replayed": "true"} if accepted.replayed else {})
        return _json(202, json_text(document), more | _quota_headers(accepted.quotas))

    @app.post("/v1/responses")
    def respond() -> Response[str]:
        headers = app.current_event.headers
        client = doorkeeper.client(headers)
        request = responses.parse(_body(app))
        with responses.in_its_words():
            accepted = submission.accept(
                client,
                request,
                _idempotency_key(headers),
                trail=trail_of(app.current_event.raw_event, os.environ),
            )
        # Of a replay's answer only what stands in the row, which is all that this function may read.
        text = accepted.job.result.text if accepted.job.result is not None else None
        shown = responses.document(
            accepted.job, request, request.model or submission.default_model, json.loads(text) if text else None
        )
        more = {"Idempotent-Replayed": "true"} if accepted.replayed else {}
        return _json(200, responses.reply(shown, REPLY_BYTES_MAX), more | responses.quota_headers(accepted.quotas))

    return _handler(app, journal)


@dataclass(frozen=True)
class TicketOffice:
    """Hands out tickets for the WebSocket API, which is at `socket_url`."""

    tickets: Tickets
    clock: Clock
    chance: Chance
    socket_url: str

    def issue(self, client: Client) -> dict[str, Any]:
        """A ticket that lets this client open one connection, within TICKET_SECONDS."""
        ticket, expires_at = self.chance.name(), self.clock.now() // 1000 + TICKET_SECONDS
        self.tickets.issue(ticket, client.client_id, expires_at)
        return {"ticket": ticket, "expires_at": expires_at, "socket_url": self.socket_url}


def _wait_seconds(given: str | None, seconds_max: int) -> int:
    """How long a request wants to wait, and may. Raises InvalidRequest."""
    if given is not None and (not re.fullmatch(r"[0-9]{1,2}", given) or int(given) > WAIT_SECONDS_MAX):
        raise InvalidRequest(f"must be a whole number of seconds from 0 to {WAIT_SECONDS_MAX}", field="wait")
    return min(int(given or 0), seconds_max)


def _seconds_left(app: APIGatewayRestResolver) -> float:
    return float(app.lambda_context.get_remaining_time_in_millis()) / 1000


def _job_id(text: str) -> str:
    return text if JOB_ID.fullmatch(text) else "-"  # no job has that id


def _waited_for(
    app: APIGatewayRestResolver, submission: Submission, doorkeeper: Doorkeeper, text: str, seconds_max: int
) -> Job:
    """The job of a GET, after as long a wait as it asks for and may have."""
    parameters = app.current_event.query_string_parameters or {}
    wanted = _wait_seconds(parameters.get("wait"), seconds_max)
    client = doorkeeper.client(app.current_event.headers)
    return submission.wait(client, _job_id(text), max(0.0, min(wanted, _seconds_left(app) - LAST_LOOK_SECONDS)))


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
    return _json(200, responses.reply(document, REPLY_BYTES_MAX))


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
        job = _waited_for(app, submission, doorkeeper, text, long_poll_seconds)
        return _shown_response(job, submission, _seconds_left(app))

    @app.post("/v1/responses/<text>/cancel")
    def stop(text: str) -> Response[str]:
        client = doorkeeper.client(app.current_event.headers)
        try:
            job = submission.cancel(client, _job_id(text))
        except JobIsFinal:  # cancelling what has ended is no error there
            job = submission.find(client, _job_id(text))
        return _shown_response(job, submission, _seconds_left(app))

    @app.delete("/v1/responses/<text>")
    def erase(text: str) -> Response[str]:
        submission.erase(doorkeeper.client(app.current_event.headers), _job_id(text))
        return _json(200, json_text(responses.deleted(text)))


def _serve_models(app: APIGatewayRestResolver, catalogue: Catalogue, doorkeeper: Doorkeeper) -> None:
    """The catalogue as OpenAI's API lists models."""

    @app.get("/v1/models")
    def models() -> Response[str]:
        doorkeeper.client(app.current_event.headers)
        known = [catalogue.find(name) for name in catalogue.names()]
        data = [responses.model_document(model) for model in known if model is not None]
        return _json(200, json_text({"object": "list", "data": data}))

    @app.get("/v1/models/<name>")
    def model(name: str) -> Response[str]:
        doorkeeper.client(app.current_event.headers)
        found = catalogue.find(name)
        if found is None:
            raise NotFound(f"This deployment knows no model {name[:100]!r}.")
        return _json(200, json_text(responses.model_document(found)))


def status_handler(
    submission: Submission, doorkeeper: Doorkeeper, journal: Journal, office: TicketOffice, long_poll_seconds: int
) -> Handler:
    """The handler of all other paths and methods. A request may wait for a job for `long_poll_seconds` at most."""
    app = _resolver(journal)

    @app.get("/jobs/<text>")
    def show(text: str) -> Response[str]:
        job = _waited_for(app, submission, doorkeeper, text, long_poll_seconds)
        return _shown_job(job, submission, in_time=_seconds_left(app) > REPLY_SECONDS)

    @app.delete("/jobs/<text>")
    def cancel(text: str) -> Response[str]:
        client = doorkeeper.client(app.current_event.headers)
        return _shown_job(submission.cancel(client, _job_id(text)), submission)

    @app.post("/tickets")
    def issue_ticket() -> Response[str]:
        client = doorkeeper.client(app.current_event.headers)
        return _json(201, json_text(office.issue(client)), {"Cache-Control": "no-store"})

    @app.get("/jobs")
    def list_jobs() -> Response[str]:
        client = doorkeeper.client(app.current_event.headers)
        parameters = app.current_event.query_string_parameters or {}
        status = parameters.get("status")
        if status is not None and status not in list(JobStatus):
            raise InvalidRequest(f"must be one of {', '.join(JobStatus)}", field="status")
        limit = parameters.get("limit") or str(PAGE_MAX)
        if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= PAGE_MAX:
            raise InvalidRequest(f"must be a whole number from 1 to {PAGE_MAX}", field="limit")
        jobs, cursor = submission.list(
            client, JobStatus(status) if status else None, parameters.get("cursor") or None, int(limit)
        )
        return _json(200, json_text({"jobs": [job_summary(job) for job in jobs], "next_cursor": cursor}))

    _serve_responses(app, submission, doorkeeper, long_poll_seconds)
    _serve_models(app, submission.catalogue, doorkeeper)
    return _handler(app, journal)


__all__ = ["Doorkeeper", "Handler", "TicketOffice", "ingest_handler", "parse_request", "problem", "status_handler"]
