"""Provider limits: slots, horizons, holds, and what is learned. One second costs are used: 60 a minute."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise

import pytest

from backburner import limits
from backburner.errors import PortUnavailable
from backburner.limits import (
    RECOVERY_MS,
    SAMPLES_MAX,
    SAMPLES_MIN,
    STRIKES_FREE,
    SlotLimiter,
    costs_of,
    first_guess,
    limit_of,
    pause_of,
)
from backburner.models import Gauge, Lane, Later, Learned, Limits, Message, ModelInfo, Question, Slot, Usage
from tests.fakes.memory import MODEL, START, FakeChance, FakeClock, MemoryJournal, MemoryLimits

LINE = "line#m-1#bulk#a"
ONE_A_SECOND = replace(MODEL, limits=Limits(requests=60))
TOKENS = replace(MODEL, limits=Limits(tokens=60_000))


class Desk:
    """A limiter and what it stands on. `another()` is the limiter of another process."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryLimits()
        self.journal = MemoryJournal()
        self.numbers = count()
        self.limiter = self.another()

    def another(self) -> SlotLimiter:
        return SlotLimiter(self.store, self.clock, FakeChance(7), self.journal)

    def ask(
        self, asked: Question, *, lane: Lane, patience_ms: int = 0, client: str | None = None, place: int | None = None
    ) -> Slot | Later:
        """For a client of its own, unless one is named."""
        client_id = client or f"client-{next(self.numbers)}"
        return self.limiter.take(asked, lane=lane, client_id=client_id, place=place, patience_ms=patience_ms)

    def gauge(self, model: ModelInfo = ONE_A_SECOND) -> Gauge:
        return self.store.gauges[f"model#{model.name}"]

    def take(self, model: ModelInfo = ONE_A_SECOND, lane: Lane = Lane.INTERACTIVE, patience_ms: int = 0) -> Slot:
        got = self.ask(question(model), lane=lane, patience_ms=patience_ms)
        assert isinstance(got, Slot)
        return got

    def later(self, model: ModelInfo = ONE_A_SECOND, lane: Lane = Lane.INTERACTIVE) -> Later:
        got = self.ask(question(model), lane=lane, patience_ms=0)
        assert isinstance(got, Later)
        return got

    def teach(self, model: ModelInfo, output_tokens: float = 1_000_000) -> None:
        """As after many calls, whose input was as guessed and that wrote so much, or all they might."""
        learned = Learned(1.0, output_tokens, 700, SAMPLES_MAX)
        self.store.gauges[f"model#{model.name}"] = Gauge(f"model#{model.name}", revision=1, learned=learned)

    def waits(self, count: int, model: ModelInfo = ONE_A_SECOND) -> list[int]:
        return [self.take(model).start_at - self.clock.now() for _ in range(count)]


