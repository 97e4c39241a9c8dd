"""Small crowds before limited providers: full speed, and no call too many. bench/limits_simulated.py has large ones."""

import pytest

from backburner.models import JobStatus, Lane
from tests.simulation.crowd import Crowd, Shape, percentile, provided

EVEN = Shape((100, 100), (50, 50), headroom=1.2, call_seconds=(1.0, 1.0))
BY_DEFAULT = Shape(headroom=None)
EITHER = Shape(without_part=0.5)


@pytest.mark.parametrize(
    ("shape", "aim"),
    [(EVEN, 0.985), (Shape(), 0.98), (EITHER, 0.96), (BY_DEFAULT, 0.92)],
    ids=["even", "varied", "either", "by default"],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_limit_is_used_up_from_a_cold_start_and_never_exceeded(shape: Shape, aim: float, seed: int) -> None:
    """300 jobs of about 150 tokens at 60,000 a minute. Where max_tokens is left out, the first second is learning."""
    crowd = Crowd(provided("m", requests=600, tokens=60_000), workers={Lane.STANDARD: 5}, seed=seed)
    crowd.enqueue(300, model="m", shape=shape)
    crowd.run(seconds_max=600)
    assert crowd.ends == {JobStatus.COMPLETED: 300}
    assert crowd.told["m"].refused_at == []
    assert crowd.utilisation("m") >= aim
    assert crowd.limiter_writes < 2


def test_fifty_workers_share_a_limit_as_well_as_five() -> None:
    """Most jobs wait in the queue for their turn, and the limit is used up all the same."""
    crowd = Crowd(provided("m", requests=600, tokens=60_000), workers={Lane.STANDARD: 50})
    crowd.enqueue(2_000, model="m")
    crowd.run(seconds_max=1_000)
    assert crowd.ends == {JobStatus.COMPLETED: 2_000}
    assert len(crowd.told["m"].refused_at) <= 2
    assert crowd.utilisation("m") >= 0.985


@pytest.mark.parametrize("headers", [True, False])
def test_limits_configured_too_high_cost_refusals_for_a_while_and_no_job(headers: bool) -> None:
    """Twice too high: the provider's word is followed at once; without it, refusals teach it within a minute."""
    crowd = Crowd(
        provided("m", requests=600, tokens=60_000, configured=2.0, headers=headers), workers={Lane.STANDARD: 5}
    )
    crowd.enqueue(700, model="m", shape=EVEN)
    crowd.run(seconds_max=600)
    assert crowd.ends == {JobStatus.COMPLETED: 700}
    refused_at = crowd.told["m"].refused_at
    assert sum(at >= 60 for at in refused_at) <= (0 if headers else 10)
    assert len(refused_at) < 60


def test_an_urgent_job_starts_at_once_before_a_provider_that_is_used_up() -> None:
    """By a backlog in bulk, which goes on using what is left."""
    crowd = Crowd(provided("m", requests=600, tokens=60_000), workers={Lane.INTERACTIVE: 2, Lane.BULK: 5})
    crowd.enqueue(1_000, model="m", lane=Lane.BULK)
    urgent: list[int] = []
    for second in range(20, 100, 2):
        crowd.at(second, lambda: urgent.extend(crowd.enqueue(1, model="m", lane=Lane.INTERACTIVE)))
    crowd.run(seconds_max=110, until=lambda: False)
    assert percentile(crowd.waits(urgent), 0.95) < 5
    used = crowd.told["m"].used
    assert sum(used[second] for second in range(20, 100)) / 80 >= 0.98 * 1_000
