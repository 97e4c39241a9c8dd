"""The local AWS's function processes, seen from outside: to be killed."""

from __future__ import annotations

from pathlib import Path


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
