"""A crowd of workers before providers that enforce their limits, on virtual time.

The core is the real one: submission, execution, life cycle and limiter, one of each per worker process. Simulated are
the queues, their pollers, the network, and the provider, whose allowances are the fake provider's own, refilled
continuously. A worker takes its next batch only when the present one has ended, as Lambda's poller has it.

Not simulated: crashes, lost and doubled messages (tests/simulation/world.py does that), the start of new workers.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from backburner.errors import Overloaded, RateLimited
from backburner.models import (
    DIMENSIONS,
    Answer,
    Client,
    EpochMs,
    Gauge,
    Hint,
    Job,
    JobStatus,
    Lane,
    Limits,
    Micros,
    ModelInfo,
    Question,
    Usage,
)
from backburner.ports import Background
from tests.fakes.house import House
from tests.fakes.memory import (
    MODEL,
    FakeChance,
    MemoryCatalogue,
    MemoryLimits,
    MemoryStore,
)
from tests.fakes.provider import Limits as Allowances
from tests.simulation.timeline import Distant, Timeline, VirtualClock, VirtualLock

BATCH = 10
INVOCATION_SECONDS = 300.0
TABLE_MS = (3.0, 9.0)
"""A DynamoDB or SQS call from Lambda, there and back."""
PROVIDER_MS = (5.0, 40.0)
"""To the provider; the way back is in the call's time."""
APPEAR_MS = (5.0, 30.0)
"""From the sending of a message until a poller gets it."""
POLL_MS = (5.0, 60.0)
"""From the end of a batch to the next one."""
SKEW_US = 10_000
"""Clocks of Lambda's machines differ by some milliseconds."""
SHARE_MAX = 0.10
IN_FLIGHT_MIN = 30
RECENT_US = 60_000_000
LEASE_TICK_US = 5_000_000


