"""The ports in memory. What DynamoDB and SQS promise, these keep; the contract suite runs on both."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from backburner.errors import JobFailed, PayloadMissing, SealBroken
from backburner.models import (
    Answer,
    Charge,
    Client,
    ClientLimits,
    DeadLetter,
    EpochMs,
    EpochSeconds,
    Gauge,
    Hint,
    Job,
    JobStatus,
    Lane,
    Learned,
    Micros,
    ModelInfo,
    Question,
    Tally,
    Telling,
    Usage,
)
from backburner.ports import Background, Conflict, Guard, Moved, Patch, Stale, cursor_after, position_of

START: EpochMs = 1_800_000_000_000
MODEL = ModelInfo(
    name="m-1",
    provider="fake",
    context_tokens=10_000,
    output_tokens_max=4_000,
    input_price=2_000_000,
    cached_price=200_000,
    cache_write_price=2_500_000,
    output_price=10_000_000,
)


@dataclass
class FakeClock:
    """A clock that a test turns; sleeping turns it too."""

    time: EpochMs = START

    def now(self) -> EpochMs:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += round(1000 * seconds)

    def advance(self, seconds: float) -> None:
        self.sleep(seconds)


class FakeChance:
    """Repeatable chance: jitter is the upper bound unless a seed is given, names count up."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._count = 0

    def uniform(self, low: float, high: float) -> float:
        return high if self._random is None else self._random.uniform(low, high)

    def name(self) -> str:
        self._count += 1
        return f"{self._count:026d}"


