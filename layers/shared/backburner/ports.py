"""What the core needs from outside. An adapter may raise PortUnavailable from any call, before or after its effect."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, Unpack

from backburner.errors import InvalidRequest
from backburner.models import (
    Answer,
    Attempt,
    Charge,
    Client,
    ClientLimits,
    DeadLetter,
    EpochMs,
    EpochSeconds,
    Failure,
    Gauge,
    Hint,
    Job,
    JobStatus,
    Lane,
    Later,
    Learned,
    Limits,
    Message,
    Micros,
    ModelInfo,
    Notice,
    Payload,
    Question,
    SlackOrigin,
    Slot,
    Tally,
    Telling,
    Usage,
    Webhook,
    canonical_json,
)


class Conflict(Exception):
    """A conditional write was refused; `current` is the row that stands there, None if there is none."""

    def __init__(self, current: Job | None) -> None:
        super().__init__()
        self.current = current


@dataclass(frozen=True, slots=True)
class Guard:
    """What must be true of a row for a write to happen, checked by the store in the same step. None: not asked.

    The row must exist in every case: no write recreates a removed row.
    """

    statuses: frozenset[JobStatus]
    claims: int | None = None
    available_by: EpochMs | None = None
    due_by: EpochMs | None = None
    due_after: EpochMs | None = None
    lease_by: EpochMs | None = None
    deadline_after: EpochMs | None = None
    unexpired_at: EpochMs | None = None
    due_at: EpochMs | None = None
    outbox: tuple[Notice, ...] | None = None
    targets: tuple[str, ...] | None = None
    undiscarded: bool = False


class Patch(TypedDict, total=False):
    """New values of a row's fields; None removes the field. `add_*` add, `append_log` appends."""

    status: JobStatus
    owner: str
    available_at: EpochMs
    deadline_at: EpochMs
    expires_at: EpochSeconds
    due_at: EpochMs | None
    lease_until: EpochMs | None
    claimed_at: EpochMs | None
    finished_at: EpochMs | None
    waiting_since: EpochMs | None
    attempts: int
    attempts_limit: int | None
    model_index: int
    handle: str | None
    slot: Slot | None
    place: EpochMs | None
    parked_since: EpochMs | None
    slack: SlackOrigin
    result: Payload | None
    error: Failure | None
    outbox: tuple[Notice, ...]
    targets: tuple[str, ...]
    charge: Charge | None
    request: Payload
    metadata: str | None
    webhook: Webhook | None
    discarded_at: EpochMs
    add_claims: int
    add_attempts: int
    append_log: tuple[Attempt, ...]


def cursor_at(created_at: EpochMs, job_id: str) -> str:
    """Where a listing, newest first, goes on after the job created then, with this id."""
    return base64.urlsafe_b64encode(canonical_json([created_at, job_id]).encode()).decode()


def cursor_after(job: Job) -> str:
    """Where a listing goes on after this job."""
    return cursor_at(job.created_at, job.job_id)


def position_of(cursor: str) -> tuple[EpochMs, str]:
    """The creation and id of the job that a cursor stands for. Raises InvalidRequest."""
    try:
        created_at, job_id = json.loads(base64.b64decode(cursor.encode("ascii"), altchars=b"-_", validate=True))
        if type(created_at) is not int or not 0 <= created_at < 2**53:
            raise ValueError("no instant")
        if not isinstance(job_id, str) or not 0 < len(job_id) <= 128:
            raise ValueError("no job id")
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest("not a cursor that a listing returned", field="cursor") from error
    return created_at, job_id


class JobStore(Protocol):
    """The Jobs table."""

    def add(self, job: Job, now: EpochMs) -> Job | None:
        """Store a new row unless an unexpired one with its id stands there; return that one, or None if stored."""

    def get(self, job_id: str) -> Job | None:
        """The row as last written."""

    def update(self, job_id: str, guard: Guard, **patch: Unpack[Patch]) -> Job:
        """Write the patch if the guard holds; return the new row. Raises Conflict."""

    def due(self, before: EpochMs, limit: int) -> Iterable[str]:
        """Ids of rows whose `due_at` is before that instant, the longest overdue first; may be seconds out of date."""

    def in_hand(self, before: EpochMs, limit: int) -> Collection[str]:
        """Ids of rows in processing among the latest `limit` or so of those; as of seconds ago, and some may lack."""

    def oldest_waiting(self, lane: Lane) -> EpochMs | None:
        """The earliest `waiting_since` of the lane's queued rows, perhaps as of seconds ago; None if none waits."""

    def list_by_client(
        self, client_id: str, status: JobStatus | None, cursor: str | None, limit: int
    ) -> tuple[Sequence[Job], str | None]:
        """The client's jobs, newest first, and the cursor of the next page."""