class CountingJournal:
    """Counts what is noted, and adds up two fields of it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.slot_wait_ms = 0
        self.parked_ms = 0

    def note(self, event: str, **fields: Any) -> None:
        self.counts[event] += 1
        if event == "call_ended":
            self.slot_wait_ms += fields["slot_wait_ms"]
        elif event == "job_parked":
            self.parked_ms += fields["wait_ms"]

    def about(self, **fields: Any) -> AbstractContextManager[None]:
        return nullcontext()


class LeanStore(MemoryStore):
    """The Jobs table, from which final rows vanish: their ends are reported instead."""

    def __init__(self, ended: Callable[[Job], None]) -> None:
        super().__init__()
        self.writes = 0
        self._ended = ended

    def _write(self, row: Job) -> None:
        self.writes += 1
        if row.status.is_final:
            del self.rows[row.job_id]
            self._ended(row)
        else:
            self.rows[row.job_id] = row


@dataclass
class Message:
    """A hint in a queue. `taken_at`: microseconds."""

    hint: Hint
    group: str
    taken_at: Micros = 0


class FairQueue:
    """A standard queue with message groups, delivering by the documented rule of fair queues.

    A group is noisy while it has more than 10 % of the messages in flight and at least 30 of them, or has recently
    taken more than 10 % of the processing time; it stops being so when its backlog is used up. Messages of other groups
    come first; among noisy groups, those of the one with the fewest in flight. "Recently" is taken to be a minute.
    Source: "How Amazon SQS fair queues work", Amazon SQS Developer Guide, read on 2026-11-29.
    `fair=False`: the oldest first.
    """

    def __init__(self, timeline: Timeline, *, fair: bool = True) -> None:
        self._timeline = timeline
        self._fair = fair
        self._backlog: dict[str, deque[tuple[int, Message]]] = {}
        self._in_flight: Counter[str] = Counter()
        self._processed: deque[tuple[Micros, str, int]] = deque()
        self._pollers: deque[Callable[[], None]] = deque()
        self._count = 0

    def send(self, hint: Hint, *, client_id: str, delay_seconds: int = 0) -> None:
        """Queue a message."""
        message = Message(hint, client_id)
        way_us = round(1000 * self._timeline.dice.uniform(*APPEAR_MS))
        self._timeline.at(self._timeline.now + way_us + delay_seconds * 1_000_000, partial(self._appear, message))

    def _appear(self, message: Message) -> None:
        self._count += 1
        self._backlog.setdefault(message.group, deque()).append((self._count, message))
        if self._pollers:
            self._pollers.popleft()()

    def receive(self, limit: int) -> list[Message]:
        """Take some messages, at least one; waits for it."""
        while not self._backlog:
            self._pollers.append(self._timeline.pause())
            self._timeline.wait()
        noisy = self._noisy()
        taken: list[Message] = []
        while self._backlog and len(taken) < limit:
            group = min(
                self._backlog,
                key=lambda name: (
                    name in noisy,
                    self._in_flight[name] if name in noisy else 0,
                    self._backlog[name][0][0],
                ),
            )
            _, message = self._backlog[group].popleft()
            if not self._backlog[group]:
                del self._backlog[group]
            self._in_flight[group] += 1
            message.taken_at = self._timeline.now
            taken.append(message)
        if self._backlog and self._pollers:
            self._pollers.popleft()()
        return taken

    def done(self, message: Message) -> None:
        """Delete a message."""
        self._in_flight[message.group] -= 1
        self._processed.append((self._timeline.now, message.group, self._timeline.now - message.taken_at))

    def _noisy(self) -> set[str]:
        if not self._fair or len(self._backlog) < 2:
            return set()
        while self._processed and self._processed[0][0] < self._timeline.now - RECENT_US:
            self._processed.popleft()
        times: Counter[str] = Counter()
        for _, group, took in self._processed:
            times[group] += took
        flying, spent = self._in_flight.total() or 1, times.total() or 1
        return {
            group
            for group in self._backlog
            if (self._in_flight[group] >= IN_FLIGHT_MIN and self._in_flight[group] / flying > SHARE_MAX)
            or times[group] / spent > SHARE_MAX
        }


class Lanes:
    """The lane queues, as ports.HintQueue."""

    def __init__(self, timeline: Timeline, *, fair: bool) -> None:
        self.queues = {lane: FairQueue(timeline, fair=fair) for lane in Lane}
        self.sent = 0

    def send(self, hint: Hint, *, client_id: str, lane: Lane, delay_seconds: int = 0, trace: str | None = None) -> None:
        """Queue a hint in its lane."""
        assert 0 <= delay_seconds <= 900, "SQS delays a message by at most 900 seconds"
        self.sent += 1
        self.queues[lane].send(hint, client_id=client_id, delay_seconds=delay_seconds)


@dataclass(frozen=True)
class Provided:
    """A model as the catalogue has it, and what its provider really allows."""

    model: ModelInfo
    allowed: Limits
    burst_seconds: float = 1.0
    headers: bool = True
    outage: tuple[float, float] | None = None
    """From when to when, in seconds of the run, it answers 529."""

    def rate(self, dimension: str) -> float:
        """Units a second."""
        return (getattr(self.allowed, dimension) or float("inf")) / 60


def provided(name: str, *, requests: int, tokens: int, configured: float = 1.0, **more: Any) -> Provided:
    """A model with two limits a minute, configured as they are or wrongly by a factor."""
    known = Limits(requests=round(requests * configured), tokens=round(tokens * configured))
    return Provided(replace(MODEL, name=name, limits=known), Limits(requests=requests, tokens=tokens), **more)


@dataclass
class Told:
    """What a model's provider saw. Times are in seconds of the run."""

    calls: int = 0
    tokens: int = 0
    requests: int = 0
    ended_at: float = 0.0
    call_seconds: float = 0.0
    refused_at: list[float] = field(default_factory=list)
    failed_at: list[float] = field(default_factory=list)
    used: Counter[int] = field(default_factory=Counter)
    """Tokens by second."""


@dataclass(frozen=True)
class Shape:
    """What a job asks for, in the provider's tokens; each number is drawn from its range.

    headroom: max_tokens over the output, at most; None: left to the deployment's default of 1,024.
    """

    input_tokens: tuple[int, int] = (60, 140)
    output_tokens: tuple[int, int] = (20, 80)
    headroom: float | None = 1.5
    without_part: float = 0.0
    """So many leave max_tokens out all the same."""
    call_seconds: tuple[float, float] = (0.8, 1.2)


