"""One job's road, in its variants, under misfortune at every single port call (and at every pair of them)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from backburner.errors import JobFailed, Overloaded, ProviderRefusedRequest, RateLimited
from backburner.lifecycle import LEASE_MS
from backburner.models import Gauge, Usage
from tests.simulation.hazards import Fate, Hazard
from tests.simulation.world import Message, World


@dataclass(frozen=True)
class Scenario:
    """A road of one job. `outcomes` are the provider's, in order; the last one stays."""

    name: str
    outcomes: tuple[str | Callable[[], JobFailed], ...] = ("an answer",)
    thinking: Callable[[World, int, str], None] | None = None
    deadline_seconds: int | None = None
    cancel: bool = False
    cancel_parked: bool = False
    redrive: bool = False
    operate: tuple[Literal["retry", "discard"], ...] = ()
    """What the operator does with the dead job, in turn; before the redrive, if there is one."""
    double: bool = False
    background: bool = False
    buried: int = 0
    budget: bool = False
    late_redrive: bool = False
    """The redrive comes on the next day."""
    busy_ms: int = 0
    """The model's limit is taken by others for so long."""


def _second_delivery(world: World, _container: int, _job_id: str) -> None:
    for message in list(world.queue.messages):
        world.deliver(Message(message.hint, world.time), container=1)


def _stall(world: World, container: int, _job_id: str) -> None:
    with world.at_work(container, frozen=True):
        world.pass_time(LEASE_MS + 10_000)
        world.repair(container=1)
        for message in world.queue.ready():
            world.deliver(message, container=1)


def _long_call(world: World, container: int, _job_id: str) -> None:
    with world.at_work(container):
        world.pass_time(4 * LEASE_MS)
        world.repair(container=1)
        for message in list(world.queue.messages):
            world.deliver(Message(message.hint, world.time), container=1)


def _cancelled_meanwhile(world: World, container: int, job_id: str) -> None:
    with world.at_work(container):
        world.cancel(job_id, container=1)
        world.pass_time(11_000)


def _followed_meanwhile(world: World, container: int, job_id: str) -> None:
    with world.at_work(container):
        world.follow(job_id, container=1)
        world.follow(job_id, container=1)


def _billed() -> JobFailed:
    """A failure that is billed all the same."""
    return Overloaded(usage=Usage(2, 1))


SCENARIOS = (
    Scenario("answered at once"),
    Scenario("answered at the second attempt", (Overloaded, "an answer")),
    Scenario("told to wait longer than SQS delays", (lambda: RateLimited(retry_after_seconds=2_000), "an answer")),
    Scenario("attempts used up, then redriven", (Overloaded, Overloaded, Overloaded, "an answer"), redrive=True),
    Scenario("attempts used up, then retried", (Overloaded, Overloaded, Overloaded, "an answer"), operate=("retry",)),
    Scenario(
        "retried, and redriven by its letter as well",
        (Overloaded, Overloaded, Overloaded, "an answer"),
        operate=("retry",),
        redrive=True,
    ),
    Scenario("discarded, then retried and redriven", (Overloaded,), operate=("discard", "retry"), redrive=True),
    Scenario("refused", (ProviderRefusedRequest,)),
    Scenario("delivered twice", thinking=_second_delivery, double=True),
    Scenario("a worker that stalls beyond its lease", thinking=_stall),
    Scenario("a worker that stalls while its call goes on", thinking=_stall, background=True),
    Scenario("a hint that no worker could answer", buried=1),
    Scenario("hints that no worker could ever answer, then redriven", buried=3, redrive=True),
    Scenario("a call longer than the lease", thinking=_long_call),
    Scenario("cancelled while queued", cancel=True),
    Scenario("a short wait for the provider's limit", busy_ms=9_000),
    Scenario("a long wait for the provider's limit", busy_ms=100_000),
    Scenario("parked, and cancelled there", busy_ms=100_000, cancel_parked=True),
    Scenario("no slot before its deadline", busy_ms=100_000, deadline_seconds=30),
    Scenario("cancelled while it is worked on", thinking=_cancelled_meanwhile),
    Scenario("followed while it is worked on", thinking=_followed_meanwhile),
    Scenario("followed while it is worked on, and put back", (Overloaded, "an answer"), thinking=_followed_meanwhile),
    Scenario("not started before its deadline", (Overloaded, "an answer"), deadline_seconds=3),
    Scenario("charged to a budget", budget=True),
    Scenario("charged, and settled by two at once", budget=True, double=True),
    Scenario("charged, and cancelled while it is worked on", thinking=_cancelled_meanwhile, budget=True),
    Scenario("charged, and taken over from a worker that stalls", thinking=_stall, budget=True),
    Scenario("charged, dead, redriven", (_billed, _billed, _billed, "an answer"), redrive=True, budget=True),
    Scenario(
        "charged, dead, redriven on the next day",
        (_billed, _billed, _billed, "an answer"),
        redrive=True,
        budget=True,
        late_redrive=True,
    ),
    Scenario("charged, dead, retried", (_billed, _billed, _billed, "an answer"), operate=("retry",), budget=True),
    Scenario("charged, not started before its deadline", (Overloaded, "an answer"), deadline_seconds=3, budget=True),
)