class MemoryJournal:
    """Remembers what was noted."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.subjects: list[dict[str, Any]] = []

    def note(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def about(self, **fields: Any) -> AbstractContextManager[None]:
        self.subjects.append(fields)
        return nullcontext()

    def named(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]


class MemoryStore:
    """The Jobs table."""

    def __init__(self) -> None:
        self.rows: dict[str, Job] = {}

    def add(self, job: Job, now: EpochMs) -> Job | None:
        standing = self.rows.get(job.job_id)
        if standing is not None and not standing.expires_at <= now // 1000:
            return standing
        self._write(job)
        return None

    def get(self, job_id: str) -> Job | None:
        return self.rows.get(job_id)

    def update(self, job_id: str, guard: Guard, **patch: Unpack[Patch]) -> Job:
        row = self.rows.get(job_id)
        if row is None or not self.holds(guard, row):
            raise Conflict(row)
        fields: dict[str, Any] = dict(patch)
        added = {name: fields.pop(f"add_{name}", 0) for name in ("claims", "attempts")}
        appended = fields.pop("append_log", ())
        row = replace(row, **fields)
        row = replace(
            row,
            claims=row.claims + added["claims"],
            attempts=row.attempts + added["attempts"],
            log=(*row.log, *appended),
        )
        self._write(row)
        return row

    def holds(self, guard: Guard, row: Job) -> bool:
        return all(
            (
                row.status in guard.statuses,
                guard.claims is None or row.claims == guard.claims,
                guard.available_by is None or row.available_at <= guard.available_by,
                guard.due_by is None or (row.due_at is not None and row.due_at <= guard.due_by),
                guard.due_after is None or (row.due_at is not None and row.due_at >= guard.due_after),
                guard.lease_by is None or (row.lease_until is not None and row.lease_until <= guard.lease_by),
                guard.due_at is None or row.due_at == guard.due_at,
                guard.deadline_after is None or row.deadline_at > guard.deadline_after,
                guard.unexpired_at is None or row.expires_at > guard.unexpired_at // 1000,
                guard.outbox is None or row.outbox == guard.outbox,
                guard.targets is None or row.targets == guard.targets,
                not guard.undiscarded or row.discarded_at is None,
            )
        )

    def _write(self, row: Job) -> None:
        self.rows[row.job_id] = row

    def due(self, before: EpochMs, limit: int) -> Iterable[str]:
        due = sorted((row.due_at, row.job_id) for row in self.rows.values() if row.due_at is not None)
        return [job_id for due_at, job_id in due if due_at < before][:limit]

    def in_hand(self, before: EpochMs, limit: int) -> Collection[str]:
        due = sorted(((row.due_at, row.job_id) for row in self.rows.values() if row.due_at is not None), reverse=True)
        latest = [job_id for due_at, job_id in due if due_at < before][:limit]
        return [job_id for job_id in latest if self.rows[job_id].status is JobStatus.PROCESSING]

    def oldest_waiting(self, lane: Lane) -> EpochMs | None:
        waiting = (row.waiting_since for row in self.rows.values() if row.lane is lane)
        return min((since for since in waiting if since is not None), default=None)

    def list_by_client(
        self, client_id: str, status: JobStatus | None, cursor: str | None, limit: int
    ) -> tuple[Sequence[Job], str | None]:
        mine = sorted(
            (row for row in self.rows.values() if row.client_id == client_id and status in (None, row.status)),
            key=lambda row: (row.created_at, row.job_id),
            reverse=True,
        )
        if cursor:
            position = position_of(cursor)
            mine = [row for row in mine if (row.created_at, row.job_id) < position]
        return mine[:limit], cursor_after(mine[limit - 1]) if len(mine) > limit else None


class MemoryLimits:
    """The Limits table, for models. `writes` counts the requests that DynamoDB would bill as writes."""

    def __init__(self) -> None:
        self.gauges: dict[str, Gauge] = {}
        self.lines: dict[str, Micros] = {}
        self.writes: Counter[str] = Counter()
        self._lock = threading.RLock()

    def read(self, name: str) -> Gauge | None:
        return self.gauges.get(name)

    def add(self, gauge: Gauge, costs: Mapping[str, Micros], *, floor: Micros, ceilings: Mapping[str, Micros]) -> Gauge:
        with self._lock:
            self.writes["add"] += 1
            current = self.gauges.get(gauge.name)
            if current is None or current.revision != gauge.revision:
                raise Stale(current)
            stands = dict(current.cursors)
            for name in costs:
                if gauge.cursors.get(name, -1) < floor:
                    if stands.get(name, floor) > floor:
                        raise Stale(current)
                    stands[name] = floor
                elif not floor <= stands.get(name, -1) <= ceilings[name]:
                    raise Stale(current)
            return self._moved(replace(current, cursors=stands), costs)

    def replace(self, old: Gauge | None, new: Gauge) -> Gauge:
        with self._lock:
            self.writes["replace"] += 1
            current = self.gauges.get(new.name)
            if (old.revision if old else 0) != (current.revision if current else 0):
                raise Stale(current)
            if old is not None and current is not None:
                if new.cursors == old.cursors:
                    new = replace(new, cursors=current.cursors)
                elif any(current.cursors.get(name) != old.cursors.get(name) for name in new.cursors):
                    raise Stale(current)
                if new.learned == old.learned:
                    new = replace(new, learned=current.learned)
            self.gauges[new.name] = new
            return new

    def adjust(self, name: str, costs: Mapping[str, Micros], learned: Learned | None) -> Gauge:
        with self._lock:
            self.writes["adjust"] += 1
            current = self.gauges.get(name)
            if current is None:
                raise Stale(None)
            if learned is not None:
                current = replace(current, learned=learned)
            return self._moved(current, costs)

    def advance(self, name: str, start: Micros, step: Micros, until: EpochSeconds) -> Micros:
        with self._lock:
            self.writes["advance"] += 1
            place = max(self.lines.get(name, 0), start)
            self.lines[name] = place + step
            return place

    def end_of(self, name: str) -> Micros:
        return self.lines.get(name, 0)

    def _moved(self, gauge: Gauge, costs: Mapping[str, Micros]) -> Gauge:
        moved = {name: gauge.cursors.get(name, 0) + cost for name, cost in costs.items()}
        self.gauges[gauge.name] = replace(gauge, cursors=gauge.cursors | moved)
        return self.gauges[gauge.name]


class MemoryTallies:
    """The Limits table, for clients: its rows change together with the store's, under one lock."""

    def __init__(self, store: MemoryStore) -> None:
        self.rows: dict[str, Tally] = {}
        self._store = store
        self._lock = threading.RLock()

    def read(self, client_id: str) -> Tally | None:
        return self.rows.get(client_id)

    def admit(self, job: Job, now: EpochMs, before: Tally | None, after: Tally, limits: ClientLimits) -> Job | None:
        with self._lock:
            standing = self._store.rows.get(job.job_id)
            if standing is not None and not standing.has_expired(now):
                return standing
            current = self.rows.get(job.client_id)
            self.rows[job.client_id] = self._counted(current, before, after, job.charge, limits)
            self._store.add(job, now)
            return None

    def _counted(
        self, current: Tally | None, before: Tally | None, after: Tally, charge: Charge | None, limits: ClientLimits
    ) -> Tally:
        if (current is None) != (before is None):
            raise Moved(current)
        tokens, micro_usd = (charge.tokens, charge.micro_usd) if charge else (0, 0)
        if current is None or before is None:
            return after
        if (current.minute, current.day) != (before.minute, before.day):
            raise Moved(current)
        new = after
        if current.minute == after.minute:
            new = replace(new, requests=current.requests + 1)
            if limits.requests_per_minute is not None and new.requests > limits.requests_per_minute:
                raise Moved(current)
        if current.day == after.day:
            new = replace(new, tokens=current.tokens + tokens, micro_usd=current.micro_usd + micro_usd)
            if limits.tokens_per_day is not None and new.tokens > limits.tokens_per_day:
                raise Moved(current)
            if limits.micro_usd_per_day is not None and new.micro_usd > limits.micro_usd_per_day:
                raise Moved(current)
            if before.warned == after.warned:
                new = replace(new, warned=current.warned)
        return new

    def settle(self, job: Job, guard: Guard, patch: Patch, change: Charge) -> None:
        with self._lock:
            row = self._store.rows.get(job.job_id)
            if row is None or not self._store.holds(guard, row):
                raise Conflict(row)
            current = self.rows.get(job.client_id)
            if current is None or current.day != change.day:
                raise Moved(current)
            new = replace(
                current, tokens=current.tokens + change.tokens, micro_usd=current.micro_usd + change.micro_usd
            )
            if min(new.tokens, new.micro_usd) < 0:
                raise Moved(current)
            self._store.update(job.job_id, guard, **patch)
            self.rows[job.client_id] = new


