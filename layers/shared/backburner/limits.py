"""Provider limits as reservations of future slots: full speed without a refusal, from any number of workers.

For each limited dimension of a model (requests, tokens) a cursor says when the next unit is free. Reserving moves all
cursors on in one atomic add and so gives each caller a slot of his own; nothing is read first and then written. The add
carries the condition that no cursor lies further ahead than the lane's horizon, so that a backlog cannot book the
future away from more urgent work. A reservation that is never used leaks nothing: time passes it by. Those who find no
slot stand in their client's line, which tells them when to come back.

Source of the arithmetic: the generic cell rate algorithm (ITU-T I.371 annex A), whose theoretical arrival time is the
cursor here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from backburner.errors import PortUnavailable
from backburner.models import (
    DIMENSIONS,
    EpochMs,
    Gauge,
    Lane,
    Later,
    Learned,
    Limits,
    Micros,
    ModelInfo,
    Question,
    Slot,
    Usage,
    Vacancy,
)
from backburner.ports import Chance, Clock, Journal, LimitStore, Stale

HORIZON_MS: Mapping[Lane, int] = {Lane.INTERACTIVE: 6_000, Lane.STANDARD: 1_000, Lane.BULK: 500}
"""How far ahead a lane may reserve: so long does a more urgent job wait behind it at most."""
NEWCOMER, IN_TURN, BEFORE_TURN = 1.0, 0.3, 0.0
"""The part of its lane's horizon that a job may use. At first that is IN_TURN, as always for a client with a long line,
who leaves the rest to the others; those of its jobs whose turn has not come take what would go unused."""
SPARED_PART = 0.25
"""Of a burst, what a job before its turn leaves to the others; but a model that is idle calls for anybody."""
UNSURE_STAY_MS = 10_000
"""While nobody knows what a call takes, a line would have no pace: slots are waited for until calls teach it."""
SHORT_LINE_MS = 3_000
"""A line that is over so soon makes nobody a client with a backlog."""
NEAR_MS = 2_000
"""A turn so near is waited for in the worker, and in turn a slot."""
NEAR_AT_FIRST_MS = 200
"""A job that has just got its place waits for a turn so near only: a batch ends with its last job, and its worker takes
nobody else's until then. By the time it returns, queue and line know whose turn it is."""
STAY_MS = 1_000
"""A job further back stays so long all the same: what a backlog gives faster costs writes, and serves nobody sooner."""
PACE = 0.95
"""A line goes a little faster than the model: who comes in vain costs less than a provider that waits."""
GATHER_MS = 20
"""Whoever comes to the end of a line so soon after another shares its write."""
LINE_SECONDS = 7 * 86_400
"""After so long without another arrival a line is forgotten."""
MINUTE: Micros = 60_000_000
PROBES = "probes"
"""A dimension of its own: the pause between calls to a provider in trouble."""
BYTES_PER_TOKEN: Mapping[str, float] = {"openai": 4.0, "anthropic": 3.5}
"""Of English text, by the providers' own rules of thumb; corrected by what is learned."""
SAMPLES_MIN = 10
"""With fewer, expectations are guesses."""
SAMPLES_MAX = 50
"""What is learned is the mean of about so many calls, the recent ones weighing more."""
RATIO_MIN, RATIO_MAX = 0.01, 8.0
SETTLED_PART = 0.1
"""A smaller difference between expectation and usage waits for the next one: it is not worth a write."""
HOLD_MS = 1_000
"""After a refusal that does not say how long."""
SHARE_CUT, SHARE_GAIN, SHARE_MIN = 0.85, 1.1, 0.05
REFUSALS_DENSE_MS = 6_000
SHARE_CUT_SLIGHTLY = 0.97
"""After refusals further apart: calls that are large beside the provider's own burst meet one now and then."""
REFUSALS_APART_MS = (2_000, 30_000)
"""Refusals closer together are one event; further apart, chance. Between the two the limits are not what we think."""
RECOVERY_MS = 30_000
STRIKES_FREE, STRIKES_MAX = 5, 11
STRIKE_MS = 1_000
"""One strike a second at most: a hundred calls that fail together are one event."""
PAUSE: Micros = 1_000_000
PAUSE_MAX: Micros = 60_000_000
VACANT_MAX = 20
FRESH_MS = 1_000
"""A gauge seen so long ago is looked at again before a sleeper acts on it."""
CONTENDED_FRESH_MS = 20
"""Where many wait for the same limit, a look before each try: a refused write costs ten times as much as a read."""
UNLIMITED_FRESH_MS = 5_000
SPREAD_MS = 50
MISSES_MAX = 10
"""More make the spread no wider, since the horizon bounds it; a process may see its limit full for hours."""
TRIES = 8


