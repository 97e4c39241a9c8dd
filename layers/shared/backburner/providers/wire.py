"""The HTTP client that the SDKs get: it watches the clock and the job while a reply comes in.

The SDKs' own timeout bounds the pause between two bytes only; a provider that drips would hold a worker for ever.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

import httpx2

from backburner.errors import Abandoned, JobFailed, ProviderTimeout

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 90.0
"""Longest silence in a reply. Reasoning models think in silence; longer is a stall."""
CONNECTIONS_MAX = 25
WIND_DOWN_SECONDS = 1.0
LOOK_SECONDS = 0.5
"""How often a silent reply's call is looked at: so soon a cancelled one stops costing."""


@dataclass
class Watch:
    """What ends one call early. `verdict` says why it was ended, if it was."""

    ends_at: float
    abandoned: Callable[[], bool]
    verdict: type[JobFailed] | None = None

    def is_over(self) -> bool:
        """Whether the call must end now."""
        if self.verdict is None and self.abandoned():
            self.verdict = Abandoned
        elif self.verdict is None and time.monotonic() >= self.ends_at:
            self.verdict = ProviderTimeout
        return self.verdict is not None

    def check(self) -> None:
        """Raise when the call must end; an httpx2 error, since the SDKs know how to clean up after those."""
        if self.is_over():
            raise httpx2.ReadError("the call was ended")

    def wind_down(self) -> None:
        """The answer is whole: the rest of the reply is read only so that its connection can be used again."""
        self.ends_at = min(self.ends_at, time.monotonic() + WIND_DOWN_SECONDS)

    def timeout(self) -> httpx2.Timeout:
        """The timeouts of one request under this watch."""
        left = max(0.1, self.ends_at - time.monotonic())
        return httpx2.Timeout(min(IDLE_SECONDS, left), connect=min(CONNECT_SECONDS, left))


_watch: ContextVar[Watch] = ContextVar("watch")


@contextmanager
def watching(timeout_seconds: float, abandoned: Callable[[], bool]) -> Iterator[Watch]:
    """Watch the calls made in the block, in this thread."""
    watch = Watch(time.monotonic() + timeout_seconds, abandoned)
    token = _watch.set(watch)
    try:
        yield watch
    finally:
        _watch.reset(token)


class _WatchedStream(httpx2.SyncByteStream):
    """A reply's body under watch: checked at each chunk, and cut off from outside where none comes."""

    def __init__(self, stream: httpx2.SyncByteStream, watch: Watch, connection: socket.socket | None) -> None:
        self._stream = stream
        self._watch = watch
        self._connection = connection
        self._done = threading.Event()
        threading.Thread(target=self._guard, name="call-watch", daemon=True).start()

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            self._watch.check()
            yield chunk

    def close(self) -> None:
        self._done.set()
        self._stream.close()

    def _guard(self) -> None:
        """Closing a stream does not wake a thread that reads from it; shutting its socket down does."""
        while not self._done.wait(LOOK_SECONDS):
            if self._watch.is_over():
                if self._connection is not None:
                    with suppress(OSError):
                        self._connection.shutdown(socket.SHUT_RDWR)
                return


class WatchedTransport(httpx2.BaseTransport):
    """A transport under the watch of its caller. A connection that the server had closed is opened once anew.

    That second try happens only when not one byte of a reply had come, as with a kept-alive connection gone stale.
    """

    def __init__(self, transport: httpx2.BaseTransport | None = None) -> None:
        limits = httpx2.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX)
        self._transport = transport or httpx2.HTTPTransport(limits=limits)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; its reply is checked at every chunk."""
        watch = _watch.get()
        watch.check()
        try:
            response = self._transport.handle_request(request)
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
            watch.check()
            request.extensions["timeout"] = watch.timeout().as_dict()  # only what is left
            response = self._transport.handle_request(request)
        if not isinstance(response.stream, httpx2.SyncByteStream):
            raise TypeError("a synchronous transport gave an asynchronous stream")
        network = response.extensions.get("network_stream")
        connection = network.get_extra_info("socket") if network is not None else None
        response.stream = _WatchedStream(response.stream, watch, connection)
        return response

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


def http_client() -> httpx2.Client:
    """A client for an SDK; thread-safe, made once."""
    return httpx2.Client(transport=WatchedTransport(), timeout=IDLE_SECONDS, follow_redirects=False)