class MemoryPayloads:
    """The payloads bucket."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        self.texts[key] = text

    def get(self, key: str) -> str:
        if key not in self.texts:
            raise PayloadMissing
        return self.texts[key]

    def remove(self, key: str) -> None:
        self.texts.pop(key, None)

    def link(self, key: str, seconds: int) -> str:
        return f"https://payloads.example.test/{key}?seconds={seconds}"


@dataclass(order=True)
class SentHint:
    """A hint on its way: to appear at `at`."""

    at: EpochMs
    hint: Hint = field(compare=False)
    lane: Lane = field(compare=False, default=Lane.STANDARD)
    client_id: str = field(compare=False, default="")
    trace: str | None = field(compare=False, default=None)


class MemoryHints:
    """The lane queues."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.sent: list[SentHint] = []

    def send(self, hint: Hint, *, client_id: str, lane: Lane, delay_seconds: int = 0, trace: str | None = None) -> None:
        assert 0 <= delay_seconds <= 900, "SQS delays a message by at most 900 seconds"
        self.sent.append(SentHint(self._clock.now() + delay_seconds * 1000, hint, lane, client_id, trace))

    def take_ready(self) -> list[SentHint]:
        """Remove and return what has appeared, the oldest first."""
        ready = sorted(sent for sent in self.sent if sent.at <= self._clock.now())
        self.sent = [sent for sent in self.sent if sent.at > self._clock.now()]
        return ready


class MemoryDepths:
    """How full the lanes are said to be: a test says it."""

    def __init__(self) -> None:
        self.said: dict[Lane, int | None] = dict.fromkeys(Lane, 0)
        self.delayed: dict[Lane, int | None] = dict.fromkeys(Lane, 0)

    def waiting(self, lane: Lane) -> int | None:
        return self.said[lane]

    def put_off(self, lane: Lane) -> int | None:
        return self.delayed[lane]


