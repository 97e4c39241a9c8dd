"""Celery with Redis as broker and result backend, set up for long tasks that must not be lost.

https://docs.celeryq.dev/en/stable/userguide/optimizing.html: `task_acks_late` and a prefetch multiplier of 1 for long
tasks. https://docs.celeryq.dev/en/stable/userguide/configuration.html: `task_reject_on_worker_lost`.
https://docs.celeryq.dev/en/stable/userguide/concurrency/index.html: processes (prefork), the default.
"""

from collections import Counter
from typing import Any

import openai
from celery import Celery

from bench.peers.queues.common import RATE, RECOVERY, REDIS, Job, ask, serve

app = Celery("bench", broker=REDIS + "/0", backend=REDIS + "/1")
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)
if RECOVERY:
    # https://docs.celeryq.dev/en/stable/getting-started/backends-and-brokers/redis.html#visibility-timeout: a message
    # comes back after an hour, and the timeout must exceed the longest task. All three have to be set. The last two
    # options let the sweep keep up with a low timeout (kombu's description of its Redis transport).
    sweep = {"unacked_restore_interval": 10, "unacked_restore_throttle": 1}
    app.conf.broker_transport_options = {"visibility_timeout": 30, **sweep}
    app.conf.result_backend_transport_options = {"visibility_timeout": 30}
    app.conf.visibility_timeout = 30


# https://docs.celeryq.dev/en/stable/userguide/tasks.html#automatic-retry-for-known-exceptions; three retries and full
# jitter are the defaults. https://docs.celeryq.dev/en/stable/userguide/tasks.html#Task.rate_limit: it is per worker, so
# the documentation has a queue of its own for a limit that is global, which one worker serves.
@app.task(
    name="complete",
    autoretry_for=(openai.APIError,),
    retry_backoff=True,
    rate_limit=f"{RATE}/m" if RATE else None,
)
def complete(prompt: str) -> str:
    """One job."""
    return ask(prompt)


def main() -> None:
    """Submit, and look at results."""
    waiting: list[Any] = []
    ended: Counter[str] = Counter()

    def submit(job: Job) -> None:
        # A task_id is no key for deduplication: another task under the same one is run as well.
        waiting.append(complete.delay(job.prompt))

    def ends() -> dict[str, int]:
        states = [(result, result.state) for result in waiting]
        waiting[:] = [result for result, state in states if state not in ("SUCCESS", "FAILURE")]
        ended.update(state for _, state in states if state in ("SUCCESS", "FAILURE"))
        return {"completed": ended["SUCCESS"], "failed": ended["FAILURE"]}

    serve(submit, ends)


if __name__ == "__main__":
    main()
