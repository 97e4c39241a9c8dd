"""A receiver of webhooks on loopback: keeps the very bytes that came, and answers by a script."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

LINE = b"\r\n"


@dataclass(frozen=True)
class Step:
    """One answer. `drip_seconds` goes between the bytes of the reply; `hang` answers nothing; `drop` closes at once."""

    status: int = 204
    headers: Sequence[tuple[str, str]] = ()
    body: bytes = b""
    delay_seconds: float = 0.0
    drip_seconds: float = 0.0
    hang: bool = False
    drop: bool = False
    raw: bytes | None = None


@dataclass(frozen=True)
class Received:
    """A request as it came over the wire."""

    line: str
    headers: dict[str, str]
    body: bytes
    at: float
    server_name: str | None = None


@dataclass
class Receiver:
    """Listens while the block runs. Each connection gets the next step; after the last, the default."""

    script: list[Step] = field(default_factory=list)
    default: Step = field(default_factory=Step)
    tls: ssl.SSLContext | None = None

    def __enter__(self) -> Self:
        self.requests: list[Received] = []
        self.connections = 0
        self._names: dict[int, str | None] = {}
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        if self.tls is not None:
            self.tls.sni_callback = lambda connection, name, _: self._names.__setitem__(id(connection), name)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="receiver", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def url(self) -> str:
        """Where it listens, without TLS."""
        return f"http://127.0.0.1:{self.port}/hook"

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self.connections += 1
            step = self.script.pop(0) if self.script else self.default
        with suppress(OSError), connection:
            if step.drop:
                return
            if self.tls is not None:
                connection = self.tls.wrap_socket(connection, server_side=True)
            with connection:
                request = self._read(connection)
                with self._lock:
                    self.requests.append(request)
                self._answer(connection, step)

    def _read(self, connection: socket.socket) -> Received:
        data = b""
        while LINE * 2 not in data:
            chunk = connection.recv(65_536)
            if not chunk:
                raise OSError("the client went")
            data += chunk
        head, _, body = data.partition(LINE * 2)
        line, *fields = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (field_.partition(":") for field_ in fields)}
        while len(body) < int(headers["content-length"]):
            chunk = connection.recv(65_536)
            if not chunk:
                raise OSError("the client went")
            body += chunk
        return Received(line, headers, body, time.time(), self._names.get(id(connection)))

    def _answer(self, connection: socket.socket, step: Step) -> None:
        self._stopped.wait(step.delay_seconds)
        if step.hang:
            self._stopped.wait(60)
            return
        reply = step.raw
        if reply is None:
            fields = [("Content-Length", str(len(step.body))), *step.headers]
            lines = [f"HTTP/1.1 {step.status} Whatever", *(f"{name}: {value}" for name, value in fields)]
            reply = LINE.join(line.encode("latin-1") for line in lines) + LINE * 2 + step.body
        if not step.drip_seconds:
            connection.sendall(reply)
        for byte in reply if step.drip_seconds else b"":
            if self._stopped.wait(step.drip_seconds):
                return
            connection.sendall(bytes([byte]))