def limit_of(model: ModelInfo, gauge: Gauge, dimension: str) -> float | None:
    """What may be used in a minute: an operator's or else the catalogue's limit, or the provider's if that is lower.

    Times the share. None if nobody knows of any.
    """
    configured = getattr(gauge.limits, dimension) or getattr(model.limits, dimension)
    seen = getattr(gauge.seen, dimension)
    known = [limit for limit in (configured, seen) if limit]
    return min(known) * gauge.share if known else None


def is_unsure(gauge: Gauge, model: ModelInfo) -> bool:
    """Whether what a call takes is a guess: then nothing is reserved ahead, since every error adds up."""
    by_tokens = any(limit_of(model, gauge, dimension) for dimension in DIMENSIONS[1:])
    return by_tokens and gauge.learned.samples < SAMPLES_MIN


def pause_of(gauge: Gauge) -> Micros:
    """The pause between calls to a provider in trouble: 1, 2, 4 … 60 seconds; 0 while all is well."""
    beyond = gauge.strikes - STRIKES_FREE
    return 0 if beyond < 0 else min(PAUSE * 2**beyond, PAUSE_MAX)


def burst_of(gauge: Gauge, dimension: str) -> Micros:
    """How far ahead of an even pace a dimension may run."""
    return 0 if dimension == PROBES else gauge.burst_ms * 1_000


def first_guess(question: Question) -> tuple[float, float]:
    """Input and output tokens as the request's size suggests, before anything is learned."""
    return question.input_bytes / BYTES_PER_TOKEN.get(question.model.provider, 4.0) + 8, float(question.max_tokens)


def costs_of(model: ModelInfo, gauge: Gauge, input_tokens: float, output_tokens: float) -> dict[str, Micros]:
    """Microseconds that a call takes from each limited dimension."""
    units = {
        "requests": 1.0,
        "tokens": input_tokens + output_tokens,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
    }
    limits = {dimension: limit_of(model, gauge, dimension) for dimension in DIMENSIONS}
    costs = {dimension: round(units[dimension] * MINUTE / limit) for dimension, limit in limits.items() if limit}
    pause = pause_of(gauge)
    return {**costs, PROBES: pause} if pause else costs


def counted_input(model: ModelInfo, usage: Usage) -> int:
    """Input tokens as the provider counts them against its limits."""
    return usage.input_tokens if model.cached_count else usage.input_tokens - usage.cached_tokens


@dataclass(eq=False)
class _Wish:
    """A question in this process that waits for its turn at the gauge."""

    question: Question
    got: Slot | Later | None = None


@dataclass
class _Turn:
    """One at a time in this process; whoever is at the head reserves for all who wait behind him, in one write.

    part: of the lane's horizon, that these may use.
    not_before: when the next try makes sense; misses: tries since the last success.
    """

    lane: Lane
    part: float
    lock: AbstractContextManager[Any]
    wishes: list[_Wish] = field(default_factory=list)
    not_before: EpochMs = 0
    misses: int = 0


@dataclass(eq=False)
class _Arrival:
    """A job in this process that goes to the end of its client's line. step: microseconds until the next one's turn."""

    after: EpochMs
    step: Micros
    place: EpochMs | None = None


@dataclass
class _Line:
    """A client's line for a model, as far as this process knows. Those who come together are lined up in one write.

    end: it reaches at least so far; seen_at: when that was looked up.
    """

    lock: AbstractContextManager[Any]
    arrivals: list[_Arrival] = field(default_factory=list)
    end: EpochMs = 0
    seen_at: EpochMs = 0


