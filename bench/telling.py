"""How soon a receiver knows: from the result's storing to the news's arrival, on a local stack of its own.

    make bench-telling [ARGS="--rate 10 --seconds 30"]

One channel after the other. The provider is a fake that answers within a second: time enough to follow a job over
WebSocket before it has ended. A result counts as stored from the instant that the worker writes into the row, which it
takes just before the write; news as received when all of it is there. Both are instants of this machine's clock. Cold
starts are warmed up before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import httpx2
import websockets.sync.client as websockets
from rich.console import Console
from rich.table import Table

from tests.fakes.receiver import Receiver

SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="
LATENCY_SECONDS = 1.0
WARM_JOBS = 40
WARM_AT_ONCE = 6
"""Cold functions are slow, so that more at once would meet the account's concurrency, which the local stack has too."""
BUSY = {429, 503}
BUSY_SECONDS = 0.5
WAIT_SECONDS_MAX = 120.0
FINAL = {"completed", "failed", "cancelled", "expired"}
KEYS_MAX = 100
"""DynamoDB reads so many rows in one request."""


@dataclass(frozen=True)
class Ear:
    """A receiver. `fields` are what a job needs to be told to it, `follow` what has to be done once it is accepted.

    heard: when the end of each job was heard of first, in Unix seconds.
    """

    fields: Mapping[str, Any]
    follow: Callable[[str], None]
    heard: Callable[[], dict[str, float]]


@contextmanager
def webhook(_stack: Mapping[str, Any]) -> Iterator[Ear]:
    """A receiver of webhooks."""
    with Receiver() as receiver:

        def heard() -> dict[str, float]:
            first: dict[str, float] = {}
            for request in list(receiver.requests):
                first.setdefault(json.loads(request.body)["data"]["job_id"], request.at)
            return first

        yield Ear({"webhook": {"url": receiver.url, "secret": SECRET}}, lambda _: None, heard)


@contextmanager
def websocket(stack: Mapping[str, Any]) -> Iterator[Ear]:
    """One connection that follows all jobs."""
    first: dict[str, float] = {}
    key = {"x-api-key": stack["api_key"]}
    with websockets.connect(stack["socket_url"], additional_headers=key, proxy=None) as socket:

        def read() -> None:
            for message in socket:
                at, frame = time.time(), json.loads(message)
                if frame["type"] == "job" and frame["job"]["status"] in FINAL:
                    first.setdefault(frame["job"]["job_id"], at)

        def follow(job_id: str) -> None:
            socket.send(json.dumps({"action": "subscribe", "job_id": job_id}))

        threading.Thread(target=read, name="ear", daemon=True).start()
        yield Ear({}, follow, lambda: dict(first))


CHANNELS = {"webhook": webhook, "websocket": websocket}


def main() -> int:
    """Submit at the rate, wait until all are told, print the distribution; 1 if some never were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=10.0, help="jobs a second (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for how long (default %(default)s)")
    chosen = parser.parse_args()
    stack = json.loads(Path(os.environ["BACKBURNER_STACK_FILE"]).read_text())
    slow = {"latency_seconds": LATENCY_SECONDS}
    httpx2.put(
        f"{os.environ['BACKBURNER_FAKE_PROVIDER']}/_control/config", json=slow, trust_env=False
    ).raise_for_status()
    table = Table(title="result stored to news received")
    for heading in ("channel", "jobs/s", "told", "p50 ms", "p95 ms", "p99 ms", "max ms"):
        table.add_column(heading, justify="right")
    complete = True
    for name, channel in CHANNELS.items():
        with channel(stack) as ear:
            waits, count, took = measure(stack, ear, chosen.rate, chosen.seconds)
        complete = complete and len(waits) == count
        cuts = statistics.quantiles(waits, n=100, method="inclusive")
        figures = (f"{value:.0f}" for value in (cuts[49], cuts[94], cuts[98], waits[-1]))
        table.add_row(name, f"{count / took:.1f}", f"{len(waits)} of {count}", *figures)
    Console().print(table)
    return 0 if complete else 1


def measure(stack: Mapping[str, Any], ear: Ear, rate: float, seconds: float) -> tuple[list[float], int, float]:
    """The waits of all jobs that were told, sorted, in ms; how many jobs there were, and how long it took to submit."""
    headers = {"Authorization": f"Bearer {stack['api_key']}"}
    limits = httpx2.Limits(max_connections=50, max_keepalive_connections=50)
    with (
        httpx2.Client(base_url=stack["api_url"], headers=headers, timeout=60, trust_env=False, limits=limits) as http,
        ThreadPoolExecutor(max_workers=50) as pool,
    ):

        def submit(number: int) -> str:
            key = {"Idempotency-Key": str(uuid.uuid4())}
            asked = {"prompt": f"job {number}", "max_tokens": 16, **ear.fields}
            reply = http.post("/jobs", headers=key, json=asked)
            while reply.status_code in BUSY:  # functions are cold, or all of the account's are at work
                time.sleep(BUSY_SECONDS)
                reply = http.post("/jobs", headers=key, json=asked)
            job_id = str(reply.raise_for_status().json()["job_id"])
            ear.follow(job_id)
            return job_id

        def all_told(ids: Sequence[str]) -> bool:
            return set(ids) <= ear.heard().keys()

        with ThreadPoolExecutor(max_workers=WARM_AT_ONCE) as few:
            warm = list(few.map(submit, range(WARM_JOBS)))
        wait(lambda: all_told(warm))
        count = round(rate * seconds)
        began = time.perf_counter()
        runs = []
        for number in range(count):
            time.sleep(max(0.0, began + number / rate - time.perf_counter()))
            runs.append(pool.submit(submit, number))
        ids = [run.result() for run in runs]
        took = time.perf_counter() - began
        wait(lambda: all_told(ids))
        told = ear.heard()
    stored = stored_at(stack, ids)
    return sorted(1000 * told[job_id] - stored[job_id] for job_id in ids if job_id in told), count, took


def wait(until: Callable[[], bool]) -> bool:
    """Wait for it; whether it came."""
    end = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < end:
        if until():
            return True
        time.sleep(0.1)
    return False


def stored_at(stack: Mapping[str, Any], ids: Sequence[str]) -> dict[str, int]:
    """When each result was stored, in epoch milliseconds."""
    dynamodb = boto3.client(
        "dynamodb",
        endpoint_url=stack["endpoint_url"],
        region_name=stack["region"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    table = stack["outputs"]["JobsTableName"]
    found: dict[str, int] = {}
    for start in range(0, len(ids), KEYS_MAX):
        keys: list[Any] = [{"job_id": {"S": job_id}} for job_id in ids[start : start + KEYS_MAX]]
        wanted: Any = {table: {"Keys": keys, "ProjectionExpression": "job_id, finished_at"}}
        while wanted:
            reply = dynamodb.batch_get_item(RequestItems=wanted)
            found |= {row["job_id"]["S"]: int(row["finished_at"]["N"]) for row in reply["Responses"][table]}
            wanted = reply.get("UnprocessedKeys")
    return found


if __name__ == "__main__":
    sys.exit(main())
