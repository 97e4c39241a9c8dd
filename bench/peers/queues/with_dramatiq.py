"""Dramatiq with Redis as broker, for results, and for the rate limiter; its retries are on by default.

https://dramatiq.io/guide.html#message-retries: 20 retries, backing off from 15 s. https://dramatiq.io/cookbook.html
#rate-limiting-work: whoever does not get through the limiter raises, and is retried with exponential backoff.
https://dramatiq.io/guide.html#results: stored where `store_results` says so.
"""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.rate_limits import WindowRateLimiter
from dramatiq.rate_limits.backends import RedisBackend as LimitsInRedis
from dramatiq.results import ResultFailure, ResultMissing, Results
from dramatiq.results.backends import RedisBackend

from bench.peers.queues.common import RATE, RECOVERY, REDIS, Job, ask, serve

# https://dramatiq.io/reference.html#dramatiq.brokers.redis.RedisBroker: a worker is taken for dead after a minute
# without a heartbeat; one command in a thousand looks for such workers, which stays as it is.
SECONDS_DEAD = 15 if RECOVERY else 60
broker = RedisBroker(url=REDIS + "/0", heartbeat_timeout=1000 * SECONDS_DEAD)
results = RedisBackend(url=REDIS + "/1")
broker.add_middleware(Results(backend=results))
dramatiq.set_broker(broker)


def limiter() -> WindowRateLimiter | None:
    """Of the shortest window, in whole seconds, that holds a whole number of calls."""
    if not RATE:
        return None
    window = next(seconds for seconds in range(1, 61) if RATE * seconds % 60 == 0)
    return WindowRateLimiter(LimitsInRedis(url=REDIS + "/2"), "provider", limit=RATE * window // 60, window=window)


LIMITER = limiter()


@dramatiq.actor(store_results=True)
def complete(prompt: str) -> str:
    """One job."""
    with LIMITER.acquire() if LIMITER else nullcontext():
        return ask(prompt)


def main() -> None:
    """Submit, and look at results."""
    waiting: list[Any] = []
    ended: Counter[str] = Counter()

    def outcome(message: Any) -> str | None:
        try:
            message.get_result(backend=results)
        except ResultMissing:
            return None
        except ResultFailure:
            return "failed"
        return "completed"

    def submit(job: Job) -> None:
        waiting.append(complete.send(job.prompt))  # nothing in it drops a second message for the same

    def ends() -> dict[str, int]:
        outcomes = [(message, outcome(message)) for message in waiting]
        waiting[:] = [message for message, found in outcomes if found is None]
        ended.update(found for _, found in outcomes if found is not None)
        return {"completed": ended["completed"], "failed": ended["failed"]}

    serve(submit, ends)


if __name__ == "__main__":
    main()
