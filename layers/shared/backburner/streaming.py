"""Answers told while they are written: who listens to a job gets the text as it comes, without gap or repeat.

Each time a worker takes a job, the answer is written anew, as another draft: `draft` is the row's `claims`. A piece
says where in its draft it begins, counted in characters (Unicode code points), so that a listener who was cut off says
how far it has come and gets the rest, and whoever gets a piece twice can tell.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass

from backburner.documents import job_document, json_text, problem_document
from backburner.errors import PortUnavailable, Refusal
from backburner.models import WEBSOCKET, Job, JobStatus
from backburner.ports import Audience, Connections, JobStore, Journal, Listener, Sockets

FRAME_BYTES_MAX = 32_000
"""API Gateway's frames hold 32 KB, and how it divides a larger message is nowhere promised."""
PIECE_CHARACTERS_MAX = 5_000
"""A character is at most six bytes of JSON, so a piece fits a frame with what stands around it."""
PUSH_SECONDS = 0.15
"""What is said within this time goes out as one piece: quick to the eye, and seven messages a second at most."""
LOOK_SECONDS, LOOK_SECONDS_MAX = 0.5, 5.0
"""How often somebody who came while the answer is written is looked for; each look is half a read unit. While nobody
is there, so often at first only, then after a quarter of the time that nobody was."""
LISTENERS_MAX = 50
"""So many listeners of one job get its pieces; any further ones get its end."""
MISSES_MAX = 3
"""A connection that failed so often in a row gets no more pieces of this draft, but its job's end."""
END_SECONDS_MAX = 2.0
"""Nothing is waited for any longer once the attempt is over; a post takes at most 1.5 s."""


# ── Frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def plain_frame(kind: str, job_id: str | None = None) -> str:
    """`{"type":…}`, with the job it is about."""
    return json_text({"type": kind} | ({"job_id": job_id} if job_id is not None else {}))


def error_frame(refusal: Refusal, job_id: str | None) -> str:
    """`{"type":"error","job_id":…,"problem":{…}}`, with the problem document that HTTP would show."""
    about = {"job_id": job_id} if job_id is not None else {}
    return json_text({"type": "error", **about, "problem": problem_document(refusal)})


def delta_frame(job_id: str, draft: int, position: int, text: str) -> str:
    """A piece of a draft, from its character `position` up to `end`, which is where the next one begins."""
    where = {"draft": draft, "position": position, "end": position + len(text)}
    return json_text({"type": "delta", "job_id": job_id, **where, "text": text})


def job_frame(job: Job) -> str:
    """`{"type":"job","job":{…}}`, with the job as GET shows it; of what does not fit, a note says so."""

    def fits(text: str) -> bool:
        return len(text.encode()) <= FRAME_BYTES_MAX - 100

    shown = job_document(job, None, fits=fits)
    if not fits(shown):
        shown = job_document(job, None, fits=fits, without=("metadata", "receipt"))
    return f'{{"type":"job","job":{shown}}}'


# ── Telling ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LiveAnswers:
    """ports.Deltas over WebSocket connections. A thread for each call that somebody wants to hear; `posts` runs posts.

    Of whoever subscribes to a job that nobody had wanted to hear, its row tells, which each renewal of the lease shows.
    """

    connections: Connections
    sockets: Sockets
    store: JobStore
    posts: Executor
    monotonic: Callable[[], float]
    journal: Journal

    @contextmanager
    def listening(self, job: Job) -> Iterator[Audience]:
        """Tell whoever listens what is said in the block."""
        broadcast = Broadcast(job, self)
        broadcast.seen(job)
        try:
            yield broadcast
        finally:
            broadcast.close()


@dataclass
class Ear:
    """A listener as one attempt's broadcast knows it. One post at a time, so that its pieces come in order."""

    listener: Listener
    position: int
    post: Future[object] | None = None
    misses: int = 0

    @property
    def is_free(self) -> bool:
        """Whether it can take another post."""
        return self.misses < MISSES_MAX and (self.post is None or self.post.done())


