"""The simulator as tests: all single strikes, some histories, and Hypothesis's own. `make simulate` runs many more."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulation.hazards import Fate
from tests.simulation.history import live_through, run_history
from tests.simulation.mutants import MUTANTS, PACKAGE, Mutant, broken
from tests.simulation.scenarios import SCENARIOS, Scenario, every_strike, live


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_invariant_holds_under_a_strike_at_any_port_call(scenario: Scenario) -> None:
    """Die before, die after, fail before, fail after: at each single call of the scenario's road."""
    lives = [live(scenario, Fate.at(*plan)) for plan in every_strike(scenario, pairs=False)]
    assert len(lives) > 4
    assert all(row.status.is_final for world in lives for row in world.store.rows.values())


@pytest.mark.parametrize("first", range(0, 2_000, 500))
def test_every_invariant_holds_in_seeded_histories(first: int) -> None:
    """Crashes, doubles, delays, losses, skewed clocks, cancels and redrives, as the dice have it."""
    outcomes = [run_history(seed) for seed in range(first, first + 500)]
    assert sum(outcome.struck for outcome in outcomes) > 100
    assert sum(outcome.jobs for outcome in outcomes) > 500


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_hypothesis_finds_no_history_that_breaks_an_invariant(dice: random.Random) -> None:
    """The same histories with every turn chosen, and shrunk, by Hypothesis."""
    assert live_through(dice).calls >= 0


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_breaks_the_code_as_it_stands(mutant: Mutant) -> None:
    """That each is caught is seen by `make simulate-mutants`, which takes its time."""
    for name, text in broken(mutant, PACKAGE).items():
        assert text != (PACKAGE / name).read_text()
        compile(text, name, "exec")


def test_a_seed_makes_the_same_history_each_time() -> None:
    """What a failing run prints can be replayed."""
    assert run_history(7) == run_history(7)