class BucketProvider:
    """The provider, as ports.Provider: refuses what exceeds an allowance, counts what it answers."""

    def __init__(self, timeline: Timeline, models: Mapping[str, Provided], told: Mapping[str, Told]) -> None:
        self._timeline = timeline
        self._models = models
        self._told = told
        self._began = timeline.now
        self._allowances = {
            name: Allowances(
                {
                    f"{dimension}_per_minute": float(limit)
                    for dimension in DIMENSIONS
                    if (limit := getattr(one.allowed, dimension))
                }
                | {"burst_seconds": one.burst_seconds},
                clock=lambda: timeline.now / 1e6,
            )
            for name, one in models.items()
        }
        self.started: dict[int, float] = {}

    @property
    def seconds(self) -> float:
        """Of the run."""
        return (self._timeline.now - self._began) / 1e6

    def cancel(self, handle: str) -> None:
        """Nothing goes on here."""

    def ask(
        self,
        question: Question,
        *,
        timeout_seconds: float,
        abandoned: Callable[[], bool],
        background: Background | None = None,
        said: Callable[[str], None] | None = None,
    ) -> Answer:
        """Answer after the time that the prompt asks for."""
        name = question.model.name
        one, told = self._models[name], self._told[name]
        number, output, took_ms = (int(word) for word in question.messages[0].content.split()[:3])
        asked = -(-question.input_bytes // 4)
        self._timeline.sleep(round(1000 * self._timeline.dice.uniform(*PROVIDER_MS)))
        seen = one.allowed if one.headers else None
        if one.outage is not None and one.outage[0] <= self.seconds < one.outage[1]:
            told.failed_at.append(self.seconds)
            self._timeline.sleep(50_000)
            raise Overloaded(seen=seen)
        refused = self._allowances[name].admit(name, {"requests": 1, "tokens": asked, "input_tokens": asked})
        if refused is not None:
            told.refused_at.append(self.seconds)
            raise RateLimited(retry_after_seconds=-(-refused[1] * 1000 // 1) / 1000, seen=seen)
        self.started[number] = self.seconds
        told.requests += 1
        told.used[int(self.seconds)] += asked
        self._timeline.sleep(took_ms * 1000)
        self._allowances[name].charge(name, {"tokens": output, "output_tokens": output})
        told.calls += 1
        told.tokens += asked + output
        told.used[int(self.seconds)] += output
        told.ended_at = self.seconds
        told.call_seconds += took_ms / 1000
        return Answer("x", "stop", name, "fake", Usage(asked, output), seen=seen)


class Crowd:
    """Workers by lane, models, and what came of it all."""

    def __init__(
        self,
        *models: Provided,
        workers: Mapping[Lane, int],
        seed: int = 0,
        fair: bool = True,
        default_max_tokens: int = 1024,
    ) -> None:
        self.dice = random.Random(seed)
        self.timeline = Timeline(self.dice)
        self.models = {one.model.name: one for one in models}
        self.told = {name: Told() for name in self.models}
        self.provider = BucketProvider(self.timeline, self.models, self.told)
        self.limits = MemoryLimits()
        self.store = LeanStore(self._ended)
        self.lanes = Lanes(self.timeline, fair=fair)
        self.journal = CountingJournal()
        self.accepted: dict[int, float] = {}
        self.ends: Counter[JobStatus] = Counter()
        self.codes: Counter[str] = Counter()
        self._chance = FakeChance(seed + 1)
        self._catalogue = MemoryCatalogue(*(one.model for one in models))
        self._front = self._house(VirtualClock(self.timeline), near=True)
        for lane, count in workers.items():
            for _ in range(count):
                self.timeline.spawn(partial(self._work, lane))

    def _house(self, clock: VirtualClock, *, near: bool = False) -> House:
        def distant(port: Any) -> Any:
            return port if near else Distant(port, self.timeline, TABLE_MS)

        any_clock: Any = clock
        any_journal: Any = self.journal
        return House(
            provider=self.provider,
            clock=any_clock,
            chance=self._chance,
            journal=any_journal,
            store=distant(self.store),
            hints=distant(self.lanes),
            limits=distant(self.limits),
            catalogue=self._catalogue,
            new_lock=partial(VirtualLock, self.timeline),  # a task that waits for a real one would wait for ever
        )

    # ── What happens ──────────────────────────────────────────────────────────────────────────────────────────────

    def enqueue(
        self, count: int, *, model: str, lane: Lane = Lane.STANDARD, client: str = "alice", shape: Shape | None = None
    ) -> range:
        """Accept jobs, now; their numbers."""
        shape = shape or Shape()
        first = len(self.accepted)
        for number in range(first, first + count):
            output = self.dice.randint(*shape.output_tokens)
            took_ms = round(1000 * self.dice.uniform(*shape.call_seconds))
            prompt = f"{number} {output} {took_ms} ".ljust(4 * self.dice.randint(*shape.input_tokens), "x")
            top = None if shape.headroom is None else max(16, round(output * self.dice.uniform(1.0, shape.headroom)))
            if self.dice.random() < shape.without_part:
                top = None
            self.accepted[number] = self.provider.seconds
            self._front.accept(
                client=Client(client, client), prompt=prompt, model=model, priority=lane.value, max_tokens=top,
                deadline_seconds=7 * 86_400,
            )  # fmt: skip
        return range(first, first + count)

    def at(self, second: float, action: Callable[[], Any]) -> None:
        """Let something happen in that second of the run."""
        self.timeline.at(self.provider._began + round(second * 1e6), action)

    def run(self, *, seconds_max: float, until: Callable[[], bool] | None = None) -> None:
        """Until that is so, or all jobs have ended; at most so long."""
        over = until or (lambda: not self.store.rows)
        self.timeline.run(lambda: self.provider.seconds > seconds_max or over())

    def _ended(self, row: Job) -> None:
        self.ends[row.status] += 1
        if row.error is not None:
            self.codes[row.error.code] += 1

    def _work(self, lane: Lane) -> None:
        house = self._house(VirtualClock(self.timeline, self.dice.randint(-SKEW_US, SKEW_US)))
        queue = self.lanes.queues[lane]
        while True:
            self.timeline.sleep(round(1000 * self.dice.uniform(*POLL_MS)))
            batch = queue.receive(BATCH)
            ends_at = self.timeline.now + round(INVOCATION_SECONDS * 1e6)
            left = [len(batch)]
            woken = self.timeline.pause()
            for message in batch:
                self.timeline.spawn(partial(self._run, house, message, ends_at, left, woken))
            self.timeline.spawn(partial(self._keep, house, left))
            self.timeline.wait()
            for message in batch:
                queue.done(message)

    def _run(self, house: House, message: Message, ends_at: Micros, left: list[int], woken: Callable[[], None]) -> None:
        house.execution.run(message.hint, lambda: (ends_at - self.timeline.now) / 1e6)
        left[0] -= 1
        if left[0] == 0:
            woken()

    def _keep(self, house: House, left: list[int]) -> None:
        self.timeline.sleep(LEASE_TICK_US)
        while left[0]:
            house.leases.tick()
            self.timeline.sleep(LEASE_TICK_US)

    # ── What came of it ───────────────────────────────────────────────────────────────────────────────────────────

    def utilisation(self, model: str) -> float:
        """The ideal time for what the provider counted over the time that it took."""
        one, told = self.models[model], self.told[model]
        by_tokens = told.tokens / one.rate("tokens") if one.allowed.tokens else 0.0
        by_requests = told.requests / one.rate("requests") if one.allowed.requests else 0.0
        ideal = max(by_tokens, by_requests) - one.burst_seconds + told.call_seconds / max(1, told.calls)
        return ideal / told.ended_at if told.ended_at else 0.0

    def waits(self, numbers: Iterable[int]) -> list[float]:
        """Seconds from acceptance to the start of the call, sorted."""
        return sorted(self.provider.started[number] - self.accepted[number] for number in numbers)

    @property
    def limiter_writes(self) -> float:
        """A job."""
        return self.limits.writes.total() / max(1, self.ends.total())

    def gauge(self, model: str) -> Gauge:
        """The model's row."""
        return self.limits.gauges[f"model#{model}"]


def percentile(values: Sequence[float], hundredths: int) -> float:
    """The value below which so many hundredths lie, between two of them in proportion."""
    return statistics.quantiles(values, n=100, method="inclusive")[hundredths - 1]


def since(began: EpochMs, now: EpochMs) -> float:
    """Seconds."""
    return (now - began) / 1000
