"""What a worker adds to the provider's time, and what jobs cost it in CPU and memory, on a local stack of its own.

    make bench-worker [ARGS="--jobs 1000 --batches 40"]

First the lane is paused and batches are given to the worker function one by one: of one job and of ten, in turn. An
invocation's time less the provider's is what it added: the function, its calls of AWS, and the emulator's own part in
both. Then the lane goes on, the provider answers at once, and the CPU time of the processes that run the ingest and the
worker function is read before and after so many jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.stack import Stack

LATENCY_SECONDS = 2.0
BATCH = 10
WARM_BATCHES = 3
WARM_JOBS = 60
WAIT_SECONDS_MAX = 300.0


@dataclass(frozen=True)
class Bench:
    """The stack and its fake provider, as `local` has started them."""

    stack: Stack
    provider: str

    def answer_after(self, seconds: float) -> None:
        """Set how long the provider takes."""
        config = {"latency_seconds": seconds}
        httpx2.put(f"{self.provider}/_control/config", json=config, trust_env=False).raise_for_status()

    def calls(self) -> int:
        """That the provider has answered."""
        ledger = httpx2.get(f"{self.provider}/_control/ledger", trust_env=False, timeout=60).json()
        return sum(call["billed"] for call in ledger)

    def batch(self, count: int) -> dict[str, Any]:
        """So many new jobs, as the event of the lane's poller."""
        new = set(self.stack.submit_new(count))
        sqs, url = self.stack.aws("sqs"), self.stack.outputs["StandardQueueUrl"]
        messages: list[Any] = []
        end = time.monotonic() + WAIT_SECONDS_MAX
        while len(messages) < count and time.monotonic() < end:
            reply = sqs.receive_message(
                QueueUrl=url, MaxNumberOfMessages=min(BATCH, count - len(messages)), WaitTimeSeconds=1,
                AttributeNames=["All"],
            )  # fmt: skip
            for message in reply.get("Messages", []):
                sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
                if json.loads(message["Body"])["job_id"] in new:  # a queue may deliver one that was deleted
                    messages.append(message)
        arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        records = [
            {"messageId": message["MessageId"], "receiptHandle": message["ReceiptHandle"], "body": message["Body"],
             "attributes": message["Attributes"], "messageAttributes": {}, "md5OfBody": message["MD5OfBody"],
             "eventSource": "aws:sqs", "eventSourceARN": arn, "awsRegion": self.stack.region}
            for message in messages
        ]  # fmt: skip
        return {"Records": records}

    def seconds_of(self, count: int) -> float:
        """How long the worker takes over a batch of so many. Raises ValueError if not every job was answered."""
        event = json.dumps(self.batch(count))
        functions = self.stack.aws("lambda")
        before = self.calls()
        began = time.perf_counter()
        reply = functions.invoke(FunctionName=self.stack.outputs["WorkerFunctionName"], Payload=event)
        took = time.perf_counter() - began
        body = json.loads(reply["Payload"].read())
        answered = self.calls() - before
        if body != {"batchItemFailures": []} or answered != count:
            raise ValueError(f"of a batch of {count} jobs {answered} were answered: {body}")
        return took

    def worker_mib(self) -> float:
        """The most memory that a worker process has had."""
        peaks = []
        for pid in self.stack.workers():
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            peaks += [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")]
        return max(peaks)


def batches(bench: Bench, console: Console, count: int) -> None:
    """Batches of one and of ten in turn, after some that are not counted; print what they took."""
    bench.stack.poll(on=False)
    bench.answer_after(LATENCY_SECONDS)
    for _ in range(WARM_BATCHES):
        bench.seconds_of(1)
    alone_mib = bench.worker_mib()
    for _ in range(WARM_BATCHES):
        bench.seconds_of(BATCH)
    ten_mib = bench.worker_mib()
    took: dict[int, list[float]] = {1: [], BATCH: []}
    for _ in track(range(count), "batches of one and of ten", console=console):
        for size, times in took.items():
            times.append(bench.seconds_of(size))
    table = Table("", "p50", "p99", "max", title=f"worker: what it adds to a call of {LATENCY_SECONDS:g} s, ms")
    for size, times in took.items():
        table.add_row(f"a batch of {size}", *(f"{1000 * (each - LATENCY_SECONDS):.0f}" for each in _cuts(times)))
    console.print(table)
    ratio = statistics.median(took[BATCH]) / statistics.median(took[1])
    console.print(f"Ten calls in one invocation take {ratio:.3f} times as long as one (target 1.15).")
    console.print(
        f"Memory: {alone_mib:.1f} MiB after single calls, {ten_mib:.1f} MiB after ten at once: "
        f"{(ten_mib - alone_mib) / (BATCH - 1):.2f} MiB a call."
    )


def _cuts(values: Sequence[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98], max(values)


def cpu(bench: Bench, console: Console, jobs: int) -> None:
    """Jobs that the provider answers at once; print the CPU seconds of a thousand."""
    bench.stack.poll(on=True)
    bench.answer_after(0.0)
    _run(bench, WARM_JOBS)
    before = bench.stack.cpu_seconds()
    began = time.monotonic()
    _run(bench, jobs)
    used = {name: after - before[name] for name, after in bench.stack.cpu_seconds().items()}
    table = Table("function", "CPU s per 1,000 jobs", title=f"{jobs} jobs, {time.monotonic() - began:.0f} s")
    for name, seconds in used.items():
        table.add_row(name.removesuffix("FunctionName"), f"{1000 * seconds / jobs:.2f}")
    table.add_row("together", f"{1000 * sum(used.values()) / jobs:.2f}")
    console.print(table)


def _run(bench: Bench, jobs: int) -> None:
    """Submit, and wait until the provider has answered all. Raises TimeoutError."""
    wanted = bench.calls() + jobs
    bench.stack.submit_new(jobs)
    end = time.monotonic() + WAIT_SECONDS_MAX
    while (answered := bench.calls()) < wanted:
        if time.monotonic() > end:
            raise TimeoutError(f"{wanted - answered} of {jobs} jobs were not answered")
        time.sleep(0.5)
    time.sleep(1)  # the last answers are stored


def main() -> int:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="whose CPU time is read (default %(default)s)")
    parser.add_argument("--batches", type=int, default=40, help="of one and of ten each (default %(default)s)")
    chosen = parser.parse_args()
    bench = Bench(Stack.found(), os.environ["BACKBURNER_FAKE_PROVIDER"])
    bench.stack.limit()
    console = Console()
    batches(bench, console, chosen.batches)
    cpu(bench, console, chosen.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