class Broadcast:
    """The telling of one attempt, as ports.Audience. `say` and `seen` take note; a thread of its own does the rest."""

    def __init__(self, job: Job, house: LiveAnswers) -> None:
        self.over = threading.Event()
        self._job = job
        self._house = house
        self._thread: threading.Thread | None = None
        self._ears: dict[str, Ear] = {}
        self._look_at = self._heard_at = float("-inf")
        self._lock = threading.Lock()
        self._said: list[str] = []
        self._half = ""
        self._text = ""

    def say(self, piece: str) -> None:
        """Another piece of the answer."""
        with self._lock:
            self._said.append(piece)

    def seen(self, row: Job) -> None:
        """Begin to tell, if the row says that somebody wants to hear, and unless that has begun."""
        if self._thread is not None or WEBSOCKET not in row.targets:
            return
        thread = threading.Thread(target=self.run, name="broadcast", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many threads; the answer matters, its telling while it is written does not
            self._house.journal.note("broadcast_failed", job_id=self._job.job_id, error="no thread")
            return
        self._thread = thread

    def close(self) -> None:
        """The attempt is over. Waits for the last posts, for a bounded time."""
        self.over.set()
        if self._thread is not None:
            self._thread.join(END_SECONDS_MAX)

    def run(self) -> None:
        """Tell until the attempt is over. Whatever goes wrong here, the job goes on."""
        try:
            self.begin()
            while not self.over.wait(PUSH_SECONDS):
                self.push()
            self.end()
        except Exception as error:  # noqa: BLE001  the answer matters, its telling while it is written does not
            self._house.journal.note("broadcast_failed", job_id=self._job.job_id, error=type(error).__name__)

    def begin(self) -> None:
        """Tell those who wait that the job is being worked on."""
        self._heard_at = self._house.monotonic()
        self._look(sure=True)
        self._tell(self._job)

    def push(self) -> None:
        """Give every listener what it does not have."""
        if self._house.monotonic() >= self._look_at:
            self._look(sure=False)
        self._take_note()
        for ear in self._ears.values():
            if ear.is_free and ear.position < len(self._text):
                ear.post = self._house.posts.submit(self._catch_up, ear, self._text)

    def end(self) -> None:
        """Tell those who listened if the job waits again. Of its end they are told as all its targets are."""
        if self._ears:
            row = self._house.store.get(self._job.job_id)
            if row is not None and row.status is JobStatus.QUEUED and row.claims == self._job.claims:
                self._tell(row)
        for ear in self._ears.values():
            if ear.post is not None:
                ear.post.exception()  # waits for it

    def _take_note(self) -> None:
        """Add what was said to the text. A pair of surrogates may come in two pieces; half of one is no character."""
        with self._lock:
            said, self._said = self._said, []
        new = self._half + "".join(said)
        self._half = new[-1:] if "\ud800" <= new[-1:] <= "\udbff" else ""
        new = new.removesuffix(self._half)
        self._text += new.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _look(self, *, sure: bool) -> None:
        """See who listens now. A listener who subscribed anew goes on from where it says it is."""
        now = self._house.monotonic()
        self._look_at = now + LOOK_SECONDS
        try:
            listeners = self._house.connections.listeners(self._job.job_id, LISTENERS_MAX, sure=sure)
        except PortUnavailable:
            return  # those who are known go on listening
        if listeners:
            self._heard_at = now
        self._look_at = now + min(max(LOOK_SECONDS, (now - self._heard_at) / 4), LOOK_SECONDS_MAX)
        known, self._ears = self._ears, {}
        for listener in listeners:
            ear = known.get(listener.name)
            self._ears[listener.name] = ear or Ear(listener, self._start(listener))

    def _start(self, listener: Listener) -> int:
        goes_on = listener.draft == self._job.claims and listener.position <= len(self._text)
        return listener.position if goes_on else 0

    def _tell(self, row: Job) -> None:
        frame = job_frame(row)
        for ear in self._ears.values():
            ear.post = self._house.posts.submit(self._post, ear, frame)

    def _catch_up(self, ear: Ear, text: str) -> None:
        while ear.position < len(text) and not self.over.is_set():
            piece = text[ear.position : ear.position + PIECE_CHARACTERS_MAX]
            frame = delta_frame(self._job.job_id, self._job.claims, ear.position, piece)
            if not self._post(ear, frame):
                return
            ear.position += len(piece)

    def _post(self, ear: Ear, frame: str) -> bool:
        """Whether the frame was sent. If it is not known, the same piece is sent again."""
        try:
            if self._house.sockets.post(ear.listener.connection_id, frame):
                ear.misses = 0
                return True
            ear.misses = MISSES_MAX
            self._house.connections.close(ear.listener.connection_id, following=self._job.job_id)
        except PortUnavailable:
            ear.misses += 1
        return False
