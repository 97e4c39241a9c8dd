"""Misfortune: what may befall any call of a port."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from backburner.errors import ConnectionLost, PortUnavailable


class Killed(BaseException):
    """The process is gone: no handler of the program may catch this."""


class Hazard(StrEnum):
    """What befalls a call. The effect of an `after` has happened."""

    DIE_BEFORE = "die before"
    DIE_AFTER = "die after"
    FAIL_BEFORE = "fail before"
    FAIL_AFTER = "fail after"


@dataclass
class Fate:
    """Decides over each port call of a history, and remembers what it did."""

    decide: Callable[[int, str], Hazard | None]
    calls: int = 0
    names: list[str] = field(default_factory=list)
    struck: list[tuple[int, str, Hazard]] = field(default_factory=list)
    asleep: bool = False

    @classmethod
    def kind(cls) -> Fate:
        """No misfortune."""
        return cls(lambda _index, _name: None)

    @classmethod
    def at(cls, *strikes: tuple[int, Hazard]) -> Fate:
        """Misfortune at given calls, counted from 0."""
        planned = dict(strikes)
        return cls(lambda index, _name: planned.get(index))

    @classmethod
    def dice(cls, random_: random.Random, chance: float, budget: int) -> Fate:
        """Misfortune by chance at each call, `budget` times at most."""
        left = budget

        def decide(_index: int, _name: str) -> Hazard | None:
            nonlocal left
            if left and random_.random() < chance:
                left -= 1
                return random_.choice(list(Hazard))
            return None

        return cls(decide)

    def call(self, name: str, effect: Callable[[], Any]) -> Any:
        """Make a port call under fate."""
        if self.asleep:
            return effect()
        index, self.calls = self.calls, self.calls + 1
        self.names.append(name)
        hazard = self.decide(index, name)
        if hazard is not None:
            self.struck.append((index, name, hazard))
        if hazard is Hazard.DIE_BEFORE:
            raise Killed
        if hazard is Hazard.FAIL_BEFORE:
            raise PortUnavailable("simulated")
        result = effect()
        if hazard is Hazard.DIE_AFTER:
            raise Killed
        if hazard is Hazard.FAIL_AFTER:
            raise PortUnavailable("simulated")
        return result


class FatedProvider:
    """A provider under fate. Before its call the key may be out of reach; after it the answer may be lost."""

    def __init__(self, provider: Any, fate: Fate) -> None:
        self._provider = provider
        self._fate = fate

    def cancel(self, handle: str) -> None:
        """Stop a call that goes on."""
        self._provider.cancel(handle)

    def ask(self, question: Any, **arguments: Any) -> Any:
        called = False

        def call() -> Any:
            nonlocal called
            called = True
            return self._provider.ask(question, **arguments)

        try:
            return self._fate.call("provider.ask", call)
        except PortUnavailable as error:
            if called:
                raise ConnectionLost from error
            raise


class Fated:
    """A port whose methods are under fate. Attributes that are no methods pass through."""

    def __init__(self, port: Any, name: str, fate: Fate) -> None:
        self._port = port
        self._name = name
        self._fate = fate

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._port, attribute)
        if not callable(value):
            return value
        return lambda *args, **kwargs: self._fate.call(f"{self._name}.{attribute}", lambda: value(*args, **kwargs))
