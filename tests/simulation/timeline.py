"""Virtual time: tasks are greenlets, one runs at a time, and sleeping lets the next one run.

The program's own blocking code runs in them as it stands. The same seed makes the same history.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import greenlet

from backburner.models import EpochMs
from tests.fakes.memory import START

WAKE_US_MAX = 2_000
"""A thread runs again so long after its sleep or its lock ends, at most."""


class Timeline:
    """What happens when. `now` is in microseconds since the epoch."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.now = START * 1000
        self._hub = greenlet.getcurrent()
        self._events: list[tuple[int, int, Callable[[], Any]]] = []
        self._count = 0

    def at(self, moment: int, action: Callable[[], Any]) -> None:
        """Let something happen then, or now if that has passed; it must not sleep."""
        self._count += 1
        heapq.heappush(self._events, (max(moment, self.now), self._count, action))

    def spawn(self, task: Callable[[], Any], *, after_us: int = 0) -> None:
        """Start a task, which may sleep."""
        self.at(self.now + after_us, greenlet.greenlet(task, self._hub).switch)

    def sleep(self, micros: int) -> None:
        """Let others run for so long."""
        self.at(self.now + micros, greenlet.getcurrent().switch)
        self._hub.switch()

    def pause(self) -> Callable[[], None]:
        """The means of waking the present task, which must then `wait`."""
        task = greenlet.getcurrent()
        return lambda: self.at(self.now, task.switch)

    def wait(self) -> None:
        """Let others run until somebody wakes this task."""
        self._hub.switch()

    def run(self, until: Callable[[], bool]) -> None:
        """Let everything happen in its order, until that is so or nothing is left."""
        while self._events and not until():
            self.now, _, action = heapq.heappop(self._events)
            action()


class VirtualClock:
    """The clock of one process, as ports.Clock; off by `skew_us`."""

    def __init__(self, timeline: Timeline, skew_us: int = 0) -> None:
        self._timeline = timeline
        self._skew_us = skew_us

    def now(self) -> EpochMs:
        return (self._timeline.now + self._skew_us) // 1000

    def sleep(self, seconds: float) -> None:
        late = self._timeline.dice.randrange(WAKE_US_MAX)
        self._timeline.sleep(max(0, round(seconds * 1e6)) + late)


class VirtualLock:
    """A lock between tasks, as unfair as a real one: whoever asks in the right moment gets it."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._held = False
        self._waiting: list[Callable[[], None]] = []

    def __enter__(self) -> bool:
        while self._held:
            self._waiting.append(self._timeline.pause())
            self._timeline.wait()
        self._held = True
        return True

    def __exit__(self, *_: object) -> None:
        self._held = False
        if self._waiting:
            dice = self._timeline.dice
            woken = self._waiting.pop(dice.randrange(len(self._waiting)))
            self._timeline.at(self._timeline.now + dice.randrange(WAKE_US_MAX // 10), woken)


class Distant:
    """A port across a network: each call takes some milliseconds, half of them before its effect."""

    def __init__(self, near: Any, timeline: Timeline, milliseconds: tuple[float, float]) -> None:
        self._near = near
        self._timeline = timeline
        self._milliseconds = milliseconds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._near, name)

        def across(*arguments: Any, **named: Any) -> Any:
            half_us = round(500 * self._timeline.dice.uniform(*self._milliseconds))
            self._timeline.sleep(half_us)
            try:
                return call(*arguments, **named)
            finally:
                self._timeline.sleep(half_us)

        return across
