"""How long `POST /jobs` takes on the running local stack, at a steady rate.

    make bench-accept [RATE=20] [SECONDS=15]

Prints the latency of accepted requests in milliseconds. Jobs before that warm up the functions' processes; cold starts
are another measurement. Workers and the model share the machine, as they do in a demo.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
from rich.console import Console
from rich.table import Table

WAVES = 4
WAVE = 8


def main() -> None:
    """Submit jobs at the rate and print the distribution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", type=Path, default=Path(".local/stack.json"), help="the running stack")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="for how long (default %(default)s)")
    chosen = parser.parse_args()
    stack = json.loads(chosen.stack.read_text())
    client = httpx2.Client(
        headers={"Authorization": f"Bearer {stack['api_key']}"},
        timeout=30,
        trust_env=False,
        limits=httpx2.Limits(max_connections=50, max_keepalive_connections=50),
    )
    url = f"{stack['api_url']}/jobs"

    def post(_: int) -> httpx2.Response:
        return client.post(url, json={"prompt": "Say yes.", "system_prompt": "Answer in one word.", "max_tokens": 4})

    def submit(index: int) -> tuple[int, float]:
        began = time.perf_counter()
        return post(index).status_code, 1000 * (time.perf_counter() - began)

    with ThreadPoolExecutor(max_workers=50) as pool:
        for _ in range(WAVES):
            warm = [
                client.get(f"{stack['api_url']}{reply.json()['poll_url']}") for reply in pool.map(post, range(WAVE))
            ]
            while any(reply.json()["status"] in ("queued", "processing") for reply in warm):
                time.sleep(0.5)
                warm = [client.get(reply.url) for reply in warm]
        count = round(chosen.rate * chosen.seconds)
        began = time.perf_counter()
        runs = []
        for index in range(count):
            time.sleep(max(0.0, began + index / chosen.rate - time.perf_counter()))
            runs.append(pool.submit(submit, index))
        replies = [run.result() for run in runs]
        took = time.perf_counter() - began
    accepted = sorted(latency for status, latency in replies if status == 202)
    table = Table(title=f"POST /jobs, {count} requests at {chosen.rate:g}/s ({count / took:.1f}/s reached)")
    for heading in ("accepted", "p50 ms", "p95 ms", "p99 ms", "max ms"):
        table.add_column(heading, justify="right")
    cuts = statistics.quantiles(accepted, n=100, method="inclusive")
    table.add_row(
        f"{len(accepted)} of {count}", *(f"{value:.0f}" for value in (cuts[49], cuts[94], cuts[98], accepted[-1]))
    )
    Console().print(table)
    refused = Counter(status for status, _ in replies if status != 202)
    if refused:
        Console().print("refused, by status:", dict(refused))


if __name__ == "__main__":
    main()