class PayloadStore(Protocol):
    """Texts too large for a row."""

    def put(self, key: str, text: str) -> None:
        """Store a text; the same key always gets the same text."""

    def get(self, key: str) -> str:
        """Read it back. Raises PayloadMissing."""

    def link(self, key: str, seconds: int) -> str:
        """A URL that reads the text without credentials for so many seconds."""

    def remove(self, key: str) -> None:
        """Remove the text, if it is there."""


class HintQueue(Protocol):
    """The lane queues."""

    def send(self, hint: Hint, *, client_id: str, lane: Lane, delay_seconds: int = 0, trace: str | None = None) -> None:
        """Queue a hint, to appear after at most 900 seconds. trace: X-Ray's header of the job's request."""


class Depths(Protocol):
    """How full the lanes are."""

    def waiting(self, lane: Lane) -> int | None:
        """Hints that could be received now, as of a few seconds ago. None: not known."""

    def put_off(self, lane: Lane) -> int | None:
        """Delayed hints: of jobs that wait for their turn at the provider, or for a retry. None: not known."""


class DeadLetterQueue(Protocol):
    """The dead-letter queue."""

    def bury(self, body: str | Hint, *, reason: str, detail: str, lane: Lane, client_id: str | None) -> None:
        """Put a hint, or what was found instead of one, there with its reason."""

    def look(self, limit: int) -> Sequence[DeadLetter]:
        """Some letters, at most that many; all stay where they are. Those of the redrive policy carry no reason."""

    def receive(self, seconds: int) -> Sequence[DeadLetter]:
        """Take some letters, ten at most, into hand: nobody else sees them for so long. None: probably no more."""

    def count(self) -> int:
        """How many letters there are, in whosever hand; approximately."""

    def put_back(self, letters: Sequence[DeadLetter]) -> None:
        """Let others see letters again that were just received."""

    def remove(self, letter: DeadLetter) -> None:
        """Delete a letter just received."""


class NoticeQueue(Protocol):
    """The notifications queue."""

    def send(self, telling: Telling, *, client_id: str, delay_seconds: int = 0, trace: str | None = None) -> None:
        """Queue the telling of one target, to appear after at most 900 seconds. trace: as for hints."""


class Channel(Protocol):
    """One way of telling. Thread-safe."""

    @property
    def waits_seconds(self) -> Sequence[float]:
        """The wait before each further try; when they are used up, the target is given up."""

    def tell(self, job: Job) -> None:
        """Tell the target that the job has ended, within TELLING_MS of delivery.py. Raises Untold."""


class Seals(Protocol):
    """Encryption of what the database must not show. Thread-safe."""

    def seal(self, text: str) -> str:
        """Encrypt; each time to another token."""

    def open(self, token: str) -> str:
        """Decrypt. Raises SealBroken."""


class WebhookSecrets(Protocol):
    """The clients' own webhook secrets."""

    def of(self, client_id: str, now: EpochMs) -> Sequence[str]:
        """The client's valid secrets, sealed, the newest first; two while one is being replaced."""


class Clients(Protocol):
    """The Clients table."""

    def find(self, key_hash: str) -> Client | None:
        """The client whose API key has this SHA-256 (hex), if it is not disabled."""


class Moved(Exception):
    """A conditional change of a tally was refused; `current` is what stands there, None if nothing does."""

    def __init__(self, current: Tally | None) -> None:
        super().__init__()
        self.current = current


class Tallies(Protocol):
    """The Limits table, as far as clients are concerned. A tally changes only in one step with a job's row."""

    def read(self, client_id: str) -> Tally | None:
        """The client's tally as last written."""

    def admit(self, job: Job, now: EpochMs, before: Tally | None, after: Tally, limits: ClientLimits) -> Job | None:
        """Store a new job as JobStore.add does, and count it: the step from `before` to `after` is added.

        What stands there may have grown since `before` was read, but must be of the same minute and day, and must not
        come to exceed the limits. Raises Moved, in which case nothing was stored; Busy.
        """

    def settle(self, job: Job, guard: Guard, patch: Patch, change: Charge) -> None:
        """Write the patch as JobStore.update does, and add the change to the tally of that day, in one step.

        Raises Conflict; Moved when the tally is of another day, or would fall below zero; Busy.
        """


