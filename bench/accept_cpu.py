"""What `POST /jobs` costs, next to a bare handler that makes the same two calls of AWS: CPU time and memory.

    make bench-accept-cpu [ARGS="--blocks 15 --requests 100 --starts 9"]

Ours is functions/ingest, the other bench/bare. Each runs from the built layers in an interpreter of its own that has
nothing else, with the template's variables; AWS is a third process with its answers ready, so that only a handler's own
CPU time counts. Warm: the two take turns at a block of requests, after blocks that are not counted. Cold: fresh
interpreters, also in turn, from nothing imported to a handler that is built. Medians, and the range of all blocks or
starts. At the end it says which calls AWS saw, so that one too many would show.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

from tests.template.resolved import ROOT, code_folder, environment, shipped

FUNCTION = "IngestFunction"
BARE = ROOT / "bench" / "bare"
LAYERS = [ROOT / ".local" / "layers" / name / "python" for name in ("DependenciesLayer", "SharedLayer")]
WARM_BLOCKS = 3
TRACE = "Root=1-5759e988-bd862e3fe1be46a994272793;Parent=53995c3f42cd8ad8;Sampled=0"
"""Lambda gives one to each invocation, also where nothing is traced."""


class Function:
    """A function in a process of its own."""

    def __init__(self, folder: Path, variables: dict[str, str], event: str) -> None:
        program = str(ROOT / "bench" / "warm_function.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", program, str(folder), *map(str, LAYERS)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.start: dict[str, float] = self._heard()
        self._say(event)

    def cpu_ms(self, requests: int) -> float:
        """CPU milliseconds a request."""
        self._say(str(requests))
        heard = self._heard()
        if heard["statuses"] != [202]:
            raise ValueError(f"not every request was accepted: {heard['statuses']}")
        return float(heard["ms"])

    def end(self) -> None:
        """No more requests."""
        self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line: dict[str, Any] = json.loads(self._process.stdout.readline())
        return line


@contextmanager
def canned_aws() -> Iterator[str]:
    """Where AWS is."""
    with subprocess.Popen([sys.executable, "-m", "bench.canned_aws"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def calls(url: str) -> dict[str, list[int]]:
    """What AWS saw since it was last asked: of each operation, how many and the bytes of the last."""
    with urlopen(url) as reply:
        seen: dict[str, list[int]] = json.load(reply)
    return seen


def row(name: str, bare: Sequence[float], ours: Sequence[float], target: float | None, digits: int) -> list[str]:
    """A line of the table."""
    medians = statistics.median(bare), statistics.median(ours)
    return [
        name,
        *(
            f"{median:.{digits}f} ({min(column):.{digits}f}-{max(column):.{digits}f})"
            for median, column in zip(medians, (bare, ours), strict=True)
        ),
        f"{medians[1] / medians[0]:.2f}",
        f"{target:.1f}" if target else "-",
    ]


def main() -> None:
    """Measure cold, then warm; print both and the calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15, help="of requests, of each (default %(default)s)")
    parser.add_argument("--requests", type=int, default=100, help="in a block (default %(default)s)")
    parser.add_argument("--starts", type=int, default=9, help="of each (default %(default)s)")
    chosen = parser.parse_args()
    template = shipped()
    folders = {"bare": BARE, "ours": code_folder(template, FUNCTION)}
    event = json.dumps(json.loads((ROOT / "events" / "post_job.json").read_text()))  # in one line
    with canned_aws() as url:
        variables = {
            **environment(template, FUNCTION),
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_SESSION_TOKEN": "none",
            "AWS_LAMBDA_FUNCTION_NAME": "ingest",
            "_X_AMZN_TRACE_ID": TRACE,
            "LANG": "C.UTF-8",
            "HOME": os.devnull,
        }
        starts: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
        for _ in range(chosen.starts):
            for name, folder in folders.items():
                function = Function(folder, variables, event)
                starts[name].append({**function.start, "first_ms": function.cpu_ms(1)})
                function.end()
        warm: dict[str, list[float]] = {name: [] for name in folders}
        seen: dict[str, dict[str, list[int]]] = {}
        functions = {name: Function(folder, variables, event) for name, folder in folders.items()}
        for block in range(WARM_BLOCKS + chosen.blocks):
            for name, function in functions.items():
                calls(url)
                used = function.cpu_ms(chosen.requests)
                for operation, (count, size) in calls(url).items() if block >= WARM_BLOCKS else ():
                    entry = seen.setdefault(operation, {}).setdefault(name, [0, 0])
                    entry[0], entry[1] = entry[0] + count, size
                if block >= WARM_BLOCKS:
                    warm[name].append(used)
        for function in functions.values():
            function.end()
    table = Table("", "bare", "ours", "ratio", "target", title="POST /jobs: median (range)")
    table.add_row(*row("CPU of a warm request, ms", warm["bare"], warm["ours"], 1.5, 2))
    for name, key, target, digits in (
        ("CPU until ready, ms", "ready_ms", 1.6, 0),
        ("memory when ready, MiB", "mib", 1.6, 1),
        ("CPU of the first request, ms", "first_ms", None, 1),
    ):
        bare, ours = ([start[key] for start in starts[n]] for n in folders)
        table.add_row(*row(name, bare, ours, target, digits))
    Console().print(table)
    table = Table("call", *folders, title="AWS calls a warm request, and bytes of one")
    total = chosen.blocks * chosen.requests
    for operation, by in sorted(seen.items()):
        told = (by.get(name) for name in folders)
        table.add_row(operation, *(f"{each[0] / total:.3f} ({each[1]})" if each else "-" for each in told))
    Console().print(table)


if __name__ == "__main__":
    main()
