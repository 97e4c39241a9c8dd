"""Some processes' limiters at one table, whose operations cross each other as a schedule says: for property tests."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from backburner.limits import FRESH_MS, HORIZON_MS, SAMPLES_MAX, SlotLimiter
from backburner.models import EpochMs, Gauge, Lane, Learned, Limits, Message, Micros, ModelInfo, Question, Slot, Usage
from backburner.ports import LimitStore
from tests.fakes.memory import MODEL, FakeChance, FakeClock, MemoryJournal

PROCESSES = 3
KINDS = ("call", "settle", "give back", "refuse", "fail", "lose", "pass")
COST: Micros = 1_000_000
"""Of a request, at 60 a minute: the scarcer of the two, so that any slot too many shows."""

SURE = Learned(1.0, 100.0, 700, SAMPLES_MAX)

type Step = tuple[str, int, int]
"""What is done, by which process, and a number between 0 and 100 that says the rest."""


def of_kinds(kinds: frozenset[str]) -> st.SearchStrategy[list[Step]]:
    """Schedules of these kinds of steps, and reservations."""
    step = st.tuples(
        st.sampled_from(["take"] * 2 * max(1, len(kinds)) + sorted(kinds)),
        st.integers(0, PROCESSES - 1),
        st.integers(0, 100),
    )
    return st.lists(step, min_size=20, max_size=120)


schedules = st.frozensets(st.sampled_from(KINDS), max_size=4).flatmap(of_kinds)
"""Of a few kinds of steps each, since many kinds together keep one another from going far."""


class Crossed:
    """A store before each of whose writes somebody else may do something."""

    def __init__(self, store: LimitStore, meddle: Callable[[], None]) -> None:
        self._store = store
        self._meddle = meddle

    def __getattr__(self, name: str) -> Any:
        if name != "read":
            self._meddle()
        return getattr(self._store, name)


@dataclass(frozen=True)
class Hold:
    """The provider asked for silence."""

    at: EpochMs
    until: EpochMs


class Crossing:
    """Plays a schedule. Each step may fall between the look at the table and the write of an earlier one.

    granted: slots that were reserved and not given back; called: those whose call was made.
    """

    def __init__(self, store: LimitStore, model_name: str, schedule: Sequence[Step], *, learned: Learned) -> None:
        self.clock = FakeClock()
        self.store = store
        self.model: ModelInfo = replace(MODEL, name=model_name, limits=Limits(requests=60, tokens=600_000))
        self.granted: list[Slot] = []
        self.called: list[Slot] = []
        self.holds: list[Hold] = []
        self.settled: list[tuple[Slot, Usage]] = []
        self._open: list[Slot] = []
        self._answered: list[Slot] = []
        self._steps = deque(schedule)
        self._busy: list[int] = []
        crossed: Any = Crossed(store, self._meddle)
        self.limiters = [
            SlotLimiter(crossed, self.clock, FakeChance(number), MemoryJournal()) for number in range(PROCESSES)
        ]
        if learned.samples:
            store.replace(None, Gauge(f"model#{model_name}", revision=1, learned=learned))

    def play(self) -> None:
        """All steps."""
        while self._steps:
            self._do(*self._steps.popleft())

    def _meddle(self) -> None:
        """The next step comes in between if its number is odd."""
        if self._steps and self._steps[0][2] % 2:
            self._do(*self._steps.popleft())

    def _do(self, kind: str, who: int, number: int) -> None:
        if who in self._busy:
            return
        self._busy.append(who)
        try:
            getattr(self, "_" + kind.replace(" ", "_"))(self.limiters[who], number)
        finally:
            self._busy.pop()

    def question(self, number: int) -> Question:
        """Of 50 to 250 tokens."""
        return Question(self.model, (Message(role="user", content="x" * (4 * number + 1)),), None, 50 + number)

    def _take(self, limiter: SlotLimiter, number: int) -> None:
        lane = list(Lane)[number % 3]
        got = limiter.take(self.question(number), lane=lane, client_id=f"c{number % 2}", place=None, patience_ms=0)
        if isinstance(got, Slot):
            assert got.start_at <= self.clock.now() + HORIZON_MS[lane]
            self.granted.append(got)
            self._open.append(got)

    def _call(self, limiter: SlotLimiter, number: int) -> None:
        """By whoever has the job by now."""
        if self._open:
            slot = self._open.pop(number % len(self._open))
            self.clock.time = max(self.clock.time, slot.start_at)
            if limiter.is_open(slot):
                self.called.append(slot)
                self._answered.append(slot)

    def _settle(self, limiter: SlotLimiter, number: int) -> None:
        if self._answered:
            slot = self._answered.pop(0)
            usage = Usage(number, 2 * number)
            self.settled.append((slot, usage))
            limiter.settle(self.model, slot, usage, call_ms=1, seen=None)

    def _give_back(self, limiter: SlotLimiter, number: int) -> None:
        if self._open:
            slot = self._open.pop(number % len(self._open))
            self.granted.remove(slot)
            limiter.give_back(slot)

    def _lose(self, _: SlotLimiter, number: int) -> None:
        """A worker dies with its slot."""
        if self._open:
            self._open.pop(number % len(self._open))

    def _refuse(self, limiter: SlotLimiter, number: int) -> None:
        now = self.clock.now()
        limiter.refused(self.model, number / 10, seen=None)
        self.holds.append(Hold(now, now + number * 100))

    def _fail(self, limiter: SlotLimiter, _: int) -> None:
        limiter.failed(self.model)

    def _pass(self, _: SlotLimiter, number: int) -> None:
        self.clock.time += number * 20

    # ── What must hold ────────────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """No limit was exceeded, no hold broken, and nothing stays taken."""
        self._check_pace()
        self._check_holds()
        self._check_that_time_frees_everything()

    def _check_pace(self) -> None:
        """Of the slots between any two instants there are no more than the limit and one burst allow."""
        starts, burst_ms = sorted(slot.start_at for slot in self.granted), Gauge("g").burst_ms
        for (first, start), (last, end) in itertools.combinations(enumerate(starts), 2):
            assert (last - first) * COST <= 1000 * (end - start + burst_ms + 1)  # starts are rounded up to milliseconds

    def _check_holds(self) -> None:
        """No call begins while the provider wants silence, but for the second that the news may take."""
        for slot, hold in itertools.product(self.called, self.holds):
            assert not hold.at + FRESH_MS < slot.start_at < hold.until

    def _check_that_time_frees_everything(self) -> None:
        """Once all that was reserved has passed, the next call may begin at once, whichever process asks."""
        gauge = self.store.read(f"model#{self.model.name}") or Gauge("g")
        ends = [end // 1000 for end in gauge.cursors.values()]
        self.clock.time = max([self.clock.time, gauge.held_until, *ends])
        for limiter in self.limiters:
            self.clock.time += 61_000  # longer than the pause between probes
            got = limiter.take(self.question(1), lane=Lane.BULK, client_id="late", place=None, patience_ms=0)
            assert isinstance(got, Slot)
            assert got.start_at == self.clock.now()
