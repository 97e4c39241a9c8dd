"""One function as Lambda runs it: imported in an interpreter that has its folder and its layers, and then invoked.

Run by `bench.accept_cpu` as a program of its own. Says on its standard output what it used, a JSON line at a time:
first of its start, then of as many requests as each number on its standard input asks for. What the function itself
prints goes nowhere.
"""

import sys
import time

began = time.process_time()  # before anything that the function imports, too
folder, *layers = sys.argv[1:]
sys.path[:0] = [folder, *layers]
from importlib import import_module  # noqa: E402

app = import_module("app")

ready = time.process_time()

import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402


class Context:
    """What a handler may ask of Lambda's context."""

    @staticmethod
    def get_remaining_time_in_millis() -> int:
        """As much as any endpoint has."""
        return 28_000


def mebibytes() -> float:
    """The most memory that this process has had; `getrusage` would count what had been its parent's, too."""
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(peak.split()[1]) / 1024


def main() -> None:
    """Tell and invoke in turn."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(1, "w", buffering=1)  # Lambda flushes each line as well
    print(json.dumps({"ready_ms": 1000 * (ready - began), "mib": mebibytes()}), file=said)
    event = sys.stdin.readline()
    for line in sys.stdin:
        events = [json.loads(event) for _ in range(int(line))]
        before = time.process_time()
        replies = [app.handler(event, Context()) for event in events]
        used = time.process_time() - before
        statuses = sorted({reply["statusCode"] for reply in replies})
        print(json.dumps({"ms": 1000 * used / len(events), "statuses": statuses}), file=said)


if __name__ == "__main__":
    main()