class Stale(Exception):
    """A conditional write of a gauge was refused; `current` is what stands there, None if nothing does."""

    def __init__(self, current: Gauge | None) -> None:
        super().__init__()
        self.current = current


class LimitStore(Protocol):
    """The Limits table, as far as models are concerned. Every write is one request."""

    def read(self, name: str) -> Gauge | None:
        """The gauge, possibly a moment old."""

    def add(self, gauge: Gauge, costs: Mapping[str, Micros], *, floor: Micros, ceilings: Mapping[str, Micros]) -> Gauge:
        """Move the cursors on by the costs, in one step, and return the new gauge.

        A cursor that was seen below `floor`, or not at all, is moved on from there, if it still does not lie beyond;
        any other must lie between floor and its ceiling. The revision must be the gauge's. Raises Stale.
        """

    def replace(self, old: Gauge | None, new: Gauge) -> Gauge:
        """Write what differs from `old` (None: all), if the revision is still that of `old` (None: if there is none).

        Where the cursors differ, they too must still be those of `old`. Raises Stale.
        """

    def adjust(self, name: str, costs: Mapping[str, Micros], learned: Learned | None) -> Gauge:
        """Move the cursors by the costs, whatever they are, and note what was learned. Raises Stale without a row."""

    def advance(self, name: str, start: Micros, step: Micros, until: EpochSeconds) -> Micros:
        """Take the next place in a line: move its end on by `step`, from `start` at least, and return the place.

        until: when the line may be forgotten.
        """

    def end_of(self, name: str) -> Micros:
        """The end of a line, possibly a moment old; 0 if there is none."""


class Limiter(Protocol):
    """Leave to call a model. `take` and `is_open` raise PortUnavailable; the others do without."""

    def take(
        self, question: Question, *, lane: Lane, client_id: str, place: EpochMs | None, patience_ms: int
    ) -> Slot | Later:
        """Reserve a slot for the question within the lane's horizon; wait for one, but no longer than patience.

        place: the job's in its client's line, if it has one. Who gets no slot is told a place: its own until its turn
        has come, then a new one at the end.
        """

    def is_open(self, slot: Slot) -> bool:
        """Whether the slot still holds: the provider has not asked for silence since."""

    def give_back(self, slot: Slot) -> None:
        """Leave a slot to others; without effect once its time has come."""

    def estimate(self, question: Question, *, ahead: int, at_once: int) -> EpochMs:
        """When a job may start that has so many like it before it, of which so many run at once. A rough guess."""

    def settle(self, model: ModelInfo, slot: Slot, usage: Usage, *, call_ms: int, seen: Limits | None) -> None:
        """Put the actual usage of a call that was answered in the place of the expected one."""

    def refused(self, model: ModelInfo, retry_after_seconds: float | None, *, seen: Limits | None) -> None:
        """The provider refused a call for its rate: hold the model, and learn from it."""

    def failed(self, model: ModelInfo) -> None:
        """The provider is overloaded or at fault: slow the model down if that goes on."""


class Catalogue(Protocol):
    """The models that the deployment knows."""

    def find(self, model: str) -> ModelInfo | None:
        """The entry of a model."""

    def names(self) -> Sequence[str]:
        """All of them, for people to read."""


@dataclass(frozen=True, slots=True)
class Background:
    """Leave to let a call go on at the provider when nobody waits for it, so that it can be attached to again.

    handle: the provider's name for a call that was begun before, to be attached to; None to begin one.
    remember: stores the name of a call just begun, before it is waited for.
    """

    handle: str | None
    remember: Callable[[str], None]


class Conversations(Protocol):
    """Where jobs are asked in conversations that are kept elsewhere: Slack's threads."""

    def recall(self, job: Job, asked: Message) -> Sequence[Message]:
        """The conversation up to the question, which comes last; the question alone if nothing more can be had.

        Never raises, and takes no longer than three seconds.
        """


class Marks(Protocol):
    """Small facts that are remembered for a while."""

    def admit(self, name: str, item: str, *, limit: int, until: EpochSeconds) -> bool:
        """Whether the item is among the first `limit` under this name; if it is already, it is no further one."""

    def is_marked(self, name: str) -> bool:
        """Whether anything was admitted under this name."""


