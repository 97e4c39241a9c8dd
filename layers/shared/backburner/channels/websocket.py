"""Telling whoever follows a job over the WebSocket API that it has ended."""

from __future__ import annotations

from concurrent.futures import Executor

from backburner.errors import PortUnavailable, Untold
from backburner.models import Job
from backburner.ports import Clock, Connections, Journal, Listener, Sockets
from backburner.streaming import job_frame

LISTENERS_MAX = 100
"""In one try; if there are more, another try follows."""


class WebSocketChannel:
    """ports.Channel. Whoever was told follows the job no more, so a further try tells only those who are left."""

    waits_seconds = (1.0, 5.0, 30.0)
    """A connection that cannot be reached for so long is as good as gone; its client asks when it comes back."""

    def __init__(
        self, connections: Connections, sockets: Sockets, posts: Executor, *, clock: Clock, journal: Journal
    ) -> None:
        self._connections = connections
        self._sockets = sockets
        self._posts = posts
        self._clock = clock
        self._journal = journal

    def tell(self, job: Job) -> None:
        """Send every listener the job as it ended. One that is slow holds up none of the others. Raises Untold."""
        listeners = self._connections.listeners(job.job_id, LISTENERS_MAX, sure=True)
        frame = job_frame(job)
        told = list(self._posts.map(lambda listener: self._tell(job.job_id, listener, frame), listeners))
        if any(told):
            told_ms = self._clock.now() - (job.finished_at or 0)
            self._journal.note("listeners_told", job_id=job.job_id, count=sum(told), told_ms=told_ms)
        if not all(told):
            raise Untold("unreachable", again=True)
        if len(listeners) == LISTENERS_MAX:
            raise Untold("more_listeners", again=True)

    def _tell(self, job_id: str, listener: Listener, frame: str) -> bool:
        try:
            if self._sockets.post(listener.connection_id, frame):
                self._connections.unsubscribe(job_id, listener.connection_id)
            else:
                self._connections.close(listener.connection_id, following=job_id)
        except PortUnavailable:
            return False
        return True