def live(scenario: Scenario, fate: Fate) -> World:
    """Live through the scenario under fate, then heal and check. Raises Broken."""
    left = list(scenario.outcomes)

    def outcome(_job_id: str) -> str | JobFailed:
        step = left.pop(0) if len(left) > 1 else left[0]
        return step if isinstance(step, str) else step()

    world = World(fate, random.Random(0), outcomes=outcome, background=scenario.background, budget=scenario.budget)
    thought = False

    def thinking(container: int, job_id: str) -> None:
        nonlocal thought
        if scenario.thinking is not None and not thought:
            thought = True
            scenario.thinking(world, container, job_id)

    world.thinking = thinking
    again = scenario.double

    def telling(job_id: str) -> None:
        nonlocal again
        if again:
            again = False
            world.tell_again(job_id, container=1)

    world.telling = telling

    def settling() -> None:
        nonlocal again
        if again:
            again = False
            world.pass_time(61_000)
            world.repair(container=1)

    world.settling = settling
    if world.accept("k", deadline_seconds=scenario.deadline_seconds) is None:
        world.accept("k", deadline_seconds=scenario.deadline_seconds)  # the client tries again, once
    if scenario.cancel:
        for job_id in world.runs:
            world.cancel(job_id)
    for _ in range(scenario.buried):
        for message in list(world.queue.messages):
            world.queue.messages.remove(message)
            world.letters.redrive_policy_moves(message.hint)
        world.repair()
    if scenario.busy_ms:
        at = (world.time + scenario.busy_ms) * 1000
        world.limits.gauges["model#m-1"] = Gauge("model#m-1", revision=1, cursors={"requests": at})
    for turn in range(4):
        if scenario.cancel_parked and turn == 1:
            for job_id in world.runs:
                world.cancel(job_id)
        for message in world.queue.ready():
            if scenario.double:
                world.deliver(Message(message.hint, world.time))
            world.deliver(message)
        world.tell(double=scenario.double)
        world.time += 61_000
        world.repair()
    if scenario.late_redrive:
        world.time += 3_600_000
        world.accept("another")  # so that the day has a tally
    for operation in scenario.operate:
        world.operate(discard=operation == "discard")
    if scenario.redrive:
        world.redrive()
        for message in world.queue.ready():
            world.deliver(message)
    world.heal_and_settle()
    world.check_end()
    return world


def every_strike(scenario: Scenario, *, pairs: bool) -> Iterator[tuple[tuple[int, Hazard], ...]]:
    """No strike, each single one, and each pair where asked for."""
    fate = Fate.kind()
    live(scenario, fate)
    singles = list(itertools.product(range(fate.calls), Hazard))
    yield ()
    for strike in singles:
        yield (strike,)
    if pairs:
        for first, second in itertools.combinations(singles, 2):
            if first[0] != second[0]:
                yield first, second