class Line(Protocol):
    """Lines that are waited in."""

    def advance(self, name: str, start: Micros, step: Micros, until: EpochSeconds) -> Micros:
        """Take the next place in a line: move its end on by `step`, from `start` at least, and return the place.

        until: when the line may be forgotten.
        """


class Provider(Protocol):
    """One LLM provider. Thread-safe. One that cannot let calls go on ignores `background`, and never `remember`s."""

    def ask(
        self,
        question: Question,
        *,
        timeout_seconds: float,
        abandoned: Callable[[], bool],
        background: Background | None = None,
        said: Callable[[str], None] | None = None,
    ) -> Answer:
        """Make one call, and only one. Raises JobFailed; Abandoned soon after `abandoned()` turns true.

        said: gets each piece of text as it comes; a call that is attached to begins again with the first.
        """

    def cancel(self, handle: str) -> None:
        """Stop a call that goes on, if it still does; says nothing of the outcome."""


class Audience(Protocol):
    """Whoever wants one attempt's answer while it is being written. Nothing here raises, or holds anything up."""

    def say(self, piece: str) -> None:
        """Another piece of the answer."""

    def seen(self, row: Job) -> None:
        """The job's row, which was read for another reason: it may show that somebody has come to listen."""


class Deltas(Protocol):
    """Whoever wants an answer while it is being written."""

    def listening(self, job: Job) -> AbstractContextManager[Audience | None]:
        """For the time of one attempt, where the pieces of its answer go; None where nobody can come to listen.

        Costs nothing while nobody listens. Never raises, and holds up neither the call nor its end.
        """


@dataclass(frozen=True, slots=True)
class Listener:
    """A connection that follows a job.

    name: of this subscription; a connection that subscribes anew gets another.
    draft, position: how far it has come, so where to go on: characters of the answer's n-th draft.
    """

    connection_id: str
    name: str
    draft: int = 0
    position: int = 0


class Connections(Protocol):
    """Who is connected to the WebSocket API, and which jobs they follow. Each forgets by itself after `expires_at`."""

    def open(self, connection_id: str, client_id: str, expires_at: EpochSeconds) -> None:
        """A client has connected."""

    def client_id(self, connection_id: str) -> str | None:
        """Whose connection it is; None if it is not known."""

    def close(self, connection_id: str, *, following: str | None = None) -> None:
        """It is gone, and follows nothing any more. Closing twice is no error.

        following: a job that it was found to follow, whether or not its own list of jobs says so.
        """

    def subscribe(self, job_id: str, listener: Listener, *, jobs_max: int) -> None:
        """A connection follows a job, anew if it did already. Raises TooManySubscriptions, ConnectionUnknown."""

    def unsubscribe(self, job_id: str, connection_id: str) -> None:
        """It follows the job no more, if it did."""

    def listeners(self, job_id: str, limit: int, *, sure: bool) -> Sequence[Listener]:
        """Who follows the job, `limit` at most. Not `sure`, for half the price: perhaps as it was a second ago."""


class Tickets(Protocol):
    """Tickets that open one connection each, for clients that cannot send a key: browsers."""

    def issue(self, ticket: str, client_id: str, expires_at: EpochSeconds) -> None:
        """Keep a ticket, in a form from which it cannot be read."""

    def redeem(self, ticket: str) -> str | None:
        """The client whose ticket it is; None if there is none, or it has expired or been used. It is used now."""


class Sockets(Protocol):
    """The open connections themselves. Thread-safe."""

    def post(self, connection_id: str, frame: str) -> bool:
        """Send a text, within 1.5 seconds. False if the connection is gone. Raises PortUnavailable."""


class Clock(Protocol):
    """The time, injected so that a test can turn it."""

    def now(self) -> EpochMs:
        """Milliseconds since the epoch."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class Journal(Protocol):
    """Structured logs and metrics. Fields never hold prompts, answers, keys or signatures."""

    def note(self, event: str, **fields: Any) -> None:
        """Record `noun_verb` with its fields."""

    def about(self, **fields: Any) -> AbstractContextManager[None]:
        """Add the fields to whatever this thread notes within the block."""


class Chance(Protocol):
    """Randomness, injected so that a test can repeat it."""

    def uniform(self, low: float, high: float) -> float:
        """A number between the two."""

    def name(self) -> str:
        """A fresh name nobody can guess: 26 characters of base 32, 130 bits."""
