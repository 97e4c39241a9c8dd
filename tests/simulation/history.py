"""Histories: a seed makes one, the same seed the same."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.simulation.hazards import Fate
from tests.simulation.world import OUTCOMES, SKEW_MS_MAX, Message, World

STEPS_MAX = 40
NESTING_MAX = 3


@dataclass(frozen=True)
class Outcome:
    """What a history came to."""

    seed: int
    calls: int
    jobs: int
    struck: int
    told_twice: int
    paid_twice: int


def run_history(seed: int) -> Outcome:
    """Live through the history of a seed and check it. Raises Broken."""
    return live_through(random.Random(seed), seed)


def live_through(dice: random.Random, seed: int = -1) -> Outcome:
    """Live through one history, all of whose turns the dice decide, and check it. Raises Broken."""
    fate = Fate.dice(dice, chance=dice.choice((0.0, 0.02, 0.05, 0.15)), budget=dice.randint(0, 6))
    skews = tuple(dice.randint(-SKEW_MS_MAX // 2, SKEW_MS_MAX // 2) for _ in range(3))
    budget = dice.random() < 0.5
    world = World(fate, dice, skews=skews, outcomes=lambda _job: dice.choice(OUTCOMES)(), budget=budget)
    world.background = dice.random() < 0.3
    nesting = 0

    def step() -> None:
        nonlocal nesting
        container = dice.randrange(len(skews))
        ready = world.queue.ready()
        match dice.randrange(13):
            case 0 | 1:
                world.accept(
                    f"k{dice.randrange(3)}", container=container, deadline_seconds=deadlines[dice.randrange(3)]
                )
            case 2 | 3 | 4 | 5 if ready:
                message = dice.choice(ready)
                if dice.random() < 0.2:  # SQS may deliver twice
                    world.queue.messages.append(Message(message.hint, world.time + dice.choice((0, 5_000, 100_000))))
                world.deliver(message, container=container, seconds_left=dice.choice((290.0, 290.0, 12.0)))
            case 6 if world.queue.messages and dice.random() < 0.3:  # a hint may be lost, or late
                message = dice.choice(world.queue.messages)
                if dice.random() < 0.5 and message.hint.died is None:  # a redriven letter is all that is left of it
                    world.queue.messages.remove(message)
                else:
                    message.at += 300_000
            case 7:
                world.repair(container=container)
            case 8:
                world.tell(container=container, double=dice.random() < 0.3)
            case 9 if world.runs and dice.random() < 0.3:
                world.cancel(dice.choice(sorted(world.runs)), container=container)
            case 10 if dice.random() < 0.4:
                world.redrive()
            case 11 if world.runs and dice.random() < 0.3:
                world.follow(dice.choice(sorted(world.runs)), container=container)
            case 12 if dice.random() < 0.3:
                world.operate(discard=dice.random() < 0.3, container=container)
            case _:
                world.pass_time(dice.choice((500, 5_000, 20_000, 61_000, 200_000, 1_000_000)))

    def thinking(container: int, _job_id: str) -> None:
        nonlocal nesting
        if nesting >= NESTING_MAX:
            return
        nesting += 1
        with world.at_work(container, frozen=dice.random() < 0.2):
            world.pass_time(dice.choice((1_000, 8_000, 25_000, 40_000, 120_000)))
            for _ in range(dice.randint(0, 3)):
                step()
        nesting -= 1

    def telling(job_id: str) -> None:
        if dice.random() < 0.1:
            world.tell_again(job_id, container=dice.randrange(len(skews)))

    def settling() -> None:
        nonlocal nesting
        if nesting < NESTING_MAX and dice.random() < 0.1:
            nesting += 1
            world.pass_time(dice.choice((1_000, 61_000)))
            step()
            world.repair(container=dice.randrange(len(skews)))
            nesting -= 1

    world.telling = telling
    world.settling = settling
    deadlines = (None, None, dice.choice((20, 90, 600)))
    world.thinking = thinking
    for _ in range(STEPS_MAX):
        step()
    world.heal_and_settle()
    world.check_end()
    return Outcome(
        seed=seed,
        calls=fate.calls,
        jobs=len(world.store.rows),
        struck=len(fate.struck),
        told_twice=sum(times > len(world.store.rows[job].targets) for (job, *_), times in world.told.items()),
        paid_twice=sum(run.paid > 1 for run in world.runs.values()),
    )
