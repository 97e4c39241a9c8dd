"""Whether jobs, listings, positions and repairs become dearer as jobs pile up, on a local stack of its own.

    make bench-growth [ARGS="--sizes 100 1000 10000"]

The provider answers at once. At each size of the Jobs table: CPU seconds of the functions for the last jobs, and how
long a page of the list, a waiting job with its position, and a run of the repairer take. The emulator's tables are in
memory, and may slow down where DynamoDB would not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import httpx2
from rich.console import Console
from rich.table import Table

from bench.stack import Stack

LAST = 1000
"""Jobs over which CPU time is read, or all that were added if they are fewer."""
LOOKS = 30
REPAIRS = 7
WAIT_SECONDS_MAX = 900.0


def run(stack: Stack, count: int) -> None:
    """Submit so many, and wait until the last of them have ended. Raises TimeoutError."""
    ids = stack.submit_new(count)
    end = time.monotonic() + WAIT_SECONDS_MAX
    with stack.http() as http:
        for job_id in ids[-100:]:
            while http.get(f"/jobs/{job_id}").json()["status"] != "completed":
                if time.monotonic() > end:
                    raise TimeoutError(job_id)
                time.sleep(0.2)


def median_ms(act: Callable[[], object], times: int) -> float:
    """How long it takes."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took)


def grown(stack: Stack, added: int) -> list[float]:
    """Add so many jobs, and measure: CPU seconds per 1,000, then milliseconds of a list, a position, a repair."""
    last = min(added, LAST)
    if added > last:
        run(stack, added - last)
    before = sum(stack.cpu_seconds().values())
    run(stack, last)
    spent = sum(stack.cpu_seconds().values()) - before
    stack.poll(on=False)
    [waiting] = stack.submit_new(1)
    functions = stack.aws("lambda")
    with stack.http() as http:

        def look(path: str) -> httpx2.Response:
            return http.get(path).raise_for_status()

        if "position" not in look(f"/jobs/{waiting}").json():
            raise ValueError("the job does not wait")
        figures = [
            1000 * spent / last,
            median_ms(lambda: look("/jobs?limit=20"), LOOKS),
            median_ms(lambda: look(f"/jobs/{waiting}"), LOOKS),
            median_ms(
                lambda: functions.invoke(FunctionName=stack.outputs["RepairFunctionName"], Payload=b"{}"), REPAIRS
            ),
        ]
    stack.poll(on=True)
    return figures


def main() -> int:
    """Grow, and print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[100, 1_000, 10_000], help="default %(default)s")
    chosen = parser.parse_args()
    stack = Stack.found()
    url = f"{os.environ['BACKBURNER_FAKE_PROVIDER']}/_control/config"
    httpx2.put(url, json={"latency_seconds": 0.0}, trust_env=False).raise_for_status()
    stack.limit()
    run(stack, 60)  # warm
    console = Console()
    table = Table("jobs in the table", "CPU s per 1,000", "list, ms", "position, ms", "repair, ms")
    size = 60
    for wanted in sorted(chosen.sizes):
        console.print(f"growing to {wanted} jobs ...", style="dim")
        figures = grown(stack, wanted - size)
        size = wanted
        table.add_row(str(wanted), *(f"{figure:.1f}" for figure in figures))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
