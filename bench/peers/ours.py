"""Backburner on the same stage: the shipped template on a local stack of its own, as `local` has started it.

What a peer has as worker processes and threads is here the poller's concurrency and batch size.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from bench.peers.stage import WARM, Provider
from bench.stack import AT_ONCE, Stack
from cli.clients import create_client
from tests.fakes.emulated import kill

CONCURRENCY_MIN = 2
"""Lambda's own, of a poller."""
WARM_SECONDS_MAX = 120.0


class OurStage:
    """The stack, set up and warm; what `stage.Stage` is for a peer."""

    def __init__(self, units: int, threads: int, *, background: bool = False) -> None:
        self._stack = Stack.found()
        self.provider = Provider(os.environ["BACKBURNER_FAKE_PROVIDER"])
        self._units, self._threads = max(units, CONCURRENCY_MIN), threads
        self._gone: Counter[str] = Counter()
        self._run = str(time.time_ns())
        self._key = self._patient_key() if background else self._stack.api_key

    def __enter__(self) -> Self:
        self._stack.poll(batch=self._threads, concurrency=self._units)
        self.limit()
        self.provider.configure(latency_seconds=0.3, limits=None)
        self._gone = self._ended()
        self._warm_up()
        self.limit()
        self.provider.forget()
        self._gone = self._ended()
        return self

    def __exit__(self, *_: object) -> None:
        self.provider.configure(limits=None)

    def _warm_up(self) -> None:
        """Full batches for all workers, until as many processes as may work have worked."""
        wanted, sent = self._units * self._threads, 0
        until = time.monotonic() + WARM_SECONDS_MAX
        while sent == 0 or len(self._stack.workers()) < self._units:
            if time.monotonic() > until:
                raise SystemExit("The workers did not start.")
            self.submit([(f"{WARM}-{sent + number}", f"{WARM} {sent + number}") for number in range(wanted)])
            sent += wanted
            while sum(self.ends().values()) < sent and time.monotonic() < until:
                time.sleep(0.2)

    def _patient_key(self) -> str:
        """Of a client whose calls may go on at the provider without a worker."""
        clients = self._stack.table("ClientsTableName")
        return create_client(clients, f"patient-{self._run}", "Patient", 0, background=True)

    # What a scenario does

    def limit(self, **per_minute: int) -> None:
        """Set the model's limits, and forget what was learned of it; none for what is not named."""
        self._stack.limit(**per_minute)

    def submit(self, jobs: Sequence[tuple[str, str]], threads: int = AT_ONCE) -> None:
        """Submit pairs of key and prompt, so many at a time."""
        self._stack.submit([(f"{self._run}-{key}", prompt) for key, prompt in jobs], at_once=threads, key=self._key)

    def ends(self) -> dict[str, int]:
        """How many jobs completed and failed, by the table."""
        ended = self._ended() - self._gone
        return {name: ended[name] for name in ("completed", "failed")}

    def _ended(self) -> Counter[str]:
        pages = self._stack.aws("dynamodb").get_paginator("scan").paginate(
            TableName=self._stack.outputs["JobsTableName"],
            ProjectionExpression="#status",
            ExpressionAttributeNames={"#status": "status"},
        )  # fmt: skip
        return Counter(item["status"]["S"] for page in pages for item in page["Items"] if "status" in item)

    def kill(self, dice: random.Random) -> None:
        """Kill a worker process."""
        with suppress(IndexError):  # none is at work
            kill([dice.choice(self._stack.workers())])

    def cpu_seconds(self) -> float:
        """Of the functions that accept jobs and run them."""
        return sum(self._stack.cpu_seconds().values())