def _until(so: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if so():
            return
        time.sleep(0.001)
    raise AssertionError


def question(model: ModelInfo, *, size: int = 0, max_tokens: int = 100) -> Question:
    return Question(model, (Message(role="user", content="x" * max(size, 1)),), None, max_tokens)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """With horizons wide enough to see some slots in a row."""
    monkeypatch.setattr(limits, "IN_TURN", 0.5)
    monkeypatch.setattr(limits, "HORIZON_MS", {Lane.INTERACTIVE: 120_000, Lane.STANDARD: 5_000, Lane.BULK: 4_000})
    return Desk()


# ── Slots ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_calls_are_spread_at_the_pace_of_the_limit(desk: Desk) -> None:
    """A second's cost and a burst of 750 ms: the first at once, then one a second, 250 ms later than bare pace."""
    assert desk.waits(4) == [0, 1_000, 2_000, 3_000]


def test_a_burst_is_spent_at_once_and_no_more(desk: Desk) -> None:
    """At 600 a minute seven calls fit into 750 ms; the eighth waits."""
    fast = replace(MODEL, limits=Limits(requests=600))
    assert desk.waits(9, fast) == [0, 0, 0, 0, 0, 0, 0, 50, 150]


def test_idle_time_does_not_pile_up(desk: Desk) -> None:
    """An hour of silence is worth one burst."""
    desk.waits(3)
    desk.clock.advance(3_600)
    assert desk.waits(3) == [0, 1_000, 2_000]


def test_each_caller_gets_a_slot_of_its_own_whatever_process_it_is_in(desk: Desk) -> None:
    """Two processes with views of their own never share a slot."""
    other = desk.another()
    starts = []
    for _ in range(5):
        starts.append(desk.take().start_at)
        got = other.take(question(ONE_A_SECOND), lane=Lane.INTERACTIVE, client_id="b", place=None, patience_ms=0)
        assert isinstance(got, Slot)
        starts.append(got.start_at)
    assert [start - desk.clock.now() for start in starts] == [1_000 * turn for turn in range(10)]


def test_the_scarcest_dimension_decides(desk: Desk) -> None:
    """Requests would allow ten a second, tokens one."""
    model = replace(MODEL, limits=Limits(requests=600, output_tokens=6_000))
    desk.teach(model)
    assert desk.waits(3, model) == [0, 1_000, 2_000]


def test_one_write_reserves_in_all_dimensions(desk: Desk) -> None:
    """Four limits, one request a call, once the cursors are ahead of the clock."""
    model = replace(MODEL, limits=Limits(requests=60, tokens=6_000, input_tokens=60_000, output_tokens=6_000))
    desk.teach(model)
    desk.waits(3, model)
    before = sum(desk.store.writes.values())
    desk.waits(5, model)
    assert sum(desk.store.writes.values()) - before == 5


def test_a_model_without_limits_costs_no_write(desk: Desk) -> None:
    """And no wait."""
    assert desk.waits(20, MODEL) == [0] * 20
    assert sum(desk.store.writes.values()) == 0


def test_a_request_larger_than_a_burst_is_not_refused_for_ever(desk: Desk) -> None:
    """It starts when its turn comes, and those behind it wait longer."""
    huge = question(TOKENS, size=200_000, max_tokens=50_000)
    got = desk.ask(huge, lane=Lane.BULK, patience_ms=0)
    assert isinstance(got, Slot)
    assert got.start_at == desk.clock.now()
    assert isinstance(desk.ask(huge, lane=Lane.BULK, patience_ms=0), Later)


# ── Horizons ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lane_reserves_no_further_than_its_horizon(desk: Desk) -> None:
    """At first sight half of it. Bulk fills two seconds of four, and an urgent job comes right after it."""
    now, taken = desk.clock.now(), 0
    while isinstance(desk.ask(question(ONE_A_SECOND), lane=Lane.BULK, patience_ms=0), Slot):
        taken += 1
    assert taken == 3  # at 0, 1 and 2 s
    assert desk.take().start_at == now + 3_000


def test_who_is_refused_learns_when_to_come_back(desk: Desk) -> None:
    """Three seconds' worth is taken; a second later there is room within two."""
    desk.waits(3)
    now = desk.clock.now()
    later = desk.later(lane=Lane.BULK)
    assert 1_000 < later.place - now <= 1_100
    assert later.start_at - now == 3_000
    desk.clock.time = later.place
    assert desk.take(lane=Lane.BULK).start_at == later.start_at


def test_patience_waits_inside_the_call(desk: Desk) -> None:
    """For a turn that is near, and no longer than it lasts; else it is sent away, at first sooner than later."""
    desk.waits(3)
    before = desk.clock.now()
    first = desk.ask(question(ONE_A_SECOND), lane=Lane.BULK, patience_ms=5_000)
    assert isinstance(first, Later)
    assert 1_000 < first.place - before <= 1_100
    assert desk.clock.now() - before <= 100
    assert isinstance(desk.ask(question(ONE_A_SECOND), lane=Lane.BULK, place=first.place, patience_ms=500), Later)
    slot = desk.ask(question(ONE_A_SECOND), lane=Lane.BULK, place=first.place, patience_ms=5_000)
    assert isinstance(slot, Slot)
    assert slot.start_at - before == 3_000
    assert 1_000 <= desk.clock.now() - before <= 2_000
    desk.waits(20)
    before = desk.clock.now()
    assert isinstance(desk.ask(question(ONE_A_SECOND), lane=Lane.BULK, patience_ms=9_000), Later)
    assert desk.clock.now() - before <= 100


def test_a_process_may_find_its_limit_full_for_hours(desk: Desk) -> None:
    """However often it has tried in vain, it tries on; the spread of its tries stays within the lane's horizon."""
    desk.store.gauges["model#m-1"] = Gauge("model#m-1", revision=1)
    for _ in range(2_000):
        full = {"requests": (desk.clock.now() + 10_000) * 1000}
        desk.store.gauges["model#m-1"] = replace(desk.gauge(), cursors=full)
        got = desk.ask(question(ONE_A_SECOND), lane=Lane.STANDARD, client="a")
        assert isinstance(got, Later)
        assert got.place - desk.clock.now() <= 12_500  # it is free in 10 s, and half of the horizon is 2.5
        desk.clock.advance(20)
    assert isinstance(desk.ask(question(ONE_A_SECOND), lane=Lane.STANDARD, client="b"), Slot)


def test_nobody_waits_behind_a_sleeper(desk: Desk) -> None:
    """A thread that sleeps until the next try keeps no other from its slot: it would start late, with all the rest."""
    got: list[Slot | Later] = []
    others = [threading.Thread(target=lambda: got.append(ask()), daemon=True)]

    def ask_meanwhile(seconds: float) -> None:
        desk.clock.time += round(1000 * seconds)
        for other in [others.pop()] if others else []:
            other.start()
            other.join(10)

    def ask() -> Slot | Later:
        return desk.ask(question(ONE_A_SECOND), lane=Lane.BULK, place=START + 100, patience_ms=9_000)

    desk.waits(4)
    desk.clock.sleep = ask_meanwhile  # type: ignore[method-assign]
    mine = ask()
    assert len(got) == 1
    assert {getattr(slot, "start_at", 0) - START for slot in (mine, *got)} == {4_000, 5_000}


# ── Lines ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_client_queues_in_a_line_of_its_own(desk: Desk) -> None:
    """Its jobs come back one by one, a little faster than the model's pace; another client's line is another."""
    desk.waits(8)
    asked = question(ONE_A_SECOND)
    got = [desk.ask(asked, lane=Lane.BULK, client="a") for _ in range(3)]
    places = [later.place for later in got if isinstance(later, Later)]
    assert [later - sooner for sooner, later in pairwise(places[1:])] == [950]
    other = desk.ask(asked, lane=Lane.BULK, client="b")
    assert isinstance(other, Later)
    assert other.place < places[1]


def test_a_client_with_a_long_line_leaves_room_to_the_others(desk: Desk) -> None:
    """Whose line is short may use the whole horizon, a job in its turn half of it, one before its turn nothing."""
    desk.waits(8)  # at 0 … 7 s
    asked, now = question(ONE_A_SECOND), desk.clock.now()
    desk.store.lines["line#m-1#standard#a"] = (now + 60_000) * 1_000
    desk.clock.time = now + 3_100  # the next slot is at 8 s: not within half of the lane's five seconds
    assert isinstance(desk.ask(asked, lane=Lane.STANDARD, client="a", place=now + 3_000), Later)
    assert isinstance(desk.ask(asked, lane=Lane.STANDARD, client="a"), Later)
    slot = desk.ask(asked, lane=Lane.STANDARD, client="b", place=now + 3_000)
    assert isinstance(slot, Slot)
    assert slot.start_at == now + 8_000
    desk.clock.time = now + 6_600  # the next slot is at 9 s
    assert isinstance(desk.ask(asked, lane=Lane.STANDARD, client="a", place=now + 6_500), Slot)
    assert isinstance(desk.ask(asked, lane=Lane.STANDARD, client="a"), Later)
    desk.clock.time = now + 10_000  # the next slot is at once
    assert isinstance(desk.ask(asked, lane=Lane.STANDARD, client="a"), Slot)


def test_a_client_with_a_long_line_leaves_some_of_the_burst_to_the_others(desk: Desk) -> None:
    """Its jobs before their turn would spend what a moment without calls has saved; whoever comes next finds it."""
    asked = question(replace(MODEL, limits=Limits(requests=600)))  # a call each 100 ms, 7 of them at once
    now = desk.clock.now()
    desk.store.lines["line#m-1#standard#a"] = (now + 60_000) * 1_000
    desk.limiter._lines["line#m-1#standard#a"] = limits._Line(threading.Lock(), end=now + 60_000)
    got = [desk.ask(asked, lane=Lane.STANDARD, client="a") for _ in range(7)]
    assert [isinstance(one, Slot) for one in got] == [True] * 5 + [False] * 2
    slots = [desk.ask(asked, lane=Lane.STANDARD, client="b") for _ in range(2)]
    assert all(isinstance(slot, Slot) and slot.start_at <= desk.clock.now() for slot in slots)


def test_the_length_of_a_line_is_looked_up_once_in_a_while_and_only_where_slots_are_short(desk: Desk) -> None:
    """A read, and none while there is room or while the line is known to be long."""
    looked: list[str] = []
    end_of = desk.store.end_of

    def look(name: str) -> int:
        looked.append(name)
        return end_of(name)

    desk.store.end_of = look  # type: ignore[method-assign]
    asked = question(ONE_A_SECOND)
    assert isinstance(desk.ask(asked, lane=Lane.STANDARD, client="a"), Slot)
    assert looked == []
    desk.waits(7)
    for _ in range(3):
        assert isinstance(desk.ask(asked, lane=Lane.STANDARD, client="a"), Later)
    assert looked == ["line#m-1#standard#a"]
    desk.clock.advance(20)  # the line is over, as far as is known here; another process has made it longer
    desk.store.lines["line#m-1#standard#a"] = (desk.clock.now() + 60_000) * 1_000
    desk.waits(8)
    for _ in range(3):
        assert isinstance(desk.ask(asked, lane=Lane.STANDARD, client="a"), Later)
    assert len(looked) == 2, "once more, and then it is known to be long"


def test_a_job_far_back_in_the_line_keeps_its_place_and_is_not_waited_with(desk: Desk) -> None:
    """It is a look whether there is more room than was thought."""
    desk.waits(40)
    asked, now = question(ONE_A_SECOND), desk.clock.now()
    place = now + 30_000
    got = desk.ask(asked, lane=Lane.BULK, client="a", place=place, patience_ms=10_000)
    assert isinstance(got, Later)
    assert (got.place, desk.clock.now(), desk.store.lines) == (place, now, {})
    desk.clock.advance(60)
    assert isinstance(desk.ask(asked, lane=Lane.BULK, client="a", place=place + 60_000), Slot)


def test_a_near_turn_is_waited_for(desk: Desk) -> None:
    """With the slot that it brings; and who is in vain at the head goes to the end."""
    desk.waits(3)
    asked, now = question(ONE_A_SECOND), desk.clock.now()
    slot = desk.ask(asked, lane=Lane.STANDARD, client="a", place=now + 1_500, patience_ms=9_000)
    assert isinstance(slot, Slot)
    assert slot.start_at == now + 3_000
    assert 1_500 <= desk.clock.now() - now < 2_000
    desk.waits(20)
    again = desk.ask(asked, lane=Lane.STANDARD, client="a", place=now + 1_500, patience_ms=9_000)
    assert isinstance(again, Later)
    assert again.place > desk.clock.now()


def test_those_who_come_together_are_lined_up_in_one_write(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a place of its own; a write that fails fails for all of them, and leaves nobody behind."""
    desk.waits(20)
    asked, together = question(ONE_A_SECOND), threading.Barrier(10)
    gathered: list[Slot | Later] = []

    def come() -> None:
        together.wait(10)
        gathered.append(desk.ask(asked, lane=Lane.BULK, client="a"))

    monkeypatch.setattr(desk.clock, "sleep", lambda _: _until(lambda: len(desk.limiter._lines[LINE].arrivals) == 10))
    threads = [threading.Thread(target=come, daemon=True) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    places = sorted(later.place for later in gathered if isinstance(later, Later))
    assert len(places) == 10
    assert {later - sooner for sooner, later in pairwise(places)} == {950}
    assert desk.store.writes["advance"] == 1
    assert desk.limiter._lines[LINE].arrivals == []


# ── Giving back ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_slot_that_is_given_back_is_taken_by_the_next(desk: Desk) -> None:
    """In its place, not at the end, and once."""
    desk.waits(2)
    given = desk.take()
    desk.waits(2)
    desk.limiter.give_back(given)
    assert desk.waits(2) == [2_000, 5_000]


def test_a_slot_whose_time_has_come_is_worth_nothing(desk: Desk) -> None:
    """Time has passed it by."""
    slot = desk.take()
    before = desk.gauge()
    desk.limiter.give_back(slot)
    assert desk.gauge() == before


def test_a_vacancy_is_not_for_a_larger_call(desk: Desk) -> None:
    """It would take more than was given back."""
    small = question(TOKENS, max_tokens=100)
    large = question(TOKENS, max_tokens=9_000)
    desk.teach(TOKENS)
    desk.ask(large, lane=Lane.INTERACTIVE, patience_ms=0)
    given = desk.ask(small, lane=Lane.INTERACTIVE, patience_ms=0)
    assert isinstance(given, Slot)
    desk.ask(small, lane=Lane.INTERACTIVE, patience_ms=0)
    desk.limiter.give_back(given)
    got = desk.ask(large, lane=Lane.INTERACTIVE, patience_ms=0)
    assert isinstance(got, Slot)
    assert got.start_at > given.start_at
    got = desk.ask(small, lane=Lane.INTERACTIVE, patience_ms=0)
    assert isinstance(got, Slot)
    assert got.start_at == given.start_at


# ── Settling and learning ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_actual_usage_takes_the_place_of_the_expected(desk: Desk) -> None:
    """A call that was expected to use 1,000 tokens used 100: nine tenths of its second are free again."""
    asked = question(TOKENS, max_tokens=990)
    desk.teach(TOKENS)
    slot = desk.ask(asked, lane=Lane.INTERACTIVE, patience_ms=0)
    assert isinstance(slot, Slot)
    ahead = desk.gauge(TOKENS).cursors["tokens"]
    desk.limiter.settle(TOKENS, slot, Usage(8, 92), call_ms=10, seen=None)
    freed = ahead - desk.gauge(TOKENS).cursors["tokens"]
    assert freed == slot.costs["tokens"] - 100_000


def test_expectations_are_learned(desk: Desk) -> None:
    """After some calls that write less than they may, so much is expected of the others, too."""
    asked = question(TOKENS, max_tokens=1_000, size=4_000)
    for _ in range(60):
        slot = desk.ask(asked, lane=Lane.INTERACTIVE, patience_ms=0)
        if isinstance(slot, Slot):
            desk.limiter.settle(TOKENS, slot, Usage(1_500, 100), call_ms=700, seen=None)
        desk.clock.advance(10)
    learned = desk.gauge(TOKENS).learned
    guess = first_guess(asked)
    assert learned.output_tokens == pytest.approx(100)
    assert learned.input_ratio == pytest.approx(1_500 / guess[0])
    assert learned.call_ms == pytest.approx(700)
    taken = [desk.ask(question(TOKENS, max_tokens=most), lane=Lane.BULK, patience_ms=0) for most in (9, 9_000)]
    assert [slot.output_tokens for slot in taken if isinstance(slot, Slot)] == [9, 100]


@pytest.mark.parametrize("closely_part", [0.0, 0.5, 1.0])
def test_expectations_are_right_in_their_sum_however_clients_set_max_tokens(desk: Desk, closely_part: float) -> None:
    """All write 20 to 80 tokens. Some clients allow a little more than that, the others a thousand."""
    dice, expected, written = random.Random(1), 0, 0
    for number in range(600):
        output = dice.randint(20, 80)
        most = round(output * dice.uniform(1, 1.5)) if dice.random() < closely_part else 1_000
        slot = desk.ask(question(TOKENS, max_tokens=most), lane=Lane.BULK, patience_ms=0)
        assert isinstance(slot, Slot)
        desk.limiter.settle(TOKENS, slot, Usage(8, output), call_ms=700, seen=None)
        if number > SAMPLES_MAX:
            expected, written = expected + slot.output_tokens, written + output
        desk.clock.advance(2)
    assert expected == pytest.approx(written, rel=0.05)


def test_nothing_is_booked_ahead_by_guesses(desk: Desk) -> None:
    """What the first calls were thought to take is far off where max_tokens is left out. So they go one by one, idle
    time earns nothing back, and the horizon opens once some have been seen.
    """
    asked = question(TOKENS, max_tokens=2_000)
    slot = desk.ask(asked, lane=Lane.INTERACTIVE, patience_ms=0)
    assert isinstance(slot, Slot)
    assert isinstance(desk.ask(asked, lane=Lane.INTERACTIVE, patience_ms=0), Later)
    desk.clock.advance(3)
    ahead = desk.gauge(TOKENS).cursors["tokens"]
    desk.limiter.settle(TOKENS, slot, Usage(8, 100), call_ms=700, seen=None)
    assert desk.gauge(TOKENS).cursors["tokens"] == ahead
    for _ in range(SAMPLES_MIN):
        desk.clock.advance(1)
        slot = desk.ask(asked, lane=Lane.INTERACTIVE, patience_ms=0)
        assert isinstance(slot, Slot)
        desk.limiter.settle(TOKENS, slot, Usage(8, 100), call_ms=700, seen=None)
    desk.clock.advance(1)
    taken = [desk.ask(asked, lane=Lane.BULK, patience_ms=0) for _ in range(12)]
    assert all(isinstance(slot, Slot) and slot.output_tokens == 100 for slot in taken)


def test_once_expectations_hold_settling_costs_no_write(desk: Desk) -> None:
    """A difference below two hundredths is left to what is learned."""
    asked = question(TOKENS, max_tokens=100)
    desk.teach(TOKENS, output_tokens=50)
    desk.ask(asked, lane=Lane.BULK, patience_ms=0)
    slot = desk.ask(asked, lane=Lane.BULK, patience_ms=0)
    assert isinstance(slot, Slot)
    before = sum(desk.store.writes.values())
    desk.limiter.settle(TOKENS, slot, Usage(slot.input_tokens, slot.output_tokens), call_ms=1, seen=None)
    assert sum(desk.store.writes.values()) == before


def test_estimated_usage_teaches_nothing(desk: Desk) -> None:
    """It was guessed by the same rule."""
    slot = desk.take(TOKENS)
    desk.limiter.settle(TOKENS, slot, Usage(1, 1, estimated=True), call_ms=1, seen=None)
    assert desk.gauge(TOKENS).learned == Learned()


@pytest.mark.parametrize(("counts", "expected"), [(True, 1_000), (False, 100)])
def test_cached_tokens_count_as_the_provider_counts_them(desk: Desk, counts: bool, expected: int) -> None:
    """OpenAI counts them against the limit, Anthropic does not."""
    model = replace(MODEL, limits=Limits(input_tokens=60_000), cached_count=counts)
    slot = desk.take(model)
    ahead = desk.gauge(model).cursors["input_tokens"]
    desk.limiter.settle(model, slot, Usage(1_000, 1, cached_tokens=900), call_ms=1, seen=None)
    assert desk.gauge(model).cursors["input_tokens"] - ahead == expected * 1_000 - slot.costs["input_tokens"]


# ── Calibration ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_refusal_holds_its_model_and_only_it(desk: Desk) -> None:
    """Until the provider allows calls again; then at pace, with no burst."""
    other = replace(ONE_A_SECOND, name="m-2")
    desk.limiter.refused(ONE_A_SECOND, 30.0, seen=None)
    assert desk.waits(2) == [30_750, 31_750]
    assert desk.waits(2, other) == [0, 1_000]


def test_a_reserved_slot_does_not_outlive_a_hold(desk: Desk) -> None:
    """Who sleeps towards a slot learns that the provider wants silence."""
    slot = desk.take()
    assert desk.limiter.is_open(slot)
    desk.another().refused(ONE_A_SECOND, 30.0, seen=None)
    desk.clock.advance(1.5)
    assert not desk.limiter.is_open(slot)
    assert desk.limiter.is_open(replace(slot, start_at=desk.clock.now() + 40_000))


def test_refusals_far_apart_cut_the_share_slightly(desk: Desk) -> None:
    """A call that is large beside the provider's burst meets one now and then, with the right limits."""
    desk.take()
    for _ in range(5):
        desk.clock.advance(15)
        desk.limiter.refused(ONE_A_SECOND, 0.1, seen=None)
    assert 0.85 < desk.gauge().share < 0.95


def test_repeated_refusals_cut_the_share_and_quiet_restores_it(desk: Desk) -> None:
    """One refusal is chance. Refusals that go on mean that the limit is lower than we think."""
    desk.take()
    desk.limiter.refused(ONE_A_SECOND, 0.1, seen=None)
    assert desk.gauge().share == 1
    for _ in range(4):
        desk.clock.advance(5)
        desk.limiter.refused(ONE_A_SECOND, 0.1, seen=None)
    assert 0.4 < desk.gauge().share < 0.6
    for _ in range(12):
        desk.clock.advance(RECOVERY_MS / 1000 + 1)
        desk.limiter.settle(ONE_A_SECOND, desk.take(), Usage(1, 1), call_ms=1, seen=None)
    assert desk.gauge().share == 1


def test_refusals_at_once_are_one_event(desk: Desk) -> None:
    """Ten calls in flight when the limit is reached are no ten reasons to slow down."""
    desk.take()
    for _ in range(10):
        desk.limiter.refused(ONE_A_SECOND, 0.1, seen=None)
    assert desk.gauge().share == 1


def test_the_providers_own_word_is_followed_downwards(desk: Desk) -> None:
    """Half the configured limit: half the pace, from the next call on. And noted."""
    desk.limiter.settle(ONE_A_SECOND, desk.take(), Usage(1, 1), call_ms=1, seen=Limits(requests=30))
    assert limit_of(ONE_A_SECOND, desk.gauge(), "requests") == 30
    desk.clock.advance(60)
    assert desk.waits(3) == [0, 2_000, 4_000]
    [noted] = desk.journal.named("limit_differs")
    assert noted == {"model": "m-1", "dimension": "requests", "configured": 60, "provider_limit": 30}


def test_a_higher_limit_is_noted_but_left_to_the_operator(desk: Desk) -> None:
    """He may have meant to use a part only."""
    desk.limiter.settle(ONE_A_SECOND, desk.take(), Usage(1, 1), call_ms=1, seen=Limits(requests=600))
    assert limit_of(ONE_A_SECOND, desk.gauge(), "requests") == 60
    assert len(desk.journal.named("limit_differs")) == 1
    desk.limiter.settle(ONE_A_SECOND, desk.take(), Usage(1, 1), call_ms=1, seen=Limits(requests=600))
    assert len(desk.journal.named("limit_differs")) == 1


def test_an_operators_limit_wins_and_is_in_force_at_once(desk: Desk) -> None:
    """Written to the row by whoever; no deploy, no restart, the next call heeds it."""
    desk.waits(2)
    desk.clock.advance(60)
    row = desk.gauge()
    desk.store.gauges[row.name] = replace(row, revision=row.revision + 1, limits=Limits(requests=6))
    assert desk.waits(3) == [0, 10_000, 20_000]


def test_an_outage_turns_calls_into_probes_and_success_brings_them_back(desk: Desk) -> None:
    """The pauses grow with the strikes; other models are not touched."""
    other = replace(ONE_A_SECOND, name="m-2")
    for _ in range(STRIKES_FREE + 3):
        desk.take()
        desk.clock.advance(2)
        desk.limiter.failed(ONE_A_SECOND)
    assert pause_of(desk.gauge()) == 8_000_000
    desk.clock.advance(120)
    waits = desk.waits(3)
    assert [later - sooner for sooner, later in pairwise(waits)] == [8_000, 8_000]
    assert desk.waits(1, other) == [0]
    for _ in range(4):
        desk.clock.advance(60)
        desk.limiter.settle(ONE_A_SECOND, desk.take(), Usage(1, 1), call_ms=1, seen=None)
    assert pause_of(desk.gauge()) == 0


def test_calls_that_fail_together_are_one_strike(desk: Desk) -> None:
    """Fifty calls in flight when a server restarts are no outage."""
    for _ in range(50):
        desk.limiter.failed(ONE_A_SECOND)
    assert desk.gauge().strikes == 1


def test_a_table_out_of_reach_costs_no_answer(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a paid call used cannot be noted: then not. Leave to call cannot be had without it."""
    slot = desk.take()

    def unreachable(*_: object, **__: object) -> Gauge:
        raise PortUnavailable("away")

    for method in ("read", "add", "replace", "adjust"):
        monkeypatch.setattr(desk.store, method, unreachable)
    limiter = desk.another()
    limiter.settle(ONE_A_SECOND, slot, Usage(1, 1), call_ms=1, seen=Limits(requests=1))
    limiter.refused(ONE_A_SECOND, 1.0, seen=None)
    limiter.failed(ONE_A_SECOND)
    limiter.give_back(slot)
    with pytest.raises(PortUnavailable):
        limiter.take(question(ONE_A_SECOND), lane=Lane.BULK, client_id="a", place=None, patience_ms=0)


def test_a_larger_prompt_costs_more() -> None:
    """By its bytes and its token limit."""
    gauge = Gauge("g")
    small, large = first_guess(question(TOKENS, size=400)), first_guess(question(TOKENS, size=4_000))
    assert costs_of(TOKENS, gauge, *large)["tokens"] > costs_of(TOKENS, gauge, *small)["tokens"]
    assert large[0] - small[0] == 900