class MemoryDeadLetters:
    """The dead-letter queue. Without a clock, time stands still."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        self._clock = clock or FakeClock()
        self.letters: list[DeadLetter] = []
        self._in_hand: set[str] = set()
        self._count = 0

    def bury(self, body: str | Hint, *, reason: str, detail: str, lane: Lane, client_id: str | None) -> None:
        self._put(body if isinstance(body, str) else "", reason, body if isinstance(body, Hint) else None, detail)

    def redrive_policy_moves(self, hint: Hint | None, body: str = "") -> None:
        """What SQS does with a message received too often."""
        self._put(body, None, hint)

    def _put(self, body: str, reason: str | None, hint: Hint | None, detail: str = "") -> None:
        self._count += 1
        name = f"receipt-{self._count}"
        now = self._clock.now()
        self.letters.append(DeadLetter(name, body, reason, hint, name=name, detail=detail, sent_at=now))

    def receive(self, seconds: int) -> Sequence[DeadLetter]:
        found = [letter for letter in self.letters if letter.name not in self._in_hand][:10]
        self._in_hand |= {letter.name for letter in found}
        return found

    def count(self) -> int:
        return len(self.letters)

    def put_back(self, letters: Sequence[DeadLetter]) -> None:
        self._in_hand -= {letter.name for letter in letters}

    def look(self, limit: int) -> Sequence[DeadLetter]:
        return self.letters[:limit]

    def remove(self, letter: DeadLetter) -> None:
        self.letters = [other for other in self.letters if other.receipt != letter.receipt]


class MemoryMarks:
    """Small facts."""

    def __init__(self) -> None:
        self.items: dict[str, set[str]] = {}

    def admit(self, name: str, item: str, *, limit: int, until: EpochSeconds) -> bool:
        items = self.items.setdefault(name, set())
        if len(items) >= limit and item not in items:
            return False
        items.add(item)
        return True

    def is_marked(self, name: str) -> bool:
        return name in self.items


class MemoryNotices:
    """The notifications queue."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.sent: list[tuple[EpochMs, Telling]] = []
        self.traces: list[str | None] = []

    def send(self, telling: Telling, *, client_id: str, delay_seconds: int = 0, trace: str | None = None) -> None:
        assert 0 <= delay_seconds <= 900, "SQS delays a message by at most 900 seconds"
        self.sent.append((self._clock.now() + delay_seconds * 1000, telling))
        self.traces.append(trace)

    def take_ready(self, now: EpochMs) -> list[Telling]:
        """Remove and return what has appeared."""
        ready = [telling for at, telling in self.sent if at <= now]
        self.sent = [(at, telling) for at, telling in self.sent if at > now]
        return ready


class MemorySeals:
    """Seals that anyone can open, if he thinks of reversing them."""

    def __init__(self) -> None:
        self.broken = False

    def seal(self, text: str) -> str:
        return text[::-1]

    def open(self, token: str) -> str:
        if self.broken:
            raise SealBroken
        return token[::-1]


class MemoryWebhookSecrets:
    """The clients' own webhook secrets, sealed, with the ends of their validity."""

    def __init__(self) -> None:
        self.sealed: dict[str, list[tuple[str, EpochMs | None]]] = {}

    def of(self, client_id: str, now: EpochMs) -> Sequence[str]:
        return [sealed for sealed, until in self.sealed.get(client_id, []) if until is None or until > now]


class MemoryClients:
    """The Clients table."""

    def __init__(self, clients: dict[str, Client]) -> None:
        self._clients = clients
        self.reads = 0

    def find(self, key_hash: str) -> Client | None:
        self.reads += 1
        return self._clients.get(key_hash)


class MemoryCatalogue:
    """The model catalogue."""

    def __init__(self, *models: ModelInfo) -> None:
        self._models = {model.name: model for model in models or (MODEL,)}

    def find(self, model: str) -> ModelInfo | None:
        return self._models.get(model)

    def names(self) -> Sequence[str]:
        return sorted(self._models)


class ScriptedProvider:
    """A provider that does as it is told: answers, fails, or lets something happen while it thinks."""

    def __init__(self, *script: str | JobFailed | Callable[[], object]) -> None:
        self.script = list(script)
        self.questions: list[Question] = []
        self.backgrounds: list[Background | None] = []
        self.cancelled: list[str] = []

    def cancel(self, handle: str) -> None:
        self.cancelled.append(handle)

    def ask(
        self,
        question: Question,
        *,
        timeout_seconds: float,
        abandoned: Callable[[], bool],
        background: Background | None = None,
        said: Callable[[str], None] | None = None,
    ) -> Answer:
        self.questions.append(question)
        self.backgrounds.append(background)
        step = self.script.pop(0) if self.script else "an answer"
        if isinstance(step, JobFailed):
            raise step
        given = step if isinstance(step, str) else step()
        text = given if isinstance(given, str) else "an answer"
        if said is not None:
            said(text)
        usage = Usage(input_tokens=10, output_tokens=5)
        return Answer(text, "stop", question.model.name, "fake", usage, f"req-{len(self.questions)}")
