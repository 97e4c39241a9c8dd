"""How long jobs wait for a worker: a queue with several servers, each of which takes up to `batch` jobs at a time.

That is what a lane is: at most `at_once` invocations, each of which takes what waits, up to `batch` jobs, and is free
again when the longest of their calls has ended. Arrivals are Poisson, invocations last exponentially long. In the
literature it is M/M(1,b)/c, the general bulk service rule (N. T. J. Bailey, 1954; J. Medhi, "Waiting time distribution
in a Poisson queue with a general bulk service rule", 1975). With a batch of one it is Erlang's formula C.

While all servers are busy, the numbers of waiting jobs are geometric with the ratio r that solves, between 0 and 1,

    at_once · rate · r^(batch + 1) − (arrivals + at_once · rate) · r + arrivals = 0.

A job that finds n waiting is taken at the (n // batch + 1)-th end of an invocation, so the wait of those who wait is
exponential again, with the rate at_once · rate · (1 − r^batch).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STEPS = 200
EULER = 0.5772156649015329


@dataclass(frozen=True)
class Waits:
    """How jobs wait. busy: the chance of having to wait at all; rate: of the exponential wait of those who do.

    batch: jobs of an invocation, on average. utilization: of the servers. None of it holds for a queue that grows.
    """

    busy: float
    rate: float
    batch: float
    utilization: float

    @property
    def mean(self) -> float:
        """Seconds, over all jobs."""
        return self.busy / self.rate

    def quantile(self, share: float) -> float:
        """Seconds within which this share of all jobs is taken."""
        beyond = 1 - share
        return 0.0 if self.busy <= beyond else math.log(self.busy / beyond) / self.rate


def harmonic(count: float) -> float:
    """The harmonic number, between whole numbers too: so many times one call's mean lasts the longest of `count` calls.

    (Calls of exponential length; Euler and Maclaurin's approximation, exact to 1 % from one on.)
    """
    return math.log(count) + EULER + 1 / (2 * count) - 1 / (12 * count**2)


def bulk_queue(arrivals: float, seconds: float, at_once: int, batch: int) -> Waits | None:
    """How jobs wait that arrive at this rate (per second), where an invocation lasts so long. None: the queue grows."""
    rate = 1 / seconds
    if arrivals >= at_once * rate * batch:
        return None
    ratio = _ratio(arrivals, at_once * rate, batch)
    offered = arrivals / rate
    term, idle_sum, busy_servers = 1.0, 0.0, 0.0
    for servers in range(at_once):  # term: offered^servers / servers!
        idle_sum += term
        busy_servers += servers * term
        term *= offered / (servers + 1)
    waiting = term / (1 - ratio)
    total = idle_sum + waiting
    servers_busy = (busy_servers + at_once * waiting) / total
    return Waits(
        busy=waiting / total,
        rate=at_once * rate * (1 - ratio**batch),
        batch=arrivals / (rate * servers_busy),
        utilization=servers_busy / at_once,
    )


def lane(arrivals: float, call_seconds: float, at_once: int, batch: int) -> Waits | None:
    """How jobs wait whose calls last so long on average: an invocation lasts as long as the longest of its calls.

    The larger the batches the longer that is, and the longer it is the larger they are; both are found together.
    """
    size, found = 1.0, None
    for _ in range(STEPS):
        found = bulk_queue(arrivals, call_seconds * max(1.0, harmonic(size)), at_once, batch)
        if found is None:
            size = min(float(batch), size + 0.5)
            if size == batch:
                return bulk_queue(arrivals, call_seconds * harmonic(size), at_once, batch)
            continue
        if abs(found.batch - size) < 1e-6:
            break
        size += 0.5 * (min(found.batch, batch) - size)
    return found


def _ratio(arrivals: float, service: float, batch: int) -> float:
    """The root between 0 and 1, by halving: at 0 the polynomial is positive, just below 1 it is negative."""
    low, high = 0.0, 1.0 - 1e-12
    for _ in range(STEPS):
        middle = (low + high) / 2
        value = service * middle ** (batch + 1) - (arrivals + service) * middle + arrivals
        low, high = (middle, high) if value > 0 else (low, middle)
    return (low + high) / 2
