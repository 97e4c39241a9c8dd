"""The WebSocket API in memory: who is connected, what they follow, and what was sent to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from backburner.errors import ConnectionUnknown, PortUnavailable, TooManySubscriptions
from backburner.ports import Listener


class MemoryConnections:
    """The Connections table, as ports.Connections and ports.Tickets; the contract suite runs on both."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._clients: dict[str, tuple[str, int]] = {}
        self._tickets: dict[str, tuple[str, int]] = {}
        self._listeners: dict[str, dict[str, Listener]] = {}
        self.looks = 0
        self.fails = False

    def open(self, connection_id: str, client_id: str, expires_at: int) -> None:
        self._clients[connection_id] = client_id, expires_at

    def client_id(self, connection_id: str) -> str | None:
        client_id, expires_at = self._clients.get(connection_id, (None, 0))
        return client_id if expires_at > self._now() else None

    def close(self, connection_id: str, *, following: str | None = None) -> None:
        self._clients.pop(connection_id, None)
        for listeners in self._listeners.values():
            listeners.pop(connection_id, None)

    def subscribe(self, job_id: str, listener: Listener, *, jobs_max: int) -> None:
        if listener.connection_id not in self._clients:
            raise ConnectionUnknown
        followed = [job for job, listeners in self._listeners.items() if listener.connection_id in listeners]
        if job_id not in followed and len(followed) >= jobs_max:
            raise TooManySubscriptions
        self._listeners.setdefault(job_id, {})[listener.connection_id] = listener

    def unsubscribe(self, job_id: str, connection_id: str) -> None:
        self._listeners.get(job_id, {}).pop(connection_id, None)

    def listeners(self, job_id: str, limit: int, *, sure: bool) -> Sequence[Listener]:
        self.looks += 1
        if self.fails:
            raise PortUnavailable("InternalServerError")
        found = self._listeners.get(job_id, {})
        return [
            found[connection_id]
            for connection_id in sorted(found)
            if self._clients.get(connection_id, ("", 0))[1] > self._now()
        ][:limit]

    def issue(self, ticket: str, client_id: str, expires_at: int) -> None:
        self._tickets[ticket] = client_id, expires_at

    def redeem(self, ticket: str) -> str | None:
        client_id, expires_at = self._tickets.pop(ticket, (None, 0))
        return client_id if expires_at > self._now() else None


class MemorySockets:
    """Open connections. `frames` is what each was sent; those in `gone` are closed, those in `broken` fail."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, dict[str, Any]]] = []
        self.gone: set[str] = set()
        self.broken: set[str] = set()
        self.before_post: Callable[[str], None] = lambda _: None

    def post(self, connection_id: str, frame: str) -> bool:
        assert len(frame.encode()) <= 32 * 1024, "API Gateway's frames hold no more"
        self.before_post(connection_id)
        if connection_id in self.broken:
            raise PortUnavailable("LimitExceededException")
        if connection_id in self.gone:
            return False
        self.frames.append((connection_id, json.loads(frame)))
        return True

    def sent(self, connection_id: str, kind: str | None = None) -> list[dict[str, Any]]:
        """The frames of one connection."""
        return [frame for name, frame in self.frames if name == connection_id and kind in (None, frame["type"])]


class AtOnce(Executor):
    """Runs what it is given before it returns: posts in a test happen one after the other."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future
