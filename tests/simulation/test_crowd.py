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


def test_fifty_workers_share_the_limits_of_three_models() -> None:
    """Most jobs wait in their client's line for their turn, and the limits are used up all the same."""
    models = ("m-1", "m-2", "m-3")
    crowd = Crowd(*(provided(name, requests=600, tokens=60_000) for name in models), workers={Lane.STANDARD: 50})
    for number in range(900):
        crowd.enqueue(1, model=models[number % 3])
    crowd.run(seconds_max=1_000)
    assert crowd.ends == {JobStatus.COMPLETED: 900}
    for name in models:
        assert crowd.told[name].refused_at == []
        assert crowd.utilisation(name) >= 0.98
    assert crowd.limiter_writes < 2.6  # the first calls of a model are each a lesson


def test_a_client_waits_little_longer_beside_anothers_backlog() -> None:
    """The backlog's jobs wait in their line, and the newcomer's come first."""
    assert _wait_beside(1_000) <= 2 * _wait_beside(0)


def _wait_beside(backlog: int) -> float:
    """The p95 wait of twenty jobs that come when another client's backlog has been there for twenty seconds."""
    crowd = Crowd(provided("m", requests=600, tokens=60_000), workers={Lane.STANDARD: 5})
    crowd.enqueue(60 + backlog, model="m", client="alice")
    few: list[int] = []
    crowd.at(20, lambda: few.extend(crowd.enqueue(20, model="m", client="bob")))
    crowd.run(seconds_max=200, until=lambda: bool(few) and all(number in crowd.provider.started for number in few))
    return percentile(crowd.waits(few), 95)


def test_an_outage_slows_its_model_down_and_no_other() -> None:
    """A minute of 529: some calls find it out, then rare probes; and all jobs end well."""
    crowd = Crowd(
        provided("m-1", requests=600, tokens=60_000, outage=(20, 80)),
        provided("m-2", requests=600, tokens=60_000),
        workers={Lane.STANDARD: 10},
    )
    for number in range(600):
        crowd.enqueue(1, model=("m-1", "m-2")[number % 2])
    crowd.run(seconds_max=900)
    assert crowd.ends == {JobStatus.COMPLETED: 600}
    assert crowd.utilisation("m-2") >= 0.98
    failed_at = crowd.told["m-1"].failed_at
    assert sum(at >= 30 for at in failed_at) <= 5
    assert crowd.told["m-1"].refused_at == crowd.told["m-2"].refused_at == []


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
    assert percentile(crowd.waits(urgent), 95) < 5
    used = crowd.told["m"].used
    assert sum(used[second] for second in range(20, 100)) / 80 >= 0.98 * 1_000
