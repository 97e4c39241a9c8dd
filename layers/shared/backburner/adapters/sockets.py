"""Open WebSocket connections, through API Gateway's @connections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from backburner.adapters.aws import translated
from backburner.errors import PortUnavailable


class ApiGatewaySockets:
    """The connections of one WebSocket API, as ports.Sockets.

    `client` makes the client, when a frame is first to be sent: few jobs are listened to, and it takes some 25 ms.
    """

    def __init__(self, client: Callable[[], Any]) -> None:
        self._make = client
        self._made: Any = None
        self._lock = threading.Lock()

    def post(self, connection_id: str, frame: str) -> bool:
        """Send a text; False if there is no such connection any more."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
        try:
            with translated():
                self._made.post_to_connection(ConnectionId=connection_id, Data=frame.encode())
        except PortUnavailable as error:
            if error.message in ("GoneException", "410"):
                return False
            raise
        return True
