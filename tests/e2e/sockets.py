"""The WebSocket API, as a client sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import websockets.sync.client as websockets

from tests.e2e.conftest import WAIT_SECONDS, Stack

FINAL = {"completed", "failed", "cancelled", "expired"}


@contextmanager
def connection(stack: Stack, ticket: str | None = None) -> Iterator[Any]:
    """An open WebSocket, by key or by ticket."""
    query, headers = ("", {"Authorization": f"Bearer {stack.api_key}"}) if ticket is None else (f"?ticket={ticket}", {})
    with websockets.connect(f"{stack.socket_url}{query}", additional_headers=headers, proxy=None) as socket:
        yield socket


def ask(socket: Any, **message: Any) -> None:
    """Send a message."""
    socket.send(json.dumps(message))


def read(socket: Any, wanted: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
    """The next frame of this kind."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        frame: dict[str, Any] = json.loads(socket.recv(timeout=max(0.1, end - time.monotonic())))
        if wanted(frame):
            return frame


def is_end(frame: dict[str, Any]) -> bool:
    """Whether it says that the job has ended."""
    return frame["type"] == "job" and frame["job"]["status"] in FINAL
