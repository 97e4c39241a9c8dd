"""The HTTP endpoint: requests into the core's words, the core's answers into JSON, errors into problem documents.

Problem documents: RFC 9457. Instants in replies are Unix seconds, as in the LLM providers' own APIs.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from aws_lambda_powertools.event_handler import APIGatewayRestResolver, Response
from aws_lambda_powertools.event_handler.exceptions import NotFoundError
from cachetools import TTLCache

from backburner.documents import job_document, job_summary, json_text, problem_document
from backburner.errors import (
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PortUnavailable,
    Refusal,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
)
from backburner.intake import parse_object, trail_of, validated
from backburner.models import Client, Job, JobRequest, JobStatus, Quota
from backburner.ports import Chance, Clients, Clock, Journal, Tickets
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
REPLY_SECONDS = 9.0
"""With less time than this left, a reply does without what it would have to ask for, which takes up to 8 s."""

type Handler = Callable[[dict[str, Any], Any], dict[str, Any]]
type Refuse = Callable[[Refusal, Mapping[str, str]], Response[str]]
"""How an API words an error: the error and more headers into a reply."""
type Paths = tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]
"""Paths and their methods."""


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


def body_of(app: APIGatewayRestResolver) -> str:
    """The request's body, if it is JSON's kind of text. Raises UnsupportedMediaType, InvalidRequest, TooLarge."""
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


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """The request's Idempotency-Key, if it has one. Raises InvalidRequest."""
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
    return json_reply(200, job_document(job, submission.payloads, fits=fits, fetch=in_time, outlook=outlook))


def json_reply(status: int, body: str, headers: Mapping[str, str] | None = None) -> Response[str]:
    """JSON text as a reply."""
    return Response(status, content_type="application/json", body=body, headers=dict(headers or {}))


def _quota_headers(quotas: Sequence[Quota]) -> dict[str, str]:
    """Where a limited client stands, as draft-ietf-httpapi-ratelimit-headers spells it; none for others."""
    if not quotas:
        return {}
    policies = (f'"{q.name}";q={q.limit};w={q.window_seconds};qu="{q.unit}"' for q in quotas)
    standings = (f'"{q.name}";r={q.remaining};t={q.reset_seconds}' for q in quotas)
    return {"RateLimit-Policy": ", ".join(policies), "RateLimit": ", ".join(standings)}


def about(refusal: Refusal) -> dict[str, str]:
    """What HTTP says of an error beside its status."""
    waits = {} if refusal.retry_after_seconds is None else {"Retry-After": str(refusal.retry_after_seconds)}
    return waits | ({"WWW-Authenticate": "Bearer"} if isinstance(refusal, Unauthorized) else {})


def problem(refusal: Refusal, headers: Mapping[str, str]) -> Response[str]:
    """An error as a problem document."""
    more = {**headers, **about(refusal), **_quota_headers(refusal.quotas)}
    return Response(
        refusal.http_status,
        content_type="application/problem+json",
        body=json_text(problem_document(refusal)),
        headers=more,
    )


# ── Endpoints ────────────────────────────────────────────────────────────────────────────────────────────────────────


def resolver(journal: Journal, refuse: Refuse, paths: Paths) -> APIGatewayRestResolver:
    """A resolver without routes yet, which answers errors by `refuse` and knows from `paths` what exists."""
    app = APIGatewayRestResolver()

    @app.exception_handler(Refusal)  # type: ignore[untyped-decorator]
    def refused(error: Refusal) -> Response[str]:
        if isinstance(error.__cause__, PortUnavailable):
            journal.note("request_failed", cause=error.__cause__.message)
        return refuse(error, {})

    @app.exception_handler(PortUnavailable)  # type: ignore[untyped-decorator]
    def unavailable(error: PortUnavailable) -> Response[str]:
        journal.note("request_failed", cause=error.message)
        return refuse(Unavailable(), {})

    @app.exception_handler(Exception)  # type: ignore[untyped-decorator]
    def broke(error: Exception) -> Response[str]:
        journal.note("request_faulted", error=type(error).__name__, cause=type(error.__cause__).__name__)
        return refuse(InternalError(), {})

    @app.not_found
    def nothing_here(_: NotFoundError) -> Response[str]:
        path = app.current_event.path or ""
        allowed = next((methods for pattern, methods in paths if pattern.fullmatch(path)), None)
        if allowed is None or app.current_event.http_method in allowed:  # the latter: an id that no route would match
            return refuse(NotFound(), {})
        return refuse(MethodNotAllowed(), {"Allow": ", ".join(allowed)})

    return app


