"""A POST to a stranger's address: resolved once, checked, and connected to the very address that was checked.

The name stays in the Host header, in SNI and in the certificate's check. Nothing is followed, little is read, and
everything together has one deadline, which a receiver that sends a byte a second cannot stretch.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

import httpcore2

from backburner.addresses import Endpoint, checked

SECONDS_MAX = 15.0
"""For name, connection, TLS, request and the reply's head together."""
CONNECT_SECONDS_MAX = 5.0
"""For one address, so that there is time for another."""
ADDRESSES_MAX = 3
READ_BYTES_MAX = 4_096
"""Of a reply, head and body together. The status stands in its first line, so more is not needed to judge it."""
_STATUS = re.compile(rb"HTTP/1\.[01] ([2-5][0-9][0-9])[ \r\n]")


class Unreached(Exception):
    """No reply came. `reason` is a short word: timeout, connection, tls, unresolved, protocol."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Reply:
    """What is looked at of a receiver's answer."""

    status: int
    retry_after: str | None


class Deadline:
    """An instant by which all must be done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, above zero. Raises httpcore2.TimeoutException when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise httpcore2.TimeoutException
        return left


def resolve(host: str, port: int, seconds: float) -> Sequence[str]:
    """All addresses of a host, as the system knows them, within so many seconds. Raises OSError, TimeoutError."""
    outcome: list[Any] = []

    def look_up() -> None:
        try:
            outcome.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            outcome.append(error)

    thread = threading.Thread(target=look_up, name="resolver", daemon=True)  # getaddrinfo itself takes no timeout
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError
    if isinstance(outcome[0], Exception):
        raise OSError from outcome[0]
    return [str(entry[4][0]) for entry in outcome[0]]


class _Untrusted(httpcore2.ConnectError):
    """TLS could not be agreed upon, or the certificate is not the host's."""


class _CutShort(Exception):
    """The head of the reply goes on beyond what is read of it."""

    def __init__(self, read: bytes) -> None:
        super().__init__()
        self.read = read


class _Bounded(httpcore2.NetworkStream):
    """A connection whose every step ends by the deadline, and of which little is read."""

    def __init__(self, stream: httpcore2.NetworkStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline
        self._head = b""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002  the deadline's is shorter
        left = READ_BYTES_MAX - len(self._head)
        if left <= 0:
            raise _CutShort(self._head)
        data: bytes = self._stream.read(min(max_bytes, left), timeout=self._deadline.left())
        self._head += data
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        # The library's own would allow each piece the whole time again.
        connection: socket.socket = self._stream.get_extra_info("socket")
        rest = memoryview(buffer)
        while rest:
            connection.settimeout(self._deadline.left())
            try:
                rest = rest[connection.send(rest) :]
            except TimeoutError as error:
                raise httpcore2.WriteTimeout from error
            except OSError as error:
                raise httpcore2.WriteError from error

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002
    ) -> httpcore2.NetworkStream:
        try:
            secured = self._stream.start_tls(ssl_context, server_hostname, timeout=self._deadline.left())
        except httpcore2.ConnectError as error:
            raise (_Untrusted if isinstance(error.__cause__, ssl.SSLError) else httpcore2.ConnectError) from error
        return _Bounded(secured, self._deadline)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Checked(httpcore2.NetworkBackend):
    """Connects to addresses given beforehand, whatever the URL says."""

    def __init__(self, network: httpcore2.NetworkBackend, addresses: Sequence[str], deadline: Deadline) -> None:
        self._network = network
        self._addresses = addresses[:ADDRESSES_MAX]
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,  # noqa: ARG002
        port: int,
        timeout: float | None = None,  # noqa: ARG002
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.NetworkStream:
        failure: Exception = httpcore2.ConnectError()
        for address in self._addresses:
            seconds = min(CONNECT_SECONDS_MAX, self._deadline.left())
            try:
                stream = self._network.connect_tcp(address, port, seconds, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
            else:
                return _Bounded(stream, self._deadline)
        raise failure


@dataclass(frozen=True)
class Outbound:
    """The way out. `resolve` and `network` are what a test replaces to see where it leads."""

    resolve: Callable[[str, int, float], Sequence[str]] = resolve
    network: httpcore2.NetworkBackend = field(default_factory=httpcore2.SyncBackend)
    tls: ssl.SSLContext = field(default_factory=httpcore2.default_ssl_context)
    seconds: float = SECONDS_MAX

    def post(self, endpoint: Endpoint, headers: Sequence[tuple[str, str]], body: bytes) -> Reply:
        """Send these very bytes. Raises Unreached, or ForbiddenAddress before any connection is tried."""
        deadline = Deadline(self.seconds)
        addresses = checked(endpoint, self._addresses(endpoint, deadline))
        url = httpcore2.URL(
            scheme=endpoint.scheme.encode(),
            host=endpoint.host.encode(),
            port=endpoint.port,
            target=endpoint.target.encode(),
        )
        given = [("Host", endpoint.host_header), ("Content-Length", str(len(body))), ("Connection", "close"), *headers]
        pool = httpcore2.ConnectionPool(
            ssl_context=self.tls, max_connections=1, network_backend=_Checked(self.network, addresses, deadline)
        )
        try:
            with (
                pool,
                pool.stream(
                    "POST",
                    url,
                    headers=[(name.encode(), value.encode()) for name, value in given],
                    content=body,
                ) as response,
            ):
                found = [value for name, value in response.headers if name.lower() == b"retry-after"]
                return Reply(response.status, found[0].decode("latin-1") if found else None)
        except httpcore2.TimeoutException as error:
            raise Unreached("timeout") from error
        except httpcore2.NetworkError as error:
            raise Unreached("tls" if isinstance(error, _Untrusted) else "connection") from error
        except httpcore2.ProtocolError as error:
            raise Unreached("protocol") from error
        except _CutShort as error:
            status = _STATUS.match(error.read)
            if status is None:
                raise Unreached("protocol") from error
            return Reply(int(status[1]), None)

    def _addresses(self, endpoint: Endpoint, deadline: Deadline) -> Sequence[str]:
        with suppress(ValueError):
            return [str(ip_address(endpoint.host))]
        # The dot at the end keeps a resolver from trying its own domains after the name.
        name = endpoint.host if endpoint.is_local else f"{endpoint.host}."
        try:
            return self.resolve(name, endpoint.port, deadline.left())
        except TimeoutError as error:
            raise Unreached("timeout") from error
        except OSError as error:
            raise Unreached("unresolved") from error
