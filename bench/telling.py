"""How soon a receiver knows: from the result's storing to the webhook's arrival, on a local stack of its own.

    make bench-telling [ARGS="--rate 10 --seconds 30"]

The provider is a fake that answers at once. A result counts as stored from the instant that the worker writes into the
row, which it takes just before the write; a webhook as received when all of its body is there. Both are instants of
this machine's clock. Cold starts are warmed up before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import httpx2
from rich.console import Console
from rich.table import Table

from tests.fakes.receiver import Receiver

SECRET = "whsec_ZXhhbXBsZS1rZXktMDEyMzQ1Njc4OWFiY2RlZg=="
WARM_JOBS = 40
WAIT_SECONDS_MAX = 120.0
KEYS_MAX = 100
"""DynamoDB reads so many rows in one request."""


def main() -> int:
    """Submit at the rate, wait until all are told, print the distribution; 1 if some never were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=10.0, help="jobs a second (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for how long (default %(default)s)")
    chosen = parser.parse_args()
    stack = json.loads(Path(os.environ["BACKBURNER_STACK_FILE"]).read_text())
    headers = {"Authorization": f"Bearer {stack['api_key']}"}
    limits = httpx2.Limits(max_connections=50, max_keepalive_connections=50)
    with (
        httpx2.Client(base_url=stack["api_url"], headers=headers, timeout=60, trust_env=False, limits=limits) as http,
        Receiver() as receiver,
        ThreadPoolExecutor(max_workers=50) as pool,
    ):

        def submit(number: int) -> str:
            webhook = {"url": receiver.url, "secret": SECRET}
            reply = http.post("/jobs", json={"prompt": f"job {number}", "max_tokens": 16, "webhook": webhook})
            reply.raise_for_status()
            return str(reply.json()["job_id"])

        def all_told(ids: Sequence[str]) -> bool:
            return set(ids) <= received(receiver).keys()

        warm = list(pool.map(submit, range(WARM_JOBS)))
        wait(lambda: all_told(warm))
        count = round(chosen.rate * chosen.seconds)
        began = time.perf_counter()
        runs = []
        for number in range(count):
            time.sleep(max(0.0, began + number / chosen.rate - time.perf_counter()))
            runs.append(pool.submit(submit, number))
        ids = [run.result() for run in runs]
        took = time.perf_counter() - began
        complete = wait(lambda: all_told(ids))
        told = received(receiver)
    stored = stored_at(stack, ids)
    waits = sorted(1000 * told[job_id] - stored[job_id] for job_id in ids if job_id in told)
    table = Table(title=f"result stored to news received, {count} jobs at {count / took:.1f}/s")
    for heading in ("channel", "told", "p50 ms", "p95 ms", "p99 ms", "max ms"):
        table.add_column(heading, justify="right")
    cuts = statistics.quantiles(waits, n=100, method="inclusive")
    figures = (f"{value:.0f}" for value in (cuts[49], cuts[94], cuts[98], waits[-1]))
    table.add_row("webhook", f"{len(waits)} of {count}", *figures)
    Console().print(table)
    return 0 if complete else 1


def wait(until: Callable[[], bool]) -> bool:
    """Wait for it; whether it came."""
    end = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < end:
        if until():
            return True
        time.sleep(0.1)
    return False


def received(receiver: Receiver) -> dict[str, float]:
    """When each job's webhook came first, in Unix seconds."""
    first: dict[str, float] = {}
    for request in list(receiver.requests):
        first.setdefault(json.loads(request.body)["data"]["job_id"], request.at)
    return first


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
