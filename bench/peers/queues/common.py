"""What the queues written in Python share: their surroundings, the call to the provider, and the submitter's loop."""

import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

REDIS = os.environ["PEER_REDIS"]
PROVIDER = os.environ["PEER_PROVIDER"]
UNIT = int(os.environ.get("PEER_UNIT", "0"))
THREADS = int(os.environ.get("PEER_THREADS", "1"))
RATE = int(os.environ.get("PEER_RATE", "0"))
"""Calls a minute that the queue's own limiter is set to; 0 is none."""
RECOVERY = os.environ.get("PEER_RECOVERY") == "1"
"""Workers are going to be killed, so whatever finds lost jobs may look sooner than its documentation's default."""

# The queue retries, so the SDK must not: attempts would multiply.
_client = OpenAI(base_url=PROVIDER + "/v1", api_key=f"sk-bench-{UNIT:04d}", max_retries=0)


def ask(prompt: str) -> str:
    """One chat completion."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    reply = _client.chat.completions.create(model="bench", messages=messages, max_completion_tokens=60)
    return reply.choices[0].message.content or ""


_pool = ThreadPoolExecutor(16)


@dataclass(frozen=True)
class Job:
    """What is submitted: a key for deduplication, where the queue has one, and the prompt."""

    key: str
    prompt: str


def _at_once(submit: Callable[[Job], None], jobs: list[Job], threads: int) -> None:
    """Submit in groups of so many, whose threads set out together."""
    together = threading.Barrier(threads)

    def set_out(job: Job) -> None:
        together.wait()
        submit(job)

    list(_pool.map(set_out, jobs))


def serve(submit: Callable[[Job], None], ends: Callable[[], dict[str, int]]) -> None:
    """Obey standard input: `{"jobs": [[key, prompt], …], "threads": 8}` is submitted, `{}` asks how jobs ended."""
    for line in sys.stdin:
        asked = json.loads(line)
        jobs = [Job(*job) for job in asked.get("jobs", [])]
        if asked.get("threads", 1) > 1:
            _at_once(submit, jobs, asked["threads"])
        else:
            for job in jobs:
                submit(job)
        answer = {"submitted": len(jobs)} if jobs else ends()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