class SlotLimiter:
    """The limiter, as ports.Limiter. Thread-safe. `new_lock` is another's in simulated time."""

    def __init__(
        self,
        store: LimitStore,
        clock: Clock,
        chance: Chance,
        journal: Journal,
        new_lock: Callable[[], AbstractContextManager[Any]] = threading.Lock,
    ) -> None:
        self._store = store
        self._clock = clock
        self._chance = chance
        self._journal = journal
        self._known: dict[str, tuple[Gauge, EpochMs]] = {}
        self._new_lock = new_lock
        self._turns: dict[tuple[str, Lane, float], _Turn] = {}
        self._lines: dict[str, _Line] = {}
        self._owed: dict[str, Mapping[str, Micros]] = {}
        self._lock = threading.Lock()

    # ── Reserving ─────────────────────────────────────────────────────────────────────────────────────────────────

    def take(
        self, question: Question, *, lane: Lane, client_id: str, place: EpochMs | None, patience_ms: int
    ) -> Slot | Later:
        """Reserve a slot, now or once the job's turn in its client's line has come; or tell when that is.

        A line is formed only where slots are short. Near turns are waited for here, for as long as patience lasts.
        """
        model, now = question.model, self._clock.now()
        gives_up_at = now + patience_ms
        line = f"line#{model.name}#{lane}#{client_id}"
        if place is None:
            got = self._first_try(question, lane, line, patience_ms)
        elif place > now + NEAR_MS:  # only a look whether there is more room than was thought
            got = self._wait(question, lane, BEFORE_TURN, 0)
        else:
            got = Later(place, place)
        near_ms = NEAR_AT_FIRST_MS if place is None else NEAR_MS
        while isinstance(got, Later):
            place = place or self._line_up(question, line, got.place)
            got = Later(place, max(place, got.start_at))
            if place > min(self._clock.now() + near_ms, gives_up_at):
                return got
            self._clock.sleep(max(0, place - self._clock.now()) / 1000)
            left_ms = max(0, gives_up_at - self._clock.now())
            part = NEWCOMER if self._is_short(line) else IN_TURN
            got = self._wait(question, lane, part, min(NEAR_MS, left_ms))
            place = None
        return got

    def _first_try(self, question: Question, lane: Lane, line: str, patience_ms: int) -> Slot | Later:
        """A slot for a job without a place, or from when on its client may line up for one."""
        model = question.model
        if is_unsure(self._gauge(model), model) and is_unsure(self._gauge(model, fresh_ms=FRESH_MS), model):
            return self._wait(question, lane, NEWCOMER, min(patience_ms, UNSURE_STAY_MS))  # a line would have no pace
        if self._known_end(line) <= self._clock.now() + SHORT_LINE_MS:
            got = self._wait(question, lane, IN_TURN, 0)
            if isinstance(got, Slot) or self._is_short(line):
                return got
        return self._wait(question, lane, BEFORE_TURN, min(patience_ms, STAY_MS))

    def _wait(self, question: Question, lane: Lane, part: float, patience_ms: int) -> Slot | Later:
        """A slot within that part of the lane's horizon, as soon as one comes within it; patience has an end."""
        wish = _Wish(question)
        with self._lock:
            turn = self._turns.setdefault((question.model.name, lane, part), _Turn(lane, part, self._new_lock()))
            turn.wishes.append(wish)
        gives_up_at = self._clock.now() + patience_ms
        try:
            while True:
                with turn.lock:  # never while asleep: who was granted a slot behind the sleeper would miss it
                    if wish.got is None:
                        self._advance(question.model, turn, wish, gives_up_at)
                    if wish.got is not None:
                        return wish.got
                    pause_ms = turn.not_before - self._clock.now()
                self._clock.sleep(max(0, pause_ms) / 1000)
        finally:
            with self._lock:
                turn.wishes = [other for other in turn.wishes if other.got is None and other is not wish]

    def _advance(self, model: ModelInfo, turn: _Turn, wish: _Wish, gives_up_at: EpochMs) -> None:
        """One try for everybody in the turn if it is time for one; the end of patience if the next comes too late."""
        now = self._clock.now()
        if turn.not_before <= now:
            with self._lock:
                wishes = [other for other in turn.wishes if other.got is None]
            refusal = self._grant(model, turn, wishes)
            if refusal is None:
                turn.not_before, turn.misses = 0, 0
            elif wish.got is None:
                turn.misses = min(turn.misses + 1, MISSES_MAX)
                # Spread the processes that wait for the same limit, the wider the more of them there seem to be.
                spread = min(HORIZON_MS[turn.lane] / 2, SPREAD_MS * 2.0**turn.misses)
                turn.not_before = max(refusal.place, now) + round(self._chance.uniform(1, spread))
                if turn.not_before > gives_up_at:
                    wish.got = Later(turn.not_before, refusal.start_at)
        elif turn.not_before > gives_up_at:
            wish.got = Later(turn.not_before, turn.not_before + HORIZON_MS[turn.lane])

    def _grant(self, model: ModelInfo, turn: _Turn, wishes: Sequence[_Wish]) -> Later | None:
        """Reserve for as many wishes as fit, the first first, in one write. What the first is told if none fits."""
        fresh_ms = (CONTENDED_FRESH_MS if turn.misses else None) if self._is_limited(model) else UNLIMITED_FRESH_MS
        gauge = self._gauge(model, fresh_ms=fresh_ms)
        for _ in range(TRIES):
            now = self._clock.now()
            reach_ms = 0 if is_unsure(gauge, model) else round(HORIZON_MS[turn.lane] * turn.part)
            horizon = (now + reach_ms) * 1000
            floor = max(now, gauge.held_until + gauge.burst_ms if gauge.held_until else 0) * 1000
            bills = [self._bill(gauge, wish.question) for wish in wishes]
            cursors = {name: max(gauge.cursors.get(name, 0), floor) for bill in bills for name in bill.costs}
            starts = _starts(gauge, cursors, bills, gauge.held_until)
            if turn.part == BEFORE_TURN:
                idle = _starts(gauge, dict.fromkeys(cursors, now * 1000), bills[:1])[0]
                horizon = max(idle, horizon - round(SPARED_PART * gauge.burst_ms * 1000))
            try:
                if len(bills) == 1 and (vacancy := self._fitting(gauge, bills[0], now, turn.lane)) is not None:
                    wishes[0].got = self._occupy(gauge, vacancy, bills[0], now)
                    return None
                fit = sum(1 for start in starts if start <= horizon)
                behind = any(gauge.cursors.get(name, 0) < floor for name in cursors)
                if (fit == 0 and self._is_old(model)) or (behind and self._is_old(model, CONTENDED_FRESH_MS)):
                    gauge = self._gauge(model, fresh_ms=0)
                    continue
                if fit == 0:
                    return Later(now + -(-(starts[0] - horizon) // 1000), -(-starts[0] // 1000))
                starts = self._reserve(gauge, bills[:fit], starts[:fit], floor=floor, horizon=horizon)
            except Stale as stale:
                gauge = self._learn(model, stale.current)
                continue
            for wish, bill, start in zip(wishes, bills, starts, strict=False):
                wish.got = replace(bill, start_at=max(now, -(-start // 1000)))
            return None
        return Later(self._clock.now(), self._clock.now())  # much contended: again in a moment

    def _reserve(
        self, gauge: Gauge, bills: Sequence[Slot], starts: list[Micros], *, floor: Micros, horizon: Micros
    ) -> list[Micros]:
        """Make the bills' reservations and return their starts. Raises Stale if the gauge is not what was thought."""
        total: dict[str, Micros] = {}
        for bill in bills:
            for name, cost in bill.costs.items():
                total[name] = total.get(name, 0) + cost
        if not total:  # nothing limits this model
            return starts
        if gauge.revision:
            spare = horizon - starts[-1]
            ceilings = {name: max(gauge.cursors.get(name, 0), floor) + spare for name in total}
            new = self._store.add(gauge, total, floor=floor, ceilings=ceilings)
            starts = _starts(new, {name: new.cursors[name] - cost for name, cost in total.items()}, bills)
        else:
            new = self._write(gauge, replace(gauge, cursors={name: floor + cost for name, cost in total.items()}))
        self._learn_name(new.name, new)
        return starts

    @staticmethod
    def _fitting(gauge: Gauge, bill: Slot, now: EpochMs, lane: Lane) -> Vacancy | None:
        """A slot that somebody gave back and that the bill fits into."""
        for vacancy in gauge.vacant:
            soon = max(now, gauge.held_until) <= vacancy.start_at <= now + HORIZON_MS[lane]
            if soon and all(cost <= vacancy.costs.get(name, 0) for name, cost in bill.costs.items()):
                return vacancy
        return None

    def _occupy(self, gauge: Gauge, vacancy: Vacancy, bill: Slot, now: EpochMs) -> Slot:
        left = tuple(other for other in gauge.vacant if other is not vacancy and other.start_at > now)
        self._change(gauge, replace(gauge, vacant=left))
        return replace(bill, start_at=vacancy.start_at)

    def _bill(self, gauge: Gauge, question: Question) -> Slot:
        """What the question is expected to take, as a slot without its time."""
        guess, learned = first_guess(question), gauge.learned
        expected = (guess[0] * learned.input_ratio, _output(learned, guess[1]))
        costs = costs_of(question.model, gauge, *expected)
        sure = learned.samples >= SAMPLES_MIN
        return Slot(question.model.name, 0, round(expected[0]), round(expected[1]), costs, guess, sure)

    def _known_end(self, line: str) -> EpochMs:
        """Until when the client's line is known to reach; it may be longer."""
        with self._lock:
            known = self._lines.get(line)
        return known.end if known else 0

    def _is_short(self, line: str) -> bool:
        """Whether all of the client's jobs that wait will have had their turn soon. Looked up if it is not known."""
        now = self._clock.now()
        if self._known_end(line) > now + SHORT_LINE_MS:
            return False
        with self._lock:
            known = self._lines.setdefault(line, _Line(self._new_lock()))
        if known.seen_at + FRESH_MS <= now:
            known.end, known.seen_at = max(known.end, self._store.end_of(line) // 1000), now
        return known.end <= now + SHORT_LINE_MS

    def _line_up(self, question: Question, name: str, after: EpochMs) -> EpochMs:
        """A place at the end of the line, which goes at the model's pace, so that those put off return one by one."""
        costs = self._bill(self._gauge(question.model), question).costs
        step = round(PACE * max((cost for limit, cost in costs.items() if limit != PROBES), default=0))
        arrival = _Arrival(after, step)
        with self._lock:
            line = self._lines.setdefault(name, _Line(self._new_lock()))
            line.arrivals.append(arrival)
        try:
            with line.lock:
                if arrival.place is None:
                    self._clock.sleep(GATHER_MS / 1000)
                    with self._lock:
                        arrivals = tuple(line.arrivals)
                    start, total = min(other.after for other in arrivals), sum(other.step for other in arrivals)
                    at = self._store.advance(name, start * 1000, total, self._clock.now() // 1000 + LINE_SECONDS)
                    for other in arrivals:
                        other.place, at = max(other.after, at // 1000), at + other.step
                    line.end, line.seen_at = at // 1000, self._clock.now()
                return arrival.place or after
        finally:
            with self._lock:
                line.arrivals = [other for other in line.arrivals if other.place is None and other is not arrival]

    def is_open(self, slot: Slot) -> bool:
        """Whether the provider has not asked for silence since the slot was reserved."""
        with self._lock:
            known = self._known.get(slot.model)
        if known is None or self._clock.now() - known[1] > FRESH_MS:
            current = self._store.read(_name(slot.model))
            gauge = self._learn_name(_name(slot.model), current) if current is not None else None
        else:
            gauge = known[0]
        return gauge is None or gauge.held_until <= slot.start_at

    def give_back(self, slot: Slot) -> None:
        """Leave a slot whose time has not come to somebody else."""
        with suppress(PortUnavailable):  # time passes it by, then
            gauge = self._store.read(_name(slot.model))
            for _ in range(TRIES):
                now = self._clock.now()
                if gauge is None or not slot.costs or slot.start_at <= now or slot.start_at < gauge.held_until:
                    return
                kept = tuple(vacancy for vacancy in gauge.vacant if vacancy.start_at > now)[: VACANT_MAX - 1]
                try:
                    self._change(gauge, replace(gauge, vacant=(*kept, Vacancy(slot.start_at, slot.costs))))
                    return
                except Stale as stale:
                    gauge = stale.current

    def estimate(self, question: Question, *, ahead: int, at_once: int) -> EpochMs:
        """When a job may start behind `ahead` others like it: they go at the limit's pace or as workers come free."""
        now = self._clock.now()
        gauge = self._gauge(question.model, fresh_ms=FRESH_MS)
        costs = self._bill(gauge, question).costs
        pace = max([*costs.values(), round(1000 * gauge.learned.call_ms / max(at_once, 1))])
        ends = [gauge.cursors.get(name, 0) - burst_of(gauge, name) for name in costs]
        return max([now, gauge.held_until, *(end // 1000 for end in ends)]) + ahead * pace // 1000

    # ── Learning ──────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, model: ModelInfo, slot: Slot, usage: Usage, *, call_ms: int, seen: Limits | None) -> None:
        """Put the actual usage in the place of the expected one. What cannot be noted now is lost, and harmless."""
        with suppress(PortUnavailable):
            gauge = self._gauge(model)
            gauge = self._see(model, gauge, seen)
            if gauge.strikes or gauge.share < 1:
                self._revise(model, lambda old: _well(old, self._clock.now()))
            if not slot.costs:
                return  # nothing limits this model
            used = (counted_input(model, usage), usage.output_tokens)
            actual = costs_of(model, gauge, *used)
            differences = {name: actual.get(name, cost) - cost for name, cost in slot.costs.items() if name != PROBES}
            if not slot.sure:  # much too high a guess left the provider idle, and that time does not come back
                now = self._clock.now() * 1000
                differences = {
                    name: max(difference, min(0, now + burst_of(gauge, name) - gauge.cursors.get(name, 0)))
                    for name, difference in differences.items()
                }
            with self._lock:
                owed = self._owed.pop(gauge.name, {})
            differences = {name: difference + owed.get(name, 0) for name, difference in differences.items()}
            differences = {name: difference for name, difference in differences.items() if difference}
            learned = None if usage.estimated else _taught(gauge.learned, slot, used, call_ms)
            small = all(abs(difference) <= SETTLED_PART * slot.costs[name] for name, difference in differences.items())
            if small and (learned is None or gauge.learned.samples >= SAMPLES_MAX):
                with self._lock:
                    self._owed[gauge.name] = differences
                return
            with suppress(Stale):
                self._learn(model, self._store.adjust(gauge.name, differences, learned))

    def refused(self, model: ModelInfo, retry_after_seconds: float | None, *, seen: Limits | None) -> None:
        """Hold the model, and only it, as long as the provider asks; use less of its limits if it refuses on."""
        now = self._clock.now()
        hold_ms = HOLD_MS if retry_after_seconds is None else round(1000 * retry_after_seconds)
        with suppress(PortUnavailable):  # the next refusal says the same
            self._see(model, self._gauge(model), seen)
            self._revise(model, lambda gauge: _held(gauge, now, now + hold_ms))
        self._journal.note("model_held", model=model.name, hold_ms=hold_ms)

    def failed(self, model: ModelInfo) -> None:
        """Count a strike; from the fifth on, calls become probes with growing pauses between."""
        now = self._clock.now()
        with suppress(PortUnavailable):  # the next failure says the same
            gauge = self._revise(model, lambda gauge: _struck(gauge, now))
            if pause_of(gauge):
                self._journal.note("model_slowed", model=model.name, pause_ms=pause_of(gauge) // 1000)

    def _see(self, model: ModelInfo, gauge: Gauge, seen: Limits | None) -> Gauge:
        """Follow the provider's own word on its limits where it is lower; note where it differs."""
        if seen is None or seen == Limits() or seen == gauge.seen:
            return gauge
        for dimension in DIMENSIONS:
            said = getattr(seen, dimension)
            configured = getattr(gauge.limits, dimension) or getattr(model.limits, dimension)
            if said and configured and said != configured:
                self._journal.note(
                    "limit_differs", model=model.name, dimension=dimension, configured=configured, provider_limit=said
                )
        return self._revise(model, lambda old: old if old.seen == seen else replace(old, seen=seen))

    # ── The row ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _is_limited(self, model: ModelInfo) -> bool:
        with self._lock:
            known = self._known.get(model.name)
        gauge = known[0] if known else Gauge(_name(model.name))
        return any(limit_of(model, gauge, dimension) for dimension in DIMENSIONS)

    def _is_old(self, model: ModelInfo, fresh_ms: int = FRESH_MS) -> bool:
        """Whether what is known of the gauge may be too old to be put off by."""
        with self._lock:
            known = self._known.get(model.name)
        return known is None or self._clock.now() - known[1] > fresh_ms

    def _gauge(self, model: ModelInfo, *, fresh_ms: int | None = None) -> Gauge:
        """The gauge as last seen, or looked up if that is too long ago; an empty one if there is none."""
        with self._lock:
            known = self._known.get(model.name)
        if known is not None and (fresh_ms is None or self._clock.now() - known[1] <= fresh_ms):
            return known[0]
        return self._learn(model, self._store.read(_name(model.name)))

    def _learn(self, model: ModelInfo, gauge: Gauge | None) -> Gauge:
        return self._learn_name(_name(model.name), gauge)

    def _learn_name(self, name: str, gauge: Gauge | None) -> Gauge:
        current = gauge or Gauge(name)
        with self._lock:
            self._known[name.removeprefix("model#")] = (current, self._clock.now())
        return current

    def _write(self, old: Gauge, new: Gauge) -> Gauge:
        """Write a gauge over the one that was read; the first write makes the row. Raises Stale.

        Revisions begin with the clock, so that those of a row made anew are none that somebody still remembers.
        """
        if old.revision == 0:
            return self._store.replace(None, replace(new, revision=self._clock.now()))
        return self._store.replace(old, new)

    def _change(self, old: Gauge, new: Gauge) -> Gauge:
        """Write a change that others must learn of. Raises Stale."""
        return self._learn_name(old.name, self._write(old, replace(new, revision=old.revision + 1)))

    def _revise(self, model: ModelInfo, change: Callable[[Gauge], Gauge]) -> Gauge:
        """Change what stands there, however often somebody is faster; give up after some tries."""
        gauge = self._gauge(model)
        for _ in range(TRIES):
            new = change(gauge)
            if new == gauge:
                return gauge
            try:
                return self._change(gauge, new)
            except Stale as stale:
                gauge = self._learn(model, stale.current)
        return gauge


def _name(model: str) -> str:
    return f"model#{model}"


def _starts(
    gauge: Gauge, cursors: Mapping[str, Micros], bills: Sequence[Slot], not_before: EpochMs = 0
) -> list[Micros]:
    """When each of the bills may start if they are reserved one after the other.

    A call may start once its cost, or a whole burst if that is less, has come free in every dimension.
    """
    at, starts = dict(cursors), []
    for bill in bills:
        bursts = {name: burst_of(gauge, name) for name in bill.costs}
        free = (at[name] + min(cost, bursts[name]) - bursts[name] for name, cost in bill.costs.items())
        starts.append(max(free, default=not_before * 1000))
        for name, cost in bill.costs.items():
            at[name] += cost
    return starts


def _output(learned: Learned, max_tokens: float) -> float:
    """The output to expect. A factor on `max_tokens` would not do: some clients set it closely, others not at all."""
    return max_tokens if learned.output_tokens is None else min(max_tokens, learned.output_tokens)


def _taught(learned: Learned, slot: Slot, used: tuple[int, int], call_ms: int) -> Learned:
    """What one more call teaches, the recent ones weighing more; so that expectations are right in their sum."""
    samples = min(learned.samples + 1, SAMPLES_MAX)
    weight = 1 / samples
    asked, max_tokens = slot.guess
    ratio = min(max(used[0] / asked, RATIO_MIN), RATIO_MAX) if asked else learned.input_ratio
    missed = used[1] - _output(learned, max_tokens)
    output = used[1] if learned.output_tokens is None else learned.output_tokens + weight * missed
    return Learned(
        input_ratio=learned.input_ratio + weight * (ratio - learned.input_ratio),
        output_tokens=max(1.0, output),
        call_ms=learned.call_ms + weight * (call_ms - learned.call_ms),
        samples=samples,
    )


def _held(gauge: Gauge, now: EpochMs, until: EpochMs) -> Gauge:
    since = now - gauge.refused_at
    again = REFUSALS_APART_MS[0] <= since <= REFUSALS_APART_MS[1]
    share, share_at = gauge.share, gauge.share_at
    if again:
        cut = SHARE_CUT if since <= REFUSALS_DENSE_MS else SHARE_CUT_SLIGHTLY
        share, share_at = max(SHARE_MIN, share * cut), now
    refused_at = now if since >= REFUSALS_APART_MS[0] else gauge.refused_at
    held_until = max(gauge.held_until, until)
    return replace(gauge, held_until=held_until, refused_at=refused_at, share=share, share_at=share_at)


def _struck(gauge: Gauge, now: EpochMs) -> Gauge:
    if now - gauge.struck_at < STRIKE_MS:
        return gauge
    return replace(gauge, strikes=min(gauge.strikes + 1, STRIKES_MAX), struck_at=now)


def _well(gauge: Gauge, now: EpochMs) -> Gauge:
    """An answer: the provider recovers, and so does the use of its limits."""
    if gauge.strikes and now - gauge.struck_at >= STRIKE_MS:
        gauge = replace(gauge, strikes=gauge.strikes - 1, struck_at=now)
    if gauge.share < 1 and now - max(gauge.share_at, gauge.refused_at) >= RECOVERY_MS:
        gauge = replace(gauge, share=min(1.0, gauge.share * SHARE_GAIN), share_at=now)
    return gauge
