"""Whatever crosses whatever: no limit is exceeded, no hold is broken, and nothing that was reserved stays taken.

The steps of three processes, with views of their own, fall between each other's looks at the table and their writes.
tests/integration/test_limits_crossing.py plays the same on DynamoDB.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backburner import limits
from backburner.limits import SlotLimiter, costs_of, counted_input
from backburner.models import Lane, Learned
from tests.fakes import crossing as crossing_module
from tests.fakes.crossing import COST, SURE, Crossing, Step, of_kinds, schedules
from tests.fakes.memory import START, MemoryLimits


@settings(max_examples=100, deadline=None, derandomize=True)
@example(schedule=[("take", 0, 0)] * 5 + [("refuse", 1, 100)] + [("call", 0, 4)] * 4, learned=SURE)
@given(schedule=schedules, learned=st.sampled_from([SURE, Learned()]))
def test_no_crossing_exceeds_a_limit_or_breaks_a_hold_or_leaks(schedule: list[Step], learned: Learned) -> None:
    """Reserved, settled, given back, refused, taken over, lost."""
    crossing = Crossing(MemoryLimits(), "m-1", schedule, learned=learned)
    crossing.play()
    crossing.check()


class Saturated(Crossing):
    """So much is reserved that nothing is ever idle; and time stands still."""

    def _call(self, limiter: SlotLimiter, _: int) -> None:
        if self._open:
            self._answered.append(self._open.pop(0))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(schedule=of_kinds(frozenset({"call", "settle", "lose"})))
def test_what_was_used_takes_the_place_of_what_was_expected_to_the_last_token(schedule: list[Step]) -> None:
    """The cursor moves by exactly what settled calls used, and what the others may yet use."""
    store, name, ahead = MemoryLimits(), "model#m-1", 1000 * START + 10**9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "HORIZON_MS", dict.fromkeys(Lane, 10_000_000))
        patch.setattr(crossing_module, "HORIZON_MS", limits.HORIZON_MS)
        crossing = Saturated(store, "m-1", schedule, learned=SURE)
        patch.setattr(crossing.clock, "sleep", lambda _: None)
        store.gauges[name] = replace(store.gauges[name], cursors={"tokens": ahead, "requests": ahead})
        crossing.play()
    gauge = store.gauges[name]
    used = [
        costs_of(crossing.model, gauge, counted_input(crossing.model, usage), usage.output_tokens)["tokens"]
        for _, usage in crossing.settled
    ]
    settled = {id(slot) for slot, _ in crossing.settled}
    booked = [slot.costs["tokens"] for slot in crossing.granted if id(slot) not in settled]
    owed = [limiter._owed.get(name, {}).get("tokens", 0) for limiter in crossing.limiters]
    assert gauge.cursors["tokens"] - ahead == sum(used) + sum(booked) - sum(owed)
    assert gauge.cursors["requests"] - ahead == COST * len(crossing.granted)
