"""Background processes of the stack: started once, found again, and ended without touching anybody else's.

A process is remembered with its start time, because its number alone may belong to something else by now.
It leads a group of its own, so that its children (the functions' processes) end with it.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from local.screen import LocalError
from local.state import ROOT, State, read_json, write_json

# Two readings of one start time differ by rounding and by corrections of the clock.
START_TOLERANCE_SECONDS = 5.0
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Running:
    """A live process of the stack."""

    name: str
    pid: int
    started: float
    port: int
    settings: dict[str, Any]

    @property
    def identity(self) -> str:
        """Differs from that of any earlier or later process."""
        return f"{self.pid}@{self.started:.0f}"


def find(state: State, name: str) -> Running | None:
    """The process, if it is alive and really ours."""
    record = read_json(state.processes / f"{name}.json")
    if not record:
        return None
    running = Running(**record)
    try:
        process = psutil.Process(running.pid)
        same = abs(process.create_time() - running.started) < START_TOLERANCE_SECONDS
        alive = process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return running if same and alive else None


def start(
    state: State,
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    port: int,
    is_ready: Callable[[], bool],
    seconds_max: float,
    settings: dict[str, Any] | None = None,
) -> Running:
    """Start a process with exactly this environment and wait until it serves."""
    state.logs.mkdir(parents=True, exist_ok=True)
    state.scratch.mkdir(parents=True, exist_ok=True)
    log = state.log(name)
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            env=dict(env),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = psutil.Process(child.pid).create_time()
    running = Running(name=name, pid=child.pid, started=started, port=port, settings=settings or {})
    write_json(state.processes / f"{name}.json", vars(running))
    deadline = time.monotonic() + seconds_max
    while not is_ready():
        if child.poll() is not None:
            raise LocalError(f"The {name} ended with status {child.returncode} while starting.", log)
        if time.monotonic() > deadline:
            stop(state, name)
            raise LocalError(f"The {name} did not answer within {seconds_max:.0f} s.", log)
        time.sleep(0.1)
    return running


def stop(state: State, name: str) -> bool:
    """End the process and its children; true if there was one."""
    record = state.processes / f"{name}.json"
    running = find(state, name)
    if running is not None:
        _end_group(running.pid)
    record.unlink(missing_ok=True)
    return running is not None


def _end_group(leader: int) -> None:
    """Ask, wait, insist. The group has the leader's number, which nobody else can get while a member lives."""
    members = [process for process in psutil.process_iter() if _group(process.pid) == leader]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in members:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        _, members = psutil.wait_procs(members, timeout=STOP_SECONDS)
        if not members:
            return


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def free_port(preferred: Sequence[int]) -> int:
    """The first of the preferred ports that nobody listens on; any other if all are taken."""
    for port in (*preferred, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise LocalError("No free port on 127.0.0.1.")


def answers(port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