PATHS: Final[Paths] = (
    (re.compile(r"/jobs/?"), ("GET", "POST")),
    (re.compile(r"/jobs/[^/]+/?"), ("GET", "DELETE")),
    (re.compile(r"/tickets/?"), ("POST",)),
    (re.compile(r"/slack/(events|interactions|commands)/?"), ("POST",)),
)
"""What exists, and with which methods: two functions share the paths, so neither resolver knows them all."""


def handler_of(app: APIGatewayRestResolver, journal: Journal) -> Handler:
    """A resolver as the function's handler."""

    def handle(event: dict[str, Any], context: Any) -> dict[str, Any]:
        # A gateway may leave these null, which Powertools takes for mappings.
        usual = {
            **event,
            "headers": event.get("headers") or {},
            "multiValueHeaders": event.get("multiValueHeaders") or {},
        }
        with journal.about(correlation_id=trail_of(event, os.environ).correlation_id):
            reply: dict[str, Any] = app.resolve(usual, context)
        return reply

    return handle


def ingest_handler(submission: Submission, doorkeeper: Doorkeeper, journal: Journal) -> Handler:
    """The handler of `POST /jobs`."""
    app = resolver(journal, problem, PATHS)

    @app.post("/jobs")
    def accept() -> Response[str]:
        headers = app.current_event.headers
        client = doorkeeper.client(headers)
        accepted = submission.accept(
            client,
            parse_request(body_of(app)),
            idempotency_key(headers),
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
        return json_reply(202, json_text(document), more | _quota_headers(accepted.quotas))

    return handler_of(app, journal)


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


def seconds_left(app: APIGatewayRestResolver) -> float:
    """Until Lambda ends the function."""
    return float(app.lambda_context.get_remaining_time_in_millis()) / 1000


def known_job_id(text: str) -> str:
    """A job's id from a path; one that no job has for what cannot be an id."""
    return text if JOB_ID.fullmatch(text) else "-"


def awaited(
    app: APIGatewayRestResolver, submission: Submission, doorkeeper: Doorkeeper, text: str, seconds_max: int
) -> Job:
    """The job of a GET, after as long a wait as it asks for and may have."""
    parameters = app.current_event.query_string_parameters or {}
    wanted = _wait_seconds(parameters.get("wait"), seconds_max)
    client = doorkeeper.client(app.current_event.headers)
    return submission.wait(client, known_job_id(text), max(0.0, min(wanted, seconds_left(app) - LAST_LOOK_SECONDS)))


def status_handler(
    submission: Submission, doorkeeper: Doorkeeper, journal: Journal, office: TicketOffice, long_poll_seconds: int
) -> Handler:
    """The handler of all other paths and methods. A request may wait for a job for `long_poll_seconds` at most."""
    app = resolver(journal, problem, PATHS)

    @app.get("/jobs/<text>")
    def show(text: str) -> Response[str]:
        job = awaited(app, submission, doorkeeper, text, long_poll_seconds)
        return _shown_job(job, submission, in_time=seconds_left(app) > REPLY_SECONDS)

    @app.delete("/jobs/<text>")
    def cancel(text: str) -> Response[str]:
        client = doorkeeper.client(app.current_event.headers)
        return _shown_job(submission.cancel(client, known_job_id(text)), submission)

    @app.post("/tickets")
    def issue_ticket() -> Response[str]:
        client = doorkeeper.client(app.current_event.headers)
        return json_reply(201, json_text(office.issue(client)), {"Cache-Control": "no-store"})

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
        return json_reply(200, json_text({"jobs": [job_summary(job) for job in jobs], "next_cursor": cursor}))

    return handler_of(app, journal)


OPENAI_PATH: Final = "/v1/"
"""All of OpenAI's API lies under it."""


def with_openai(jobs: Handler, openai: Callable[[], Handler]) -> Handler:
    """The handler of both APIs. That of OpenAI's is made when its first request comes: its import takes 20 ms."""
    made = cache(openai)

    def handle(event: dict[str, Any], context: Any) -> dict[str, Any]:
        return (made() if (event.get("path") or "").startswith(OPENAI_PATH) else jobs)(event, context)

    return handle
