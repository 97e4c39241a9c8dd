"""The WebSocket API: clients connect with a key or a ticket, and follow their jobs.

What is sent to a client goes through ports.Sockets, also the answers to what it sends: as the emulator and AWS both do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from backburner.errors import (
    ConnectionUnknown,
    InvalidRequest,
    PortUnavailable,
    Refusal,
    Unauthorized,
    Unavailable,
)
from backburner.intake import parse_object, validated
from backburner.models import Client
from backburner.ports import Chance, Clock, Connections, Journal, Listener, Sockets, Tickets
from backburner.streaming import error_frame, job_frame, plain_frame
from backburner.submission import Submission

MESSAGE_BYTES_MAX = 4_096
"""Of a message from a client: an action, a job's id and two numbers."""
CONNECTION_SECONDS = 2 * 3600 + 600
"""API Gateway closes a connection after two hours."""
JOBS_MAX = 100
"""So many jobs may one connection follow at once."""
TICKET_CHARACTERS_MAX = 64

type Handler = Callable[[dict[str, Any], Any], dict[str, Any]]
type JobId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class After(_Message):
    """How much of the answer the client has: the first `position` characters of the n-th draft."""

    draft: Annotated[int, Field(ge=0, le=10**9)]
    position: Annotated[int, Field(ge=0, le=10**9)]


class Subscribe(_Message):
    """Follow a job: its state at once, then what changes; its answer as it is written, if it was asked for."""

    action: Literal["subscribe"]
    job_id: JobId
    after: After = After(draft=0, position=0)


class Unsubscribe(_Message):
    """Follow a job no more."""

    action: Literal["unsubscribe"]
    job_id: JobId


class Ping(_Message):
    """Keeps a connection open that has nothing to say: API Gateway closes one after ten silent minutes."""

    action: Literal["ping"]


MESSAGES: Mapping[str, type[Subscribe | Unsubscribe | Ping]] = {
    "subscribe": Subscribe,
    "unsubscribe": Unsubscribe,
    "ping": Ping,
}


def parse_message(body: str) -> Subscribe | Unsubscribe | Ping:
    """What a client sent. Raises InvalidRequest, naming each field that is wrong."""
    if len(body.encode(errors="replace")) > MESSAGE_BYTES_MAX:
        raise InvalidRequest(f"the message is larger than {MESSAGE_BYTES_MAX} bytes")
    value = parse_object(body, "message")
    action = value.get("action")
    if not isinstance(action, str) or action not in MESSAGES:
        raise InvalidRequest(f"must be one of {', '.join(MESSAGES)}", field="action")
    return validated(MESSAGES[action], value)


@dataclass(frozen=True)
class SocketApi:
    """The routes. `authenticate` finds the client by the key in the headers, and raises Unauthorized."""

    authenticate: Callable[[Mapping[str, str]], Client]
    submission: Submission
    connections: Connections
    tickets: Tickets
    sockets: Sockets
    clock: Clock
    chance: Chance
    journal: Journal

    def handle(self, event: dict[str, Any], _context: Any) -> dict[str, Any]:
        """One event of API Gateway's; the reply tells it whether all went well, and for $connect, who may come in."""
        about = event["requestContext"]
        connection_id = about["connectionId"]
        try:
            match about["routeKey"]:
                case "$connect":
                    self.connect(connection_id, event.get("headers") or {}, event.get("queryStringParameters") or {})
                case "$disconnect":
                    self.connections.close(connection_id)
                case _:
                    self.sockets.post(connection_id, self.answer(connection_id, event.get("body") or ""))
        except Refusal as refusal:
            return {"statusCode": refusal.http_status}
        except PortUnavailable as error:
            self.journal.note("socket_failed", route=about["routeKey"], error=error.message)
            return {"statusCode": 503}
        except Exception as error:  # noqa: BLE001  what Lambda would log of it may hold what a client sent
            self.journal.note("socket_faulted", route=about["routeKey"], error=type(error).__name__)
            return {"statusCode": 500}
        return {"statusCode": 200}

    def connect(self, connection_id: str, headers: Mapping[str, str], parameters: Mapping[str, str]) -> None:
        """Let a client in, by its key or a ticket. Raises Unauthorized."""
        ticket = parameters.get("ticket")
        if ticket is None:
            client_id = self.authenticate({name.lower(): value for name, value in headers.items()}).client_id
        else:
            known = self.tickets.redeem(ticket) if len(ticket) <= TICKET_CHARACTERS_MAX else None
            if known is None:
                raise Unauthorized
            client_id = known
        self.connections.open(connection_id, client_id, self.clock.now() // 1000 + CONNECTION_SECONDS)
        self.journal.note("socket_opened", client_id=client_id, by="key" if ticket is None else "ticket")

    def answer(self, connection_id: str, body: str) -> str:
        """The frame that answers a message."""
        job_id: str | None = None
        try:
            message = parse_message(body)
            if isinstance(message, Ping):
                return plain_frame("pong")
            job_id = message.job_id
            if isinstance(message, Subscribe):
                return self._subscribe(connection_id, message)
            self.connections.unsubscribe(job_id, connection_id)
            return plain_frame("unsubscribed", job_id)
        except Refusal as refusal:
            return error_frame(refusal, job_id)
        except PortUnavailable as error:
            self.journal.note("socket_failed", job_id=job_id, error=error.message)
            return error_frame(Unavailable("Something did not answer just now. Send the message again."), job_id)

    def _subscribe(self, connection_id: str, asked: Subscribe) -> str:
        """The job as it is, in a frame.

        The subscription is stored before the row is looked at for the second time, and whoever ends a job looks for
        subscriptions after that: one of the two sees the other, so nobody waits for an end that has come.
        """
        client_id = self.connections.client_id(connection_id)
        if client_id is None:
            raise ConnectionUnknown
        job = self.submission.find(Client(client_id, ""), asked.job_id)
        if not job.status.is_final:
            listener = Listener(connection_id, self.chance.name(), asked.after.draft, asked.after.position)
            self.connections.subscribe(job.job_id, listener, jobs_max=JOBS_MAX)
            job = self.submission.follow(job)
            if job.status.is_final:
                self.connections.unsubscribe(job.job_id, connection_id)
        self.journal.note("job_followed", job_id=job.job_id, client_id=client_id, status=job.status)
        return job_frame(job)
