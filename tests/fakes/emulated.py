"""The local AWS's function processes, seen from outside: to be killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

DEATH_SECONDS_MAX = 10


def worker_processes(function_name: str, queue_url: str) -> list[int]:
    """Ids of the processes that run this function for the stack with this queue."""
    return function_processes(function_name, f"STANDARD_QUEUE_URL={queue_url}")


def function_processes(function_name: str, *variables: str) -> list[int]:
    """Ids of the processes that run this function, with these variables (`NAME=value`) in their environment."""
    wanted = {line.encode() for line in (f"AWS_LAMBDA_FUNCTION_NAME={function_name}", *variables)}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended, or is not ours to look at
                continue
            if wanted <= set(environment):
                found.append(int(entry.name))
    return found


def kill(processes: Iterable[int]) -> None:
    """End processes by SIGKILL, and wait until they are dead: the emulator would give a dying one its next event."""
    dying = list(processes)
    for process in dying:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    end = time.monotonic() + DEATH_SECONDS_MAX
    while any(_runs(process) for process in dying):
        if time.monotonic() > end:
            raise TimeoutError(f"still running after SIGKILL: {dying}")
        time.sleep(0.01)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}
